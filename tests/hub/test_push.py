"""A published folder is complete and safe, and it is published only when it loads and drafts losslessly elsewhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_drelay import DRelayModel
from hf_drelay.cli import app
from hf_drelay.hub.check import check_files, check_loads_and_is_lossless, code_problems
from hf_drelay.hub.push import build_repository, check_repository, push


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
WORDS = {
    "title": "A tiny drafter",
    "license": "apache-2.0",
    "language": ["en"],
    "training": "None.",
    "limits": "All of them.",
    "data": [{"name": "GSM8K", "id": "openai/gsm8k", "part": "none", "license": "MIT"}],
    "results": [str(path) for path in sorted(RESULTS.glob("demo_*.json"))],
    "result_datasets": {"dev_gsm8k": "openai/gsm8k"},
}


@pytest.fixture
def checkpoint(tiny_folders, tmp_path) -> Path:
    """A checkpoint as training leaves it: weights and configuration without code, and the card's words."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_folders.drafter, folder, ignore=shutil.ignore_patterns("*.py"))
    (folder / "card.yaml").write_text(yaml.safe_dump(WORDS))
    (folder / "training_log.json").write_text(json.dumps({"recipe": {"steps": 123}}))
    (folder / "recipe.yaml").write_text("steps: 123\n")
    return folder


@pytest.fixture
def repository(checkpoint, tmp_path) -> Path:
    return build_repository(checkpoint, tmp_path / "repository", "owner/tiny")


def test_repository_is_complete(repository, checkpoint):
    names = {path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file()}
    code = {path.name for path in (ROOT / "modeling").glob("*.py")} - {"__init__.py"}
    assert names == code | {
        ".eval_results/dev_gsm8k.yaml",
        "README.md",
        "config.json",
        "custom_generate/generate.py",
        "model.safetensors",
        "recipe.yaml",
        "training_log.json",
        *(f"results/{path.name}" for path in RESULTS.glob("demo_*.json")),
    }
    assert json.loads((repository / "config.json").read_text())["auto_map"]["AutoModel"].endswith("DRelayModel")
    assert (repository / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    (entry, *_) = yaml.safe_load((repository / ".eval_results" / "dev_gsm8k.yaml").read_text())
    assert entry["dataset"]["id"] == "openai/gsm8k" and entry["value"] > 0


def test_repository_loads_and_is_lossless_in_a_clean_process(repository, tiny_folders):
    report = check_repository(repository)
    assert report["class"] == "DRelayModel" and len(report["prompts"]) == 6
    assert any(entry["acceptance_length"] > 1 for entry in report["prompts"]), "nothing was ever accepted"


def test_large_weights_are_split_and_keep_their_values_and_types(checkpoint, tmp_path):
    half = {name: tensor.bfloat16() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    from safetensors.torch import save_file

    save_file(half, checkpoint / "model.safetensors", metadata={"format": "pt"})
    repository = build_repository(checkpoint, tmp_path / "split", max_shard_bytes=20_000)
    shards = sorted(repository.glob("model-*.safetensors"))
    assert len(shards) > 1 and (repository / "model.safetensors.index.json").is_file()
    loaded = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert loaded.keys() == half.keys()
    assert all(torch.equal(loaded[name], half[name]) and loaded[name].dtype == torch.bfloat16 for name in half)
    target = json.loads((repository / "config.json").read_text())["target_name_or_path"]
    assert check_loads_and_is_lossless(repository, target, num_tokens=8)


def test_a_folder_that_does_not_load_is_refused(repository):
    (repository / "modeling_heads.py").unlink()
    with pytest.raises(RuntimeError, match="does not load and draft in a clean process"):
        check_repository(repository)


def test_a_folder_that_is_not_lossless_is_refused(repository):
    """A copy of the code that changes the target's logits stands for any fault of the loop."""
    view = repository / "draft_view.py"
    source = view.read_text()
    marker = "        return SpeculativeLoop("
    assert marker in source
    fault = '        call["logits_processor"].append(lambda ids, scores: scores.roll(1, dims=-1))\n' + marker
    view.write_text(source.replace(marker, fault))
    with pytest.raises(RuntimeError, match="is not lossless: . of 6 greedy texts differ"):
        check_repository(repository)


def test_patch_free_route_is_lossless_without_any_wrapper(repository, tiny_folders, tmp_path):
    script = """
import json, sys, torch
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, TextIteratorStreamer
target = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
drelay = AutoModel.from_pretrained(sys.argv[2], trust_remote_code=True)
assert not hasattr(GenerationMixin._assisted_decoding, "_hf_drelay_hook")
class Streamer:
    ids = []
    def put(self, value): self.ids += value.flatten().tolist()
    def end(self): self.ids.append("end")
ids = torch.tensor([[1, 2, 3, 1, 2]])
call = dict(attention_mask=torch.ones_like(ids), max_new_tokens=40)
route = dict(custom_generate=sys.argv[2], trust_remote_code=True)
view, streamer = drelay.with_options(loop_gate=float("-inf")), Streamer()
plain = target.generate(ids, do_sample=False, **call)[0].tolist()
drafted = target.generate(ids, do_sample=False, assistant_model=view, streamer=streamer, **call, **route)[0].tolist()
sampled = target.generate(ids, do_sample=True, assistant_model=drelay, **call, **route)
errors = []
for wrong in (dict(assistant_model=None), dict(assistant_model=drelay, num_beams=2)):
    try:
        target.generate(ids, do_sample=False, **call, **route, **wrong)
    except ValueError as error:
        errors.append(str(error))
assert not hasattr(GenerationMixin._assisted_decoding, "_hf_drelay_hook")
print(json.dumps([plain, drafted, streamer.ids, view.statistics.to_dict(), sampled.shape[1], errors]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_DRELAY_NO_HOOK": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", script, str(tiny_folders.target), str(repository)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, drafted, streamed, statistics, length, errors = json.loads(done.stdout.splitlines()[-1])
    assert drafted == plain
    assert streamed == [*plain, "end"]
    assert statistics["num_rounds"] > 0 and statistics["mean_stages"] > 1
    assert length == 45
    assert "needs a DRelay drafter" in errors[0] and "num_beams" in errors[1]


@pytest.mark.parametrize(
    "spoil, error, words",
    [
        (lambda folder: (folder / "config.json").unlink(), OSError, "no `config.json`"),
        (lambda folder: (folder / "model.safetensors").unlink(), OSError, "no `\\*.safetensors`"),
        (lambda folder: (folder / "card.yaml").unlink(), OSError, "no `card.yaml`"),
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(b""), ValueError, "may run code"),
        (lambda folder: (folder / "card.yaml").write_text("title: x"), ValueError, "lacks `license`"),
        (lambda folder: (folder / "config.json").write_text('{"blok_size": 3}'), ValueError, "blok_size"),
    ],
    ids=["no-config", "no-weights", "no-card", "pickle", "card-without-licence", "wrong-config"],
)
def test_unfit_checkpoint_is_refused(checkpoint, tmp_path, spoil, error, words):
    spoil(checkpoint)
    with pytest.raises(error, match=words):
        build_repository(checkpoint, tmp_path / "repository")


def test_output_with_old_files_is_refused(checkpoint, repository):
    with pytest.raises(OSError, match="not empty"):
        build_repository(checkpoint, repository)


@pytest.mark.parametrize("name", ["weights.pkl", "run.sh"])
def test_file_of_another_kind_is_found(repository, name):
    (repository / name).write_text("")
    with pytest.raises(ValueError, match="must not be published"):
        check_files(repository)


@pytest.mark.parametrize(
    "source",
    ["import numpy", "from hf_drelay import targets", "from . import compat", '"""\nfrom .missing import x\n"""'],
)
def test_lint_finds_what_the_hub_misreads(source):
    assert code_problems(source, {"compat"})
    assert not code_problems("import torch\nfrom .compat import x", {"compat"})


def test_push_to_hub_of_the_model_uploads_code_tags_and_weights(tiny_folders, monkeypatch):
    drelay = DRelayModel.from_pretrained(tiny_folders.drafter)
    seen = {}

    def upload(self, working_dir, repo_id, *arguments, **options):
        seen["names"] = {path.name for path in Path(working_dir).iterdir()}
        seen["card"] = (Path(working_dir) / "README.md").read_text()

    def stub_card(repo_id, tags=None, token=None):
        return ModelCard.from_template(ModelCardData(tags=tags), template_str="---\n{{ card_data }}\n---\n")

    api = SimpleNamespace(create_repo=lambda *a, **k: SimpleNamespace(repo_id="owner/tiny"))
    monkeypatch.setattr("transformers.utils.hub.hf_api", lambda: api)
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", stub_card)
    monkeypatch.setattr(type(drelay), "_upload_modified_files", upload)
    drelay.push_to_hub("owner/tiny")
    assert {"config.json", "model.safetensors", "modeling_drelay.py", "draft_trace.py"} <= seen["names"]
    assert all(tag in seen["card"] for tag in ("speculative-decoding", "custom_code", "hf-drelay"))


def test_push_uploads_the_folder_with_its_options(repository, checkpoint, monkeypatch):
    calls = {}

    class Api:
        def create_repo(self, repo_id, **options):
            calls["create"] = (repo_id, options)

        def create_branch(self, repo_id, **options):
            calls["branch"] = (repo_id, options)

        def upload_folder(self, **options):
            calls["upload"] = options
            return SimpleNamespace(pr_url=None, commit_url="address")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert push(checkpoint, "owner/tiny", repository, private=True, revision="next") == "address"
    assert calls["create"] == ("owner/tiny", {"private": True, "exist_ok": True})
    assert calls["branch"] == ("owner/tiny", {"branch": "next", "exist_ok": True})
    assert calls["upload"]["folder_path"] == str(repository) and not calls["upload"]["create_pr"]
    push(checkpoint, "owner/tiny", repository, create_pr=True)
    assert calls["upload"]["create_pr"]


def test_command_writes_and_checks_a_dry_run(checkpoint, tmp_path):
    output = tmp_path / "out"
    done = CliRunner().invoke(app, ["push", str(checkpoint), "--dry-run", "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert "lossless on 6 greedy texts" in done.output and (output / "README.md").is_file()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "`repo_id` is missing"),
        (["--dry-run"], "needs `--output`"),
        (["owner/x", "--target", "nowhere"], "Not published"),
    ],
)
def test_command_refuses_with_one_sentence(checkpoint, arguments, words):
    done = CliRunner().invoke(app, ["push", str(checkpoint), *arguments])
    assert done.exit_code == 2 and words in done.output

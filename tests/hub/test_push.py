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
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_drelay import DRelayModel
from hf_drelay.cli import app
from hf_drelay.evaluation.records import describe_drafter
from hf_drelay.hub.check import check_files, check_loads_and_is_lossless, code_problems
from hf_drelay.hub.checkpoint import write_checkpoint
from hf_drelay.hub.push import build_repository, check_repository, prepare, push, push_model


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
TARGET_ID = "owner/tiny-target"
WORDS = {
    "title": "A tiny drafter",
    "license": "apache-2.0",
    "language": ["en"],
    "training": "None.",
    "limits": "All of them.",
    "data": [{"name": "GSM8K", "id": "openai/gsm8k", "part": "none", "license": "MIT"}],
    "results": [str(RESULTS / "demo_grid.json"), str(RESULTS / "demo_lossless_math_code.json")],
    "result_datasets": {"dev_gsm8k": "openai/gsm8k"},
}


def set_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def set_words(folder: Path, **entries) -> None:
    path = folder / "card.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | entries))


@pytest.fixture
def checkpoint(tiny_folders, tmp_path) -> Path:
    """A checkpoint as training leaves it: weights and configuration without code, and the card's words."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_folders.drafter, folder, ignore=shutil.ignore_patterns("*.py"))
    set_config(folder, target_name_or_path=TARGET_ID)
    (folder / "card.yaml").write_text(yaml.safe_dump(WORDS))
    (folder / "training_log.json").write_text(json.dumps({"recipe": {"steps": 123}}))
    (folder / "recipe.yaml").write_text("steps: 123\n")
    return folder


@pytest.fixture(scope="session")
def measured(tiny_folders, tmp_path_factory) -> dict[str, list[dict]]:
    """Rows of both commands, of the drafter and of another one with other weights."""
    folder = tmp_path_factory.mktemp("measured")
    other = DRelayModel.from_pretrained(tiny_folders.drafter)
    with torch.no_grad():
        next(other.drafter.parameters()).add_(1)
    other.save_pretrained(folder / "other")
    (folder / "own.jsonl").write_text('{"turns": ["abcab"]}\n')
    flags = ["--target", tiny_folders.target, "--drafter", folder / "other", "--drafter", tiny_folders.drafter]
    flags += ["--data-dir", folder, "--tasks", "own", "--max-new-tokens", "8", "--quiet"]
    found = {}
    for name in ("benchmark", "check-lossless"):
        arguments = [name, *map(str, flags), f"--output={folder / name}.jsonl"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["/home/me/bin/hf-drelay", *arguments])  # rows tell the command
            done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        found[name] = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return found


def set_results(folder: Path, rows: dict[str, list[dict]], **entries) -> None:
    """Let the card name these rows as its results."""
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    set_words(folder, results=[f"{name}.jsonl" for name in rows], **entries)


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
        "results/demo_grid.json",
        "results/demo_lossless_math_code.json",
    }
    assert json.loads((repository / "config.json").read_text())["auto_map"]["AutoModel"].endswith("DRelayModel")
    assert (repository / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    (entry, *_) = ModelCard.load(repository / "README.md").data.eval_results
    assert entry.dataset_type == "openai/gsm8k" and entry.metric_value > 0


def test_repository_loads_and_is_lossless_in_a_clean_process(repository, tiny_folders):
    report = check_repository(repository, str(tiny_folders.target))
    assert report["class"] == "DRelayModel" and len(report["prompts"]) == 6
    assert any(entry["acceptance_length"] > 1 for entry in report["prompts"]), "nothing was ever accepted"


def test_large_weights_are_split_and_keep_their_values_and_types(checkpoint, tiny_folders, tmp_path):
    half = {name: tensor.bfloat16() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    from safetensors.torch import save_file

    save_file(half, checkpoint / "model.safetensors", metadata={"format": "pt"})
    repository = build_repository(checkpoint, tmp_path / "split", max_shard_size="20KB")
    shards = sorted(repository.glob("model-*.safetensors"))
    assert len(shards) > 1 and (repository / "model.safetensors.index.json").is_file()
    loaded = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert loaded.keys() == half.keys()
    assert all(torch.equal(loaded[name], half[name]) and loaded[name].dtype == torch.bfloat16 for name in half)
    assert check_loads_and_is_lossless(repository, str(tiny_folders.target), num_tokens=8)


def test_a_folder_that_does_not_load_is_refused_with_its_whole_error(repository, tiny_folders):
    config = repository / "configuration_drelay.py"
    config.write_text('raise ValueError("`x` is 1.\\nExpected 2.")\n' + config.read_text())
    with pytest.raises(
        RuntimeError, match=r"not load and draft in a clean process: ValueError: `x` is 1\. Expected 2\."
    ):
        check_repository(repository, str(tiny_folders.target))


def test_a_check_that_takes_too_long_is_an_error_with_the_limit(repository, tiny_folders):
    with pytest.raises(RuntimeError, match="more than 0 s"):
        check_loads_and_is_lossless(repository, str(tiny_folders.target), timeout_s=0.01)


def test_target_of_the_configuration_is_taken_from_the_cache_at_its_revision(repository, unchecked, monkeypatch):
    cached = {(TARGET_ID, "abc"): "/cache/snapshots/abc/config.json"}
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda repo_id, name, revision: cached.get((repo_id, revision))
    )
    with pytest.raises(ValueError, match=f"'{TARGET_ID}' is neither a folder nor in .*`hf download {TARGET_ID}`"):
        check_repository(repository)
    set_config(repository, target_revision="abc")
    check_repository(repository)
    assert unchecked == ["/cache/snapshots/abc"]


def test_a_folder_that_is_not_lossless_is_refused(repository, tiny_folders):
    """A copy of the code that changes the target's logits stands for any fault of the loop."""
    view = repository / "draft_view.py"
    source = view.read_text()
    marker = "        return SpeculativeLoop("
    assert marker in source
    fault = '        call["logits_processor"].append(lambda ids, scores: scores.roll(1, dims=-1))\n' + marker
    view.write_text(source.replace(marker, fault))
    with pytest.raises(RuntimeError, match="is not lossless: . of 6 greedy texts differ"):
        check_repository(repository, str(tiny_folders.target))


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


def add_weights(folder: Path) -> None:
    shutil.copyfile(folder / "model.safetensors", folder / "ema.safetensors")


def cut_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:50])


@pytest.mark.parametrize(
    "spoil, error, words",
    [
        (add_weights, ValueError, "also holds ema.safetensors"),
        (cut_weights, ValueError, "model.safetensors cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), ValueError, "config.json holds a list"),
        (lambda folder: (folder / "config.json").write_text("{"), ValueError, "config.json is no valid JSON"),
        (lambda folder: (folder / "training_log.json").write_text("[]"), ValueError, "training_log.json holds a list"),
        (
            lambda folder: set_words(folder, data=[{"name": "GSM8K"}]),
            ValueError,
            "`data` .* expected a list of entries",
        ),
        (lambda folder: set_words(folder, data=["openai/gsm8k"]), ValueError, "`data` .* expected a list of entries"),
        (lambda folder: set_words(folder, results="x.json"), ValueError, "`results` .* expected a list of files"),
        (lambda folder: set_words(folder, language=[False, "en"]), ValueError, "`language` .* is False"),
        (lambda folder: set_words(folder, language="English"), ValueError, "`language` .* is 'English'"),
        (lambda folder: set_words(folder, license="Apache 2.0"), ValueError, "`license` .* is 'Apache 2.0'"),
        (lambda folder: set_words(folder, license="other"), ValueError, "`license_name` .* is None"),
        (lambda folder: set_words(folder, base_model_relation="drafter"), ValueError, "is 'drafter'; expected one of"),
        (lambda folder: (folder / "config.json").unlink(), OSError, "no `config.json`"),
        (lambda folder: (folder / "model.safetensors").unlink(), OSError, "no `\\*.safetensors`"),
        (lambda folder: (folder / "card.yaml").unlink(), OSError, "no `card.yaml`"),
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(b""), ValueError, "may run code"),
        (lambda folder: (folder / "card.yaml").write_text("title: x"), ValueError, "lacks `license`"),
        (lambda folder: (folder / "card.yaml").write_text("- x"), ValueError, "holds a list"),
        (lambda folder: (folder / "card.yaml").write_text("a: b: c"), ValueError, "card.yaml` is no valid YAML"),
        (lambda folder: set_words(folder, result_datasets={"dev_gsm8k": "my data"}), ValueError, "'my data'"),
        (lambda folder: (folder / "config.json").write_text('{"blok_size": 3}'), ValueError, "blok_size"),
        (lambda folder: set_config(folder, target_name_or_path=None), ValueError, "`target_name_or_path` .* is empty"),
        (lambda folder: set_config(folder, target_name_or_path=str(folder)), ValueError, "a place on this machine"),
    ],
    ids=[
        *(
            "stray-weights",
            "cut-weights",
            "config-list",
            "config-cut",
            "log-list",
            "data-without-part",
            "data-of-text",
        ),
        *("results-of-text", "norwegian-unquoted", "language-by-name", "licence-by-name", "licence-without-name"),
        "relation",
        *("no-config", "no-weights", "no-card", "pickle", "card-without-licence", "card-of-another-kind", "no-yaml"),
        "data-set-without-id",
        *("wrong-config", "no-target", "local-target"),
    ],
)
def test_unfit_checkpoint_is_refused(checkpoint, tmp_path, spoil, error, words):
    spoil(checkpoint)
    with pytest.raises(error, match=words):
        build_repository(checkpoint, tmp_path / "repository")
    assert not list(tmp_path.glob("repository*"))  # nothing that looks like a repository


def test_entries_without_a_value_are_those_left_out(checkpoint, tmp_path):
    set_words(checkpoint, results=None, data=None, result_datasets=None, license="other", license_name="my-own")
    (checkpoint / "training_log.json").write_text('{"recipe": null}')
    repository = build_repository(checkpoint, tmp_path / "repository", "owner/tiny")
    card = ModelCard.load(repository / "README.md")
    assert "Not measured yet." in card.text and card.data.license_name == "my-own"


def test_quick_start_names_an_owner_to_fill_in(checkpoint, tmp_path):
    repository = build_repository(checkpoint, tmp_path / "repository")
    assert f'from_pretrained("OWNER/{checkpoint.name}"' in (repository / "README.md").read_text()
    with pytest.raises(ValueError, match="not/a/na me"):
        build_repository(checkpoint, tmp_path / "other", "not/a/na me")


def test_cells_of_the_card_stay_cells(checkpoint, tmp_path):
    set_words(checkpoint, data=[{"name": "a|b", "part": "one\ntwo", "license": "mit"}])
    card = (build_repository(checkpoint, tmp_path / "repository") / "README.md").read_text()
    assert "| a\\|b | one two | mit |" in card


def test_weights_that_are_not_finite_are_refused(checkpoint, tiny_folders, tmp_path):
    weights = load_file(checkpoint / "model.safetensors")
    weights["drafter.fc.weight"][0, 0] = float("nan")
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match="`drafter.fc.weight` holds numbers that are not finite"):
        prepare(checkpoint, tmp_path / "repository", "owner/tiny", target=str(tiny_folders.target))
    assert not list(tmp_path.glob("repository*"))


def test_output_with_old_files_is_refused(checkpoint, repository):
    with pytest.raises(OSError, match="not empty"):
        build_repository(checkpoint, repository)


@pytest.mark.parametrize("name", ["weights.pkl", "run.sh"])
def test_file_of_another_kind_is_found(repository, name):
    (repository / name).write_text("")
    with pytest.raises(ValueError, match="must not be published"):
        check_files(repository)


@pytest.mark.parametrize("name", ["recipe.yaml", "training_log.json", "README.md"])
def test_token_of_the_hub_is_found(repository, name):
    (repository / name).write_text("hub_token: hf_" + "aB3" * 11)
    with pytest.raises(ValueError, match=f"{name} holds what looks like a token"):
        check_files(repository)


def test_paths_of_this_machine_are_not_published(checkpoint, tmp_path):
    set_config(checkpoint, _name_or_path="/home/me/run7")
    recipe = {"responses": ["/home/me/answers/*.jsonl"], "drafter": "/home/me/first", "max_steps": 3}
    log = json.dumps({"recipe": recipe, "target": {"name": "/home/me/target"}})
    (checkpoint / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (checkpoint / "training_log.json").write_text(log)
    repository = build_repository(checkpoint, tmp_path / "repository", "owner/tiny")
    public = {"responses": ["*.jsonl"], "drafter": "first", "max_steps": 3}
    assert yaml.safe_load((repository / "recipe.yaml").read_text()) == public
    assert json.loads((repository / "training_log.json").read_text())["recipe"] == public
    assert "| `drafter` | first |" in (repository / "README.md").read_text()
    for path in repository.rglob("*"):
        assert not path.is_file() or b"/home/me" not in path.read_bytes(), path
    assert (checkpoint / "training_log.json").read_text() == log, "the run goes on with its own paths"


@pytest.mark.parametrize(
    "source",
    [
        "import numpy",
        "from hf_drelay import targets",
        "from . import compat",
        "__import__('numpy')",
        "run = exec",
        '"""\nfrom .missing import x\n"""',
    ],
)
def test_lint_finds_what_the_hub_misreads(source):
    assert code_problems(source, {"compat"})
    assert not code_problems("import torch\nfrom .compat import x", {"compat"})


@pytest.mark.parametrize("size", ["large", "5XB"])
def test_shard_size_that_is_none_is_refused(checkpoint, tmp_path, size):
    with pytest.raises(ValueError, match=f"`max_shard_size` is '{size}'"):
        build_repository(checkpoint, tmp_path / "repository", max_shard_size=size)


def test_output_that_is_a_file_is_refused(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="not empty"):
        build_repository(checkpoint, tmp_path / "file")


class Hub:
    """Stands for `HfApi`: notes what it is asked, and keeps what is uploaded."""

    def __init__(self, is_private=True, branch_status=None):
        self.is_private, self.branch_status = is_private, branch_status
        self.calls, self.files = {}, {}

    def __call__(self, token=None):
        self.calls["token"] = token
        return self

    def whoami(self):
        return {"name": "me"}

    def create_repo(self, repo_id, **options):
        self.calls["create"] = (repo_id, options)

    def model_info(self, repo_id):
        return SimpleNamespace(private=self.is_private)

    def create_branch(self, repo_id, branch, exist_ok):
        self.calls["branch"] = branch
        if self.branch_status is not None:
            response = SimpleNamespace(status_code=self.branch_status, headers={}, request=None)
            raise HfHubHTTPError("refused", response=response)

    def upload_folder(self, folder_path, **options):
        self.calls["upload"] = options
        folder = Path(folder_path)
        self.files = {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        return SimpleNamespace(pr_url="pr" if options["create_pr"] else None, commit_url="address")


@pytest.fixture
def hub(monkeypatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    return hub


@pytest.fixture
def unchecked(monkeypatch) -> list:
    """Leaves out the process that takes seconds; holds the targets that it would have checked with."""
    targets = []

    def check(repository, target):
        targets.append(target)
        return {"prompts": []}

    monkeypatch.setattr("hf_drelay.hub.push.check_loads_and_is_lossless", check)
    return targets


def test_push_uploads_the_folder_with_its_options(repository, hub):
    words = {"commit_message": "m", "commit_description": "d"}
    assert push(repository, "owner/tiny", private=True, token="t", revision="next", **words).commit_url == "address"
    assert hub.calls["token"] == "t" and hub.calls["branch"] == "next"
    assert hub.calls["create"] == ("owner/tiny", {"private": True, "exist_ok": True})
    upload = hub.calls["upload"]
    assert upload["repo_id"] == "owner/tiny" and upload["revision"] == "next" and not upload["create_pr"]
    assert words.items() <= upload.items()
    assert hub.files["model.safetensors"] == (repository / "model.safetensors").read_bytes()


@pytest.mark.parametrize("is_private", [True, False])
def test_push_never_uploads_to_a_repository_of_another_visibility(repository, hub, is_private):
    hub.is_private = is_private
    with pytest.raises(ValueError, match=f"`private` is {not is_private}, but owner/tiny exists"):
        push(repository, "owner/tiny", private=not is_private)
    assert not hub.files
    push(repository, "owner/tiny")
    assert hub.files


def test_pull_request_goes_against_a_branch_that_others_own(repository, hub):
    hub.branch_status = 403
    assert push(repository, "owner/tiny", revision="next", create_pr=True).pr_url == "pr"
    assert hub.calls["upload"]["create_pr"] and hub.calls["upload"]["revision"] == "next"
    with pytest.raises(HfHubHTTPError):
        push(repository, "owner/tiny", revision="next")


def test_push_to_a_pull_request_makes_no_branch(repository, hub):
    push(repository, "owner/tiny", revision="refs/pr/1")
    assert "branch" not in hub.calls and hub.calls["upload"]["revision"] == "refs/pr/1"


def test_model_is_published_as_its_folder_is(checkpoint, repository, tiny_folders, hub):
    drelay = DRelayModel.from_pretrained(checkpoint)
    commit = drelay.push_to_hub(
        "owner/tiny", target=str(tiny_folders.target), token="t", revision="next", commit_message="m", tags=["mine"]
    )
    assert commit.commit_url == "address"
    assert hub.calls["token"] == "t" and hub.calls["upload"]["commit_message"] == "m"
    expected = {path.relative_to(repository).as_posix(): path for path in repository.rglob("*") if path.is_file()}
    assert hub.files.keys() == expected.keys()
    for name in hub.files.keys() - {"README.md", "config.json"}:
        assert hub.files[name] == expected[name].read_bytes(), name
    text = hub.files["README.md"].decode()
    assert text.replace("- mine\n", "") == expected["README.md"].read_text() != text


def test_model_is_published_as_it_is_now_and_stored_as_it_was(checkpoint, tiny_folders, hub, unchecked):
    from safetensors.torch import save_file

    half = {name: tensor.bfloat16() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    save_file(half, checkpoint / "model.safetensors", metadata={"format": "pt"})
    drelay = DRelayModel.from_pretrained(checkpoint, dtype=torch.float32)
    drelay.config.loop_gate = -0.75
    with pytest.raises(ValueError, match=r"`card` is missing: the configuration \(`loop_gate`\) differs from"):
        drelay.push_to_hub("tiny", target=str(tiny_folders.target))
    words = {"license": "mit", "language": ["en"], "training": "As before."}
    drelay.push_to_hub("tiny", target=str(tiny_folders.target), card=words)
    assert "training_log.json" in hub.files and "recipe.yaml" in hub.files
    assert hub.calls["upload"]["repo_id"] == "me/tiny", "a bare name belongs to the account"
    assert hub.files["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    config = json.loads(hub.files["config.json"])
    assert (config["loop_gate"], config["dtype"]) == (-0.75, "float32")
    assert b'from_pretrained("me/tiny", trust_remote_code=True)' in hub.files["README.md"]


def test_card_stays_true_when_the_target_gets_its_public_name(checkpoint, tiny_folders, hub, unchecked):
    set_config(checkpoint, target_name_or_path=str(tiny_folders.target))
    drelay = DRelayModel.from_pretrained(checkpoint, dtype=torch.bfloat16)
    drelay.config.target_name_or_path = TARGET_ID
    drelay.push_to_hub("owner/tiny", target=str(tiny_folders.target))
    assert hub.files["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()


def test_model_in_memory_is_published_with_the_words_that_it_gets(checkpoint, tiny_folders, hub, unchecked, tmp_path):
    drelay = DRelayModel(DRelayModel.from_pretrained(checkpoint).config)
    drelay.config._name_or_path = drelay.name_or_path = ""
    with pytest.raises(ValueError, match="`card` is missing: a model .* at least license, language, training"):
        drelay.push_to_hub("owner/tiny", target=str(tiny_folders.target))
    words = {"license": "mit", "language": ["en"], "training": "Not at all."}
    results = [str(RESULTS / "demo_grid.json")]
    drelay.push_to_hub("owner/tiny", target=str(tiny_folders.target), card=words | {"results": results})
    card = hub.files["README.md"].decode()
    assert "# DRelay drafter for tiny-target\n" in card and "Not at all." in card and "license: mit" in card
    assert "results/demo_grid.json" in hub.files and "training_log.json" not in hub.files
    (tmp_path / "words.yaml").write_text(yaml.safe_dump(words | {"title": "Mine", "results": ["measured.json"]}))
    shutil.copyfile(RESULTS / "demo_grid.json", tmp_path / "measured.json")
    drelay.push_to_hub("owner/tiny", target=str(tiny_folders.target), card=tmp_path / "words.yaml")
    assert "# Mine\n" in hub.files["README.md"].decode() and "results/measured.json" in hub.files


def test_results_of_other_weights_are_not_published(checkpoint, tiny_folders, hub, tmp_path):
    drelay = DRelayModel.from_pretrained(checkpoint)
    with torch.no_grad():
        next(drelay.drafter.parameters()).add_(1)
    with pytest.raises(ValueError, match="the weights differ from"):
        drelay.push_to_hub("owner/tiny", target=str(tiny_folders.target))
    assert not hub.files
    words = {"license": "mit", "language": ["en"], "training": "Some more."}
    folder = write_checkpoint(drelay, tmp_path / "changed", words)
    assert not (folder / "training_log.json").exists() and not (folder / "recipe.yaml").exists()
    assert yaml.safe_load((folder / "card.yaml").read_text()) == words | {"results": []}


def test_rows_of_other_drafters_are_left_out(checkpoint, measured, tmp_path):
    set_results(checkpoint, measured, result_datasets={"own": "me/own"})
    repository = build_repository(checkpoint, tmp_path / "repository", "owner/tiny")
    card = (repository / "README.md").read_text()
    assert "| plain |" in card and "| drafter |" in card and "| drafter + DLoop auto |" in card
    assert "Losslessness, drafter, float32" in card
    assert "| other" not in card and "Losslessness, other" not in card
    (entries,) = (yaml.safe_load(path.read_text()) for path in (repository / ".eval_results").iterdir())
    assert entries and not any("other" in entry["dataset"]["task_id"] for entry in entries)


def test_rows_are_published_without_texts_and_local_paths(checkpoint, measured, tmp_path):
    rows = [row | {"target": "/home/me/models/target", "target_origin": "path"} for row in measured["benchmark"]]
    set_results(checkpoint, measured | {"benchmark": rows})
    repository = build_repository(checkpoint, tmp_path / "repository", "owner/tiny")
    card = (repository / "README.md").read_text()
    assert "Target target (path, " in card and "target target (path, " in card
    assert (
        "--output=benchmark.jsonl" in card
        and "`hf-drelay benchmark --target target " in card
        and "--data-dir measured0" in card
    )
    for name in measured:
        text = (repository / "results" / f"{name}.jsonl").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        assert found and {row.get("drafter") for row in found} <= {"drafter", None}
        assert not any({"text", "pieces"} & row.keys() for row in found)
    for path in repository.rglob("*"):
        text = path.read_bytes() if path.is_file() else b""
        assert b"/home/me" not in text and str(tmp_path.parent).encode() not in text, path


def test_rows_without_a_command_name_none(checkpoint, measured, tmp_path):
    rows = [row | {"command": None} for row in measured["benchmark"]]
    set_results(checkpoint, {"benchmark": rows})
    assert (
        "None" not in (build_repository(checkpoint, tmp_path / "out") / "README.md").read_text().split("## Results")[1]
    )


@pytest.mark.parametrize("name", ["benchmark", "check-lossless"])
def test_results_of_other_drafters_alone_are_refused(checkpoint, measured, tmp_path, name):
    rows = [row for row in measured[name] if row.get("drafter") != "drafter"]
    set_results(checkpoint, {name: rows})
    with pytest.raises(ValueError, match=rf"{name}.jsonl, whose drafters \(other\) have other weights than"):
        build_repository(checkpoint, tmp_path / "repository")


def test_rows_of_weights_in_another_type_are_those_of_the_drafter(checkpoint, measured, tmp_path):
    half = describe_drafter(DRelayModel.from_pretrained(checkpoint, dtype=torch.bfloat16))
    rows = [row | half if row["kind"] == "drafter" else row for row in measured["benchmark"]]
    set_results(checkpoint, {"benchmark": rows})
    assert (build_repository(checkpoint, tmp_path / "repository") / "README.md").is_file()


def test_structured_entries_tell_temperature_type_and_length(checkpoint, measured, tmp_path):
    sampled = [row | {"settings": row["settings"] | {"temperature": 0.7}} for row in measured["benchmark"]]
    rows = {"greedy": measured["benchmark"], "sampled": sampled}
    set_results(checkpoint, rows, result_datasets={"own": "me/own"})
    repository = build_repository(checkpoint, tmp_path / "repository", "owner/tiny")
    entries = yaml.safe_load((repository / ".eval_results" / "own.yaml").read_text())
    notes = {entry["dataset"]["task_id"]: entry["notes"] for entry in entries}
    assert "drafter; temperature 0, float32, at most 8 new tokens; median over 1 prompts" in notes["speedup_drafter"]
    assert "drafter; temperature 0.7, float32, at most 8" in notes["speedup_drafter_t0.7"]
    names = {result.metric_name for result in ModelCard.load(repository / "README.md").data.eval_results}
    assert {"speedup, drafter", "speedup, drafter, temperature 0.7"} <= names


def test_measurements_that_hide_each_other_are_refused(checkpoint, measured, tmp_path):
    rows = measured["benchmark"]
    set_results(checkpoint, {"first": rows, "second": rows}, result_datasets={"own": "me/own"})
    with pytest.raises(ValueError, match="two measurements of 'speedup_drafter' on 'me/own'"):
        build_repository(checkpoint, tmp_path / "repository")


def test_nothing_is_uploaded_when_the_check_fails(checkpoint, tiny_folders, hub):
    with pytest.raises(RuntimeError, match="does not load and draft"):
        DRelayModel.from_pretrained(checkpoint).push_to_hub("owner/tiny", target=str(tiny_folders.drafter))
    assert "create" not in hub.calls and not hub.files


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"safe_serialization": True}, TypeError, "safe_serialization"),
        ({"card": "nowhere.yaml"}, OSError, "`card` 'nowhere.yaml' is no file"),
        ({"card": {"license": "mit"}}, ValueError, "lacks `language`"),
        ({"card": str(ROOT / "examples" / "recipes" / "cpu-1h.yaml")}, ValueError, "lacks `license`"),
        ({"card": str(RESULTS / "demo_grid.json")}, ValueError, "lacks `license`"),
        ({"card": WORDS | {"results": ["nowhere.json"]}}, OSError, "nowhere.json, which does not exist"),
        ({"max_shard_size": "x"}, ValueError, "`max_shard_size` is 'x'"),
        ({"target": "nowhere"}, ValueError, "`target` 'nowhere' is neither a folder"),
    ],
)
def test_option_that_cannot_be_honored_is_refused_by_name(checkpoint, hub, options, error, words):
    with pytest.raises(error, match=words):
        DRelayModel.from_pretrained(checkpoint).push_to_hub("owner/tiny", **options)
    assert not hub.calls.get("create")


@pytest.mark.parametrize("repo_id", ["a/b/c", "owner/na me", "owner/x--y"])
def test_impossible_name_is_refused_before_any_work(hub, repo_id):
    with pytest.raises(ValueError, match=repo_id):
        push_model(None, repo_id)


def test_saving_does_not_publish(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="save first, then call `push_to_hub"):
        DRelayModel.from_pretrained(checkpoint).save_pretrained(tmp_path / "x", push_to_hub=True)


def run_without_package(script: str, tmp_path: Path, *arguments) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    block = """
import json, sys
class NoPackage:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_drelay":
            raise ImportError("the package is not installed here")
sys.meta_path.insert(0, NoPackage())
"""
    command = [sys.executable, "-W", "ignore", "-c", block + script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


def test_model_with_the_code_of_a_repository_is_pushed_as_transformers_does(repository, tmp_path):
    script = """
from pathlib import Path
from types import SimpleNamespace
import transformers.utils.hub as hub
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoModel

seen = {}
class Api:
    def create_repo(self, repo_id, **options):
        seen["create"] = seen["first"] = [repo_id, options["private"]]
        return SimpleNamespace(repo_id=repo_id)
def stub_card(repo_id, tags=None, token=None):
    return ModelCard.from_template(ModelCardData(tags=tags), template_str="---\\n{{ card_data }}\\n---\\n")
def upload(self, working_dir, repo_id, *arguments, **options):
    seen["names"] = sorted(path.name for path in Path(working_dir).iterdir())
    seen["card"] = (Path(working_dir) / "README.md").read_text()
    seen["options"] = [options["revision"], options["create_pr"]]
    return "commit"
hub.hf_api, hub.create_and_tag_model_card = Api, stub_card
hub.PushToHubMixin._upload_modified_files = upload
drelay = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
seen["answer"] = drelay.push_to_hub("owner/tiny", revision="next", create_pr=True, tags=["mine"])
try:
    drelay.push_to_hub("owner/tiny", card={})
except TypeError as error:
    seen["error"] = str(error)
del seen["create"]
try:
    drelay.push_to_hub("owner/tiny", private=True)
except ValueError as error:
    seen["refused"] = str(error)
print(json.dumps(seen))
"""
    seen = run_without_package(script, tmp_path, repository)
    assert seen["answer"] == "commit" and seen["first"] == ["owner/tiny", None] and seen["options"] == ["next", True]
    assert {"config.json", "model.safetensors", "modeling_drelay.py", "draft_trace.py"} <= set(seen["names"])
    assert all(tag in seen["card"] for tag in ("speculative-decoding", "custom_code", "hf-drelay", "mine"))
    assert "without a model card and unchecked" in seen["stderr"] and "`hf_drelay.DRelayModel" in seen["stderr"]
    assert "card" in seen["error"]
    assert "`private` is True, which cannot be ensured" in seen["refused"] and "create" not in seen


def test_pipeline_of_a_repository_is_lossless_without_the_package_and_after_saving_it_twice(
    repository, tiny_folders, tmp_path
):
    script = """
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
target_folder, folder, *others = sys.argv[1:]
target = AutoModelForCausalLM.from_pretrained(target_folder).eval()
tokenizer = AutoTokenizer.from_pretrained(target_folder)
call = dict(do_sample=False, max_new_tokens=40, return_full_text=False)
seen = {"plain": pipeline("text-generation", model=target, tokenizer=tokenizer)("abcab", **call), "drafted": []}
for other in others:
    drelay = AutoModel.from_pretrained(folder, trust_remote_code=True)
    generate = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drelay)
    seen["drafted"].append(generate("abcab", **call))
    seen["tau"] = drelay.statistics.acceptance_length
    drelay.save_pretrained(other)
    folder = other
print(json.dumps(seen))
"""
    others = [tmp_path / name for name in ("first", "second", "third")]
    seen = run_without_package(script, tmp_path, tiny_folders.target, repository, *others)
    assert seen["drafted"] == [seen["plain"]] * 3
    assert seen["tau"] > 1


def test_command_writes_and_checks_a_dry_run(checkpoint, tiny_folders, hub, tmp_path):
    output = tmp_path / "out"
    arguments = ["push", str(checkpoint), "--target", str(tiny_folders.target), "--dry-run", "--output", str(output)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "lossless on 6 greedy texts" in done.output and (output / "README.md").is_file()
    assert not hub.calls


@pytest.mark.parametrize("flags, private, url", [([], None, "address"), (["--private", "--create-pr"], True, "pr")])
def test_command_uploads_what_was_built(checkpoint, repository, tiny_folders, hub, unchecked, flags, private, url):
    arguments = ["push", str(checkpoint), "owner/tiny", "--target", str(tiny_folders.target), "--revision", "next"]
    done = CliRunner().invoke(app, [*arguments, *flags])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == url and unchecked == [str(tiny_folders.target)]
    assert hub.calls["create"] == ("owner/tiny", {"private": private, "exist_ok": True})
    assert hub.calls["upload"]["revision"] == "next" and hub.calls["upload"]["create_pr"] == ("--create-pr" in flags)
    expected = {path.relative_to(repository).as_posix(): path for path in repository.rglob("*") if path.is_file()}
    assert hub.files == {name: path.read_bytes() for name, path in expected.items()}


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "`repo_id` is missing"),
        (["--dry-run"], "needs `--output`"),
        (["owner/x", "--target", "nowhere"], "`target` 'nowhere' is neither a folder"),
        (["not/a/name"], "not/a/name"),
    ],
)
def test_command_refuses_with_one_sentence(checkpoint, arguments, words):
    done = CliRunner().invoke(app, ["push", str(checkpoint), *arguments])
    assert done.exit_code == 2 and words in done.output

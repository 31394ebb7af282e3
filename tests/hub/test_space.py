"""The Space folder is ready: its front matter is what the Hub reads, and its application builds without ZeroGPU."""

import runpy
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import RepoCard


SPACE = Path(__file__).resolve().parents[2] / "hub_cards" / "space"


def test_front_matter_names_what_a_space_needs():
    data = RepoCard((SPACE / "README.md").read_text(), ignore_metadata_errors=False).data.to_dict()
    assert data["sdk"] == "gradio" and (SPACE / data["app_file"]).is_file()
    assert data["sdk_version"].split(".")[0] == version("gradio").split(".")[0]
    assert {"title", "emoji", "colorFrom", "colorTo", "license", "models"} <= set(data)
    assert len(data["short_description"]) <= 60  # the Hub refuses longer ones
    assert "hf-drelay[demo" in (SPACE / "requirements.txt").read_text()


@pytest.mark.parametrize("zero_gpu", [False, True], ids=["cpu", "zero-gpu"])
def test_app_asks_for_a_device_only_where_there_is_zero_gpu(monkeypatch, zero_gpu):
    durations = []

    def decorate(duration):
        durations.append(duration)
        return lambda function: function

    monkeypatch.setitem(sys.modules, "spaces", SimpleNamespace(GPU=decorate) if zero_gpu else None)
    space = runpy.run_path(str(SPACE / "app.py"))
    assert space["on_device"](len) is len
    assert bool(durations) == zero_gpu


def test_app_builds_with_the_target_of_its_variables(monkeypatch, tiny_folders):
    monkeypatch.setenv("DRELAY_TARGET", str(tiny_folders.target))
    monkeypatch.setenv("DRELAY_DRAFTER", str(tiny_folders.drafter))
    monkeypatch.setitem(sys.modules, "spaces", None)
    app = runpy.run_path(str(SPACE / "app.py"))["make_app"]()
    assert "Target **target**" in str(app.get_config_file())

"""The Space folder is ready: its front matter is what the Hub reads, and its application builds without ZeroGPU."""

import re
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import RepoCard

from hf_drelay.hub.space import build_space


SPACE = Path(__file__).resolve().parents[2] / "hub_cards" / "space"


def test_front_matter_names_what_a_space_needs():
    data = RepoCard((SPACE / "README.md").read_text(), ignore_metadata_errors=False).data.to_dict()
    assert data["sdk"] == "gradio" and (SPACE / data["app_file"]).is_file()
    assert data["sdk_version"].split(".")[0] == version("gradio").split(".")[0]
    assert {"title", "emoji", "colorFrom", "colorTo", "license", "models"} <= set(data)
    assert len(data["short_description"]) <= 60  # the Hub refuses longer ones


def test_built_space_brings_everything_it_imports(tmp_path, tiny_folders):
    folder = build_space(tmp_path / "space", str(tiny_folders.drafter))
    packages = {re.split(r"[<>=!~ \[]", line)[0] for line in (folder / "requirements.txt").read_text().splitlines()}
    assert {"torch", "transformers", "gradio", "gguf"} <= packages and "hf-drelay" not in packages
    assert (folder / "drafter" / "model.safetensors").is_file()
    script = "import hf_drelay.modeling, hf_drelay.demo.app, app; print(hf_drelay.modeling.__file__)"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(folder)


def test_space_does_not_write_over_what_is_there(tmp_path, tiny_folders):
    (tmp_path / "old").write_text("")
    with pytest.raises(OSError, match="is not empty"):
        build_space(tmp_path, str(tiny_folders.drafter))


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

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

from hf_drelay import DRelayModel
from hf_drelay.demo.app import load_engine
from hf_drelay.hub.space import build_space


SPACE = Path(__file__).resolve().parents[2] / "hub_cards" / "space"


def test_front_matter_names_what_a_space_needs():
    data = RepoCard((SPACE / "README.md").read_text(), ignore_metadata_errors=False).data.to_dict()
    assert data["sdk"] == "gradio" and (SPACE / data["app_file"]).is_file()
    assert data["sdk_version"].split(".")[0] == version("gradio").split(".")[0]
    assert {"title", "emoji", "colorFrom", "colorTo", "license", "models"} <= set(data)
    assert len(data["short_description"]) <= 60  # the Hub refuses longer ones
    # A Space has Python 3.10 unless it says otherwise, which this package does not support.
    assert tuple(map(int, data["python_version"].split("."))) >= (3, 11)


def test_built_space_brings_everything_it_imports(tmp_path, tiny_folders):
    folder = build_space(tmp_path / "space", str(tiny_folders.drafter))
    packages = {re.split(r"[<>=!~ \[]", line)[0] for line in (folder / "requirements.txt").read_text().splitlines()}
    assert {"torch", "transformers", "gradio", "gguf"} <= packages and "hf-drelay" not in packages
    assert (folder / "drafter" / "model.safetensors").is_file()
    script = "import hf_drelay.modeling, hf_drelay.demo.app, app; print(hf_drelay.modeling.__file__)"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(folder)


def test_space_takes_all_shards_or_writes_nothing(tmp_path, tiny_folders):
    drafter = tmp_path / "sharded"
    DRelayModel.from_pretrained(tiny_folders.drafter).save_pretrained(drafter, max_shard_size="20KB")
    folder = build_space(tmp_path / "space", str(drafter))
    DRelayModel.from_pretrained(folder / "drafter")
    for path in drafter.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(OSError, match="lacks `config.json` or"):
        build_space(tmp_path / "empty", str(drafter))
    assert not (tmp_path / "empty").exists()


def test_space_does_not_write_over_what_is_there(tmp_path, tiny_folders):
    (tmp_path / "old").write_text("")
    with pytest.raises(OSError, match="is not empty"):
        build_space(tmp_path, str(tiny_folders.drafter))


@pytest.mark.parametrize(
    "has_package, variable, is_zero_gpu",
    [(False, None, False), (True, None, False), (True, "true", True), (True, "1", True), (True, "false", False)],
    ids=["elsewhere", "cpu-space", "zero-gpu", "zero-gpu-1", "not-zero-gpu"],
)
def test_app_asks_for_a_device_only_where_there_is_zero_gpu(
    monkeypatch, tiny_folders, has_package, variable, is_zero_gpu
):
    durations, devices = [], []

    def decorate(duration):
        durations.append(duration)
        return lambda function: function

    def load_on_cpu(target, drafter, device, **limits):
        devices.append(device)
        return load_engine(target, drafter, **limits)

    monkeypatch.setenv("DRELAY_TARGET", str(tiny_folders.target))
    monkeypatch.setenv("DRELAY_DRAFTER", str(tiny_folders.drafter))
    monkeypatch.delenv("SPACES_ZERO_GPU", raising=False)
    if variable is not None:
        monkeypatch.setenv("SPACES_ZERO_GPU", variable)
    monkeypatch.setitem(sys.modules, "spaces", SimpleNamespace(GPU=decorate) if has_package else None)
    monkeypatch.setattr("hf_drelay.demo.app.load_engine", load_on_cpu)
    warmed = []
    monkeypatch.setattr("hf_drelay.demo.engine.DemoEngine.warm_up", lambda engine: warmed.append(engine))
    app = runpy.run_path(str(SPACE / "app.py"))["make_app"]()
    assert "Target **target**" in str(app.get_config_file())
    assert len(durations) == (2 if is_zero_gpu else 0)
    assert devices == ["cuda" if is_zero_gpu else None]
    assert bool(warmed) != is_zero_gpu

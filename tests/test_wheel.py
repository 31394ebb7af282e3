"""The built wheel holds everything and works away from the source tree."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]


def test_wheel_imports_outside_the_source_tree(tmp_path):
    source = tmp_path / "source"  # building leaves files behind
    shutil.copytree(ROOT / "hf_drelay", source / "hf_drelay")
    shutil.copytree(ROOT / "modeling", source / "modeling")
    shutil.copytree(ROOT / "hub_cards" / "templates", source / "hub_cards" / "templates")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import hf_drelay, hf_drelay.cli, hf_drelay.training.trainer, hf_drelay.modeling.modeling_drelay as m;"
        "from hf_drelay import DRelayModel; print(hf_drelay.__file__, m.__file__)"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert all(Path(path).is_relative_to(site) for path in result.stdout.split())
    for name in ("py.typed", "demo/style.css", "hub/templates/model_card.md.jinja"):
        assert (site / "hf_drelay" / name).exists()

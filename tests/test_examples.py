"""Every example runs, on the demo target where it needs one, and says what its header promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("[0-9]*.py"))


@pytest.mark.demo_target
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
    assert ": False" not in done.stdout, "a comparison with plain decoding failed"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_names_its_command_and_its_need(path):
    text = path.read_text()
    assert f"python examples/{path.name}" in text and "\nNeeds: " in text
    assert len(text.splitlines()) <= 80

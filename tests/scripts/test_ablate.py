"""The ablation script on a tiny target: every arm trains and is measured, rows add up, the interval holds the mean."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_drelay.modeling.draft_statistics import DraftStatistics
from hf_drelay.training.config import DRelayTrainingConfig
from hf_drelay.training.run import train


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "ablate.py"


@pytest.fixture(scope="module")
def ablate():
    spec = importlib.util.spec_from_file_location("ablate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_interval_holds_the_mean_and_shrinks_with_the_spread(ablate):
    wide = [DraftStatistics(num_committed=[1, 1]), DraftStatistics(num_committed=[3, 3])] * 10
    narrow = [DraftStatistics(num_committed=[2, 2])] * 20
    low, high = ablate.bootstrap_interval(wide)
    assert 1.0 < low < 2.0 < high < 3.0
    assert ablate.bootstrap_interval(narrow) == [2.0, 2.0]


def test_arms_add_rows_and_replace_their_own(recipe, target_folder, responses_file, tmp_path):
    base = train(DRelayTrainingConfig(**recipe | {"max_steps": 1}))
    output = tmp_path / "ablation.json"

    def call(arm):
        subprocess.run(
            [sys.executable, SCRIPT, "--arm", arm, "--base", base, "--target", target_folder]
            + ["--responses", responses_file, "--held-out", tmp_path / "held_out.jsonl", "--minutes", "0.0001"]
            + ["--output", output],
            check=True,
            capture_output=True,
        )

    (tmp_path / "held_out.jsonl").write_text("".join(responses_file.read_text().splitlines(keepends=True)[:3]))
    for arm in ("pair path alone", "joint, loop-aware", "joint, backbone alone", "pair path alone"):
        call(arm)
    rows = json.loads(output.read_text())["rows"]
    assert [row["arm"] for row in rows] == ["joint, loop-aware", "joint, backbone alone", "pair path alone"]
    for row in rows:
        assert row["num_responses"] == 3 and row["num_steps"] >= 1
        for way in ("one stage", "DLoop"):
            low, high = row[way]["interval"]
            assert low <= row[way]["acceptance_length"] <= high
    assert rows[1]["one stage"]["slot_classes"]["repaired_right"] == 0

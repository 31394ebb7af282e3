"""The script that trains arms, on a tiny target: arms train and are measured, rows add up, intervals hold the mean."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.training.config import DRelayTrainingConfig
from hf_drelay.training.run import drafter_config, train


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_arms.py"


@pytest.fixture(scope="module")
def arms():
    spec = importlib.util.spec_from_file_location("train_arms", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arms_add_rows_and_replace_their_own(recipe, target_folder, responses_file, tmp_path):
    base = train(DRelayTrainingConfig(**recipe | {"max_steps": 1}))
    output = tmp_path / "rows.json"

    def call(study, *more, output):
        run = subprocess.run(
            [sys.executable, SCRIPT, "--study", study, "--base", base, "--target", target_folder]
            + ["--responses", responses_file, "--held-out", tmp_path / "held_out.jsonl", "--minutes", "0.0001"]
            + ["--output", output, *more],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert run.returncode == 0, run.stderr[-2000:]

    def train_one(arm, study="ablation", *more, output=output):
        """Measure the pace of an arm, and train it."""
        pace = tmp_path / f"{study}_pace.json"
        call(study, "--pace", arm, output=pace)
        assert json.loads(pace.read_text())["arms"][arm] > 0
        call(study, "--arm", arm, "--pace-file", pace, *more, output=output)

    (tmp_path / "held_out.jsonl").write_text("".join(responses_file.read_text().splitlines(keepends=True)[:3]))
    for arm in ("pair path alone", "joint, loop-aware", "joint, backbone alone", "pair path alone"):
        train_one(arm)
    train_one("EAGLE-3", "comparison", "--keep", tmp_path / "kept", output=tmp_path / "comparison.json")
    record = json.loads(output.read_text())
    assert record["num_responses"] == 3
    pace = json.loads((tmp_path / "ablation_pace.json").read_text())
    assert record["seconds_per_step"] == pace["seconds_per_step"]
    assert set(pace["arms"]) == {
        "pair and copy path alone",
        "joint, loop-aware",
        "joint, backbone alone",
        "pair path alone",
    }
    rows = record["rows"] + json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == ["joint, loop-aware", "joint, backbone alone", "pair path alone", "EAGLE-3"]
    assert DRelayModel.from_pretrained(tmp_path / "kept").config.backbone == "eagle3"
    for row in rows:
        assert row["num_steps"] >= 1
        for way in ("one stage", "DLoop"):
            tokens, rounds = map(sum, zip(*row[way]["responses"], strict=True))
            assert len(row[way]["responses"]) == 3 and tokens / rounds == row[way]["acceptance_length"]
    assert [row["against"] for row in rows] == ["joint", "joint", "full", "relay"]
    assert rows[1]["one stage"]["slot_classes"]["repaired_right"] == 0
    assert rows[3]["pool_coverage"] is None
    for row in rows[:3]:
        assert 0 <= row["pool_coverage"]["backbone"] <= 1 and set(row["pool_coverage"]) == {"backbone", "head"}


@pytest.mark.parametrize("arm", ["relay", "DFlash", "DFlash 2", "Domino", "DSpark"])
def test_arm_of_the_comparison_keeps_the_backbone_and_has_its_own_head(arms, arm):
    """The demo drafter's sizes: heads within a twentieth of each other, and the backbone's weights where they were."""
    sizes = {"block_size": 5, "layout": "shifted", "draft_vocab_size": 8192, "selector_hidden_size": 192}
    sizes |= {"pair_rank": 96, "use_repaired_feature": False, "target_layer_ids": [8, 14, 20, 27]}
    base = DRelayModel(DRelayConfig.preset("smollm2-135m", **sizes))
    fields, _ = arms.COMPARISON[arm]
    drelay = arms.build_arm(base, None, fields, 0)
    same = drelay.drafter.state_dict()
    for name, weight in base.drafter.state_dict().items():
        assert torch.equal(same[name], weight)
    if arm != "DFlash":
        own = sum(p.numel() for p in drelay.parameters()) - sum(p.numel() for p in base.drafter.parameters())
        relay = sum(p.numel() for p in base.selector.parameters())
        assert abs(own / relay - 1) < 0.05


def test_minutes_are_steps_at_the_measured_pace(arms):
    pace = {"seconds_per_step": 2.0, "arms": {"relay": 1.0, "DFlash": 0.5}}
    assert arms.steps_in(3.0, pace, "relay") == 90 and arms.steps_in(3.0, pace, "DFlash") == 180
    with pytest.raises(SystemExit, match=r"no pace of 'Domino'; measure it with --pace 'Domino'"):
        arms.steps_in(3.0, pace, "Domino")


def test_rows_of_other_circumstances_are_refused(arms, tmp_path):
    output = tmp_path / "rows.json"
    arms.add_row(output, {"minutes": 5.0}, {"arm": "a", "seed": 0})
    with pytest.raises(SystemExit, match=r"another `minutes` \(5.0 instead of 4.0\)"):
        arms.add_row(output, {"minutes": 4.0}, {"arm": "b", "seed": 0})
    assert [row["arm"] for row in json.loads(output.read_text())["rows"]] == ["a"]


def test_arms_of_the_recipe_differ_from_the_first_in_what_they_are_named_after(arms, tmp_path):
    def choices(arm):
        fields, run = arms.RECIPE[arm]
        assert fields is None
        config = DRelayTrainingConfig(output_dir=str(tmp_path), **run)
        drafter = drafter_config(config, None).to_dict()
        assert drafter["target_layer_ids"] == [8, 14, 20, 27]  # one folder of features serves all
        return {name: drafter[name] for name in ("layout", "block_size", "draft_vocab_size", "num_hidden_layers")} | {
            name: getattr(config, name) for name in ("start_from_target", "base_loss", "num_anchors", "learning_rate")
        }

    first, *others = arms.RECIPE
    for arm in others:
        base = first if choices(arm)["start_from_target"] or arm == "from random weights" else "from random weights"
        changed = [name for name, value in choices(arm).items() if value != choices(base)[name]]
        assert len(changed) == 1, (arm, changed)

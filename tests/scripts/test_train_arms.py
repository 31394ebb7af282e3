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

    def call(arm, study="ablation", *more, output=output):
        run = subprocess.run(
            [sys.executable, SCRIPT, "--study", study, "--arm", arm, "--base", base, "--target", target_folder]
            + ["--responses", responses_file, "--held-out", tmp_path / "held_out.jsonl", "--minutes", "0.0001"]
            + ["--output", output, *more],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert run.returncode == 0, run.stderr[-2000:]

    (tmp_path / "held_out.jsonl").write_text("".join(responses_file.read_text().splitlines(keepends=True)[:3]))
    for arm in ("pair path alone", "joint, loop-aware", "joint, backbone alone", "pair path alone"):
        call(arm)
    call("EAGLE-3", "comparison", "--keep", tmp_path / "kept", output=tmp_path / "comparison.json")
    record = json.loads(output.read_text())
    assert record["num_responses"] == 3 and record["clock"] == "processor time"
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


def test_schedule_follows_the_clock(arms, recipe, monkeypatch):
    """Half of the minutes later the learning rate has fallen by half and the curriculum is in its middle."""
    trainer = object.__new__(arms.TimedTrainer)
    trainer.minutes, trainer.started = 2.0, 100.0
    for now, progress in ((100.0, 0.0), (101.0, 0.5), (400.0, 1 - 1e-6)):
        monkeypatch.setattr(arms, "minutes_now", lambda now=now: now)
        assert trainer.progress == progress and trainer.is_over == (now >= 102.0)
    trainer.args = DRelayTrainingConfig(**recipe | {"warmup_steps": 1})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    monkeypatch.setattr(arms, "minutes_now", lambda: 101.0)
    trainer.create_scheduler(0, optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)


@pytest.mark.parametrize(("has_gpu", "minutes"), [(False, 2.0), (True, 3.0)])
def test_clock_is_that_of_the_processor_on_a_cpu(arms, monkeypatch, has_gpu, minutes):
    monkeypatch.setattr(arms.torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(arms.time, "process_time", lambda: 120.0)
    monkeypatch.setattr(arms.time, "monotonic", lambda: 180.0)
    assert arms.minutes_now() == minutes


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

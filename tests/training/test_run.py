"""Whole runs from a recipe: what comes out, what goes on after a kill, and two processes that equal one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from hf_drelay import DRelayModel
from hf_drelay.modeling.checkpoint_formats import export_checkpoint
from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.training.check import check_run
from hf_drelay.training.config import DRelayTrainingConfig, read_yaml
from hf_drelay.training.plan import plan_run
from hf_drelay.training.run import build_trainer, load_examples, train
from hf_drelay.training.run import recipe as run_recipe


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def write_recipe(recipe: dict, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe-in.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def command(recipe: dict, folder: Path) -> list[str]:
    return [sys.executable, "-m", "hf_drelay.cli", "train", "--config", str(write_recipe(recipe, folder))]


class TestTrain:
    def test_trained_drafter_drafts_for_its_target(self, recipe, target_folder):
        folder = train(DRelayTrainingConfig(**recipe))
        assert {path.name for path in folder.iterdir()} == {
            "config.json",
            "model.safetensors",
            "recipe.yaml",
            "training_log.json",
        }
        drelay = DRelayModel.from_pretrained(folder)
        assert drelay.dtype == torch.float32
        target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
        ids = torch.tensor([[3, 5, 6, 7, 4]])
        plain = target.generate(ids, max_new_tokens=12, do_sample=False)
        assert target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drelay).equal(plain)
        assert drelay.statistics.num_rounds > 0

    def test_log_and_recipe_tell_what_was_done(self, recipe):
        folder = train(DRelayTrainingConfig(**recipe))
        log = json.loads((folder / "training_log.json").read_text())
        assert log["num_examples"] == 10
        assert log["recipe"]["max_steps"] == 6 and log["recipe"]["drafter_config"]["pair_rank"] == 2
        last = log["log"][-1]
        assert last["step"] == 6 and last["eval_acceptance_length"] >= 1.0
        again = DRelayTrainingConfig(output_dir=recipe["output_dir"], **read_yaml(folder / "recipe.yaml"))
        assert again.drafter_config == recipe["drafter_config"]

    @pytest.mark.parametrize(
        "options",
        [{"push_to_hub": True}, {"hub_token": "hf_secret"}, {"hub_model_id": "me/x"}, {"hub_strategy": "end"}],
    )
    def test_training_does_not_publish(self, tmp_path, options):
        (name,) = options
        with pytest.raises(ValueError, match=f"`{name}` is .*publishes nothing.*`hf-drelay push") as caught:
            DRelayTrainingConfig(output_dir=str(tmp_path), **options)
        assert "hf_secret" not in str(caught.value)

    def test_token_is_never_in_the_recipe(self, tmp_path):
        config = DRelayTrainingConfig(output_dir=str(tmp_path), seed=7)
        config.hub_token = "hf_secret"
        assert run_recipe(config) == {"seed": 7}

    def test_shortlist_holds_the_end_token(self, recipe):
        trainer, _ = build_trainer(DRelayTrainingConfig(**recipe))
        assert 2 in trainer.model.drafter.draft_token_ids

    def test_new_drafter_taps_the_layer_that_feeds_the_copied_ones(self, recipe):
        trainer, _ = build_trainer(DRelayTrainingConfig(**recipe))
        assert 1 in trainer.model.config.target_layer_ids

    def test_drafter_to_start_from_keeps_its_weights(self, recipe, tmp_path):
        folder = train(DRelayTrainingConfig(**recipe))
        other = recipe | {"output_dir": str(tmp_path / "other"), "drafter": str(folder), "drafter_config": None}
        trainer, _ = build_trainer(DRelayTrainingConfig(**other))
        torch.testing.assert_close(trainer.model.state_dict(), DRelayModel.from_pretrained(folder).state_dict())

    def test_new_head_keeps_the_backbone_of_the_drafter(self, recipe, tmp_path):
        folder = train(DRelayTrainingConfig(**recipe))
        other = recipe | {"output_dir": str(tmp_path / "other"), "drafter": str(folder), "drafter_config": None}
        new_head = {"head": "markov", "head_rank": 4}
        drelay = build_trainer(DRelayTrainingConfig(**other, new_head=new_head))[0].model
        assert (drelay.config.head, drelay.config.head_rank) == ("markov", 4)
        kept = DRelayModel.from_pretrained(folder)
        torch.testing.assert_close(drelay.drafter.state_dict(), kept.drafter.state_dict())
        assert torch.equal(drelay.selector.shortlist_rows, kept.selector.shortlist_rows)
        assert plan_run(DRelayTrainingConfig(**other, new_head=new_head))["drafter parameters"]
        with pytest.raises(ValueError, match=r"`layout` \('fill_in'\) is no field of a head"):
            build_trainer(DRelayTrainingConfig(**other, new_head={"layout": "fill_in"}))
        with pytest.raises(ValueError, match="`new_head` is 'relay'; expected fields as JSON"):
            DRelayTrainingConfig(**other, new_head="relay")
        with pytest.raises(ValueError, match=r"`new_head` \{'head': 'relay'\} needs the `drafter`"):
            DRelayTrainingConfig(**recipe, new_head={"head": "relay"})

    def test_public_checkpoint_gets_a_new_head(self, recipe, target_folder, tmp_path):
        sizes = {"num_hidden_layers": 1, "block_size": 3, "use_mask_embedding": False, "use_qk_norm": True}
        config = AutoConfig.from_pretrained(target_folder)
        public = DRelayModel(DRelayConfig.for_target(config, head="independent", **sizes))
        config, tensors = export_checkpoint(public.config, public.state_dict(), "zlab")
        folder = tmp_path / "public"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        run = recipe | {"drafter": str(folder), "drafter_config": None, "max_steps": 1}
        new_head = {"head": "relay", "selector_hidden_size": 8, "selector_num_heads": 2, "pair_rank": 2}
        drelay = DRelayModel.from_pretrained(train(DRelayTrainingConfig(**run, new_head=new_head)))
        assert (drelay.config.head, drelay.config.copy_order) == ("relay", 3)
        assert drelay.selector.copy_path.weight_proj.bias.min() > 0.5

    def test_held_out_file_is_not_trained_on(self, recipe, responses_file, tmp_path):
        rows = responses_file.read_text().splitlines(keepends=True)
        held_out = tmp_path / "held_out.jsonl"
        held_out.write_text("".join(rows[:3]))
        config = DRelayTrainingConfig(**recipe | {"held_out": [str(held_out)]})
        examples, held = load_examples(config, build_trainer(config)[1])
        assert (len(examples), len(held)) == (9, 3)
        assert not {e.prompt for e in examples} & {e.prompt for e in held}

    @pytest.mark.parametrize("name", ["loop", "frozen", "soft", "dpace"])
    def test_other_objectives_run_to_the_end(self, recipe, name):
        options = {
            "loop": {"loop_start": 0.5, "loop_depth": 3},
            "frozen": {"freeze_backbone": True},
            "soft": {"base_loss": "kl"},
            "dpace": {"slot_weight": "dpace", "base_loss": "l1"},
        }
        folder = train(DRelayTrainingConfig(**recipe | options[name]))
        losses = [
            log["loss"] for log in json.loads((folder / "training_log.json").read_text())["log"] if "loss" in log
        ]
        assert len(losses) == 3 and all(0 < loss < 100 for loss in losses)


class TestResume:
    def test_finished_run_is_not_trained_again(self, recipe):
        folder = train(DRelayTrainingConfig(**recipe))
        before = load_file(folder / "model.safetensors")
        train(DRelayTrainingConfig(**recipe))
        torch.testing.assert_close(load_file(folder / "model.safetensors"), before, rtol=0, atol=0)

    @pytest.mark.parametrize("sampling", ["random", "group_by_length"])
    def test_run_that_stopped_in_its_second_epoch_ends_with_the_same_weights(self, recipe, tmp_path, sampling):
        recipe = recipe | {"max_steps": 12, "save_steps": 8, "train_sampling_strategy": sampling}
        train(DRelayTrainingConfig(**recipe))
        parts = recipe | {"output_dir": str(tmp_path / "parts")}

        class Stop(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 9:
                    raise KeyboardInterrupt

        stopped, _ = build_trainer(DRelayTrainingConfig(**parts))
        stopped.add_callback(Stop())
        with pytest.raises(KeyboardInterrupt):
            stopped.train()
        torch.manual_seed(123)  # another process would not be in this state
        train(DRelayTrainingConfig(**parts))
        weights = [load_file(Path(run["output_dir"], "checkpoint-12", "model.safetensors")) for run in (parts, recipe)]
        torch.testing.assert_close(*weights, rtol=0, atol=1e-6)

    def test_checkpoint_that_was_cut_off_is_passed_over(self, recipe, caplog):
        train(DRelayTrainingConfig(**recipe))
        state = Path(recipe["output_dir"], "checkpoint-6", "trainer_state.json")
        state.write_text(state.read_text()[:50])
        train(DRelayTrainingConfig(**recipe))
        assert "was not written to its end" in caplog.text

    def test_best_checkpoint_can_be_chosen_by_replay(self, recipe):
        options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
        train(DRelayTrainingConfig(**recipe | options))

    def test_folder_of_another_recipe_is_refused(self, recipe):
        train(DRelayTrainingConfig(**recipe))
        with pytest.raises(ValueError, match="another `learning_rate` .0.01, now 0.02."):
            train(DRelayTrainingConfig(**recipe | {"learning_rate": 2e-2}))

    def test_killed_run_ends_with_the_weights_of_an_uninterrupted_one(self, recipe, tmp_path):
        """Killed without a chance to clean up, in the middle of an epoch."""
        recipe = recipe | {"max_steps": 40, "save_steps": 3}
        train(DRelayTrainingConfig(**recipe))
        parts = recipe | {"output_dir": str(tmp_path / "parts")}
        process = subprocess.Popen(command(parts, tmp_path), env=ONE_THREAD, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while not list((tmp_path / "parts").glob("checkpoint-*/trainer_state.json")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "parts" / "drafter").exists(), "the run was over before it could be killed"
        train(DRelayTrainingConfig(**parts))
        weights = [load_file(Path(run["output_dir"], "checkpoint-40", "model.safetensors")) for run in (parts, recipe)]
        torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


class TestProcesses:
    def test_two_processes_equal_one(self, recipe, tmp_path):
        """Two gloo processes with one sequence each, and one process with two sequences. Plain gradient descent,
        because Adam makes steps of the same size of gradients that are nothing but rounding."""
        recipe = recipe | {"optim": "sgd", "learning_rate": 0.1}
        train(DRelayTrainingConfig(**recipe))
        two = recipe | {"output_dir": str(tmp_path / "two"), "per_device_train_batch_size": 1, "ddp_backend": "gloo"}
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
        subprocess.run([*launch, *command(two, tmp_path)[1:]], env=ONE_THREAD, check=True, capture_output=True)
        weights = [load_file(Path(run["output_dir"], "checkpoint-6", "model.safetensors")) for run in (two, recipe)]
        torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


class TestCheck:
    def test_sound_run_passes(self, recipe, written_file):
        trainer, _ = build_trainer(DRelayTrainingConfig(**recipe | {"responses": [str(written_file)]}))
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        findings = list(check_run(trainer, num_steps=15))
        assert [f.name for f in findings] == ["text", "taps", "mask token", "vocabulary", "positions", "learning"]
        assert not [f for f in findings if not f.is_fine]
        torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)

    def findings(self, trainer) -> set[str]:
        return {f.name for f in check_run(trainer, num_steps=2) if not f.is_fine}

    def test_text_that_the_target_would_not_write_is_found(self, recipe):
        assert "text" in self.findings(build_trainer(DRelayTrainingConfig(**recipe))[0])

    def test_shortlist_that_misses_much_is_found(self, recipe):
        fields = recipe["drafter_config"] | {"draft_vocab_size": 8}
        trainer, _ = build_trainer(DRelayTrainingConfig(**recipe | {"drafter_config": fields}))
        assert "vocabulary" in self.findings(trainer)

    def test_mask_token_without_an_embedding_is_found(self, recipe):
        fields = recipe["drafter_config"] | {"use_mask_embedding": False, "mask_token_id": 0}
        trainer, _ = build_trainer(DRelayTrainingConfig(**recipe | {"drafter_config": fields}))
        trainer.target.get_input_embeddings().weight.data[0] = 0
        assert "mask token" in self.findings(trainer)

    def test_positions_that_drafting_does_not_share_are_found(self, recipe, monkeypatch):
        trainer, _ = build_trainer(DRelayTrainingConfig(**recipe))
        rows = trainer.objective.block_rows
        monkeypatch.setattr(
            trainer.objective, "block_rows", lambda states, ids, anchors: rows(states, ids, anchors - 1)
        )
        assert "positions" in self.findings(trainer)

    def test_drafter_that_does_not_learn_is_found(self, recipe):
        trainer, _ = build_trainer(DRelayTrainingConfig(**recipe))
        for p in trainer.model.parameters():
            p.requires_grad_(False)
        trainer.model.drafter.norm.weight.requires_grad_(True)
        assert "learning" in self.findings(trainer)


class TestImpossibleRuns:
    @pytest.mark.parametrize(
        ("fields", "match"),
        [
            ({"freeze_backbone": True, "selector_start": 0.5}, "`selector_start` 0.5 has nothing to train before it"),
            ({"base_weight": 0.0, "train_selector": False}, "`base_weight` is 0.0; .* no other loss is left"),
            ({"repair_weight": 0.0}, "`repair_weight` 0.0 leaves the selector without a loss"),
            ({"target_dtype": "bf16"}, "`target_dtype` is 'bf16'; expected float32"),
            ({"num_replayed": 0}, "`num_replayed` is 0"),
        ],
    )
    def test_configuration_raises(self, recipe, fields, match):
        with pytest.raises(ValueError, match=match):
            DRelayTrainingConfig(**recipe | fields)

    def test_frozen_backbone_without_a_selector_raises(self, recipe):
        fields = recipe["drafter_config"] | {"use_selector": False}
        with pytest.raises(ValueError, match="`freeze_backbone=True` .* this drafter has none"):
            build_trainer(DRelayTrainingConfig(**recipe | {"drafter_config": fields, "freeze_backbone": True}))

    def test_relay_head_with_nothing_on_raises(self, recipe):
        parts = ("use_global_read", "use_history_read", "use_prefix_read", "use_rank_head", "use_repair_gate")
        off = dict.fromkeys(parts, False) | {"pair_rank": 0, "copy_order": 0, "use_repaired_feature": False}
        with pytest.raises(ValueError, match="Nothing of the relay head is on"):
            build_trainer(DRelayTrainingConfig(**recipe | {"drafter_config": recipe["drafter_config"] | off}))

    def test_held_out_responses_without_a_greedy_one_raise(self, recipe, responses_file, tmp_path):
        path = tmp_path / "sampled.jsonl"
        path.write_text(responses_file.read_text().replace("greedy", "sample"))
        with pytest.raises(ValueError, match="None of the 2 held-out responses is a greedy one"):
            build_trainer(DRelayTrainingConfig(**recipe | {"responses": [str(path)]}))


class TestPlan:
    def test_processes_multiply_the_batch(self, recipe):
        config = DRelayTrainingConfig(**recipe)
        assert plan_run(config, 8)["steps"].startswith("6 of 16 sequences")

    @pytest.mark.parametrize("path", sorted(Path("examples/recipes").glob("*.yaml")), ids=lambda path: path.stem)
    def test_every_recipe_can_be_planned_without_its_data(self, path):
        rows = plan_run(DRelayTrainingConfig.from_yaml(path, use_cpu=True))
        assert {"drafter parameters", "steps", "arithmetic", "memory for weights and optimizer"} <= set(rows)

    def test_parameters_and_examples_are_counted(self, recipe):
        config = DRelayTrainingConfig(**recipe)
        rows = plan_run(config)
        trainer, _ = build_trainer(config)
        assert rows["examples"].startswith("12, ")
        assert rows["steps"].startswith("6 of 2 sequences and 6 blocks")
        backbone = sum(p.numel() for p in trainer.model.drafter.parameters())
        assert rows["drafter parameters"].startswith(f"{backbone / 1e6:,.1f} M backbone")


class TestRecipeFiles:
    def test_numbers_without_a_point_are_numbers(self, tmp_path):
        path = tmp_path / "r.yaml"
        path.write_text("learning_rate: 1e-3\n")
        assert read_yaml(path) == {"learning_rate": 1e-3}

    def test_unknown_argument_is_named(self, tmp_path):
        path = write_recipe({"lerning_rate": 1}, tmp_path)
        with pytest.raises(ValueError, match="sets `lerning_rate`, which is no argument"):
            read_yaml(path)

    @pytest.mark.parametrize("text", ["a: [", "- 1\n- 2"])
    def test_broken_file_raises(self, tmp_path, text):
        path = tmp_path / "r.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match="r.yaml"):
            read_yaml(path)

    def test_drafter_with_a_configuration_of_its_own_raises(self, recipe):
        with pytest.raises(ValueError, match="`drafter` brings its own configuration"):
            DRelayTrainingConfig(**recipe | {"drafter": "somewhere"})

    def test_run_without_responses_raises(self, recipe):
        with pytest.raises(ValueError, match="`responses` names no file"):
            build_trainer(DRelayTrainingConfig(**recipe | {"responses": []}))

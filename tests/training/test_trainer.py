"""Short runs of the trainer on a tiny target."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_drelay.evaluation.replay import replay
from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.draft_statistics import DraftStatistics
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.training import trainer as trainer_module
from hf_drelay.training.config import DRelayTrainingConfig
from hf_drelay.training.data import ResponseExample
from hf_drelay.training.trainer import DRelayTrainer, ResponseDataset, collate


V, H = 32, 16


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def make_drelay(target, **fields) -> DRelayModel:
    sizes = {
        "num_hidden_layers": 1,
        "target_layer_ids": [0, 1],
        "block_size": 3,
        "layout": "shifted",
        "pool_size": 4,
        "selector_hidden_size": 8,
        "selector_num_heads": 2,
        "selector_num_layers": 1,
        "pair_rank": 2,
        "history_window": 4,
    }
    torch.manual_seed(0)
    return DRelayModel(DRelayConfig.for_target(target.config, **sizes | fields))


def make_examples(num_examples=6, mode="greedy") -> list[ResponseExample]:
    generator = torch.Generator().manual_seed(0)
    lengths = [10 + 2 * (i % 4) for i in range(num_examples)]
    # Texts that repeat themselves, for the copy path.
    ids = [torch.randint(V, (6,), generator=generator).repeat(length)[:length] for length in lengths]
    return [ResponseExample(row, 3, f"prompt {i}", mode) for i, row in enumerate(ids)]


def make_trainer(target, folder, drelay=None, examples=None, held_out=None, **options) -> DRelayTrainer:
    arguments = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "num_anchors": 3,
        "num_selector_anchors": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments["least_acceptance_length"] = 0.0  # random drafters are hopeless
    config = DRelayTrainingConfig(output_dir=str(folder), **arguments | options)
    examples = make_examples() if examples is None else examples
    held_out = make_examples(2) if held_out is None else held_out
    return DRelayTrainer(drelay or make_drelay(target), target, config, examples, held_out)


def changed_parameters(trainer) -> set[str]:
    """Names of the parameters that a run changes."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    return {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}


class TestRun:
    def test_backbone_and_selector_change_in_a_joint_run(self, target, tmp_path):
        """All but the projection of repaired tokens, which only a second stage uses."""
        trainer = make_trainer(target, tmp_path, max_steps=6)
        missing = set(dict(trainer.model.named_parameters())) - changed_parameters(trainer)
        assert missing == {"selector.repaired_proj.weight"}

    def test_backbone_alone_changes_without_training_of_the_selector(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path, train_selector=False)
        changed = changed_parameters(trainer)
        assert changed == {name for name, _ in trainer.model.named_parameters() if name.startswith("drafter.")}

    def test_selector_alone_changes_with_a_frozen_backbone(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path, freeze_backbone=True)
        changed = changed_parameters(trainer)
        assert "selector.pair_path.successor_table" in changed
        assert not [name for name in changed if name.startswith("drafter.")]

    def test_target_stays_as_it_was(self, target, tmp_path):
        before = copy.deepcopy(target.state_dict())
        make_trainer(target, tmp_path).train()
        torch.testing.assert_close(target.state_dict(), before, rtol=0, atol=0)
        assert not any(p.grad is not None for p in target.parameters())

    def test_saved_model_can_be_loaded(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path, max_steps=1)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        # The trainer writes fields of its own into the configuration of the model it trains.
        loaded = DRelayModel.from_pretrained(tmp_path / "saved")
        torch.testing.assert_close(loaded.state_dict(), trainer.model.state_dict())

    def test_loss_falls_on_the_examples_it_is_trained_on(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path, examples=make_examples(2), max_steps=12, logging_steps=4)
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        assert losses[-1] < losses[0] - 0.1

    def test_two_runs_with_one_seed_are_the_same(self, target, tmp_path):
        states = []
        for _ in range(2):
            trainer = make_trainer(target, tmp_path)
            trainer.train()
            states.append(trainer.model.state_dict())
        torch.testing.assert_close(*states, rtol=0, atol=0)


class TestLog:
    def test_terms_are_logged_with_the_loss(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert len(logs) == 3
        for log in logs:
            assert {"base", "support", "repair", "coverage", "slot1_accuracy", "expected_accepted"} <= set(log)
            assert log["loss"] == pytest.approx(log["base"] + 0.1 * log["support"] + log["repair"], rel=1e-3)

    def test_terms_are_means_since_the_last_log(self, target, tmp_path):
        runs = []
        for steps in (1, 2):
            trainer = make_trainer(target, tmp_path, max_steps=2, logging_steps=steps)
            trainer.train()
            runs.append([log["base"] for log in trainer.state.log_history if "base" in log])
        single, merged = runs
        assert merged == [pytest.approx(sum(single) / 2)]

    def test_terms_of_the_selector_are_absent_when_it_is_not_trained(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path, train_selector=False, max_steps=1)
        trainer.train()
        assert not [log for log in trainer.state.log_history if "repair" in log]


class TestSchedule:
    @staticmethod
    def _shares(trainer) -> list[float]:
        """Share of the contribution weight at each step."""
        shares, objective = [], trainer.objective

        def spy(*args, **kwargs):
            shares.append(objective.config.contribution)
            return objective(*args, **kwargs)

        trainer.objective = spy
        spy.config = objective.config
        trainer.train()
        return shares

    def test_selector_joins_in_after_its_start(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path, max_steps=4, selector_start=0.5)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert ["repair" in log for log in logs] == [False, False, True, True]

    def test_stages_are_unrolled_after_the_start_of_the_loop(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path, max_steps=4, loop_start=0.75, loop_depth=2, loop_tokens=1)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert ["base_stage2" in log for log in logs] == [False, False, False, True]

    @pytest.mark.parametrize(
        ("start", "expected"), [(1.0, [0, 0, 0, 0]), (0.0, [0, 0.25, 0.5, 0.75]), (0.5, [0, 0, 0, 0.5])]
    )
    def test_contribution_weight_sets_in_after_its_start(self, target, tmp_path, start, expected):
        trainer = make_trainer(target, tmp_path, max_steps=4, contribution_start=start)
        assert self._shares(trainer) == pytest.approx(expected)


class TestLearningRate:
    def test_head_has_its_own_rate_and_every_parameter_is_in_one_group(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path, learning_rate=1e-3, head_learning_rate=5e-3, weight_decay=0.1)
        optimizer = trainer.create_optimizer()
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        assert len(rates) == sum(len(group["params"]) for group in optimizer.param_groups)
        model = trainer.model
        assert {rates[id(p)] for p in model.selector.parameters()} == {5e-3}
        assert {rates[id(p)] for p in model.drafter.parameters()} == {1e-3}
        decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        assert {decays[id(p)] for p in model.selector.parameters()} == {0.0, 0.1}

    @pytest.mark.parametrize("fields", [{"head_learning_rate": 0.0}, {"train_selector": False}])
    def test_rate_without_a_meaning_raises(self, tmp_path, fields):
        with pytest.raises(ValueError, match="head_learning_rate"):
            DRelayTrainingConfig(output_dir=str(tmp_path), **{"head_learning_rate": 1e-3} | fields)


class TestAnchors:
    @staticmethod
    def _anchors(trainer, monkeypatch) -> list[tuple]:
        """Epoch, keys and anchors of every step."""
        seen = []
        objective, get = trainer.objective, trainer.features.get

        def spy(anchors, **kwargs):
            seen[-1] += (anchors.tolist(),)
            return objective(anchors=anchors, **kwargs)

        def spy_keys(keys, *args):
            seen.append((int(trainer.state.epoch or 0), tuple(keys)))
            return get(keys, *args)

        spy.config = objective.config
        trainer.objective = spy
        monkeypatch.setattr(trainer.features, "get", spy_keys)
        trainer.train()
        return seen

    def test_anchors_are_drawn_anew_in_every_epoch(self, target, tmp_path, monkeypatch):
        options = {"examples": make_examples(2), "per_device_train_batch_size": 2, "num_anchors": 2, "max_steps": 4}
        drawn = {}
        for epoch, keys, anchors in self._anchors(make_trainer(target, tmp_path, **options), monkeypatch):
            drawn.update({(epoch, key): tuple(row) for key, row in zip(keys, anchors, strict=True)})
        assert len(drawn) == 8
        first = min(key for _, key in drawn)
        assert len({row for (_, key), row in drawn.items() if key == first}) > 1

    def test_anchors_depend_on_seed_epoch_and_example_alone(self, target, tmp_path, monkeypatch):
        """A resumed run, or one with another batch size, must train on the same blocks."""
        drawn = []
        for size in (1, 2):
            options = {"examples": make_examples(4), "per_device_train_batch_size": size, "max_steps": 4 // size}
            run = self._anchors(make_trainer(target, tmp_path, **options), monkeypatch)
            drawn.append({key: row for _, keys, anchors in run for key, row in zip(keys, anchors, strict=True)})
        assert drawn[0] == drawn[1] and len(drawn[0]) == 4


class TestEvaluate:
    def test_acceptance_lengths_are_those_of_replay(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path)
        metrics = trainer.evaluate()
        for name, use_selector in (("eval_acceptance_length", True), ("eval_acceptance_length_backbone", False)):
            view = trainer.model.with_options(use_selector=use_selector)
            assert metrics[name] == replay(view, target, trainer.held_out).acceptance_length

    def test_selector_and_backbone_are_measured_apart_and_without_a_loop(self, target, tmp_path, monkeypatch):
        """A drafter whose default is to loop must not hide what its single stages do."""

        def fake_replay(view, its_target, examples, max_response):
            assert (its_target, view.options.loop_gate) == (target, None)
            return DraftStatistics(num_committed=[3 if view.options.use_selector else 2])

        monkeypatch.setattr(trainer_module, "replay", fake_replay)
        metrics = make_trainer(target, tmp_path, drelay=make_drelay(target, loop_gate=-0.5)).evaluate()
        assert (metrics["eval_acceptance_length"], metrics["eval_acceptance_length_backbone"]) == (3, 2)

    @pytest.mark.parametrize("fields", [{}, {"use_selector": False}], ids=["not_trained", "none"])
    def test_backbone_alone_is_measured_without_a_trained_selector(self, target, tmp_path, fields):
        trainer = make_trainer(target, tmp_path, drelay=make_drelay(target, **fields), train_selector=False)
        metrics = trainer.evaluate()
        view = trainer.model.with_options(use_selector=False)
        assert metrics["eval_acceptance_length"] == replay(view, target, trainer.held_out).acceptance_length
        assert "eval_acceptance_length_backbone" not in metrics

    def test_only_greedy_responses_are_replayed_and_only_so_many(self, target, tmp_path):
        held_out = make_examples(2, mode="sample") + make_examples(5)
        trainer = make_trainer(target, tmp_path, held_out=held_out, num_replayed=3)
        assert [example.mode for example in trainer.held_out] == ["greedy"] * 3

    def test_metrics_appear_in_the_log_of_a_run(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path, eval_strategy="steps", eval_steps=2, max_steps=4)
        trainer.train()
        assert [log["step"] for log in trainer.state.log_history if "eval_acceptance_length" in log] == [2, 4]

    def test_callbacks_hear_of_an_evaluation(self, target, tmp_path):
        """Early stopping and trackers act there, and the request to evaluate is taken back."""
        trainer, heard = make_trainer(target, tmp_path), []

        class Listener(TrainerCallback):
            def on_evaluate(self, args, state, control, metrics, **kwargs):
                heard.append(metrics["eval_acceptance_length"])

        trainer.add_callback(Listener())
        metrics = trainer.evaluate()
        assert heard == [metrics["eval_acceptance_length"]]

    def test_training_goes_on_after_an_evaluation(self, target, tmp_path):
        trainer = make_trainer(target, tmp_path, eval_strategy="steps", eval_steps=1, max_steps=2)
        assert "drafter.fc.weight" in changed_parameters(trainer)


class TestConfig:
    def test_nothing_to_train_raises(self, tmp_path):
        with pytest.raises(ValueError, match="`freeze_backbone=True` with `train_selector=False` leaves nothing"):
            DRelayTrainingConfig(output_dir=str(tmp_path), freeze_backbone=True, train_selector=False)

    @pytest.mark.parametrize("name", ["num_anchors", "num_selector_anchors"])
    def test_number_of_anchors_below_one_raises(self, tmp_path, name):
        with pytest.raises(ValueError, match=f"`{name}` is 0; expected at least 1"):
            DRelayTrainingConfig(output_dir=str(tmp_path), **{name: 0})

    @pytest.mark.parametrize("name", ["selector_start", "loop_start", "contribution_start", "least_after"])
    def test_share_outside_its_range_raises(self, tmp_path, name):
        with pytest.raises(ValueError, match=f"`{name}` is 1.5; expected a share"):
            DRelayTrainingConfig(output_dir=str(tmp_path), **{name: 1.5})

    def test_drafter_of_another_target_raises(self, target, tmp_path):
        other = make_drelay(target, vocab_size=V + 1)
        with pytest.raises(ValueError, match="`vocab_size` 33, but the target LlamaForCausalLM has 32"):
            make_trainer(target, tmp_path, drelay=other)


class TestDataset:
    def test_examples_without_two_response_tokens_are_left_out(self):
        """An anchor needs a token behind it."""
        examples = [ResponseExample(torch.arange(n), 3, "p", "greedy") for n in (4, 5, 9)]
        assert [len(row["input_ids"]) for row in ResponseDataset(examples, max_length=9)] == [5, 9]

    def test_examples_are_cut_to_the_longest_length(self):
        examples = [ResponseExample(torch.arange(9), prompt, "p", "greedy") for prompt in (3, 4, 6)]
        dataset = ResponseDataset(examples, max_length=6)
        assert [row["prompt_length"] for row in dataset] == [3, 4]
        assert all(row["input_ids"].tolist() == list(range(6)) for row in dataset)

    def test_batch_is_padded_on_the_right(self):
        rows = [{"key": "four", "input_ids": torch.tensor([5, 6]), "prompt_length": 1}]
        rows += [{"key": "seven", "input_ids": torch.tensor([7, 8, 9]), "prompt_length": 2}]
        batch = collate(rows)
        assert batch["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9]]
        assert (batch["lengths"].tolist(), batch["prompt_lengths"].tolist()) == ([2, 3], [1, 2])
        assert batch["keys"] == ["four", "seven"]


class TestHopelessRun:
    @pytest.mark.parametrize(("least", "expected"), [(1.0, 4), (9.0, 2)])
    def test_run_below_the_least_acceptance_length_is_stopped(self, target, tmp_path, caplog, least, expected):
        options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
        trainer = make_trainer(target, tmp_path, least_acceptance_length=least, least_after=0.5, **options)
        trainer.train()
        assert trainer.state.global_step == expected
        assert ("below `least_acceptance_length`" in caplog.text) == (least == 9.0)


class TestFeatures:
    def test_folder_that_would_grow_too_large_is_refused(self, target, tmp_path):
        with pytest.raises(ValueError, match="`feature_folder` would take .* `feature_folder_bytes` allows"):
            make_trainer(target, tmp_path, feature_folder=str(tmp_path / "f"), feature_folder_bytes=1000)

    def test_run_with_a_folder_equals_one_without(self, target, tmp_path):
        states = []
        for options in ({}, {"feature_folder": str(tmp_path / "f")}, {"feature_folder": str(tmp_path / "f")}):
            trainer = make_trainer(target, tmp_path, base_loss="kl", **options)
            trainer.train()
            states.append(trainer.model.state_dict())
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
        torch.testing.assert_close(states[2], states[0], rtol=0, atol=0)

    def test_folder_with_soft_targets_serves_a_run_without_any(self, target, tmp_path):
        folder = {"feature_folder": str(tmp_path / "f")}
        make_trainer(target, tmp_path, base_loss="kl", num_soft_targets=3, **folder).train()
        plain = make_trainer(target, tmp_path)
        again = make_trainer(target, tmp_path, **folder)
        assert len(again.features.folder) == len(again.train_dataset)
        plain.train(), again.train()
        torch.testing.assert_close(again.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)

    def test_folder_without_soft_targets_is_refused_where_they_are_needed(self, target, tmp_path):
        make_trainer(target, tmp_path, feature_folder=str(tmp_path / "f"))
        with pytest.raises(ValueError, match="was made with num_soft_targets 0"):
            make_trainer(target, tmp_path, base_loss="kl", feature_folder=str(tmp_path / "f"))


class TestResume:
    @staticmethod
    def run(target, folder, **options) -> DRelayTrainer:
        own = {"examples": make_examples(10), "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
        return make_trainer(target, folder, **own | options)

    def test_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(self, target, tmp_path):
        """Ten examples make five steps of an epoch: the run stops in the first one and goes on into the second."""
        whole = self.run(target, tmp_path / "whole")
        whole.train()

        class Stop(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 3:
                    raise KeyboardInterrupt

        stopped = self.run(target, tmp_path / "parts")
        stopped.add_callback(Stop())
        with pytest.raises(KeyboardInterrupt):
            stopped.train()
        resumed = self.run(target, tmp_path / "parts")
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 6
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=1e-6)

    def test_accumulated_steps_equal_the_mean_of_their_parts(self, target, tmp_path):
        trainer = self.run(target, tmp_path, gradient_accumulation_steps=2, max_steps=1, logging_steps=1)
        trainer.train()
        (log,) = [log for log in trainer.state.log_history if "loss" in log]
        assert log["loss"] == pytest.approx(log["base"] + 0.1 * log["support"] + log["repair"], rel=1e-3)

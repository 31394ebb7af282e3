"""A `transformers.Trainer` for drafters: the joint objective as its loss, replay τ as its evaluation."""

import math

import torch
from torch import nn
from transformers import Trainer

from hf_drelay.evaluation.replay import replay

from .config import DRelayTrainingConfig
from .data import ResponseExample
from .features import FeatureStore
from .objective import JointObjective, ObjectiveConfig, sample_anchors


class ResponseDataset(torch.utils.data.Dataset):
    """Examples with the number that identifies them in the feature store and in the draw of anchors."""

    def __init__(self, examples: list[ResponseExample], max_length: int):
        self.examples = [e for e in examples if min(len(e.input_ids), max_length) - e.prompt_length >= 2]
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict:
        example = self.examples[index]
        return {
            "key": index,
            "input_ids": example.input_ids[: self.max_length],
            "prompt_length": example.prompt_length,
        }


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Right-padded batch: `input_ids (B, T)`, `lengths (B,)`, `prompt_lengths (B,)`, `keys (B,)`."""
    return {
        "input_ids": nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True),
        "lengths": torch.tensor([len(row["input_ids"]) for row in rows]),
        "prompt_lengths": torch.tensor([row["prompt_length"] for row in rows]),
        "keys": torch.tensor([row["key"] for row in rows]),
    }


class DRelayTrainer(Trainer):
    """
    Trainer of one drafter for one frozen target.

    Args:
        model (`DRelayModel`): Drafter and selector.
        target (`PreTrainedModel`): Writes no gradient; gives embedding, head and hidden states.
        args (`DRelayTrainingConfig`): The run.
        train_examples, held_out (`list[ResponseExample]`): Without a common prompt.
        features (`FeatureStore`, *optional*): Hidden states of these training examples from an earlier phase.
    """

    def __init__(self, model, target, args: DRelayTrainingConfig, train_examples, held_out, features=None, **kwargs):
        target.requires_grad_(False).eval()
        self.target = target
        self.adapter = model.adapter(target)
        taps = model.config.target_layer_ids
        self.features = features or FeatureStore(self.adapter, taps, args.feature_bytes)
        self.held_out = [e for e in held_out if e.mode == "greedy"][: args.num_replayed]
        repair_weight = args.repair_weight if args.train_selector else 0.0
        self.objective = JointObjective(
            model,
            self.adapter,
            ObjectiveConfig(
                decay=args.decay,
                support_weight=args.support_weight,
                support_margin=args.support_margin,
                repair_weight=repair_weight,
                contribution_floor=args.contribution_floor,
                freeze_backbone=args.freeze_backbone,
            ),
        )
        if args.freeze_backbone:
            model.drafter.requires_grad_(False)
        if not args.train_selector and model.selector is not None:
            model.selector.requires_grad_(False)
        self._terms: dict[str, list[float]] = {}
        super().__init__(
            model,
            args,
            data_collator=collate,
            train_dataset=ResponseDataset(train_examples, args.max_length),
            eval_dataset=ResponseDataset(self.held_out, args.max_length),
            **kwargs,
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        args, state = self.args, self.state
        keys, lengths = inputs["keys"].tolist(), inputs["lengths"].tolist()
        progress = state.global_step / max(state.max_steps, 1)
        start = args.contribution_start
        self.objective.config.contribution = (
            0.0 if start >= 1 else min(max((progress - start) / (1 - start), 0.0), 1.0)
        )
        states = self.features.get(keys, inputs["input_ids"], lengths)
        # Anchors depend on seed, epoch and example alone, so that a resumed run sees the same ones.
        epoch = math.floor(state.epoch or 0)
        generators = [torch.Generator().manual_seed(hash((args.seed, epoch, key)) & 0x7FFFFFFF) for key in keys]
        anchors = sample_anchors(inputs["prompt_lengths"].tolist(), lengths, args.num_anchors, generators)
        # Mixed precision is applied to a model's own forward only, which the objective does not go through.
        with self.accelerator.autocast():
            loss, terms = self.objective(
                states,
                inputs["input_ids"],
                inputs["lengths"],
                anchors.to(inputs["input_ids"].device),
                num_selector_blocks=args.num_selector_anchors * len(keys),
            )
        for name, value in terms.items():
            self._terms.setdefault(name, []).append(value)
        return (loss, terms) if return_outputs else loss

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "loss" in logs and self._terms:
            logs = logs | {name: sum(values) / len(values) for name, values in self._terms.items()}
            self._terms = {}
        super().log(logs, *args, **kwargs)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Replay τ of the held-out responses, with the selector and, for comparison, without it."""
        self.model.eval()
        metrics = {}
        for name, use_selector in (("acceptance_length", True), ("acceptance_length_backbone", False)):
            if use_selector and (self.model.selector is None or not self.args.train_selector):
                continue
            view = self.model.with_options(use_selector=use_selector, loop_gate=None)
            metrics[f"{metric_key_prefix}_{name}"] = replay(view, self.target, self.held_out, 128).acceptance_length
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

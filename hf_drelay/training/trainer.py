"""A `transformers.Trainer` for drafters: the joint objective as its loss, replay τ as its evaluation."""

import hashlib
import math

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.utils import logging

from hf_drelay.evaluation.replay import replay
from hf_drelay.modeling.draft_statistics import DraftStatistics, PhaseClock

from .blocks import sample_anchors
from .config import DRelayTrainingConfig
from .data import ResponseExample
from .features import FeatureFolder, FeatureStore, feature_bytes
from .objective import JointObjective


logger = logging.get_logger(__name__)


class ResponseDataset(torch.utils.data.Dataset):
    """Examples with the key that identifies them in the feature store and in the draw of anchors."""

    def __init__(self, examples: list[ResponseExample], max_length: int):
        self.examples = [e for e in examples if min(len(e.input_ids), max_length) - e.prompt_length >= 2]
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict:
        example = self.examples[index]
        input_ids = example.input_ids[: self.max_length]
        # Cut to another length, the same example has other features.
        key = f"{example.key}-{len(input_ids)}"
        return {"key": key, "input_ids": input_ids, "prompt_length": example.prompt_length}

    @property
    def num_tokens(self) -> int:
        return sum(min(len(e.input_ids), self.max_length) for e in self.examples)


def collate(rows: list[dict]) -> dict:
    """Right-padded batch: `input_ids (B, T)`, `lengths (B,)`, `prompt_lengths (B,)`, and the keys."""
    return {
        "input_ids": nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True),
        "lengths": torch.tensor([len(row["input_ids"]) for row in rows]),
        "prompt_lengths": torch.tensor([row["prompt_length"] for row in rows]),
        "keys": [row["key"] for row in rows],
    }


class GroupedByLength(torch.utils.data.Sampler):
    """
    Sequences of similar length in one batch, in an order that depends on seed and epoch alone. The sampler of
    transformers draws it from the global random generator, so that a resumed run would see another order.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the host before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self):
        generator = torch.Generator().manual_seed(_number(self.seed, self.epoch, "order"))
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))


class DRelayTrainer(Trainer):
    """
    Trainer of one drafter for one frozen target.

    Args:
        model (`DRelayModel`): Drafter and selector.
        target (`PreTrainedModel`): Writes no gradient; gives embedding, head and hidden states.
        args (`DRelayTrainingConfig`): The run.
        train_examples, held_out (`list[ResponseExample]`): Without a common prompt.
        features (`FeatureStore`, *optional*): Features from an earlier run in this process.
    """

    def __init__(self, model, target, args: DRelayTrainingConfig, train_examples, held_out, features=None, **kwargs):
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs are visible to one process; start one process for each (`torchrun "
                f"--nproc_per_node {args.n_gpu} -m hf_drelay.cli train ...`), or set `CUDA_VISIBLE_DEVICES=0`."
            )
        if args.freeze_backbone and model.selector is None:
            raise ValueError("`freeze_backbone=True` trains the head alone, but this drafter has none.")
        if args.train_selector and model.selector is not None and not list(model.selector.parameters()):
            raise ValueError(
                "Nothing of the relay head is on, so there is nothing of it to train; set `pair_rank`, `copy_order`, "
                "`use_rank_head` or `use_repair_gate`, or use `head='independent'`."
            )
        if args.base_weight == 0 and model.selector is None:
            raise ValueError("`base_weight` 0 trains by the loss of the head alone, but this drafter has none.")
        if model.config.backbone not in ("parallel", "eagle3"):
            raise ValueError(
                f"A drafter with the backbone {model.config.backbone!r} was trained together with its target; it "
                "cannot be trained here."
            )
        for name in ("head_l1_share", "head_kl_share", "base_anchor_end", "head_learning_rate"):
            if getattr(args, name) and (model.selector is None or not args.train_selector):
                raise ValueError(
                    f"`{name}` {getattr(args, name)} needs a head that is trained, and here is none; leave it out."
                )
        target.requires_grad_(False).eval()
        self.target = target
        self.adapter = model.adapter(target)
        greedy = [e for e in held_out if e.mode == "greedy"]
        if not greedy:
            raise ValueError(
                f"None of the {len(held_out)} held-out responses is a greedy one, so replay τ cannot be measured; "
                "raise `num_held_out`, or name greedy responses with `held_out`."
            )
        # Spread over the files, which hold one kind of prompt each.
        count = min(len(greedy), args.num_replayed)
        self.held_out = [greedy[i * len(greedy) // count] for i in range(count)]
        self.clock = PhaseClock()
        self._num_tokens = 0
        self._terms: dict[str, list[torch.Tensor]] = {}
        if args.freeze_backbone:
            model.drafter.requires_grad_(False)
        if not args.train_selector and model.selector is not None:
            model.selector.requires_grad_(False)
        train_dataset = ResponseDataset(train_examples, args.max_length)
        super().__init__(
            model,
            args,
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=ResponseDataset(self.held_out, args.max_length),
            **kwargs,
        )
        # The objective normalises by itself; counting items is for losses that are sums over tokens.
        self.model_accepts_loss_kwargs = False
        self.objective = JointObjective(
            model, self.adapter, args.objective(), share=lambda total: self.accelerator.reduce(total, "mean")
        )
        if not args.train_selector:
            self.objective.config.repair_weight = 0.0
        self.features = features or self._feature_store(train_dataset)

    def _feature_store(self, dataset: ResponseDataset) -> FeatureStore:
        args, taps = self.args, self.model.config.target_layer_ids
        num_soft = self._num_soft_targets()
        folder = None
        if args.feature_folder is not None:
            path = f"{args.feature_folder}/process-{args.process_index}"
            # Features with soft targets serve a run without any, too.
            num_soft = num_soft or FeatureFolder.read_about(path).get("num_soft_targets", 0)
            width = len(taps) * self.model.config.hidden_size
            # Shuffling brings nearly every sequence to every process in the end.
            needed = feature_bytes(dataset.num_tokens, width, num_soft, self.target.dtype.itemsize) * args.world_size
            if needed > args.feature_folder_bytes:
                raise ValueError(
                    f"`feature_folder` would take {needed / 1e9:.1f} GB, but `feature_folder_bytes` allows "
                    f"{args.feature_folder_bytes / 1e9:.1f} GB; raise it, use fewer responses or taps, or leave "
                    "`feature_folder` out, so that features are computed when needed."
                )
            about = {
                "target": self.target.name_or_path,
                "dtype": str(self.target.dtype),
                "target_layer_ids": taps,
                "num_soft_targets": num_soft,
            }
            folder = FeatureFolder(path, about)
        return FeatureStore(self.adapter, taps, num_soft, args.feature_bytes, folder)

    def _num_soft_targets(self) -> int:
        return self.args.num_soft_targets if self.objective.needs_soft_targets else 0

    def train(self, *args, **kwargs):
        self.clock = PhaseClock()
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.features.folder is not None:
                self.features.folder.flush()

    def create_optimizer(self, *args, **kwargs):
        """As in transformers; the head's parameters get groups of their own when they have their own learning rate."""
        optimizer = super().create_optimizer(*args, **kwargs)
        rate = self.args.head_learning_rate
        if rate is None:
            return optimizer
        of_head = {id(parameter) for parameter in self.model.selector.parameters()}
        for group in list(optimizer.param_groups):
            own = [parameter for parameter in group["params"] if id(parameter) in of_head]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in of_head]
            optimizer.add_param_group({**group, "params": own, "lr": rate})
        return optimizer

    def _get_train_sampler(self, train_dataset=None):
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        lengths = [len(row["input_ids"]) for row in self.train_dataset]
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return GroupedByLength(lengths, batch_size, self.args.seed)

    @property
    def progress(self) -> float:
        """Share of the training that is done."""
        return self.state.global_step / max(self.state.max_steps, 1)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.clock.lap("backward")
        args, lengths = self.args, inputs["lengths"].tolist()
        self._schedule()
        states, soft_targets = self.features.get(inputs["keys"], inputs["input_ids"], lengths)
        self.clock.lap("features")
        # Anchors depend on seed, epoch and example alone, so that a resumed run sees the same ones.
        epoch = math.floor(self.state.epoch or 0)
        generators = [torch.Generator().manual_seed(_number(args.seed, epoch, key)) for key in inputs["keys"]]
        anchors = sample_anchors(inputs["prompt_lengths"].tolist(), lengths, args.num_anchors, generators)
        loss, terms = model(
            objective=self.objective,
            states=states,
            input_ids=inputs["input_ids"],
            lengths=inputs["lengths"],
            anchors=anchors.to(inputs["input_ids"].device),
            num_selector_anchors=args.num_selector_anchors,
            soft_targets=soft_targets,
        )
        for name, value in terms.items():
            self._terms.setdefault(name, []).append(value)
        self._num_tokens += sum(lengths)
        self.clock.lap("forward")
        return (loss, terms) if return_outputs else loss

    def _schedule(self) -> None:
        """Set what changes in the course of a run."""
        args, config, progress = self.args, self.objective.config, self.progress
        trains_selector = args.train_selector and progress >= args.selector_start
        config.repair_weight = args.repair_weight if trains_selector else 0.0
        if args.base_anchor_end:  # Domino: the backbone's own loss hands over to that of the head
            share = min(progress / args.base_anchor_end, 1.0)
            config.base_weight = args.base_weight * (1 - share)
            config.repair_weight *= share
        # A share of 1 is never reached within a run.
        config.loop_depth = args.loop_depth if progress >= args.loop_start else 1
        config.loop_tokens = args.loop_tokens or self.model.config.num_draft_tokens
        start = args.contribution_start
        config.contribution = 0.0 if start >= 1 else min(max((progress - start) / (1 - start), 0.0), 1.0)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "loss" in logs and self._terms:
            logs = logs | {name: float(torch.stack(values).mean()) for name, values in self._terms.items()}
            total_ms = sum(self.clock.phase_ms.values())
            logs |= {f"share_{phase}": ms / total_ms for phase, ms in self.clock.phase_ms.items()}
            logs["tokens_per_second"] = self._num_tokens / total_ms * 1e3
            self._terms, self._num_tokens = {}, 0
            self.clock.phase_ms.clear()
        super().log(logs, *args, **kwargs)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Replay τ of the held-out responses, with all parts that are trained; with a head also without it."""
        self.clock.lap("backward")
        self.model.eval()
        with_selector = self.model.selector is not None and self.args.train_selector
        metrics = {}
        ways = {"acceptance_length": with_selector}
        if with_selector:
            ways["acceptance_length_backbone"] = False
        for name, use_selector in ways.items():
            view = self.model.with_options(use_selector=use_selector, loop_gate=None, num_draft_tokens=None)
            metrics[f"{metric_key_prefix}_{name}"] = self._replay(view).acceptance_length
        self.clock.lap("evaluation")
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._stop_if_hopeless(metrics[f"{metric_key_prefix}_acceptance_length"])
        return metrics

    def _replay(self, view) -> DraftStatistics:
        """Replay the held-out responses, each process its share of them."""
        rank, count = self.args.process_index, self.args.world_size
        own = replay(view, self.target, self.held_out[rank::count], 128)
        if count == 1:
            return own
        total = DraftStatistics()
        for statistics in gather_object([own]):
            total.merge(statistics)
        return total

    def _stop_if_hopeless(self, acceptance_length: float) -> None:
        least = self.args.least_acceptance_length
        if self.state.max_steps and self.progress >= self.args.least_after and acceptance_length < least:
            self.control.should_training_stop = True
            logger.warning(
                f"hf_drelay: replay τ is {acceptance_length:.2f} after {self.progress:.0%} of the training, below "
                f"`least_acceptance_length` {least}; stopped. `hf-drelay check` looks for the usual reasons."
            )


def _number(seed: int, epoch: int, key: str) -> int:
    """A number that depends on its arguments alone; `hash` of a text differs from process to process."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch} {key}".encode(), digest_size=7).digest())

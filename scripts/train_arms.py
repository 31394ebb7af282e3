"""What a part of the selector, or a drafter of the field, wins: one arm and seed per call, one row per arm and seed.

    python scripts/train_arms.py --study comparison --arm relay --base runs/cpu-1h/drafter \\
        --responses FILE [FILE ...] --held-out FILE [FILE ...] --minutes 5 --output docs/results/comparison.json

Three studies: `ablation` takes the selector and its training apart; `comparison` trains the drafters of the field,
each with the loss of its own paper for its head, and with heads of about the same number of parameters; `recipe`
trains a backbone alone from nothing, in the ways that a recipe can choose from. Every arm of the first two starts from
one trained backbone (`--base`) with a fresh head. All train for the same minutes on the same responses, on a schedule
that follows the clock; the target's features are computed before the clock starts. All share the cross-entropy and the
candidate-support loss of the backbone. EAGLE-3 has no such backbone: it starts from the target's last layer, and its
row says so. Measured is greedy replay τ on responses that nothing was trained on, DLoop off and on, with the tokens
and rounds of each response, from which the table draws its intervals. `--list` names all arms, `--keep`
saves the trained drafter for `hf-drelay benchmark`.
"""

import argparse
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import TrainerCallback

from hf_drelay import DRelayModel
from hf_drelay.evaluation.records import command_line, environment, weights_sha256, write_json
from hf_drelay.evaluation.replay import ReplayedResponse, replay_response, replay_responses, tapped_states
from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.draft_statistics import DraftStatistics
from hf_drelay.training.config import DRelayTrainingConfig
from hf_drelay.training.run import build_drafter, load_examples, load_target, save_release
from hf_drelay.training.trainer import DRelayTrainer, collate


ONE_STAGE = {"loop_gate": None, "num_draft_tokens": None}  # the whole block
LOOP = {"loop_gate": -1.0, "max_stages": 3, "num_draft_tokens": 3}
LOOP_RUN = {"loop_start": 0.0, "loop_depth": LOOP["max_stages"], "loop_tokens": LOOP["num_draft_tokens"]}
NO_READS = {"use_global_read": False, "use_history_read": False, "use_prefix_read": False}
# Fields of the drafter's configuration, and arguments of the run, by arm.
ABLATION: dict[str, tuple[dict, dict]] = {
    "pair path alone": ({**NO_READS, "use_rank_head": False, "use_repair_gate": False}, {"freeze_backbone": True}),
    "without Global Read": ({"use_global_read": False}, {"freeze_backbone": True}),
    "without history": ({"use_history_read": False}, {"freeze_backbone": True}),
    "without prefix read": ({"use_prefix_read": False}, {"freeze_backbone": True}),
    "without pair path": ({"pair_rank": 0}, {"freeze_backbone": True}),
    "full": ({}, {"freeze_backbone": True}),
    "full, contribution weight": ({}, {"freeze_backbone": True, "contribution_start": 0.0}),
    "joint": ({}, {}),
    "joint, backbone alone": ({}, {"train_selector": False, "head_learning_rate": None}),
    "joint, without candidate support": ({}, {"support_weight": 0.0}),
    "joint, contribution weight": ({}, {"contribution_start": 0.0}),
    "joint, soft targets": ({}, {"base_loss": "kl"}),
    "joint, soft targets of the head": ({}, {"head_kl_share": 0.5}),
    "joint, D-PACE": ({}, {"slot_weight": "dpace"}),
    "joint, convolutions": ({"conv_kernel_size": 2}, {}),
    "joint, convolutions, D-PACE": ({"conv_kernel_size": 2}, {"slot_weight": "dpace"}),
    "joint, loop-aware": ({}, LOOP_RUN),
}
# Ranks give each head 3.5 to 3.6 million parameters beside the demo backbone, that of the shipped selector.
COMPARISON: dict[str, tuple[dict, dict]] = {
    "relay": ({"head": "relay"}, {}),
    "DFlash": ({"head": "independent"}, {"head_learning_rate": None}),
    "DFlash 2": ({"head": "bilinear", "head_rank": 190, "conv_kernel_size": 2}, {"slot_weight": "dpace"}),
    "Domino": ({"head": "recurrent", "head_rank": 267, "gru_hidden_dim": 384}, {"base_anchor_end": 1.0}),
    "DSpark": (
        {"head": "markov", "head_rank": 206, "markov_head_type": "gated", "use_confidence_head": True},
        {"head_l1_share": 0.9},
    ),
    "EAGLE-3": (
        {
            "backbone": "eagle3",
            "head": "independent",
            "num_hidden_layers": 1,
            "use_own_head": True,
            "use_mask_embedding": False,
        },
        # 0.8 per step; nothing of it is trained yet, so all of it takes the rate of the heads.
        {"base_loss": "kl", "soft_weight": 1.0, "decay": 4.48, "learning_rate": 1e-3, "head_learning_rate": None},
    ),
}
# The sizes of the demo drafter; the first arm is what its recipe does.
SIZES = {"layout": "shifted", "block_size": 5, "draft_vocab_size": 8192, "target_layer_ids": [8, 14, 20, 27]}


def backbone(from_target: bool = True, sizes: dict | None = None, **run) -> tuple[None, dict]:
    """Arm that trains a backbone alone, from nothing."""
    return None, {
        "drafter_config": SIZES | (sizes or {}),
        "start_from_target": from_target,
        "train_selector": False,
        "base_loss": "kl",
        "soft_weight": 0.5,
        "learning_rate": 1e-3,
        "head_learning_rate": None,
        **run,
    }


RECIPE: dict[str, tuple[None, dict]] = {
    "from the target's layers": backbone(),
    "cross-entropy alone": backbone(base_loss="ce"),
    "fill-in layout": backbone(sizes={"layout": "fill_in"}),
    "block of 8": backbone(sizes={"block_size": 8}),
    "shortlist of 4 096": backbone(sizes={"draft_vocab_size": 4096}),
    "shortlist of 16 384": backbone(sizes={"draft_vocab_size": 16384}),
    "24 blocks a sequence": backbone(num_anchors=24),
    "learning rate 5e-4": backbone(learning_rate=5e-4),
    "learning rate 2e-3": backbone(learning_rate=2e-3),
    "from random weights": backbone(from_target=False),
    "1 layer, random": backbone(from_target=False, sizes={"num_hidden_layers": 1}),
    "3 layers, random": backbone(from_target=False, sizes={"num_hidden_layers": 3}),
}
LOOP_AWARE = {f"{name}, loop-aware": (fields, run | LOOP_RUN) for name, (fields, run) in COMPARISON.items()}
STUDIES = {"ablation": ABLATION, "comparison": COMPARISON | LOOP_AWARE, "recipe": RECIPE}


def clock() -> tuple[str, Callable[[], float]]:
    """
    Name and seconds of the clock of an arm. On a CPU it is processor time of the one thread, so that whatever else
    runs on the machine takes nothing from an arm; on a GPU it is the time of day.
    """
    return ("time of day", time.monotonic) if torch.cuda.is_available() else ("processor time", time.process_time)


def minutes_now() -> float:
    return clock()[1]() / 60


class Deadline(TrainerCallback):
    """Ends the training of a [`TimedTrainer`] when its minutes are over."""

    trainer: "TimedTrainer"

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.started = minutes_now()

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.is_over:
            control.should_training_stop = True


class TimedTrainer(DRelayTrainer):
    """A run of so many minutes: all that changes in the course of it follows the clock instead of the step."""

    def __init__(self, *args, minutes: float, **kwargs):
        self.minutes, self.started = minutes, None
        deadline = Deadline()
        super().__init__(*args, callbacks=[deadline], **kwargs)
        deadline.trainer = self

    @property
    def progress(self) -> float:
        """Share of the minutes that is over; 1 is never reached in a step, as in any run."""
        elapsed = 0.0 if self.started is None else minutes_now() - self.started
        return min(elapsed / self.minutes, 1 - 1e-6)

    @property
    def is_over(self) -> bool:
        return minutes_now() - self.started >= self.minutes

    def _num_soft_targets(self) -> int:
        """One folder of features serves every arm, whether it looks at soft targets or not."""
        return self.args.num_soft_targets

    def compute_features(self) -> None:
        """Let the target see every response, so that its forwards are no part of an arm's minutes."""
        dataset = self.train_dataset
        order = sorted(range(len(dataset)), key=lambda i: len(dataset[i]["input_ids"]))
        for start in tqdm(range(0, len(order), 8), desc="features", unit="batch"):
            batch = collate([dataset[i] for i in order[start : start + 8]])
            self.features.get(batch["keys"], batch["input_ids"], batch["lengths"].tolist())
        if self.features.folder is not None:
            self.features.folder.flush()

    def create_scheduler(self, num_training_steps, optimizer=None):
        """Warm-up over the first steps, then a cosine down to zero at the deadline."""

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / self.args.warmup_steps) * (1 + math.cos(math.pi * self.progress)) / 2

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler


def build_arm(base: DRelayModel, target, fields: dict, seed: int) -> DRelayModel:
    """The backbone of `base` under a head that knows nothing, or another backbone that starts from the target."""
    own = {name: getattr(base.config, name) for name in DRelayConfig.own_fields()}
    own |= {name: getattr(base.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if "head" in fields:
        del own["use_selector"]  # follows from the head
    if "num_hidden_layers" in fields:
        own |= dict.fromkeys(("layer_types", "block_causal"))
    torch.manual_seed(seed)
    drelay = DRelayModel(DRelayConfig(**own | fields))
    if base.config.draft_vocab_size is not None:
        drelay.set_shortlist(base.drafter.draft_token_ids)
    if "backbone" in fields:
        drelay.drafter.initialize_from_target(target)
        return drelay
    problems = drelay.drafter.load_state_dict(base.drafter.state_dict(), strict=False)
    if problems.unexpected_keys:
        raise ValueError(f"`--base` has weights that the arm lacks, first `{problems.unexpected_keys[0]}`.")
    return drelay


def measure(drelay: DRelayModel, target, responses, **options) -> dict:
    """
    Greedy replay τ on `(tokens, length of the prompt, tapped states)`, and the drafter's ms of a round, which are
    measured apart because replay drafts along several responses at a time.
    """
    view = drelay.eval().with_options(profile=True, **options)
    each = replay_responses(
        ReplayedResponse(view, target, ids, prompt_length, states=states)
        for ids, prompt_length, states in tqdm(responses, desc="replay", unit="response")
    )
    total, timed = DraftStatistics(), DraftStatistics()
    for statistics in each:
        total.merge(statistics)
    for ids, prompt_length, states in responses[:: max(1, len(responses) // 10)]:
        timed.merge(replay_response(view, target, ids, prompt_length, states=states))
    return {
        "acceptance_length": total.acceptance_length,
        "responses": [[sum(s.num_committed), len(s.num_committed)] for s in each],  # tokens and rounds
        "mean_stages": total.mean_stages,
        "slot_classes": total.slot_classes,
        "num_rounds": total.num_rounds,
        "ms_per_round": {phase: ms / timed.num_rounds for phase, ms in timed.phase_ms.items()},
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the arms and stop")
    parser.add_argument("--study", choices=STUDIES)
    parser.add_argument("--arm")
    parser.add_argument("--base", help="folder of the trained drafter whose backbone the arms share")
    parser.add_argument("--target", help="default: the embedded demo target")
    parser.add_argument("--responses", nargs="+")
    parser.add_argument("--held-out", nargs="+")
    parser.add_argument("--num-held-out", type=int, default=150)
    parser.add_argument("--max-response", type=int, default=128, help="tokens of a response that are replayed")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, help="of a trained backbone; default: 3e-4")
    parser.add_argument("--head-learning-rate", type=float, help="default: 1e-3")
    parser.add_argument("--feature-folder")
    parser.add_argument("--keep", type=Path, help="folder to save the trained drafter in")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.list:
        parser.exit(message="\n".join(f"{study}: {arm}" for study, arms in STUDIES.items() for arm in arms) + "\n")
    needed = ["study", "arm", "responses", "held_out", "output"]
    if arguments.study != "recipe":
        needed.insert(2, "base")
    if missing := [name for name in needed if getattr(arguments, name) is None]:
        parser.error(f"--{missing[0].replace('_', '-')} is needed")
    if arguments.arm not in STUDIES[arguments.study]:
        parser.error(f"--arm {arguments.arm!r} is none of --study {arguments.study}; --list names them")
    fixed = STUDIES[arguments.study][arguments.arm][1]
    for name, default in (("learning_rate", 3e-4), ("head_learning_rate", 1e-3)):
        if name not in fixed:
            setattr(arguments, name, default if getattr(arguments, name) is None else getattr(arguments, name))
        elif getattr(arguments, name) is not None:
            parser.error(f"--{name.replace('_', '-')}: this arm has {fixed[name]}; leave it out")
    if arguments.study == "recipe" and arguments.base is not None:
        parser.error("--base: arms of this study start from nothing trained; leave it out")
    if not torch.cuda.is_available() and torch.get_num_threads() > 1:
        parser.error("on a CPU an arm has one thread, whose time is its clock: set OMP_NUM_THREADS=1")
    return arguments


def train_arm(arguments, fields: dict | None, run: dict) -> DRelayTrainer:
    """Train one arm to its deadline."""
    with tempfile.TemporaryDirectory() as scratch:
        common = {
            "output_dir": scratch,
            "target": arguments.target,
            "responses": arguments.responses,
            "held_out": arguments.held_out,
            "num_replayed": arguments.num_held_out,
            "feature_folder": arguments.feature_folder,
            "seed": arguments.seed,
            "max_steps": 1_000_000,  # minutes end the run
            "warmup_steps": 20,
            "learning_rate": arguments.learning_rate,
            "head_learning_rate": arguments.head_learning_rate,
            "adam_beta2": 0.95,
            "per_device_train_batch_size": arguments.batch_size,
            "train_sampling_strategy": "group_by_length",
            "bf16": True,
            "use_cpu": not torch.cuda.is_available(),
            "dataloader_pin_memory": torch.cuda.is_available(),
            "chunk_rows": 256,
            "save_strategy": "no",
            "report_to": "none",
            "logging_steps": 20,
        }
        config = DRelayTrainingConfig(**common | run)
        target, tokenizer = load_target(config)
        if fields is None:
            examples, held_out = load_examples(config, tokenizer)
            drelay = build_drafter(config, target, examples)
        else:
            base = DRelayModel.from_pretrained(arguments.base, dtype=torch.float32)
            examples, held_out = load_examples(config, tokenizer, base.config.chat_template_mode)
            drelay = build_arm(base, target, fields, arguments.seed)
        trainer = TimedTrainer(drelay, target, config, examples, held_out, minutes=arguments.minutes)
        trainer.train_examples = examples
        trainer.compute_features()
        trainer.train()
    return trainer


def reference(study: str, arm: str) -> str:
    """The arm of the same study that an arm is set against."""
    if study == "ablation":
        return "joint" if arm.startswith("joint") else "full"
    return next(iter(STUDIES[study]))


def start_of(fields: dict | None, run: dict) -> str:
    """What an arm starts from, in words."""
    if fields is None:
        return "the target's last layers" if run["start_from_target"] else "random weights"
    return "the target's last layer" if "backbone" in fields else "the shared backbone"


def digest(examples: list) -> str:
    """Hash of the tokens of responses, in their order."""
    return hashlib.sha256(json.dumps([e.input_ids.tolist() for e in examples]).encode()).hexdigest()[:16]


def add_row(output: Path, about: dict, row: dict) -> None:
    """
    Put `row` into the file of the study, which arms that run at the same time share. What they are measured `about`
    must be the same for all.
    """
    with FileLock(f"{output}.lock"):
        record = json.loads(output.read_text()) if output.exists() else about | {"rows": []}
        for name, value in about.items():
            if record.get(name) != value:
                raise SystemExit(
                    f"--output {output} holds arms with another `{name}` ({record.get(name)!r} instead of {value!r}), "
                    "so they cannot be compared; name another file."
                )
        rows = [r for r in record["rows"] if (r["arm"], r["seed"]) != (row["arm"], row["seed"])]
        write_json(output, about | {"rows": [*rows, row]})


def main() -> None:
    arguments = parse_arguments()
    fields, run = STUDIES[arguments.study][arguments.arm]
    trainer = train_arm(arguments, fields, run)
    drelay, head = trainer.model, trainer.model.selector
    use_selector = head is not None and trainer.args.train_selector
    for parameter in drelay.parameters():  # a release holds bfloat16
        parameter.data = parameter.data.to(torch.bfloat16).float()
    if arguments.keep is not None:
        save_release(drelay, arguments.keep)
    responses = [(e.input_ids[: e.prompt_length + arguments.max_response], e.prompt_length) for e in trainer.held_out]
    responses = [(ids, length, tapped_states(drelay, trainer.target, ids)) for ids, length in responses]
    row = {
        "arm": arguments.arm,
        "seed": arguments.seed,
        "command": command_line(),
        "num_steps": trainer.state.global_step,
        "start": start_of(fields, run),
        "against": reference(arguments.study, arguments.arm),
        "trained_parameters": sum(p.numel() for p in drelay.parameters() if p.requires_grad),
        "head_parameters": sum(p.numel() for p in head.parameters()) if use_selector else 0,
        "environment": environment(),
        "one stage": measure(drelay, trainer.target, responses, use_selector=use_selector, **ONE_STAGE),
        "DLoop": measure(drelay, trainer.target, responses, use_selector=use_selector, **LOOP),
    }
    about = {
        "study": arguments.study,
        "minutes": arguments.minutes,
        "clock": clock()[0],
        "base_weights_sha256": None if fields is None else weights_sha256(DRelayModel.from_pretrained(arguments.base)),
        "responses_sha256": digest(trainer.train_examples),
        "held_out_sha256": digest(trainer.held_out),
        "num_responses": len(responses),
        "max_response": arguments.max_response,
        "batch_size": arguments.batch_size,
        "one stage": ONE_STAGE,
        "DLoop": LOOP,
    }
    add_row(arguments.output, about, row)
    print(
        f"{arguments.arm}, seed {arguments.seed}: τ {row['one stage']['acceptance_length']:.3f} after "
        f"{row['num_steps']} steps; with DLoop {row['DLoop']['acceptance_length']:.3f}"
    )


if __name__ == "__main__":
    main()

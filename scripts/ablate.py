"""What each part of the selector and of its training wins: one arm and seed per call, one row per arm and seed.

    python scripts/ablate.py --arm full --base runs/cpu-1h/drafter --responses FILE [FILE ...] \\
        --held-out FILE [FILE ...] --minutes 5 --output docs/results/ablation.json

Every arm starts from the same trained backbone with a fresh selector and trains for the same minutes on the same
responses: on the frozen backbone with features on disk, or jointly. Measured is greedy replay τ on responses that
nothing was trained on, with a bootstrap interval over responses, with DLoop off and on. `--list` names the arms.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

from hf_drelay import DRelayModel
from hf_drelay.evaluation.records import environment, write_json
from hf_drelay.evaluation.replay import replay_response
from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.draft_statistics import DraftStatistics
from hf_drelay.training.config import DRelayTrainingConfig
from hf_drelay.training.run import load_examples, load_target
from hf_drelay.training.trainer import DRelayTrainer


NO_READS = {"use_global_read": False, "use_history_read": False, "use_prefix_read": False}
# Fields of the drafter's configuration, and arguments of the run, by arm.
ARMS: dict[str, tuple[dict, dict]] = {
    "pair path alone": ({**NO_READS, "use_rank_head": False, "use_repair_gate": False}, {"freeze_backbone": True}),
    "without Global Read": ({"use_global_read": False}, {"freeze_backbone": True}),
    "without history": ({"use_history_read": False}, {"freeze_backbone": True}),
    "without prefix read": ({"use_prefix_read": False}, {"freeze_backbone": True}),
    "without pair path": ({"pair_rank": 0}, {"freeze_backbone": True}),
    "full": ({}, {"freeze_backbone": True}),
    "full, contribution weight": ({}, {"freeze_backbone": True, "contribution_start": 0.0}),
    "joint": ({}, {}),
    "joint, backbone alone": ({}, {"train_selector": False}),
    "joint, without candidate support": ({}, {"support_weight": 0.0}),
    "joint, contribution weight": ({}, {"contribution_start": 0.0}),
    "joint, soft targets": ({}, {"base_loss": "kl"}),
    "joint, D-PACE": ({}, {"slot_weight": "dpace"}),
    "joint, loop-aware": ({}, {"loop_start": 0.0}),
}
LOOP = {"loop_gate": -1.0, "max_stages": 3, "num_draft_tokens": 3}


class Deadline(TrainerCallback):
    """Ends a run after so many minutes."""

    def __init__(self, minutes: float):
        self.seconds = 60 * minutes

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if time.monotonic() - self.started >= self.seconds:
            control.should_training_stop = True


def with_fresh_selector(base: DRelayModel, fields: dict, seed: int) -> DRelayModel:
    """The backbone of `base` under a selector that knows nothing."""
    own = {name: getattr(base.config, name) for name in DRelayConfig.own_fields()}
    tokens = {name: getattr(base.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(seed)
    drelay = DRelayModel(DRelayConfig(**own | tokens | fields))
    drelay.drafter.load_state_dict(base.drafter.state_dict())
    if base.drafter.draft_token_ids is not None:
        drelay.set_shortlist(base.drafter.draft_token_ids)
    return drelay


def bootstrap_interval(statistics: list[DraftStatistics], num_draws: int = 2000) -> list[float]:
    """Interval that holds 95 % of τ when the responses are drawn anew."""
    generator = random.Random(0)
    pairs = [(sum(s.num_committed), len(s.num_committed)) for s in statistics]
    draws = []
    for _ in range(num_draws):
        drawn = generator.choices(pairs, k=len(pairs))
        draws.append(sum(committed for committed, _ in drawn) / max(1, sum(rounds for _, rounds in drawn)))
    draws.sort()
    return [draws[int(0.025 * num_draws)], draws[int(0.975 * num_draws) - 1]]


def measure(drelay: DRelayModel, target, examples, **options) -> dict:
    """Greedy replay τ over whole responses."""
    view = drelay.eval().with_options(**options)
    each = [replay_response(view, target, example.input_ids, example.prompt_length) for example in examples]
    total = DraftStatistics()
    for statistics in each:
        total.merge(statistics)
    return {
        "acceptance_length": total.acceptance_length,
        "interval": bootstrap_interval(each),
        "mean_stages": total.mean_stages,
        "slot_classes": total.slot_classes,
        "num_rounds": total.num_rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the arms and stop")
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--base", help="folder of the trained drafter whose backbone all arms share")
    parser.add_argument("--target", help="default: the embedded demo target")
    parser.add_argument("--responses", nargs="+")
    parser.add_argument("--held-out", nargs="+")
    parser.add_argument("--num-held-out", type=int, default=150)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--feature-folder")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(ARMS))
        return
    if missing := [n for n in ("arm", "base", "responses", "held_out", "output") if getattr(arguments, n) is None]:
        parser.error(f"--{missing[0].replace('_', '-')} is needed")

    fields, run = ARMS[arguments.arm]
    with tempfile.TemporaryDirectory() as scratch:
        config = DRelayTrainingConfig(
            output_dir=scratch,
            target=arguments.target,
            responses=arguments.responses,
            held_out=arguments.held_out,
            num_replayed=arguments.num_held_out,
            feature_folder=arguments.feature_folder,
            seed=arguments.seed,
            # Minutes end the run; the schedules of all arms are the same function of the step.
            max_steps=1_000_000,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            learning_rate=arguments.learning_rate,
            adam_beta2=0.95,
            per_device_train_batch_size=arguments.batch_size,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            chunk_rows=256,
            save_strategy="no",
            report_to="none",
            logging_steps=20,
            **run,
        )
        target, tokenizer = load_target(config)
        examples, held_out = load_examples(config, tokenizer)
        base = DRelayModel.from_pretrained(arguments.base, dtype=torch.float32)
        drelay = with_fresh_selector(base, fields, arguments.seed)
        callbacks = [Deadline(arguments.minutes)]
        trainer = DRelayTrainer(drelay, target, config, examples, held_out, callbacks=callbacks)
        trainer.train()
    use_selector = config.train_selector
    row = {
        "arm": arguments.arm,
        "seed": arguments.seed,
        "minutes": arguments.minutes,
        "num_steps": trainer.state.global_step,
        "selector_parameters": sum(p.numel() for p in drelay.selector.parameters()) if use_selector else 0,
        "environment": environment(),
        "num_responses": len(trainer.held_out),
        "one stage": measure(drelay, target, trainer.held_out, use_selector=use_selector, loop_gate=None),
        "DLoop": measure(drelay, target, trainer.held_out, use_selector=use_selector, **LOOP),
    }
    record = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"rows": []}
    rows = [r for r in record["rows"] if (r["arm"], r["seed"]) != (row["arm"], row["seed"])]
    write_json(
        arguments.output, {"command": "scripts/ablate.py", "base": Path(arguments.base).name, "rows": [*rows, row]}
    )
    print(
        f"{arguments.arm}, seed {arguments.seed}: τ {row['one stage']['acceptance_length']:.3f} after "
        f"{row['num_steps']} steps; with DLoop {row['DLoop']['acceptance_length']:.3f}"
    )


if __name__ == "__main__":
    main()

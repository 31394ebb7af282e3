"""What a part of the selector, or a drafter of the field, wins: one arm and seed per call, one row per arm and seed.

    python scripts/train_arms.py --study comparison --arm relay --base runs/cpu-1h/drafter --minutes 15 \\
        --responses FILE [FILE ...] --held-out FILE [FILE ...] --feature-folder FOLDER \\
        --pace-file docs/results/comparison_pace.json --output docs/results/comparison.json

Three studies: `ablation` takes the selector and its training apart; `comparison` trains the drafters of the field,
each with the loss of its own paper for its head, and with heads of about the same number of parameters; `recipe`
trains a backbone alone from nothing, in the ways that a recipe can choose from. Every arm of the first two starts from
one trained backbone (`--base`) with a fresh head; that of relay alone starts from counts of the responses, which is
ours, and there are arms without. All train for the same minutes on the same responses. What a step of an arm costs is
measured first, side by side with the steps of the first arm of its study and without the target's forwards, which are
kept in `--feature-folder`:

    python scripts/train_arms.py --study comparison --pace ... --output docs/results/comparison_pace.json

Minutes then are so many steps (`--pace-file`), so whatever else runs on the machine takes nothing from an arm. All
share the cross-entropy and the candidate-support loss of the backbone. EAGLE-3 has no such backbone: it starts from
the target's last layer, and its row says so. Measured is greedy replay τ on responses that nothing was trained on,
DLoop off and on, with the tokens and rounds of each response, from which the table draws its intervals; and on every
fifth of them how often the pool holds the target's token at the first error of a block. `--list` names all arms,
`--keep` saves the trained drafter for `hf-drelay benchmark`.
"""

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path

import torch
from filelock import FileLock
from tqdm.auto import tqdm

from hf_drelay import DRelayModel
from hf_drelay.evaluation.headroom import measure_headroom
from hf_drelay.evaluation.records import command_line, environment, weights_sha256, write_json
from hf_drelay.evaluation.replay import ReplayedResponse, replay_response, replay_responses, tapped_states
from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.draft_statistics import DraftStatistics
from hf_drelay.training.config import DRelayTrainingConfig
from hf_drelay.training.new_head import config_fields, with_new_head
from hf_drelay.training.run import build_drafter, load_examples, load_target, save_release, with_counts
from hf_drelay.training.trainer import DRelayTrainer, collate


PACE_BATCHES = 5
ONE_STAGE = {"loop_gate": None, "num_draft_tokens": None}  # the whole block
LOOP = {"loop_gate": -1.0, "max_stages": 3, "num_draft_tokens": 3}
LOOP_RUN = {"loop_start": 0.0, "loop_depth": LOOP["max_stages"], "loop_tokens": LOOP["num_draft_tokens"]}
# A relay head with every part, about as large as the heads that it is compared with.
HEAD = {"selector_hidden_size": 192, "pair_rank": 96, "use_repaired_feature": False}
NO_READS = {"use_global_read": False, "use_history_read": False, "use_prefix_read": False}
PATHS_ALONE = NO_READS | {"use_rank_head": False, "use_repair_gate": False}
# Fields of the drafter's configuration, and arguments of the run, by arm.
ABLATION: dict[str, tuple[dict, dict]] = {
    "pair and copy path alone": (PATHS_ALONE, {"freeze_backbone": True}),
    "pair path alone": (PATHS_ALONE | {"copy_order": 0}, {"freeze_backbone": True}),
    "copy path alone": (PATHS_ALONE | {"pair_rank": 0}, {"freeze_backbone": True}),
    "without Global Read": ({"use_global_read": False}, {"freeze_backbone": True}),
    "without history": ({"use_history_read": False}, {"freeze_backbone": True}),
    "without prefix read": ({"use_prefix_read": False}, {"freeze_backbone": True}),
    "without pair path": ({"pair_rank": 0}, {"freeze_backbone": True}),
    "without copy path": ({"copy_order": 0}, {"freeze_backbone": True}),
    "full": ({}, {"freeze_backbone": True}),
    "full, without counts at the start": ({}, {"freeze_backbone": True, "start_from_counts": False}),
    "full, contribution weight": ({}, {"freeze_backbone": True, "contribution_start": 0.0}),
    "joint": ({}, {}),
    "joint, backbone alone": ({}, {"train_selector": False, "head_learning_rate": None}),
    "joint, pair and copy path alone": (PATHS_ALONE, {}),
    "joint, without copy path": ({"copy_order": 0}, {}),
    "joint, without counts at the start": ({}, {"start_from_counts": False}),
    "joint, without candidate support": ({}, {"support_weight": 0.0}),
    "joint, contribution weight": ({}, {"contribution_start": 0.0}),
    "joint, soft targets": ({}, {"base_loss": "kl"}),
    "joint, soft targets of the head": ({}, {"head_kl_share": 0.5}),
    "joint, D-PACE": ({}, {"slot_weight": "dpace"}),
    "joint, convolutions": ({"conv_kernel_size": 2}, {}),
    "joint, convolutions, D-PACE": ({"conv_kernel_size": 2}, {"slot_weight": "dpace"}),
    "joint, loop-aware": ({}, LOOP_RUN),
}
ABLATION = {arm: (HEAD | fields, run) for arm, (fields, run) in ABLATION.items()}
DSPARK = {"head": "markov", "head_rank": 206, "markov_head_type": "gated", "use_confidence_head": True}
# Ranks give each head 3.2 to 3.6 million parameters beside the demo backbone.
COMPARISON: dict[str, tuple[dict, dict]] = {
    "relay": (HEAD | PATHS_ALONE | {"pair_rank": 209}, {}),
    "relay, every part": (HEAD, {}),
    "relay, without copy path": (HEAD | PATHS_ALONE | {"pair_rank": 209, "copy_order": 0}, {}),
    "relay, without copy path and counts": (
        HEAD | PATHS_ALONE | {"pair_rank": 209, "copy_order": 0},
        {"start_from_counts": False},
    ),
    "DFlash": ({"head": "independent"}, {"head_learning_rate": None}),
    "DFlash 2": ({"head": "bilinear", "head_rank": 190, "conv_kernel_size": 2}, {"slot_weight": "dpace"}),
    "Domino": ({"head": "recurrent", "head_rank": 267, "gru_hidden_dim": 384}, {"base_anchor_end": 1.0}),
    "DSpark": (DSPARK, {"head_l1_share": 0.9}),
    "DSpark, loss of the head alone": (DSPARK, {"head_l1_share": 0.9, "base_weight": 0.0}),
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


class ArmTrainer(DRelayTrainer):
    """A run whose features of the target are there before it starts, so that its forwards are no part of a step."""

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


def build_arm(base: DRelayModel, target, fields: dict, seed: int) -> DRelayModel:
    """The backbone of `base` under a head that knows nothing, or another backbone that starts from the target."""
    torch.manual_seed(seed)
    if "backbone" not in fields:
        return with_new_head(base, fields)
    derived = dict.fromkeys(("layer_types", "block_causal", "use_selector"))  # follow from what is set
    drelay = DRelayModel(DRelayConfig(**config_fields(base.config) | derived | fields))
    if base.config.draft_vocab_size is not None:
        drelay.set_shortlist(base.drafter.draft_token_ids)
    drelay.drafter.initialize_from_target(target)
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


def pool_coverage(drelay: DRelayModel, target, responses, use_selector: bool) -> dict | None:
    """
    How often the pool holds the target's token at the first error of a block, for the drafts of the backbone alone and
    of the head if it was trained. `None` for a drafter without blocks.
    """
    if drelay.config.backbone != "parallel":
        return None
    chosen = [(ids.tolist(), prompt_length) for ids, prompt_length, _ in responses[::5]]
    found = measure_headroom(drelay.eval(), target, chosen, max_cases=0).to_dict()
    return {"backbone": found["pool_coverage"], "head": found["selector_pool_coverage"] if use_selector else None}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the arms and stop")
    parser.add_argument("--study", choices=STUDIES)
    parser.add_argument("--arm")
    parser.add_argument("--pace", nargs="*", metavar="ARM", help="measure a step of these arms, or of all, and stop")
    parser.add_argument("--pace-file", type=Path, help="what --pace wrote for this study")
    parser.add_argument("--base", help="folder of the trained drafter whose backbone the arms share")
    parser.add_argument("--target", help="default: the embedded demo target")
    parser.add_argument("--responses", nargs="+")
    parser.add_argument("--held-out", nargs="+")
    parser.add_argument("--num-held-out", type=int, default=150)
    parser.add_argument("--max-response", type=int, default=128, help="tokens of a response that are replayed")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--feature-folder")
    parser.add_argument("--keep", type=Path, help="folder to save the trained drafter in")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.list:
        parser.exit(message="\n".join(f"{study}: {arm}" for study, arms in STUDIES.items() for arm in arms) + "\n")
    needed = ["study", "responses", "held_out", "output"] + (["arm", "pace_file"] if arguments.pace is None else [])
    if arguments.study != "recipe":
        needed.insert(1, "base")
    if missing := [name for name in needed if getattr(arguments, name) is None]:
        parser.error(f"--{missing[0].replace('_', '-')} is needed")
    if arguments.pace is not None and arguments.arm is not None:
        parser.error("--arm: name the arms behind --pace")
    for arm in [arguments.arm] if arguments.pace is None else arguments.pace:
        if arm not in STUDIES[arguments.study]:
            parser.error(f"arm {arm!r} is none of --study {arguments.study}; --list names them")
    if arguments.study == "recipe" and arguments.base is not None:
        parser.error("--base: arms of this study start from nothing trained; leave it out")
    return arguments


class Study:
    """What all arms share: target, responses, and the drafter whose backbone they start from."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.scratch = tempfile.TemporaryDirectory()
        config = DRelayTrainingConfig(**self.common(1))
        self.target, tokenizer = load_target(config)
        self.base = self.base_sha256 = mode = None
        if arguments.base is not None:
            self.base = DRelayModel.from_pretrained(arguments.base, dtype=torch.float32)
            self.base_sha256 = weights_sha256(self.base)
            mode = self.base.config.chat_template_mode
        self.examples, self.held_out = load_examples(config, tokenizer, mode)

    def about(self) -> dict:
        """What must be the same for all that is compared."""
        return {
            "study": self.arguments.study,
            "batch_size": self.arguments.batch_size,
            "base_weights_sha256": self.base_sha256,
            "responses_sha256": digest(self.examples),
        }

    def common(self, num_steps: int) -> dict:
        """Arguments of every run."""
        arguments = self.arguments
        return {
            "output_dir": self.scratch.name,
            "target": arguments.target,
            "responses": arguments.responses,
            "held_out": arguments.held_out,
            "num_replayed": arguments.num_held_out,
            "feature_folder": arguments.feature_folder,
            "seed": arguments.seed,
            "max_steps": num_steps,
            "warmup_steps": min(20, num_steps),
            "lr_scheduler_type": "cosine",
            "learning_rate": 3e-4,
            "head_learning_rate": 1e-3,
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

    def trainer(self, arm: str, num_steps: int) -> ArmTrainer:
        """Trainer of an arm, ready to start."""
        fields, run = STUDIES[self.arguments.study][arm]
        config = DRelayTrainingConfig(**self.common(num_steps) | run)
        if fields is None:
            drelay = build_drafter(config, self.target, self.examples)
        else:
            drelay = build_arm(self.base, self.target, fields, self.arguments.seed)
            drelay = with_counts(drelay, config, self.examples)
        return ArmTrainer(drelay, self.target, config, self.examples, self.held_out)


def measure_pace(arguments) -> dict:
    """
    Seconds of a step of some arms or all of them, relative to those of the first arm of the study: steps on the same
    batches, spread over all lengths, arm by arm in one process.
    """
    first = next(iter(STUDIES[arguments.study]))
    arms = list(dict.fromkeys([first, *(arguments.pace or STUDIES[arguments.study])]))
    seconds = dict.fromkeys(arms, 0.0)
    study = Study(arguments)
    trainers = {arm: study.trainer(arm, 1) for arm in arms}
    dataset = trainers[first].train_dataset
    order = list(trainers[first]._get_train_sampler(dataset))
    size = arguments.batch_size
    starts = range(0, len(order), max(size, len(order) // (PACE_BATCHES * size) * size))
    for number, start in enumerate(tqdm([0, *starts], desc="pace", unit="batch")):
        batch = collate([dataset[i] for i in order[start : start + size]])
        for arm, trainer in trainers.items():
            spent = step_seconds(trainer, batch)
            if number:  # the first one pays for what is set up once
                seconds[arm] += spent / len(starts)
    about = study.about()
    record = json.loads(arguments.output.read_text()) if arguments.output.exists() else about
    check_same(arguments.output, record, about)
    # Another arm that is added later is measured beside the first one again, whose seconds stay as they are.
    return about | {
        "seconds_per_step": record.get("seconds_per_step", seconds[first]),
        "arms": record.get("arms", {}) | {arm: value / seconds[first] for arm, value in seconds.items()},
        "commands": [*record.get("commands", []), command_line()],
        "environment": record.get("environment", environment()),
    }


def step_seconds(trainer: ArmTrainer, batch: dict) -> float:
    """Seconds of a whole step on `batch`, in the middle of a run, the target's forward excepted."""
    if trainer.optimizer is None:
        trainer.create_optimizer()
        trainer.prepared = trainer.accelerator.prepare(trainer.model)  # in the precision of a run
        trainer.state.global_step, trainer.state.max_steps = 500, 1000
        trainer.current_gradient_accumulation_steps = 1
    trainer.features.get(batch["keys"], batch["input_ids"], batch["lengths"].tolist())
    started = now_s()
    trainer.training_step(trainer.prepared, batch)
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return now_s() - started


def now_s() -> float:
    """Time of day once a GPU has done what it was given; on a CPU processor time, which others do not take away."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def steps_in(minutes: float, pace: dict, arm: str) -> int:
    """Steps that an arm makes in so many minutes."""
    if arm not in pace["arms"]:
        raise SystemExit(f"--pace-file knows no pace of {arm!r}; measure it with --pace {arm!r}.")
    return max(1, round(minutes * 60 / (pace["seconds_per_step"] * pace["arms"][arm])))


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


def check_same(path: Path, record: dict, about: dict) -> None:
    """End the call if what is in the file at `path` was measured about something else."""
    for name, value in about.items():
        if record.get(name) != value:
            raise SystemExit(
                f"{path} holds arms with another `{name}` ({record.get(name)!r} instead of {value!r}), so they cannot "
                "be compared; name another file."
            )


def add_row(output: Path, about: dict, row: dict) -> None:
    """
    Put `row` into the file of the study, which arms that run at the same time share. What they are measured `about`
    must be the same for all.
    """
    with FileLock(f"{output}.lock"):
        record = json.loads(output.read_text()) if output.exists() else about | {"rows": []}
        check_same(output, record, about)
        rows = [r for r in record["rows"] if (r["arm"], r["seed"]) != (row["arm"], row["seed"])]
        write_json(output, about | {"rows": [*rows, row]})


def main() -> None:
    arguments = parse_arguments()
    if arguments.pace is not None:
        record = measure_pace(arguments)
        write_json(arguments.output, record)
        print("\n".join(f"{arm}: {record['seconds_per_step'] * ratio:.3f} s" for arm, ratio in record["arms"].items()))
        return
    fields, run = STUDIES[arguments.study][arguments.arm]
    pace = json.loads(arguments.pace_file.read_text())
    study = Study(arguments)
    shared = study.about()
    check_same(arguments.pace_file, pace, shared)
    trainer = study.trainer(arguments.arm, steps_in(arguments.minutes, pace, arguments.arm))
    trainer.compute_features()
    trainer.train()
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
        "pace": pace["arms"][arguments.arm],
        "start": start_of(fields, run),
        "against": reference(arguments.study, arguments.arm),
        "trained_parameters": sum(p.numel() for p in drelay.parameters() if p.requires_grad),
        "head_parameters": sum(p.numel() for p in head.parameters()) if use_selector else 0,
        "environment": environment(),
        "one stage": measure(drelay, trainer.target, responses, use_selector=use_selector, **ONE_STAGE),
        "DLoop": measure(drelay, trainer.target, responses, use_selector=use_selector, **LOOP),
        "pool_coverage": pool_coverage(drelay, trainer.target, responses, use_selector),
    }
    about = shared | {
        "minutes": arguments.minutes,
        "seconds_per_step": pace["seconds_per_step"],  # of the first arm
        "held_out_sha256": digest(trainer.held_out),
        "num_responses": len(responses),
        "max_response": arguments.max_response,
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

"""Train the shipped drafter of the embedded demo target.

    python scripts/train_demo_drafter.py --responses responses.jsonl.gz --output runs/demo

Two phases: the backbone alone, then backbone and selector together. Each phase can be resumed from its last checkpoint
with `--resume`. The folder `--output/drafter` is what ships.
"""

import argparse
import copy
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from hf_drelay import DRelayConfig, DRelayModel, load_demo_target
from hf_drelay.evaluation.records import write_json
from hf_drelay.targets import describe_demo_target
from hf_drelay.training.config import DRelayTrainingConfig
from hf_drelay.training.data import frequent_tokens, load_responses, split_by_prompt
from hf_drelay.training.features import FeatureStore
from hf_drelay.training.trainer import DRelayTrainer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", required=True, help="response file of the demo target")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--backbone-steps", type=int, default=3000)
    parser.add_argument("--joint-steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--shortlist", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=7)
    parser.add_argument("--layout", default="shifted")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--num-responses", type=int, help="use only the first ones (for a trial)")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def build_drafter(arguments, target, train_examples) -> DRelayModel:
    """An untrained drafter that starts from the target's last layers and drafts the most used tokens."""
    config = DRelayConfig.preset(
        "smollm2-135m",
        layout=arguments.layout,
        block_size=arguments.block_size,
        draft_vocab_size=arguments.shortlist,
        target_layer_ids=[8, 14, 20, 27],
        selector_hidden_size=192,
        pair_rank=96,
        use_repaired_feature=False,
    )
    drelay = DRelayModel(config)
    drelay.set_shortlist(frequent_tokens(train_examples, arguments.shortlist, always=config.eos_token_ids))
    drelay.drafter.initialize_from_target(target)
    return drelay


def train_phase(name, arguments, drelay, target, examples, features, max_steps, **options) -> list[dict]:
    """One phase on `examples` (training, held out); returns its log."""
    config = DRelayTrainingConfig(
        output_dir=str(arguments.output / name),
        max_steps=max_steps,
        per_device_train_batch_size=arguments.batch_size,
        adam_beta2=0.95,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, max(1, max_steps // 20)),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=50,
        eval_strategy="steps",
        eval_steps=500,
        save_steps=500,
        save_total_limit=1,
        report_to="none",
        train_sampling_strategy="group_by_length",
        dataloader_num_workers=0,
        **options,
    )
    trainer = DRelayTrainer(drelay, target, config, *examples, features=features)
    has_checkpoint = any((arguments.output / name).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=arguments.resume and has_checkpoint)
    trainer.evaluate()
    return trainer.state.log_history


def save_release(drelay: DRelayModel, folder: Path) -> None:
    """Weights in bfloat16 and a configuration that loads them as float32, in which CPUs are fast. No code files."""
    with tempfile.TemporaryDirectory() as scratch:
        copy.deepcopy(drelay).to(torch.bfloat16).save_pretrained(scratch)
        config = json.loads((Path(scratch) / "config.json").read_text()) | {"dtype": "float32"}
        config.pop("use_cache", None)  # put there by the trainer
        write_json(folder / "config.json", config)
        shutil.copyfile(Path(scratch) / "model.safetensors", folder / "model.safetensors.part")
    os.replace(folder / "model.safetensors.part", folder / "model.safetensors")


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    started = time.time()
    # bfloat16 is several times faster in the large matrix products of training; the drafter runs in float32 later.
    target, tokenizer = load_demo_target(dtype=torch.bfloat16)
    examples = load_responses(arguments.responses, tokenizer, max_length=512)[: arguments.num_responses]
    train_examples, held_out = split_by_prompt(examples, num_held_out=64)
    drelay = build_drafter(arguments, target, train_examples)
    # One store for both phases: the target's states are the dearest part of the first epoch.
    features = FeatureStore(drelay.adapter(target), drelay.config.target_layer_ids)
    rate = arguments.learning_rate
    phases = {
        "backbone": {"max_steps": arguments.backbone_steps, "train_selector": False, "learning_rate": rate},
        "joint": {"max_steps": arguments.joint_steps, "learning_rate": rate / 2, "contribution_start": 0.7},
    }
    log = {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "target": describe_demo_target(target)}
    for name, options in phases.items():
        log[name] = train_phase(name, arguments, drelay, target, (train_examples, held_out), features, **options)
        drelay.requires_grad_(True)
        folder = arguments.output / ("drafter" if name == "joint" else f"after-{name}")
        save_release(drelay, folder)
        log["minutes"] = (time.time() - started) / 60
        write_json(arguments.output / "training_log.json", log)


if __name__ == "__main__":
    main()

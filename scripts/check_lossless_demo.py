"""Greedy losslessness of the shipped drafter on the demo target, in float32.

    python scripts/check_lossless_demo.py --prompts FILE [FILE ...] --output docs/results/demo_lossless.json

Every prompt is decoded plainly, with DLoop off, and with DLoop wide open (every stage is followed by another one,
up to three), with the drafter's own stage length. Each difference is listed with the gap of the target's two best
logits; one with a gap of at least 1e-5 is a failure and makes the exit code 1. An interrupted run goes on where it
stopped.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from benchmark_demo import interleaved_prompts
from tqdm.auto import tqdm

from hf_drelay import DRelayModel, load_demo_target
from hf_drelay.evaluation.divergence import first_divergence
from hf_drelay.evaluation.records import command_line, describe_drafter, environment, write_json
from hf_drelay.modeling.configuration_drelay import DECODING_LOOPS
from hf_drelay.targets import describe_demo_target, resolve_drafter
from hf_drelay.training.data import encode_prompt


EXPLAINED_GAP = 1e-5


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, nargs="+", type=Path, help="prompt files")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--drafter", help="folder or Hub id; default: the bundled one")
    parser.add_argument("--num-prompts", type=int, default=102)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--decoding-loop", choices=DECODING_LOOPS, default="own")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    target, tokenizer = load_demo_target()
    drelay = DRelayModel.from_pretrained(resolve_drafter(arguments.drafter))
    loop = arguments.decoding_loop
    views = {
        f"{loop} loop, DLoop off": drelay.with_options(decoding_loop=loop, loop_gate=None),
        f"{loop} loop, DLoop wide open": drelay.with_options(
            decoding_loop=loop, loop_gate=float("-inf"), max_stages=3
        ),
    }
    record = {
        "command": command_line(),
        "environment": environment(),
        "target": describe_demo_target(target),
        "drafter": describe_drafter(drelay),
        "num_prompts": arguments.num_prompts,
        "max_new_tokens": arguments.max_new_tokens,
        "prompts": [],
    }
    if arguments.output.exists():
        earlier = json.loads(arguments.output.read_text())
        record["prompts"] = earlier["prompts"]
        if earlier.get("drafter") != record["drafter"]:
            raise SystemExit(f"{arguments.output} was made with another drafter; give another name.")
        if record["prompts"] and set(record["prompts"][0]["ways"]) != set(views):
            raise SystemExit(f"{arguments.output} was made with another `--decoding-loop`; give another name.")
    prompts = interleaved_prompts(arguments.prompts, arguments.num_prompts)
    for number, (kind, prompt) in enumerate(tqdm(prompts, unit="prompt")):
        if number < len(record["prompts"]):
            continue
        ids = torch.tensor([encode_prompt(tokenizer, prompt)])
        call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": arguments.max_new_tokens, "do_sample": False}
        plain = target.generate(ids, **call)[0, ids.shape[1] :].tolist()
        row = {"kind": kind, "num_tokens": len(plain), "ways": {}}
        for name, view in views.items():
            new_ids = target.generate(ids, assistant_model=view, **call)[0, ids.shape[1] :].tolist()
            divergence = first_divergence(target, ids, plain, new_ids)
            row["ways"][name] = {
                "divergence": None if divergence is None else vars(divergence),
                "acceptance_length": view.statistics.acceptance_length,
                "mean_stages": view.statistics.mean_stages,
                "slot_classes": view.statistics.slot_classes,
            }
        record["prompts"].append(row)
        write_json(arguments.output, record | summarize(record["prompts"], list(views)))
    summary = summarize(record["prompts"], list(views))
    write_json(arguments.output, record | summary)
    print(json.dumps(summary, indent=1))
    sys.exit(any(entry["num_unexplained"] for entry in summary["summary"].values()))


def summarize(rows: list[dict], names: list[str]) -> dict:
    """Counts of each way: prompts, tokens, differences, and those that rounding does not explain."""
    summary = {}
    for name in names:
        found = [row["ways"][name]["divergence"] for row in rows if row["ways"][name]["divergence"] is not None]
        summary[name] = {
            "num_prompts": len(rows),
            "num_tokens": sum(row["num_tokens"] for row in rows),
            "num_different": len(found),
            "num_unexplained": sum(divergence["logit_gap"] >= EXPLAINED_GAP for divergence in found),
        }
    return {"summary": summary}


if __name__ == "__main__":
    main()

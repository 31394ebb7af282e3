"""Selector on/off times DLoop on/off on the demo target, side by side in one process, against plain decoding.

    python scripts/benchmark_demo.py --prompts FILE [FILE ...] --output docs/results/demo_grid.json

A prompt file has one JSON object with `turns` (or `prompt`) per line; `--num-prompts` prompts are taken from the files
in turn. Every prompt is decoded by all ways, one after the other in changing order, after a warm-up.
"""

import argparse
import random
import statistics
from pathlib import Path

import torch
from tqdm.auto import tqdm

from hf_drelay import DRelayModel, load_demo_target
from hf_drelay.evaluation.divergence import first_divergence
from hf_drelay.evaluation.records import command_line, environment, write_json
from hf_drelay.evaluation.timing import timed_generate
from hf_drelay.modeling.configuration_drelay import DECODING_LOOPS, PROPOSALS
from hf_drelay.modeling.draft_statistics import DraftStatistics
from hf_drelay.targets import describe_demo_target, resolve_drafter
from hf_drelay.training.data import encode_prompt, read_prompts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, nargs="+", type=Path, help="prompt files")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--drafter", help="folder or Hub id; default: the bundled one")
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-draft-tokens", type=int, help="default: that of the drafter's configuration")
    parser.add_argument("--proposal", choices=PROPOSALS, help="default: that of the drafter's configuration")
    parser.add_argument("--loop-gate", type=float, default=-0.5)
    parser.add_argument("--max-stages", type=int, default=3)
    parser.add_argument("--decoding-loop", choices=DECODING_LOOPS, default="own")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def interleaved_prompts(files: list[Path], num_prompts: int) -> list[tuple[str, str]]:
    """`(kind, prompt)` taken from the files in turn, so that every kind has its share."""
    columns = [[(file.stem, prompt) for prompt in read_prompts(file, num_prompts)] for file in files]
    rows = [row for rank in range(num_prompts) for column in columns for row in column[rank : rank + 1]]
    return rows[:num_prompts]


def summarize(name: str, runs: list[dict], plain_runs: list[dict], drafted: DraftStatistics | None) -> dict:
    """Figures of one way over all prompts; the speedup of a prompt is a ratio of rates measured side by side."""
    rates = [run["num_tokens"] / run["seconds"] for run in runs]
    speedups = [r / (p["num_tokens"] / p["seconds"]) for r, p in zip(rates, plain_runs, strict=True)]
    quartiles = statistics.quantiles(speedups, n=4) if len(speedups) > 1 else [speedups[0]] * 3
    total_rate = sum(run["num_tokens"] for run in runs) / sum(run["seconds"] for run in runs)
    plain_rate = sum(run["num_tokens"] for run in plain_runs) / sum(run["seconds"] for run in plain_runs)
    row = {
        "name": name,
        "tokens_per_s": total_rate,
        "speedup_total": total_rate / plain_rate,
        "speedup_median": quartiles[1],
        "speedup_quartiles": [quartiles[0], quartiles[2]],
        "num_identical": sum(run["divergence"] is None for run in runs),
        "divergences": [run["divergence"] for run in runs if run["divergence"] is not None],
    }
    by_kind = {}
    for kind in sorted({run["kind"] for run in runs}):
        chosen = [s for s, run in zip(speedups, runs, strict=True) if run["kind"] == kind]
        by_kind[kind] = {"speedup_median": statistics.median(chosen), "num_prompts": len(chosen)}
    row["by_kind"] = by_kind
    return row if drafted is None else row | {"statistics": drafted.to_dict()}


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    target, tokenizer = load_demo_target()
    drelay = DRelayModel.from_pretrained(resolve_drafter(arguments.drafter))
    given = {"num_draft_tokens": arguments.num_draft_tokens, "proposal": arguments.proposal}
    shared = {name: value for name, value in given.items() if value is not None}
    shared["decoding_loop"] = arguments.decoding_loop
    loop = {"loop_gate": arguments.loop_gate, "max_stages": arguments.max_stages}
    views = {
        "plain": None,
        "backbone": drelay.with_options(use_selector=False, loop_gate=None, **shared),
        "backbone + DLoop": drelay.with_options(use_selector=False, **loop, **shared),
        "selector": drelay.with_options(use_selector=True, loop_gate=None, **shared),
        "selector + DLoop": drelay.with_options(use_selector=True, **loop, **shared),
    }
    sampling = {"do_sample": False}
    if arguments.temperature > 0:
        sampling = {"do_sample": True, "temperature": arguments.temperature}
    runs = {name: [] for name in views}
    drafted = {name: DraftStatistics() for name in views if name != "plain"}
    order = random.Random(arguments.seed)
    prompts = interleaved_prompts(arguments.prompts, arguments.num_prompts)
    for number, (kind, prompt) in enumerate(tqdm(prompts, unit="prompt")):
        ids = torch.tensor([encode_prompt(tokenizer, prompt)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if number == 0:  # the first calls pay for kernel selection and memory
            for view in views.values():
                timed_generate(target, inputs, max_new_tokens=16, assistant_model=view, **sampling)
        outputs = {}
        for name in order.sample(list(views), len(views)):
            view = views[name]
            new_ids, seconds = timed_generate(
                target,
                inputs,
                seed=arguments.seed + number,
                max_new_tokens=arguments.max_new_tokens,
                assistant_model=view,
                **sampling,
            )
            outputs[name] = new_ids
            runs[name].append({"kind": kind, "num_tokens": len(new_ids), "seconds": seconds, "divergence": None})
            if view is not None:
                drafted[name].merge(view.statistics)
        if arguments.temperature == 0:
            for name, new_ids in outputs.items():
                divergence = first_divergence(target, ids, outputs["plain"], new_ids)
                runs[name][-1]["divergence"] = None if divergence is None else vars(divergence) | {"prompt": number}
    record = {
        "command": command_line(),
        "arguments": {
            name: str(value) for name, value in vars(arguments).items() if name not in ("prompts", "output")
        },
        "prompt_files": [file.name for file in arguments.prompts],
        "environment": environment(),
        "target": describe_demo_target(target),
        "drafter": drelay.config.to_diff_dict(),
        "rows": [summarize(name, runs[name], runs["plain"], drafted.get(name)) for name in views],
    }
    write_json(arguments.output, record)
    for row in record["rows"]:
        tau = row.get("statistics", {}).get("acceptance_length") or 1.0
        print(f"{row['name']:18s} tau {tau:.3f}  speedup {row['speedup_total']:.3f}  identical {row['num_identical']}")


if __name__ == "__main__":
    main()

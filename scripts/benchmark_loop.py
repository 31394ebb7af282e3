"""Our own loop on the demo target: batches, trees, the cost-aware gate, and what each loop costs beside the model.

    python scripts/benchmark_loop.py --prompts FILE [FILE ...] --output docs/results/loop.json

Every batch of prompts is decoded by all ways, in changing order in one process, after a warm-up. A batch of B is the
same as B requests that arrive at once: the figures by batch size are the concurrency study. `host_ms` is the time of a
round outside the forwards of target and drafter; it is taken in a second pass with clocks around both, so that they
do not slow the first one down.
"""

import argparse
import functools
import random
import statistics
import time
from pathlib import Path

import torch
from tqdm.auto import tqdm

from hf_drelay import DRelayModel, load_demo_target
from hf_drelay.evaluation.records import command_line, environment, write_json
from hf_drelay.modeling.configuration_drelay import PROPOSALS
from hf_drelay.modeling.draft_statistics import DraftStatistics
from hf_drelay.targets import describe_demo_target, resolve_drafter
from hf_drelay.training.data import encode_prompt, read_prompts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, nargs="+", type=Path, help="prompt files, one JSON object a line")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--drafter", help="folder or Hub id; default: the bundled one")
    parser.add_argument("--num-prompts", type=int, default=16, help="of each file; a multiple of the batch sizes")
    parser.add_argument("--num-batches", type=int, help="at most so many of each size; default: all prompts")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tree-budgets", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--num-draft-tokens", type=int, help="default: that of the drafter's configuration")
    parser.add_argument("--loop-gate", type=float, default=-0.5)
    parser.add_argument("--max-stages", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--proposal", choices=PROPOSALS, help="default: that of the drafter's configuration")
    parser.add_argument("--ways", nargs="+", help="only these rows, by name")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def ways(drelay, arguments) -> dict:
    """Views by name; the host's loop and trees of every budget among them."""
    shared = {"proposal": arguments.proposal} if arguments.proposal else {}
    if arguments.num_draft_tokens:
        shared["num_draft_tokens"] = arguments.num_draft_tokens
    loop = {"loop_gate": arguments.loop_gate, "max_stages": arguments.max_stages}
    found = {"plain": None}
    if shared.get("proposal") != "coupled":
        found["host chain"] = drelay.with_options(decoding_loop="host", loop_gate=None, **shared)
    found |= {
        "chain": drelay.with_options(loop_gate=None, **shared),
        "dloop": drelay.with_options(**loop, **shared),
        "auto": drelay.with_options(loop_gate="auto", max_stages=arguments.max_stages, **shared),
    }
    for budget in arguments.tree_budgets:
        found[f"tree {budget}"] = drelay.with_options(loop_gate=None, tree_budget=budget, **shared)
        found[f"dloop + tree {budget}"] = drelay.with_options(tree_budget=budget, **loop, **shared)
    return {name: view for name, view in found.items() if not arguments.ways or name in (*arguments.ways, "plain")}


def batches(tokenizer, prompts: list[str], size: int) -> list[dict]:
    """Batches of `size` prompts, padded left."""
    rows = [torch.tensor(encode_prompt(tokenizer, prompt)) for prompt in prompts]
    made = []
    for start in range(0, len(rows) - size + 1, size):
        chosen = rows[start : start + size]
        width = max(len(row) for row in chosen)
        ids = torch.full((size, width), tokenizer.pad_token_id or 0)
        mask = torch.zeros(size, width, dtype=torch.long)
        for i, row in enumerate(chosen):
            ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


class Stopwatch:
    """Adds up the time inside a method while the block is open."""

    def __init__(self, *owners_and_names):
        self.owners_and_names = owners_and_names
        self.seconds = 0.0
        self.num_calls = 0

    def __enter__(self):
        for owner, name in self.owners_and_names:
            setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def __exit__(self, *exception):
        for owner, name in self.owners_and_names:
            delattr(owner, name)  # the class has the original

    def _timed(self, method):
        @functools.wraps(method)  # the host reads the signature of a forward
        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.num_calls += 1

        return timed


def decode(target, inputs, view, arguments, seed) -> tuple[int, float]:
    """New tokens of all rows, padding excluded, and the walltime in s, prefill included."""
    sampling = {"do_sample": False}
    if arguments.temperature > 0:
        sampling = {"do_sample": True, "temperature": arguments.temperature}
    torch.manual_seed(seed)
    start = time.perf_counter()
    output = target.generate(**inputs, assistant_model=view, max_new_tokens=arguments.max_new_tokens, **sampling)
    seconds = time.perf_counter() - start
    new = output[:, inputs["input_ids"].shape[1] :]
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    lengths = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in new.tolist()]
    return sum(lengths), seconds


def summarize(runs: list[tuple[int, float]], plain: list[tuple[int, float]], counted: DraftStatistics | None) -> dict:
    """Figures of one way: rates over all batches, and the speedup of each batch."""
    speedups = [(n / s) / (m / t) for (n, s), (m, t) in zip(runs, plain, strict=True)]
    quartiles = statistics.quantiles(speedups, n=4) if len(speedups) > 1 else speedups * 3
    row = {
        "tokens_per_s": sum(n for n, _ in runs) / sum(s for _, s in runs),
        "speedup_median": quartiles[1],
        "speedup_quartiles": [quartiles[0], quartiles[2]],
    }
    return row if counted is None else row | {"statistics": counted.to_dict()}


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    target, tokenizer = load_demo_target()
    drelay = DRelayModel.from_pretrained(resolve_drafter(arguments.drafter))
    views = ways(drelay, arguments)
    order = random.Random(arguments.seed)
    rows = []
    short = argparse.Namespace(**vars(arguments) | {"max_new_tokens": min(32, arguments.max_new_tokens)})
    for file in arguments.prompts:
        prompts = read_prompts(file, arguments.num_prompts)
        for size in arguments.batch_sizes:
            names = [name for name in views if size == 1 or not name.startswith("host")]
            runs = {name: [] for name in names}
            counted = {name: DraftStatistics() for name in names if name != "plain"}
            for number, inputs in enumerate(
                tqdm(batches(tokenizer, prompts, size)[: arguments.num_batches], desc=f"{file.stem} x {size}")
            ):
                if number == 0:  # the first calls pay for kernel selection and memory
                    for name in names:
                        decode(target, inputs, views[name], short, seed=0)
                for name in order.sample(names, len(names)):
                    runs[name].append(decode(target, inputs, views[name], arguments, arguments.seed + number))
                    if name in counted:
                        counted[name].merge(views[name].statistics)
            for name in names:
                row = {"kind": file.stem, "batch_size": size, "name": name}
                row |= summarize(runs[name], runs["plain"], counted.get(name))
                if size == 1:
                    row["host_ms"] = host_ms(target, drelay, batches(tokenizer, prompts[:2], 1), views[name], short)
                rows.append(row)
                rate, speedup = row["tokens_per_s"], row["speedup_median"]
                print(f"{file.stem} x {size} {name:16s} {rate:7.1f} tokens/s {speedup:.2f}")
            write_json(arguments.output, make_record(arguments, target, drelay, rows))  # so that a stop loses little


def host_ms(target, drelay, inputs: list[dict], view, arguments) -> float:
    """Mean ms of a round (plainly: of a token) outside the forward of the target and the drafting."""
    with (
        Stopwatch((target, "forward")) as forward,
        Stopwatch((drelay, "draft"), (drelay, "continue_after")) as drafting,
    ):
        seconds = sum(decode(target, one, view, arguments, 0)[1] for one in inputs)
    return 1e3 * (seconds - forward.seconds - drafting.seconds) / forward.num_calls


def make_record(arguments, target, drelay, rows) -> dict:
    return {
        "command": command_line(),
        "arguments": {k: str(v) for k, v in vars(arguments).items() if k not in ("prompts", "output")},
        "prompt_files": [file.name for file in arguments.prompts],
        "environment": environment(),
        "target": describe_demo_target(target),
        "drafter": drelay.config.to_diff_dict(),
        "rows": rows,
    }


if __name__ == "__main__":
    main()

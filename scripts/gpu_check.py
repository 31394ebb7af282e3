"""One prepared run for a machine with a GPU and no network, with random weights throughout.

    bash scripts/gpu_check.sh

Three questions, in sections that do not depend on each other: is assisted decoding lossless on this device, do the
attention backends of the drafter agree, and what does a round cost at the shapes of Qwen3-4B and Qwen3-8B? A section
that breaks is recorded with its error and the others go on; sections that `--budget-s` leaves no time for are recorded
as skipped. The record `gpu_check.json` goes into the folder `--output` (by default `$OUT`, else `docs/results`) and is
written again after every section. The exit code is 1 when a losslessness section failed. `--tiny` runs the same on a
CPU at tiny shapes.
"""

# The checkout must be made importable before it is imported.
# ruff: noqa: E402

import argparse
import copy
import functools
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import is_flash_attn_2_available, is_torch_flex_attn_available


ROOT = Path(__file__).resolve().parents[1]


def make_importable() -> None:
    """
    Let `hf_drelay` mean this checkout, installed or not. Only an installation knows that the folder `modeling/` is
    `hf_drelay.modeling`, and it may belong to another checkout, so the name is registered here.
    """
    for folder in (ROOT / "scripts", ROOT):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    name, folder = "hf_drelay.modeling", ROOT / "modeling"
    found = importlib.util.find_spec(name)
    if found is not None and Path(found.origin).resolve().parent == folder:
        return
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    sys.modules["hf_drelay"].modeling = module


make_importable()

from round_cost import Bench, describe_error, greedy, memory_problem, preset, random_ids, time_preset, wake

from hf_drelay import DRelayConfig, DRelayDrafterModel, DRelayModel
from hf_drelay.evaluation.divergence import first_divergence
from hf_drelay.evaluation.records import cpu_name, environment, write_json
from hf_drelay.modeling.configuration_drelay import LAYOUTS
from hf_drelay.modeling.modeling_base import Pool


EXPLAINED_GAP = 1e-5  # in float32: two tokens whose logits are closer than this are a tie that rounding decides
BACKENDS = ("sdpa", "flash_attention_2", "flex_attention")


class CheckFailed(Exception):
    """A check found something wrong; the message says what."""


class Skipped(Exception):
    """A section cannot run here; the message says why."""


class BudgetSpent(Exception):
    """There is no time for another piece of work."""


@dataclass
class Run:
    """
    Circumstances of the whole run.

    Attributes:
        device (`torch.device`): Where everything is computed.
        is_tiny (`bool`): Tiny shapes and few repeats.
        seed (`int`): Set before each section.
        deadline_s (`float`): Reading of `time.perf_counter` after which nothing new is begun.
    """

    device: torch.device
    is_tiny: bool
    seed: int
    deadline_s: float

    def check_time(self) -> None:
        """Raise `BudgetSpent` when there is no time left."""
        if time.perf_counter() > self.deadline_s:
            raise BudgetSpent("the time budget is spent")


# ---------------------------------------------------------------------------------------------------------------------
# Losslessness
# ---------------------------------------------------------------------------------------------------------------------

TINY_TARGETS = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
TINY_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Wide enough that greedy text does not repeat one token, and no wider: rounding must not be amplified.
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LOOP_GATES = {"off": None, "always": float("-inf")}


def check_losslessness(dtype: torch.dtype, run: Run, result: dict) -> None:
    """
    Greedy ids with a drafter against plain ones: two targets, both layouts, DLoop off and always. Once begun, it is
    finished whatever the time, so that no difference goes unjudged.

    Raises:
        CheckFailed: For a difference that rounding does not explain, or when the drafts exercised too little.
    """
    result["cases"] = cases = []
    for kind in TINY_TARGETS:
        target = tiny_target(kind, dtype, run)
        prompt_ids = random_ids(12, target.config.vocab_size, run.device)
        plain_ids = new_tokens(target, prompt_ids, run)
        text_ids = torch.cat([prompt_ids, torch.tensor([plain_ids], device=run.device)], dim=1)
        gap = explained_gap(target, text_ids)
        for layout in LAYOUTS:
            drelay = scripted_drafter(target, layout, text_ids.cpu())
            for name, loop_gate in LOOP_GATES.items():
                view = drelay.with_options(loop_gate=loop_gate, max_stages=3)
                ids = new_tokens(target, prompt_ids, run, assistant_model=view)
                divergence = first_divergence(target, prompt_ids, plain_ids, ids)
                case = {"target": kind, "layout": layout, "loop_gate": name, "num_tokens": len(ids)}
                case |= {"divergence": None if divergence is None else vars(divergence), "explained_gap": gap}
                cases.append(case | describe_rounds(view.statistics, drelay.config.num_drafts))
    judge_losslessness(cases)


def judge_losslessness(cases: list[dict]) -> None:
    """Raise `CheckFailed` for an unexplained difference, and when an event that could break a cache never happened."""
    for case in cases:
        if case["divergence"] is not None and case["divergence"]["logit_gap"] >= case["explained_gap"]:
            where = ", ".join(case[name] for name in ("target", "layout", "loop_gate"))
            raise CheckFailed(f"unexplained difference ({where}): {case['divergence']}")
    for event in ("num_accepted", "num_repaired_right", "num_crossings", "num_late_rejections"):
        if not sum(case[event] for case in cases):
            raise CheckFailed(f"the drafts exercised too little: `{event}` is 0")


@torch.no_grad()
def explained_gap(target, text_ids: torch.LongTensor) -> float:
    """
    Largest gap of the two best logits at which rounding can swap them. Below float32 it is measured: six times the rms
    error of the logits against float32 arithmetic, of which the worst of thousands of logits reaches about five.
    """
    if target.dtype == torch.float32:
        return EXPLAINED_GAP
    exact = copy.deepcopy(target).float()
    return 6 * (target(text_ids).logits - exact(text_ids).logits).pow(2).mean().sqrt().item()


def tiny_target(kind: str, dtype: torch.dtype, run: Run):
    """A tiny target; its weights are drawn on the CPU, so that they are the same on every device."""
    model_class, config_class = TINY_TARGETS[kind]
    torch.manual_seed(run.seed)
    return model_class(config_class(**TINY_SIZES)).eval().to(run.device, dtype)


def new_tokens(target, prompt_ids: torch.LongTensor, run: Run, **arguments) -> list[int]:
    """New tokens of a greedy `generate()`."""
    return greedy(target, prompt_ids, 16 if run.is_tiny else 96, **arguments)


def scripted_drafter(target, layout: str, reference_ids: torch.LongTensor) -> DRelayModel:
    """
    A drafter with random weights that finds the target's own tokens in its pools. By itself it would never be right,
    and then the verification of accepted tokens, the part that depends on the device, would never be tested.
    """
    torch.manual_seed(1)
    config = DRelayConfig.for_target(
        target.config,
        layout=layout,
        block_size=5 if layout == "fill_in" else 4,
        num_hidden_layers=2,
        pool_size=8,
        selector_hidden_size=32,
        selector_num_layers=1,
        pair_rank=8,
        history_window=12,
        initializer_range=0.2,  # wide, so that the selector changes many choices
    )
    drelay = DRelayModel(config).eval()
    wake(drelay, config.initializer_range)
    drelay.to(target.device, target.dtype)
    generator = torch.Generator().manual_seed(2)

    def head_inputs(rows, anchor_ids, session):
        inputs = DRelayModel.head_inputs(drelay, rows, anchor_ids, session)
        first, (_, num_slots, size) = session.anchor_position + 1, inputs.pool.ids.shape
        known = reference_ids[:, first : first + num_slots]
        known = torch.nn.functional.pad(known, (0, num_slots - known.shape[1]))
        inputs.pool = scripted_pool(known, size, config.vocab_size, generator, rows.device)
        return inputs

    drelay.head_inputs = head_inputs
    return drelay


def scripted_pool(known: torch.LongTensor, size: int, vocab_size: int, generator, device) -> Pool:
    """Pool led by the tokens of `known` `(1, K)`, or in 30 % of the slots by a wrong token just ahead of them."""
    logits = torch.randn(1, known.shape[1], vocab_size, generator=generator)
    wrong = (known + torch.randint(1, vocab_size, known.shape, generator=generator)) % vocab_size
    is_spoiled = torch.rand(known.shape, generator=generator) < 0.3
    logits.scatter_(2, known[..., None], 7.0)
    logits.scatter_(2, wrong[..., None], torch.where(is_spoiled, 7.5, 4.0)[..., None])
    return Pool.from_logits(logits.to(device), size)


def describe_rounds(rounds, num_drafts: int) -> dict:
    """Counts of what the rounds of one call went through; `rounds` is its `DraftStatistics`."""
    accepted = [committed - 1 for committed in rounds.num_committed]
    later = [
        (n, drafted)
        for n, drafted, stages in zip(accepted, rounds.num_drafted, rounds.num_stages, strict=True)
        if stages > 1
    ]
    return {
        "num_rounds": rounds.num_rounds,
        "acceptance_length": rounds.acceptance_length if rounds.num_rounds else None,
        "num_accepted": sum(accepted),
        "num_repaired_right": rounds.num_repaired_right,
        "num_crossings": sum(n > num_drafts for n, _ in later),
        "num_late_rejections": sum(num_drafts <= n < drafted for n, drafted in later),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Attention backends
# ---------------------------------------------------------------------------------------------------------------------

LAYER_KINDS = {
    "full": {},
    "full_causal": {"block_causal": [True, True]},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16},
    "sliding_bidirectional": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 16,
        "block_causal": [False, False],
    },
}


def check_backends(run: Run, result: dict) -> None:
    """
    One block forward of the drafter by every backend, against eager attention of the same type.

    Raises:
        CheckFailed: When a backend broke, or differs by more than rounding explains.
    """
    result["missing"] = missing = {}
    result["rows"] = rows = []
    for backend in BACKENDS:
        reason = missing_reason(backend, run.device)
        if reason is not None:
            missing[backend] = reason
            continue
        for dtype in (torch.float32, torch.bfloat16):
            if dtype is torch.float32 and backend == "flash_attention_2":
                continue  # these kernels take half precision only
            for layout in LAYOUTS:
                for kind in LAYER_KINDS:
                    run.check_time()
                    rows.append(compare_backend(backend, dtype, layout, kind, run))
    bad = [row for row in rows if not row["is_close"]]
    if bad:
        names = sorted({row["backend"] for row in bad})
        raise CheckFailed(f"{len(bad)} of {len(rows)} comparisons are off or broke, of {', '.join(names)}")


def missing_reason(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot be compared here, or `None`."""
    if backend == "sdpa":
        return None
    if device.type != "cuda":
        return "compared on CUDA devices only"
    if backend == "flash_attention_2" and not is_flash_attn_2_available():
        return "the package flash-attn is not installed"
    if backend == "flex_attention" and not is_torch_flex_attn_available():
        return "this torch has no flex attention"
    return None


def compare_backend(backend: str, dtype: torch.dtype, layout: str, kind: str, run: Run) -> dict:
    """
    Largest difference of the slots' states between a backend and eager attention. The states have passed the final
    norm, so they are of order 1. The yardstick is what rounding alone does to eager attention.
    """
    row = {"backend": backend, "dtype": str(dtype).removeprefix("torch."), "layout": layout, "layers": kind}
    eager = slot_states("eager", dtype, dtype, layout, kind, run)
    exact = slot_states("eager", dtype, torch.float32, layout, kind, run)
    row["eager_rounding"] = (eager - exact).abs().max().item()
    row["tolerance"] = max(1e-4, 3 * row["eager_rounding"])
    try:
        difference = (slot_states(backend, dtype, dtype, layout, kind, run) - eager).abs().max().item()
    except Exception as error:  # whatever a kernel or a compiler raises; the other comparisons must go on
        return row | {"max_abs_diff": None, "is_close": False, "error": describe_error(error)}
    is_number = difference == difference
    return row | {"max_abs_diff": difference if is_number else "nan", "is_close": difference <= row["tolerance"]}


@torch.no_grad()
def slot_states(backend: str, weight_dtype, dtype, layout: str, kind: str, run: Run) -> torch.FloatTensor:
    """
    States `(1, K, H)` of a block behind 48 context positions, computed in `dtype` with weights rounded to
    `weight_dtype`.
    """
    width = 64 if run.is_tiny else 512
    config = DRelayConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        num_target_layers=8,
        layout=layout,
        block_size=8,
        initializer_range=width**-0.5,
        **LAYER_KINDS[kind],
    )
    torch.manual_seed(run.seed)
    drafter = DRelayDrafterModel._from_config(config, attn_implementation=backend).eval()
    inputs = torch.randn(1, 48 + config.block_size, width)
    drafter, inputs = (x.to(run.device, weight_dtype).to(dtype) for x in (drafter, inputs))
    positions = torch.arange(inputs.shape[1], device=run.device)[None]
    cache = drafter.new_cache()
    drafter.extend(inputs[:, :48], positions[:, :48], cache)
    states = drafter(inputs[:, 48:], positions[:, 48:], cache).last_hidden_state.float()
    return states[:, 1:] if layout == "fill_in" else states


# ---------------------------------------------------------------------------------------------------------------------
# Cost of a round
# ---------------------------------------------------------------------------------------------------------------------

TINY_OVERRIDES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_target_layers": 6,
    "mask_token_id": 0,
    "selector_hidden_size": 32,
    "pair_rank": 16,
    "block_size": 4,
}


def check_cost(name: str, run: Run, result: dict) -> None:
    """Time the phases of a round at the sizes of a preset, where the device has the memory."""
    config, has_tied_head = preset(name, **(TINY_OVERRIDES if run.is_tiny else {}))
    result["sizes"] = {field: getattr(config, field) for field in TINY_OVERRIDES}
    problem = memory_problem(config, has_tied_head, run.device)
    if problem is not None:
        raise Skipped(problem)
    num_repeats, num_rounds = (3, 3) if run.is_tiny else (25, 12)
    time_preset(config, has_tied_head, Bench(run.device, num_repeats, num_rounds, run.check_time), result)


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------

# The backends come last: compiling one takes long, and a kernel that crashes takes the process with it.
SECTIONS: dict[str, Callable[[Run, dict], None]] = {
    "losslessness_float32": functools.partial(check_losslessness, torch.float32),
    "losslessness_bfloat16": functools.partial(check_losslessness, torch.bfloat16),
    "cost_qwen3-4b": functools.partial(check_cost, "qwen3-4b"),
    "cost_qwen3-8b": functools.partial(check_cost, "qwen3-8b"),
    "attention_backends": check_backends,
}


def run_section(section: Callable[[Run, dict], None], run: Run) -> dict:
    """Record of one section; whatever it measured before it stopped is kept."""
    record = {"status": "skipped", "reason": None, "seconds": 0.0, "result": {}}
    start_s = time.perf_counter()
    has_begun = False
    try:
        run.check_time()
        has_begun = True
        free_memory(run.device)
        torch.manual_seed(run.seed)
        section(run, record["result"])
        record["status"] = "ok"
    except Skipped as reason:
        record["reason"] = str(reason)
    except BudgetSpent as reason:
        record |= {"status": "incomplete" if has_begun else "skipped", "reason": str(reason)}
    except CheckFailed as reason:
        record |= {"status": "failed", "reason": str(reason)}
    except Exception as error:  # a section that breaks must not take the others with it
        traceback.print_exc()
        record |= {"status": "error", "reason": describe_error(error)}
    record["seconds"] = time.perf_counter() - start_s
    return record


def free_memory(device: torch.device) -> None:
    """Give back what the section before left, also when it was stopped by an error."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def hardware(device: torch.device) -> dict:
    """What the shared record of the environment does not tell about the machine."""
    if device.type != "cuda":
        return {"device_type": device.type, "device": cpu_name()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device_type": device.type,
        "memory_gib": properties.total_memory / 2**30,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": driver_version(),
    }


def driver_version() -> str | None:
    """Version of the NVIDIA driver, `None` when its tool is not there."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.split("\n")[0].strip() or None


def print_summary(sections: dict) -> None:
    """The figures to look at first."""
    for name, section in sections.items():
        result = section["result"]
        print(f"{name}: {section['status']}{': ' + section['reason'] if section['reason'] else ''}")
        for backend, reason in result.get("missing", {}).items():
            print(f"  {backend}: skipped, {reason}")
        for row in result.get("rows", []):
            if not row["is_close"]:
                print(f"  {row}")
        for phase, times in result.get("phases", {}).items():
            replay_ms = times.get("replay_ms")
            replayed = "" if replay_ms is None else f", replayed {replay_ms:9.3f} ms"
            print(f"  {phase:17} {times['median_ms']:9.3f} ms{replayed}")
        for part in ("weight_traffic", "walltime", "overhead"):
            if part in result:
                print(f"  {part}: {rounded(result[part])}")
        for clock, share in result.get("shares", {}).items():
            figures = ", ".join(f"{key} {share[key]:.3f}" for key in ("draft", "select", "draft_and_select"))
            print(f"  shares of a target pass ({clock}): {figures}; expected {result['expected_shares']}")


def rounded(figures: dict) -> dict:
    """The same figures with three decimals."""
    return {key: rounded(value) if isinstance(value, dict) else round(value, 3) for key, value in figures.items()}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("OUT") or ROOT / "docs" / "results"
    parser.add_argument("--output", type=Path, default=default, help="folder of gpu_check.json")
    parser.add_argument("--budget-s", type=float, default=220.0, help="no new work is begun after this many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to test this script")
    arguments = parser.parse_args(argv)
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device is visible to torch; use --tiny to run at tiny shapes on the CPU")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run all sections; returns the exit code."""
    arguments = parse_arguments(argv)
    start_s = time.perf_counter()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    run = Run(device, arguments.tiny, arguments.seed, start_s + arguments.budget_s)
    torch.set_float32_matmul_precision("highest")  # losslessness in float32 is meant without TF32
    path = arguments.output / "gpu_check.json"
    record = {
        "command": "bash scripts/gpu_check.sh" + " --tiny" * arguments.tiny,
        "environment": environment() | hardware(device),
        "seed": arguments.seed,
        "budget_s": arguments.budget_s,
        "is_tiny": arguments.tiny,
        "sections": {},
    }
    for name, section in SECTIONS.items():
        print(f"{name} ...", flush=True)
        record["sections"][name] = {"status": "running"}  # stays so in the file if the process dies
        write_json(path, record)
        record["sections"][name] = run_section(section, run)
        record["seconds"] = time.perf_counter() - start_s
        write_json(path, record)
    print_summary(record["sections"])
    print(f"record: {path}")
    statuses = [section["status"] for name, section in record["sections"].items() if name.startswith("losslessness")]
    return int(any(status in ("failed", "error") for status in statuses))


if __name__ == "__main__":
    sys.exit(main())

"""Tiny targets and scripted drafters of the modeling tests, and rows of a benchmark that nobody ran."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest

from hf_drelay.modeling.draft_statistics import DraftStatistics


@pytest.fixture(scope="session")
def tiny():
    """The builders of `tests/modeling/conftest.py`, which are no fixtures outside of their folder."""
    name = "tests_modeling_builders"
    if name not in sys.modules:
        path = Path(__file__).resolve().parents[1] / "modeling" / "conftest.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _statistics(
    rng: random.Random, strength: float, num_slots: int, num_rounds: int, repairs: bool
) -> DraftStatistics:
    """Rounds with that chance of acceptance at each slot."""
    statistics = DraftStatistics()
    for _ in range(num_rounds):
        accepted = next((i for i in range(num_slots) if rng.random() > strength), num_slots)
        chosen = list(range(10, 10 + accepted)) + [99]
        drafts = list(range(10, 10 + accepted)) + [50] * (num_slots - accepted)
        choices = [int(repairs and rng.random() < 0.2) for _ in drafts]
        pool = [70 if choice else draft for draft, choice in zip(drafts, choices, strict=True)]
        statistics.add_round(drafts, choices, pool, chosen, num_stages=1 + num_slots // 8)
    return statistics


@pytest.fixture(scope="session")
def invented_rows():
    """
    Builds rows with the fields that the benchmark writes: `invented_rows(tasks, gates, num_prompts)`, one drafter with
    a way for each gate, beside plain decoding and prompt lookup.
    """

    def build(
        tasks, gates=(None, -0.5), num_prompts: int = 3, drafters=("SmolLM2-135M-Instruct-DRelay",)
    ) -> list[dict]:
        rng = random.Random(0)
        ways = [("plain", "plain", None, None, 0.0), ("prompt lookup", "prompt_lookup", None, None, 0.35)]
        for number, drafter in enumerate(drafters):
            for gate in gates:
                suffix = "" if gate is None else f" + DLoop {gate}"
                ways.append((drafter + suffix, "drafter", drafter, gate, 0.55 + 0.1 * number))
        return [_row(rng, task, prompt, *way) for task in tasks for prompt in range(num_prompts) for way in ways]

    return build


def _row(rng, task, prompt, way, kind, drafter, gate, strength) -> dict:
    rounds, slots = 40, 14 if gate is not None else 7
    statistics = None if kind == "plain" else _statistics(rng, strength, slots, rounds, kind == "drafter")
    num_tokens = 1 + (rounds if statistics is None else sum(statistics.num_committed))
    round_ms = {"draft": 0.0, "select": 0.0, "verify": 31.0, "overhead": 1.2}
    if kind == "drafter":
        round_ms = {"draft": 8.0 + (4.0 if gate is not None else 0.0), "select": 5.0, "verify": 52.0, "overhead": 2.0}
    noise = rng.uniform(0.9, 1.1)
    phases = {"prefill": 40.0} | {phase: ms * rounds * noise for phase, ms in round_ms.items()}
    walltime_ms = sum(phases.values())
    plain_rate = 31.0
    rate = num_tokens / walltime_ms * 1e3
    return {
        "task": task,
        "prompt": prompt,
        "turn": 0,
        "way": way,
        "kind": kind,
        "drafter": drafter,
        "loop_gate": gate,
        "max_stages": 3 if drafter else None,
        "num_draft_tokens": None,
        "proposal": "sample" if drafter else None,
        "confidence_threshold": 0.0 if drafter else None,
        "block_size": 8 if drafter else None,
        "num_tokens": num_tokens,
        "walltimes_s": [walltime_ms / 1e3],
        "tokens_per_s": rate,
        "speedup": 1.0 if kind == "plain" else rate / plain_rate,
        "phases_ms": phases,
        "phases_walltime_ms": walltime_ms,
        "num_forwards": rounds,
        "overhead_share": 0.0 if kind == "plain" else 0.2,
        "break_even_tau": sum(round_ms.values()) / 32.2,
        "peak_memory_mb": 1200.0,
        "identical": True,
        "divergence": None,
        "statistics": None if statistics is None else statistics.to_dict(),
        "text": "an answer" if kind == "plain" else None,
        "pieces": [["The", "t"], [" answer is", "k"], [" <b>5</b>", "r"], [" &", "t"]] if drafter else None,
        "run": "0123456789ab",
        "source": f"{task}.jsonl",
        "command": "hf-drelay benchmark --output rows.json",
        "target": "tiny",
        "target_origin": "memory",
        "target_revision": None,
        "target_weights_sha256": "ab" * 32,
        "dtype": "float32",
        "attention": "sdpa",
        "batch_size": 1,
        "settings": {"max_new_tokens": 128, "temperature": 0.0, "seed": 0, "template_mode": None},
        "environment": {
            "device": "a processor",
            "cpu_threads": 1,
            "torch": "2",
            "transformers": "5",
            "hf_drelay": "0.1.0",
        },
    }

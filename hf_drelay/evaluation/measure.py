"""One measured `generate()` call: walltime, where it went, rounds, peak memory.

The target's forwards are timed by hooks, the same for every way of decoding, so plain decoding, prompt lookup and
drafters are compared by one clock. What is neither a forward of the target nor drafting is overhead: the decoding
loop, sampling, cache roll-back.
"""

import contextlib
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hf_drelay.modeling.compat import cache_argument
from hf_drelay.modeling.draft_statistics import DraftStatistics

from .timing import timed_generate
from .ways import fix_cache_length


PHASES = ("prefill", "draft", "select", "verify", "overhead")


@dataclass(frozen=True)
class Forward:
    """One forward of the target: tokens in the cache before it (`None` if unknown), tokens fed, ms."""

    start: int | None
    width: int
    elapsed_ms: float


class TargetClock:
    """
    Context manager that notes every forward of `target`, and times it. With CUDA the times need synchronisation, so a
    run under them is no run to take the walltime from; without `is_timed` forwards are counted only, at no cost.
    """

    def __init__(self, target, is_timed: bool = True):
        self.target = target
        self.is_timed = is_timed
        self.forwards: list[Forward] = []
        self._handles: list = []
        self._begun: tuple[int | None, int, float] = (None, 0, 0.0)

    def __enter__(self):
        self._handles = [
            self.target.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.target.register_forward_hook(self._end),
        ]
        return self

    def __exit__(self, *error):
        for handle in self._handles:
            handle.remove()

    def _begin(self, module, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        cache = cache_argument(kwargs)
        start = None if cache is None else int(cache.get_seq_length())
        self._begun = (start, ids.shape[1], self._now())

    def _end(self, module, args, output):
        start, width, begun_s = self._begun
        self.forwards.append(Forward(start, width, (self._now() - begun_s) * 1e3))

    def _now(self) -> float:
        if self.is_timed and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def round_lengths(self, total_length: int) -> list[int]:
        """
        Tokens committed after each forward but the prefill, from where the next one starts. `total_length` counts
        prompt and new tokens; the newest token is in no cache.
        """
        rounds = self.forwards[1:]
        if not rounds:  # the prefill's token was the last one
            return []
        ends = [forward.start for forward in rounds[1:]] + [total_length - 1]
        return [end - forward.start for forward, end in zip(rounds, ends, strict=True)]

    def statistics(self, total_length: int) -> DraftStatistics:
        """Rounds of an assistant that counts none itself: a forward over more than one token verified a draft."""
        statistics = DraftStatistics()
        for forward, committed in zip(self.forwards[1:], self.round_lengths(total_length), strict=True):
            if forward.width == 1:
                statistics.num_plain_rounds += 1
                continue
            statistics.num_committed.append(committed)
            statistics.num_accepted.append(min(committed, forward.width) - 1)
            statistics.num_drafted.append(forward.width - 1)
            statistics.num_stages.append(1)
        return statistics


@dataclass
class Measurement:
    """
    One way of decoding on one prompt. Everything but the phases is of the first repeat, if not said otherwise.

    Attributes:
        new_ids (`list[int]`): Generated tokens.
        walltimes_s (`list[float]`): Of each repeat, prefill included.
        tokens_per_s (`list[float]`): Of each repeat. Sampled repeats whose drafts differ, as those of a cost-aware
            gate do, can differ in length.
        phases_ms (`dict[str, float]`, *optional*): Total ms of each of `PHASES`, of one call; they add up to
            `phases_walltime_ms`. `None` for compiled decoding, which hooks would break up.
        phases_num_forwards (`int`, *optional*): Forwards of the target behind the prefill in that call, which on a GPU
            is another one than the first repeat.
        num_forwards (`int`, *optional*): Forwards of the target behind the prefill.
        round_lengths, round_widths (`list[int]`): Tokens committed after each of them, and tokens fed to it.
        statistics (`DraftStatistics`, *optional*): What was drafted; `None` without drafts.
        peak_memory_mb (`float`): See `peak_memory_mb`.
    """

    new_ids: list[int]
    walltimes_s: list[float]
    tokens_per_s: list[float] = field(default_factory=list)
    phases_ms: dict[str, float] | None = None
    phases_walltime_ms: float | None = None
    phases_num_forwards: int | None = None
    num_forwards: int | None = None
    round_lengths: list[int] = field(default_factory=list)
    round_widths: list[int] = field(default_factory=list)
    statistics: DraftStatistics | None = None
    peak_memory_mb: float = 0.0


def measure(target, inputs, way, seed: int = 0, repeats: int = 1, **arguments) -> Measurement:
    """
    Decode `repeats` times in `way` and say where the time went.

    On a CPU the clocks cost nothing, and the phases are those of the first repeat. A GPU has to be synchronised for
    them, which costs time, so there the phases come from a call of their own.

    Args:
        way (`Way`): How to decode.
        arguments: Of `generate()`, the same for every way; `max_new_tokens` among them.
    """
    on_cpu = target.device.type == "cpu"
    if way.kind == "compiled":
        fix_cache_length(target, inputs["input_ids"].shape[1] + arguments["max_new_tokens"])
        # Compilation for a new length is no part of decoding. The same call, so that the shapes are those measured.
        timed_generate(target, inputs, seed, **(arguments | way.arguments()))
    result = Measurement(new_ids=[], walltimes_s=[])
    reset_peak_memory(target.device)
    for number in range(repeats):
        # On a CPU always the view with clocks: a cost-aware gate has learned there.
        call = arguments | way.arguments(is_profiled=on_cpu)
        watched = contextlib.nullcontext() if way.kind == "compiled" else TargetClock(target, is_timed=on_cpu)
        with watched as clock:
            new_ids, walltime_s = timed_generate(target, inputs, seed, **call)
        result.walltimes_s.append(walltime_s)
        result.tokens_per_s.append(len(new_ids) / walltime_s)
        if number == 0:
            result.new_ids = new_ids
            if clock is not None:
                _count(result, clock, inputs, way, way.statistics(is_profiled=on_cpu))
            if on_cpu and clock is not None:
                _split_time(result, clock, walltime_s, result.statistics)
    result.peak_memory_mb = peak_memory_mb(target.device)
    if not on_cpu and way.has_phases:
        with TargetClock(target) as clock:
            _, walltime_s = timed_generate(target, inputs, seed, **(arguments | way.arguments(is_profiled=True)))
        _split_time(result, clock, walltime_s, way.statistics(is_profiled=True))
    return result


def _count(result: Measurement, clock: TargetClock, inputs, way, drafted: DraftStatistics | None) -> None:
    """Fill in the rounds of a call."""
    total_length = inputs["input_ids"].shape[1] + len(result.new_ids)
    if drafted is None and way.has_drafts:
        drafted = clock.statistics(total_length)
    result.statistics = drafted
    result.num_forwards = len(clock.forwards) - 1
    if all(forward.start is not None for forward in clock.forwards[1:]):
        result.round_lengths = clock.round_lengths(total_length)
        result.round_widths = [forward.width for forward in clock.forwards[1:]]


def _split_time(result: Measurement, clock: TargetClock, walltime_s: float, drafted: DraftStatistics | None) -> None:
    """Fill in the phases of a call that took `walltime_s` under `clock`."""
    times = [forward.elapsed_ms for forward in clock.forwards]
    own = {} if drafted is None else drafted.phase_ms
    phases = {
        "prefill": sum(times[:1]),
        "draft": own.get("draft", 0.0),
        "select": own.get("select", 0.0),
        "verify": sum(times[1:]),
    }
    result.phases_num_forwards = len(times) - 1
    result.phases_walltime_ms = walltime_s * 1e3
    result.phases_ms = phases | {"overhead": result.phases_walltime_ms - sum(phases.values())}


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak. On Linux the kernel can forget the peak of a process; elsewhere it is that of its life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # not Linux, or not allowed: the peak then covers the whole life of the process


def peak_memory_mb(device: torch.device) -> float:
    """Peak since `reset_peak_memory`, in MiB: tensors on a GPU, the resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)

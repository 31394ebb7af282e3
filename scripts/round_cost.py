"""What the phases of one decoding round cost at the sizes of a preset, with random weights; used by `gpu_check.py`.

Every phase is a step that leaves no trace, so that it can be repeated behind the same context. On a CUDA device a step
is timed twice. Between two events: that is what a round waits for, and for a step of many small kernels it is the time
that the host needs to launch them. And replayed from a recorded graph: the time of its kernels alone.
"""

import functools
import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.streamers import BaseStreamer

from hf_drelay import DRelayConfig, DRelayModel
from hf_drelay.modeling.compat import hidden_states_request
from hf_drelay.modeling.draft_session import DraftSession
from hf_drelay.modeling.modeling_heads import walk_fixed_point, walk_slots
from hf_drelay.modeling.proposal import Proposal


CONTEXT_LENGTH = 512
EXTEND_LENGTH = 4  # verified positions that a typical round feeds to the drafter
USUAL_PASSES = 3  # of the fixed-point walk of a trained selector
# What the method expects of a round at Qwen3-4B sizes, as shares of a one-token pass of the target: the memory traffic
# of drafting and selecting is about 19 % of the target's, of which the selector may add at most 2 points.
EXPECTED_SHARE = {"draft_and_select": 0.19, "select": 0.02}

_HAS_TIED_HEAD = {"qwen3-4b": True, "qwen3-8b": False}
_SHARED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
)
_ROUND = ("extend", "backbone", "head", "global_read", "walk_fixed_point")  # and a verification


@dataclass
class Bench:
    """
    How to measure.

    Attributes:
        device (`torch.device`): Where everything is computed.
        num_repeats (`int`): Timed repeats of a step.
        num_rounds (`int`): Timed rounds of a `generate()` call.
        check_time (`Callable`): Called before each measurement; raises when there is no time for it.
    """

    device: torch.device
    num_repeats: int
    num_rounds: int
    check_time: Callable[[], None]


def time_preset(config: DRelayConfig, has_tied_head: bool, bench: Bench, result: dict) -> None:
    """
    Time every phase of a round with a random target and drafter; `result` is filled as the figures come in.

    Args:
        config (`DRelayConfig`): Sizes of the drafter, and of its target.
        has_tied_head (`bool`): Whether the target's head is its embedding table.
    """
    target, drelay = build_pair(config, has_tied_head, bench.device)
    wake(drelay, config.initializer_range)
    result["weight_traffic"] = weight_traffic(target, drelay)
    parts = RoundParts(target, drelay, bench.device)
    result |= {"dtype": "bfloat16", "context_length": CONTEXT_LENGTH, "fixed_point_passes": parts.count_passes()}
    result["phases"] = phases = {}
    for phase, step in parts.steps.items():
        bench.check_time()
        phases[phase] = time_step(step, bench)
    result["walltime"] = walltime = time_rounds(parts, bench)
    # Last, because a recording that fails may leave the device in a bad state.
    for phase, step in parts.steps.items() if bench.device.type == "cuda" else ():
        bench.check_time()
        phases[phase] |= time_replay(phase, step, bench)
    if bench.device.type == "cuda":
        complete_fixed_point(phases, result["fixed_point_passes"])
    needed = ("target_1", "score_pass", *_ROUND, f"verify_{parts.num_verified}")
    clocks = [c for c in ("median_ms", "replay_ms") if all(phases[name].get(c) is not None for name in needed)]
    result["overhead"] = {clock: host_overhead(walltime, phases, clock, parts.num_verified) for clock in clocks}
    result["shares"] = {clock: shares(phases, clock) for clock in clocks}
    result["expected_shares"] = EXPECTED_SHARE


def preset(name: str, **overrides) -> tuple[DRelayConfig, bool]:
    """Configuration of a preset, and whether its target's head is tied."""
    return DRelayConfig.preset(name, **overrides), _HAS_TIED_HEAD[name]


def build_pair(config: DRelayConfig, has_tied_head: bool, device: torch.device):
    """Target and drafter with random bfloat16 weights, built on the device."""
    target_config = Qwen3Config(
        **{field: getattr(config, field) for field in _SHARED_SIZES},
        num_hidden_layers=config.num_target_layers,
        tie_word_embeddings=has_tied_head,
        pad_token_id=0,
    )
    with device:
        target = Qwen3ForCausalLM._from_config(target_config, dtype=torch.bfloat16).eval()
        drelay = DRelayModel._from_config(config, dtype=torch.bfloat16).eval()
    return target, drelay


@torch.no_grad()
def wake(model: DRelayModel, std: float) -> None:
    """Give random values to everything that starts at zero; an untrained selector would keep every token."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=std)


def weight_traffic(target, drelay: DRelayModel) -> dict[str, float]:
    """
    GiB of weights that a one-token pass of the target, a draft and a selection read, and their shares of the pass: the
    cost of a round where memory traffic is all that counts. Tables that are looked up by rows are left out.
    """
    looked_up = {id(p) for name, p in drelay.selector.named_parameters() if name.endswith(("_table", "_table.weight"))}
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    looked_up |= {id(embedding)} - {id(head)}

    def gib(module) -> float:
        return sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in looked_up) / 2**30

    target_gib, draft_gib = gib(target), gib(drelay.drafter) + head.numel() * head.element_size() / 2**30
    select_gib = gib(drelay.selector)
    return {
        "target_gib": target_gib,
        "draft_gib": draft_gib,
        "select_gib": select_gib,
        "draft_share": draft_gib / target_gib,
        "select_share": select_gib / target_gib,
    }


def memory_problem(config: DRelayConfig, has_tied_head: bool, device: torch.device) -> str | None:
    """Why the weights, with room to work in, do not fit on the device; `None` if they do."""
    free = free_bytes(device)
    if free is None:
        return None
    models = build_pair(config, has_tied_head, torch.device("meta"))
    weights = sum(p.numel() * p.element_size() for model in models for p in model.parameters())
    needed = 1.1 * weights + 2 * 2**30
    if free >= needed:
        return None
    return f"needs {needed / 2**30:.1f} GiB of device memory, {free / 2**30:.1f} GiB are free"


def free_bytes(device: torch.device) -> int | None:
    """Free device memory; `None` where no device limits it."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def random_ids(length: int, vocab_size: int, device: torch.device) -> torch.LongTensor:
    """Random token ids `(1, length)`, the same on every device."""
    return torch.randint(1, vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(device)


class RoundParts:
    """
    The phases of one round behind a context of `CONTEXT_LENGTH`.

    Attributes:
        steps (`dict[str, Callable]`): By phase. `target_1` is a decode step, `verify_n` a verification of n tokens
            that returns the tapped states, `extend` feeds `EXTEND_LENGTH` verified positions to the drafter,
            `backbone` and `head` draft a block, `global_read` is the parallel part of the selector, `score_pass` one
            pass of the fixed-point walk.
        num_verified (`int`): Tokens that a round with one full stage verifies.
    """

    @torch.no_grad()
    def __init__(self, target, drelay: DRelayModel, device: torch.device):
        self.target, self.drelay, self.config = target, drelay, drelay.config
        self.num_verified = self.config.num_drafts + 1
        self.prompt_ids = random_ids(CONTEXT_LENGTH, self.config.vocab_size, device)
        self.anchor_ids = self.prompt_ids[:, -1]
        self._request = hidden_states_request(self.config.target_layer_ids, target.get_decoder().forward)
        # The name of the argument changed in 5.24.
        parameters = inspect.signature(target.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._cache = DynamicCache(config=target.config)
        self._session = DraftSession(drelay.drafter, drelay.adapter(target))
        self._states = self._verify(self.prompt_ids)
        self._session.extend(self._states)
        self._session.begin_stage(self.prompt_ids)
        self._freeze()
        self._rows = self._backbone()
        self._inputs = self._head(self._rows)
        state, pool = drelay.selector.read(self._inputs), self._inputs.pool
        choose = Proposal([], self.config.vocab_size, is_sampled=False).start_stage(pool)
        self._walk_arguments = (drelay.selector, state, pool, self.anchor_ids, choose)
        self.steps = {name: self._repeatable(step) for name, step in self._phases().items()}

    def _phases(self) -> dict[str, Callable]:
        selector, state, pool, _, choose = self._walk_arguments
        path_ids = torch.cat([self.anchor_ids[:, None], pool.ids[:, :-1, 0]], dim=1)
        sizes = sorted({2, 4, 8, 16, 32, self.num_verified})
        return {
            "target_1": lambda: self._forward(self.prompt_ids[:, :1]),
            **{f"verify_{n}": functools.partial(self._verify, self.prompt_ids[:, :n]) for n in sizes},
            "extend": lambda: self._session.extend(self._states[:, :EXTEND_LENGTH]),
            "backbone": self._backbone,
            "head": lambda: self._head(self._rows),
            "global_read": lambda: selector.read(self._inputs),
            "score_pass": lambda: choose(selector.score(state, path_ids), 0),
            "walk_fixed_point": lambda: walk_fixed_point(*self._walk_arguments),
            "walk_sequential": lambda: walk_slots(*self._walk_arguments),
        }

    def _forward(self, input_ids, **arguments):
        return self.target(input_ids, use_cache=True, **{self._cache_name: self._cache}, **arguments)

    def _verify(self, input_ids) -> torch.Tensor:
        outputs = self._forward(input_ids, output_hidden_states=self._request)
        return self._session.adapter.tapped(outputs.hidden_states, self.config.target_layer_ids)

    def _backbone(self) -> torch.Tensor:
        embeds = self.drelay.drafter.block_embeds(self.anchor_ids, self._session.adapter.embed)
        positions = self._session.positions(self._session.anchor_position, self.config.block_size)
        return self.drelay.drafter(embeds, positions, self._session.cache).last_hidden_state

    def _head(self, rows):
        return self.drelay.head_inputs(rows, self.anchor_ids, self._session)

    def _freeze(self) -> None:
        """Remember the state that every step starts from; caches grow by new tensors, so the old ones stay as is."""
        caches = (self._cache, self._session.cache)
        self._layers = [(layer, layer.keys, layer.values) for cache in caches for layer in cache.layers]
        changing = ("num_verified", "history", "history_mask")
        self._fields = {name: getattr(self._session, name) for name in changing}

    def _restore(self) -> None:
        for layer, keys, values in self._layers:
            layer.keys, layer.values = keys, values
        vars(self._session).update(self._fields)

    def _repeatable(self, step: Callable) -> Callable:
        @torch.no_grad()
        def repeatable():
            step()
            self._restore()

        return repeatable

    @torch.no_grad()
    def count_passes(self) -> int:
        """Passes that the fixed-point walk takes here; a trained selector may need more or fewer."""
        *fixed, choose = self._walk_arguments
        num_passes = 0

        def counted(logits, first):
            nonlocal num_passes
            num_passes += 1
            return choose(logits, first)

        walk_fixed_point(*fixed, counted)
        return num_passes


def time_step(step: Callable, bench: Bench) -> dict:
    """Median and interquartile range, in ms, of a step after a warm-up."""
    for _ in range(max(2, bench.num_repeats // 5)):
        step()
    samples = [clock_ms(step, bench.device) for _ in range(bench.num_repeats)]
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median_ms": median, "iqr_ms": high - low, "num_repeats": len(samples)}


def clock_ms(step: Callable, device: torch.device) -> float:
    """Time of one step: between two events of a CUDA device, else on the host's clock."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        step()
        return (time.perf_counter() - start_s) * 1e3
    flush_cache(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def flush_cache(device: torch.device) -> None:
    """Empty the device's cache of what the last repeat left: in a round, the target's weights pass through it."""
    torch.empty(2**26, dtype=torch.int32, device=device).zero_()


def time_replay(phase: str, step: Callable, bench: Bench) -> dict:
    """Time of a step's kernels alone, `replay_ms`: recorded once as a graph and replayed."""
    if phase == "walk_fixed_point":
        return {"replay_ms": None}  # it looks at its result on the host, which cannot be recorded
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up outside of the recording
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return {"replay_ms": time_step(graph.replay, bench)["median_ms"]}
    except Exception as error:  # not every version of a target can be recorded; the plain times stand all the same
        return {"replay_ms": None, "replay_error": describe_error(error)}


def describe_error(error: Exception) -> str:
    """Type and beginning of the message in one line; compilers write pages."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def complete_fixed_point(phases: dict, num_passes: int) -> None:
    """The walk cannot be recorded as a whole, but its kernels are those of its passes."""
    one_pass = phases["score_pass"]["replay_ms"]
    if one_pass is not None:
        phases["walk_fixed_point"]["replay_ms"] = num_passes * one_pass


class RoundClock(BaseStreamer):
    """Reads the clock whenever `generate()` hands tokens over: the prompt, the first token, then once a round."""

    def __init__(self):
        self.readings_s: list[float] = []

    def put(self, value) -> None:
        self.readings_s.append(time.perf_counter())

    def end(self) -> None:
        pass

    def median_ms(self, num_rounds: int) -> float:
        """Median of the first rounds; near the end of a text drafts get shorter."""
        spans = [after - before for before, after in zip(self.readings_s[1:], self.readings_s[2:], strict=False)]
        return statistics.median(spans[:num_rounds]) * 1e3


def time_rounds(parts: RoundParts, bench: Bench) -> dict:
    """
    Walltime, in ms, of a round and of a plainly decoded token in a real `generate()` behind the context of the phases,
    and the drafter's own account of a round, whose clock waits for the device after each phase.
    """
    num_tokens = bench.num_rounds + parts.num_verified + 1  # the last rounds have no room for a full draft
    view = parts.drelay.with_options(loop_gate=None, profile=False)
    walltime_ms = {}
    for name, assistant in (("plain_token_ms", {}), ("round_ms", {"assistant_model": view})):
        for _ in range(2):  # the first call warms up
            bench.check_time()
            clock = RoundClock()
            greedy(parts.target, parts.prompt_ids, num_tokens, streamer=clock, **assistant)
        walltime_ms[name] = clock.median_ms(bench.num_rounds)
    profiled = view.with_options(profile=True)
    bench.check_time()
    greedy(parts.target, parts.prompt_ids, num_tokens, assistant_model=profiled)
    num_rounds, phase_ms = profiled.statistics.num_rounds, profiled.statistics.phase_ms
    return walltime_ms | {
        "acceptance_length": view.statistics.acceptance_length,
        "profiled_round_ms": {name: ms / num_rounds for name, ms in phase_ms.items() if name != "prefill"},
    }


def greedy(target, prompt_ids: torch.LongTensor, num_tokens: int, **arguments) -> list[int]:
    """New tokens of a greedy `generate()`."""
    mask = torch.ones_like(prompt_ids)
    output_ids = target.generate(
        prompt_ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens, **arguments
    )
    return output_ids[0, prompt_ids.shape[1] :].tolist()


def host_overhead(walltime: dict, phases: dict, clock: str, num_verified: int) -> dict:
    """What of the walltime of a round, and of a plainly decoded token, the phases do not account for, in ms."""
    phases_ms = sum(phases[name][clock] for name in (*_ROUND, f"verify_{num_verified}"))
    return {
        "phases_ms": phases_ms,
        "round_overhead_ms": walltime["round_ms"] - phases_ms,
        "plain_overhead_ms": walltime["plain_token_ms"] - phases["target_1"][clock],
    }


def shares(phases: dict, clock: str) -> dict[str, float]:
    """
    Every phase as a share of the target's one-token step. `select` is the Global Read and `USUAL_PASSES` passes of the
    walk: with random weights their number says little.
    """
    times_ms = {name: phase[clock] for name, phase in phases.items() if phase[clock] is not None}
    share = {name: value / times_ms["target_1"] for name, value in times_ms.items()}
    draft = share["extend"] + share["backbone"] + share["head"]
    select = share["global_read"] + USUAL_PASSES * share["score_pass"]
    return share | {"draft": draft, "select": select, "draft_and_select": draft + select}

"""The benchmark: every way of decoding on every prompt, side by side in one process, one row for each.

The ways take turns prompt by prompt in changing order, so that a machine that slows down slows all of them. Rows of
one turn are appended together; a killed run goes on behind its last whole turn. Everything a row needs to be judged
(weights, settings, versions, hardware) is in the row.
"""

import hashlib
import json
import random
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm.auto import tqdm

from hf_drelay.modeling.draft_statistics import DraftStatistics

from .divergence import first_divergence
from .measure import Measurement, measure
from .records import append_rows, describe_target, environment, recover_rows, replace_rows, sole_writer
from .tasks import Conversation, encode_conversation, max_prompt_length
from .timing import timed_generate
from .ways import PLAIN, Way


WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class BenchmarkConfig:
    """
    Settings that all ways share.

    Attributes:
        max_new_tokens (`int`): Limit of each answer.
        temperature (`float`): 0 decodes greedily; only then can outputs be compared token by token.
        top_p (`float`), top_k (`int`): Filters of sampling; 1 and 0 are off, whatever the target's own defaults.
        seed (`int`): Of the prompts' order, the ways' order and sampling; every way gets the same one.
        repeats (`int`): Calls of each way on each prompt; the median counts.
        template_mode (`str`, *optional*): Of chat templates that think or not.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    repeats: int = 1
    template_mode: str | None = None

    def __post_init__(self):
        for name in ("max_new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; use at least 1.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"`temperature` is {self.temperature}; use 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` is {self.top_p}; it is a probability, so use more than 0 and at most 1 (off).")
        if self.top_k < 0:
            raise ValueError(f"`top_k` is {self.top_k}; use a number of tokens, or 0 (off).")
        given = [name for name, off in (("top_p", 1.0), ("top_k", 0)) if getattr(self, name) != off]
        if given and self.temperature == 0:
            raise ValueError(
                f"`{given[0]}` {getattr(self, given[0])} has no effect at `temperature` 0, which decodes greedily. "
                f"Give a temperature above 0 or leave out `{given[0]}`."
            )

    def generate_arguments(self) -> dict:
        """Arguments of `generate()`."""
        arguments = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            arguments |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return arguments


def run_benchmark(
    target,
    tokenizer,
    ways: list[Way],
    conversations: Iterable[Conversation],
    config: BenchmarkConfig,
    output: str | Path,
    sources: dict[str, str] | None = None,
    command: str | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> list[dict]:
    """
    Measure all ways on all turns of all conversations and append the rows to `output`.

    Args:
        target (`PreTrainedModel`), tokenizer: The target.
        ways (`list[Way]`): What to compare; the plain way must be among them.
        conversations (`Iterable[Conversation]`): The prompts.
        output (`str` or `Path`): A JSON-lines file.
        sources (`dict[str, str]`, *optional*): Data set of each task, for the rows.
        command (`str`, *optional*): What made the rows, for the rows.
        resume (`bool`): Go on behind the whole turns that `output` has.

    Returns:
        All rows of `output`.

    Raises:
        ValueError: If `output` has rows and `resume` is off, or its rows were measured with other settings.
    """
    if PLAIN not in [way.name for way in ways]:
        raise ValueError(f"`ways` lacks {PLAIN!r}, which speedups are measured against.")
    if len({way.name for way in ways}) < len(ways):
        raise ValueError(f"`ways` has two of the same name among {[way.name for way in ways]}; rename one.")
    conversations = list(conversations)
    circumstances = _circumstances(target, config)
    run_id = _run_id(circumstances, ways)
    shared = {"run": run_id, "command": command} | circumstances
    is_warm = False
    total = sum(len(conversation.turns) for conversation in conversations)
    with sole_writer(output), tqdm(total=total, unit="turn", disable=quiet) as bar:
        rows = _whole_turns(Path(output), [way.name for way in ways], run_id, resume)
        done = {(row["task"], row["prompt"], row["turn"]): row for row in rows if row["way"] == PLAIN}
        check_same_prompts(Path(output), done, conversations)
        for conversation, turn in ((c, turn) for c in conversations for turn in range(len(c.turns))):
            task = conversation.task
            if turn == 0:
                answers = []
            plain_row = done.get((task, conversation.index, turn))
            if plain_row is None:
                limit = max_prompt_length(target, config.max_new_tokens)
                said = conversation.turns[: turn + 1]
                prompt = encode_conversation(tokenizer, said, answers, config.template_mode, limit)
                if not is_warm:
                    _warm_up(target, prompt.inputs, ways, config)
                    is_warm = True
                key = {"task": task, "prompt": conversation.index, "turn": turn}
                new = _measure_turn(target, tokenizer, prompt, ways, config, key)
                own = {"source": (sources or {}).get(task), "turns_sha256": turns_sha256(conversation, turn)}
                new = [row | shared | own for row in new]
                append_rows(output, new)
                rows += new
                plain_row = next(row for row in new if row["way"] == PLAIN)
            # The history of all ways is the plain answer, so that all of them see the same second prompt.
            answers.append(plain_row["text"])
            bar.update()
    return rows


def _circumstances(target, config: BenchmarkConfig) -> dict:
    return {
        **describe_target(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.config._attn_implementation,
        "batch_size": 1,
        "settings": asdict(config),
        "generation_config": _own_generation(target),
        "environment": environment(),
    }


def _own_generation(target) -> dict:
    """Defaults of the target's own that hold beside the settings, a repetition penalty for one; tokens left out."""
    fields = target.generation_config.to_diff_dict()
    settled = {"transformers_version", "_from_model_config", "do_sample", "temperature", "top_p", "top_k"}
    settled |= {"max_new_tokens", "max_length"}
    return {name: value for name, value in fields.items() if name not in settled and not name.endswith("_token_id")}


def _run_id(circumstances: dict, ways: list[Way]) -> str:
    """Short hash of everything that must be the same for rows to stand in one file."""
    content = [circumstances, [(way.name, way.description) for way in ways]]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _whole_turns(output: Path, names: list[str], run_id: str, resume: bool) -> list[dict]:
    """Rows of the turns that `output` has from all ways; what a killed run left half is removed from the file."""
    if output.is_file() and output.stat().st_size and not resume:
        raise ValueError(f"`output` {output} has rows already. Add `--resume` to go on, or give another name.")
    rows = recover_rows(output)
    other = next((row for row in rows if row.get("run") != run_id), None)
    if other is not None:
        raise ValueError(
            f"`output` {output} has rows of another run ({other.get('run')}, this one is {run_id}): target, drafters, "
            "settings, versions or machine differ. Use the same ones to resume, or give another name."
        )
    turns: dict[tuple, set[str]] = {}
    for row in rows:
        turns.setdefault((row["task"], row["prompt"], row["turn"]), set()).add(row["way"])
    whole = [row for row in rows if turns[row["task"], row["prompt"], row["turn"]] >= set(names)]
    if output.is_file():
        replace_rows(output, whole)
    return whole


def turns_sha256(conversation: Conversation, turn: int) -> str:
    """Hash of what the user says up to this turn."""
    return hashlib.sha256(json.dumps(conversation.turns[: turn + 1]).encode()).hexdigest()[:16]


def check_same_prompts(output: Path, done: dict[tuple, dict], conversations: list[Conversation]) -> None:
    """Raise a `ValueError` when a prompt that has rows says something else now."""
    for conversation in conversations:
        for turn in range(len(conversation.turns)):
            row = done.get((conversation.task, conversation.index, turn))
            if row is not None and row.get("turns_sha256") != turns_sha256(conversation, turn):
                raise ValueError(
                    f"`output` {output} has rows of {conversation.task} prompt {conversation.index}, whose text has "
                    "changed since. Use the same prompts to resume, or give another name."
                )


def _warm_up(target, inputs, ways: list[Way], config: BenchmarkConfig) -> None:
    """The first calls pay for kernel selection, compilation and memory; none of them is measured."""
    arguments = config.generate_arguments()
    arguments["max_new_tokens"] = min(WARM_UP_TOKENS, config.max_new_tokens)
    inputs = {name: tensor.to(target.device) for name, tensor in inputs.items()}
    for way in ways:
        if way.kind == "compiled":  # warmed up on every prompt, for its length
            continue
        for is_profiled in (False, True):
            timed_generate(target, inputs, config.seed, **(arguments | way.arguments(is_profiled)))


def _measure_turn(target, tokenizer, prompt, ways: list[Way], config: BenchmarkConfig, key: dict) -> list[dict]:
    """Rows of all ways on one prompt, in the order of `ways`."""
    inputs = {name: tensor.to(target.device) for name, tensor in prompt.inputs.items()}
    seed = _seed_of(config.seed, key)
    order = random.Random(seed).sample(ways, len(ways))
    found: dict[str, Measurement] = {}
    for way in order:
        found[way.name] = measure(target, inputs, way, seed, config.repeats, **config.generate_arguments())
    plain = found[PLAIN]
    compiled = next((found[way.name] for way in ways if way.kind == "compiled"), None)
    rows = []
    for way in ways:
        result = found[way.name]
        row = key | {"way": way.name, "kind": way.kind, "order": order.index(way), "seed": seed}
        row |= {"prompt_tokens": inputs["input_ids"].shape[1], "prompt_tokens_cut": prompt.num_cut}
        row |= way.description | _speed(result, plain, compiled) | _phase_figures(result, plain)
        row["peak_memory_mb"] = round(result.peak_memory_mb, 1)
        row["statistics"] = None if result.statistics is None else result.statistics.to_dict()
        if config.temperature == 0:
            divergence = first_divergence(target, inputs["input_ids"], plain.new_ids, result.new_ids)
            row["identical"] = divergence is None
            row["divergence"] = None if divergence is None else asdict(divergence)
        if way.name == PLAIN:
            row["text"] = tokenizer.decode(result.new_ids, skip_special_tokens=True)
        row["pieces"] = _pieces(tokenizer, result) if way.kind == "drafter" else None
        rows.append(row)
    return rows


def _seed_of(seed: int, key: dict) -> int:
    """A seed of each turn that does not depend on which turns were done before."""
    return seed + int(hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:6], 16)


def _speed(result: Measurement, plain: Measurement, compiled: Measurement | None) -> dict:
    """
    Tokens/s, the median over the repeats, and its ratio to plain decoding on this prompt. Sampled runs differ in
    length, so the ratios are of rates and not of times. Without compiled decoding there is no ratio to it.
    """
    rate = statistics.median(result.tokens_per_s)
    speed = {
        "num_tokens": len(result.new_ids),
        "walltimes_s": result.walltimes_s,
        "tokens_per_s": rate,
        "speedup": rate / statistics.median(plain.tokens_per_s),
    }
    if compiled is not None:
        speed["speedup_over_compiled"] = rate / statistics.median(compiled.tokens_per_s)
    return speed


def _phase_figures(result: Measurement, plain: Measurement) -> dict:
    """
    Where the time went, and two figures made from it.

    `overhead_share` is the share of the walltime that is neither a forward of the target nor what plain decoding
    spends beside them for as many rounds: for a drafter that proposes nothing the speedup is one minus it.
    `break_even_tau` is the τ at which the rounds of this call would have been as fast as plain decoding.
    """
    if result.phases_ms is None:
        return {"phases_ms": None, "phases_walltime_ms": None, "overhead_share": None, "break_even_tau": None}
    phases, walltime_ms = result.phases_ms, result.phases_walltime_ms
    rounds, plain_rounds = result.phases_num_forwards, plain.phases_num_forwards
    figures = {"phases_ms": phases, "phases_walltime_ms": walltime_ms, "phases_num_forwards": rounds}
    figures |= {"num_forwards": result.num_forwards}
    if result.round_lengths:
        figures["round_tokens"] = sum(result.round_lengths)
    if not rounds or not plain_rounds:  # a single token: there is no round to speak of
        return figures | {"overhead_share": None, "break_even_tau": None}
    plain_overhead_ms = plain.phases_ms["overhead"] * (rounds + 1) / (plain_rounds + 1)
    beside_target_ms = walltime_ms - phases["prefill"] - phases["verify"]
    round_ms = (walltime_ms - phases["prefill"]) / rounds
    plain_ms = (plain.phases_walltime_ms - plain.phases_ms["prefill"]) / plain_rounds
    return figures | {
        "overhead_share": (beside_target_ms - plain_overhead_ms) / walltime_ms,
        "break_even_tau": round_ms / plain_ms,
    }


def _pieces(tokenizer, result: Measurement) -> list[list[str]]:
    """`[text, origin]` for runs of tokens of the same origin, see `token_origins`; the texts make up the answer."""
    letters = token_origins(result)[: len(result.new_ids)]
    ends = [i for i in range(1, len(letters)) if letters[i] != letters[i - 1]] + [len(result.new_ids)]
    pieces, done = [], ""
    for end in ends:
        text = tokenizer.decode(result.new_ids[:end], skip_special_tokens=True)
        if end < len(result.new_ids):
            text = text.rstrip("\ufffd")  # a character whose last bytes are yet to come
        if len(text) > len(done):
            pieces.append([text[len(done) :], letters[end - 1] if letters else "t"])
            done = text
    return pieces


def token_origins(result: Measurement) -> str:
    """
    A letter for each new token, see `DraftStatistics.origins`. Accepted tokens of rounds whose origin nobody kept
    (those of a tree) count as kept.
    """
    drafted = result.statistics or DraftStatistics()
    known = iter(drafted.origins if len(drafted.origins) == drafted.num_rounds else [])
    letters = "t"  # the prefill's
    for width, length in zip(result.round_widths, result.round_lengths, strict=True):
        plain = "k" * (length - 1) + "t"
        letters += plain if width == 1 else next(known, plain)
    return letters

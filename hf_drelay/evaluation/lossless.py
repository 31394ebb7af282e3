"""Greedy losslessness: drafters against plain decoding, prompt by prompt, with the reason of every difference."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tqdm.auto import tqdm

from .benchmark import BenchmarkConfig, check_same_prompts, turns_sha256
from .divergence import first_divergence
from .records import (
    append_rows,
    cut_prompts,
    describe_target,
    environment,
    recover_rows,
    replace_rows,
    sole_writer,
    target_name,
)
from .tasks import Conversation, encode_conversation, max_prompt_length
from .timing import timed_generate
from .ways import Way


def check_lossless(
    target,
    tokenizer,
    ways: list[Way],
    conversations: Iterable[Conversation],
    config: BenchmarkConfig,
    output: str | Path,
    resume: bool = False,
    quiet: bool = False,
    command: str | None = None,
) -> list[dict]:
    """
    Decode first turns plainly and in every way, and append a row for each comparison to `output`.

    Several types of the target go into one file, one call after the other. `command`, what made the rows, goes into
    them.

    Returns:
        The rows of this type. `divergence` is `None` for equal outputs; otherwise `is_explained` tells whether the
        gap of the target's two best logits is within rounding.

    Raises:
        ValueError: If the temperature is not 0, `output` has rows of this type and `resume` is off, or its rows are of
            other settings, ways or prompts.
    """
    if config.temperature > 0:
        raise ValueError(
            f"`temperature` is {config.temperature}; token ids can be compared at 0 only. Distributions are compared "
            "by the statistical tests."
        )
    dtype = str(target.dtype).removeprefix("torch.")
    described = describe_target(target)
    settings = {"max_new_tokens": config.max_new_tokens, "template_mode": config.template_mode}
    conversations, output = list(conversations), Path(output)
    limit = max_prompt_length(target, config.max_new_tokens)
    with sole_writer(output):
        rows = recover_rows(output)
        own = [row for row in rows if row.get("dtype") == dtype]
        if own and not resume:
            raise ValueError(f"`output` {output} has rows of {dtype} already. Add `--resume`, or give another name.")
        _check_same_run(output, own, settings, described, ways)
        check_same_prompts(output, {(row["task"], row["prompt"], 0): row for row in own}, conversations)
        done = {(row["task"], row["prompt"], row["way"]) for row in own}
        if output.is_file():
            replace_rows(output, rows)  # without a torn end, behind which nothing can be appended
        for conversation in tqdm(conversations, desc=dtype, unit="prompt", disable=quiet):
            key = {"task": conversation.task, "prompt": conversation.index}
            due = [way for way in ways if (*key.values(), way.name) not in done]
            if not due:
                continue
            prompt = encode_conversation(tokenizer, conversation.turns[:1], (), config.template_mode, limit)
            shared = described | {"settings": settings, "environment": environment(), "command": command}
            shared |= {"turns_sha256": turns_sha256(conversation, 0), "prompt_tokens_cut": prompt.num_cut}
            new = [key | compared | shared for compared in _compare(target, prompt.inputs, due, config)]
            append_rows(output, new)
            own += new
    return own


def _compare(target, inputs: dict, ways: list[Way], config: BenchmarkConfig) -> list[dict]:
    """What each of the ways gives in the place of the plain output."""
    inputs = {name: tensor.to(target.device) for name, tensor in inputs.items()}
    plain_ids, _ = timed_generate(target, inputs, config.seed, **config.generate_arguments())
    found = []
    for way in ways:
        new_ids, _ = timed_generate(target, inputs, config.seed, **(config.generate_arguments() | way.arguments()))
        divergence = first_divergence(target, inputs["input_ids"], plain_ids, new_ids)
        explained = None if divergence is None else asdict(divergence) | {"is_explained": divergence.is_explained}
        row = {"way": way.name, "dtype": str(target.dtype).removeprefix("torch."), "num_tokens": len(plain_ids)}
        found.append(row | {"divergence": explained} | way.description)
    return found


def _check_same_run(output: Path, rows: list[dict], settings: dict, described: dict, ways: list[Way]) -> None:
    """Raise a `ValueError` when rows are about something else: other settings, target, drafter or options."""
    for row in rows:
        if (row.get("settings"), row.get("target_weights_sha256")) != (settings, described["target_weights_sha256"]):
            raise ValueError(
                f"`output` {output} has rows with other settings or another target ({row.get('settings')}, weights "
                f"{row.get('target_weights_sha256')}). Use the same ones to resume, or give another name."
            )
    described = {way.name: json.loads(json.dumps(way.description, default=str)) for way in ways}
    for row in rows:
        for field, value in described.get(row["way"], {}).items():
            if row.get(field) != value:
                raise ValueError(
                    f"`output` {output} has rows of {row['way']!r} with another `{field}` ({row.get(field)!r}, now "
                    f"{value!r}). Use the same drafter and options to resume, or give another name."
                )


def summarize_lossless(rows: list[dict]) -> list[dict]:
    """Counts for each type and way: prompts, tokens, differences, and those that rounding does not explain."""
    records = []
    for dtype, way in dict.fromkeys((row["dtype"], row["way"]) for row in rows):
        chosen = [row for row in rows if (row["dtype"], row["way"]) == (dtype, way)]
        found = [row["divergence"] for row in chosen if row["divergence"] is not None]
        records.append(
            {
                "dtype": dtype,
                "way": way,
                "num_prompts": len(chosen),
                "num_tokens": sum(row["num_tokens"] for row in chosen),
                "num_different": len(found),
                "num_unexplained": sum(not divergence["is_explained"] for divergence in found),
                "largest_gap": max((divergence["logit_gap"] for divergence in found), default=None),
            }
        )
    return records


def circumstances(rows: list[dict]) -> str:
    """What was compared, where and how, in one sentence for each target and machine of the rows."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        same = [row[name] for name in ("target", "target_weights_sha256", "settings", "environment")]
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(row)
    return " ".join(_circumstances(chosen) for chosen in groups.values())


def _circumstances(rows: list[dict]) -> str:
    row, settings, machine = rows[0], rows[0]["settings"], rows[0]["environment"]
    counts: dict[str, set] = {}
    for other in rows:
        counts.setdefault(other["task"], set()).add(other["prompt"])
    num_cut = len({(other["task"], other["prompt"]) for other in rows if other.get("prompt_tokens_cut")})
    data = ", ".join(f"{len(prompts)} of {task}" for task, prompts in counts.items()) + cut_prompts(num_cut)
    sha = (row["target_weights_sha256"] or "unknown")[:12]
    return (
        f"Greedy outputs compared token by token: prompts: {data}; at most {settings['max_new_tokens']} new tokens, "
        f"template mode {settings['template_mode'] or 'default'}; target {target_name(row)} ({row['target_origin']}, "
        f"revision {row['target_revision'] or 'unknown'}, weights {sha}), "
        f"{', '.join(dict.fromkeys(other['dtype'] for other in rows))}; {machine['device']}, {machine['cpu_threads']} "
        f"threads, torch {machine['torch']}, transformers {machine['transformers']}, hf_drelay {machine['hf_drelay']}."
    )


def explain(row: dict) -> str:
    """One sentence about a row with a difference."""
    d = row["divergence"]
    verdict = "rounding explains it" if d["is_explained"] else "rounding does NOT explain it"
    return (
        f"{row['dtype']}, {row['way']}, {row['task']} prompt {row['prompt']}: token {d['position']} is "
        f"{d['other_id']} instead of {d['plain_id']}; the target's two best logits are {d['logit_gap']:.3g} apart, "
        f"its rounding is about {d['rounding']:.2g}: {verdict}."
    )

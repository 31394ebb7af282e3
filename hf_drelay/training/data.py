"""Responses written by the target itself, as token sequences to train on.

A drafter learns to predict one particular target, so its training text must be the target's own. A response file holds
one JSON object per line: `prompt` (user text), `response_ids` (token ids, the end token last when the response ended),
and optionally `set` and `mode`.
"""

import functools
import glob
import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging

from hf_drelay.evaluation.records import read_jsonl
from hf_drelay.evaluation.tasks import TEMPLATE_MODES


logger = logging.get_logger(__name__)


@dataclass
class ResponseExample:
    """
    One conversation turn.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(T,)`): Prompt with template, then the response.
        prompt_length (`int`): Tokens before the response.
        prompt (`str`): User text.
        mode (`str`): How the target decoded the response, e.g. `"greedy"`.
    """

    input_ids: torch.LongTensor
    prompt_length: int
    prompt: str
    mode: str

    @functools.cached_property
    def key(self) -> str:
        """What identifies the tokens, from run to run."""
        return hashlib.blake2b(self.input_ids.numpy().tobytes(), digest_size=8).hexdigest()

    @property
    def response_ids(self) -> torch.LongTensor:
        return self.input_ids[self.prompt_length :]


def encode_prompt(tokenizer, prompt: str, mode: str | None = None) -> list[int]:
    """Token ids of one user turn in the tokenizer's chat template, ready for the answer."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt)["input_ids"]
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **TEMPLATE_MODES[mode]
    )
    return encoded["input_ids"]


def read_prompts(source: str | Path, num_prompts: int | None = None) -> list[str]:
    """
    User texts of a source.

    Args:
        source (`str` or `Path`): A JSON-lines file with `{"turns": [...]}` or `{"prompt": ...}` in each line, a `.txt`
            file with one text in each line, or a data set of the Hub as `owner/name:split:column`.
        num_prompts (`int`, *optional*): Stop after so many.
    """
    prompts = []
    for text in _texts(source):
        if text.strip():
            prompts.append(text)
        if num_prompts is not None and len(prompts) == num_prompts:
            break
    if not prompts:
        raise ValueError(f"`{source}` holds no prompt.")
    return prompts


def _texts(source: str | Path) -> Iterator[str]:
    path = Path(source)
    if path.suffix == ".txt":
        yield from path.read_text(encoding="utf-8").splitlines()
    elif path.exists() or str(source).count(":") != 2:
        for row in read_jsonl(path):
            if not isinstance(row, dict) or not (row.get("turns") or "prompt" in row):
                raise ValueError(f"`{source}`: every line needs `turns` or `prompt`; found {str(row)[:60]!r}.")
            yield row["turns"][0] if row.get("turns") else row["prompt"]
    else:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ImportError("Data sets of the Hub need `pip install hf-drelay[train]`.") from error
        name, split, column = str(source).split(":")
        yield from load_dataset(name, split=split, streaming=True).select_columns(column)[column]


def response_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """
    Files that `paths` name: files, folders (their `.jsonl` and `.jsonl.gz` files), patterns such as `runs/*.jsonl`.

    Raises:
        ValueError: If one of them names no file.
    """
    files = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        folder = Path(path)
        if folder.is_dir():
            found = [file for suffix in ("*.jsonl", "*.jsonl.gz") for file in folder.glob(suffix)]
        elif folder.is_file():
            found = [folder]
        else:
            found = [Path(name) for name in glob.glob(str(path))]
        if not found:
            raise ValueError(f"`{path}` names no response file; make some with `hf-drelay prepare-data --output DIR`.")
        files += sorted(found)
    return files


def load_responses(
    paths: str | Path | Iterable[str | Path],
    tokenizer,
    max_length: int = 2048,
    min_response: int = 4,
    mode: str | None = None,
) -> list[ResponseExample]:
    """
    Responses of one or several files as examples, see `response_files`. What cannot teach anything is left out, and a
    warning tells how much of it there was: responses with fewer than `min_response` tokens within `max_length`, and
    repeated ones. `mode` is that of the chat template, see `TEMPLATE_MODES`.

    Raises:
        ValueError: If the files have no usable response, or hold tokens that the tokenizer does not know.
    """
    paths = response_files(paths)
    examples: dict[str, ResponseExample] = {}
    skipped: Counter = Counter()
    for path in paths:
        for row in read_jsonl(path):
            example = _example(row, path, tokenizer, max_length, mode)
            if len(row["response_ids"]) < min_response:
                skipped["too short"] += 1
            elif len(example.response_ids) < min_response:
                skipped["prompt too long"] += 1
            elif example.key in examples:
                skipped["repeated"] += 1
            else:
                examples[example.key] = example
    if skipped:
        counts = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        logger.warning(f"hf_drelay: of {len(examples) + skipped.total()} responses, these were left out: {counts}.")
    if not examples:
        raise ValueError(
            f"No response of at least {min_response} tokens in {', '.join(f'`{path}`' for path in paths)}; check the "
            "files and `max_length`."
        )
    return list(examples.values())


def _example(row: dict, path, tokenizer, max_length: int, mode: str | None) -> ResponseExample:
    if "prompt" not in row or "response_ids" not in row:
        raise ValueError(f"`{path}`: every line needs `prompt` and `response_ids`; found {sorted(row)}.")
    largest = max(row["response_ids"], default=0)
    if largest >= len(tokenizer):
        raise ValueError(
            f"`{path}` holds token {largest}, but the tokenizer knows {len(tokenizer)} tokens; these responses belong "
            "to another target."
        )
    prompt_ids = encode_prompt(tokenizer, row["prompt"], mode)
    ids = (prompt_ids + row["response_ids"])[:max_length]
    return ResponseExample(torch.tensor(ids), min(len(prompt_ids), len(ids)), row["prompt"], row.get("mode", "greedy"))


def split_by_prompt(
    examples: list[ResponseExample], num_held_out: int, seed: int = 0
) -> tuple[list[ResponseExample], list[ResponseExample]]:
    """Training and held-out examples that share no prompt; `num_held_out` counts held-out examples."""
    groups: dict[str, list[ResponseExample]] = {}
    for example in examples:
        groups.setdefault(example.prompt, []).append(example)
    prompts = sorted(groups)
    random.Random(seed).shuffle(prompts)
    train, held_out = [], []
    for prompt in prompts:
        (held_out if len(held_out) < num_held_out else train).extend(groups[prompt])
    return train, held_out


def frequent_tokens(examples: Iterable[ResponseExample], size: int, always: Iterable[int] = ()) -> torch.LongTensor:
    """
    The `size` tokens that the responses use most, sorted, with all of `always` among them: the shortlist. If fewer are
    used, the lowest unused ids fill it up.
    """
    counts = Counter(token for example in examples for token in example.response_ids.tolist())
    chosen = dict.fromkeys(always)
    candidates = [token for token, _ in counts.most_common()] + [i for i in range(size) if i not in counts]
    for token in candidates:
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    return torch.tensor(sorted(chosen))

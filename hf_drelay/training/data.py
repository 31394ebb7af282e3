"""Responses written by the target itself, as token sequences to train on.

A drafter learns to predict one particular target, so its training text must be the target's own. A response file holds
one JSON object per line: `prompt` (user text), `response_ids` (token ids, the end token last when the response ended),
and optionally `set` and `mode`.
"""

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


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

    @property
    def response_ids(self) -> torch.LongTensor:
        return self.input_ids[self.prompt_length :]


def encode_prompt(tokenizer, prompt: str) -> list[int]:
    """Token ids of one user turn in the tokenizer's chat template, ready for the answer."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt)["input_ids"]
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def read_jsonl(path: str | Path) -> Iterator[dict]:
    """Rows of a JSON-lines file, plain or `.gz`; a broken line raises a `ValueError` that names it."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not valid JSON ({error.msg}). Fix or remove the line."
                ) from error


def read_prompts(path: str | Path, num_prompts: int | None = None) -> list[str]:
    """First turn of every row of a prompt file (`{"turns": [...]}` or `{"prompt": ...}` per line)."""
    prompts = []
    for row in read_jsonl(path):
        prompts.append(row["turns"][0] if "turns" in row else row["prompt"])
        if num_prompts is not None and len(prompts) == num_prompts:
            break
    return prompts


def load_responses(
    path: str | Path, tokenizer, max_length: int = 2048, min_response: int = 4
) -> list[ResponseExample]:
    """
    Responses of a file as examples; those with fewer than `min_response` tokens teach nothing and are left out.

    Raises:
        ValueError: If the file has no usable response.
    """
    examples = []
    for row in read_jsonl(path):
        if len(row["response_ids"]) < min_response:
            continue
        prompt_ids = encode_prompt(tokenizer, row["prompt"])
        ids = (prompt_ids + row["response_ids"])[:max_length]
        if len(ids) - len(prompt_ids) >= min_response:
            examples.append(
                ResponseExample(torch.tensor(ids), len(prompt_ids), row["prompt"], row.get("mode", "greedy"))
            )
    if not examples:
        raise ValueError(
            f"`{path}` holds no response of at least {min_response} tokens; check the file and `max_length`."
        )
    return examples


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

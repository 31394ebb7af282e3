"""Responses written by the target itself, as token sequences to train on.

A drafter learns to predict one particular target, so its training text must be the target's own. A response file holds
one JSON object per line: `prompt` (user text), `response_ids` (token ids, the end token last when the response ended),
and optionally `set` and `mode`.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm

from hf_drelay.evaluation.records import read_jsonl


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


@torch.no_grad()
def generate_responses(
    target,
    tokenizer,
    prompts: list[str],
    max_new_tokens: int = 256,
    batch_size: int = 16,
    quiet: bool = False,
    **sampling,
) -> Iterator[dict]:
    """
    The target's own responses, longest prompts first, in batches.

    Args:
        target, tokenizer: The target and its tokenizer (left padding is used).
        prompts (`list[str]`): User texts.
        sampling: Further arguments of `generate()`, e.g. `do_sample=True, temperature=0.8`; greedy without them.

    Yields:
        Rows of a response file.
    """
    mode = "sample" if sampling.get("do_sample") else "greedy"
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    pad = target.generation_config.pad_token_id
    pad = 0 if pad is None else pad  # masked positions may hold any token
    encoded = sorted(((encode_prompt(tokenizer, p), p) for p in prompts), key=lambda pair: -len(pair[0]))
    with tqdm(total=len(prompts), desc="responses", unit="prompt", disable=quiet) as bar:
        for start in range(0, len(encoded), batch_size):
            batch = encoded[start : start + batch_size]
            width = max(len(ids) for ids, _ in batch)
            ids = torch.tensor([[pad] * (width - len(i)) + i for i, _ in batch])
            mask = torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i, _ in batch])
            output = target.generate(
                ids.to(target.device),
                attention_mask=mask.to(target.device),
                max_new_tokens=max_new_tokens,
                pad_token_id=pad,
                **({"do_sample": False} | sampling),
            )
            for (_, prompt), row in zip(batch, output[:, width:].tolist(), strict=True):
                end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                yield {"mode": mode, "prompt": prompt, "response_ids": row[:end]}
            bar.update(len(batch))

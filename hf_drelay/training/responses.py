"""The target's own responses: prompts -> shards of a response file.

Rows are decoded in batches of similar length by the target's own `generate()`, a span of tokens at a time: between two
spans the rows that ended leave the batch, and their place in the cache with them.
"""

import gzip
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, set_seed
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_drelay.evaluation.records import replace_file, write_json
from hf_drelay.evaluation.tasks import TEMPLATE_MODES
from hf_drelay.modeling.compat import cache_keyword

from .data import encode_prompt, read_prompts


@dataclass
class Decoding:
    """
    How responses are decoded.

    Attributes:
        max_new_tokens (`int`): Longest response.
        temperature (`float`): 0 decodes greedily.
        top_p (`float`): Nucleus, under sampling.
        top_k (`int`): Candidates of a token under sampling; 0 keeps all.
        min_p (`float`): Least probability of a candidate under sampling, as a share of the best one's.
        batch_size (`int`): Rows decoded together.
        span (`int`): Tokens between two looks at which rows have ended.
        template_mode (`str`, *optional*): Mode of the chat template, see `TEMPLATE_MODES`.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 0.95
    top_k: int = 64
    min_p: float = 0.0
    batch_size: int = 32
    span: int = 32
    template_mode: str | None = None

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_size", "span"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; expected at least 1.")
        if self.template_mode not in TEMPLATE_MODES:
            raise ValueError(
                f"`template_mode` is {self.template_mode!r}; expected one of {[m for m in TEMPLATE_MODES if m]}."
            )
        if self.temperature < 0:
            raise ValueError(f"`temperature` is {self.temperature}; expected 0 (greedy) or above.")

    @property
    def mode(self) -> str:
        """Name of this kind of decoding in a response file."""
        return "sample" if self.temperature > 0 else "greedy"

    @property
    def arguments(self) -> dict:
        """Arguments of `generate()`."""
        if self.temperature == 0:
            return {"do_sample": False}
        names = ("temperature", "top_p", "top_k", "min_p")
        return {"do_sample": True} | {name: getattr(self, name) for name in names}


def _grouped_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """
    Attention of `query` `(B, heads, 1, D)` whose heads share keys and values `(B, kv_heads, T, D)` as they are. The
    attention functions of transformers repeat keys and values for every head, which for one query is most of the time.
    """
    groups = query.shape[1] // key.shape[1]
    grouped = query.unflatten(1, (-1, groups)).squeeze(3)  # (B, kv_heads, groups, D)
    scores = grouped @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, -1:]  # (B, 1, 1, T)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).flatten(1, 2)[:, None], None


AttentionInterface.register("hf_drelay_grouped", _grouped_attention)
AttentionMaskInterface.register("hf_drelay_grouped", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@contextmanager
def _single_query_attention(target):
    """On a CPU, the fused attention of torch takes several times as long as a plain one for single queries."""
    own = target.config._attn_implementation
    if target.device.type == "cpu" and own in ("sdpa", "eager"):
        target.set_attn_implementation("hf_drelay_grouped")
    try:
        yield
    finally:
        target.set_attn_implementation(own)


@torch.no_grad()
def decode_batch(target, prompts: list[list[int]], decoding: Decoding) -> list[list[int]]:
    """
    Responses to prompts of token ids, each cut behind its first end token.

    Args:
        target (`PreTrainedModel`): Decoder-only target with a cache that rows can be taken from.
        prompts (`list[list[int]]`): Token ids; padded on the left to a common length.
    """
    pad = target.generation_config.pad_token_id
    pad = 0 if pad is None else pad  # masked positions may hold any token
    width = max(len(ids) for ids in prompts)
    batch = _Batch(
        ids=torch.tensor([[pad] * (width - len(row)) + row for row in prompts], device=target.device),
        mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=target.device),
        cache=DynamicCache(config=target.config),
        places=list(range(len(prompts))),
    )
    responses: list[list[int]] = [[] for _ in prompts]
    _decode_span(target, batch, responses, 1, pad, decoding)
    with _single_query_attention(target):
        for done in range(1, decoding.max_new_tokens, decoding.span):
            if not batch.places:
                break
            _decode_span(target, batch, responses, min(decoding.span, decoding.max_new_tokens - done), pad, decoding)
    return responses


@dataclass
class _Batch:
    """Rows still being decoded: ids and mask `(R, T)`, their cache, and which prompt each row answers."""

    ids: torch.LongTensor
    mask: torch.LongTensor
    cache: DynamicCache
    places: list[int]

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows."""
        if len(rows) == len(self.places):
            return
        self.ids, self.mask = self.ids[rows], self.mask[rows]
        self.places = [self.places[row] for row in rows]
        if rows:
            self.cache.batch_select_indices(torch.tensor(rows, device=self.ids.device))


def _decode_span(target, batch: _Batch, responses, num_tokens: int, pad: int, decoding: Decoding) -> None:
    """Decode `num_tokens` more of every row, append them to `responses`, and let the rows that ended go."""
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    output_ids = target.generate(
        batch.ids,
        attention_mask=batch.mask,
        max_new_tokens=num_tokens,
        pad_token_id=pad,
        **{cache_keyword(): batch.cache},
        **decoding.arguments,
    )
    new_ids = output_ids[:, batch.ids.shape[1] :]
    batch.ids = output_ids
    batch.mask = torch.cat([batch.mask, torch.ones_like(new_ids)], dim=1)
    going_on = []
    for row, (place, tokens) in enumerate(zip(batch.places, new_ids.tolist(), strict=True)):
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
        responses[place] += tokens[:end]
        if end is None:
            going_on.append(row)
    batch.keep(going_on)


def generate_responses(
    target, tokenizer, prompts: list[str], decoding: Decoding | None = None, quiet: bool = False
) -> Iterator[dict]:
    """
    Rows of a response file for user texts, longest prompts first, so that the largest batch fails at once if it does
    not fit into memory.
    """
    decoding = decoding or Decoding()
    encoded = sorted(
        ((encode_prompt(tokenizer, p, decoding.template_mode), p) for p in prompts), key=lambda pair: -len(pair[0])
    )
    with tqdm(total=len(prompts), desc="responses", unit="prompt", disable=quiet) as bar:
        for start in range(0, len(encoded), decoding.batch_size):
            batch = encoded[start : start + decoding.batch_size]
            responses = decode_batch(target, [ids for ids, _ in batch], decoding)
            for (_, prompt), response_ids in zip(batch, responses, strict=True):
                yield {"mode": decoding.mode, "prompt": prompt, "response_ids": response_ids}
            bar.update(len(batch))


def write_responses(
    target,
    tokenizer,
    prompts: list[str],
    folder: str | Path,
    decoding: Decoding | None = None,
    shard_size: int = 512,
    seed: int = 0,
    quiet: bool = False,
) -> list[Path]:
    """
    Write the responses to `prompts` as shards into `folder`. A shard appears when it is whole; an interrupted call
    goes on with the first missing one and ends with the very files of an uninterrupted call.

    Args:
        shard_size (`int`): Prompts of one shard.
        seed (`int`): Sampling starts from it anew in each shard.

    Returns:
        Paths of all shards.

    Raises:
        ValueError: If `folder` holds shards of other prompts or of another way of decoding.
    """
    decoding = decoding or Decoding()
    folder = Path(folder)
    # Of similar length within a shard, so that its batches waste little on padding.
    prompts = sorted(dict.fromkeys(prompts), key=len)
    shards = [prompts[start : start + shard_size] for start in range(0, len(prompts), shard_size)]
    plan = {
        "target": target.name_or_path,
        "decoding": asdict(decoding),
        "seed": seed,
        "shard_size": shard_size,
        "num_prompts": len(prompts),
        "first_prompts": [shard[0] for shard in shards],
    }
    _claim(folder, plan)
    paths = [folder / f"responses-{i:05d}-of-{len(shards):05d}.jsonl.gz" for i in range(len(shards))]
    num_tokens, started = 0, time.perf_counter()
    with tqdm(total=len(prompts), desc="responses", unit="prompt", disable=quiet) as bar:
        for i, (path, shard) in enumerate(zip(paths, shards, strict=True)):
            if path.exists():
                bar.update(len(shard))
                continue
            set_seed(seed + i)
            rows = []
            for row in generate_responses(target, tokenizer, shard, decoding, quiet=True):
                rows.append(row)
                num_tokens += len(row["response_ids"])
                bar.update()
                bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - started):.0f} tokens/s")
            _write_rows(path, rows)
    return paths


def _claim(folder: Path, plan: dict) -> None:
    """Note in `folder` what its shards are made of, or check that they are made of the same."""
    file = folder / "plan.json"
    if not file.exists():
        write_json(file, plan)
        return
    other = json.loads(file.read_text(encoding="utf-8"))
    different = [name for name in plan if other.get(name) != json.loads(json.dumps(plan[name]))]
    if different:
        raise ValueError(
            f"`{folder}` holds responses made with another `{different[0]}`; give an empty folder, or the same "
            "arguments to go on."
        )


def _write_rows(path: Path, rows: list[dict]) -> None:
    def write(part: Path) -> None:
        with gzip.open(part, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    replace_file(path, write)


def prepare_responses(
    target,
    tokenizer,
    folder: str | Path,
    sources: Iterable[str] = (),
    num_synthesised: int = 0,
    num_prompts: int | None = None,
    decoding: Decoding | None = None,
    shard_size: int = 512,
    seed: int = 0,
) -> list[Path]:
    """
    Responses to prompts from `sources` (see `read_prompts`) and to ones that the target thinks of by itself; what an
    interrupted call has done is kept.

    Args:
        num_synthesised (`int`): Prompts that the target thinks of.
        num_prompts (`int`, *optional*): Use at most so many of each source.

    Returns:
        Paths of all shards in `folder`, see `write_responses`.
    """
    texts = [text for source in sources for text in read_prompts(source, num_prompts)]
    if num_synthesised:
        file = Path(folder) / "synthesised.json"
        if not file.exists():
            write_json(file, synthesise_prompts(target, tokenizer, num_synthesised, seed=seed))
        texts += json.loads(file.read_text(encoding="utf-8"))
    return write_responses(target, tokenizer, texts, folder, decoding, shard_size, seed)


def synthesise_prompts(
    target, tokenizer, num_prompts: int, batch_size: int = 64, max_length: int = 96, seed: int = 0, quiet: bool = False
) -> list[str]:
    """
    User texts that the target itself thinks of when it sees the opening of a user turn of its chat template, so that
    no data set is needed. Kept are distinct texts that ended by themselves and hold a few words.

    Raises:
        ValueError: If the tokenizer has no chat template, or hardly any text is usable.
    """
    if tokenizer.chat_template is None:
        raise ValueError("Prompts cannot be synthesised: the tokenizer has no chat template. Give prompt files.")
    opening = _user_turn_opening(tokenizer)
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    # Not a nucleus, which would sort the whole vocabulary for each token.
    decoding = Decoding(max_length, temperature=1.0, top_p=1.0, top_k=0, min_p=0.05, batch_size=batch_size)
    set_seed(seed)
    found: dict[str, str] = {}
    num_tried = 0
    with tqdm(total=num_prompts, desc="prompts", unit="prompt", disable=quiet) as bar:
        while len(found) < num_prompts:
            for ids in decode_batch(target, [opening] * batch_size, decoding):
                num_tried += 1
                text = tokenizer.decode(ids, skip_special_tokens=True).strip()
                if ids[-1] in ends and _is_prompt(text):
                    found.setdefault(text.casefold(), text)
            bar.update(min(len(found), num_prompts) - bar.n)
            if num_tried >= 8 * batch_size and len(found) < num_tried // 20:
                raise ValueError(
                    f"Only {len(found)} of {num_tried} synthesised prompts are usable; this target does not write "
                    "user turns. Give prompt files."
                )
    return list(found.values())[:num_prompts]


def _user_turn_opening(tokenizer) -> list[int]:
    """Token ids of the chat template up to where the text of the first user turn begins."""
    mark = "\u2063drelay\u2063"  # invisible separators, which no template strips or escapes
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return tokenizer(text[: text.index(mark)], add_special_tokens=False)["input_ids"]


def _is_prompt(text: str) -> bool:
    return 3 <= len(text.split()) and 12 <= len(text) <= 600 and "\ufffd" not in text

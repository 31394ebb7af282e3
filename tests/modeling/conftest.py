"""Tiny targets, drafters that follow a script, and a record of what happened in every round of a call.

A drafter with random weights is never accepted, so tests of lossless decoding would exercise nothing but rejection.
The scripted drafter instead finds the target's own continuation in its pools, spoiled at random places, and a selector
with random weights repairs some slots rightly and others harmfully.
"""

import functools
import inspect
import itertools
import string
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_drelay.modeling.candidate_generator import DRelayCandidateGenerator
from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.draft_view import DraftView
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.modeling.modeling_heads import Pool


VOCAB_SIZE = 96
WINDOW = 8  # of the sliding-window targets
EOS = 2  # of the configurations; generation of the fixtures has no end token unless a test asks for one

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    # Wide weights, so that greedy text does not fall into repeating one token.
    "initializer_range": 0.3,
}

_TARGETS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_COMMON)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_COMMON)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_COMMON | {"num_hidden_layers": 6, "tie_word_embeddings": False},
            sliding_window=WINDOW,
            layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_COMMON, sliding_window=WINDOW)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
}


@functools.cache
def build_target(name: str):
    """A tiny target with random weights in fp32, the same one for the whole run."""
    torch.manual_seed(sorted(_TARGETS).index(name))
    target = _TARGETS[name]().eval()
    target.generation_config.eos_token_id = None
    return target


@functools.cache
def build_hybrid_target(name: str):
    """A tiny target with recurrent layers, which cannot take a token back."""
    fields = _COMMON | {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    torch.manual_seed(3)
    if name == "qwen3_next":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        experts |= {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
        target = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**fields, **experts))
    else:
        target = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**fields))
    target.generation_config.eos_token_id = None
    return target.eval()


class TableTarget(PreTrainedModel, GenerationMixin):
    """
    A target whose logits are known: those after token `x` are row `x` of a table, whatever came before.

    It keeps a cache and returns hidden states like a decoder of one layer.
    """

    config_class = LlamaConfig
    _no_split_modules: list[str] = []
    _supports_cache_class = True

    def __init__(self, config, table: torch.Tensor):
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        # State of token x = column x of a basis, so that the head turns it into row x of the table.
        nn.init.orthogonal_(self.embed_tokens.weight)
        self.lm_head.weight = nn.Parameter(torch.linalg.lstsq(self.embed_tokens.weight.data, table).solution.T)

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        use_cache=None,
        output_hidden_states=None,
        logits_to_keep=0,
        **kwargs,
    ):
        embeds = self.embed_tokens(input_ids)
        cache = cache if cache is not None else past_key_values
        if cache is not None:
            cache.update(embeds[:, None], embeds[:, None], 0)
        name = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
        return CausalLMOutputWithPast(
            logits=self.lm_head(embeds[:, -logits_to_keep:] if logits_to_keep else embeds),
            hidden_states=(embeds, embeds) if output_hidden_states else None,
            **{name: cache},
        )


def build_table_target(table: torch.Tensor) -> TableTarget:
    """A `TableTarget` for a table of logits `(V, V)`."""
    size = len(table)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=max(8, 8 * -(-size // 8)),
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    target = TableTarget(config, table).eval()
    target.generation_config.eos_token_id = None
    return target


def build_cycle_target(size: int = 48) -> TableTarget:
    """A target whose greedy text is a cycle through all its tokens, so that a token names its place."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(size, generator=generator)
    table = torch.rand(size, size, generator=generator)
    table[order, order.roll(-1)] += 4.0
    return build_table_target(table)


def randomise_selector(model: DRelayModel, scale: float = 1.0, seed: int = 0) -> None:
    """Weights that change many choices: everything that starts at zero gets a random value too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # The copy path comes last: tests count what happens to the choices of all other parts.
        for name, parameter in sorted(model.selector.named_parameters(), key=lambda p: ("copy_path" in p[0], p[0])):
            if "norm" in name:
                continue
            std = scale / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.1 * scale
            if any(part in name for part in ("_table", "codebook", "markov_w")):
                # Of token pairs: the path that tells candidates apart the most.
                std = 0.7 * scale
            if "copy_path" in name:
                # Counts grow with the text, and random weights of them would drown what the other parts know.
                std = 0.02 * scale
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def build_drafter(target, seed: int = 0, selector_scale: float = 1.0, **overrides) -> DRelayModel:
    """A tiny drafter for `target` with random weights, in the selector too."""
    fields = {
        "num_hidden_layers": 2,
        "block_size": 5,
        "pool_size": 8,
        "selector_hidden_size": 32,
        "selector_num_layers": 1,
        "pair_rank": 8,
        "history_window": 12,
        "use_mask_embedding": True,
    }
    torch.manual_seed(seed)
    model = DRelayModel(DRelayConfig.for_target(target.config, **(fields | overrides))).eval()
    if getattr(model.drafter, "mask_embedding", None) is not None:
        with torch.no_grad():
            model.drafter.mask_embedding.normal_()
    if model.selector is not None:
        randomise_selector(model, selector_scale, seed)
    return model


def build_qwen3_5(layer_types, vocab_size: int = VOCAB_SIZE):
    """A tiny target of the family whose shards hold an MTP module."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.3,
        eos_token_id=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    )
    return transformers.Qwen3_5ForCausalLM(config).eval()


def mtp_tensors(H: int = 32) -> dict[str, torch.Tensor]:
    """The MTP module of such a target, as shards hold it."""
    generator = torch.Generator().manual_seed(1)
    layer = "mtp.layers.0."
    shapes = {
        "mtp.fc.weight": (H, 2 * H),
        "mtp.pre_fc_norm_embedding.weight": (H,),
        "mtp.pre_fc_norm_hidden.weight": (H,),
        "mtp.norm.weight": (H,),
        layer + "input_layernorm.weight": (H,),
        layer + "post_attention_layernorm.weight": (H,),
        layer + "self_attn.q_proj.weight": (2 * 64, H),
        layer + "self_attn.k_proj.weight": (32, H),
        layer + "self_attn.v_proj.weight": (32, H),
        layer + "self_attn.o_proj.weight": (H, 64),
        layer + "self_attn.q_norm.weight": (16,),
        layer + "self_attn.k_norm.weight": (16,),
        layer + "mlp.gate_proj.weight": (48, H),
        layer + "mlp.up_proj.weight": (48, H),
        layer + "mlp.down_proj.weight": (H, 48),
    }
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def publish(folder, target, tensors):
    """Save a target together with its module, as published shards have it, and load it from there."""
    target.save_pretrained(folder)
    path = Path(folder) / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@functools.cache
def build_gemma4(vocab_size: int = VOCAB_SIZE):
    """`(target, assistant)` of the family whose assistant reads the target's caches."""

    def fields(num_layers):
        return {
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": num_layers,
            "layer_types": (["sliding_attention", "full_attention"] * num_layers)[:num_layers],
            "sliding_window": WINDOW,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 8,
            "max_position_embeddings": 1024,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "initializer_range": 0.3,
            "eos_token_id": None,
            "pad_token_id": 0,
        }

    torch.manual_seed(0)
    target = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**fields(4), num_kv_shared_layers=0)).eval()
    target.generation_config.eos_token_id = None
    torch.manual_seed(1)
    text = transformers.Gemma4TextConfig(**fields(2), num_kv_shared_layers=2)
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32)
    return target, transformers.Gemma4AssistantForCausalLM(config).eval()


@functools.cache
def build_published(kind: str, vocab_size: int = VOCAB_SIZE):
    """
    A target that is published with its drafter, and a function that builds the drafter.

    Args:
        kind (`str`): `"mtp"`, `"mtp_recurrent"` (most layers keep a state that cannot be rolled back) or `"gemma4"`.
    """
    if kind == "gemma4":
        target, assistant = build_gemma4(vocab_size)
        return target, functools.partial(DRelayModel.from_target, target, assistant)
    layers = ["full_attention"] * 2
    if kind == "mtp_recurrent":
        layers = ["linear_attention", "full_attention"] * 2
    folder = tempfile.TemporaryDirectory()
    target = publish(folder.name, build_qwen3_5(layers, vocab_size), mtp_tensors())
    target.folder = folder  # the module is read from there when a drafter is built
    # The host refuses the whole family; without linear attention there is no state.
    target._is_stateful = kind == "mtp_recurrent"
    return target, functools.partial(DRelayModel.from_target, target)


class Script(threading.local):
    """
    What a scripted drafter finds in its pools: the token of `reference_ids` at the position of the slot. In a share of
    the positions it is not the first candidate but the second, third or fourth.

    Local to a thread, so that threads that share a drafter can follow different texts (`follow`).
    """

    def __init__(self, reference_ids, spoiled: float = 0.3, seed: int = 0):
        self.spoiled = spoiled
        self.seed = seed
        self.follow(reference_ids)

    def follow(self, reference_ids) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        size = len(reference_ids)
        self.reference_ids = list(reference_ids)
        self.is_spoiled = torch.rand(size, generator=generator) < self.spoiled
        self.is_hinted = torch.rand(size, generator=generator) < 0.6
        self.ranks = torch.randint(1, 4, (size,), generator=generator)
        self.gaps = 0.8 + 5 * torch.rand(size, generator=generator)

    def hints(self, pool: Pool, anchor_position: int) -> torch.FloatTensor:
        """What is added to the selection logits `(1, K, C)`: the right token of many spoiled slots."""
        hints = torch.zeros_like(pool.logits)
        for slot in range(pool.ids.shape[1]):
            position = anchor_position + 1 + slot
            if position < len(self.reference_ids) and self.is_spoiled[position] and self.is_hinted[position]:
                hints[0, slot] = 4.0 * (pool.ids[0, slot] == self.reference_ids[position])
        return hints

    def rewrite(self, pool: Pool, anchor_position: int) -> Pool:
        """`pool` of a block after `anchor_position`, with the script's tokens and confident logits."""
        ids, logits = pool.ids.clone(), pool.logits.clone()
        size = ids.shape[-1]
        for slot in range(ids.shape[1]):
            position = anchor_position + 1 + slot
            if position >= len(self.reference_ids):
                continue
            token = self.reference_ids[position]
            rank = min(int(self.ranks[position]), size - 1) if self.is_spoiled[position] else 0
            others = [i for i in ids[0, slot].tolist() if i != token][: size - 1]
            ids[0, slot] = torch.tensor(others[:rank] + [token] + others[rank:])
            # Spoiled slots are close calls; of the others a random selector changes those with a small gap.
            gap = self.gaps[position].item()
            logits[0, slot] = 4.0 - torch.linspace(0, 0.2, size) - torch.where(torch.arange(size) > rank, gap, 0.0)
        # The rest of the vocabulary weighs e^0 in all.
        log_probs = logits - torch.logaddexp(logits.logsumexp(dim=-1, keepdim=True), torch.zeros(1))
        return Pool(ids, logits, log_probs)


def scripted_drafter(target, reference_ids, spoiled: float = 0.3, seed: int = 0, **overrides) -> DRelayModel:
    """
    A drafter whose pools follow `reference_ids`, the whole text with its prompt.

    `model.script` is the [`Script`]; backbone, caches and selector work as always, but the selector gets a hint at
    many of the spoiled slots, because a random one would hardly ever find the right token.
    """
    return follow_script(build_drafter(target, seed=seed, **overrides), reference_ids, spoiled, seed)


def follow_script(model: DRelayModel, reference_ids, spoiled: float = 0.3, seed: int = 0) -> DRelayModel:
    """Let the pools of `model` follow a [`Script`], see [`scripted_drafter`]."""
    script = Script(reference_ids, spoiled, seed)

    def head_inputs(rows, anchor_ids, session):
        inputs = DRelayModel.head_inputs(model, rows, anchor_ids, session)
        pools, hints = [], []
        for row, own in enumerate(getattr(session, "sessions", [session])):  # rows may be drafted together
            if hasattr(own, "script_text"):
                script.follow(own.script_text)
            pools.append(script.rewrite(inputs.pool.row(row), own.anchor_position))
            hints.append(script.hints(pools[-1], own.anchor_position))
        parts = (torch.cat([getattr(pool, name) for pool in pools]) for name in ("ids", "logits", "log_probs"))
        inputs.pool, script.stage_hints = Pool(*parts), torch.cat(hints)
        return inputs

    def score(state, path_ids, first=0):
        scores = type(model.selector).score(model.selector, state, path_ids, first)
        return scores + script.stage_hints[:, first : path_ids.shape[1]]

    def chain_pool(states, session, slot):
        # Rows of the chain count what was drafted: the one that is being scored is among them but in a first stage.
        if hasattr(session, "script_text"):
            script.follow(session.script_text)
        place = session.num_verified + session.num_provisional
        place -= getattr(model.drafter, "needs_shared_cache", False)  # there the first slot counts as well
        return script.rewrite(type(model.drafter).pool(model.drafter, states, session, slot), place)

    model.head_inputs = head_inputs
    if model.selector is not None:
        model.selector.score = score
    if model.config.backbone != "parallel":
        model.drafter.pool = chain_pool
    model.script = script
    return model


def scripted_batch(monkeypatch, target, references, **overrides) -> DRelayModel:
    """A drafter whose row follows the one of `references`, whole texts without padding, that it has begun to write."""
    return follow_begun(monkeypatch, scripted_drafter(target, references[0], **overrides), references)


def follow_begun(monkeypatch, model: DRelayModel, references) -> DRelayModel:
    """Let the rows of a scripted `model` follow the one of `references` that they have begun, see `scripted_batch`."""
    stages = DRelayCandidateGenerator.stages

    def follow_and_draft(self, input_ids):
        ids = input_ids[0].tolist()
        while ids and ids[0] == 0:  # padding
            ids.pop(0)
        begun = [text for text in references if text[: len(ids)] == ids]
        self.session.script_text = begun[0] if begun else []
        return (yield from stages(self, input_ids))

    monkeypatch.setattr(DRelayCandidateGenerator, "stages", follow_and_draft)
    return model


@dataclass
class Round:
    """One verified round: drafted tokens by stage, their places in the pools, and what the target committed."""

    stage_lengths: list[int]
    draft_ids: list[int]
    choices: list[int]
    committed_ids: list[int]

    @property
    def num_accepted(self) -> int:
        return len(self.committed_ids) - 1

    @property
    def crosses_stages(self) -> bool:
        """Whether a token of a later stage was accepted."""
        return len(self.stage_lengths) > 1 and self.num_accepted > self.stage_lengths[0]

    @property
    def is_rejected_late(self) -> bool:
        """Whether the first rejected token belongs to a second or later stage."""
        n = self.num_accepted
        is_rejected = n < len(self.draft_ids) and self.committed_ids[n] != self.draft_ids[n]
        return is_rejected and len(self.stage_lengths) > 1 and n >= self.stage_lengths[0]


@dataclass
class Record:
    """Rounds of all calls since the record was started."""

    rounds: list[Round] = field(default_factory=list)

    def count(self, what) -> int:
        return sum(bool(what(r)) for r in self.rounds)

    @property
    def num_accepted_repairs(self) -> int:
        return sum(sum(1 for c in r.choices[: r.num_accepted] if c) for r in self.rounds)


def record_rounds(monkeypatch) -> Record:
    """Record every verified round with a draft, of all generators."""
    record = Record()
    original = DRelayCandidateGenerator.record_round

    def record_round(self, committed_ids):
        if self.blocks:
            record.rounds.append(
                Round(
                    stage_lengths=[block.num_tokens for block in self.blocks],
                    draft_ids=[i for block in self.blocks for i in block.draft_ids[0].tolist()],
                    choices=[i for block in self.blocks for i in block.choices[0].tolist()],
                    committed_ids=list(committed_ids),
                )
            )
        return original(self, committed_ids)

    monkeypatch.setattr(DRelayCandidateGenerator, "record_round", record_round)
    return record


def with_free_costs(view, num_rows: int = 1):
    """`view`; a cost-aware gate of it does not look at the machine, and drafts in every round."""
    model = view.cost_model(num_rows)
    if model is not None:
        model.clock, model.drafts = itertools.count().__next__, lambda: True
    return view


def prompt_ids(length: int = 12, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.LongTensor:
    """A random prompt `(1, length)` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (1, length), generator=generator)


def greedy(target, input_ids=None, assistant=None, max_new_tokens: int = 48, **kwargs):
    """Greedy `generate()`, plain or with an assistant."""
    if input_ids is not None:
        kwargs.setdefault("attention_mask", torch.ones_like(input_ids))
    return target.generate(
        input_ids, assistant_model=assistant, do_sample=False, max_new_tokens=max_new_tokens, **kwargs
    )


def top_gap(target, ids: list[int]) -> float:
    """Difference of the two largest logits of the target after `ids`."""
    with torch.no_grad():
        best = target(torch.tensor([ids])).logits[0, -1].float().topk(2).values
    return (best[0] - best[1]).item()


def first_divergence(ids, expected) -> int | None:
    """Index of the first different token of two texts `(1, T)`, or `None` when they are equal."""
    ids, expected = ids[0].tolist(), expected[0].tolist()
    for i, (a, b) in enumerate(zip(ids, expected, strict=False)):
        if a != b:
            return i
    return None if len(ids) == len(expected) else min(len(ids), len(expected))


def assert_same_text(target, ids, expected, tie: float = 1e-5) -> None:
    """Fail when the texts differ, unless the target itself could not tell the two tokens apart."""
    place = first_divergence(ids, expected)
    if place is not None:
        assert place < min(ids.shape[1], expected.shape[1]), "one text is a prefix of the other"
        gap = top_gap(target, expected[0, :place].tolist())
        assert gap < tie, f"texts differ at position {place}, where the target's gap is {gap:.3g}"


def cache_keyword() -> str:
    """Name under which `generate()` takes a cache."""
    return "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one letter for each token."""
    letters = (string.ascii_letters + string.digits + string.punctuation)[: vocab_size - 1]
    model = WordLevel({"<unk>": 0} | {letter: i + 1 for i, letter in enumerate(letters)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(scope="session")
def toolbox() -> SimpleNamespace:
    """The helpers of this file; test modules cannot import them, because they are no package."""
    return SimpleNamespace(
        VOCAB_SIZE=VOCAB_SIZE,
        WINDOW=WINDOW,
        target=build_target,
        table_target=build_table_target,
        cycle_target=build_cycle_target,
        drafter=build_drafter,
        scripted=scripted_drafter,
        scripted_batch=scripted_batch,
        with_free_costs=with_free_costs,
        hybrid=build_hybrid_target,
        follow=follow_script,
        follow_begun=follow_begun,
        published=build_published,
        qwen3_5=build_qwen3_5,
        mtp_tensors=mtp_tensors,
        publish=publish,
        gemma4=build_gemma4,
        prompt=prompt_ids,
        greedy=greedy,
        assert_same_text=assert_same_text,
        first_divergence=first_divergence,
        top_gap=top_gap,
        cache_keyword=cache_keyword,
        tokenizer=build_tokenizer,
        version=tuple(int(part) for part in transformers.__version__.split(".")[:2]),
    )


@pytest.fixture(params=["own", "host"])
def decoding_loop(request, monkeypatch) -> str:
    """Runs a test in our own loop and in the host's, without an option in every call."""
    takes = DraftView._takes
    monkeypatch.setattr(DraftView, "_takes", lambda self, call: request.param == "own" and takes(self, call))
    return request.param


@pytest.fixture
def record(monkeypatch) -> Record:
    """Rounds of the calls that the test makes."""
    return record_rounds(monkeypatch)

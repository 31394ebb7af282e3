"""Configuration of a drafter: what it is made of, which target it was trained for, and how it drafts by default.

There is one flat set of fields. `DRelayDrafterConfig` and `DRelaySelectorConfig` are the same fields under another
`model_type`, because an auto class maps one configuration class to one model class and each part must load alone.
"""

import difflib
import math
from typing import Any

from transformers import PreTrainedConfig


LAYOUTS = ("fill_in", "shifted")
PROPOSALS = ("sample", "greedy", "coupled")
HEADS = ("relay", "independent", "bilinear", "recurrent", "markov")
BACKBONES = ("parallel", "eagle3", "mtp", "shared_kv")
DECODING_LOOPS = ("own", "host")
AUTO = "auto"

# Sizes that must be whole numbers of at least 1, whatever the rest is.
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_target_layers",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "selector_hidden_size",
    "selector_num_heads",
    "block_size",
    "pool_size",
    "history_window",
    "head_rank",
    "gru_hidden_dim",
)

# Keys that transformers itself puts into a configuration; every other unknown key is a mistake of the caller.
_HOST_KEYS = {
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}

_PRESETS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "target_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "max_position_embeddings": 8192,
        "num_target_layers": 30,
        "use_qk_norm": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "mask_token_id": 0,
        "use_mask_embedding": True,
        "layout": "shifted",
        "block_size": 7,
    },
    "qwen3-4b": {
        "target_name_or_path": "Qwen/Qwen3-4B",
        "chat_template_mode": "non_thinking",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "num_target_layers": 36,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "pad_token_id": 151643,
        "mask_token_id": 151669,
        "selector_hidden_size": 512,
        "pair_rank": 256,
    },
}
_PRESETS["qwen3-8b"] = _PRESETS["qwen3-4b"] | {
    "target_name_or_path": "Qwen/Qwen3-8B",
    "hidden_size": 4096,
    "intermediate_size": 12288,
}


def evenly_spaced_layers(num_target_layers: int, num_taps: int) -> list[int]:
    """
    Tapped layers of the DFlash family (arXiv 2602.06036): evenly spaced from layer 1 to layer `num_target_layers - 3`.
    Targets too shallow for that are tapped at every layer but the last, at most `num_taps` of them.
    """
    if num_target_layers < num_taps + 4:
        return list(range(max(1, num_target_layers - 1)))[-num_taps:]
    if num_taps == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps)]


class DRelayConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DRelayModel`].

    Args:
        target_name_or_path (`str`, *optional*): Target model the drafter was trained for.
        target_revision (`str`, *optional*): Its revision.
        chat_template_mode (`str`, *optional*): Chat-template mode of the training responses, e.g. `"non_thinking"`.
        vocab_size (`int`): Vocabulary size of the target (width of its logits).
        hidden_size (`int`): Width of the drafter, equal to the target's, whose embedding and head it borrows.
        num_target_layers (`int`): Decoder layers of the target.
        target_layer_ids (`list[int]`, *optional*): Tapped decoder layers counted from zero, so that layer `i` is entry
            `i + 1` of `hidden_states`; -1 is the embedding output. Default: five evenly spaced layers. The last layer
            is tapped *after* the target's final norm, as transformers returns it.
        block_size (`int`): Rows `S` of one drafter forward, the anchor row included.
        layout (`str`): `"fill_in"`: row `i` predicts its own position, `S - 1` drafts. `"shifted"`: row `i` predicts
            the next position, `S` drafts.
        mask_token_id (`int`): Token whose target embedding fills the rows to draft.
        use_mask_embedding (`bool`): Use a learned embedding instead of the one of `mask_token_id`.
        draft_vocab_size (`int`, *optional*): Restrict drafts to that many tokens (shortlist head). `None`: all.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` per drafter layer.
        sliding_window (`int`, *optional*): A sliding layer sees keys at a distance below this.
        block_causal (`list[bool]`, *optional*): Per layer, whether a row sees only earlier rows of its block. Default:
            sliding layers do, full layers do not (the convention of published files).
        use_qk_norm (`bool`): RMSNorm on the query and key of each head (Qwen3 style).
        backbone (`str`): `"parallel"` (DFlash), or one of the autoregressive ones: `"eagle3"`, `"mtp"` (a module in
            the target's own weights), `"shared_kv"` (Gemma-4 assistant). `block_size` is then the length of a chain.
        conv_kernel_size, conv_group_size (`int`): Taps and channels per group of the dynamic convolutions of DFlash 2
            around attention and feed-forward; a size of 0 leaves them out.
        use_own_head (`bool`): The drafter has a vocabulary head of its own instead of the target's.
        norm_before_residual (`bool`): EAGLE-3: whether the residual stream starts from the normed feature.
        module_config (`dict`, *optional*): Configuration of the module of another model family that an MTP or
            shared-cache drafter runs.
        pool_size (`int`): Candidates `C` of a slot.
        head (`str`, *optional*): How the tokens of a block are chosen: `"relay"` (DRelay's selector), `"independent"`
            (DFlash), `"bilinear"` (DFlash 2), `"recurrent"` (Domino) or `"markov"` (DSpark). Every head corrects the
            pool of a slot, so that its q is the corrected distribution over `pool_size` tokens.
        use_selector (`bool`, *optional*): Draft through the head; off is the independent one. Follows from `head`.
        head_rank (`int`): Rank of the token-pair correction of the bilinear, recurrent and markov heads.
        gru_hidden_dim (`int`): Width of the state of the recurrent head.
        pure_draft_prefix_len (`int`): Leading slots that the recurrent head leaves alone.
        markov_head_type (`str`): `"vanilla"`, `"gated"` or `"rnn"`.
        use_confidence_head, confidence_head_with_markov (`bool`): Give the markov head an estimate of each slot's
            acceptance, and let it see the token before the slot.
        selector_hidden_size, selector_num_heads, selector_num_layers (`int`): Size of the selector.
        use_global_read, use_history_read, use_prefix_read, use_rank_head, use_repair_gate (`bool`): Parts of the
            selector.
        history_window (`int`): Verified positions that the history read sees.
        pair_rank (`int`): Rank of the token-pair path; 0 turns it off.
        copy_order (`int`): Longest run of tokens that the copy path looks for earlier in the text; 0 turns it off.
        copy_window (`int`): How far back it looks.
        use_repaired_feature (`bool`): Add a projection of the selected token to the provisional features of DLoop.
        provisional_norm (`str`): `"hidden"`: a DLoop stage feeds the drafter's final-norm rows on through the norm of
            the context features; `"final"`: as they are.
        proposal (`str`): Default proposal at temperature > 0, `"sample"`, `"greedy"` or `"coupled"`.
        num_draft_tokens (`int`, *optional*): Default cap of the tokens drafted in one stage.
        loop_gate (`float` or `"auto"`, *optional*): Default DLoop threshold on the log-confidence of a stage; `None`
            is off, `"auto"` weighs gains against measured costs.
        max_stages (`int`): Default limit of stages in a round.
        confidence_threshold (`float`): Default of the confidence (0 to 1) below which the confidence head ends a
            stage; 0 drafts the whole block.

    Raises:
        ValueError: For an unknown field, or fields that contradict each other.
    """

    model_type = "drelay"

    # The target.
    target_name_or_path: str | None = None
    target_revision: str | None = None
    chat_template_mode: str | None = None
    vocab_size: int = 151936
    hidden_size: int = 2560
    num_target_layers: int = 36
    target_layer_ids: list[int] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    # The block.
    block_size: int = 16
    layout: str = "fill_in"
    mask_token_id: int = 0
    use_mask_embedding: bool = False
    draft_vocab_size: int | None = None

    # The parallel backbone.
    num_hidden_layers: int = 5
    intermediate_size: int = 9728
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    use_qk_norm: bool = True
    max_position_embeddings: int = 40960
    rope_parameters: dict | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    block_causal: list[bool] | None = None
    initializer_range: float = 0.02
    backbone: str = "parallel"
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    use_own_head: bool = False
    norm_before_residual: bool = False
    module_config: dict | None = None

    # The head: which one, and the sizes of all but the relay head.
    head: str | None = None
    use_selector: bool | None = None
    head_rank: int = 256
    gru_hidden_dim: int = 1024
    pure_draft_prefix_len: int = 1
    markov_head_type: str = "vanilla"
    use_confidence_head: bool = False
    confidence_head_with_markov: bool = True

    # The selector of the relay head.
    pool_size: int = 16
    selector_hidden_size: int = 256
    selector_num_heads: int = 4
    selector_num_layers: int = 2
    use_global_read: bool = True
    use_history_read: bool = True
    use_prefix_read: bool = True
    use_rank_head: bool = True
    use_repair_gate: bool = True
    history_window: int = 32
    pair_rank: int = 128
    copy_order: int = 3
    copy_window: int = 1024
    use_repaired_feature: bool = True
    provisional_norm: str = "hidden"

    # How it drafts unless a call says otherwise.
    proposal: str = "sample"
    num_draft_tokens: int | None = None
    loop_gate: float | str | None = None
    max_stages: int = 3
    confidence_threshold: float = 0.0

    def __post_init__(self, **kwargs):
        self._refuse_unknown(kwargs)
        if self.rope_parameters is None:
            theta = kwargs.pop("rope_theta", None) or 1_000_000.0
            self.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        if self.target_layer_ids is None:
            self.target_layer_ids = evenly_spaced_layers(self.num_target_layers, 5)
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.block_causal is None:
            self.block_causal = [kind == "sliding_attention" for kind in self.layer_types]
        if self.head is None:  # files older than the other heads know the switch only
            self.head = "independent" if self.use_selector is False or self.backbone != "parallel" else "relay"
        if self.use_selector is None:
            self.use_selector = self.head != "independent"
        self._check_fields()
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        if "head" in kwargs:
            kwargs.setdefault("use_selector", kwargs["head"] != "independent")
        elif kwargs.get("use_selector") is False:
            kwargs["head"] = "independent"
        wants_unused = kwargs.pop("return_unused_kwargs", False)
        config, unused = super().from_dict(config_dict, return_unused_kwargs=True, **kwargs)
        # Overrides are set on the finished configuration and could contradict it.
        config._check_fields()
        if wants_unused:  # what is no field is then an argument of the model
            return config, unused
        cls._refuse_unknown(unused)
        return config

    @classmethod
    def _refuse_unknown(cls, fields: dict) -> None:
        """Raise a `ValueError` for the first of `fields` that neither this class nor transformers knows."""
        unknown = [key for key in fields if key not in _HOST_KEYS and not key.startswith("_")]
        if unknown:
            close = difflib.get_close_matches(unknown[0], cls.__dataclass_fields__, n=1)
            hint = f" Did you mean `{close[0]}`?" if close else " See the docstring of DRelayConfig for the fields."
            raise ValueError(f"Unknown configuration field `{unknown[0]}`.{hint}")

    @property
    def num_drafts(self) -> int:
        """Tokens `K` that one stage proposes."""
        return self.block_size - 1 if self.layout == "fill_in" else self.block_size

    @property
    def output_vocab_size(self) -> int:
        """Tokens that the drafter can propose."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        """Every end token as a list."""
        ids = self.eos_token_id
        return [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]

    @classmethod
    def own_fields(cls) -> list[str]:
        """Names of the fields that this class adds to those of every configuration."""
        return [name for name in DRelayConfig.__annotations__ if name not in PreTrainedConfig.__annotations__]

    @classmethod
    def preset(cls, name: str, **overrides) -> "DRelayConfig":
        """Configuration of a known target: `"smollm2-135m"` (the demo target), `"qwen3-4b"` or `"qwen3-8b"`."""
        if name not in _PRESETS:
            raise ValueError(f"`name` {name!r} is no preset; choose one of {sorted(_PRESETS)} or use `for_target`.")
        return cls(**(_PRESETS[name] | overrides))

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, **overrides) -> "DRelayConfig":
        """
        Configuration of a drafter for any decoder-only target.

        Args:
            target_config (`PreTrainedConfig`): Configuration of the target; its text part is used.
            overrides: Any field of this class. `num_hidden_layers` (drafter layers) defaults to 5.
        """
        text = target_config.get_text_config(decoder=True)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(text, name, None) is None:
                raise ValueError(
                    f"`target_config` {type(text).__name__} has no `{name}`; a drafter is made for a decoder-only "
                    "target with attention layers."
                )
        num_heads = text.num_attention_heads
        derived = {
            "target_name_or_path": target_config._name_or_path or None,
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "num_target_layers": text.num_hidden_layers,
            "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or num_heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // num_heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "hidden_act": getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None) or "silu",
            "attention_bias": bool(getattr(text, "attention_bias", False)),
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 2048,
            "rope_parameters": _drafter_rope(text),
            # Layers copied from a target without these norms must not get them.
            "use_qk_norm": text.model_type not in ("llama", "mistral", "qwen2"),
            "bos_token_id": text.bos_token_id,
            "eos_token_id": _end_tokens(target_config, text),
            "pad_token_id": text.pad_token_id,
            "mask_token_id": text.pad_token_id if text.pad_token_id is not None else 0,
            "use_mask_embedding": True,
            **cls.head_sizes(text.hidden_size),
        }
        return cls(**(derived | overrides))

    @staticmethod
    def head_sizes(hidden_size: int) -> dict[str, int]:
        """Sizes of a relay head for a target of that width."""
        selector_width = 256 if hidden_size <= 1024 else 512
        return {"selector_hidden_size": selector_width, "pair_rank": selector_width // 2}

    def _check_fields(self) -> None:
        """Raise a `ValueError` for the first field that cannot be."""
        K = self.num_drafts

        def require(holds: bool, message: str) -> None:
            if not holds:
                raise ValueError(message)

        for name in _COUNTS:
            value = getattr(self, name)
            require(_is_count(value), f"`{name}` is {value!r}; expected a whole number of at least 1.")
        choices = (("head", HEADS), ("backbone", BACKBONES), ("markov_head_type", ("vanilla", "gated", "rnn")))
        for name, allowed in choices:
            require(getattr(self, name) in allowed, f"`{name}` is {getattr(self, name)!r}; expected one of {allowed}.")
        require(
            self.use_selector == (self.head != "independent"),
            f"`use_selector` {self.use_selector} contradicts `head` {self.head!r}; leave `use_selector` out.",
        )
        require(
            self.backbone == "parallel" or self.head == "independent",
            f"`head` {self.head!r} corrects the slots of a block, but the `backbone` {self.backbone!r} drafts token "
            "by token; use `head='independent'`.",
        )
        require(
            self.backbone == "parallel" or self.layout == "shifted",
            f"`layout` {self.layout!r} does not fit the `backbone` {self.backbone!r}, which drafts `block_size` "
            "tokens; use `layout='shifted'`.",
        )
        require(
            self.backbone != "eagle3" or self.num_hidden_layers == 1,
            f"`num_hidden_layers` is {self.num_hidden_layers}; `backbone='eagle3'` has 1 layer.",
        )
        require(
            self.conv_kernel_size == 0 or self.hidden_size % self.conv_group_size == 0,
            f"`conv_group_size` {self.conv_group_size} must divide `hidden_size` {self.hidden_size}.",
        )
        require(
            self.pure_draft_prefix_len >= 0,
            f"`pure_draft_prefix_len` is {self.pure_draft_prefix_len}; it must be at least 0.",
        )
        require(
            not self.use_confidence_head or self.head == "markov",
            f"`use_confidence_head` needs `head='markov'`; got {self.head!r}.",
        )
        check_confidence_threshold(self.confidence_threshold)
        require(
            not self.confidence_threshold or self.use_confidence_head,
            f"`confidence_threshold` {self.confidence_threshold} needs `use_confidence_head=True`.",
        )
        require(self.layout in LAYOUTS, f"`layout` is {self.layout!r}; expected one of {LAYOUTS}.")
        require(
            K >= 1 and self.block_size >= 2,
            f"`block_size` {self.block_size} leaves nothing to draft; it counts the anchor row, so use at least 2.",
        )
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"`num_attention_heads` {self.num_attention_heads} must be a multiple of `num_key_value_heads` "
            f"{self.num_key_value_heads}.",
        )
        ids = self.target_layer_ids
        require(
            len(ids) > 0 and len(set(ids)) == len(ids) and all(-1 <= i < self.num_target_layers for i in ids),
            f"`target_layer_ids` {ids} must be distinct layers from -1 (embedding) to {self.num_target_layers - 1}; "
            f"the target has `num_target_layers` {self.num_target_layers}.",
        )
        require(
            len(self.layer_types) == self.num_hidden_layers == len(self.block_causal),
            f"`layer_types` ({len(self.layer_types)} entries) and `block_causal` ({len(self.block_causal)}) need one "
            f"entry for each of the `num_hidden_layers` {self.num_hidden_layers}.",
        )
        kinds = set(self.layer_types)
        require(
            kinds <= {"full_attention", "sliding_attention"},
            f"`layer_types` {sorted(kinds)} may hold only 'full_attention' and 'sliding_attention'.",
        )
        require(
            "sliding_attention" not in kinds or (self.sliding_window or 0) > 1,
            f"`sliding_window` is {self.sliding_window}; 'sliding_attention' layers need a window of at least 2.",
        )
        require(
            isinstance(self.mask_token_id, int) and 0 <= self.mask_token_id < self.vocab_size,
            f"`mask_token_id` {self.mask_token_id!r} must be a token of the vocabulary of `vocab_size` "
            f"{self.vocab_size}.",
        )
        require(
            self.draft_vocab_size is None or 0 < self.draft_vocab_size <= self.vocab_size,
            f"`draft_vocab_size` {self.draft_vocab_size} must lie between 1 and `vocab_size` {self.vocab_size}.",
        )
        require(
            1 <= self.pool_size <= self.output_vocab_size,
            f"`pool_size` {self.pool_size} must lie between 1 and the {self.output_vocab_size} tokens of the (draft) "
            "vocabulary; lower it.",
        )
        require(
            not self.use_selector or self.pool_size >= 2,
            f"`pool_size` {self.pool_size} leaves the selector no choice; use at least 2, or `use_selector=False`.",
        )
        require(
            self.selector_hidden_size % self.selector_num_heads == 0,
            f"`selector_hidden_size` {self.selector_hidden_size} must be a multiple of `selector_num_heads` "
            f"{self.selector_num_heads}.",
        )
        require(
            self.pair_rank == 0 or _is_count(self.pair_rank),
            f"`pair_rank` is {self.pair_rank!r}; use 0 to turn the pair path off.",
        )
        require(
            self.copy_order == 0 or _is_count(self.copy_order),
            f"`copy_order` is {self.copy_order!r}; use 0 to turn the copy path off.",
        )
        require(_is_count(self.copy_window), f"`copy_window` is {self.copy_window!r}; expected at least 1 token.")
        reads = [name for name in ("use_global_read", "use_history_read", "use_prefix_read") if getattr(self, name)]
        require(
            self.head != "relay" or self.use_rank_head or self.use_repair_gate or not reads,
            f"{' and '.join(f'`{name}`' for name in reads)} feed the rank head and the repair gate, which are both "
            "off; turn one of these on, or the reads off.",
        )
        require(
            self.provisional_norm in ("final", "hidden"),
            f"`provisional_norm` is {self.provisional_norm!r}; expected 'final' or 'hidden'.",
        )
        check_draft_options(self.proposal, self.num_draft_tokens, self.loop_gate, self.max_stages)


def check_draft_options(
    proposal: str, num_draft_tokens: int | None, loop_gate: float | str | None, max_stages: int
) -> None:
    """Raise a `ValueError` that names the first drafting option with an impossible value."""
    if proposal not in PROPOSALS:
        raise ValueError(f"`proposal` is {proposal!r}; expected one of {PROPOSALS}.")
    if num_draft_tokens is not None and not _is_count(num_draft_tokens):
        raise ValueError(
            f"`num_draft_tokens` is {num_draft_tokens!r}; use a whole number of at least 1, or None for the whole "
            "block."
        )
    if loop_gate is not None and loop_gate != AUTO:
        is_number = isinstance(loop_gate, (int, float)) and not isinstance(loop_gate, bool)
        if not is_number or math.isnan(loop_gate) or loop_gate > 0:
            raise ValueError(
                f"`loop_gate` is {loop_gate!r}; it is compared with a log-probability, so pass a number of at most 0 "
                "(such as -0.5; -inf always loops), 'auto' to weigh costs, or None to draft one stage."
            )
    if not _is_count(max_stages):
        raise ValueError(f"`max_stages` is {max_stages!r}; a round has at least 1 stage.")


def check_loop_options(decoding_loop: str, tree_budget: int | None, proposal: str) -> None:
    """Raise a `ValueError` that names the first option of verification with an impossible value."""
    if decoding_loop not in DECODING_LOOPS:
        raise ValueError(f"`decoding_loop` is {decoding_loop!r}; expected one of {DECODING_LOOPS}.")
    if tree_budget is not None and not _is_count(tree_budget):
        raise ValueError(
            f"`tree_budget` is {tree_budget!r}; use a whole number of at least 1, or None to verify a chain."
        )
    if decoding_loop == "host" and tree_budget is not None:
        raise ValueError(f"`tree_budget` {tree_budget} needs `decoding_loop='own'`: the host verifies chains only.")
    if decoding_loop == "host" and proposal == "coupled":
        raise ValueError("`proposal='coupled'` needs `decoding_loop='own'`: the host draws its own random numbers.")


def check_confidence_threshold(value: float) -> None:
    """Raise a `ValueError` unless `value` is a probability below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"`confidence_threshold` is {value!r}; it is compared with a probability, so use a number from 0 (off) to "
            "below 1."
        )


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _end_tokens(*configs: PreTrainedConfig) -> int | list[int] | None:
    """End tokens that any of the configurations names; the text part of a larger model may know fewer."""
    ids: dict[int, None] = {}
    for config in configs:
        own = getattr(config, "eos_token_id", None)
        ids |= dict.fromkeys(own if isinstance(own, (list, tuple)) else [] if own is None else [own])
    return None if not ids else next(iter(ids)) if len(ids) == 1 else list(ids)


def _drafter_rope(text_config: PreTrainedConfig) -> dict:
    """One-dimensional rope of the target's full-attention layers; multi-axis and partial rope are not carried over."""
    rope = dict(getattr(text_config, "rope_parameters", None) or {})
    if "rope_type" not in rope and "rope_theta" not in rope:  # one dictionary for each layer type
        rope = dict(rope.get("full_attention") or next((v for v in rope.values() if isinstance(v, dict)), {}))
    carried = ("default", "linear", "llama3", "yarn")
    if (
        rope.get("rope_type", "default") in carried
        and "partial_rotary_factor" not in rope
        and "mrope_section" not in rope
    ):
        return {"rope_type": "default", "rope_theta": 10000.0} | rope
    return {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}


class DRelayDrafterConfig(DRelayConfig):
    """Configuration of a [`DRelayDrafterModel`] stored alone; same fields as [`DRelayConfig`]."""

    model_type = "drelay_drafter"


class DRelaySelectorConfig(DRelayConfig):
    """Configuration of a [`DRelaySelectorModel`] stored alone; same fields as [`DRelayConfig`]."""

    model_type = "drelay_selector"


__all__ = ["DRelayConfig", "DRelayDrafterConfig", "DRelaySelectorConfig"]

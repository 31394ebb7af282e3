"""What all parts share: the base class with its initialisation, and the small objects that travel between parts."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .configuration_drelay import DRelayConfig
from .host_transfer import read


class ZeroLinear(nn.Linear):
    """Linear layer that starts at zero, so that a new path changes nothing until it is trained."""


class FactorTable(nn.Embedding):
    """
    Table of the factors of a table that starts at zero. Its entries start at unit scale: with small ones the zero
    table would have to grow large before it moved a score.
    """


class TokenRows:
    """
    Part of a head whose tables have one row for each token that can be drafted.

    With a shortlist the tables hold its tokens only; the last row of a predecessor table stands for all other tokens,
    which only the target can have put there.
    """

    def init_token_rows(self, config: DRelayConfig) -> None:
        """Register the row of every token; like the drafter's list, it starts with the first tokens."""
        self.num_successors = config.output_vocab_size
        # Public files with a reduced head of their own know every token as a predecessor.
        self.knows_all_predecessors = config.use_own_head or config.draft_vocab_size is None
        self.num_predecessors = config.vocab_size if self.knows_all_predecessors else self.num_successors + 1
        if config.draft_vocab_size is None:
            self.shortlist_rows = None
            return
        rows = torch.full((config.vocab_size,), config.draft_vocab_size, dtype=torch.int32)
        rows[: config.draft_vocab_size] = torch.arange(config.draft_vocab_size, dtype=torch.int32)
        self.register_buffer("shortlist_rows", rows)

    def set_shortlist(self, draft_token_ids: torch.LongTensor) -> None:
        """Tell the head which tokens its table rows stand for, `(Vd,)`."""
        if self.shortlist_rows is not None:
            self.shortlist_rows.fill_(self.num_successors)
            places = torch.arange(len(draft_token_ids), dtype=torch.int32, device=self.shortlist_rows.device)
            self.shortlist_rows[draft_token_ids] = places

    def table_rows(self, token_ids: torch.LongTensor) -> torch.LongTensor:
        """Successor rows of `token_ids`."""
        return token_ids if self.shortlist_rows is None else self.shortlist_rows[token_ids].long()

    def previous_rows(self, token_ids: torch.LongTensor) -> torch.LongTensor:
        """Predecessor rows of `token_ids`."""
        return token_ids if self.knows_all_predecessors else self.table_rows(token_ids)


class DRelayPreTrainedModel(PreTrainedModel):
    """Base class of the drafter, the selector and their composition."""

    config_class = DRelayConfig
    base_model_prefix = "drafter"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DRelayDecoderLayer", "GlobalReadBlock"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers, but missing or unreadable weights are an error: random ones would draft badly."""
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except Exception as error:
            if type(error).__name__ != "SafetensorError":  # the class belongs to a package that is not imported here
                raise
            raise ValueError(
                f"`pretrained_model_name_or_path` {str(pretrained_model_name_or_path)!r} has a corrupt weight file "
                f"({error}); download or save the drafter again."
            ) from error
        if info["missing_keys"]:
            missing = sorted(info["missing_keys"])
            raise ValueError(
                f"`pretrained_model_name_or_path` {str(pretrained_model_name_or_path)!r} lacks {len(missing)} weights "
                f"of {cls.__name__}, among them `{missing[0]}`; download or save the drafter again, or load the part "
                "that is there with its own class."
            )
        return (model, info) if output_loading_info else model

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, FactorTable):
            init.normal_(module.weight, std=1.0)
            return
        super()._init_weights(module)
        if isinstance(module, ZeroLinear):
            init.zeros_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        # Parameters that belong to no standard layer are initialised by the module that owns them.
        elif hasattr(module, "init_own_parameters"):
            module.init_own_parameters(self.config.initializer_range)


@dataclass
class Pool:
    """
    Candidates of every slot, best first.

    Attributes:
        ids (`torch.LongTensor` of shape `(B, K, C)`): Token ids; entry 0 is the backbone's own draft.
        logits (`torch.FloatTensor` of shape `(B, K, C)`): Raw logits, fp32.
        log_probs (`torch.FloatTensor` of shape `(B, K, C)`): Log-probabilities over the whole (draft) vocabulary,
            fp32.
    """

    ids: torch.LongTensor
    logits: torch.FloatTensor
    log_probs: torch.FloatTensor

    def first(self, num_slots: int) -> "Pool":
        """The pools of the first `num_slots` slots."""
        return Pool(self.ids[:, :num_slots], self.logits[:, :num_slots], self.log_probs[:, :num_slots])

    def row(self, row: int) -> "Pool":
        """The pools `(1, K, C)` of one block."""
        return Pool(*(part[row : row + 1] for part in (self.ids, self.logits, self.log_probs)))

    @classmethod
    def from_logits(cls, logits: torch.FloatTensor, size: int, token_ids: torch.LongTensor | None = None) -> "Pool":
        """Top `size` of `logits` `(B, K, Vd)`; `token_ids (Vd,)` names the columns when they are not the token ids."""
        top, ids = logits.topk(size, dim=-1)
        log_probs = top - logits.logsumexp(dim=-1, keepdim=True)
        return cls(ids if token_ids is None else token_ids[ids], top, log_probs)


@dataclass
class BlockNumbers:
    """
    What the host reads of a [`DraftBlock`], as lists by row.

    Attributes:
        draft_ids, choices (`list[list[int]]`): As in the block.
        kept_ids (`list[list[int]]`): First candidate of each slot, the backbone's own draft.
        log_confidence (`list[list[float]]`): Of each slot, see `slot_log_confidence`.
        best_log_probs (`list[list[float]]`): The drafter's log-probability of the first candidate of each scored slot,
            also of those that are cut: where a draft is cut depends on its tokens, and a plan must not.
    """

    draft_ids: list[list[int]]
    choices: list[list[int]]
    kept_ids: list[list[int]]
    log_confidence: list[list[float]]
    best_log_probs: list[list[float]]

    def first(self, num_tokens: int) -> "BlockNumbers":
        """Those of the first `num_tokens` slots."""
        cut = {name: [row[:num_tokens] for row in part] for name, part in vars(self).items()}
        return BlockNumbers(**cut | {"best_log_probs": self.best_log_probs})

    def row(self, row: int) -> "BlockNumbers":
        """Those of one row."""
        return BlockNumbers(*([part[row]] for part in vars(self).values()))


@dataclass
class DraftBlock:
    """
    What one stage proposes.

    Attributes:
        draft_ids (`torch.LongTensor` of shape `(B, K)`): Proposed tokens.
        choices (`torch.LongTensor` of shape `(B, K)`): Their places in the pool; 0 is KEEP, above is REPAIR.
        pool_ids (`torch.LongTensor` of shape `(B, K, C)`): Candidates of each slot.
        pool_logits (`torch.FloatTensor` of shape `(B, K, C)`, *optional*): The token of a slot was drawn from exactly
            `softmax(pool_logits)` over the pool (zero elsewhere); `None` when the draft was deterministic.
        context_features (`torch.FloatTensor` of shape `(B, K, H)`): Backbone rows of the anchor and of all drafted
            tokens but the last; a next stage takes them for the features that the target has not computed yet.
        slot_log_confidence (`torch.FloatTensor` of shape `(B, K)`): Untempered, unprocessed log-probability of each
            token.
        remember (`Callable`): `remember(n)` is what the head wants to know in a next stage about the first `n` tokens.
        pool_log_probs (`torch.FloatTensor` of shape `(B, K, C)`): The drafter's log-probabilities of the candidates.
        tree (`TreeLevels`, *optional*): The block is the best path of these candidates.
        selection_logits (`torch.FloatTensor` of shape `(B, K, C)`, *optional*): What the head made of them, before
            processors.
        num_usable (`torch.LongTensor` of shape `(B,)`, *optional*): Slots from the first on that may be drafted, where
            that is not known on the host yet; `None` when all may. `read_rows` cuts to it.
    """

    draft_ids: torch.LongTensor
    choices: torch.LongTensor
    pool_ids: torch.LongTensor
    pool_logits: torch.FloatTensor | None
    context_features: torch.FloatTensor
    slot_log_confidence: torch.FloatTensor
    remember: Callable[[int], Any]
    pool_log_probs: torch.FloatTensor
    tree: Any = None
    selection_logits: torch.FloatTensor | None = None
    num_usable: torch.LongTensor | None = None
    numbers: BlockNumbers | None = None  # on the host, once it was read

    def read_rows(self) -> "list[DraftBlock]":
        """
        The block of each row `(1, n)`, with its numbers on the host and without the slots that may not be drafted. All
        of it comes by one copy from the device.
        """
        tensors = [self.draft_ids, self.choices, self.pool_ids[..., 0], self.slot_log_confidence]
        tensors.append(self.pool_log_probs[..., 0])
        num_usable = [] if self.num_usable is None else [self.num_usable]
        levels = [] if self.tree is None else self.tree.tensors()
        values = read(*tensors, *num_usable, *levels)
        self.numbers = BlockNumbers(*values[: len(tensors)])
        limits = values[len(tensors)] if num_usable else [self.num_tokens] * len(self.draft_ids)
        if self.tree is not None:
            self.tree = self.tree.on_host(values[len(values) - len(levels) :])
        rows = [self] if len(limits) == 1 else [self.row(row) for row in range(len(limits))]
        return [row.first(limit) for row, limit in zip(rows, limits, strict=True)]

    @property
    def log_confidence(self) -> torch.FloatTensor:
        """Log-confidence `(B,)` of the block, which DLoop compares with its gate."""
        return self.slot_log_confidence.sum(dim=-1)

    @property
    def num_tokens(self) -> int:
        return self.draft_ids.shape[1]

    def first(self, num_tokens: int) -> "DraftBlock":
        """The block cut to its first `num_tokens` tokens."""
        if num_tokens >= self.num_tokens:
            return self
        cut = {name: None if value is None else value[:, :num_tokens] for name, value in self._by_slot().items()}
        numbers = None if self.numbers is None else self.numbers.first(num_tokens)
        kept = {"remember": self.remember, "tree": self.tree, "num_usable": self.num_usable, "numbers": numbers}
        return DraftBlock(**cut, **kept)

    def row(self, row: int) -> "DraftBlock":
        """The part `(1, K)` of one row; of chains only."""

        def remember(num_tokens: int):
            memory = self.remember(num_tokens)
            return None if memory is None else memory[row : row + 1]

        values = {name: None if value is None else value[row : row + 1] for name, value in self._by_slot().items()}
        numbers = None if self.numbers is None else self.numbers.row(row)
        return DraftBlock(**values, remember=remember, numbers=numbers)

    def _by_slot(self) -> dict[str, torch.Tensor | None]:
        """The fields of shape `(B, K, ...)`."""
        others = ("remember", "tree", "num_usable", "numbers")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}

"""How a block's tokens are chosen: heads score the pool of a slot given the tokens before it, walks draw the tokens.

Every head is a *causal map*: `score` gives the selection logits of some slots from the tokens of the slots before
them. That one function serves training (teacher-forced, all slots at once), the sequential walk (one slot at a time)
and the fixed-point walk, so the heads need nothing else.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .modeling_base import Pool


@dataclass
class HeadInputs:
    """
    What a head may look at: the drafter's own states and distributions, and verified context.

    Attributes:
        hidden_states (`torch.FloatTensor` of shape `(B, K, H)`): Backbone row of each slot.
        anchor_hidden (`torch.FloatTensor` of shape `(B, H)`, *optional*): Row of the anchor, in the fill-in layout
            only (in the shifted layout it is the row of slot 1).
        pool (`Pool`): Candidates of each slot.
        anchor_ids (`torch.LongTensor` of shape `(B,)`): Last token before slot 1.
        history (`torch.FloatTensor` of shape `(B, W, H)`): Context features of the last verified positions.
        history_mask (`torch.BoolTensor` of shape `(B, W)`): Which of them exist.
        offset (`int`): Tokens drafted by earlier stages of the round.
        earlier (`Any`, *optional*): What the head returned from `remember` after the stage before.
        embed (`Callable`): Token ids `(...)` to target embeddings `(..., H)`.
        text_ids (`torch.LongTensor` of shape `(B, T)`): All tokens before the anchor, those of earlier stages among
            them; -1 in front of a shorter text.
    """

    hidden_states: torch.FloatTensor
    anchor_hidden: torch.FloatTensor | None
    pool: Pool
    anchor_ids: torch.LongTensor
    history: torch.FloatTensor
    history_mask: torch.BoolTensor
    offset: int
    earlier: Any
    embed: Callable[[torch.LongTensor], torch.FloatTensor]
    text_ids: torch.LongTensor

    def first(self, num_slots: int) -> "HeadInputs":
        """The same block cut to its first slots."""
        cut = copy.copy(self)
        cut.hidden_states, cut.pool = self.hidden_states[:, :num_slots], self.pool.first(num_slots)
        return cut


class DraftHead(Protocol):
    """Interface of all heads."""

    def read(self, inputs: HeadInputs) -> Any:
        """Everything that does not depend on the chosen tokens, computed once for the block."""

    def score(self, state: Any, path_ids: torch.LongTensor, first: int = 0) -> torch.FloatTensor:
        """
        Selection logits `(B, R, C)`, fp32, of the `R` slots `first .. first + R - 1`.

        Args:
            state: What `read` returned.
            path_ids (`torch.LongTensor` of shape `(B, first + R)`): Anchor and the tokens of the slots before the last
                scored one. Slot `i` (from 0) depends on `path_ids[:, : i + 1]` only.
            first (`int`): First slot to score.
        """

    def remember(self, state: Any, path_ids: torch.LongTensor) -> Any:
        """What a later stage needs of this one; `path_ids (B, n)`: anchor and tokens, the last one excluded."""


class IndependentHead:
    """DFlash: every slot on its own (arXiv 2602.06036). Selection logits are the pool's log-probabilities."""

    def read(self, inputs: HeadInputs) -> Pool:
        return inputs.pool

    def score(self, state: Pool, path_ids: torch.LongTensor, first: int = 0) -> torch.FloatTensor:
        return state.log_probs[:, first : path_ids.shape[1]]

    def remember(self, state: Pool, path_ids: torch.LongTensor) -> None:
        return None


# Draws tokens: (selection logits (B, R, C), first slot) -> places in the pool (B, R). In walks of several passes it
# must be a function of its arguments.
Chooser = Callable[[torch.FloatTensor, int], torch.LongTensor]


def walk_slots(head: DraftHead, state: Any, pool: Pool, anchor_ids: torch.LongTensor, choose: Chooser):
    """
    Choose slot by slot, from left to right.

    Returns:
        `(choices (B, K), logits (B, K, C))`.
    """
    path = anchor_ids[:, None]
    choices, logits = pool.ids[:, :0, 0], pool.logits[:, :0]
    for slot in range(pool.ids.shape[1]):
        scores = head.score(state, path, slot)
        choice = choose(scores, slot)
        choices, logits = torch.cat([choices, choice], dim=1), torch.cat([logits, scores], dim=1)
        path = torch.cat([path, pool.ids[:, slot].gather(1, choice)], dim=1)
    return choices, logits


def walk_fixed_point(head: DraftHead, state: Any, pool: Pool, anchor_ids: torch.LongTensor, choose: Chooser):
    """
    The same result by repeated parallel passes: start with all KEEP and score every slot under the current path until
    the path stays. Slot 1 is right after one pass, slot `i` after `i` at the latest, so `K` passes always suffice.
    `choose` must be a function of its arguments (sampling: one fixed Gumbel draw for each slot and candidate).
    """
    choices, logits = torch.zeros_like(pool.ids[..., 0]), pool.log_probs
    for _ in range(pool.ids.shape[1]):
        previous = choices
        choices, logits = _pass(head, state, pool, anchor_ids, choose, previous)
        # One pass does if nothing depends on the path; and nothing ever depends on the last slot.
        if isinstance(head, IndependentHead) or torch.equal(previous[:, :-1], choices[:, :-1]):
            break
    return choices, logits


def walk_passes(head: DraftHead, state: Any, pool: Pool, anchor_ids: torch.LongTensor, choose: Chooser, limit: int):
    """
    At most `limit` passes of `walk_fixed_point` without a look between them, for devices that must not be waited for.

    A slot has settled when the last pass changed no choice *before* it. That does not look at the slot's own token, so
    a draft may be cut there even if its tokens are sampled.

    Returns:
        `(choices (B, K), logits (B, K, C), num_settled (B,))`: the first `num_settled` slots are those of the other
        walks, and these are at least `limit`.
    """
    previous = choices = torch.zeros_like(pool.ids[..., 0])
    logits = pool.log_probs
    for _ in range(1 if isinstance(head, IndependentHead) else min(limit, pool.ids.shape[1])):
        previous = choices
        choices, logits = _pass(head, state, pool, anchor_ids, choose, previous)
    if isinstance(head, IndependentHead):
        previous = choices
    num_settled = (previous == choices)[:, :-1].long().cumprod(dim=1).sum(dim=1) + 1
    return choices, logits, num_settled


def _pass(head, state, pool, anchor_ids, choose, choices):
    """Score all slots under the path of `choices` `(B, K)`, and choose."""
    path = torch.cat([anchor_ids[:, None], pool.ids.gather(2, choices[..., None])[:, :-1, 0]], dim=1)
    logits = head.score(state, path)
    return choose(logits, 0), logits

"""Stages of several rows of a batch drafted together: one pass of drafter and head instead of one for each row.

Every row keeps its own session and proposal. For a stage their caches are put side by side, aligned at the anchor,
with the shorter ones hidden by a mask, and the block is taken apart again behind it. What depends on the row alone
(penalties, trees, chains) is drafted row by row. Either way a stage is read from the device once. A compiled backbone
gets the same treatment for a single row, because a context that is padded has the same shape in the next round.
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from .host_transfer import send
from .modeling_base import DraftBlock, Pool
from .modeling_drafter import block_mask, is_flash
from .proposal import StageDraw


_SHORTEST = 256  # slots of a padded context; longer ones double, so that few shapes are compiled


def draft_rounds(generators: list, input_ids: list[torch.LongTensor]) -> list[list[DraftBlock]]:
    """
    Draft a round for every row.

    Args:
        generators (`list[DRelayCandidateGenerator]`): One for each row, all of one call.
        input_ids (`list[torch.LongTensor]` of shape `(1, T)`): Committed tokens of each row.

    Returns:
        Blocks of each row, in the order of the rows; none where nothing is drafted.
    """
    rounds = [generator.stages(ids) for generator, ids in zip(generators, input_ids, strict=True)]
    results: list[list[DraftBlock]] = [[] for _ in rounds]
    drafted: dict[int, DraftBlock | None] = dict.fromkeys(range(len(rounds)))
    while drafted:
        waiting = []
        for row, block in drafted.items():
            try:
                rounds[row].send(block)  # the first `None` starts it
                waiting.append(row)
            except StopIteration as end:
                results[row] = end.value
        groups = defaultdict(list)
        for row in waiting:
            groups[_kind(generators[row], row)].append(row)
        drafted = {}
        for rows in groups.values():
            drafted |= zip(rows, _draft_stage([generators[row] for row in rows]), strict=True)
    return results


def _is_alone(generator) -> bool:
    """Whether a row drafts by itself."""
    return (
        generator.model.config.backbone != "parallel"
        or is_flash(generator.model.config._attn_implementation)  # takes no mask
        or generator.options.tree_budget is not None
        or bool(generator.proposal.penalties)
    )


def _kind(generator, row: int) -> tuple:
    """Rows of the same kind can share a stage; a row that cannot share is a kind of its own."""
    if _is_alone(generator):
        return (row,)
    session, earlier = generator.session, generator.session.earlier
    return session.num_slots, session.num_provisional, None if earlier is None else earlier.shape[1]


def _draft_stage(generators: list) -> list[DraftBlock]:
    """One stage of rows of the same kind."""
    model, options = generators[0].model, generators[0].options
    sessions = [generator.session for generator in generators]
    proposals = [generator.proposal for generator in generators]
    session, proposal = sessions[0], proposals[0]
    if len(generators) > 1 or options.compile_drafter:
        session = BatchSession(sessions, is_padded=options.compile_drafter)
    if len(generators) > 1:
        proposal = BatchProposal(proposals)
    first, cost_model = generators[0], generators[0].cost_model
    started_s = cost_model.clock() if cost_model is not None else 0.0
    is_chain = model.config.backbone != "parallel"  # which plans its slots one by one
    if first.is_planned_ahead and not is_chain:
        session.plan = lambda pool: _plan_stage(generators, pool.log_probs[:, :, 0].tolist())
    block = model.draft(session.anchor_ids, session, proposal, options.use_selector, options.confidence_threshold)
    blocks = block.read_rows()
    if cost_model is None:
        return blocks
    # A chain that was ended by its gate has looked at the slot behind its last token.
    first.observe_draft(started_s, min(block.num_tokens + 1, session.num_slots), _is_alone(first))
    if first.is_planned_ahead:
        return blocks
    # The plan is that of all slots: which of them are left here depends on the tokens that were drawn.
    best = [own.numbers.best_log_probs[0] for own in blocks]
    length = first.plan_chain(best[0]) if is_chain else _plan_stage(generators, best)
    return [_shortened(own, length) for own in blocks]


def _plan_stage(generators: list, best_log_probs: list[list[float]]) -> int:
    """
    What the cost-aware gate makes of a stage that rows draft together, before a token of it is drawn.

    Args:
        best_log_probs (`list[list[float]]`): By row, of the best candidate of each slot.

    Returns:
        The length of the stage, which is one for all of them because they are verified together.
    """
    first = generators[0]
    beliefs = [[math.exp(log_prob) for log_prob in own] for own in best_log_probs]
    reach = [generator.reach() for generator in generators]
    length = first.cost_model.stage_length(beliefs, len(first.blocks), first.num_drafted, reach)
    for generator, own in zip(generators, beliefs, strict=True):
        generator.beliefs[-1] = own[:length]
    return length


def _shortened(block: DraftBlock, length: int) -> DraftBlock:
    """The first `length` slots of a stage, and of its tree if it has one."""
    if block.tree is not None:
        block.tree.candidates = [c for c in block.tree.candidates if c.depth <= length]
    return block.first(length)


class BatchSession:
    """
    Sessions of rows at the same stage as one, for one call of [`DRelayModel.draft`].

    Args:
        sessions (`list[DraftSession]`): Of the rows.
        is_padded (`bool`): Bring contexts and texts to one of few lengths.
    """

    def __init__(self, sessions: list, is_padded: bool = False):
        first = sessions[0]
        self.sessions = sessions
        self.drafter, self.backbone = first.drafter, first.backbone
        self.adapter, self.clock = first.adapter, first.clock
        self.num_slots, self.num_provisional = first.num_slots, first.num_provisional
        self.plan, self.tree_budget = None, first.tree_budget
        self.anchor_ids = torch.cat([session.anchor_ids for session in sessions])
        texts = [session.text_ids for session in sessions]
        longest = _padded(max(text.shape[1] for text in texts), is_padded)
        self.text_ids = torch.cat([F.pad(text, (longest - text.shape[1], 0), value=-1) for text in texts])
        self.history = torch.cat([session.history for session in sessions])
        self.history_mask = torch.cat([session.history_mask for session in sessions])
        self.earlier = None if first.earlier is None else torch.cat([session.earlier for session in sessions])
        lengths = [session.anchor_position for session in sessions]
        self.anchor_position = send(lengths, self.drafter.device)[:, None]
        self.context_length = _padded(max(lengths), is_padded)
        depth = len(self.drafter.layers) if self.context_length else 0
        self.cache = SimpleNamespace(layers=[self._side_by_side(i) for i in range(depth)])

    def positions(self, start: torch.LongTensor, length: int) -> torch.LongTensor:
        """Position ids `(B, length)` from `start` `(B, 1)` on."""
        return start + torch.arange(length, device=start.device)

    def masks(self, num_rows: int) -> list[torch.BoolTensor]:
        """Visible keys `(B, 1, S, T + S)` of every layer of the drafter."""
        columns = torch.arange(self.context_length, device=self.anchor_position.device)
        is_context = columns >= self.context_length - self.anchor_position  # (B, T), shorter ones end at the anchor
        visible = F.pad(is_context, (0, num_rows), value=True)[:, None, None]
        masks = []
        for layer, causal in zip(self.drafter.layers, self.drafter.config.block_causal, strict=True):
            window = layer.self_attn.sliding_window
            own = block_mask(num_rows, self.context_length, causal, window, columns.device)
            masks.append(visible.expand(-1, -1, num_rows, -1) if own is None else visible & own)
        return masks

    def _side_by_side(self, layer_idx: int) -> SimpleNamespace:
        """Keys and values `(B, heads, T, D)` of one layer, those of shorter rows behind zeros."""
        sides = {}
        for name in ("keys", "values"):
            rows = [
                getattr(session.cache.layers[layer_idx], name) if session.anchor_position else None
                for session in self.sessions
            ]
            nothing = next(row for row in rows if row is not None)[:, :, :0]  # of a row without any context
            rows = [nothing if row is None else row for row in rows]
            sides[name] = torch.cat([F.pad(row, (0, 0, self.context_length - row.shape[2], 0)) for row in rows])
        return SimpleNamespace(**sides, is_initialized=True)


def _padded(length: int, is_padded: bool) -> int:
    """`length`, or the next length that shapes may have; an empty context stays empty."""
    return max(_SHORTEST, 1 << (length - 1).bit_length()) if is_padded and length else length


class BatchProposal:
    """Proposals of rows without penalties as one, see [`Proposal`]."""

    penalties: tuple = ()

    def __init__(self, proposals: list):
        self.proposals = proposals
        self.warpers = proposals[0].warpers
        self.is_sampled = proposals[0].is_sampled
        self.input_ids = None  # nothing here depends on it

    def start_stage(self, pool: Pool):
        """Chooser of one stage for all rows."""
        return StageDraw(self, pool)

    def gumbel(self, token_ids: torch.LongTensor, first: int) -> torch.FloatTensor | None:
        """Noise `(B, R, C)` of the candidates: that which each row has of its own."""
        parts = [p.gumbel(token_ids[row : row + 1], first) for row, p in enumerate(self.proposals)]
        return None if parts[0] is None else torch.cat(parts)


__all__ = ["BatchProposal", "BatchSession", "draft_rounds"]

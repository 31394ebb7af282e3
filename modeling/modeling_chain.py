"""What autoregressive drafters share: a chain of tokens, each from the drafter's own state of the one before.

A row of such a drafter pairs the feature of position `i` with the token at `i + 1` and proposes the token at `i + 2`.
The target's features exist for verified positions only; further on the drafter's own state takes their place.
Invariant: between rounds the cache holds rows of true features only; those of a chain are dropped with one crop.
"""

import torch
from transformers.cache_utils import DynamicCache

from .configuration_drelay import DRelayDrafterConfig
from .draft_statistics import PhaseClock
from .draft_tree import TreeLevels
from .modeling_base import DraftBlock, DRelayPreTrainedModel, Pool
from .target_adapter import TargetAdapter


class ChainSession:
    """
    State of one `generate()` call of a [`ChainDrafter`]; the counterpart of [`DraftSession`].

    Features arrive before the token that they are paired with is known to the drafter: they wait in `pending` until
    the next stage.
    """

    def __init__(self, drafter, adapter: TargetAdapter, clock: PhaseClock | None = None):
        self.drafter = drafter
        self.adapter = adapter
        self.clock = clock or PhaseClock(enabled=False)
        self.cache = drafter.new_cache()
        self.num_verified = 0
        self.num_provisional = 0
        self.anchor_ids = None  # (1,), the token the current stage starts from
        self.num_slots = drafter.config.num_drafts
        self.plan = None  # says, from the pool of a slot and before it is drawn, whether it is drafted
        self.tree_budget = None  # nodes of a tree; None drafts a chain
        self.pending = None  # (1, n, F), features of the last verified positions that are in no row yet
        self.state = None  # (1, 1, F), the drafter's own state behind the last drafted token of this round

    def positions(self, start: int, length: int) -> torch.LongTensor:
        """Position ids `(1, length)` from `start` on."""
        return torch.arange(start, start + length, device=self.drafter.device)[None]

    def begin_stage(self, input_ids: torch.LongTensor) -> None:
        """The next stage starts behind `input_ids` `(1, T)`."""
        self.anchor_ids = input_ids[:, -1]

    def observe(self, outputs, row: int = 0, num_rejected: int = 0) -> None:
        """
        Look at the outputs of the target's forward whose states `extend` will take: its `row`, without the last
        `num_rejected` tokens. Nothing else is needed here.
        """

    def extend(self, context_hidden_states: torch.Tensor) -> None:
        """Take the target's tapped hidden states `(1, n, L*H)` of newly verified positions."""
        features = self.drafter.fuse(context_hidden_states.to(self.drafter.device, self.drafter.dtype))
        self.pending = features if self.pending is None else torch.cat([self.pending, features], dim=1)
        self.num_verified += features.shape[1]

    def end_round(self) -> None:
        """Drop the rows of the chain."""
        if self.num_provisional:
            self.cache.crop(-self.num_provisional)
        self.num_provisional = 0
        self.state = None


class ChainDrafter(DRelayPreTrainedModel):
    """
    Base of the autoregressive drafters. A subclass has `fuse` (tapped states to features), `advance` (rows to states)
    and `logits`.
    """

    config_class = DRelayDrafterConfig

    def new_cache(self) -> DynamicCache:
        """An empty cache of rows."""
        return DynamicCache()

    def fuse(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """Features `(B, T, F)` of hidden states `(B, T, L*H)` concatenated in the order of the taps."""
        raise NotImplementedError

    def advance(self, features, token_ids, position_ids, cache, adapter) -> torch.Tensor:
        """
        States `(B, n, F)` of new rows, which see the cache and the rows before them and are appended to it.

        Args:
            features (`torch.FloatTensor` of shape `(B, n, F)`), token_ids (`torch.LongTensor` of shape `(B, n)`):
                Feature of a position and the token behind it.
            position_ids (`torch.LongTensor` of shape `(B, n)`): Of the features.
            cache (`DynamicCache`): Rows so far.
            adapter (`TargetAdapter`): Embeds the tokens.
        """
        raise NotImplementedError

    def logits(self, states: torch.Tensor, adapter: TargetAdapter) -> torch.FloatTensor:
        """Raw logits, fp32, of `states` `(B, n, F)` over the (draft) vocabulary."""
        raise NotImplementedError

    def pool(self, states: torch.Tensor, session: ChainSession, slot: int) -> Pool:
        """Candidates `(B, 1, C)` of the next slot, given the states `(B, 1, F)` before it."""
        token_ids = getattr(self, "draft_token_ids", None)
        return Pool.from_logits(self.logits(states, session.adapter), self.config.pool_size, token_ids)

    @torch.no_grad()
    def draft(self, anchor_ids: torch.LongTensor, session: ChainSession, proposal) -> DraftBlock:
        """
        One stage: `session.num_slots` tokens, each drawn from the pool of its slot.

        Args:
            anchor_ids (`torch.LongTensor` of shape `(B,)`): Last token before the stage.
            session (`ChainSession`): State of the call.
            proposal (`Proposal`): Draws the tokens; its `input_ids` end with the anchor.
        """
        if session.tree_budget is not None:
            return self._draft_tree(anchor_ids, session, proposal)
        B, K, C = len(anchor_ids), session.num_slots, self.config.pool_size
        scores = torch.zeros(B, K, C, device=self.device)
        pool = Pool(torch.zeros(B, K, C, dtype=torch.long, device=self.device), scores.clone(), scores)
        choose = proposal.start_stage(pool)  # reads a slot of the pool when that slot is drawn
        states, choices, token = [], [], anchor_ids[:, None]
        for slot in range(K):
            if slot == 0:
                state = self.first_state(session, token, proposal.input_ids)
            else:
                state = self.next_state(session, states[-1], token)
            candidates = self.pool(state, session, slot)
            pool.ids[:, slot : slot + 1] = candidates.ids
            pool.logits[:, slot : slot + 1] = candidates.logits
            pool.log_probs[:, slot : slot + 1] = candidates.log_probs
            if session.plan is not None and not session.plan(candidates):
                break
            choice = choose(candidates.log_probs, slot)
            token = candidates.ids[:, 0].gather(1, choice)
            states.append(state)
            choices.append(choice)
        n = len(choices)
        session.clock.lap("draft")
        if not n:
            nothing = pool.first(0)
            return self._block(nothing, nothing.ids[..., 0], scores.new_zeros(B, 0, self.config.hidden_size))
        block = self._block(pool.first(n), torch.cat(choices, dim=1), torch.cat(states, dim=1))
        block.pool_logits, block.num_usable = choose.proposal_logits(n), choose.num_possible(n)
        return block

    def _draft_tree(self, anchor_ids: torch.LongTensor, session: ChainSession, proposal) -> DraftBlock:
        """
        The best `tree_budget` paths of every depth, as `draft_tree.grow` finds them. Every path is a row of a batch
        with a cache of its own; at the end the cache is that of the best of the longest paths.
        """
        budget, choose = session.tree_budget, None
        path_ids, total = anchor_ids.new_zeros(1, 0), torch.zeros(1, device=self.device)
        state = self.first_state(session, anchor_ids[:, None], proposal.input_ids)
        levels, pools, states = TreeLevels(budget), [], []
        for slot in range(session.num_slots):
            pool = self.pool(state, session, slot)  # (W, 1, C)
            choose = choose or proposal.start_stage(pool)
            total = total[:, None] + choose.path_log_probs(pool.log_probs[:, 0], slot, path_ids, pool)
            total, flat = total.flatten().topk(min(budget, total.numel()))
            parents, choices = flat // pool.ids.shape[-1], flat % pool.ids.shape[-1]
            token_ids = pool.ids.flatten()[flat]
            path_ids = torch.cat([path_ids[parents], token_ids[:, None]], dim=1)
            levels.add(total, parents, choices, token_ids)
            pools.append(pool)
            states.append(state)
            if slot < session.num_slots - 1:
                session.cache.batch_select_indices(parents)
                state = self.next_state(session, state[parents], token_ids[:, None])
        places, depth = levels.best_path()
        if len(places) > 1:
            session.cache.batch_select_indices(places[-2:-1])
        before = [torch.zeros_like(depth), *places.split(1)][:-1]  # rows of the pools and states that lead to the path
        parts = [Pool(*(part[row] for part in vars(pool).values())) for pool, row in zip(pools, before, strict=True)]
        pool = Pool(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in vars(parts[0])))
        picked = torch.stack([own[row] for own, row in zip(levels.choices, places.split(1), strict=True)], dim=1)
        features = torch.cat([own[row] for own, row in zip(states, before, strict=True)], dim=1)
        session.clock.lap("draft")
        block = self._block(pool, picked, features)
        block.tree, block.num_usable = levels, depth
        return block

    @staticmethod
    def _block(pool: Pool, choices: torch.LongTensor, states: torch.Tensor) -> DraftBlock:
        picked = choices[..., None]
        return DraftBlock(
            draft_ids=pool.ids.gather(2, picked)[..., 0],
            choices=choices,
            pool_ids=pool.ids,
            pool_logits=None,
            context_features=states,
            slot_log_confidence=pool.log_probs.gather(2, picked)[..., 0],
            remember=lambda n: None,
            pool_log_probs=pool.log_probs,
        )

    def continue_after(self, block: DraftBlock, session: ChainSession) -> None:
        """Prepare another stage behind the whole `block`: its first row takes the drafter's own state."""
        session.state = block.context_features[:, -1:]

    def first_state(self, session: ChainSession, token, input_ids) -> torch.Tensor:
        """State behind the anchor: commit the rows of newly verified positions, or go on from a stage before."""
        if session.pending is None:
            return self.next_state(session, session.state, token)
        num_rows = min(session.pending.shape[1], input_ids.shape[1])  # with `inputs_embeds` a prompt has no tokens
        tokens = input_ids[:, -num_rows:].to(self.device)
        positions = session.positions(session.num_verified - num_rows, num_rows)
        states = self.advance(session.pending[:, -num_rows:], tokens, positions, session.cache, session.adapter)
        session.pending = None
        return states[:, -1:]

    def next_state(self, session: ChainSession, state, token) -> torch.Tensor:
        positions = session.positions(session.num_verified + session.num_provisional, 1)
        session.num_provisional += 1
        return self.advance(state, token, positions, session.cache, session.adapter)


__all__ = ["ChainDrafter", "ChainSession"]

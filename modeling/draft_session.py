"""State of one `generate()` call: the drafter's cache, the verified length, and the features the selector may read.

Invariant: between rounds the cache and the history hold exactly the verified positions `0 .. anchor - 1`. Stages of a
round append provisional features after them, and one crop at the end of the round's drafting takes them away.
"""

import torch

from .draft_statistics import PhaseClock
from .target_adapter import TargetAdapter


class DraftSession:
    """
    Drafting state for one row of one target.

    Args:
        drafter (`DRelayDrafterModel`): Backbone whose cache this session owns.
        adapter (`TargetAdapter`): View of the target.
        clock (`PhaseClock`, *optional*): Takes the time of the phases of a round.
    """

    def __init__(self, drafter, adapter: TargetAdapter, clock: PhaseClock | None = None):
        self.drafter = drafter
        self.backbone = drafter  # what a stage calls
        self.adapter = adapter
        self.clock = clock or PhaseClock(enabled=False)
        self.cache = drafter.new_cache()
        self.num_verified = 0
        self.num_provisional = 0
        self.anchor_ids = None  # (1,), the token the current stage starts from
        self.text_ids = torch.zeros(1, 0, dtype=torch.long, device=drafter.device)  # (1, T), all tokens before it
        self.num_slots = drafter.config.num_drafts  # slots of a stage that the head scores
        self.plan = None  # chooses, from the pools and before anything is drawn, how many of them are drafted
        self.tree_budget = None  # nodes of a tree; None drafts a chain
        self.earlier = None  # what the head remembers of earlier stages of this round
        window, width = drafter.config.history_window, drafter.config.hidden_size
        self.history = torch.zeros(1, window, width, dtype=drafter.dtype, device=drafter.device)
        self.history_mask = torch.zeros(1, window, dtype=torch.bool, device=drafter.device)

    @property
    def anchor_position(self) -> int:
        """Position of the token that the next stage starts from."""
        return self.num_verified + self.num_provisional

    def positions(self, start: int, length: int) -> torch.LongTensor:
        """Position ids `(1, length)` from `start` on."""
        return torch.arange(start, start + length, device=self.drafter.device)[None]

    def masks(self, num_rows: int) -> None:
        """The drafter's own masks do: its cache holds this row alone."""
        return None

    def observe(self, outputs, row: int = 0, num_rejected: int = 0) -> None:
        """
        Look at the outputs of the target's forward whose states `extend` will take: its `row`, without the last
        `num_rejected` tokens. Nothing else is needed here.
        """

    def extend(self, context_hidden_states: torch.Tensor) -> None:
        """Append newly verified positions from the target's tapped hidden states `(1, n, L*H)`."""
        features = self.drafter.fuse(context_hidden_states.to(self.drafter.device, self.drafter.dtype))
        num_new, window = features.shape[1], self.history.shape[1]
        self.drafter.extend(features, self.positions(self.num_verified, num_new), self.cache)
        self.num_verified += num_new
        self.history = torch.cat([self.history, features], dim=1)[:, -window:]
        seen = torch.ones_like(self.history_mask[:, :1]).expand(-1, num_new)
        self.history_mask = torch.cat([self.history_mask, seen], dim=1)[:, -window:]

    def begin_stage(self, input_ids: torch.LongTensor) -> None:
        """The next stage starts behind `input_ids` `(1, T)`, committed and drafted ones without padding."""
        self.anchor_ids = input_ids[:, -1]
        self.text_ids = input_ids[:, :-1]

    def extend_provisional(self, features: torch.Tensor) -> None:
        """Append stand-ins `(1, n, H)` for features that the target has not computed yet."""
        if self.drafter.config.provisional_norm == "hidden":
            features = self.drafter.hidden_norm(features)
        self.drafter.extend(features, self.positions(self.anchor_position, features.shape[1]), self.cache)
        self.num_provisional += features.shape[1]

    def end_round(self) -> None:
        """Drop everything provisional, with one crop."""
        if self.num_provisional:  # `crop(0)` empties the cache in old versions
            self.cache.crop(-self.num_provisional)
        self.num_provisional = 0
        self.earlier = None

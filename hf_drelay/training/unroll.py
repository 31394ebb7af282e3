"""Stages of all blocks of a batch at once, as DLoop drafts them, with the target's tokens as what was drafted."""

import torch

from .blocks import training_masks


class StageUnroll:
    """
    The backbone on many blocks that share a context.

    Each `draft` gives the rows of the stage that starts `offset` tokens behind the anchors; `go_on` puts the rows of
    that stage into the place of the features that the target would not have computed yet, and moves on.

    Args:
        model (`DRelayModel`): Drafter and selector.
        adapter (`TargetAdapter`): View of the target.
        features (`torch.FloatTensor` of shape `(B, T, H)`): Context features of whole sequences.
        input_ids (`torch.LongTensor` of shape `(B, T)`), anchors (`torch.LongTensor` of shape `(B, A)`)
        stage_tokens (`int`, *optional*): Tokens of a stage; `None` is the whole block.
    """

    def __init__(self, model, adapter, features, input_ids, anchors, stage_tokens: int | None = None):
        self.model = model
        self.embed = adapter.embed
        self.input_ids = input_ids
        self.anchors = anchors
        self.context_length = input_ids.shape[1]
        self.stage_tokens = min(stage_tokens or model.config.num_drafts, model.config.num_drafts)
        self.stage = 0
        self.cache = model.drafter.new_cache()
        positions = torch.arange(self.context_length, device=input_ids.device)[None].expand(len(input_ids), -1)
        model.drafter.extend(features, positions, self.cache)

    @property
    def offset(self) -> int:
        """Tokens between the anchors and the start of this stage."""
        return self.stage * self.stage_tokens

    def draft(self) -> torch.Tensor:
        """Backbone rows `(B, A, S, H)` of this stage."""
        config, (B, A) = self.model.config, self.anchors.shape
        positions = self._positions(config.block_size)
        embeds = self.model.drafter.block_embeds(self._tokens(positions[:, :, 0]).flatten(), self.embed)
        masks = training_masks(config, self.anchors, self.context_length, self.stage, self.stage_tokens)
        rows = self.model.drafter(
            embeds.view(B, A * config.block_size, -1), positions.flatten(1), self.cache, masks
        ).last_hidden_state
        return rows.view(B, A, config.block_size, -1)

    def go_on(self, rows: torch.Tensor) -> None:
        """Take the `rows` `(B, A, S, H)` of this stage for features, and start the next stage."""
        positions = self._positions(self.stage_tokens).flatten(1)
        features = rows[:, :, : self.stage_tokens].flatten(1, 2)
        if self.model.selector is not None:
            features = self.model.selector.provisional_features(features, self._tokens(positions), self.embed)
        if self.model.config.provisional_norm == "hidden":
            features = self.model.drafter.hidden_norm(features)
        self.model.drafter.extend(features, positions, self.cache)
        self.stage += 1

    def _positions(self, length: int) -> torch.LongTensor:
        """Positions `(B, A, length)` from the start of this stage on."""
        start = self.anchors.clamp(min=0)[:, :, None] + self.offset
        return start + torch.arange(length, device=start.device)

    def _tokens(self, positions: torch.LongTensor) -> torch.LongTensor:
        """Tokens at `positions` `(B, n)`; behind the end of a sequence nothing counts, so any token will do."""
        return self.input_ids.gather(1, positions.clamp(max=self.context_length - 1))

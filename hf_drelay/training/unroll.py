"""Stages of all blocks of a batch at once, as DLoop drafts them, with the target's tokens as what was drafted."""

import torch
import torch.nn.functional as F

from hf_drelay.modeling.modeling_drafter import as_backend_mask

from .blocks import training_masks


class Unroll:
    """Counts the stages of an unroll; each starts `stage_tokens` behind the one before."""

    def __init__(self, model, input_ids, anchors, stage_tokens: int | None):
        self.model = model
        self.input_ids = input_ids
        self.anchors = anchors
        self.stage_tokens = min(stage_tokens or model.config.num_drafts, model.config.num_drafts)
        self.stage = 0

    @property
    def offset(self) -> int:
        """Tokens between the anchors and the start of this stage."""
        return self.stage * self.stage_tokens


class StageUnroll(Unroll):
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
        super().__init__(model, input_ids, anchors, stage_tokens)
        self.embed = adapter.embed
        self.context_length = input_ids.shape[1]
        self.cache = model.drafter.new_cache()
        positions = torch.arange(self.context_length, device=input_ids.device)[None].expand(len(input_ids), -1)
        model.drafter.extend(features, positions, self.cache)

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


class ChainUnroll(Unroll):
    """
    EAGLE-3's chain at every position at once (arXiv 2503.01840, training-time test); the counterpart of
    [`StageUnroll`], with the same arguments.

    Step 0 pairs the target's feature of position `i` with the token at `i + 1`; step `k` pairs the drafter's own
    state of step `k - 1` with the token at `i + 1 + k`. Row `i` of step `k` sees the rows up to `i` of step 0 and of
    the later steps only itself: what a chain that starts at `i` sees at inference. The next stage of a round goes on
    with the same chain.
    """

    def __init__(self, model, adapter, features, input_ids, anchors, stage_tokens: int | None = None):
        super().__init__(model, input_ids, anchors, stage_tokens)
        self.adapter = adapter
        self.features = features
        self.steps: list[torch.Tensor] = []  # (B, T, H) each
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of each step

    def draft(self) -> torch.Tensor:
        """States `(B, A, S, H)` of this stage; row `j` predicts the token `offset + 1 + j` behind the anchor."""
        num_steps = self.offset + self.model.config.num_drafts
        while len(self.steps) < num_steps:
            self._step()
        chain = torch.stack(self.steps[self.offset : num_steps], dim=2)  # (B, T, S, H)
        # A chain starts from the feature before its anchor.
        rows = (self.anchors - 1).clamp(min=0)[:, :, None, None].expand(-1, -1, *chain.shape[2:])
        return chain.gather(1, rows)

    def go_on(self, rows: torch.Tensor) -> None:
        """Start the next stage; the chain needs nothing of `rows`."""
        self.stage += 1

    def _step(self) -> None:
        drafter, step, T = self.model.drafter, len(self.steps), self.input_ids.shape[1]
        device = self.input_ids.device
        tokens = F.pad(self.input_ids[:, 1 + step :], (0, min(T, 1 + step)))
        positions = torch.arange(step, step + T, device=device)[None].expand_as(tokens)
        own = torch.eye(T, dtype=torch.bool, device=device)
        mask = torch.cat([torch.ones_like(own).tril(), *[own] * step], dim=1)
        mask = as_backend_mask(mask[None, None], len(tokens), self.model.config._attn_implementation, drafter.dtype)

        def update(keys, values):
            self.seen.append((keys, values))
            return tuple(torch.cat(parts, dim=2) for parts in zip(*self.seen, strict=True))

        features = self.steps[-1] if self.steps else self.features
        self.steps.append(drafter.run_layer(features, tokens, positions, mask, update, self.adapter))

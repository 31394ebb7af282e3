"""The joint loss of drafter and selector on many blocks of a sequence at once.

A block starts at an anchor, a position of the response; its rows see the target's features of all positions before the
anchor and their own block. Everything is teacher-forced: the accepted length depends only on decisions made under a
correct prefix, so one parallel pass over all slots of all blocks suffices.

Shapes: `B` sequences of `T` tokens, `A` anchors in each, `S` rows and `K` slots of a block, `N <= B * A` real blocks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_drelay.modeling.modeling_base import Pool
from hf_drelay.modeling.modeling_heads import HeadInputs


@dataclass
class ObjectiveConfig:
    """
    Weights of the loss `L = L_base + support_weight * L_sup + repair_weight * L_rep`.

    Attributes:
        decay (`float`): Time constant of the slot weight `exp(-(i - 1) / decay)` of `L_base`.
        support_weight (`float`): Weight of the candidate-support loss, 0 turns it off.
        support_margin (`float`): Its margin.
        repair_weight (`float`): Weight of the selector's loss, 0 trains the backbone alone.
        contribution (`float`): Share (0..1) of the contribution weight in the slot weight of `L_rep`; the rest is the
            decay.
        contribution_floor (`float`): Least contribution weight.
        freeze_backbone (`bool`): Keep the gradient of `L_rep` out of the backbone and drop `L_base`.
    """

    decay: float = 4.0
    support_weight: float = 0.1
    support_margin: float = 0.5
    repair_weight: float = 1.0
    contribution: float = 0.0
    contribution_floor: float = 0.1
    freeze_backbone: bool = False


@dataclass
class Blocks:
    """
    Blocks of a batch.

    Attributes:
        sequence, anchor (`torch.LongTensor` of shape `(N,)`): Where each block starts.
        labels (`torch.LongTensor` of shape `(N, K)`): The tokens that the target put into its slots.
        valid (`torch.BoolTensor` of shape `(N, K)`): Which slots lie inside the response.
    """

    sequence: torch.LongTensor
    anchor: torch.LongTensor
    labels: torch.LongTensor
    valid: torch.BoolTensor


def sample_anchors(
    prompt_lengths: list[int], lengths: list[int], num_anchors: int, generators: list[torch.Generator]
) -> torch.LongTensor:
    """
    Distinct random anchors `(B, num_anchors)` of each response, sorted, padded with -1. An anchor is a response token
    that has a successor.
    """
    rows = []
    for prompt_length, length, generator in zip(prompt_lengths, lengths, generators, strict=True):
        places = torch.randperm(length - 1 - prompt_length, generator=generator)[:num_anchors] + prompt_length
        rows.append(F.pad(places.sort().values, (0, num_anchors - len(places)), value=-1))
    return torch.stack(rows)


def label_blocks(input_ids: torch.LongTensor, lengths: torch.LongTensor, anchors: torch.LongTensor, K: int) -> Blocks:
    """The real blocks among `anchors` `(B, A)` (-1 is padding) with the tokens that follow each anchor."""
    sequence, column = (anchors >= 0).nonzero(as_tuple=True)
    anchor = anchors[sequence, column]
    places = anchor[:, None] + torch.arange(1, K + 1, device=anchor.device)
    valid = places < lengths[sequence][:, None]
    labels = input_ids[sequence[:, None], places.clamp(max=input_ids.shape[1] - 1)]
    return Blocks(sequence, anchor, labels, valid)


def training_masks(config, anchors: torch.LongTensor, context_length: int) -> list[torch.BoolTensor]:
    """
    Visible keys `(B, 1, A*S, T + A*S)` of every layer: context before the anchor, rows of the own block, nothing of
    other blocks. Rows of padding anchors see their own block only, which keeps the softmax finite.
    """
    B, A = anchors.shape
    S = config.block_size
    device = anchors.device
    row_block = torch.arange(A, device=device).repeat_interleave(S)
    row_place = torch.arange(S, device=device).repeat(A)
    row_position = anchors[:, row_block] + row_place  # (B, A*S)
    context = torch.arange(context_length, device=device)
    before = context[None, None] < anchors[:, row_block][:, :, None]  # (B, A*S, T)
    same_block = (row_block[:, None] == row_block[None, :]).expand(B, -1, -1)
    masks = {}
    for kind, causal in set(zip(config.layer_types, config.block_causal, strict=True)):
        context_mask, block_mask = before, same_block
        if causal:
            block_mask = block_mask & (row_place[None, :] <= row_place[:, None])
        if kind == "sliding_attention":
            context_mask = context_mask & (row_position[:, :, None] - context[None, None] < config.sliding_window)
            block_mask = block_mask & ((row_place[:, None] - row_place[None, :]).abs() < config.sliding_window)
        masks[kind, causal] = torch.cat([context_mask, block_mask], dim=2)[:, None]
    return [masks[pair] for pair in zip(config.layer_types, config.block_causal, strict=True)]


class JointObjective:
    """
    Loss of a batch.

    Args:
        model (`DRelayModel`): Drafter and selector being trained.
        adapter (`TargetAdapter`): View of the frozen target.
        config (`ObjectiveConfig`): Weights; may be changed between steps.
    """

    def __init__(self, model, adapter, config: ObjectiveConfig):
        self.model = model
        self.adapter = adapter
        self.config = config
        rows = torch.arange(model.config.vocab_size)
        shortlist = model.drafter.draft_token_ids
        if shortlist is not None:  # column of a token in the restricted logits, -1 when it cannot be drafted
            rows = torch.full_like(rows, -1)
            rows[shortlist.cpu()] = torch.arange(len(shortlist))
        self.columns = rows.to(model.device)

    def __call__(self, states, input_ids, lengths, anchors, num_selector_blocks=None) -> tuple[torch.Tensor, dict]:
        """
        Args:
            states (`torch.FloatTensor` of shape `(B, T, L*H)`): The target's tapped hidden states.
            input_ids (`torch.LongTensor` of shape `(B, T)`), lengths (`torch.LongTensor` of shape `(B,)`)
            anchors (`torch.LongTensor` of shape `(B, A)`): See `sample_anchors`.
            num_selector_blocks (`int`, *optional*): Train the selector on that many of the blocks only.

        Returns:
            `(loss, terms)`: a scalar, and a dictionary of its detached parts and of accuracies.
        """
        drafter, K = self.model.drafter, self.model.config.num_drafts
        blocks = label_blocks(input_ids, lengths, anchors, K)
        features = drafter.fuse(states.to(drafter.dtype))
        rows = self._backbone(features, input_ids, anchors)[blocks.sequence, (anchors >= 0).nonzero(as_tuple=True)[1]]
        hidden = rows[:, -K:]
        logits = self.adapter.logits(hidden, drafter.draft_token_ids)  # (N, K, Vd)
        columns = self.columns[blocks.labels]
        scored = blocks.valid & (columns >= 0)
        decay = torch.exp(-torch.arange(K, device=logits.device) / self.config.decay)
        loss, terms = logits.new_zeros(()), {}
        if not self.config.freeze_backbone:
            loss = self._base(logits, columns, scored, decay, terms)
            loss = loss + self.config.support_weight * self._support(logits, columns, scored, decay, terms)
        if self.config.repair_weight and self.model.selector is not None:
            chosen = _first_blocks(len(hidden), num_selector_blocks, hidden.device)
            inputs = self._head_inputs(features, rows, hidden, logits, input_ids, blocks, chosen)
            repair = self._repair(inputs, blocks.labels[chosen], blocks.valid[chosen], decay, terms)
            loss = loss + self.config.repair_weight * repair
        first = blocks.valid[:, 0]
        right = logits[:, 0].argmax(-1) == columns[:, 0]
        terms["slot1_accuracy"] = (right & first).sum() / first.sum().clamp(min=1)
        return loss, {name: float(value) for name, value in terms.items()}

    def _backbone(self, features, input_ids, anchors) -> torch.Tensor:
        """Backbone rows `(B, A, S, H)` of all blocks, in one forward with a shared context."""
        drafter, S = self.model.drafter, self.model.config.block_size
        B, T = input_ids.shape
        A = anchors.shape[1]
        cache = drafter.new_cache()
        drafter.extend(features, torch.arange(T, device=input_ids.device)[None].expand(B, -1), cache)
        places = anchors.clamp(min=0)
        embeds = drafter.block_embeds(input_ids.gather(1, places).flatten(), self.adapter.embed)
        positions = (places[:, :, None] + torch.arange(S, device=places.device)).flatten(1)
        masks = training_masks(self.model.config, anchors, T)
        output = drafter(embeds.view(B, A * S, -1), positions, cache, masks)
        return output.last_hidden_state.view(B, A, S, -1)

    def _head_inputs(self, features, rows, hidden, logits, input_ids, blocks: Blocks, chosen) -> HeadInputs:
        config = self.model.config
        if self.config.freeze_backbone:
            features, rows, hidden, logits = (t.detach() for t in (features, rows, hidden, logits))
        window = torch.arange(-config.history_window, 0, device=input_ids.device)
        places = blocks.anchor[chosen][:, None] + window  # ends just before the anchor, as at inference
        sequence = blocks.sequence[chosen]
        return HeadInputs(
            hidden_states=hidden[chosen],
            anchor_hidden=rows[chosen][:, 0] if config.layout == "fill_in" else None,
            pool=Pool.from_logits(logits[chosen], config.pool_size, self.model.drafter.draft_token_ids),
            anchor_ids=input_ids[sequence, blocks.anchor[chosen]],
            history=features[sequence[:, None], places.clamp(min=0)],
            history_mask=places >= 0,
            offset=0,
            earlier=None,
            embed=self.adapter.embed,
        )

    def _base(self, logits, columns, scored, decay, terms) -> torch.Tensor:
        """Cross-entropy on the target's tokens."""
        losses = F.cross_entropy(logits.flatten(0, 1), columns.clamp(min=0).flatten(), reduction="none")
        loss = _weighted_mean(losses.view_as(columns), scored * decay)
        terms["base"] = loss.detach()
        return loss

    def _support(self, logits, columns, scored, decay, terms) -> torch.Tensor:
        """Hinge that lifts the target's token into the pool: compare it with the `C`-th best of the other tokens."""
        C = self.model.config.pool_size
        top = logits.topk(min(C + 1, logits.shape[-1]), dim=-1)
        own = logits.gather(2, columns.clamp(min=0)[..., None])[..., 0]
        inside = (top.indices[..., :C] == columns[..., None]).any(-1)
        # With the own token among the best C, the C-th best of the others is the (C + 1)-th best of all.
        rival = torch.where(inside, top.values[..., -1], top.values[..., C - 1])
        loss = _weighted_mean(F.relu(rival - own + self.config.support_margin), scored * decay)
        terms["support"] = loss.detach()
        terms["coverage"] = (inside & scored).sum() / scored.sum().clamp(min=1)
        return loss

    def _repair(self, inputs: HeadInputs, labels, valid, decay, terms) -> torch.Tensor:
        """Negative log-likelihood of the target's token among the pool, where the pool holds it."""
        selector = self.model.selector
        path = torch.cat([inputs.anchor_ids[:, None], labels[:, :-1]], dim=1)
        log_probs = selector.score(selector.read(inputs), path).log_softmax(dim=-1)
        hits = inputs.pool.ids == labels[..., None]
        covered = hits.any(-1) & valid
        own = log_probs.gather(2, hits.long().argmax(-1, keepdim=True))[..., 0]
        weight = (1 - self.config.contribution) * decay.expand_as(own)
        if self.config.contribution:
            accepted = torch.where(covered, own.detach().exp(), torch.zeros_like(own))
            share = contribution_weights(accepted).clamp(min=self.config.contribution_floor)
            weight = weight + self.config.contribution * share
        loss = _weighted_mean(-own, covered * weight)
        terms["repair"] = loss.detach()
        right = (log_probs.argmax(-1) == hits.long().argmax(-1)) & covered
        terms["expected_accepted"] = right.long().cumprod(dim=1).sum(1).float().mean()
        drafted = (inputs.pool.ids[..., 0] == labels) & valid
        terms["expected_accepted_kept"] = drafted.long().cumprod(dim=1).sum(1).float().mean()
        return loss


def contribution_weights(accepted: torch.FloatTensor) -> torch.FloatTensor:
    """
    Derivative of the expected accepted prefix `A = sum_i prod_{j <= i} a_j` with respect to each `a_i`, for acceptance
    probabilities `accepted` `(N, K)`: the chance to get to slot `i`, times one plus what can follow it.
    """
    N, K = accepted.shape
    reach = torch.cat([accepted.new_ones(N, 1), accepted.cumprod(dim=1)[:, :-1]], dim=1)
    follow = [accepted.new_zeros(N)]
    for slot in range(K - 1, 0, -1):
        follow.append(accepted[:, slot] * (1 + follow[-1]))
    return reach * (1 + torch.stack(follow[::-1], dim=1))


def _first_blocks(num_blocks: int, limit: int | None, device) -> torch.LongTensor:
    """Evenly spread block numbers, at most `limit`."""
    if limit is None or limit >= num_blocks:
        return torch.arange(num_blocks, device=device)
    return torch.linspace(0, num_blocks - 1, limit, device=device).round().long()


def _weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)


__all__ = ["JointObjective", "ObjectiveConfig", "contribution_weights", "sample_anchors", "training_masks"]

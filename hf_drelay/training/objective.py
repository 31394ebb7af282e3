"""The joint loss of drafter and selector on many blocks of a sequence at once.

A block starts at an anchor, a position of the response; its rows see the target's features of all positions before the
anchor and their own block. Everything is teacher-forced: the accepted length depends only on decisions made under a
correct prefix, so one parallel pass over all slots of all blocks suffices. With `loop_depth > 1` every block drafts
on, from its own states, as DLoop does.

Shapes: `B` sequences of `T` tokens, `A` anchors in each, `S` rows and `K` slots of a block, `N <= B * A` real blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_drelay.modeling.modeling_base import Pool
from hf_drelay.modeling.modeling_heads import HeadInputs

from .blocks import Blocks, arrange_blocks
from .features import SoftTargets
from .unroll import ChainUnroll, StageUnroll
from .vocabulary import SlotLogits, slot_logits


BASE_LOSSES = ("ce", "kl", "l1")
SLOT_WEIGHTS = ("decay", "dpace")


@dataclass
class ObjectiveConfig:
    """
    Weights of the loss `L = base_weight * (L_base + support_weight * L_sup) + repair_weight * L_head`, where `L_head`
    is `L_rep` and its like for the other heads.

    Attributes:
        base_loss (`str`): `L_base`: `"ce"` on the target's tokens, or that mixed with the divergence from the target's
            own distribution, `"kl"` (forward) or `"l1"` (total variation, as in DSpark, arXiv 2607.05147).
        soft_weight (`float`): Share of the divergence in that mixture.
        slot_weight (`str`): Weights of the slots in `L_base` and `L_sup`: `"decay"`, or `"dpace"` (arXiv 2605.18810),
            the chance to get as far as a slot and beyond it.
        decay (`float`): Time constant of the slot weight `exp(-(i - 1) / decay)`.
        dpace_floor (`float`): Least chance of a slot under `"dpace"`.
        base_weight (`float`): Weight of the backbone's own losses; Domino's curriculum (arXiv 2605.29707) lowers it.
        support_weight (`float`): Weight of the candidate-support loss, 0 turns it off.
        support_margin (`float`): Its margin.
        repair_weight (`float`): Weight of the head's loss, 0 trains the backbone alone.
        head_l1_share (`float`): Share of the distance `|q - p|_1` in the head's loss, the rest is the negative
            log-likelihood; DSpark (arXiv 2607.05147) has 0.9.
        head_kl_share (`float`): Share of the divergence from the target's distribution among the pool in the head's
            loss.
        confidence_weight (`float`): Weight of the confidence's loss, for heads that have one.
        contribution (`float`): Share (0..1) of the contribution weight in the slot weight of `L_rep`; the rest is the
            decay.
        contribution_floor (`float`): Least contribution weight.
        freeze_backbone (`bool`): Train the head alone: no `L_base`, and no gradient for the backbone.
        loop_depth (`int`): Stages that are unrolled; the loss is the mean of that of the first and of the last.
        loop_tokens (`int`, *optional*): Tokens of a stage before the next one starts; `None` is the whole block.
        chunk_rows (`int`): Slots whose vocabulary logits exist at the same time.
    """

    base_loss: str = "ce"
    soft_weight: float = 0.5
    slot_weight: str = "decay"
    decay: float = 4.0
    dpace_floor: float = 0.5
    base_weight: float = 1.0
    support_weight: float = 0.1
    support_margin: float = 0.5
    repair_weight: float = 1.0
    head_l1_share: float = 0.0
    head_kl_share: float = 0.0
    confidence_weight: float = 1.0
    contribution: float = 0.0
    contribution_floor: float = 0.1
    freeze_backbone: bool = False
    loop_depth: int = 1
    loop_tokens: int | None = None
    chunk_rows: int = 1024

    def __post_init__(self):
        for name, allowed in (("base_loss", BASE_LOSSES), ("slot_weight", SLOT_WEIGHTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; expected one of {allowed}.")
        for name in ("soft_weight", "head_l1_share", "head_kl_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; expected a share between 0 and 1.")
        if self.head_l1_share + self.head_kl_share > 1:
            raise ValueError(
                f"`head_l1_share` {self.head_l1_share} and `head_kl_share` {self.head_kl_share} are together more "
                "than the whole loss; lower one of them."
            )

    @property
    def has_soft_base(self) -> bool:
        """Whether `L_base` looks at the target's distribution."""
        return self.base_loss != "ce" and not self.freeze_backbone


@dataclass
class _Batch:
    """What all stages of a batch share."""

    features: torch.Tensor  # (B, T, H)
    input_ids: torch.LongTensor  # (B, T)
    lengths: torch.LongTensor  # (B,)
    blocks: Blocks
    soft_targets: SoftTargets | None


@dataclass
class _Stage:
    """One stage of some blocks."""

    blocks: Blocks
    offset: int
    rows: torch.Tensor  # (N, S, H)
    hidden: torch.Tensor  # (N, K, H)
    labels: torch.LongTensor  # (N, K), the tokens that the target put into the slots
    valid: torch.BoolTensor  # (N, K), which slots lie inside the response
    columns: torch.LongTensor  # (N, K), columns of the labels, -1 outside the shortlist
    logits: SlotLogits


class JointObjective:
    """
    Loss of a batch.

    Args:
        model (`DRelayModel`): Drafter and selector being trained.
        adapter (`TargetAdapter`): View of the frozen target.
        config (`ObjectiveConfig`): Weights; may be changed between steps.
        share (`Callable`, *optional*): Mean of a total weight over the processes that a batch is split over, so that
            together they have the loss of the whole batch.
    """

    def __init__(self, model, adapter, config: ObjectiveConfig, share: Callable | None = None):
        self.model = model
        self.adapter = adapter
        self.config = config
        self.share = share or (lambda total: total)
        rows = torch.arange(model.config.vocab_size)
        shortlist = model.drafter.draft_token_ids
        if shortlist is not None:  # column of a token in the restricted logits, -1 when it cannot be drafted
            rows = torch.full_like(rows, -1)
            rows[shortlist.cpu()] = torch.arange(len(shortlist))
        self.columns = rows.to(model.device)

    @property
    def trains_selector(self) -> bool:
        return bool(self.config.repair_weight) and self.model.selector is not None

    @property
    def trains_confidence(self) -> bool:
        return self.trains_selector and getattr(self.model.selector, "confidence_head", None) is not None

    @property
    def needs_soft_targets(self) -> bool:
        """Whether a loss looks at the target's distribution."""
        of_head = self.trains_selector and self.config.head_l1_share + self.config.head_kl_share > 0
        return self.config.has_soft_base or of_head or self.trains_confidence

    @property
    def corrects_whole_vocabulary(self) -> bool:
        """Whether the head's paper corrects every token: then what lies outside the pool counts, uncorrected."""
        return self.model.config.head in ("recurrent", "markov")

    def __call__(
        self,
        states: torch.FloatTensor,
        input_ids: torch.LongTensor,
        lengths: torch.LongTensor,
        anchors: torch.LongTensor,
        num_selector_anchors: int | None = None,
        soft_targets: SoftTargets | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """
        Args:
            states (`torch.FloatTensor` of shape `(B, T, L*H)`): The target's tapped hidden states.
            input_ids (`torch.LongTensor` of shape `(B, T)`), lengths (`torch.LongTensor` of shape `(B,)`)
            anchors (`torch.LongTensor` of shape `(B, A)`): See `sample_anchors`.
            num_selector_anchors (`int`, *optional*): Train the selector on that many blocks of each sequence only.
            soft_targets (`SoftTargets`, *optional*): The target's distributions, for the base losses that need them.

        Returns:
            `(loss, terms)`: a scalar, and a dictionary of its detached parts and of accuracies.
        """
        last = self.config.loop_depth - 1
        # Under a frozen backbone gradients pass through it for the sake of what the selector put into it alone.
        feeds_selector = self.model.config.use_repaired_feature and last > 0
        learns = torch.is_grad_enabled() and (feeds_selector or not self.config.freeze_backbone)
        with torch.set_grad_enabled(learns):
            features = self.model.drafter.fuse(states.to(self.model.drafter.dtype))
            unroll = self._unroll(features, input_ids, anchors, self.config.loop_tokens)
        batch = _Batch(features, input_ids, lengths, arrange_blocks(anchors, num_selector_anchors), soft_targets)
        losses, terms, earlier = [], {}, None
        for number in range(last + 1):
            is_scored = number in (0, last)
            # A stage in between serves the blocks of the selector only, which remembers it.
            blocks = batch.blocks if is_scored else batch.blocks.first(batch.blocks.num_selected)
            with torch.set_grad_enabled(learns):
                rows = unroll.draft()
                if is_scored or self.trains_selector:
                    stage = self._stage(batch, blocks, unroll.offset, rows[blocks.sequence, blocks.column])
                if number < last:
                    unroll.go_on(rows)
            own: dict[str, torch.Tensor] = {}
            loss = self._backbone_loss(batch, stage, own) if is_scored else 0.0
            if self.trains_selector:
                repair, earlier = self._selector_loss(batch, stage, earlier, unroll.stage_tokens, own)
                loss = loss + self.config.repair_weight * repair
            if is_scored:
                losses.append(loss)
                terms |= {f"{name}_stage{number + 1}" if number else name: value for name, value in own.items()}
        return torch.stack(losses).mean(), terms

    def block_rows(self, states, input_ids: torch.LongTensor, anchors: torch.LongTensor) -> torch.Tensor:
        """Backbone rows `(B, A, S, H)` of all blocks, as the loss sees them."""
        features = self.model.drafter.fuse(states.to(self.model.drafter.dtype))
        return self._unroll(features, input_ids, anchors).draft()

    def _unroll(self, *arguments):
        unroll = ChainUnroll if self.model.config.backbone == "eagle3" else StageUnroll
        return unroll(self.model, self.adapter, *arguments)

    def _stage(self, batch: _Batch, blocks: Blocks, offset: int, rows: torch.Tensor) -> _Stage:
        """Look up what the slots of `rows` `(N, S, H)` should say and what they do say."""
        drafter, K = self.model.drafter, self.model.config.num_drafts
        hidden = rows[:, -K:]
        labels = blocks.tokens(batch.input_ids, offset + 1, K)
        columns = self.columns[labels]
        picked = columns[..., None]
        if self.config.has_soft_base:
            teacher = self.columns[self._teacher(batch, blocks, offset).ids]
            picked = torch.cat([picked, teacher], dim=-1)
        num_top = self.model.config.pool_size + 1
        return _Stage(
            blocks=blocks,
            offset=offset,
            rows=rows,
            hidden=hidden,
            labels=labels,
            valid=blocks.inside(batch.lengths, offset + 1, K),
            columns=columns,
            logits=slot_logits(
                lambda rows: drafter.logits(rows, self.adapter),
                hidden,
                picked.clamp(min=0),
                num_top,
                self.config.chunk_rows,
            ),
        )

    def _teacher(self, batch: _Batch, blocks: Blocks, offset: int) -> SoftTargets:
        """The target's best tokens `(N, K, k)` at the positions that it wrote the slots' tokens from."""
        if batch.soft_targets is None:
            raise ValueError(
                f"`soft_targets` are needed by `base_loss` {self.config.base_loss!r}, `head_l1_share` "
                f"{self.config.head_l1_share} or a confidence; make the feature store with `num_soft_targets` above 0."
            )
        ids, log_probs = batch.soft_targets.ids, batch.soft_targets.log_probs
        places = blocks.anchor[:, None] + offset + torch.arange(self.model.config.num_drafts, device=ids.device)
        rows = blocks.sequence[:, None], places.clamp(max=ids.shape[1] - 1)
        return SoftTargets(ids[rows], log_probs[rows].float())

    def _backbone_loss(self, batch: _Batch, stage: _Stage, terms: dict) -> torch.Tensor:
        """`L_base` and `L_sup` of a stage."""
        first = stage.valid[:, 0]
        right = stage.logits.top_columns[:, 0, 0] == stage.columns[:, 0]
        terms["slot1_accuracy"] = (right & first).sum() / first.sum().clamp(min=1)
        if self.config.freeze_backbone:
            return stage.logits.normalizer.new_zeros(())
        scored = stage.valid & (stage.columns >= 0)
        cross_entropy = stage.logits.normalizer - stage.logits.picked[..., 0]
        weight = scored * self._slot_weight(cross_entropy.detach(), scored)
        losses = cross_entropy
        if self.config.has_soft_base:
            share = self.config.soft_weight
            losses = (1 - share) * losses + share * self._divergence(batch, stage)
        base = self._weighted_mean(losses, weight)
        support = self._weighted_mean(self._support(stage, scored, terms), weight)
        terms |= {"base": base.detach(), "support": support.detach()}
        return self.config.base_weight * (base + self.config.support_weight * support)

    def _slot_weight(self, cross_entropy: torch.Tensor, scored: torch.BoolTensor) -> torch.Tensor:
        """Weight of each slot, broadcast to `(N, K)`."""
        if self.config.slot_weight == "decay":
            return self._decay(cross_entropy)
        floor = self.config.dpace_floor
        chance = torch.where(scored, (1 - floor) * (-cross_entropy).exp() + floor, 0.0)
        reach = chance.cumprod(dim=1)
        return reach.flip(1).cumsum(dim=1).flip(1)

    def _decay(self, like: torch.Tensor) -> torch.Tensor:
        return torch.exp(-torch.arange(like.shape[1], device=like.device) / self.config.decay)

    def _divergence(self, batch: _Batch, stage: _Stage) -> torch.Tensor:
        """Divergence `(N, K)` of the drafter's distribution from the target's, over the target's best tokens."""
        teacher = self._teacher(batch, stage.blocks, stage.offset)
        columns = self.columns[teacher.ids]
        log_p = teacher.log_probs.masked_fill(columns < 0, float("-inf"))
        log_q = stage.logits.picked[..., 1:] - stage.logits.normalizer[..., None]
        p = log_p.exp()
        if self.config.base_loss == "l1":
            q = log_q.exp() * (columns >= 0)
            # What lies outside the listed tokens counts as one more token.
            return 0.5 * ((p - q).abs().sum(-1) + (p.sum(-1) - q.sum(-1)).abs())
        share = p / p.sum(-1, keepdim=True).clamp(min=1e-6)
        return (share * (share.clamp(min=1e-12).log() - log_q)).sum(-1)

    def _support(self, stage: _Stage, scored: torch.BoolTensor, terms: dict) -> torch.Tensor:
        """Hinge that lifts the target's token into the pool: compare it with the `C`-th best of the other tokens."""
        C, top = self.model.config.pool_size, stage.logits.top
        inside = (stage.logits.top_columns[..., :C] == stage.columns[..., None]).any(-1)
        # With the own token among the best C, the C-th best of the others is the (C + 1)-th best of all.
        rival = torch.where(inside, top[..., -1], top[..., C - 1])
        terms["coverage"] = (inside & scored).sum() / scored.sum().clamp(min=1)
        return F.relu(rival - stage.logits.picked[..., 0] + self.config.support_margin)

    def _selector_loss(self, batch: _Batch, stage: _Stage, earlier, stage_tokens: int, terms: dict):
        """
        The head's loss of a stage, and what the head remembers of it: negative log-likelihood of the target's token
        among the pool, where the pool holds it, and the distance from the target's distribution.
        """
        selector, M = self.model.selector, batch.blocks.num_selected
        blocks, labels, valid = stage.blocks.first(M), stage.labels[:M], stage.valid[:M]
        path = blocks.tokens(batch.input_ids, stage.offset, self.model.config.num_drafts)
        inputs = self._head_inputs(batch, stage, blocks, path[:, 0], earlier)
        state = selector.read(inputs)
        scores = selector.score(state, path)
        log_probs = scores.log_softmax(dim=-1)
        hits = inputs.pool.ids == labels[..., None]
        covered = hits.any(-1) & valid
        own = log_probs.gather(2, hits.long().argmax(-1, keepdim=True))[..., 0]
        weight = (1 - self.config.contribution) * self._decay(own).expand_as(own)
        if self.config.contribution:
            accepted = torch.where(covered, own.detach().exp(), torch.zeros_like(own))
            share = contribution_weights(accepted).clamp(min=self.config.contribution_floor)
            weight = weight + self.config.contribution * share
        if self.corrects_whole_vocabulary:
            losses, scored = self._whole_cross_entropy(stage, scores, inputs.pool, hits)
            loss = self._weighted_mean(losses, scored * valid * weight)
        else:
            loss = self._weighted_mean(-own, covered * weight)
        terms["repair"] = loss.detach()
        l1_share, kl_share = self.config.head_l1_share, self.config.head_kl_share
        loss = (1 - l1_share - kl_share) * loss
        if l1_share or kl_share or self.trains_confidence:
            p = mass_in_pool(inputs.pool.ids, self._teacher(batch, blocks, stage.offset))
        if l1_share or self.trains_confidence:
            distance = restricted_l1(log_probs, p)
            l1 = self._weighted_mean(distance, valid * weight)
            loss = loss + l1_share * l1
            terms["head_l1"] = l1.detach()
        if kl_share:
            kl = self._weighted_mean(restricted_kl(log_probs, p), valid * weight)
            loss = loss + kl_share * kl
            terms["head_kl"] = kl.detach()
        if self.trains_confidence:
            # The chance that rejection sampling accepts; it is a label, so it carries no gradient.
            accepted = (1 - distance / 2).detach()
            losses = F.binary_cross_entropy_with_logits(selector.confidence(state, path), accepted, reduction="none")
            confidence = self._weighted_mean(losses, valid * weight)
            loss = loss + self.config.confidence_weight * confidence
            terms["confidence"] = confidence.detach()
        right = (log_probs.argmax(-1) == hits.long().argmax(-1)) & covered
        drafted = (inputs.pool.ids[..., 0] == labels) & valid
        terms["expected_accepted"] = right.long().cumprod(dim=1).sum(1).float().mean()
        terms["expected_accepted_kept"] = drafted.long().cumprod(dim=1).sum(1).float().mean()
        return loss, selector.remember(state, path[:, :stage_tokens])

    @staticmethod
    def _whole_cross_entropy(stage: _Stage, scores, pool: Pool, hits) -> tuple[torch.Tensor, torch.BoolTensor]:
        """
        Cross-entropy `(M, K)` over the vocabulary of a distribution that the head corrects in the pool only, and which
        labels are in the vocabulary at all.
        """
        M = len(scores)
        base = stage.logits.picked[:M, :, 0] - stage.logits.normalizer[:M]
        outside = torch.log1p(-pool.log_probs.exp().sum(dim=-1).clamp(max=1 - 1e-6))
        normalizer = torch.logaddexp(scores.logsumexp(dim=-1), outside)
        own = torch.where(hits, scores, float("-inf")).amax(dim=-1)
        return normalizer - torch.where(hits.any(-1), own, base), stage.columns[:M] >= 0

    def _head_inputs(self, batch: _Batch, stage: _Stage, blocks: Blocks, anchor_ids, earlier) -> HeadInputs:
        config, M = self.model.config, len(blocks.anchor)
        C, shortlist = config.pool_size, self.model.drafter.draft_token_ids
        columns, top = stage.logits.top_columns[:M, :, :C], stage.logits.top[:M, :, :C]
        window = torch.arange(-config.history_window, 0, device=anchor_ids.device)
        places = blocks.anchor[:, None] + window  # ends just before the round's anchor, as at inference
        length = batch.input_ids.shape[1]
        text_places = blocks.anchor[:, None] + stage.offset + torch.arange(-length, 0, device=anchor_ids.device)
        text_ids = batch.input_ids[blocks.sequence[:, None], text_places.clamp(0, length - 1)]
        return HeadInputs(
            hidden_states=stage.hidden[:M],
            anchor_hidden=stage.rows[:M, 0] if config.layout == "fill_in" else None,
            pool=Pool(
                ids=columns if shortlist is None else shortlist[columns],
                logits=top,
                log_probs=top - stage.logits.normalizer[:M, :, None],
            ),
            anchor_ids=anchor_ids,
            history=batch.features[blocks.sequence[:, None], places.clamp(min=0)],
            history_mask=places >= 0,
            offset=stage.offset,
            earlier=earlier,
            embed=self.adapter.embed,
            text_ids=text_ids.masked_fill(text_places < 0, -1),
        )

    def _weighted_mean(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (values * weights).sum() / self.share(weights.sum()).clamp(min=1e-6)


def mass_in_pool(pool_ids: torch.LongTensor, teacher: SoftTargets) -> torch.FloatTensor:
    """
    The target's probability `(N, K, C)` of every candidate in `pool_ids` `(N, K, C)`. The `teacher`'s best tokens
    `(N, K, k)` are known; what is not among them counts as zero.
    """
    same = pool_ids[..., :, None] == teacher.ids[..., None, :]
    return (same * teacher.log_probs.exp()[..., None, :]).sum(dim=-1)


def restricted_l1(log_probs: torch.FloatTensor, p: torch.FloatTensor) -> torch.FloatTensor:
    """
    `sum |q - p|` `(N, K)` over the whole vocabulary, for a q of `log_probs` `(N, K, C)` that is zero outside the pool;
    of `p` `(N, K, C)`, see `mass_in_pool`, all of the mass outside the pool counts.
    """
    return (log_probs.exp() - p).abs().sum(dim=-1) + (1 - p.sum(dim=-1)).clamp(min=0)


def restricted_kl(log_probs: torch.FloatTensor, p: torch.FloatTensor) -> torch.FloatTensor:
    """`sum p log(p / q)` `(N, K)` over the pool; a slot counts as much as the pool holds of the target's mass."""
    return torch.special.xlogy(p, p).sum(dim=-1) - (p * log_probs).sum(dim=-1)


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


__all__ = [
    "JointObjective",
    "ObjectiveConfig",
    "contribution_weights",
    "mass_in_pool",
    "restricted_kl",
    "restricted_l1",
]

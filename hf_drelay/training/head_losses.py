"""The losses that the papers of the other drafters state, on teacher-forced scores.

Domino anchors the corrected loss in the backbone's own; DSpark adds the total variation between drafter and target and
a confidence that estimates acceptance; EAGLE-3 unrolls its chain. A head's scores cover the pool of each slot, so its
q is zero elsewhere, and the losses are exact for that restricted q.

Shapes: `N` blocks, `K` slots, `C` candidates; `B` sequences of `T` tokens for EAGLE-3.
"""

import torch
import torch.nn.functional as F


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean of `values` under `weights` of the same shape; zero without any weight."""
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)


def contiguous(valid: torch.BoolTensor) -> torch.BoolTensor:
    """Slots `(N, K)` before the first invalid one (DeepSpec drops everything after it)."""
    return valid.long().cumprod(dim=1).bool()


def slot_decay(num_slots: int, decay: float, device=None) -> torch.FloatTensor:
    """Slot weights `exp(-j / decay)` `(K,)`, `j` from 0."""
    return torch.exp(-torch.arange(num_slots, device=device) / decay)


def pool_cross_entropy(scores: torch.FloatTensor, pool_ids: torch.LongTensor, labels: torch.LongTensor):
    """
    Cross-entropy of the corrected pool.

    Returns:
        `(losses, covered)`, both `(N, K)`: the loss of each slot, and whether the pool holds its label; the loss is
        zero where it does not.
    """
    hits = pool_ids == labels[..., None]
    covered = hits.any(dim=-1)
    own = scores.log_softmax(dim=-1).gather(2, hits.long().argmax(dim=-1, keepdim=True))[..., 0]
    return torch.where(covered, -own, torch.zeros_like(own)), covered


def base_anchor_weight(progress: float, start: float = 1.0, decay_ratio: float = 1.0) -> float:
    """
    Weight of the backbone's own loss in Domino's curriculum (arXiv 2605.29707): falls linearly from `start` to 0 over
    the first `decay_ratio` of the training.

    Args:
        progress (`float`): Share of the training that is over, 0 to 1.
    """
    if not 0 <= progress <= 1 or not 0 <= start <= 1 or not 0 < decay_ratio <= 1:
        raise ValueError(
            f"`progress` {progress}, `start` {start} and `decay_ratio` {decay_ratio} must be shares between 0 and 1, "
            "the last one above 0."
        )
    return start * max(0.0, 1 - progress / decay_ratio)


def domino_loss(scores, pool_ids, base_losses, labels, weights, base_weight: float) -> tuple[torch.Tensor, dict]:
    """
    Base-anchored loss `(1 - w) CE(corrected) + w CE(base)` of Domino (arXiv 2605.29707).

    Args:
        scores (`torch.FloatTensor` of shape `(N, K, C)`): Teacher-forced scores of the recurrent head.
        pool_ids (`torch.LongTensor` of shape `(N, K, C)`): Candidates.
        base_losses (`torch.FloatTensor` of shape `(N, K)`): Cross-entropy of the backbone's own logits.
        labels (`torch.LongTensor` of shape `(N, K)`): The target's tokens.
        weights (`torch.FloatTensor` of shape `(N, K)`): Slot weights, zero for slots that do not count.
        base_weight (`float`): `w`, see `base_anchor_weight`.

    Returns:
        `(loss, terms)`: a scalar and its detached parts.
    """
    losses, covered = pool_cross_entropy(scores, pool_ids, labels)
    corrected = weighted_mean(losses, weights * covered)
    base = weighted_mean(base_losses, weights)
    terms = {"corrected": corrected.detach(), "base": base.detach()}
    return (1 - base_weight) * corrected + base_weight * base, terms


def restricted_l1(scores: torch.FloatTensor, target_log_probs: torch.FloatTensor) -> torch.FloatTensor:
    """
    `sum |q - p|` `(N, K)` over the whole vocabulary, for the q of `scores` `(N, K, C)` that is zero outside the pool;
    `target_log_probs` `(N, K, C)` are the target's log-probabilities (over its vocabulary) of the candidates.
    """
    p = target_log_probs.exp()
    return (scores.softmax(dim=-1) - p).abs().sum(dim=-1) + (1 - p.sum(dim=-1)).clamp(min=0)


def dspark_loss(
    scores,
    pool_ids,
    target_log_probs,
    labels,
    weights,
    confidence_logits=None,
    ce_weight: float = 0.1,
    l1_weight: float = 0.9,
    confidence_weight: float = 1.0,
) -> tuple[torch.Tensor, dict]:
    """
    Loss of DSpark (arXiv 2607.05147): `ce_weight CE + l1_weight D + confidence_weight BCE(c, 1 - D / 2)` with the
    distance `D = |q - p|_1`. The label of the confidence is the chance that rejection sampling accepts; it carries
    no gradient.

    Args:
        scores (`torch.FloatTensor` of shape `(N, K, C)`): Teacher-forced scores of the markov head.
        pool_ids (`torch.LongTensor` of shape `(N, K, C)`): Candidates.
        target_log_probs (`torch.FloatTensor` of shape `(N, K, C)`): The target's log-probabilities of them.
        labels (`torch.LongTensor` of shape `(N, K)`), weights (`torch.FloatTensor` of shape `(N, K)`): As in
            `domino_loss`.
        confidence_logits (`torch.FloatTensor` of shape `(N, K)`, *optional*): Of the confidence head.
    """
    losses, covered = pool_cross_entropy(scores, pool_ids, labels)
    distance = restricted_l1(scores, target_log_probs)
    ce, l1 = weighted_mean(losses, weights * covered), weighted_mean(distance, weights)
    loss, terms = ce_weight * ce + l1_weight * l1, {"ce": ce.detach(), "l1": l1.detach()}
    if confidence_logits is not None:
        accepted = (1 - distance / 2).detach()
        bce = F.binary_cross_entropy_with_logits(confidence_logits, accepted, reduction="none")
        confidence = weighted_mean(bce, weights)
        loss, terms["confidence"] = loss + confidence_weight * confidence, confidence.detach()
    return loss, terms


def unroll_chain(drafter, states, input_ids, adapter, num_steps: int = 7) -> list[torch.Tensor]:
    """
    EAGLE-3's chain at every position at once (arXiv 2503.01840, training-time test).

    Step 0 pairs the target's feature of position `i` with the token at `i + 1`; step `k` pairs the drafter's own
    state of step `k - 1` with the token at `i + 1 + k`. Row `i` of step `k` sees the rows up to `i` of step 0 and only
    itself of the later steps: what a chain that starts at `i` sees at inference.

    Args:
        drafter (`Eagle3Drafter`): The drafter.
        states (`torch.FloatTensor` of shape `(B, T, L*H)`): The target's tapped hidden states.
        input_ids (`torch.LongTensor` of shape `(B, T)`): The tokens.
        adapter (`TargetAdapter`): Embeds the tokens.
        num_steps (`int`): Length of the chain.

    Returns:
        States `(B, T, H)` of every step. Row `i` of step `k` predicts the token at `i + 2 + k`; the last rows have no
        label.
    """
    T, device = input_ids.shape[1], input_ids.device
    causal = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    own = torch.eye(T, dtype=torch.bool, device=device)
    positions = torch.arange(T, device=device)[None].expand_as(input_ids)
    features, seen, outputs = drafter.fuse(states.to(drafter.dtype)), [], []
    for step in range(num_steps):
        tokens = F.pad(input_ids[:, 1 + step :], (0, min(T, 1 + step)))
        mask = torch.cat([causal, *[own] * step], dim=1)
        bias = torch.zeros(mask.shape, dtype=drafter.dtype, device=device)
        bias = bias.masked_fill(~mask, torch.finfo(drafter.dtype).min).expand(len(tokens), 1, -1, -1)

        def update(keys, values):
            seen.append((keys, values))
            return tuple(torch.cat(parts, dim=2) for parts in zip(*seen, strict=True))

        features = drafter.run_layer(features, tokens, positions + step, bias, update, adapter)
        outputs.append(features)
    return outputs


def eagle3_loss(
    drafter, states, target_logits, input_ids, valid, adapter, num_steps: int = 7, decay: float = 0.8
) -> tuple[torch.Tensor, dict]:
    """
    Soft cross-entropy of the unrolled chain to the target's distribution over the draft vocabulary, with step weights
    `decay ** k`. Places where the target's best token cannot be drafted do not count.

    Args:
        target_logits (`torch.FloatTensor` of shape `(B, T, V)`): The target's logits; position `j` predicts `j + 1`.
        valid (`torch.BoolTensor` of shape `(B, T)`): Tokens that count as labels (of the response).
        drafter, states, input_ids, adapter, num_steps: See `unroll_chain`.
    """
    ids = drafter.draft_token_ids
    loss, terms = states.new_zeros((), dtype=torch.float32), {}
    best = target_logits.argmax(dim=-1)
    drawable = torch.ones_like(best, dtype=torch.bool) if ids is None else torch.isin(best, ids)
    wanted = (target_logits if ids is None else target_logits[..., ids]).float().softmax(dim=-1)
    for step, hidden in enumerate(unroll_chain(drafter, states, input_ids, adapter, num_steps)):
        num_rows = input_ids.shape[1] - 2 - step
        if num_rows <= 0:
            break
        log_probs = drafter.logits(hidden[:, :num_rows], adapter).log_softmax(dim=-1)
        place = slice(1 + step, 1 + step + num_rows)  # where the target predicts the same token
        counts = (valid[:, 2 + step :] & drawable[:, place]).float()
        step_loss = weighted_mean(-(wanted[:, place] * log_probs).sum(dim=-1), counts)
        loss = loss + decay**step * step_loss
        terms[f"step_{step}"] = step_loss.detach()
    return loss, terms


__all__ = [
    "base_anchor_weight",
    "contiguous",
    "domino_loss",
    "dspark_loss",
    "eagle3_loss",
    "pool_cross_entropy",
    "restricted_l1",
    "slot_decay",
    "unroll_chain",
    "weighted_mean",
]

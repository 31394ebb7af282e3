"""Whether two greedy outputs are equal, and if not, whether rounding alone can explain it."""

import inspect
from dataclasses import dataclass

import torch


# Rounding of a logit in units of the type's precision at its magnitude: the sum of many layers' errors.
ROUNDING_UNITS = 4


@dataclass
class Divergence:
    """
    First difference of two outputs.

    Attributes:
        position (`int`): Index among the new tokens.
        plain_id, other_id (`int`, *optional*): The two tokens; `None` where an output had ended.
        logit_gap (`float`): How far the less likely of the two tokens is below the target's best logit there; for an
            output that ended, the distance of the two best logits. Two ways to compute the same logits can pick
            different tokens only when it is about as small as the rounding error.
        rounding (`float`): That error: `ROUNDING_UNITS` times the precision of the target's type times the best
            logit. About 1e-5 in float32 and 0.6 in bfloat16 for a logit of 20.
    """

    position: int
    plain_id: int | None
    other_id: int | None
    logit_gap: float
    rounding: float

    @property
    def is_explained(self) -> bool:
        """Whether rounding alone explains the difference; it never makes an output end without an end token."""
        return None not in (self.plain_id, self.other_id) and self.logit_gap <= self.rounding


@torch.no_grad()
def first_divergence(target, prompt_ids, plain_ids: list[int], other_ids: list[int]) -> Divergence | None:
    """
    Compare new tokens of plain decoding with those of another way; `None` if they are equal.

    Args:
        target (`PreTrainedModel`): Computes the logits at the difference, in one forward.
        prompt_ids (`torch.LongTensor` of shape `(1, P)`): The prompt of both.
    """
    if plain_ids == other_ids:
        return None
    shorter = min(len(plain_ids), len(other_ids))
    position = next((i for i in range(shorter) if plain_ids[i] != other_ids[i]), shorter)
    prefix = torch.tensor([plain_ids[:position]], dtype=torch.long, device=prompt_ids.device)
    arguments = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(target.forward).parameters:
        arguments["logits_to_keep"] = 1  # logits of every position of a long prompt would fill the memory
    logits = target(torch.cat([prompt_ids, prefix], dim=1), **arguments).logits[0, -1]
    logits = logits.float()
    best = logits.topk(2).values
    rounding = ROUNDING_UNITS * torch.finfo(target.dtype).eps * float(best[0].abs())
    chosen = [ids[position] for ids in (plain_ids, other_ids) if position < len(ids)]
    lowest = logits[chosen].min() if len(chosen) == 2 else best[1]
    return Divergence(
        position,
        plain_ids[position] if position < len(plain_ids) else None,
        other_ids[position] if position < len(other_ids) else None,
        float(best[0] - lowest),
        rounding,
    )

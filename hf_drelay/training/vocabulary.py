"""What the losses need of the vocabulary logits of every slot, without ever holding all logits at once.

Logits of a whole batch, `N * K * Vd` numbers in fp32, are the largest tensor of training by far. Every loss is a
function of a few of them, so the head runs on some blocks at a time and runs again in the backward pass. Peak memory
of logits is then `chunk_rows * Vd` fp32 numbers, a few times over, whatever the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint


@dataclass
class SlotLogits:
    """
    Logits of `K` slots of `N` blocks, fp32.

    Attributes:
        normalizer (`torch.FloatTensor` of shape `(N, K)`): Log-sum-exp over the (draft) vocabulary.
        picked (`torch.FloatTensor` of shape `(N, K, G)`): Logits of the columns that were asked for.
        top (`torch.FloatTensor` of shape `(N, K, C + 1)`): The largest logits, best first.
        top_columns (`torch.LongTensor` of shape `(N, K, C + 1)`): Their columns.
    """

    normalizer: torch.FloatTensor
    picked: torch.FloatTensor
    top: torch.FloatTensor
    top_columns: torch.LongTensor


def slot_logits(
    head: Callable[[torch.Tensor], torch.FloatTensor],
    hidden_states: torch.Tensor,
    columns: torch.LongTensor,
    num_top: int,
    chunk_rows: int = 1024,
) -> SlotLogits:
    """
    Args:
        head (`Callable`): Logits `(n, K, Vd)`, fp32, of hidden states `(n, K, H)`.
        hidden_states (`torch.FloatTensor` of shape `(N, K, H)`): Backbone row of each slot.
        columns (`torch.LongTensor` of shape `(N, K, G)`): Columns to pick.
        num_top (`int`): How many of the largest logits to keep, at most the (draft) vocabulary.
        chunk_rows (`int`): Slots whose logits exist at the same time.
    """

    def compute(hidden, columns):
        logits = head(hidden)
        top = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
        return logits.logsumexp(dim=-1), logits.gather(2, columns), top.values, top.indices

    size = max(1, chunk_rows // hidden_states.shape[1])
    if len(hidden_states) <= size:
        return SlotLogits(*compute(hidden_states, columns))
    parts = [
        checkpoint(compute, hidden, picked, use_reentrant=False)
        for hidden, picked in zip(hidden_states.split(size), columns.split(size), strict=True)
    ]
    return SlotLogits(*(torch.cat(column) for column in zip(*parts, strict=True)))

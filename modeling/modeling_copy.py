"""The copy path of the relay head: how often a candidate followed the same last tokens earlier in the text.

Texts repeat themselves, and a drafter that fills all slots of a block at once cannot know which repetition it is in
before the tokens of the slots are chosen. Once they are, a look at the text tells; it is exact and costs a comparison
of integers. Prompt lookup (Saxena, 2023) drafts from such matches alone; here they are evidence beside the drafter's
own distribution, and the drafter's state decides how much they count.

Shapes: `B` blocks, `R` slots, `C` candidates, `T` tokens of text, `H` width of the drafter, `N` lengths of a match.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_drelay import DRelayConfig
from .modeling_base import ZeroLinear


class CopyPath(nn.Module):
    """Score `sum_n w_n(h) log(1 + count_n)` of every candidate, for the [`copy_counts`] of a slot with state `h`."""

    def __init__(self, config: DRelayConfig):
        super().__init__()
        self.order = config.copy_order
        self.window = config.copy_window
        self.weight_proj = ZeroLinear(config.hidden_size, config.copy_order)

    def forward(self, hidden_states, text_ids, path_ids, candidate_ids):
        """Score `(B, R, C)` from `hidden_states` `(B, R, H)` and the arguments of [`copy_counts`]."""
        # Counts are exact, and so are the scores: mixed precision would round them in training and not in drafting.
        with torch.autocast(hidden_states.device.type, enabled=False):
            counts = copy_counts(text_ids[:, -self.window :], path_ids, candidate_ids, self.order)
        weights = self.weight_proj(hidden_states).float()
        return (counts.log1p() * weights[:, :, None]).sum(dim=-1)


def copy_counts(
    text_ids: torch.LongTensor, path_ids: torch.LongTensor, candidate_ids: torch.LongTensor, order: int
) -> torch.FloatTensor:
    """
    At how many earlier places each candidate followed the same last `n` tokens as it would now.

    Args:
        text_ids (`torch.LongTensor` of shape `(B, T)`): Tokens before the anchor; -1 where there is none.
        path_ids (`torch.LongTensor` of shape `(B, P)`): Anchor and the tokens of the slots before the last one.
        candidate_ids (`torch.LongTensor` of shape `(B, R, C)`): Of the last `R <= P` slots; slot `r` follows
            token `P - R + r` of the path.
        order (`int`): Longest match `N`.

    Returns:
        `(B, R, C, N)` for `n = 1 .. N`. A candidate of slot `r` never sees the path behind its slot.
    """
    text = torch.cat([text_ids, path_ids], dim=1)
    num_slots, length = candidate_ids.shape[1], text.shape[1]
    places = torch.arange(length, device=text.device)
    # A match ends at a place before the slot's last token, so that the token behind the match is known.
    matches = (places < places[-num_slots:, None])[None]
    kinds = []
    for back in range(order):
        earlier = F.pad(text, (back, 0), value=-1)[:, :length]
        same = earlier[:, None] == earlier[:, -num_slots:, None]
        matches = matches & same & (earlier >= 0)[:, None]
        kinds.append(matches)  # (B, R, T + P)
    behind = F.pad(text[:, 1:], (0, 1), value=-1)
    follows = (behind[:, None, None] == candidate_ids[..., None]).float()
    return follows @ torch.stack(kinds, dim=-1).float()


__all__ = ["CopyPath", "copy_counts"]

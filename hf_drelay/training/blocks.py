"""Which blocks of a sequence are trained on, what they should say, and what each of their rows may see.

Shapes: `B` sequences of `T` tokens, `A` anchors in each, `S` rows and `K` slots of a block, `N <= B * A` real blocks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class Blocks:
    """
    Blocks of a batch; the first `num_selected` are the ones that the selector is trained on.

    Attributes:
        sequence, column (`torch.LongTensor` of shape `(N,)`): Place of each block among the anchors `(B, A)`.
        anchor (`torch.LongTensor` of shape `(N,)`): Position of the token it starts from.
        num_selected (`int`): See above.
    """

    sequence: torch.LongTensor
    column: torch.LongTensor
    anchor: torch.LongTensor
    num_selected: int

    def first(self, num_blocks: int) -> "Blocks":
        """Only the first blocks."""
        kept = (tensor[:num_blocks] for tensor in (self.sequence, self.column, self.anchor))
        return Blocks(*kept, min(num_blocks, self.num_selected))

    def tokens(self, input_ids: torch.LongTensor, offset: int, length: int) -> torch.LongTensor:
        """The `length` tokens `(N, length)` from `offset` positions behind each anchor on; garbage behind the end."""
        places = self.anchor[:, None] + offset + torch.arange(length, device=input_ids.device)
        return input_ids[self.sequence[:, None], places.clamp(max=input_ids.shape[1] - 1)]

    def inside(self, lengths: torch.LongTensor, offset: int, length: int) -> torch.BoolTensor:
        """Which of these tokens lie inside the sequences of `lengths` `(B,)`."""
        places = self.anchor[:, None] + offset + torch.arange(length, device=lengths.device)
        return places < lengths[self.sequence][:, None]


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


def arrange_blocks(anchors: torch.LongTensor, num_selector_anchors: int | None = None) -> Blocks:
    """
    The real blocks among `anchors` `(B, A)` (-1 is padding). At most `num_selector_anchors` of each sequence, spread
    evenly over its blocks, come first.
    """
    sequence, column = (anchors >= 0).nonzero(as_tuple=True)
    counts = (anchors >= 0).sum(dim=1)[sequence]
    share = counts if num_selector_anchors is None else counts.clamp(max=num_selector_anchors)
    # Counting up to `share` in steps of share / count, a block is taken wherever the count passes a whole number.
    is_taken = (column + 1) * share // counts > column * share // counts
    order = torch.cat([is_taken.nonzero()[:, 0], (~is_taken).nonzero()[:, 0]])
    sequence, column = sequence[order], column[order]
    return Blocks(sequence, column, anchors[sequence, column], int(is_taken.sum()))


def training_masks(
    config, anchors: torch.LongTensor, context_length: int, stage: int = 0, stage_tokens: int = 0
) -> list[torch.BoolTensor]:
    """
    Visible keys `(B, 1, A*S, T + stage * A * stage_tokens + A*S)` of every layer. A row sees the context before the
    anchor of its block, what earlier stages of the same block left behind, and rows of its own block; nothing of other
    blocks. Rows of padding anchors see their own block only, which keeps the softmax finite.

    Args:
        stage (`int`): Stages that each block has drafted before this one.
        stage_tokens (`int`): Tokens that each of them drafted.
    """
    A, device = anchors.shape[1], anchors.device
    S, offset = config.block_size, stage * stage_tokens

    def tiled(size: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block number and distance from the first anchor of `A` pieces of `size` positions."""
        numbers = torch.arange(A, device=device).repeat_interleave(size)
        return numbers, torch.arange(start, start + size, device=device).repeat(A)

    row_block, row_place = tiled(S, offset)
    pieces = [tiled(stage_tokens, s * stage_tokens) for s in range(stage)] + [(row_block, row_place)]
    key_block, key_place = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    row_anchor = anchors[:, row_block][:, :, None]  # (B, A*S, 1)
    context = torch.arange(context_length, device=device)
    distance = row_place[:, None] - key_place[None, :]
    same_block = row_block[:, None] == key_block[None, :]
    masks = {}
    for kind, causal in set(zip(config.layer_types, config.block_causal, strict=True)):
        context_mask, block_mask = context < row_anchor, same_block
        if causal:
            block_mask = block_mask & (distance >= 0)
        if kind == "sliding_attention":
            row_position = row_anchor + row_place[:, None]
            context_mask = context_mask & (row_position - context < config.sliding_window)
            block_mask = block_mask & (distance.abs() < config.sliding_window)
        masks[kind, causal] = torch.cat([context_mask, block_mask.expand(len(anchors), -1, -1)], dim=2)[:, None]
    return [masks[pair] for pair in zip(config.layer_types, config.block_causal, strict=True)]

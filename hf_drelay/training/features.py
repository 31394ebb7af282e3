"""Hidden states of the tapped target layers for training sequences, computed when first needed and kept in memory."""

import torch
from torch import nn

from hf_drelay.modeling.target_adapter import TargetAdapter


class FeatureStore:
    """
    Tapped hidden states of training sequences.

    The first epoch computes them with the target (online); as long as they fit, later epochs find them here.

    Args:
        adapter (`TargetAdapter`): View of the frozen target.
        layer_ids (`list[int]`): Tapped layers.
        max_bytes (`int`): Memory to use; sequences beyond it are computed anew each time.
    """

    def __init__(self, adapter: TargetAdapter, layer_ids: list[int], max_bytes: int = 8 << 30):
        self.adapter = adapter
        self.layer_ids = layer_ids
        self.free_bytes = max_bytes
        self._kept: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def get(self, keys: list[int], input_ids: torch.LongTensor, lengths: list[int]) -> torch.Tensor:
        """
        Hidden states `(B, T, L*H)` of right-padded `input_ids` `(B, T)`, zero behind each of `lengths`.

        Args:
            keys (`list[int]`): A number that identifies each sequence.
        """
        rows = [self._kept.get(key) for key in keys]
        if any(row is None for row in rows):
            rows = self._compute(keys, input_ids, lengths)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def _compute(self, keys, input_ids, lengths) -> list[torch.Tensor]:
        body = self.adapter.target.get_decoder()  # without the head: its logits are not needed
        # No mask: padding stands on the right, where a causal model never looks.
        outputs = body(input_ids=input_ids, output_hidden_states=True, use_cache=False)
        states = self.adapter.tapped(outputs.hidden_states, self.layer_ids)
        rows = []
        for key, row, length in zip(keys, states, lengths, strict=True):
            row = row[:length].clone()
            size = row.numel() * row.element_size()
            if key not in self._kept and size <= self.free_bytes:
                self._kept[key] = row
                self.free_bytes -= size
            rows.append(row)
        return rows

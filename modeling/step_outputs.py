"""What `generate()` returns besides the text, collected token by token in the shapes of plain decoding."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers import cache_utils
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .compat import cache_keyword


class StepOutputs:
    """
    Outputs of one call.

    Args:
        config (`GenerationConfig`): Says what is asked for.

    Attributes:
        scores (`tuple[torch.FloatTensor]`, *optional*): Processed scores `(B, V)` of the tokens so far; stopping
            criteria may read them.
    """

    def __init__(self, config):
        self.is_collecting = bool(config.return_dict_in_generate)

        def start(is_asked) -> tuple | None:
            return () if self.is_collecting and is_asked else None

        self.scores = start(config.output_scores)
        self.logits = start(config.output_logits)
        self.attentions = start(config.output_attentions)
        self.hidden_states = start(config.output_hidden_states)

    @property
    def keeps_logits(self) -> bool:
        return self.scores is not None or self.logits is not None

    def add(self, scores_and_logits, step_outputs) -> None:
        """One token was chosen; `step_outputs()` are the target's outputs at its place."""
        if self.scores is not None:
            self.scores += (scores_and_logits[0],)
        if self.logits is not None:
            self.logits += (scores_and_logits[1],)
        if self.attentions is not None or self.hidden_states is not None:
            step = step_outputs()
            if self.attentions is not None:
                self.attentions += (step.attentions,)
            if self.hidden_states is not None:
                self.hidden_states += (step.hidden_states,)

    @staticmethod
    def whole(outputs):
        """Outputs of the prefill, which belong to the first token as they are."""
        return lambda places: SimpleNamespace(attentions=outputs.attentions, hidden_states=outputs.hidden_states)

    def sliced(self, outputs, cache, rows: list[int], num_slots: int, num_pending: int, trees):
        """
        Outputs of single places of a verification.

        Args:
            cache (`Cache`): The target's cache.
            rows (`list[int]`): Rows of the forward to take.
            num_slots (`int`): Slots of the cache in use before the forward.
            num_pending (`int`): Tokens of the forward before the anchor.
            trees (`list[DraftTree]`): What was verified for each row.
        """

        # Layers with a recurrent state have no attention to return.
        attending = [layer for layer in cache.layers if hasattr(layer, "is_sliding")]

        def step(places: list[int]):
            attentions = hidden_states = None
            if self.hidden_states is not None:
                index = torch.tensor(places) + num_pending
                hidden_states = tuple(
                    states[rows, index.to(states.device)][:, None] for states in outputs.hidden_states
                )
            if self.attentions is not None:
                # Fused attention returns no weights: nothing for any layer.
                attentions = tuple(
                    torch.cat(
                        [
                            _attention(layer[row], tree.path(place), num_slots, num_pending, cache_layer)
                            for row, tree, place in zip(rows, trees, places, strict=True)
                        ]
                    )
                    for layer, cache_layer in zip(outputs.attentions or (), attending, strict=False)
                )
            return SimpleNamespace(attentions=attentions, hidden_states=hidden_states)

        return step

    def result(self, sequences: torch.LongTensor, cache) -> GenerateDecoderOnlyOutput:
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            **{cache_keyword(): cache},
        )


def _attention(layer: torch.Tensor, path: list[int], num_slots: int, num_pending: int, cache_layer) -> torch.Tensor:
    """
    Attention `(1, heads, 1, T)` of the last place of `path`, from `layer` `(heads, N, T')` of a whole forward, over
    what plain decoding would have seen there: everything before the anchor, the place's ancestors, itself.
    """
    row = layer[None, :, num_pending + path[-1], None]
    # A window shows fewer columns before the anchor than there are slots in use, a static cache more behind it.
    num_before = min(num_slots + num_pending, layer.shape[-1] - (layer.shape[1] - num_pending))
    columns = [*range(num_before), *(num_before + place for place in path)]
    is_static = isinstance(cache_layer, cache_utils.StaticLayer)
    if cache_layer.is_sliding:
        columns = columns[-(cache_layer.max_cache_len if is_static else cache_layer.sliding_window) :]
    seen = row[..., torch.tensor(columns, device=layer.device)]
    return F.pad(seen, (0, cache_layer.max_cache_len - len(columns))) if is_static else seen

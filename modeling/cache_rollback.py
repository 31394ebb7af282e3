"""The target's cache between rounds: only committed tokens may stay in it.

Three ways, by what the layers can do. *Crop*: the tail of rejected tokens is cut. *Move*: the slots of an accepted
path (a branch of a tree, or rows that accepted different numbers of tokens) are first moved to their final places.
*Replay*: layers that cannot take a token back (recurrent states, a full static window) are restored to what they were
before the round, and the accepted tokens are fed again at the head of the next verification.
"""

from typing import Any

import torch
from transformers import cache_utils


# Layers whose slots are one column for each token and can be moved. Exact types: a subclass may keep more than that.
_MOVABLE = tuple(
    getattr(cache_utils, name)
    for name in ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer")
    if hasattr(cache_utils, name)
)
_GROWING = (cache_utils.DynamicLayer,)
_IDLE = tuple(getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name))


class CacheRollback:
    """
    Rollback of one cache for the time of one call.

    Args:
        cache (`Cache`): Cache of the target, after the prefill.

    Attributes:
        num_pending (`int`): Committed tokens that the cache does not hold, because they wait for a replay.
    """

    def __init__(self, cache):
        self.cache = cache
        self.layers = [layer for layer in cache.layers if type(layer) not in _IDLE]
        self._fixed = [layer for layer in self.layers if not layer.is_croppable]
        self._recording = {id(layer): layer.record_past for layer in self.layers if hasattr(layer, "record_past")}
        for layer in self.layers:
            # Only now: during the prefill it would keep what a window drops.
            if layer not in self._fixed and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        self._snapshots: list[dict[str, Any]] = []
        self.num_pending = 0

    @property
    def needs_replay(self) -> bool:
        """Whether some layer cannot take tokens back."""
        return bool(self._fixed)

    @property
    def can_move(self) -> bool:
        """Whether slots can be moved, which trees need."""
        return all(type(layer) in _MOVABLE for layer in self.layers) and not self._fixed

    @property
    def can_be_ragged(self) -> bool:
        """Whether rows may hold different numbers of tokens."""
        return all(type(layer) in _GROWING for layer in self.layers)

    def begin(self, takes_back: bool) -> None:
        """Before the forward of a round; without drafts it takes nothing back, and what waits for a replay is fed."""
        if takes_back and self._fixed and not self.num_pending:
            self._snapshots = [_snapshot(layer) for layer in self._fixed]

    def move(self, num_places: int, sources: torch.LongTensor, targets: torch.LongTensor) -> None:
        """
        Copy slots of the last forward.

        Args:
            num_places (`int`): Slots that the forward wrote, at the end of the cache.
            sources (`torch.LongTensor` of shape `(B, n)`): Places to copy, counted from the first of them.
            targets (`torch.LongTensor` of shape `(B, n)`): Where to, counted likewise; negative ones lie before it.
        """
        for layer in self.layers:
            # A window keeps the end of the text only.
            is_static = type(layer) is cache_utils.StaticLayer
            start = (layer.get_seq_length() if is_static else layer.keys.shape[2]) - num_places
            for states in (layer.keys, layer.values):
                shape = (-1, states.shape[1], -1, states.shape[3])
                source = (start + sources.to(states.device))[:, None, :, None].expand(shape)
                target = (start + targets.to(states.device))[:, None, :, None].expand(shape)
                states.scatter_(2, target, states.gather(2, source))

    def keep(self, num_written: int, num_kept: int) -> None:
        """Leave the first `num_kept` of the `num_written` slots of the last forward."""
        if not self._fixed:
            self.cache.crop(-(num_written - num_kept))  # 0 counts too: it shrinks windows to their size
        elif num_kept == num_written:
            for layer in self._croppable:
                layer.crop(0)
            self.num_pending = 0
        else:
            for layer, snapshot in zip(self._fixed, self._snapshots, strict=True):
                _restore(layer, snapshot)
            for layer in self._croppable:
                layer.crop(-num_written)
            self.num_pending = num_kept

    def end(self) -> None:
        """Leave the cache as plain decoding would: windows drop again what they do not need."""
        for layer in self.layers:
            if id(layer) in self._recording:
                layer.record_past = self._recording[id(layer)]

    @property
    def _croppable(self) -> list:
        return [layer for layer in self.layers if layer not in self._fixed]


def _snapshot(layer) -> dict[str, Any]:
    """Copy of everything a layer holds; layers write to their tensors in place."""
    return {name: _copy(value) for name, value in vars(layer).items()}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {key: _copy(part) for key, part in value.items()} if isinstance(value, dict) else value


def _restore(layer, snapshot: dict[str, Any]) -> None:
    """Tensors keep their addresses where their shapes allow it, because captured graphs rely on them."""
    for name, saved in snapshot.items():
        setattr(layer, name, _put_back(getattr(layer, name), saved))


def _put_back(current: Any, saved: Any) -> Any:
    if isinstance(saved, dict):
        return {key: _put_back(current[key], part) for key, part in saved.items()}
    if isinstance(saved, torch.Tensor):
        if isinstance(current, torch.Tensor) and current.shape == saved.shape:
            return current.copy_(saved)
        return saved.clone()
    return saved

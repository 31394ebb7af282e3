"""What training needs of the target for each sequence: hidden states of the tapped layers, and its best tokens.

By default they are computed beside the trainer when first needed and kept in memory as long as they fit. A folder
keeps them on disk for other runs.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.utils import logging

from hf_drelay.evaluation.records import replace_file, write_json
from hf_drelay.modeling.compat import hidden_states_request
from hf_drelay.modeling.target_adapter import TargetAdapter


logger = logging.get_logger(__name__)


@dataclass
class SoftTargets:
    """
    The target's best tokens after every position.

    Attributes:
        ids (`torch.LongTensor` of shape `(B, T, k)`): Tokens, best first.
        log_probs (`torch.FloatTensor` of shape `(B, T, k)`): Their log-probabilities over the whole vocabulary.
    """

    ids: torch.LongTensor
    log_probs: torch.FloatTensor


class FeatureStore:
    """
    Tapped hidden states, and optionally soft targets, of training sequences.

    Args:
        adapter (`TargetAdapter`): View of the frozen target.
        layer_ids (`list[int]`): Tapped layers.
        num_soft_targets (`int`): Tokens kept of the target's distribution at each position.
        max_bytes (`int`): Memory to use; sequences beyond it are computed anew each time.
        folder (`FeatureFolder`, *optional*): Where they are looked up first and written to.
    """

    def __init__(
        self,
        adapter: TargetAdapter,
        layer_ids: list[int],
        num_soft_targets: int = 0,
        max_bytes: int = 8 << 30,
        folder: "FeatureFolder | None" = None,
    ):
        self.adapter = adapter
        self.layer_ids = layer_ids
        self.num_soft_targets = num_soft_targets
        self.free_bytes = max_bytes
        self.folder = folder
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    def get(
        self, keys: list[str], input_ids: torch.LongTensor, lengths: list[int]
    ) -> tuple[torch.Tensor, SoftTargets | None]:
        """
        Hidden states `(B, T, L*H)` of right-padded `input_ids` `(B, T)`, zero behind each of `lengths`, and soft
        targets if the store has any.

        Args:
            keys (`list[str]`): What identifies the tokens of each sequence.
        """
        rows = [self._find(key) for key in keys]
        missing = [i for i, row in enumerate(rows) if row is None]
        if missing:
            computed = self._compute([keys[i] for i in missing], input_ids[missing], [lengths[i] for i in missing])
            for i, row in zip(missing, computed, strict=True):
                rows[i] = row
        device = input_ids.device

        def padded(name: str) -> torch.Tensor:
            return nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True).to(device)

        if not self.num_soft_targets:
            return padded("states"), None
        return padded("states"), SoftTargets(padded("soft_ids").long(), padded("soft_log_probs"))

    def _find(self, key: str) -> dict[str, torch.Tensor] | None:
        row = self._kept.get(key)
        if row is None and self.folder is not None:
            row = self.folder.read(key)
        return row

    @torch.no_grad()
    def _compute(self, keys, input_ids, lengths) -> list[dict[str, torch.Tensor]]:
        body = self.adapter.target.get_decoder()  # without the head: it is asked for a few tokens only
        # No mask: padding stands on the right, where a causal model never looks.
        request = hidden_states_request(self.layer_ids, body.forward)
        device = self.adapter.target.device
        outputs = body(input_ids=input_ids.to(device), output_hidden_states=request, use_cache=False)
        tensors = {"states": self.adapter.tapped(outputs.hidden_states, self.layer_ids)}
        if self.num_soft_targets:
            tensors |= self._soft_targets(outputs.last_hidden_state)
        rows = []
        for i, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            row = {name: tensor[i, :length].cpu().clone() for name, tensor in tensors.items()}
            self._keep(key, row)
            rows.append(row)
        return rows

    def _soft_targets(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Best tokens of every position, a stretch at a time: all logits of a batch would not fit."""
        parts = []
        for stretch in hidden_states.split(64, dim=1):
            logits = self.adapter.logits(stretch)
            top = logits.topk(self.num_soft_targets, dim=-1)
            parts.append((top.indices.int(), (top.values - logits.logsumexp(-1, keepdim=True)).half()))
        ids, log_probs = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return {"soft_ids": ids, "soft_log_probs": log_probs}

    def _keep(self, key: str, row: dict[str, torch.Tensor]) -> None:
        if self.folder is not None:
            self.folder.add(key, row)
            return
        size = sum(tensor.nbytes for tensor in row.values())
        if size <= self.free_bytes:
            self._kept[key] = row
            self.free_bytes -= size


class FeatureFolder:
    """
    Features on disk, in shards of safetensors that appear when they are whole. It is a store for what can be computed
    again: a shard that cannot be read is put aside with a warning, and a disk that is full ends the writing, not the
    run.

    Args:
        path (`str` or `Path`): The folder.
        about (`dict`): What the features depend on (target, taps, dtype). A folder made for something else is refused.
        shard_bytes (`int`): Size of a shard.

    Raises:
        ValueError: If the folder holds other features.
    """

    def __init__(self, path: str | Path, about: dict, shard_bytes: int = 256 << 20):
        self.path = Path(path)
        self.shard_bytes = shard_bytes
        self.is_full = False
        self._pending: dict[str, dict[str, torch.Tensor]] = {}
        self._places: dict[str, tuple[Path, list[str]]] = {}  # shard and tensor names of a sequence
        self._claim(about)
        for shard in sorted(self.path.glob("features-*.safetensors")):
            self._index(shard)

    @staticmethod
    def read_about(path: str | Path) -> dict:
        """What the features of a folder depend on; empty if there are none yet."""
        file = Path(path) / "about.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def __len__(self) -> int:
        """Sequences that are on disk."""
        return len(self._places)

    def read(self, key: str) -> dict[str, torch.Tensor] | None:
        """Tensors of a sequence, or `None` if they are not there."""
        if key in self._pending:
            return self._pending[key]
        if key not in self._places:
            return None
        shard, names = self._places[key]
        try:
            with safe_open(shard, framework="pt") as file:
                return {name: file.get_tensor(f"{key}.{name}") for name in names}
        except (OSError, SafetensorError):  # taken away or damaged since
            return None

    def add(self, key: str, row: dict[str, torch.Tensor]) -> None:
        """Take the tensors of a sequence; they are written when a shard is full."""
        if self.is_full:
            return
        self._pending[key] = {name: tensor.cpu().contiguous() for name, tensor in row.items()}
        if sum(tensor.nbytes for row in self._pending.values() for tensor in row.values()) >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what has not been written yet."""
        if not self._pending:
            return
        used = [int(path.name.split("-")[1].split(".")[0]) for path in self.path.glob("features-*")]
        shard = self.path / f"features-{max(used, default=0) + 1:05d}.safetensors"
        tensors = {f"{key}.{name}": t for key, row in self._pending.items() for name, t in row.items()}
        try:
            replace_file(shard, lambda part: save_file(tensors, part))
        except (OSError, SafetensorError) as error:
            self.is_full, self._pending = True, {}
            logger.warning(
                f"hf_drelay: features cannot be written to `{shard}` ({error}); the rest of them is computed when "
                "needed. What was written before stays usable."
            )
            return
        self._places |= {key: (shard, list(row)) for key, row in self._pending.items()}
        self._pending = {}

    def _claim(self, about: dict) -> None:
        other = self.read_about(self.path)
        if not other:
            write_json(self.path / "about.json", about)
        elif other != json.loads(json.dumps(about)):
            different = next(name for name in {**other, **about} if other.get(name) != about.get(name))
            raise ValueError(
                f"`feature_folder` {str(self.path)!r} was made with {different} {other.get(different)!r}, but this "
                f"run has {about.get(different)!r}; give an empty folder."
            )

    def _index(self, shard: Path) -> None:
        try:
            with safe_open(shard, framework="pt") as file:
                names = list(file.keys())
        except (OSError, SafetensorError) as error:
            aside = shard.with_name(shard.name + ".corrupt")
            shard.rename(aside)
            logger.warning(f"hf_drelay: `{shard}` cannot be read ({error}); put aside, its features are made again.")
            return
        for full_name in names:
            key, _, name = full_name.partition(".")
            self._places.setdefault(key, (shard, []))[1].append(name)


def feature_bytes(num_tokens: int, width: int, num_soft_targets: int, itemsize: int) -> int:
    """Bytes of the features of so many tokens; `width` is `L*H`, `itemsize` that of the target's dtype."""
    return num_tokens * (width * itemsize + num_soft_targets * 6)

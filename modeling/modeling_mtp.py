"""Drafters that were trained together with their target: the MTP module of Qwen3.5, and the Gemma-4 assistant.

Both are chains. The MTP module is one more decoder layer over `[embedding; last hidden state]`, stored in the target's
own shards under `mtp.*`, which transformers skips when it loads the target. The Gemma-4 assistant owns no keys and
values: it attends to the target's caches and stays at the position of the last token. Both read the target's last
hidden state *after* the final norm; from the second token on they read their own output.
"""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from .compat import cache_parameter
from .configuration_drelay import DRelayConfig
from .modeling_base import Pool
from .modeling_chain import ChainDrafter, ChainSession
from .modeling_drafter import as_backend_mask, block_mask


class MtpDrafter(ChainDrafter):
    """MTP module of a Qwen3.5 target; tensor names are those of its shards without `mtp.`."""

    def __init__(self, config: DRelayConfig):
        super().__init__(config)
        # The family's own layer: gated queries, zero-centred norms, partial rotary embedding.
        from transformers.models.qwen3_5 import modeling_qwen3_5 as family

        fields = dict(config.module_config, num_hidden_layers=1, layer_types=["full_attention"])
        module_config = AutoConfig.for_model(**fields)
        module_config._attn_implementation = config._attn_implementation
        eps = module_config.rms_norm_eps
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = family.Qwen3_5RMSNorm(config.hidden_size, eps=eps)
        self.pre_fc_norm_hidden = family.Qwen3_5RMSNorm(config.hidden_size, eps=eps)
        self.layers = nn.ModuleList([family.Qwen3_5DecoderLayer(module_config, 0)])
        self.norm = family.Qwen3_5RMSNorm(config.hidden_size, eps=eps)
        self.rotary_emb = family.Qwen3_5TextRotaryEmbedding(module_config)
        self.post_init()

    def fuse(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        return context_hidden_states

    def advance(self, features, token_ids, position_ids, cache, adapter) -> torch.Tensor:
        embeds = self.pre_fc_norm_embedding(adapter.embed(token_ids).to(self.dtype))
        hidden = self.fc(torch.cat([embeds, self.pre_fc_norm_hidden(features)], dim=-1))
        mask = None
        if hidden.shape[1] > 1:
            mask = block_mask(hidden.shape[1], cache.get_seq_length(), True, None, self.device)
            mask = as_backend_mask(mask, len(hidden), self.config._attn_implementation, self.dtype)
        layer = self.layers[0]
        axes = position_ids[None].expand(3, -1, -1)  # text has the same position on each of them
        hidden = layer(
            hidden,
            position_embeddings=self.rotary_emb(hidden, axes),
            attention_mask=mask,
            **{cache_parameter(layer.forward): cache},
        )
        return self.norm(hidden)

    def logits(self, states: torch.Tensor, adapter) -> torch.FloatTensor:
        return adapter.logits(states)


class SharedCacheSession(ChainSession):
    """State of a call of a [`SharedCacheDrafter`]: nothing but the target's own caches and its last state."""

    def __init__(self, drafter, adapter, clock=None):
        super().__init__(drafter, adapter, clock)
        self.shared = None  # layer type to the target's keys and values of all verified positions
        self._observed = None

    def observe(self, outputs, row: int = 0, num_rejected: int = 0) -> None:
        """Keep the caches that the target's forward returned; they are cut when something is drafted."""
        self._observed = outputs.shared_kv_states, row, num_rejected

    def extend(self, context_hidden_states: torch.Tensor) -> None:
        """Take the states of newly verified positions and cut the caches to them."""
        super().extend(context_hidden_states)
        if self._observed is None:
            raise NotImplementedError(
                "A drafter that shares the target's caches needs the forward of the target itself; measure it with "
                "`generate()` instead of replay."
            )
        shared, row, num_rejected = self._observed
        self.shared = {
            # Sliding layers hold their last positions only, so rejected ones are counted from the end, and left
            # padding is what is too much at the beginning.
            kind: tuple(t[row : row + 1, :, : t.shape[2] - num_rejected][:, :, -self.num_verified :] for t in pair)
            for kind, pair in shared.items()
        }

    def end_round(self) -> None:
        self.state = None
        self.num_provisional = 0


class SharedCacheDrafter(ChainDrafter):
    """
    Gemma-4 assistant. The host drafts with the most likely token and hands the softmax over as q, which is biased at
    temperature > 0; here a token is drawn from the q that is handed over (or none is, with `proposal="greedy"`).
    """

    needs_shared_cache = True

    def __init__(self, config: DRelayConfig):
        super().__init__(config)
        module_config = AutoConfig.for_model(**config.module_config)
        self.assistant = AutoModelForCausalLM.from_config(module_config)
        self.post_init()

    def fuse(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        return context_hidden_states

    def first_state(self, session: SharedCacheSession, token, input_ids) -> torch.Tensor:
        if session.pending is None:
            return self.next_state(session, session.state, token)
        state, session.pending = session.pending[:, -1:], None
        return self.next_state(session, state, token)

    def next_state(self, session: SharedCacheSession, state, token) -> torch.Tensor:
        inputs = torch.cat([session.adapter.embed(token).to(self.dtype), state], dim=-1)
        shared = session.shared
        if len(inputs) > 1:  # paths of a tree
            shared = {k: tuple(t.expand(len(inputs), -1, -1, -1) for t in pair) for k, pair in shared.items()}
        output = self.assistant(
            inputs_embeds=inputs,
            position_ids=session.positions(session.num_verified, 1),
            shared_kv_states=shared,
        )
        session.logits = output.logits.float()
        return output.last_hidden_state

    def pool(self, states, session: SharedCacheSession, slot: int):
        return Pool.from_logits(session.logits, self.config.pool_size)


def module_weights(target) -> dict[str, torch.Tensor]:
    """
    Tensors of the MTP module in the shards of a target, without their prefix `mtp.`.

    Raises:
        ValueError: If the target was not loaded from files, or they hold no such module.
    """
    name = target.config._name_or_path
    index = cached_file(name, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is not None:
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        files = sorted({file for key, file in shards.items() if key.startswith("mtp.")})
    else:
        files = ["model.safetensors"]
    weights = {}
    for file in files:
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        if path is not None:
            tensors = load_state_dict(path, map_location="cpu")
            weights |= {key.removeprefix("mtp."): t for key, t in tensors.items() if key.startswith("mtp.")}
    if not weights:
        raise ValueError(
            f"`target` {name!r} has no tensors `mtp.*` in its weight files, so it has no module to draft with; load a "
            "target that was published with one, or use another drafter."
        )
    return weights


__all__ = ["MtpDrafter", "SharedCacheDrafter", "SharedCacheSession", "module_weights"]

"""EAGLE-3 (arXiv 2503.01840) as a chain: one decoder layer over the target's fused features and the next token.

The attention reads `[embedding; feature]`, each behind its own norm; the residual stream is the feature alone. The
drafter's output before the final norm is the feature of the next row. The vocabulary head is its own, usually over the
most frequent tokens only (`draft_token_ids`, which public files store as offsets, `d2t`).
"""

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from .configuration_drelay import DRelayConfig
from .modeling_chain import ChainDrafter
from .modeling_drafter import (
    DRelayAttention,
    as_backend_mask,
    block_mask,
    copy_matching,
    is_flash,
    source_layers,
)


class Eagle3Layer(nn.Module):
    """The decoder layer; queries, keys and values are projected from twice the width."""

    def __init__(self, config: DRelayConfig):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DRelayAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=config.attention_bias)
            setattr(self.self_attn, name, wide)
        self.mlp = Qwen3MLP(config)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embeds, features, position_embeddings, attention_mask, update) -> torch.Tensor:
        """
        Args:
            embeds, features (`torch.FloatTensor` of shape `(B, n, H)`): Of the rows.
            update (`Callable`): Own keys and values to all visible ones, the own ones last.
        """
        normed = self.hidden_norm(features)
        inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        keys, values = update(*self.self_attn.keys_and_values(inputs, position_embeddings))
        attended = self.self_attn.attend(inputs, keys, values, position_embeddings, attention_mask)
        hidden_states = (normed if self.norm_before_residual else features) + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Eagle3Drafter(ChainDrafter):
    """Tensor names are those of public checkpoints, with `layers.0.` for `midlayer.`."""

    def __init__(self, config: DRelayConfig):
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.lm_head = nn.Linear(config.hidden_size, config.output_vocab_size, False) if config.use_own_head else None
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))
        else:
            self.draft_token_ids = None
        self.post_init()

    def fuse(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        return self.fc(context_hidden_states)

    @torch.no_grad()
    def initialize_from_target(self, target) -> None:
        """
        Start from the target: its last layer, which reads nothing of the embedding yet, the highest tap, and the rows
        of its head. Errors are those of [`DRelayDrafterModel.initialize_from_target`].
        """
        (source,), source_norm = source_layers(target, self.config)
        width, layer = self.config.hidden_size, self.layers[0]
        tap = len(self.config.target_layer_ids) - 1
        wide = {}
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(layer.self_attn, name)
            wide[name], narrow = own.weight, nn.Linear(width, own.out_features, bias=own.bias is not None)
            own.weight = narrow.weight  # as wide as the source's for the moment
        copy_matching(source, layer)
        for name, weight in wide.items():
            own = getattr(layer.self_attn, name)
            weight[:, :width].zero_()
            weight[:, width:].copy_(own.weight)
            own.weight = weight
        layer.hidden_norm.weight.copy_(source.input_layernorm.weight)
        layer.input_layernorm.weight.fill_(1.0)
        self.fc.weight.zero_()
        self.fc.weight[:, tap * width : (tap + 1) * width].copy_(torch.eye(width))
        self.norm.weight.copy_(source_norm.weight)
        if self.lm_head is not None:
            rows = target.get_output_embeddings().weight
            self.lm_head.weight.copy_(rows if self.draft_token_ids is None else rows[self.draft_token_ids])

    def advance(self, features, token_ids, position_ids, cache, adapter) -> torch.Tensor:
        length = cache.get_seq_length()
        mask = None
        if features.shape[1] > 1 and not is_flash(self.config._attn_implementation):
            mask = block_mask(features.shape[1], length, True, None, self.device)
            mask = as_backend_mask(mask, len(features), self.config._attn_implementation, self.dtype)
        return self.run_layer(features, token_ids, position_ids, mask, lambda k, v: cache.update(k, v, 0), adapter)

    def run_layer(self, features, token_ids, position_ids, attention_mask, update, adapter) -> torch.Tensor:
        """States `(B, n, H)` of rows; training passes its own mask and keys, see [`Eagle3Layer`]."""
        embeds = adapter.embed(token_ids).to(self.dtype)
        position_embeddings = self.rotary_emb(features, position_ids)
        return self.layers[0](embeds, features, position_embeddings, attention_mask, update)

    def logits(self, states: torch.Tensor, adapter) -> torch.FloatTensor:
        states = self.norm(states)
        if self.lm_head is not None:
            return self.lm_head(states).float()
        return adapter.logits(states, self.draft_token_ids)


__all__ = ["Eagle3Drafter"]

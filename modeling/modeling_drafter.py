"""The parallel backbone in the layout of DFlash (arXiv 2602.06036): one non-causal forward gives a state per row.

Fused target features of verified positions enter every layer as keys and values; the rows of the block attend to them
and to each other. Invariant: the cache holds context only. The keys and values of a block are never written to it, so
a forward leaves no trace and only `extend` and a crop change the cache.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_drelay import DRelayConfig, DRelayDrafterConfig
from .modeling_base import DRelayPreTrainedModel, ZeroLinear


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `states` `(B, heads, T, D)` with tables `(B, T, D)`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return states * cos + rotate_half(states) * sin


class DRelayAttention(nn.Module):
    """Attention of block rows over context and block; the context has passed only the norm of the fused features."""

    def __init__(self, config: DRelayConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = config.block_causal[layer_idx]
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None

        def linear(inputs, outputs):
            return nn.Linear(inputs, outputs, bias=config.attention_bias)

        width = config.num_attention_heads * config.head_dim
        self.q_proj = linear(config.hidden_size, width)
        self.k_proj = linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.v_proj = linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.o_proj = linear(width, config.hidden_size)
        if config.use_qk_norm:
            self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def _split_heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:-1], -1, self.head_dim)

    def keys_and_values(self, states, position_embeddings) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values `(B, kv_heads, T, D)` of `states` `(B, T, H)`."""
        keys = self.k_norm(self._split_heads(self.k_proj(states))).transpose(1, 2)
        values = self._split_heads(self.v_proj(states)).transpose(1, 2)
        return _rotate(keys, *position_embeddings), values

    def forward(self, hidden_states, context_keys, context_values, position_embeddings, attention_mask=None):
        keys, values = self.keys_and_values(hidden_states, position_embeddings)
        if context_keys is not None:
            keys = torch.cat([context_keys, keys], dim=2)
            values = torch.cat([context_values, values], dim=2)
        return self.attend(hidden_states, keys, values, position_embeddings, attention_mask)

    def attend(self, hidden_states, keys, values, position_embeddings, attention_mask=None) -> torch.Tensor:
        """Output `(B, T, H)` of the rows `hidden_states` over all `keys` and `values`, their own ones last."""
        queries = self.q_norm(self._split_heads(self.q_proj(hidden_states))).transpose(1, 2)
        queries = _rotate(queries, *position_embeddings)
        implementation = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, _ = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            # Flash kernels express causality themselves; the others get it in the mask, because the causal flag of
            # SDPA aligns queries with the *first* keys, not with the last ones.
            is_causal=self.is_causal and is_flash(implementation),
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))


class BlockConvolution(nn.Module):
    """
    Grouped dynamic convolutions of DFlash 2 on the input and on the output of a sublayer, inside a block: tap `o` of a
    row is a learned kernel plus a term that the row's sublayer input computes for each group of channels. The first
    row of a block has no predecessor.
    """

    def __init__(self, config: DRelayConfig):
        super().__init__()
        self.block_size = config.block_size
        self.kernel_size = config.conv_kernel_size
        self.group_size = config.conv_group_size
        num_groups = config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, config.conv_kernel_size, config.hidden_size))
        self.kernel_projection = ZeroLinear(config.hidden_size, 2 * config.conv_kernel_size * num_groups, bias=False)

    def init_own_parameters(self, std: float) -> None:
        init.zeros_(self.base_kernel)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0  # the identity

    def taps(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Dynamic taps `(B, T, 2, kernel, groups)` of sublayer inputs `(B, T, H)`, input side first."""
        return self.kernel_projection(hidden_states).unflatten(-1, (2, self.kernel_size, -1))

    def forward(self, hidden_states: torch.Tensor, taps: torch.Tensor, side: int) -> torch.Tensor:
        """Convolve `(B, T, H)`, whole blocks, with the `taps` of one side (0 input, 1 output)."""
        blocks = hidden_states.unflatten(1, (-1, self.block_size))  # (B, A, S, H)
        taps = taps[:, :, side].repeat_interleave(self.group_size, dim=-1) + self.base_kernel[side]
        taps = taps.unflatten(1, (-1, self.block_size))
        output = taps[..., 0, :] * blocks
        for offset in range(1, self.kernel_size):
            shifted = F.pad(blocks[:, :, : self.block_size - offset], (0, 0, offset, 0))
            output = output + taps[..., offset, :] * shifted
        return output.flatten(1, 2)


class DRelayDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DRelayConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DRelayAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv = BlockConvolution(config) if config.conv_kernel_size else None
        self.mlp_conv = BlockConvolution(config) if config.conv_kernel_size else None

    def forward(self, hidden_states, context_keys, context_values, position_embeddings, attention_mask=None):
        def attend(inputs):
            return self.self_attn(inputs, context_keys, context_values, position_embeddings, attention_mask)

        inputs = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + _convolved(attend, inputs, self.attention_conv)
        inputs = self.post_attention_layernorm(hidden_states)
        return hidden_states + _convolved(self.mlp, inputs, self.mlp_conv)


def _convolved(sublayer, inputs: torch.Tensor, conv: BlockConvolution | None) -> torch.Tensor:
    """`sublayer(inputs)`, between the convolutions of its input and output if there are any."""
    if conv is None:
        return sublayer(inputs)
    taps = conv.taps(inputs)
    return conv(sublayer(conv(inputs, taps, 0)), taps, 1)


class DRelayDrafterModel(DRelayPreTrainedModel):
    """
    Parallel block drafter. Tensor names and shapes are those of public DFlash checkpoints.

    The target's embedding and head are borrowed at each call and never stored. Two own tensors are optional: a learned
    `mask_embedding (H,)` and the shortlist `draft_token_ids (Vd,)`, the tokens that can be drafted, in the order of
    the columns of the restricted head.
    """

    config_class = DRelayDrafterConfig

    def __init__(self, config: DRelayConfig):
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DRelayDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size)) if config.use_mask_embedding else None
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))
        else:
            self.draft_token_ids = None
        self.lm_head = nn.Linear(config.hidden_size, config.output_vocab_size, False) if config.use_own_head else None
        self.post_init()

    def logits(self, hidden_states: torch.Tensor, adapter) -> torch.FloatTensor:
        """Raw logits, fp32, of rows `(B, K, H)` over the (draft) vocabulary, by the own head or the target's."""
        if self.lm_head is not None:
            return self.lm_head(hidden_states).float()
        return adapter.logits(hidden_states, self.draft_token_ids)

    def new_cache(self) -> DynamicCache:
        """
        An empty context cache. Sliding layers keep the whole context too and look at its end: a cache that trims on
        every crop would lose the positions that a DLoop stage pushed out of the window and the crop brings back.
        """
        return DynamicCache()

    def fuse(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """Context features `(B, T, H)` of hidden states `(B, T, L*H)` concatenated in the order of the taps."""
        return self.hidden_norm(self.fc(context_hidden_states))

    def extend(self, context_features: torch.Tensor, position_ids: torch.LongTensor, cache: DynamicCache) -> None:
        """Append the keys and values of `context_features` `(B, T, H)` at `position_ids` `(B, T)` to the cache."""
        position_embeddings = self.rotary_emb(context_features, position_ids)
        for i, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_and_values(context_features, position_embeddings)
            cache.update(keys, values, i)

    def block_embeds(self, anchor_ids: torch.LongTensor, embed) -> torch.Tensor:
        """Input rows `(B, S, H)`: the embedded anchor `(B,)`, then mask rows. `embed` is the target's embedding."""
        size = self.config.block_size
        if self.mask_embedding is None:
            masks = anchor_ids.new_full((anchor_ids.shape[0], size - 1), self.config.mask_token_id)
            return embed(torch.cat([anchor_ids[:, None], masks], dim=1)).to(self.dtype)
        anchors = embed(anchor_ids[:, None]).to(self.dtype)
        return torch.cat([anchors, self.mask_embedding.to(self.dtype).expand(len(anchors), size - 1, -1)], dim=1)

    def forward(
        self,
        noise_embeds: torch.Tensor,
        position_ids: torch.LongTensor,
        cache: DynamicCache,
        attention_mask: list[torch.Tensor] | None = None,
    ) -> BaseModelOutput:
        """
        Hidden states of the block rows.

        Args:
            noise_embeds (`torch.FloatTensor` of shape `(B, S, H)`): Embedded anchor and mask rows.
            position_ids (`torch.LongTensor` of shape `(B, S)`): Their positions; the context ends just before them.
            cache (`DynamicCache`): Context keys and values, read only.
            attention_mask (`list[torch.BoolTensor]` of shape `(B, 1, S, T + S)`, *optional*): Visible keys of each
                layer, context first. By default every row sees what `layer_types` and `block_causal` say.

        Returns:
            `BaseModelOutput` with `last_hidden_state` of shape `(B, S, H)`, after the final norm.
        """
        hidden_states = noise_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for i, layer in enumerate(self.layers):
            keys, values, mask = self._visible_context(i, noise_embeds.shape[1], cache, attention_mask)
            mask = as_backend_mask(mask, len(noise_embeds), self.config._attn_implementation, hidden_states.dtype)
            hidden_states = layer(hidden_states, keys, values, position_embeddings, mask)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def _visible_context(self, layer_idx, num_rows, cache, attention_mask):
        """Context keys, values and mask of one layer; the mask is `None` when a row sees everything it is given."""
        has_context = layer_idx < len(cache.layers) and cache.layers[layer_idx].is_initialized
        keys = cache.layers[layer_idx].keys if has_context else None
        values = cache.layers[layer_idx].values if has_context else None
        if attention_mask is not None:
            return keys, values, attention_mask[layer_idx]
        window = self.layers[layer_idx].self_attn.sliding_window
        if window is not None and keys is not None:
            keys, values = keys[:, :, -(window - 1) :], values[:, :, -(window - 1) :]
        if is_flash(self.config._attn_implementation):  # these kernels know windows and causality themselves
            return keys, values, None
        length = 0 if keys is None else keys.shape[2]
        mask = block_mask(num_rows, length, self.config.block_causal[layer_idx], window, self.device)
        return keys, values, mask

    def initialize_from_target(self, target) -> None:
        """
        Start from the target: the layers are its last ones, the fused feature is the tap that feeds the first of them.

        Needs decoder layers with the projections and norms of the Llama family and a tap on the layer before them;
        what the target lacks keeps its random start.

        Raises:
            ValueError: If the target has no such layers, their sizes are not those of the drafter, or
                `target_layer_ids` lacks the needed tap.
        """
        sources, source_norm = source_layers(target, self.config)
        feeding, taps = self.config.num_target_layers - len(sources) - 1, self.config.target_layer_ids
        if feeding not in taps:
            raise ValueError(
                f"`target_layer_ids` {taps} lack layer {feeding}, which feeds the copied layers {feeding + 1}.."
                f"{self.config.num_target_layers - 1}; add it to the taps."
            )
        tap, width = taps.index(feeding), self.config.hidden_size
        with torch.no_grad():
            for own, source in zip(self.layers, sources, strict=True):
                copy_matching(source, own)
            self.fc.weight.zero_()
            self.fc.weight[:, tap * width : (tap + 1) * width].copy_(torch.eye(width))
            self.hidden_norm.weight.copy_(sources[0].input_layernorm.weight)
            self.norm.weight.copy_(source_norm.weight)
            if self.mask_embedding is not None:
                self.mask_embedding.copy_(target.get_input_embeddings().weight.float().mean(dim=0))


def source_layers(target, config: DRelayConfig) -> tuple[nn.ModuleList, nn.Module]:
    """What a drafter can start from: the target's last `num_hidden_layers` layers, and its final norm."""
    count = config.num_hidden_layers
    body = target.get_decoder() if hasattr(target, "get_decoder") else target.model
    layers, norm = getattr(body, "layers", None), getattr(body, "norm", None)
    first = config.num_target_layers - count
    if first < 0:
        raise ValueError(
            f"`num_hidden_layers` {count} are too many to start from the last layers of a target with "
            f"{config.num_target_layers} layers; use fewer, or start from random weights."
        )
    # Layers with a norm before the feed-forward (Gemma) give the other norms another meaning.
    is_llama_kind = layers is not None and norm is not None and hasattr(layers[first], "input_layernorm")
    if not is_llama_kind or hasattr(layers[first], "pre_feedforward_layernorm"):
        raise ValueError(
            f"`target` {type(target).__name__} has no decoder layers of the Llama kind to start from; "
            "start from random weights instead."
        )
    return layers[first:], norm


def copy_matching(source: nn.Module, own: nn.Module) -> None:
    """Copy the tensors that both layers have; raise a `ValueError` for one that has another shape in each."""
    weights, states = source.state_dict(), own.state_dict()
    for name in weights:
        if name not in states:
            continue
        if weights[name].shape != states[name].shape:
            raise ValueError(
                f"`{name}` has shape {tuple(weights[name].shape)} in the target and {tuple(states[name].shape)} in "
                "the drafter; to start from the target, keep the sizes that `DRelayConfig.for_target` derives."
            )
        states[name].copy_(weights[name])


def is_flash(implementation: str | None) -> bool:
    return "flash" in (implementation or "")


def block_mask(num_rows, context_length, causal, window, device) -> torch.BoolTensor | None:
    """Visible keys `(1, 1, S, T + S)` of a block behind `context_length` context keys; `None` if all are."""
    if not causal and (window is None or context_length + num_rows <= window):
        return None
    rows = torch.arange(num_rows, device=device)[:, None]
    keys = torch.arange(-context_length, num_rows, device=device)[None, :]
    visible = torch.ones(num_rows, context_length + num_rows, dtype=torch.bool, device=device)
    if causal:
        visible &= keys <= rows
    if window is not None:
        visible &= (rows - keys).abs() < window
    return visible[None, None]


def as_backend_mask(mask: torch.BoolTensor | None, batch_size: int, implementation: str | None, dtype: torch.dtype):
    """SDPA takes a boolean mask; eager and flex attention add one to the scores, flex looks it up by sequence."""
    if mask is None or implementation == "sdpa":
        return mask
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
    return bias.expand(batch_size, -1, -1, -1)


__all__ = ["DRelayDrafterModel"]

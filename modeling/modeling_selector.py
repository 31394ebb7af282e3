"""The relay head: a learned selector that revisits the pool of every slot before the target verifies the block.

Part one, the *Global Read*, looks at the whole block in both directions, once. Part two, the *causal selector*, scores
the candidates of a slot given the tokens selected before it, and a repair gate decides between KEEP (candidate 0, the
backbone's draft) and REPAIR. Beside these, which are the paper's, stand two paths of ours that score a candidate
directly: the pair path by the token before it, and the copy path (`modeling_copy.py`) by what followed the last tokens
earlier in the text. It reads the drafter's states and distributions and verified context, and nothing unverified of
the target. Untrained, it is exactly the drafter's own pool distribution, because every path that could change it ends
in a layer that starts at zero.

Shapes: `B` blocks, `K` slots, `C` candidates, `w` selector width, `h` heads, `P` prefix and `W` history positions.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .configuration_drelay import DRelayConfig, DRelaySelectorConfig
from .modeling_base import DRelayPreTrainedModel, FactorTable, Pool, TokenRows, ZeroLinear
from .modeling_copy import CopyPath
from .modeling_heads import HeadInputs


def _attend(queries, keys, values, bias):
    """Attention `(B, N, w)` of `(B, h, N, d)` over `(B, h, M, d)`; the additive `bias` broadcasts to the scores."""
    shape = (queries.shape[0], queries.shape[1], queries.shape[2], keys.shape[2])
    bias = bias.to(queries.dtype).expand(shape)
    output = F.scaled_dot_product_attention(queries, keys.to(queries.dtype), values.to(queries.dtype), attn_mask=bias)
    return output.transpose(1, 2).flatten(2)


class RelativeBias(nn.Module):
    """Learned bias `(h, *distance.shape)` of a distance; distances beyond the table share its last entry."""

    def __init__(self, num_heads: int, size: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(num_heads, size))

    def init_own_parameters(self, std: float) -> None:
        init.zeros_(self.table)

    def forward(self, distance: torch.LongTensor) -> torch.Tensor:
        return self.table[:, distance.clamp(0, self.table.shape[1] - 1)]


class GlobalReadBlock(nn.Module):
    """Bidirectional pre-norm attention and feed-forward over the anchor and the slots, `(B, 1 + K, w)`."""

    def __init__(self, width: int, num_heads: int, eps: float):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = Qwen3RMSNorm(width, eps=eps)
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.mlp_norm = Qwen3RMSNorm(width, eps=eps)
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv_proj(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.o_proj(F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).flatten(2))
        return x + self.down_proj(F.silu(self.up_proj(self.mlp_norm(x))))


class CandidateRead(nn.Module):
    """
    Candidate-specific attention over all candidates of the *other* slots (the own slot is masked). A null key with a
    zero value lets a candidate read nothing.
    """

    def __init__(self, config: DRelayConfig):
        super().__init__()
        width = config.selector_hidden_size
        self.num_heads = config.selector_num_heads
        self.q_proj = nn.Linear(2 * width, width, bias=False)
        self.kv_proj = nn.Linear(2 * width, 2 * width, bias=False)
        self.null_key = nn.Parameter(torch.zeros(self.num_heads, width // self.num_heads))
        self.log_prob_scale = nn.Parameter(torch.ones(self.num_heads))
        # Signed slot distance -(K-1) .. K-1, shifted to start at zero.
        self.distance_bias = RelativeBias(self.num_heads, 2 * config.num_drafts - 1)
        self.lambda_proj = nn.Linear(width, 1)
        self.g_proj = nn.Linear(width, width, bias=False)

    def init_own_parameters(self, std: float) -> None:
        init.normal_(self.null_key, std=std)
        init.ones_(self.log_prob_scale)

    def forward(self, x, embeds, log_probs):
        """
        Global context `(B, K, C, w)` of slot features `x` `(B, K, w)`, candidate `embeds` `(B, K, C, w)` and
        `log_probs` `(B, K, C)`.
        """
        num_blocks, K, C, _ = embeds.shape
        queries = _heads(_candidate_linear(self.q_proj, x, embeds).flatten(1, 2), self.num_heads)
        keys, values = _candidate_linear(self.kv_proj, x, embeds).flatten(1, 2).chunk(2, dim=-1)
        keys, values = _heads(keys, self.num_heads), _heads(values, self.num_heads)
        null = self.null_key.to(keys.dtype).expand(num_blocks, -1, -1)[:, :, None]
        slots = torch.arange(K, device=x.device)
        center = self.distance_bias.table.shape[1] // 2  # a short stage has fewer slots than the table
        distance = self.distance_bias(slots[:, None] - slots[None, :] + center)  # (h, K, K)
        distance = distance.masked_fill(torch.eye(K, dtype=torch.bool, device=x.device), float("-inf"))
        bias = distance.repeat_interleave(C, 1).repeat_interleave(C, 2)  # (h, K*C, K*C)
        bias = bias + self.log_prob_scale[:, None, None] * log_probs.flatten(1)[:, None, None, :]
        bias = F.pad(bias, (1, 0))  # the null key comes first
        read = _attend(queries, torch.cat([null, keys], 2), torch.cat([torch.zeros_like(null), values], 2), bias)
        scale = torch.sigmoid(self.lambda_proj(x))[:, :, None]
        return scale * self.g_proj(read).unflatten(1, (K, C))


class HistoryRead(nn.Module):
    """Attention of every candidate over the context features of the last verified positions."""

    def __init__(self, config: DRelayConfig):
        super().__init__()
        width = config.selector_hidden_size
        self.num_heads = config.selector_num_heads
        self.q_proj = nn.Linear(2 * width, width, bias=False)
        self.kv_proj = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.null_key = nn.Parameter(torch.zeros(self.num_heads, width // self.num_heads))
        self.distance_bias = RelativeBias(self.num_heads, config.history_window + 2 * config.block_size)
        self.o_proj = nn.Linear(width, width, bias=False)

    def init_own_parameters(self, std: float) -> None:
        init.normal_(self.null_key, std=std)

    def forward(self, x, embeds, history, history_mask, offset):
        """Read `(B, K, C, w)` of all candidates; `history` `(B, W, H)` ends just before the round's anchor."""
        num_blocks, K, C, _ = embeds.shape
        num_positions = history.shape[1]
        queries = _heads(_candidate_linear(self.q_proj, x, embeds).flatten(1, 2), self.num_heads)
        keys, values = self.kv_proj(history.to(embeds.dtype)).chunk(2, dim=-1)
        keys, values = _heads(keys, self.num_heads), _heads(values, self.num_heads)
        null = self.null_key.to(keys.dtype).expand(num_blocks, -1, -1)[:, :, None]
        slots = torch.arange(K, device=x.device)[:, None] + offset
        distance = slots + num_positions - torch.arange(num_positions, device=x.device)  # 1 just before the anchor
        bias = self.distance_bias(distance).repeat_interleave(C, 1)[None]  # (1, h, K*C, W)
        bias = bias.masked_fill(~history_mask[:, None, None, :], float("-inf"))
        bias = F.pad(bias, (1, 0))  # without any history there is still the null key
        read = _attend(queries, torch.cat([null, keys], 2), torch.cat([torch.zeros_like(null), values], 2), bias)
        return self.o_proj(read).unflatten(1, (K, C))


class PrefixRead(nn.Module):
    """Addressable read of every candidate over all tokens selected before its slot, in earlier stages too."""

    def __init__(self, config: DRelayConfig):
        super().__init__()
        width = config.selector_hidden_size
        self.num_heads = config.selector_num_heads
        self.q_proj = nn.Linear(2 * width, width, bias=False)
        self.kv_proj = nn.Linear(2 * width, 2 * width, bias=False)
        self.distance_bias = RelativeBias(self.num_heads, 4 * config.block_size)
        self.o_proj = nn.Linear(width, width, bias=False)

    def queries(self, x, embeds) -> torch.Tensor:
        """Queries `(B, K, C, w)` of all candidates; they do not depend on the path."""
        return _candidate_linear(self.q_proj, x, embeds)

    def forward(self, queries, prefix):
        """
        Read `(B, R, C, w)` of the `queries` `(B, R, C, w)` of some slots over `prefix` `(B, P, 2w)`, which ends with
        the token before the last of these slots.
        """
        num_slots, C = queries.shape[1:3]
        num_prefix = prefix.shape[1]
        keys, values = self.kv_proj(prefix).chunk(2, dim=-1)
        # Slot `r` of the R scored ones stands right behind prefix entry `P - R + r`, at distance 1.
        ends = torch.arange(num_slots, device=prefix.device)[:, None] + num_prefix - num_slots + 1
        distance = ends - torch.arange(num_prefix, device=prefix.device)
        bias = self.distance_bias(distance).masked_fill(distance < 1, float("-inf")).repeat_interleave(C, 1)[None]
        queries = _heads(queries.flatten(1, 2), self.num_heads)
        read = _attend(queries, _heads(keys, self.num_heads), _heads(values, self.num_heads), bias)
        return self.o_proj(read).unflatten(1, (num_slots, C))


class PairPath(nn.Module):
    """
    Low-rank score of the previously selected token against a candidate, `<A[y] * W_p h, D[c]>`. On the pool it
    contains the bilinear selector of DFlash 2 and the Markov head of DSpark (arXiv 2607.05147).
    """

    def __init__(self, config: DRelayConfig, num_predecessors: int, num_successors: int):
        super().__init__()
        rank = config.pair_rank
        self.predecessor_table = FactorTable(num_predecessors, rank)
        self.successor_table = nn.Parameter(torch.zeros(num_successors, rank))
        self.hidden_proj = nn.Linear(config.hidden_size, rank)

    def init_own_parameters(self, std: float) -> None:
        init.zeros_(self.successor_table)

    def forward(self, hidden_states, candidate_rows, previous_rows):
        """Score `(B, R, C)` from `hidden_states` `(B, R, H)` and table rows `(B, R, C)` and `(B, R)`."""
        factor = self.predecessor_table(previous_rows) * self.hidden_proj(hidden_states)
        return torch.einsum("brd,brcd->brc", factor, F.embedding(candidate_rows, self.successor_table))


@dataclass
class SelectorState:
    """What the parallel part of the selector computed for a block."""

    inputs: HeadInputs
    candidate_rows: torch.LongTensor | None  # (B, K, C), rows of the pair tables
    slot_features: torch.Tensor | None = None  # (B, 1 + K, w), the anchor first
    prefix_queries: torch.Tensor | None = None  # (B, K, C, w)
    trunk: torch.Tensor | None = None  # (B, K, C, w), all of it but the prefix read


class DRelaySelectorModel(TokenRows, DRelayPreTrainedModel):
    """Global Read and causal selector; implements the head interface of `modeling_heads.py`."""

    config_class = DRelaySelectorConfig
    base_model_prefix = "selector"

    def __init__(self, config: DRelayConfig):
        super().__init__(config)
        self.init_token_rows(config)
        self.candidate_read = self.history_read = self.prefix_read = None
        self.has_trunk = config.use_rank_head or config.use_repair_gate
        width = config.selector_hidden_size
        if self.has_trunk:
            self._build_trunk(config, width)
        self.pair_path = PairPath(config, self.num_predecessors, self.num_successors) if config.pair_rank else None
        if config.use_rank_head:
            self.rank_up = nn.Linear(width, width)
            self.rank_down = ZeroLinear(width, 1, bias=False)
        if config.use_repair_gate:
            self.gate_up = nn.Linear(3 * width, width)
            self.gate_down = ZeroLinear(width, 1)
        if config.use_repaired_feature:
            self.repaired_proj = ZeroLinear(config.hidden_size, config.hidden_size, bias=False)
        self.copy_path = CopyPath(config) if config.copy_order else None
        self.post_init()

    def _build_trunk(self, config: DRelayConfig, width: int) -> None:
        """Everything that rank head and repair gate look at."""
        eps = config.rms_norm_eps
        self.embed_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.embed_norm = Qwen3RMSNorm(width, eps=eps)
        self.slot_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.pool_proj = nn.Linear(width, width, bias=False)
        self.slot_embedding = nn.Embedding(config.num_drafts + 1, width)
        self.blocks = nn.ModuleList()
        if config.use_global_read:
            self.blocks.extend(
                GlobalReadBlock(width, config.selector_num_heads, eps) for _ in range(config.selector_num_layers)
            )
        self.slot_norm = Qwen3RMSNorm(width, eps=eps)
        self.candidate_read = CandidateRead(config) if config.use_global_read else None
        self.history_read = HistoryRead(config) if config.use_history_read else None
        self.prefix_read = PrefixRead(config) if config.use_prefix_read else None
        self.trunk_proj = nn.Linear(2 * width + 3, width)
        self.trunk_norm = Qwen3RMSNorm(width, eps=eps)

    def read(self, inputs: HeadInputs) -> SelectorState:
        """Global Read, history read and everything else that does not depend on the selected tokens."""
        pool, K = inputs.pool, inputs.pool.ids.shape[1]
        rows = self.table_rows(pool.ids) if self.pair_path is not None else None
        if not self.has_trunk:
            return SelectorState(inputs, rows)
        embeds = self._embed(inputs, pool.ids)  # (B, K, C, w)
        hidden = inputs.hidden_states.to(self.dtype)
        probs = pool.log_probs.exp().to(self.dtype)
        slots = self.slot_proj(hidden) + self.pool_proj(torch.einsum("bkc,bkcw->bkw", probs, embeds))
        anchor = self.pool_proj(self._embed(inputs, inputs.anchor_ids))
        if inputs.anchor_hidden is not None:
            anchor = anchor + self.slot_proj(inputs.anchor_hidden.to(self.dtype))
        x = torch.cat([anchor[:, None], slots], dim=1) + self.slot_embedding.weight[: K + 1]
        for block in self.blocks:
            x = block(x)
        x = self.slot_norm(x)
        slots = x[:, 1:]
        trunk = _candidate_linear(self.trunk_proj, slots, embeds, self._evidence(pool))
        if self.candidate_read is not None:
            trunk = trunk + self.candidate_read(slots, embeds, pool.log_probs)
        if self.history_read is not None:
            trunk = trunk + self.history_read(slots, embeds, inputs.history, inputs.history_mask, inputs.offset)
        queries = self.prefix_read.queries(slots, embeds) if self.prefix_read is not None else None
        return SelectorState(inputs, rows, x, queries, trunk)

    def score(self, state: SelectorState, path_ids: torch.LongTensor, first: int = 0) -> torch.FloatTensor:
        """Selection logits over the pool, see `DraftHead.score`."""
        last = path_ids.shape[1]
        pool = state.inputs.pool
        scores = pool.log_probs[:, first:last]
        hidden = state.inputs.hidden_states[:, first:last].to(self.dtype)
        if self.pair_path is not None:
            previous = self.previous_rows(path_ids[:, first:last])
            scores = scores + self.pair_path(hidden, state.candidate_rows[:, first:last], previous).float()
        if self.copy_path is not None:
            scores = scores + self.copy_path(hidden, state.inputs.text_ids, path_ids, pool.ids[:, first:last])
        if not self.has_trunk:
            return scores.log_softmax(dim=-1)
        trunk = state.trunk[:, first:last]
        if self.prefix_read is not None:
            trunk = trunk + self.prefix_read(state.prefix_queries[:, first:last], self._prefix(state, path_ids))
        trunk = self.trunk_norm(trunk)
        if self.config.use_rank_head:
            scores = scores + self.rank_down(F.silu(self.rank_up(trunk))).squeeze(-1).float()
        if not self.config.use_repair_gate:
            return scores.log_softmax(dim=-1)
        return self._gate(state.slot_features[:, 1 + first : 1 + last], trunk, scores)

    def remember(self, state: SelectorState, path_ids: torch.LongTensor) -> torch.Tensor | None:
        """Prefix entries `(B, P, 2w)` of this stage and the ones before it."""
        return self._prefix(state, path_ids) if self.prefix_read is not None else None

    def provisional_features(self, hidden_states: torch.Tensor, token_ids: torch.LongTensor, embed) -> torch.Tensor:
        """Stand-ins for context features: backbone rows `(B, n, H)` that know the tokens `(B, n)` at their places."""
        if not self.config.use_repaired_feature:
            return hidden_states
        return hidden_states + self.repaired_proj(embed(token_ids).to(self.dtype))

    def _evidence(self, pool: Pool) -> torch.Tensor:
        """What the backbone thinks of each candidate, `(B, K, C, 3)`: log-probability, distance to the best, rank."""
        C = pool.ids.shape[-1]
        ranks = (torch.arange(C, device=pool.ids.device) / C).expand_as(pool.log_probs)
        evidence = torch.stack([pool.log_probs, pool.log_probs - pool.log_probs[..., :1], ranks], dim=-1)
        return evidence.to(self.dtype)

    def _embed(self, inputs: HeadInputs, token_ids: torch.LongTensor) -> torch.Tensor:
        """Target embeddings in the selector's width; normed, because tables of targets differ in scale by far."""
        return self.embed_norm(self.embed_proj(inputs.embed(token_ids).to(self.dtype)))

    def _prefix(self, state: SelectorState, path_ids: torch.LongTensor) -> torch.Tensor:
        embeds = self._embed(state.inputs, path_ids)
        prefix = torch.cat([state.slot_features[:, : path_ids.shape[1]], embeds], dim=-1)
        earlier = state.inputs.earlier
        return prefix if earlier is None else torch.cat([earlier, prefix], dim=1)

    def _gate(self, x: torch.Tensor, trunk: torch.Tensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """
        Split the mass between KEEP and REPAIR. With a zero correction the result is `log_softmax(scores)`: the gate's
        logit is then exactly the log-odds of the repairs.
        """
        repairs = scores[..., 1:]
        mixed = torch.einsum("bkc,bkcw->bkw", repairs.softmax(dim=-1).to(trunk.dtype), trunk[..., 1:, :])
        features = torch.cat([x, trunk[..., 0, :], mixed], dim=-1)
        correction = self.gate_down(F.silu(self.gate_up(features))).squeeze(-1).float()
        gate = repairs.logsumexp(dim=-1) - scores[..., 0] + correction
        keep = F.logsigmoid(-gate)[..., None]
        repair = F.logsigmoid(gate)[..., None] + repairs.log_softmax(dim=-1)
        return torch.cat([keep, repair], dim=-1)


def _candidate_linear(linear: nn.Linear, x, embeds, *more) -> torch.Tensor:
    """
    `linear([x; embeds; ...])` `(B, K, C, out)` of slot features `x` `(B, K, w)` and candidate features `(B, K, C, n)`;
    the part of `x` is computed once for each slot instead of once for each candidate.
    """
    width = x.shape[-1]
    candidates = torch.cat([embeds, *more], dim=-1) if more else embeds
    of_slot = F.linear(x, linear.weight[:, :width])
    return F.linear(candidates, linear.weight[:, width:], linear.bias) + of_slot[:, :, None]


def _heads(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`(B, N, w)` to `(B, h, N, w / h)`."""
    return states.unflatten(-1, (num_heads, -1)).transpose(1, 2)


__all__ = ["DRelaySelectorModel"]

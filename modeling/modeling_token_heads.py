"""Heads of the field that correct a slot's pool by a low-rank function of the tokens before it.

*Bilinear* (DFlash 2) multiplies the previous token with the slot's state, *recurrent* (Domino) runs a small GRU over
all tokens of the block, *markov* (DSpark) looks up the previous token. Each adds its correction to the backbone's
logits of the pool only, so that q is the corrected distribution restricted to the pool; with a pool of the whole
vocabulary it is the published one. Untrained, all of them are the independent head: their last table starts at zero.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .configuration_drelay import DRelayConfig
from .modeling_base import FactorTable, Pool, TokenRows, ZeroLinear
from .modeling_heads import HeadInputs


@dataclass
class TokenHeadState:
    """What the parallel part of a head computed for a block."""

    pool: Pool
    hidden_states: torch.Tensor  # (B, K, H), in the head's dtype
    candidate_rows: torch.LongTensor  # (B, K, C), table rows of the pool
    embed: object  # token ids to target embeddings
    projected: torch.Tensor | None = None  # (B, K, r), the slot's part of a product


class TokenHead(TokenRows, nn.Module):
    """Base of the heads in this file; subclasses say what is added to the pool's log-probabilities."""

    def __init__(self, config: DRelayConfig):
        super().__init__()
        self.config = config
        self.init_token_rows(config)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def read(self, inputs: HeadInputs) -> TokenHeadState:
        """Table rows of the pool and the states in the head's dtype."""
        hidden = inputs.hidden_states.to(self.dtype)
        state = TokenHeadState(inputs.pool, hidden, self.table_rows(inputs.pool.ids), inputs.embed)
        return replace(state, projected=self.project(hidden))

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The part of the correction that depends on the slot's state `(B, K, H)` alone."""
        return None

    def score(self, state: TokenHeadState, path_ids: torch.LongTensor, first: int = 0) -> torch.FloatTensor:
        """Selection logits over the pool, see `DraftHead.score`."""
        log_probs = state.pool.log_probs[:, first : path_ids.shape[1]]
        return log_probs + self.correction(state, path_ids, first).float()

    def correction(self, state: TokenHeadState, path_ids: torch.LongTensor, first: int) -> torch.Tensor:
        """Correction `(B, R, C)` of the slots `first ..`, given the tokens `path_ids` before each."""
        raise NotImplementedError

    def remember(self, state: TokenHeadState, path_ids: torch.LongTensor) -> None:
        """Nothing: the published heads start every block anew."""
        return None

    def provisional_features(self, hidden_states: torch.Tensor, token_ids: torch.LongTensor, embed) -> torch.Tensor:
        """Stand-ins for context features: the backbone's rows `(B, n, H)` as they are."""
        return hidden_states


class BilinearHead(TokenHead):
    """
    Candidate selector of DFlash 2: `<A[y] * W h, C[b]>` for the token `y` before a slot with state `h` and its
    candidate `b`. Tensor names are those of public checkpoints, below `candidate_selector.` there.
    """

    def __init__(self, config: DRelayConfig):
        super().__init__(config)
        self.predecessor_codebook = nn.Parameter(torch.zeros(self.num_predecessors, config.head_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(self.num_successors, config.head_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.head_rank, bias=False)

    def init_own_parameters(self, std: float) -> None:
        init.normal_(self.predecessor_codebook, std=1.0)  # as in a [`FactorTable`]
        init.zeros_(self.successor_codebook)

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.hidden_projection(hidden_states)

    def correction(self, state: TokenHeadState, path_ids: torch.LongTensor, first: int) -> torch.Tensor:
        last = path_ids.shape[1]
        previous = F.embedding(self.previous_rows(path_ids[:, first:last]), self.predecessor_codebook)
        successors = F.embedding(state.candidate_rows[:, first:last], self.successor_codebook)
        return torch.einsum("bkr,bkcr->bkc", previous * state.projected[:, first:last], successors)


class RecurrentHead(TokenHead):
    """
    Domino (arXiv 2605.29707): a GRU over the target embeddings of the anchor and the chosen tokens, then
    `W2 silu(W1 [h; s])` for slot state `h` and GRU state `s`. The first `pure_draft_prefix_len` slots of a block are
    left alone.
    """

    def __init__(self, config: DRelayConfig):
        super().__init__(config)
        width, rank = config.hidden_size, config.head_rank
        self.prefix_gru = nn.GRU(width, config.gru_hidden_dim, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + config.gru_hidden_dim, rank, bias=False),
            nn.SiLU(),
            ZeroLinear(rank, self.num_successors, bias=False),
        )

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states, self.embed_proj[0].weight[:, : self.config.hidden_size])

    def correction(self, state: TokenHeadState, path_ids: torch.LongTensor, first: int) -> torch.Tensor:
        last = path_ids.shape[1]
        states, _ = self.prefix_gru(state.embed(path_ids).to(self.dtype))  # the whole prefix: it has a few tokens
        of_prefix = F.linear(states[:, first:last], self.embed_proj[0].weight[:, self.config.hidden_size :])
        bottleneck = self.embed_proj[1](state.projected[:, first:last] + of_prefix)
        rows = F.embedding(state.candidate_rows[:, first:last], self.embed_proj[2].weight)
        corrected = torch.arange(first, last, device=path_ids.device) >= self.config.pure_draft_prefix_len
        return torch.einsum("bkr,bkcr->bkc", bottleneck, rows) * corrected[:, None]


class MarkovHead(TokenHead):
    """
    DSpark (arXiv 2607.05147): `W2 f(W1[y])` for the token `y` before a slot. `f` is the identity (vanilla), a gate
    that sees the slot's state (gated), or one step of a recurrence over the slots of the block (rnn).

    The optional confidence of a slot estimates that its token is accepted when all before it were. It looks at the
    slot's state and the token before it, never at the slot's own token, so a draft may be cut by it.
    """

    def __init__(self, config: DRelayConfig):
        super().__init__(config)
        width, rank = config.hidden_size, config.head_rank
        self.markov_w1 = FactorTable(self.num_predecessors, rank)
        self.markov_w2 = ZeroLinear(rank, self.num_successors, bias=False)
        if config.markov_head_type == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if config.markov_head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)
        self.confidence_head = None
        if config.use_confidence_head:
            inputs = width + rank * config.confidence_head_with_markov
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(inputs, 1)})

    def correction(self, state: TokenHeadState, path_ids: torch.LongTensor, first: int) -> torch.Tensor:
        last = path_ids.shape[1]
        rows = F.embedding(state.candidate_rows[:, first:last], self.markov_w2.weight)
        return torch.einsum("bkr,bkcr->bkc", self.factor(state.hidden_states, path_ids)[:, first:last], rows)

    def factor(self, hidden_states: torch.Tensor, path_ids: torch.LongTensor) -> torch.Tensor:
        """What `W2` is multiplied with in the slots `0 .. n - 1`, `(B, n, r)`, given `path_ids` `(B, n)`."""
        previous = self.markov_w1(self.previous_rows(path_ids))
        hidden = hidden_states[:, : path_ids.shape[1]]
        if self.config.markov_head_type == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, previous], dim=-1))) * previous
        if self.config.markov_head_type == "rnn":
            return self._recurrence(hidden, previous)
        return previous

    def confidence(self, state: TokenHeadState, path_ids: torch.LongTensor) -> torch.FloatTensor:
        """Logits `(B, n)` of the acceptance of the first slots, given the tokens `path_ids` `(B, n)` before each."""
        features = state.hidden_states[:, : path_ids.shape[1]]
        if self.config.confidence_head_with_markov:
            features = torch.cat([features, self.markov_w1(self.previous_rows(path_ids))], dim=-1)
        proj = self.confidence_head["proj"]
        return F.linear(features.float(), proj.weight.float(), proj.bias.float()).squeeze(-1)

    def _recurrence(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        memory, outputs = torch.zeros_like(previous[:, 0]), []
        for slot in range(previous.shape[1]):
            joint = self.joint_proj(torch.cat([memory, previous[:, slot], hidden[:, slot]], dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            memory = gate * memory + (1 - gate) * torch.tanh(candidate)
            outputs.append(torch.tanh(output))
        return torch.stack(outputs, dim=1)


__all__ = ["BilinearHead", "MarkovHead", "RecurrentHead"]

"""The start of a head: a new one on a trained backbone, and what a relay head can count instead of learning it.

A pair path with random tables needs tens of thousands of blocks to learn which token follows which; a count of the
responses tells it at once. That texts repeat themselves is true of all of them, so the copy path starts with weights.
"""

from collections.abc import Iterable

import torch

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_drelay import DRelayModel

from .data import ResponseExample


# How many tokens' worth of evidence a predecessor needs before its own counts outweigh those of all tokens together.
SMOOTHING = 20.0
# Share of the score of a pair that counts at first; the drafter's own logits know a part of it already.
PAIR_WEIGHT = 0.5
# Of the copy path, for each length of a match.
COPY_WEIGHT = 1.0
# Of more tokens an even share is counted, for the sake of memory.
MOST_TOKENS = 20_000_000
HEAD_FIELDS = (
    "head",
    "use_selector",
    "head_rank",
    "gru_hidden_dim",
    "pure_draft_prefix_len",
    "markov_head_type",
    "use_confidence_head",
    "confidence_head_with_markov",
    "selector_hidden_size",
    "selector_num_heads",
    "selector_num_layers",
    "use_global_read",
    "use_history_read",
    "use_prefix_read",
    "use_rank_head",
    "use_repair_gate",
    "history_window",
    "pair_rank",
    "copy_order",
    "copy_window",
    "use_repaired_feature",
)
DRAFTING_FIELDS = ("pool_size", "proposal", "num_draft_tokens", "loop_gate", "max_stages", "confidence_threshold")
CONVOLUTION_FIELDS = ("conv_kernel_size", "conv_group_size")


def new_head_config(base: DRelayConfig, fields: dict) -> DRelayConfig:
    """
    The configuration of `base` with another head: `fields` of it, and what they leave out as for a new drafter.

    Raises:
        ValueError: If a field is none of the head's.
    """
    foreign = sorted(set(fields) - {*HEAD_FIELDS, *DRAFTING_FIELDS, *CONVOLUTION_FIELDS})
    if foreign:
        raise ValueError(
            f"`{foreign[0]}` ({fields[foreign[0]]!r}) is no field of a head, and the drafter's backbone is kept as it "
            f"is; set {', '.join(HEAD_FIELDS[:3])} and their like, or train a new drafter with `drafter_config`."
        )
    own = {name: getattr(base, name) for name in DRelayConfig.own_fields() if name not in HEAD_FIELDS}
    own |= {name: getattr(base, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return DRelayConfig(**own | DRelayConfig.head_sizes(base.hidden_size) | {"head": "relay"} | fields)


def with_new_head(base: DRelayModel, fields: dict) -> DRelayModel:
    """The backbone of `base` under a new, untrained head; `fields` and errors are those of `new_head_config`."""
    drelay = DRelayModel(new_head_config(base.config, fields))
    if base.config.draft_vocab_size is not None:
        drelay.set_shortlist(base.drafter.draft_token_ids)
    drelay.drafter.load_state_dict(base.drafter.state_dict(), strict=False)  # convolutions may be new: they do nothing
    drelay.frozen_copies = base.frozen_copies
    return drelay


def start_from_counts(drelay, examples: Iterable[ResponseExample]) -> None:
    """
    Let the head of `drelay` ([`DRelayModel`]) start from what the `examples` count. Heads other than relay, and paths
    that the configuration turns off, are left alone.
    """
    pair_path = getattr(drelay.selector, "pair_path", None)
    copy_path = getattr(drelay.selector, "copy_path", None)
    with torch.no_grad():
        if copy_path is not None:
            copy_path.weight_proj.bias.fill_(COPY_WEIGHT)
        if pair_path is not None:
            pairs = count_pairs(examples, drelay.selector)
            predecessors, successors = factorize(pair_scores(pairs), pairs, pair_path.successor_table.shape[1])
            scale = predecessors.std()  # that of a random table
            pair_path.predecessor_table.weight.copy_(predecessors / scale)
            pair_path.successor_table.copy_(successors * scale)
            pair_path.hidden_proj.weight.zero_()
            pair_path.hidden_proj.bias.fill_(PAIR_WEIGHT)


def count_pairs(examples: Iterable[ResponseExample], selector) -> torch.Tensor:
    """
    How often a token of the responses follows another one, sparse, in rows of the head's tables: `(predecessors,
    successors)`. Tokens that cannot be drafted are no successors.
    """
    examples = list(examples)
    every = 1 + sum(len(example.input_ids) for example in examples) // MOST_TOKENS  # files hold a kind of prompt each
    before, after = [], []
    for example in examples[::every]:
        # The first token of a response follows the last one of its prompt.
        ids = example.input_ids[max(example.prompt_length - 1, 0) :].to(selector.device)
        before.append(selector.previous_rows(ids[:-1]))
        after.append(selector.table_rows(ids[1:]))
    before, after = torch.cat(before).cpu(), torch.cat(after).cpu()
    known = after < selector.num_successors
    places = torch.stack([before[known], after[known]])
    size = (selector.num_predecessors, selector.num_successors)
    return torch.sparse_coo_tensor(places, torch.ones(places.shape[1]), size, check_invariants=True).coalesce()


def pair_scores(pairs: torch.Tensor) -> torch.Tensor:
    """
    Score `log(1 + n(y, c) / (s p(c)))` of every pair of a token `y` and its successor `c`, sparse, for counts `n` and
    `s` tokens of smoothing.

    With the smoothed `p(c|y) = (n(y, c) + s p(c)) / (n(y) + s)` this is `log p(c|y) / p(c)` up to a term of `y` alone,
    which no choice among candidates depends on. So pairs that never occurred score zero, and the table is sparse.
    """
    shares = _shares(pairs, dim=0)
    after = pairs.indices()[1]
    scores = torch.log1p(pairs.values() / (SMOOTHING * shares[after]))
    return torch.sparse_coo_tensor(pairs.indices(), scores, pairs.shape, check_invariants=True).coalesce()


def factorize(scores: torch.Tensor, pairs: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Factors `(predecessors, rank)` and `(successors, rank)` whose products come closest to `scores`, errors weighted by
    how frequent both tokens are.
    """
    of_predecessor, of_successor = (_shares(pairs, dim).sqrt() for dim in (1, 0))
    before, after = scores.indices()
    weighted = scores.values() * of_predecessor[before] * of_successor[after]
    weighted = torch.sparse_coo_tensor(scores.indices(), weighted, scores.shape, check_invariants=True).coalesce()
    size = min(rank + 16, *scores.shape)
    with torch.random.fork_rng(devices=[]):  # a randomised method; the same run starts from the same factors
        torch.manual_seed(0)
        left, values, right = torch.svd_lowrank(weighted, q=size, niter=3)
    roots = values.sqrt()
    factors = (left * roots / of_predecessor[:, None], right * roots / of_successor[:, None])
    # A small vocabulary has fewer directions than the tables.
    return tuple(torch.nn.functional.pad(f[:, :rank], (0, max(0, rank - f.shape[1]))) for f in factors)


def _shares(pairs: torch.Tensor, dim: int) -> torch.Tensor:
    """Share of each token among all of one side, half an occurrence added; `dim` is the other side."""
    counts = torch.sparse.sum(pairs, dim=dim).to_dense() + 0.5
    return counts / counts.sum()

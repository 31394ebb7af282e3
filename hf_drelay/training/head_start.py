"""The start of a relay head: what it can count instead of learning it.

A count of the responses tells at once which token follows which; a pair path with random tables would have to learn
it. That texts repeat themselves is true of all of them, so the copy path starts with weights.
"""

from collections.abc import Iterable

import torch

from .data import ResponseExample


# How many tokens' worth of evidence a predecessor needs before its own counts outweigh those of all tokens together.
SMOOTHING = 20.0
# Share of the score of a pair that counts at first; the drafter's own logits know a part of it already.
PAIR_WEIGHT = 0.5
# Of the copy path, for each length of a match.
COPY_WEIGHT = 1.0
# Of more tokens an even share is counted, for the sake of memory.
MOST_TOKENS = 20_000_000


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

"""The start of a head: a new one on a trained backbone, and what a relay head can count instead of learning it.

A pair path with random tables needs tens of thousands of blocks to learn which token follows which, and a copy path
with zero weights to learn that texts repeat themselves. A count of the responses tells the first at once, and nobody
needs to be told the second.
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
# Of each length of a match.
COPY_WEIGHT = 1.0
# Counts beyond so many tokens change nothing and would fill the memory.
MOST_TOKENS = 20_000_000


def new_head_config(base: DRelayConfig, fields: dict) -> DRelayConfig:
    """The configuration of `base` with other `fields` of its head."""
    own = {name: getattr(base, name) for name in DRelayConfig.own_fields()}
    own |= {name: getattr(base, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if "head" in fields:
        del own["use_selector"]  # follows from the head
    return DRelayConfig(**own | fields)


def with_new_head(base: DRelayModel, fields: dict) -> DRelayModel:
    """
    The backbone of `base` under a new, untrained head; `fields` are those of the configuration that differ.

    Raises:
        ValueError: If the fields change the backbone.
    """
    drelay = DRelayModel(new_head_config(base.config, fields))
    if base.config.draft_vocab_size is not None:
        drelay.set_shortlist(base.drafter.draft_token_ids)
    own, trained = drelay.drafter.state_dict(), base.drafter.state_dict()
    different = [name for name in trained if name not in own or own[name].shape != trained[name].shape]
    if different:
        raise ValueError(
            f"The fields {sorted(fields)} of a new head change the backbone that is to be kept: its `{different[0]}` "
            "has no place any more. Set fields of the head alone."
        )
    drelay.drafter.load_state_dict(trained, strict=False)  # convolutions may be new, and start as nothing
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
    before, after, num_tokens = [], [], 0
    for example in examples:
        if num_tokens > MOST_TOKENS:
            break
        num_tokens += len(example.input_ids)
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

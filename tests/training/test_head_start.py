"""What a relay head counts before it is trained, against counts by hand."""

import math

import pytest
import torch

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.training.data import ResponseExample
from hf_drelay.training.head_start import PAIR_WEIGHT, SMOOTHING, count_pairs, pair_scores, start_from_counts


V, VD = 12, 7
SIZES = {
    "vocab_size": V,
    "hidden_size": 8,
    "num_target_layers": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "block_size": 3,
    "pool_size": 4,
    "selector_hidden_size": 8,
    "pair_rank": 8,
    "layout": "shifted",
}
SHORTLIST = [0, 2, 3, 5, 7, 8, 11]


def build(**fields) -> DRelayModel:
    torch.manual_seed(0)
    drelay = DRelayModel(DRelayConfig(**SIZES | fields)).eval()
    if fields.get("draft_vocab_size"):
        drelay.set_shortlist(torch.tensor(SHORTLIST))
    return drelay


def example(prompt: list[int], response: list[int]) -> ResponseExample:
    return ResponseExample(torch.tensor(prompt + response), len(prompt), "", "greedy")


EXAMPLES = [example([1, 9, 2], [3, 5, 3, 5, 8]), example([4, 4], [3, 5, 2, 9, 3])]


def test_pairs_start_at_the_last_token_of_the_prompt():
    counts = count_pairs(EXAMPLES, build().selector).to_dense()
    seen = {(2, 3): 1, (3, 5): 3, (5, 3): 1, (5, 8): 1, (4, 3): 1, (5, 2): 1, (2, 9): 1, (9, 3): 1}
    assert {(y, c): counts[y, c].item() for y, c in counts.nonzero().tolist()} == seen


def test_tokens_outside_the_shortlist_share_a_row_and_follow_nothing():
    counts = count_pairs(EXAMPLES, build(draft_vocab_size=VD).selector).to_dense()
    row = SHORTLIST.index
    seen = {(row(2), row(3)): 1, (row(3), row(5)): 3, (row(5), row(3)): 1, (row(5), row(8)): 1, (row(5), row(2)): 1}
    assert {(y, c): n.item() for (y, c), n in zip(counts.nonzero().tolist(), counts[counts > 0], strict=True)} == (
        seen | {(VD, row(3)): 2}
    )


def test_differences_of_scores_are_those_of_smoothed_log_probabilities():
    """Under one predecessor, which is all that a choice among candidates sees."""
    pairs = count_pairs(EXAMPLES, build().selector)
    scores, counts = pair_scores(pairs).to_dense(), pairs.to_dense()
    shares = (counts.sum(0) + 0.5) / (counts.sum(0) + 0.5).sum()
    for y in range(V):
        conditional = (counts[y] + SMOOTHING * shares) / (counts[y].sum() + SMOOTHING)
        ratio = (conditional / shares).log()
        torch.testing.assert_close(scores[y] - scores[y, 0], ratio - ratio[0])


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": VD}, {"pair_rank": 40}])
def test_head_starts_with_a_share_of_the_scores(fields):
    """With as many directions as tokens the factors lose nothing."""
    drelay = build(**{"pair_rank": V} | fields)
    before = torch.get_rng_state()
    start_from_counts(drelay, EXAMPLES)
    assert torch.equal(torch.get_rng_state(), before)
    path = drelay.selector.pair_path
    rows = torch.arange(drelay.selector.num_predecessors)
    candidates = torch.arange(drelay.selector.num_successors)[None, None].expand(1, len(rows), -1)
    scores = path(torch.randn(1, len(rows), SIZES["hidden_size"]), candidates, rows[None])[0]
    expected = PAIR_WEIGHT * pair_scores(count_pairs(EXAMPLES, drelay.selector)).to_dense()
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_few_directions_keep_the_frequent_pairs():
    drelay = build(pair_rank=2)
    start_from_counts(drelay, EXAMPLES)
    path = drelay.selector.pair_path
    scores = path(torch.zeros(1, 1, 8), torch.arange(V)[None, None], torch.tensor([[3]]))[0, 0]
    shares = pair_scores(count_pairs(EXAMPLES, drelay.selector)).to_dense()[3]
    assert scores.argmax() == shares.argmax() == 5 and math.isfinite(scores.abs().max())


def test_parts_that_are_off_and_other_heads_are_left_alone():
    for fields in ({"head": "markov"}, {"head": "independent"}, {"copy_order": 0, "pair_rank": 0}):
        drelay = build(**fields)
        before = {name: weight.clone() for name, weight in drelay.state_dict().items()}
        start_from_counts(drelay, EXAMPLES)
        torch.testing.assert_close(drelay.state_dict(), before)

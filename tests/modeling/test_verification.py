"""A walk over any logits and any draft commits what plain decoding of these logits would have committed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria

from hf_drelay.modeling.draft_tree import DraftTree
from hf_drelay.modeling.sampling_noise import SamplingNoise
from hf_drelay.modeling.step_outputs import StepOutputs
from hf_drelay.modeling.verification import (
    GreedyPicker,
    NoisePicker,
    RejectionPicker,
    RowDraft,
    RowGroup,
    StopRule,
    Verifier,
)


V, PROMPT = 5, [1, 2]


@st.composite
def cases(draw):
    """A table of next tokens, drafts of some rows, an end token, and a length limit."""
    table = draw(st.lists(st.integers(0, V - 1), min_size=V, max_size=V))
    drafts = draw(st.lists(st.lists(st.integers(0, V - 1), max_size=5), min_size=1, max_size=3))
    depth = min(len(draft) for draft in drafts)
    return table, [draft[:depth] for draft in drafts], draw(st.integers(0, V)), draw(st.integers(3, 9))


def verifier(picker, end, max_length, **wanted) -> Verifier:
    criteria = [MaxLengthCriteria(max_length), EosTokenCriteria(end)]
    outputs = StepOutputs(GenerationConfig(**wanted))
    return Verifier(picker, StopRule(criteria), 0, None, outputs)


def verified_logits(table, anchors, drafts) -> torch.Tensor:
    """Logits `(G, N, V)` of a target that writes `table[x]` after `x`."""
    fed = torch.tensor([[anchor, *draft] for anchor, draft in zip(anchors, drafts, strict=True)])
    return 9.0 * torch.nn.functional.one_hot(torch.tensor(table)[fed], V).float()


def write(table, end, max_length, num_steps, num_rows) -> list[list[int]]:
    """Plain decoding, one token after the other."""
    rows = [list(PROMPT) for _ in range(num_rows)]
    for row in rows:
        while len(row) < len(PROMPT) + num_steps:
            has_ended = end in row[len(PROMPT) :] or len(row) >= max_length
            row.append(0 if has_ended else table[row[-1]])
    return rows


@settings(max_examples=200, deadline=None)
@given(cases())
def test_walk_commits_the_accepted_prefix_and_one_more_token(case):
    table, drafts, end, max_length = case
    group = RowGroup(list(range(len(drafts))), torch.tensor([PROMPT] * len(drafts)), len(PROMPT))
    logits = verified_logits(table, [PROMPT[-1]] * len(drafts), drafts)
    own = [RowDraft(DraftTree.chain(draft)) for draft in drafts]
    walk = verifier(GreedyPicker(), end, max_length).walk(group, logits, own, lambda places: None)
    num_drafts = len(drafts[0])
    assert 1 <= walk.num_steps <= num_drafts + 1
    assert group.input_ids.tolist() == write(table, end, max_length, walk.num_steps, len(drafts))
    assert group.input_ids.shape[1] <= max_length
    for row, (draft, places) in enumerate(zip(drafts, walk.places, strict=True)):
        committed = walk.token_ids[row]
        num_texts = walk.num_texts[row]
        assert committed[: num_texts - 1] == draft[: num_texts - 1]  # all text but the newest was drafted
        assert places[:num_texts] == list(range(num_texts))
        assert len(committed) == len(places) == walk.num_steps
    if not group.is_done and walk.num_steps <= num_drafts:  # it went as far as the rows agree
        newest = walk.num_steps - 1
        last = [ids[newest] != draft[newest] for ids, draft in zip(walk.token_ids, drafts, strict=True)]
        assert any(last)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_tree_commits_what_a_chain_of_its_accepted_path_commits(case):
    table, drafts, end, max_length = case
    # The drafts of all rows as branches of one tree.
    tree = DraftTree()
    for draft in drafts:
        place = 0
        for token in draft:
            place = tree.child(place, token) or tree.graft(place, DraftTree.chain([token]))[0]
    fed = [PROMPT[-1], *tree.token_ids]
    logits = 9.0 * torch.nn.functional.one_hot(torch.tensor(table)[torch.tensor([fed])], V).float()
    group = RowGroup([0], torch.tensor([PROMPT]), len(PROMPT))
    walk = verifier(GreedyPicker(), end, max_length).walk(group, logits, [RowDraft(tree)], lambda places: None)
    path = [fed[place] for place in walk.places[0]][1:]
    chain = RowGroup([0], torch.tensor([PROMPT]), len(PROMPT))
    logits = verified_logits(table, PROMPT[-1:], [path])
    own = [RowDraft(DraftTree.chain(path))]
    other = verifier(GreedyPicker(), end, max_length).walk(chain, logits, own, lambda places: None)
    assert torch.equal(group.input_ids, chain.input_ids) and other.num_steps == walk.num_steps


@pytest.mark.parametrize("num_rows", [1, 3])
def test_noise_draws_the_tokens_of_multinomial(num_rows):
    probs = torch.rand(7, num_rows, 11).softmax(dim=-1)
    torch.manual_seed(4)
    expected = [torch.multinomial(p, 1)[:, 0].tolist() for p in probs]
    after = torch.rand(2)
    torch.manual_seed(4)
    noise = SamplingNoise(num_rows, 11, torch.device("cpu"))
    noise.at(9)  # ahead of what is needed
    assert [noise.pick(p, step, list(range(num_rows))).tolist() for step, p in enumerate(probs)] == expected
    noise.rewind(7)
    assert torch.equal(torch.rand(2), after)


def test_forgotten_steps_are_not_drawn_again():
    noise = SamplingNoise(1, 3, torch.device("cpu"))
    kept = noise.at(4).clone()
    noise.forget(4)
    assert torch.equal(noise.at(4), kept)
    with pytest.raises(KeyError):
        noise.at(2)


def test_gumbel_noise_of_a_candidate_is_that_of_its_token():
    noise = SamplingNoise(2, 6, torch.device("cpu"))
    ids = torch.tensor([[4, 0], [1, 5]])
    expected = [[-noise.at(3)[1, token].log() for token in row] for row in ids.tolist()]
    assert torch.allclose(noise.gumbel(3, 1, ids), torch.tensor(expected))


def test_draft_is_taken_when_q_is_p_and_never_when_p_lacks_it():
    ids, q = torch.tensor([[0, 1, 2]]), torch.tensor([[0.2, 0.3, 0.5]])
    draft = RowDraft(DraftTree.chain([2]), ids, q.log())
    p = torch.tensor([0.2, 0.3, 0.5, 0.0])
    assert all(RejectionPicker._row(p, draft, 0).item() == 2 for _ in range(50))
    p = torch.tensor([0.5, 0.0, 0.0, 0.5])
    assert {RejectionPicker._row(p, draft, 0).item() for _ in range(50)} == {0, 3}


@pytest.mark.parametrize("picker", [GreedyPicker(), NoisePicker(SamplingNoise(1, V, torch.device("cpu")))])
def test_scores_of_committed_places_are_collected(picker):
    group = RowGroup([0], torch.tensor([PROMPT]), len(PROMPT))
    logits = torch.zeros(1, 3, V)
    logits[0, 0, 3], logits[0, 1, 4] = 50.0, 50.0
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    own = verifier(picker, V, 9, **wanted)
    walk = own.walk(group, logits, [RowDraft(DraftTree.chain([3, 0]))], lambda places: None)
    assert walk.token_ids == [[3, 4]]
    assert torch.equal(torch.stack(own.outputs.scores, dim=1), logits[:, :2])

"""The copy path: counts of what followed the same tokens earlier in the text, and where the text comes from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_drelay.modeling.draft_session import DraftSession
from hf_drelay.modeling.modeling_copy import copy_counts


ALWAYS = float("-inf")


def naive_counts(text: list[int], path: list[int], candidates: list[list[int]], order: int) -> list:
    """One place, candidate and length at a time."""
    counts = []
    for slot, own in enumerate(candidates):
        known = text + path[: len(path) - len(candidates) + slot + 1]
        row = []
        for token in own:
            row.append([])
            for n in range(1, order + 1):
                ends = range(n, len(known)) if len(known) >= n else ()
                row[-1].append(sum(known[e - n : e] == known[-n:] and known[e] == token for e in ends))
        counts.append(row)
    return counts


tokens = st.integers(0, 3)  # so few that texts repeat themselves


@settings(max_examples=80, deadline=None)
@given(
    texts=st.lists(st.lists(tokens, max_size=12), min_size=1, max_size=3),
    path=st.lists(tokens, min_size=1, max_size=5),
    num_slots=st.integers(1, 5),
    order=st.integers(1, 4),
    data=st.data(),
)
def test_counts_are_those_of_a_search_through_every_row(texts, path, num_slots, order, data):
    num_slots = min(num_slots, len(path))
    one = st.lists(st.lists(tokens, min_size=2, max_size=2), min_size=num_slots, max_size=num_slots)
    candidates = [data.draw(one) for _ in texts]
    longest = max(map(len, texts))
    padded = torch.tensor([[-1] * (longest - len(text)) + text for text in texts], dtype=torch.long)
    paths = torch.tensor([path] * len(texts))
    counts = copy_counts(padded.view(len(texts), longest), paths, torch.tensor(candidates), order)
    assert counts.tolist() == [naive_counts(t, path, c, order) for t, c in zip(texts, candidates, strict=True)]


def test_slots_scored_together_see_what_each_sees_alone():
    generator = torch.Generator().manual_seed(0)
    text, path = torch.randint(3, (2, 20), generator=generator), torch.randint(3, (2, 6), generator=generator)
    candidates = torch.randint(3, (2, 6, 3), generator=generator)
    together = copy_counts(text, path, candidates, 3)
    assert together.any()
    for slot in range(6):
        alone = copy_counts(text, path[:, : slot + 1], candidates[:, slot : slot + 1], 3)
        assert torch.equal(alone[:, 0], together[:, slot])


def copies_alone(toolbox, target, **fields):
    """A drafter whose head repeats the text wherever it can."""
    parts = ("use_global_read", "use_history_read", "use_prefix_read", "use_rank_head", "use_repair_gate")
    drafter = toolbox.drafter(target, pair_rank=0, **dict.fromkeys(parts, False), **fields)
    with torch.no_grad():
        drafter.selector.copy_path.weight_proj.weight.zero_()
        drafter.selector.copy_path.weight_proj.bias.fill_(50.0)
    return drafter


@pytest.fixture
def seen(monkeypatch) -> list[list[int]]:
    """Texts that stages started behind."""
    texts, begin = [], DraftSession.begin_stage

    def note(self, input_ids):
        begin(self, input_ids)
        texts.append([*self.text_ids[0].tolist(), *self.anchor_ids.tolist()])

    monkeypatch.setattr(DraftSession, "begin_stage", note)
    return texts


def test_text_of_a_batch_is_that_of_its_rows(toolbox, seen):
    """Padding is no text, stages see the drafts before them, and rows drafted together have texts of their own."""
    target = toolbox.target("qwen3")
    prompts = [toolbox.prompt(length, seed=row) for row, length in enumerate((9, 4, 12))]
    drafter = copies_alone(toolbox, target)
    texts = {}
    for row, prompt in enumerate(prompts):
        seen.clear()
        ids = toolbox.greedy(target, prompt, drafter.with_options(loop_gate=ALWAYS, max_stages=2))
        texts[row] = (ids[0].tolist(), set(map(tuple, seen)))
        assert all(text[: prompt.shape[1]] == prompt[0].tolist() for text in seen)
    seen.clear()
    ids = torch.zeros(3, 12, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 12 - prompt.shape[1] :] = prompt[0]
    view = drafter.with_options(loop_gate=ALWAYS, max_stages=2)
    output = toolbox.greedy(target, ids, view, attention_mask=(ids != 0).long())
    for row, prompt in enumerate(prompts):
        assert output[row, 12 - prompt.shape[1] :].tolist() == texts[row][0]
    assert set(map(tuple, seen)) == set.union(*(stages for _, stages in texts.values()))


@pytest.mark.parametrize("loop", ["own", "host"])
def test_padding_of_one_row_is_no_text(toolbox, seen, loop):
    target, prompt = toolbox.target("qwen3"), toolbox.prompt(5)
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=1)
    view = copies_alone(toolbox, target).with_options(decoding_loop=loop)
    toolbox.greedy(target, ids, view, attention_mask=(ids != 0).long())
    assert seen and all(text[:5] == prompt[0].tolist() for text in seen)


def test_second_turn_knows_the_text_of_the_first(toolbox, seen):
    """Also the part whose features the drafter never sees, because the cache came filled."""
    target, prompt = toolbox.target("qwen3"), toolbox.prompt(9)
    view = copies_alone(toolbox, target).with_options()
    turn = toolbox.greedy(target, prompt, view, max_new_tokens=8, return_dict_in_generate=True)
    whole = torch.cat([turn.sequences, toolbox.prompt(4, seed=8)], dim=1)
    seen.clear()
    toolbox.greedy(target, whole, view, max_new_tokens=8, **{toolbox.cache_keyword(): turn.past_key_values})
    assert seen and all(text[: whole.shape[1]] == whole[0].tolist() for text in seen)


def test_mixed_precision_leaves_the_scores_exact(toolbox):
    path = copies_alone(toolbox, toolbox.target("qwen3")).selector.copy_path
    text, candidates = torch.full((1, 900), 3), torch.tensor([[[3, 5]]])
    arguments = (torch.zeros(1, 1, path.weight_proj.in_features), text, torch.tensor([[3]]), candidates)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = path(*arguments)
    assert torch.equal(mixed, path(*arguments)) and mixed.dtype == torch.float32


def test_a_text_that_repeats_itself_is_drafted_from_the_repetition(toolbox):
    """The target goes round in a circle; a drafter that knows nothing but the text finds it."""
    cycle = [3, 5, 2, 7]
    table = torch.full((8, 8), -8.0)
    for token, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        table[token, following] = 8.0
    target = toolbox.table_target(table)
    prompt = torch.tensor([cycle * 3])
    drafter = copies_alone(toolbox, target, pool_size=8, layout="shifted")
    view = drafter.with_options(loop_gate=None)
    ids = toolbox.greedy(target, prompt, view, max_new_tokens=43)
    assert ids[0].tolist() == (cycle * 14)[:55]
    assert view.statistics.acceptance_length == drafter.config.num_drafts + 1
    nothing = copies_alone(toolbox, target, pool_size=8, layout="shifted", copy_window=1).with_options(loop_gate=None)
    toolbox.greedy(target, prompt, nothing, max_new_tokens=43)
    assert nothing.statistics.acceptance_length < view.statistics.acceptance_length

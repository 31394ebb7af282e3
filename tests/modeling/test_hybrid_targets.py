"""Targets with recurrent layers cannot take a token back: states are restored, and accepted tokens fed again."""

import itertools

import pytest
import torch

from hf_drelay.modeling import cache_rollback
from hf_drelay.modeling.cache_rollback import CacheRollback
from hf_drelay.modeling.candidate_generator import DRelayCandidateGenerator
from hf_drelay.modeling.draft_tree import DraftTree


ALWAYS = float("-inf")
BLOCK = 4  # drafts of a stage
both = pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])


def drafter_that_fails_at(toolbox, target, text, places):
    """A drafter that is right everywhere but at the given places of the text."""
    drafter = toolbox.scripted(target, text, spoiled=0.0, selector_scale=0.0, use_selector=False)
    for place in places:
        drafter.script.reference_ids[place] = (text[place] + 1) % toolbox.VOCAB_SIZE
    return drafter


@both
@pytest.mark.parametrize("slot", range(BLOCK + 1))
@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
def test_text_equals_plain_decoding_when_a_draft_is_rejected_at_any_slot(toolbox, record, name, slot, gate):
    target, prompt = toolbox.hybrid(name), toolbox.prompt(9)
    expected = toolbox.greedy(target, prompt, max_new_tokens=40)
    text = expected[0].tolist()
    # Rejected again and again at this slot of the round, until everything is wrong for a while.
    wrong = list(range(10 + slot, len(text), slot + 1)) if slot < BLOCK else []
    view = drafter_that_fails_at(toolbox, target, text, wrong).with_options(loop_gate=gate)
    assert torch.equal(toolbox.greedy(target, prompt, view, max_new_tokens=40), expected)
    rejected_at = {r.num_accepted for r in record.rounds if r.num_accepted < len(r.draft_ids)}
    assert slot == BLOCK or slot in rejected_at


@both
@pytest.mark.parametrize("gate", [None, ALWAYS, "auto"], ids=["one_stage", "always", "auto"])
def test_sampled_text_is_that_of_plain_sampling(toolbox, name, gate):
    target, prompt = toolbox.hybrid(name), toolbox.prompt(9)
    kwargs = {"do_sample": True, "max_new_tokens": 40, "attention_mask": torch.ones_like(prompt)}
    torch.manual_seed(0)
    expected = target.generate(prompt, **kwargs)
    view = toolbox.scripted(target, expected[0].tolist()).with_options(loop_gate=gate, proposal="coupled")
    torch.manual_seed(0)
    assert torch.equal(target.generate(prompt, assistant_model=view, **kwargs), expected)


@both
def test_batch_equals_plain_decoding(toolbox, monkeypatch, name):
    target = toolbox.hybrid(name)
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), toolbox.prompt(5)], dim=1)
    ids = torch.cat([ids, toolbox.prompt(9, seed=1)])
    mask = (ids != 0).long()
    expected = toolbox.greedy(target, ids, attention_mask=mask)
    texts = [expected[0, 4:].tolist(), expected[1].tolist()]
    view = toolbox.scripted_batch(monkeypatch, target, texts).with_options(loop_gate=ALWAYS)
    assert torch.equal(toolbox.greedy(target, ids, view, attention_mask=mask), expected)
    assert view.statistics.acceptance_length > 1


@both
def test_second_turn_with_the_returned_cache_equals_a_fresh_run(toolbox, name):
    target, prompt = toolbox.hybrid(name), toolbox.prompt(9)
    first = toolbox.greedy(target, prompt, max_new_tokens=13)
    whole = torch.cat([first, toolbox.prompt(4, seed=8)], dim=1)
    expected = toolbox.greedy(target, whole, max_new_tokens=20)
    view = toolbox.scripted(target, expected[0].tolist()).with_options(loop_gate=ALWAYS)
    turn = toolbox.greedy(target, prompt, view, max_new_tokens=13, return_dict_in_generate=True)
    assert turn.past_key_values.get_seq_length() == whole.shape[1] - 5
    kwargs = {toolbox.cache_keyword(): turn.past_key_values, "max_new_tokens": 20}
    assert torch.equal(toolbox.greedy(target, whole, view, **kwargs), expected)


@both
@pytest.mark.parametrize("every", [0, 2, 3], ids=["never_drafts", "every_second_round", "every_third_round"])
def test_states_are_kept_only_before_rounds_with_drafts(toolbox, monkeypatch, name, every):
    target, prompt = toolbox.hybrid(name), toolbox.prompt(9)
    expected = toolbox.greedy(target, prompt)
    events, count = [], itertools.count(1)
    stages, snapshot = DRelayCandidateGenerator.stages, cache_rollback._snapshot

    def sometimes(self, input_ids):
        if not every or next(count) % every:
            self.blocks, self.tree = [], DraftTree()
            events.append("plain")
            return []
        events.append("drafts")
        return (yield from stages(self, input_ids))

    monkeypatch.setattr(DRelayCandidateGenerator, "stages", sometimes)
    monkeypatch.setattr(cache_rollback, "_snapshot", lambda layer: (events.append("kept"), snapshot(layer))[1])
    view = toolbox.scripted(target, expected[0].tolist()).with_options()
    assert torch.equal(toolbox.greedy(target, prompt, view), expected)
    before = [events[i - 1] for i, event in enumerate(events) if event == "kept" and events[i - 1] != "kept"]
    assert set(before) == ({"drafts"} if every else set())


def test_tokens_that_wait_for_a_replay_are_fed_before_there_are_too_many(toolbox, monkeypatch):
    target, prompt = toolbox.hybrid("qwen3_5"), toolbox.prompt(9)
    expected = toolbox.greedy(target, prompt, max_new_tokens=60)
    waiting = []
    begin = CacheRollback.begin
    monkeypatch.setattr(
        CacheRollback, "begin", lambda self, takes_back: (waiting.append(self.num_pending), begin(self, takes_back))[1]
    )
    view = toolbox.drafter(target).with_options()  # random weights: every draft is wrong
    assert torch.equal(toolbox.greedy(target, prompt, view, max_new_tokens=60), expected)
    assert 8 < max(waiting) <= 32


def test_attentions_are_those_of_plain_decoding(toolbox):
    """Layers with a recurrent state return none."""
    target, prompt = toolbox.hybrid("qwen3_5"), toolbox.prompt(9)
    implementation = target.config._attn_implementation
    target.set_attn_implementation("eager")
    try:
        kwargs = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 12}
        expected = toolbox.greedy(target, prompt, **kwargs)
        view = toolbox.scripted(target, expected.sequences[0].tolist()).with_options(loop_gate=ALWAYS)
        output = toolbox.greedy(target, prompt, view, **kwargs)
    finally:
        target.set_attn_implementation(implementation)
    assert torch.equal(output.sequences, expected.sequences)
    assert len(output.attentions) == len(expected.attentions)
    for own, other in zip(output.attentions[1:], expected.attentions[1:], strict=True):
        assert len(own) == len(other) > 0
        for a, b in zip(own, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_tree_is_refused_because_states_cannot_branch(toolbox):
    target, prompt = toolbox.hybrid("qwen3_5"), toolbox.prompt(9)
    with pytest.raises(ValueError, match=r"`tree_budget` 4 needs a target whose cache keeps one slot.*Leave"):
        toolbox.greedy(target, prompt, toolbox.drafter(target).with_options(tree_budget=4))


def test_host_refuses_the_target(toolbox):
    target, prompt = toolbox.hybrid("qwen3_5"), toolbox.prompt(9)
    with pytest.raises(NotImplementedError, match="that the host's loop can roll back, .*'linear_attention'"):
        toolbox.greedy(target, prompt, toolbox.drafter(target).with_options(decoding_loop="host"))

"""Rows drafted together get the drafts that they get alone, whatever their context lengths and the drafter."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from hf_drelay.modeling import batch_drafting, candidate_generator
from hf_drelay.modeling.batch_drafting import draft_rounds


ALWAYS = float("-inf")
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
DRAFTERS = {
    "relay": {},
    "relay_shifted": {"layout": "shifted"},
    "independent": {"head": "independent"},
    "bilinear": {"head": "bilinear", "head_rank": 6, "conv_kernel_size": 2, "conv_group_size": 4},
    "recurrent": {"head": "recurrent", "head_rank": 6, "gru_hidden_dim": 8},
    "markov": {"head": "markov", "head_rank": 6, "layout": "shifted"},
    "sliding": {"num_hidden_layers": 2, **SLIDING},
}


def generators(drafter, target, lengths, **options):
    """A candidate generator for each row, fed with the states of all tokens but the last; and the tokens."""
    view = drafter.with_options(**options)
    made, rows = [], []
    for row, length in enumerate(lengths):
        ids = torch.randint(1, 40, (1, length), generator=torch.Generator().manual_seed(row))
        config = GenerationConfig(do_sample=False, max_length=length + 30)
        generator = view.build_candidate_generator(target, config, ids, LogitsProcessorList(), {})
        with torch.no_grad():
            hidden = target(ids[:, : max(1, length - 1)], output_hidden_states=True).hidden_states
        states = generator.adapter.tapped(hidden, drafter.config.target_layer_ids)
        generator.feed(states[:, : length - 1])
        made.append(generator)
        rows.append(ids)
    return made, rows


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("gate", [None, -6.0, ALWAYS], ids=["one_stage", "sometimes", "loop"])
def test_rows_drafted_together_equal_rows_drafted_alone(toolbox, monkeypatch, name, implementation, gate):
    target = toolbox.target("llama")
    drafter = toolbox.drafter(target, **DRAFTERS[name])
    drafter.set_attn_implementation(implementation)
    lengths, options = [9, 2, 1, 14, 9], {"loop_gate": gate, "max_stages": 3, "num_draft_tokens": 3}
    alone, rows = generators(drafter, target, lengths, **options)
    expected = [generator.draft_round(ids) for generator, ids in zip(alone, rows, strict=True)]
    together, rows = generators(drafter, target, lengths, **options)
    sizes = []
    stage = batch_drafting._draft_stage
    monkeypatch.setattr(batch_drafting, "_draft_stage", lambda rows: (sizes.append(len(rows)), stage(rows))[1])
    found = draft_rounds(together, rows)
    assert max(sizes) > 1
    for own, other in zip(found, expected, strict=True):
        assert len(own) == len(other)
        for block, wanted in zip(own, other, strict=True):
            assert block.draft_ids.tolist() == wanted.draft_ids.tolist()
            assert block.pool_ids.tolist() == wanted.pool_ids.tolist()
            torch.testing.assert_close(block.selection_logits, wanted.selection_logits, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(block.slot_log_confidence, wanted.slot_log_confidence, rtol=1e-3, atol=1e-4)
    for own, other in zip(together, alone, strict=True):
        assert own.tree.token_ids == other.tree.token_ids
        assert own.session.cache.get_seq_length() == other.session.cache.get_seq_length()


def stage_sizes(monkeypatch) -> list[int]:
    """Number of rows of each stage that is drafted from now on."""
    sizes = []
    stage = batch_drafting._draft_stage
    monkeypatch.setattr(batch_drafting, "_draft_stage", lambda rows: (sizes.append(len(rows)), stage(rows))[1])
    return sizes


def test_rows_with_trees_are_drafted_alone(toolbox, monkeypatch):
    target = toolbox.target("llama")
    made, rows = generators(toolbox.drafter(target), target, [9, 9], tree_budget=5)
    sizes = stage_sizes(monkeypatch)
    draft_rounds(made, rows)
    assert set(sizes) == {1}


def test_stage_of_rows_drafted_alone_costs_what_all_of_them_take(toolbox):
    target = toolbox.target("llama")
    made, rows = generators(toolbox.drafter(target), target, [9, 9], loop_gate="auto", max_stages=1, tree_budget=5)
    cost_model, ticks = made[0].cost_model, iter(range(100))
    cost_model.num_rows, cost_model.drafts = 2, lambda: True
    cost_model.clock = lambda: 1e-3 * next(ticks)  # each row takes one
    draft_rounds(made, rows)
    assert cost_model.draft_ms.value == pytest.approx(2.0)


@pytest.mark.parametrize("is_free", [True, False], ids=["ahead", "behind"])
def test_rows_share_the_plan_of_the_cost_aware_gate(toolbox, monkeypatch, is_free):
    # Beliefs of 0.9, 0.9 and 0.1 in one row, and of 0.3, 0.1 and 0.1 in the other. A token costs half a plain step.
    monkeypatch.setattr(candidate_generator, "look_is_free", lambda device: is_free)
    target = toolbox.target("llama")
    drafter = toolbox.drafter(target, use_selector=False)
    made, rows = generators(drafter, target, [9, 14], loop_gate="auto", max_stages=1, num_draft_tokens=3)
    beliefs = torch.tensor([[0.9, 0.9, 0.1], [0.3, 0.1, 0.1]]).log()
    right = drafter.head_inputs

    def head_inputs(*arguments):
        inputs = right(*arguments)
        inputs.pool.log_probs[..., 0] = beliefs
        return inputs

    monkeypatch.setattr(drafter, "head_inputs", head_inputs)
    cost_model = made[0].cost_model
    for num_tokens in (1, 2, 3, 4):
        cost_model.verify_ms.observe(num_tokens, 30.0 + 15.0 * (num_tokens - 1))
    cost_model.plain_ms.add(30.0)
    cost_model.drafts, cost_model.PRIOR = (lambda: True), 1e9
    ticks = iter((0.0, 0.008))
    cost_model.clock = lambda: next(ticks)
    sizes = stage_sizes(monkeypatch)
    found = draft_rounds(made, rows)
    assert sizes == [2]
    assert [[block.num_tokens for block in own] for own in found] == [[1], [1]]  # (0.9 + 0.3) / 2 pays, the next not
    assert [generator.beliefs for generator in made] == [[[pytest.approx(0.9)]], [[pytest.approx(0.3)]]]
    assert cost_model.draft_ms.value == pytest.approx(8.0)  # for both rows

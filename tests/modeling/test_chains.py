"""Drafters that go token by token in our own loop: coupled with the target's noise, in trees, and with the cost-aware
gate. Plain decoding is the oracle of the text, an enumeration of all paths that of a tree.
"""

from collections import Counter

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from hf_drelay.modeling import candidate_generator, verification
from hf_drelay.modeling.candidate_generator import DRelayCandidateGenerator
from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.modeling.modeling_heads import Pool


ALWAYS = float("-inf")
EAGLE3 = {"backbone": "eagle3", "layout": "shifted", "num_hidden_layers": 1, "use_mask_embedding": False}
OPTIONS = {
    "chain": {},
    "loop": {"loop_gate": ALWAYS},
    "tree": {"tree_budget": 6},
    "loop+tree": {"loop_gate": ALWAYS, "tree_budget": 6},
    "auto": {"loop_gate": "auto"},
    "auto+tree": {"loop_gate": "auto", "tree_budget": 6},
}


@pytest.fixture(scope="module")
def target(toolbox):
    return toolbox.target("qwen3")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_greedy_text_is_the_targets_own(toolbox, target, options):
    prompt = toolbox.prompt(9)
    expected = toolbox.greedy(target, prompt)
    view = toolbox.with_free_costs(toolbox.scripted(target, expected[0].tolist(), **EAGLE3).with_options(**options))
    assert torch.equal(toolbox.greedy(target, prompt, view), expected)
    assert view.statistics.num_rounds > 4 and view.statistics.acceptance_length > 1.2


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_coupled_text_is_that_of_plain_sampling(toolbox, monkeypatch, target, options):
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), toolbox.prompt(5)], dim=1)
    ids = torch.cat([ids, toolbox.prompt(9, seed=1)])
    kwargs = {"do_sample": True, "attention_mask": (ids != 0).long(), "max_new_tokens": 24, "top_k": 0}
    torch.manual_seed(2)
    expected, after = target.generate(ids, **kwargs), torch.rand(1)
    texts = [row[row.ne(0).int().argmax() :].tolist() for row in expected]
    drafter = toolbox.scripted_batch(monkeypatch, target, texts, **EAGLE3)
    view = toolbox.with_free_costs(drafter.with_options(proposal="coupled", **options), 2)
    torch.manual_seed(2)
    assert torch.equal(target.generate(ids, assistant_model=view, **kwargs), expected)
    assert torch.equal(torch.rand(1), after)
    assert view.statistics.num_rounds > 4


def test_coupled_drafts_hit_more_often_than_the_likeliest_tokens(toolbox):
    # A chain whose q is the target's p: coupled drafts are always right.
    table = torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    target, prompt = toolbox.table_target(table), torch.tensor([[1, 2]])
    fields = {**EAGLE3, "pool_size": 12, "block_size": 3, "target_layer_ids": [0]}
    drafter = toolbox.drafter(target, **fields)
    law = {}
    advance = drafter.drafter.advance

    def advance_and_note(features, token_ids, *args):
        law["logits"] = target(token_ids[:, -1:]).logits
        return advance(features, token_ids, *args)

    drafter.drafter.advance = advance_and_note
    drafter.drafter.logits = lambda states, adapter: law["logits"]
    accepted = {}
    for proposal in ("coupled", "greedy"):
        view = drafter.with_options(proposal=proposal)
        torch.manual_seed(0)
        kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": 90, "attention_mask": torch.ones_like(prompt)}
        target.generate(prompt, assistant_model=view, **kwargs)
        accepted[proposal] = view.statistics.acceptance_by_slot
    assert accepted["coupled"] == [1.0] * 3
    assert accepted["greedy"][0] < 0.8


def generator(drafter, target, ids, **options):
    """A candidate generator that was fed with the states of all tokens but the last."""
    config = GenerationConfig(do_sample=False, max_length=ids.shape[1] + 60)
    made = drafter.with_options(**options).build_candidate_generator(target, config, ids, LogitsProcessorList(), {})
    with torch.no_grad():
        hidden = target(ids[:, :-1], output_hidden_states=True).hidden_states
    made.feed(made.adapter.tapped(hidden, drafter.config.target_layer_ids))
    return made


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 4, 11, 40])
def test_tree_holds_the_best_paths_of_all(toolbox, target, budget):
    drafter, ids = toolbox.drafter(target, **EAGLE3, pool_size=3, block_size=3), toolbox.prompt(9)
    made = generator(drafter, target, ids, tree_budget=budget)
    made.draft_round(ids)
    found = {
        tuple(made.tree.token_ids[p - 1] for p in made.tree.path(i)[1:]) for i in range(1, made.tree.num_nodes + 1)
    }
    scores = {}

    def visit(path, score):
        """Score the children of a path by a session of their own."""
        session = generator(drafter, target, ids, tree_budget=budget)
        session.stages(ids).send(None)
        session = session.session
        state = drafter.drafter.first_state(session, ids[:, -1:], ids)
        for token in path:
            state = drafter.drafter.next_state(session, state, torch.tensor([[token]]))
        pool = drafter.drafter.pool(state, session, len(path))
        for token, log_prob in zip(pool.ids[0, 0].tolist(), pool.log_probs[0, 0].tolist(), strict=True):
            scores[(*path, token)] = score + log_prob
            if len(path) < 2:
                visit((*path, token), score + log_prob)

    visit((), 0.0)
    assert found == set(sorted(scores, key=scores.get, reverse=True)[:budget])


def test_tree_accepts_more_than_a_chain(toolbox, target):
    prompt = toolbox.prompt(9)
    expected = toolbox.greedy(target, prompt, max_new_tokens=72)
    drafter = toolbox.scripted(target, expected[0].tolist(), spoiled=0.5, **EAGLE3)
    lengths = {}
    for budget in (None, 12):
        view = drafter.with_options(tree_budget=budget)
        assert torch.equal(toolbox.greedy(target, prompt, view, max_new_tokens=72), expected)
        lengths[budget] = view.statistics.acceptance_length
    assert lengths[12] > 1.1 * lengths[None]


@torch.no_grad()
def test_stage_behind_a_tree_is_that_behind_its_best_path(toolbox, target):
    # The drafter's cache holds the rows of the path that the next stage extends.
    drafter, ids = toolbox.drafter(target, **EAGLE3, block_size=3), toolbox.prompt(9)
    tree = generator(drafter, target, ids, tree_budget=5, loop_gate=ALWAYS, max_stages=2)
    path, second = tree.draft_round(ids)
    other = generator(drafter, target, ids, loop_gate=ALWAYS, max_stages=1)
    other.stages(ids).send(None)
    session, model = other.session, drafter.drafter
    state, states = model.first_state(session, ids[:, -1:], ids), []
    for token in path.draft_ids[0].tolist():
        states.append(state)
        state = model.next_state(session, state, torch.tensor([[token]]))
    torch.testing.assert_close(path.context_features, torch.cat(states, dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second.context_features[:, :1], state, rtol=1e-4, atol=1e-5)


LAW = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.3, 0.3, 0.4]])


def counts_of_pairs(toolbox, monkeypatch, cut, num_tokens=2500):
    """Pairs of tokens that a sampled call writes whose stages end where `cut` says."""
    target = toolbox.table_target(LAW.log())
    fields = {**EAGLE3, "pool_size": 3, "block_size": 3, "target_layer_ids": [0]}
    view = toolbox.drafter(target, **fields).with_options(loop_gate="auto")
    toolbox.with_free_costs(view)
    cut(monkeypatch)
    prompt = torch.tensor([[1]])
    torch.manual_seed(0)
    kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": num_tokens, "attention_mask": torch.ones_like(prompt)}
    ids = target.generate(prompt, assistant_model=view, **kwargs)[0].tolist()
    assert view.statistics.num_rounds > 300
    return Counter(zip(ids, ids[1:], strict=False))


def p_value(counts) -> float:
    from scipy import stats

    statistic = 0.0
    for row in range(3):
        total = sum(counts[row, token] for token in range(3))
        statistic += sum(
            (counts[row, t] - total * LAW[row, t].item()) ** 2 / (total * LAW[row, t].item()) for t in range(3)
        )
    return float(stats.chi2.sf(statistic, 6))


@pytest.mark.statistical
@pytest.mark.parametrize("is_queued", [False, True], ids=["looks", "queued"])
@pytest.mark.parametrize("anticipates", [False, True], ids=["before_the_token", "at_the_token"])
def test_gate_that_ends_a_chain_keeps_the_law_when_it_decides_before_the_token(
    toolbox, monkeypatch, anticipates, is_queued
):
    if is_queued:  # the gate is then asked about a whole chain that was drawn
        for module in (candidate_generator, verification):
            monkeypatch.setattr(module, "look_is_free", lambda device: False)

    def before(patch):
        # Strong and arbitrary: a function of what the drafter thinks of the slot.
        patch.setattr(DRelayCandidateGenerator, "_is_worth", lambda self, own, num_slots: int(-1e3 * own) % 3 != 0)

    def at(patch):
        right = DRelayCandidateGenerator._cut_stage
        patch.setattr(DRelayCandidateGenerator, "_is_worth", lambda self, own, num_slots: True)

        def cut_stage(self, block, input_ids):
            ends = [i for i, token in enumerate(block.numbers.draft_ids[0]) if token == 1]
            return right(self, block.first(ends[0]) if ends else block, input_ids)

        patch.setattr(DRelayCandidateGenerator, "_cut_stage", cut_stage)

    value = p_value(counts_of_pairs(toolbox, monkeypatch, at if anticipates else before))
    assert value < 1e-7 if anticipates else value > 1e-4


def test_slots_that_were_cut_do_not_count_as_rejected(toolbox, monkeypatch):
    # Behind token 1 nothing is left to draw in the second slot: its stage ends there, whatever the gate wanted.
    target, prompt = toolbox.table_target(torch.zeros(4, 4)), torch.tensor([[1, 2]])
    drafter = toolbox.drafter(target, **EAGLE3, block_size=2, pool_size=2, target_layer_ids=[0])

    def pool(states, session, slot):
        ids = torch.tensor([[[0, 1 if slot == 0 else 2]]])
        return Pool(ids, torch.zeros(1, 1, 2), torch.full((1, 1, 2), 0.5).log())

    monkeypatch.setattr(drafter.drafter, "pool", pool)
    view = toolbox.with_free_costs(drafter.with_options(proposal="sample", loop_gate="auto", max_stages=1))
    observed, right = [], view.cost_model().observe_acceptance

    def observe(stage_beliefs, *counts):
        observed.append(sum(len(beliefs) for beliefs in stage_beliefs))
        right(stage_beliefs, *counts)

    view.cost_model().observe_acceptance = observe
    torch.manual_seed(0)
    kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": 60, "attention_mask": torch.ones_like(prompt)}
    target.generate(prompt, assistant_model=view, bad_words_ids=[[1, 0], [1, 2]], **kwargs)
    assert observed == view.statistics.num_drafted and {1, 2} <= set(observed)


def test_price_of_a_slot_is_that_of_the_slots_that_were_looked_at(toolbox, monkeypatch, target):
    drafter, prompt = toolbox.drafter(target, **EAGLE3, block_size=4), toolbox.prompt(40)
    view = drafter.with_options(loop_gate="auto", max_stages=1)
    model, now = view.cost_model(), [0.0]
    model.clock, model.drafts = lambda: now[0], lambda: True
    right = drafter.drafter.advance

    def advance(features, *arguments):  # each row takes a second
        now[0] += features.shape[1]
        return right(features, *arguments)

    monkeypatch.setattr(drafter.drafter, "advance", advance)
    monkeypatch.setattr(DRelayCandidateGenerator, "_plan_slot", lambda self, pool: self.session.num_provisional < 2)
    toolbox.greedy(target, prompt, view, max_new_tokens=20)
    # Three slots are looked at to draft two; the first one also reads the token of the round before.
    assert model.slot_ms.value == pytest.approx(1000.0, rel=0.35)


def test_options_are_no_longer_refused_for_chains(toolbox, target):
    model = DRelayModel(DRelayConfig.for_target(target.config, block_size=4, pool_size=8, **EAGLE3))
    for options in OPTIONS.values():
        assert model.with_options(proposal="coupled", **options).options.proposal == "coupled"

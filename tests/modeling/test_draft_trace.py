"""The trace of a call: its rounds add up to the text, and each token's origin is what really happened."""

import threading

import pytest
import torch

from hf_drelay.modeling.draft_trace import ORIGINS, DraftTrace, TracedRound, TracedStage


ALWAYS = float("-inf")


@pytest.fixture(scope="module")
def case(toolbox):
    target = toolbox.target("llama")
    prompt = toolbox.prompt(8)
    plain = toolbox.greedy(target, prompt)
    return target, prompt, plain, toolbox.scripted(target, plain[0].tolist())


def stage(draft_ids, choices):
    ones = tuple((1.0,) for _ in draft_ids)
    return TracedStage(tuple(draft_ids), tuple(choices), tuple((i,) for i in draft_ids), ones, ones, -0.1)


@pytest.mark.parametrize(
    "stages, committed, accepted, origins",
    [
        ([], [7], 0, ["target"]),
        ([stage([1, 2], [0, 3])], [1, 2, 9], 2, ["draft", "repair", "bonus"]),
        ([stage([1, 2], [0, 3])], [1, 5], 1, ["draft", "correction"]),
        ([stage([1, 2], [0, 0])], [4], 0, ["correction"]),
        ([stage([1], [0]), stage([2], [1])], [1, 2, 3], 2, ["draft", "loop", "bonus"]),
        ([stage([1, 2], [0, 0])], [1], 1, ["draft"]),  # the length limit or an end token cut the round
    ],
    ids=["prefill", "all-accepted", "second-rejected", "first-rejected", "loop", "cut"],
)
def test_origin_of_each_token(stages, committed, accepted, origins):
    traced = TracedRound(tuple(stages), tuple(committed))
    assert traced.num_accepted == accepted
    assert list(traced.origins) == origins
    assert set(origins) <= set(ORIGINS)


def test_rounds_add_up_to_the_text_and_agree_with_the_statistics(toolbox, case):
    target, prompt, plain, drelay = case
    view = drelay.with_options(loop_gate=ALWAYS, max_stages=2, trace=True)
    ids = toolbox.greedy(target, prompt, view)
    assert torch.equal(ids, plain)
    rounds = view.trace.rounds
    assert [i for r in rounds for i in r.committed_ids] == ids[0, prompt.shape[1] :].tolist()
    drafted = [r for r in rounds if r.stages]
    statistics = view.statistics
    assert [len(r.committed_ids) for r in drafted] == statistics.num_committed
    assert [r.num_accepted for r in drafted] == statistics.num_accepted
    assert [len(r.stages) for r in drafted] == statistics.num_stages
    assert {"draft", "repair", "loop", "correction"} <= {origin for r in rounds for origin in r.origins}


def test_probabilities_are_the_distributions_that_were_chosen_from(toolbox, case):
    target, prompt, _, drelay = case
    view = drelay.with_options(trace=True)
    toolbox.greedy(target, prompt, view)
    stages = [s for r in view.trace.rounds for s in r.stages]
    assert stages
    for traced in stages:
        for slot, choice in enumerate(traced.choices):
            selection = traced.selection_probs[slot]
            assert sum(selection) == pytest.approx(1.0, abs=1e-5)
            assert choice == max(range(len(selection)), key=selection.__getitem__)
            assert traced.pool_ids[slot][choice] == traced.draft_ids[slot]
            assert 0 < sum(traced.pool_probs[slot]) <= 1 + 1e-5


def test_nothing_is_traced_unless_asked(toolbox, case, monkeypatch):
    target, prompt, _, drelay = case
    monkeypatch.setattr(DraftTrace, "add_round", lambda *arguments: pytest.fail("traced"))
    view = drelay.with_options()
    toolbox.greedy(target, prompt, view)
    assert view.trace is None and view.statistics.num_rounds > 0


def test_two_threads_trace_their_own_calls(toolbox, case):
    target, prompt, plain, drelay = case
    views = [drelay.with_options(trace=True, loop_gate=gate) for gate in (None, ALWAYS)]
    texts = {}

    def run(view):
        drelay.script.follow(plain[0].tolist())
        texts[id(view)] = toolbox.greedy(target, prompt, view)[0, prompt.shape[1] :].tolist()

    threads = [threading.Thread(target=run, args=(view,)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for view in views:
        assert [i for r in view.trace.rounds for i in r.committed_ids] == texts[id(view)]
    assert max(len(r.stages) for r in views[0].trace.rounds) == 1
    assert max(len(r.stages) for r in views[1].trace.rounds) > 1

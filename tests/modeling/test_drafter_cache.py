"""
Between rounds the drafter's cache and the history hold the verified positions and nothing else, however the round
before went: they equal those rebuilt from the features of one full forward of the target.
"""

from collections import Counter

import pytest
import torch

from hf_drelay.modeling.candidate_generator import DRelayCandidateGenerator
from hf_drelay.modeling.draft_session import DraftSession


ALWAYS = float("-inf")
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
ALL_SLIDING = {"layer_types": ["sliding_attention", "sliding_attention"]}


def rebuilt_session(generator, input_ids) -> DraftSession:
    """A session fed at once with the true features of all positions before the anchor."""
    adapter = generator.adapter
    with torch.no_grad():
        states = adapter.target(input_ids[:, :-1], output_hidden_states=True).hidden_states
        session = DraftSession(generator.model.drafter, adapter)
        session.extend(adapter.tapped(states, generator.model.config.target_layer_ids))
    return session


def draft_rows(session, anchor_id) -> torch.Tensor:
    """Hidden states of a block drafted from the session."""
    drafter = session.drafter
    with torch.no_grad():
        embeds = drafter.block_embeds(anchor_id, session.adapter.embed)
        positions = session.positions(session.anchor_position, drafter.config.block_size)
        return drafter(embeds, positions, session.cache).last_hidden_state


class RoundChecks:
    """Checks after every round; `padding` is the number of masked tokens in front of the prompt."""

    def __init__(self, padding: int = 0):
        self.padding = padding
        self.num_rounds = 0
        self.num_looped = 0

    def check(self, generator, input_ids, num_provisional_stages, num_crops) -> None:
        self.num_rounds += 1
        self.num_looped += num_provisional_stages > 0
        session, input_ids = generator.session, input_ids[:, self.padding :]
        expected = rebuilt_session(generator, input_ids)
        num_verified = input_ids.shape[1] - 1
        assert num_crops == (num_provisional_stages > 0), "a round that looped is cropped once, others never"
        assert session.num_provisional == 0
        assert session.num_verified == num_verified == session.cache.get_seq_length()
        for own, true in zip(session.cache.layers, expected.cache.layers, strict=True):
            torch.testing.assert_close(own.keys, true.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(own.values, true.values, atol=1e-4, rtol=1e-4)
        num_kept = min(num_verified, session.history.shape[1])
        assert session.history_mask.tolist() == expected.history_mask.tolist()
        assert session.history_mask[0].sum() == num_kept
        torch.testing.assert_close(
            session.history[:, -num_kept:], expected.history[:, -num_kept:], atol=1e-4, rtol=1e-4
        )
        # What the layers see of it is right too: a next block comes out the same.
        anchor = input_ids[:, -1]
        torch.testing.assert_close(draft_rows(session, anchor), draft_rows(expected, anchor), atol=1e-3, rtol=1e-3)


@pytest.fixture
def checked_rounds(monkeypatch):
    """Check the session after every round's drafting; returns a function that starts the checks."""

    def start(padding: int = 0) -> RoundChecks:
        checks = RoundChecks(padding)
        original = DRelayCandidateGenerator.stages

        def stages(self, input_ids):
            calls = Counter()

            def counted(owner, name):
                method = getattr(owner, name)
                setattr(owner, name, lambda *args: (calls.update([name]), method(*args)))

            counted(self.session.cache, "crop")
            counted(self.session, "extend_provisional")
            blocks = yield from original(self, input_ids)
            del self.session.cache.crop, self.session.extend_provisional
            if self._unread:  # there was no room for a draft, and nothing was read for it
                return blocks
            checks.check(self, input_ids, calls["extend_provisional"], calls["crop"])
            return blocks

        monkeypatch.setattr(DRelayCandidateGenerator, "stages", stages)
        return checks

    return start


CASES = {
    "llama-fill_in": ("llama", {"layout": "fill_in"}),
    "llama-shifted-embedding_tap": ("llama", {"layout": "shifted", "target_layer_ids": [-1, 1, 3]}),
    "qwen3-shifted-plain_features": ("qwen3", {"layout": "shifted", "use_repaired_feature": False}),
    "gemma3-fill_in-hidden_norm": ("gemma3", {"layout": "fill_in", "provisional_norm": "hidden"}),
    "mistral-shifted-window_4": ("mistral", {"layout": "shifted", "sliding_window": 4, **SLIDING}),
    "llama-fill_in-window_8": ("llama", {"layout": "fill_in", "sliding_window": 8, **ALL_SLIDING}),
    "qwen3-shifted-window_11": ("qwen3", {"layout": "shifted", "sliding_window": 11, **ALL_SLIDING}),
    "gemma3-fill_in-window_16": ("gemma3", {"layout": "fill_in", "sliding_window": 16, **SLIDING}),
}


@pytest.mark.parametrize("case", CASES)
def test_cache_equals_one_rebuilt_from_true_features_after_every_round(toolbox, record, checked_rounds, case):
    name, fields = CASES[case]
    target, prompt = toolbox.target(name), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt, max_new_tokens=64)
    view = toolbox.scripted(target, expected[0].tolist(), **fields).with_options(loop_gate=ALWAYS)
    checks = checked_rounds()
    assert torch.equal(toolbox.greedy(target, prompt, view, max_new_tokens=64), expected)
    assert checks.num_rounds >= 8 and checks.num_looped >= 5
    # A rejection behind the first stage, so that every kind of leftover was there to be removed.
    assert record.count(lambda r: r.is_rejected_late) >= 1
    assert record.count(lambda r: r.num_accepted < r.stage_lengths[0]) >= 1
    assert max(view.statistics.num_stages) == 3


def test_cache_is_never_cropped_when_rounds_have_one_stage(toolbox, checked_rounds):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt)
    view = toolbox.scripted(target, expected[0].tolist()).with_options(loop_gate=None)
    checks = checked_rounds()
    assert torch.equal(toolbox.greedy(target, prompt, view), expected)
    assert checks.num_rounds >= 8 and checks.num_looped == 0


def test_cache_holds_no_padding_when_the_prompt_is_padded_left(toolbox, checked_rounds):
    target, prompt = toolbox.target("llama"), toolbox.prompt(9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(13) >= 4).long()[None]
    expected = toolbox.greedy(target, padded, attention_mask=mask)
    view = toolbox.scripted(target, expected[0, 4:].tolist()).with_options(loop_gate=ALWAYS)
    checks = checked_rounds(padding=4)
    assert torch.equal(toolbox.greedy(target, padded, view, attention_mask=mask), expected)
    assert checks.num_looped >= 5


def test_cache_is_whole_when_the_prompt_is_shorter_than_the_history(toolbox, checked_rounds):
    # The window of 12 fills up during generation.
    target, prompt = toolbox.target("qwen3"), torch.tensor([[7]])
    expected = toolbox.greedy(target, prompt)
    view = toolbox.scripted(target, expected[0].tolist(), layout="shifted").with_options(loop_gate=ALWAYS)
    checks = checked_rounds()
    assert torch.equal(toolbox.greedy(target, prompt, view), expected)
    assert checks.num_looped >= 5


def test_cache_is_whole_when_drafts_are_sampled(toolbox, checked_rounds):
    target = toolbox.table_target(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    view = toolbox.drafter(target, pool_size=4).with_options(loop_gate=ALWAYS)
    checks = checked_rounds()
    torch.manual_seed(0)
    prompt = torch.tensor([[1, 2, 3]])
    mask = torch.ones_like(prompt)
    target.generate(prompt, attention_mask=mask, assistant_model=view, do_sample=True, max_new_tokens=48)
    assert checks.num_looped >= 5
    assert view.statistics.acceptance_length > 1.2


def test_cache_is_whole_when_a_stopping_criterion_cuts_blocks(toolbox, checked_rounds):
    # A criterion that holds of drafts all the time but of no committed text: every draft is cut somewhere.
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt)
    text = expected[0].tolist()
    view = toolbox.scripted(target, text, layout="shifted").with_options(loop_gate=ALWAYS)

    def is_off_the_text(input_ids, scores, **kwargs):
        return torch.tensor([input_ids[0].tolist() != text[: input_ids.shape[1]]])

    checks = checked_rounds()
    ids = toolbox.greedy(target, prompt, view, stopping_criteria=[is_off_the_text])
    assert torch.equal(ids, expected)
    assert checks.num_looped >= 3


def test_session_of_a_view_is_fresh_in_every_call(toolbox, checked_rounds):
    target = toolbox.target("llama")
    first, second = toolbox.prompt(12, seed=1), toolbox.prompt(7, seed=2)
    expected = [toolbox.greedy(target, prompt) for prompt in (first, second)]
    drafter = toolbox.scripted(target, expected[0][0].tolist())
    view = drafter.with_options(loop_gate=ALWAYS)
    checks = checked_rounds()
    assert torch.equal(toolbox.greedy(target, first, view), expected[0])
    drafter.script.follow(expected[1][0].tolist())
    assert torch.equal(toolbox.greedy(target, second, view), expected[1])
    assert checks.num_looped >= 10

"""How draft tokens are drawn: from exactly the q that is handed over, with processors that act as the host's do."""

import pytest
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from hf_drelay.modeling.modeling_base import Pool
from hf_drelay.modeling.modeling_heads import IndependentHead, walk_slots
from hf_drelay.modeling.proposal import Proposal


V, C, EOS = 24, 6, 5
INPUT_IDS = torch.tensor([[7, 3, 9, 7, 3, EOS, 11, 7, 3]])  # `7 3 9` and `7 3 5` are trigrams whose start it repeats


def make_pool(num_slots=2, seed=0) -> Pool:
    """Pools that hold 3, 7, 9 and the end, with logits of both signs: a repetition penalty treats them differently."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, num_slots, V, generator=generator)
    logits[..., [3, 7, 9, EOS]] = torch.tensor([0.5, -0.8, 1.5, 0.9]) + 0.1 * torch.arange(num_slots)[:, None]
    logits[..., 10:] -= 4.0
    logits[..., [0, 1]] = torch.tensor([-0.5, 0.2])
    logits[..., [2, 4, 6, 8]] -= 9.0
    return Pool.from_logits(logits, C)


def full_logits(pool, slot) -> torch.Tensor:
    """Raw logits `(1, V)` of a slot, `-inf` outside its pool."""
    return torch.full((1, V), float("-inf")).scatter(1, pool.ids[:, slot], pool.logits[:, slot])


def start(stock, pool, is_sampled=True, input_ids=INPUT_IDS):
    """Chooser of a stage after `input_ids` for processors `stock`."""
    proposal = Proposal(LogitsProcessorList(stock), V, is_sampled)
    proposal.input_ids = input_ids
    return proposal.start_stage(pool)


WARPERS = {
    "none": lambda: [],
    "temperature": lambda: [processors.TemperatureLogitsWarper(0.7)],
    "top_k": lambda: [processors.TopKLogitsWarper(3)],
    "top_k_beyond_the_pool": lambda: [processors.TopKLogitsWarper(20)],
    "top_p": lambda: [processors.TopPLogitsWarper(0.8)],
    "min_p": lambda: [processors.MinPLogitsWarper(0.3)],
    "all": lambda: [
        processors.TemperatureLogitsWarper(1.5),
        processors.TopKLogitsWarper(5),
        processors.TopPLogitsWarper(0.9),
        processors.MinPLogitsWarper(0.05),
    ],
    "typical": lambda: [processors.TypicalLogitsWarper(0.8)],
    "epsilon": lambda: [processors.EpsilonLogitsWarper(0.1)],
    "eta": lambda: [processors.EtaLogitsWarper(0.1)],
}

PENALTIES = {
    "repetition": lambda: [processors.RepetitionPenaltyLogitsProcessor(1.7)],
    "no_repeat_ngram": lambda: [processors.NoRepeatNGramLogitsProcessor(3)],
    "suppress": lambda: [processors.SuppressTokensLogitsProcessor([9, 1], device="cpu")],
    "suppress_at_begin": lambda: [processors.SuppressTokensAtBeginLogitsProcessor([9], 9, device="cpu")],
    "min_length": lambda: [processors.MinLengthLogitsProcessor(99, EOS, device="cpu")],
    "min_new_tokens": lambda: [processors.MinNewTokensLengthLogitsProcessor(8, 2, EOS, device="cpu")],
    "sequence_bias": lambda: [processors.SequenceBiasLogitsProcessor({(9,): 2.0, (7, 3, 0): -3.0, (3, 1): 1.0})],
    "bad_words": lambda: [processors.NoBadWordsLogitsProcessor([[9], [3, 1], [0, 0, 1]], torch.tensor([EOS]))],
    "forced_eos": lambda: [processors.ForcedEOSTokenLogitsProcessor(10, EOS, device="cpu")],
    "exponential_decay": lambda: [processors.ExponentialDecayLengthPenalty((2, 1.2), EOS, 1)],
    "several": lambda: [
        processors.SequenceBiasLogitsProcessor({(9,): 2.0}),
        processors.RepetitionPenaltyLogitsProcessor(1.7),
        processors.NoRepeatNGramLogitsProcessor(3),
        processors.MinNewTokensLengthLogitsProcessor(8, 2, EOS, device="cpu"),
    ],
}


class TestDistribution:
    @pytest.mark.parametrize("make", WARPERS.values(), ids=WARPERS)
    def test_q_is_what_the_hosts_warpers_make_of_the_pool(self, make):
        """A token outside the pool has -inf, so the warpers on the vocabulary and on the pool must agree."""
        pool = make_pool()
        draw = start(make(), pool)
        draw(pool.log_probs, 0)
        q = draw.proposal_logits(2).softmax(-1)
        for slot in range(2):
            expected = LogitsProcessorList(make())(INPUT_IDS, full_logits(pool, slot)).softmax(-1)
            torch.testing.assert_close(q[:, slot], expected.gather(1, pool.ids[:, slot]))

    @pytest.mark.statistical
    @pytest.mark.parametrize("name", ["none", "temperature", "top_k", "top_p", "min_p", "all"])
    def test_tokens_are_drawn_from_the_q_that_is_handed_over(self, name):
        torch.manual_seed(3)
        pool = make_pool(num_slots=1)
        rows = Pool(*(getattr(pool, field).expand(20_000, -1, -1) for field in ("ids", "logits", "log_probs")))
        draw = start(WARPERS[name](), rows)
        counts = draw(rows.log_probs, 0).flatten().bincount(minlength=C)
        q = draw.proposal_logits(1)[0, 0].double().softmax(-1)
        assert not counts[q == 0].any()
        expected = (q / q.sum() * counts.sum())[q > 0]
        assert chisquare(counts[q > 0], expected).pvalue > 1e-3

    @pytest.mark.statistical
    def test_comparison_with_a_slightly_wrong_q_fails(self):
        """The test above can tell a temperature of 0.7 from one of 0.75."""
        torch.manual_seed(3)
        pool = make_pool(num_slots=1)
        rows = Pool(*(getattr(pool, field).expand(20_000, -1, -1) for field in ("ids", "logits", "log_probs")))
        counts = start(WARPERS["temperature"](), rows)(rows.log_probs, 0).flatten().bincount(minlength=C)
        q = (pool.log_probs[0, 0].double() / 0.75).softmax(-1)
        assert chisquare(counts, q / q.sum() * counts.sum()).pvalue < 1e-6

    def test_q_is_kept_in_single_precision(self):
        pool = make_pool()
        draw = start(WARPERS["all"](), pool)
        draw(pool.log_probs, 0)
        assert draw.proposal_logits(2).dtype == torch.float32

    def test_draw_is_the_same_for_the_same_logits(self):
        """The fixed-point walk asks again and again; new noise each time would bias what it settles on."""
        pool = make_pool(num_slots=40)
        draw = start(WARPERS["temperature"](), pool)
        whole = draw(pool.log_probs, 0)
        parts = [draw(pool.log_probs[:, slot : slot + 1], slot) for slot in range(40)]
        assert torch.equal(torch.cat(parts, dim=1), whole)

    def test_two_stages_draw_different_tokens(self):
        pool = make_pool(num_slots=60)
        draws = [start([], pool)(pool.log_probs, 0) for _ in range(2)]
        assert not torch.equal(*draws)

    def test_selection_logits_may_have_any_offset(self):
        pool = make_pool()
        draw = start(WARPERS["all"](), pool)
        draw(pool.log_probs + 5.0, 0)
        shifted = draw.proposal_logits(2).softmax(-1)
        draw(pool.log_probs, 0)
        torch.testing.assert_close(draw.proposal_logits(2).softmax(-1), shifted)


class TestPenalties:
    @pytest.mark.parametrize("warper", ["none", "all"])
    @pytest.mark.parametrize("name", PENALTIES)
    def test_q_is_what_the_hosts_processors_make_of_the_pool(self, name, warper):
        """Penalties see raw logits, before the warpers, and the tokens drafted so far."""
        pool = make_pool()
        stock = LogitsProcessorList(PENALTIES[name]() + WARPERS[warper]())
        draw = start(stock, pool)
        choices, _ = walk_slots(IndependentHead(), pool, pool, INPUT_IDS[:, -1], draw)
        q = draw.proposal_logits(2).softmax(-1)
        input_ids = INPUT_IDS
        for slot in range(choices.shape[1]):
            expected = stock(input_ids, full_logits(pool, slot)).softmax(-1)
            torch.testing.assert_close(q[:, slot], expected.gather(1, pool.ids[:, slot]))
            token = pool.ids[:, slot].gather(1, choices[:, slot : slot + 1])
            input_ids = torch.cat([input_ids, token], dim=1)

    @pytest.mark.parametrize("name", PENALTIES)
    def test_penalty_changes_the_distribution_here(self, name):
        """Each penalty of this file has something to do, so that its comparison means something."""
        pool = make_pool()
        draw = start(PENALTIES[name](), pool)
        walk_slots(IndependentHead(), pool, pool, INPUT_IDS[:, -1], draw)
        assert not torch.allclose(draw.proposal_logits(2).softmax(-1), pool.log_probs.softmax(-1), atol=1e-3)

    def test_penalty_sees_the_tokens_of_the_same_stage(self):
        """The first slot drafts the end of a trigram that the second slot would complete again."""
        pool = make_pool(num_slots=3)
        pool.ids[0, :, 0] = torch.tensor([1, 0, 1])
        pool.ids[0, :, 1:] = torch.tensor([12, 13, 14, 15, 16])
        draw = start(
            [processors.NoRepeatNGramLogitsProcessor(2)], pool, is_sampled=False, input_ids=torch.tensor([[0]])
        )
        choices, _ = walk_slots(IndependentHead(), pool, pool, torch.tensor([0]), draw)
        # After `0` the draft is `1`, then `0`, and then `0 1` would be there twice.
        assert choices[0].tolist()[:2] == [0, 0] and choices[0, 2] != 0

    def test_change_is_added_to_what_the_selector_prefers(self):
        """A penalty acts on the raw logit; the selector's opinion stays on top of it."""
        pool = make_pool(num_slots=1)
        draw = start(PENALTIES["repetition"](), pool)
        scores = torch.randn(1, 1, C, generator=torch.Generator().manual_seed(1))
        draw(scores, 0)
        raw = full_logits(pool, 0)
        change = (LogitsProcessorList(PENALTIES["repetition"]())(INPUT_IDS, raw) - raw).gather(1, pool.ids[:, 0])
        torch.testing.assert_close(draw.proposal_logits(1)[:, 0], scores[:, 0] + change)

    def test_walk_must_be_sequential_only_with_penalties(self):
        pool = make_pool()
        assert start(PENALTIES["repetition"](), pool).depends_on_path
        assert not start(WARPERS["all"](), pool).depends_on_path

    @pytest.mark.parametrize("is_sampled", [False, True])
    def test_draft_ends_before_a_slot_with_every_candidate_banned(self, is_sampled):
        pool = make_pool(num_slots=3)
        pool.ids[0, 1] = torch.arange(10, 10 + C)
        banned = processors.SuppressTokensLogitsProcessor(list(range(10, 10 + C)), device="cpu")
        draw = start([banned], pool, is_sampled)
        walk_slots(IndependentHead(), pool, pool, INPUT_IDS[:, -1], draw)
        assert draw.num_possible(3).tolist() == [1]

    @pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
    def test_warpers_are_not_asked_about_a_slot_with_every_candidate_banned(self, is_tree):
        # The host's eta warper raises for a row without a finite number.
        pool = make_pool(num_slots=1)
        banned = processors.SuppressTokensLogitsProcessor(pool.ids[0, 0].tolist(), device="cpu")
        draw = start([banned, processors.EtaLogitsWarper(1e-3)], pool)
        if is_tree:
            scores = draw.path_log_probs(pool.log_probs[:, 0], 0, INPUT_IDS[:, :0])
            assert scores.isneginf().all()
        else:
            walk_slots(IndependentHead(), pool, pool, INPUT_IDS[:, -1], draw)
            assert draw.num_possible(1).tolist() == [0]

    def test_draft_is_empty_when_the_first_slot_has_every_candidate_banned(self):
        pool = make_pool(num_slots=2)
        draw = start([processors.SuppressTokensLogitsProcessor(pool.ids[0, 0].tolist(), device="cpu")], pool)
        walk_slots(IndependentHead(), pool, pool, INPUT_IDS[:, -1], draw)
        assert draw.num_possible(2).tolist() == [0]


class MyRepetitionPenalty(processors.RepetitionPenaltyLogitsProcessor):
    pass


class MyTopK(processors.TopKLogitsWarper):
    pass


class CountingProcessor(processors.LogitsProcessor):
    """Acts differently at each call, as a user's grammar might."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + self.calls * torch.arange(scores.shape[-1])


class TestUnknownProcessors:
    @pytest.mark.parametrize(
        "make",
        [lambda: MyRepetitionPenalty(1.7), lambda: MyTopK(1), CountingProcessor],
        ids=["penalty", "warper", "own"],
    )
    def test_q_is_as_without_the_processor(self, make):
        """A draft is only a guess: what may hold state is left to the target's side, which is always exact."""
        pool = make_pool()
        draw = start([make()], pool)
        draw(pool.log_probs, 0)
        torch.testing.assert_close(draw.proposal_logits(2).softmax(-1), pool.log_probs.softmax(-1))

    def test_stateful_processor_is_not_called(self):
        own, pool = CountingProcessor(), make_pool()
        start([own, *PENALTIES["repetition"]()], pool)(pool.log_probs[:, :1], 0)
        assert own.calls == 0

    def test_known_processors_beside_it_still_act(self):
        pool = make_pool()
        draw = start([CountingProcessor(), *WARPERS["top_k"]()], pool)
        draw(pool.log_probs, 0)
        assert draw.proposal_logits(2).isfinite().sum(-1).tolist() == [[3, 3]]


class TestDeterministic:
    def test_nothing_is_handed_over(self):
        pool = make_pool()
        draw = start(WARPERS["all"](), pool, is_sampled=False)
        draw(pool.log_probs, 0)
        assert draw.proposal_logits(2) is None

    def test_most_likely_candidate_is_taken(self):
        pool = make_pool()
        scores = torch.randn(1, 2, C)
        assert torch.equal(start([], pool, is_sampled=False)(scores, 0), scores.argmax(-1))

    def test_warpers_are_not_needed_because_they_keep_the_best(self):
        assert not start(WARPERS["all"](), make_pool(), is_sampled=False).proposal.warpers

    def test_penalties_act_on_a_deterministic_draft_too(self):
        pool = make_pool(num_slots=1)
        banned = pool.ids[0, 0, 0].item()
        draw = start([processors.SuppressTokensLogitsProcessor([banned], device="cpu")], pool, is_sampled=False)
        assert draw(pool.log_probs, 0).tolist() == [[1]]

    def test_no_processors_at_all_are_fine(self):
        proposal, pool = Proposal(None, V, is_sampled=False), make_pool()
        proposal.input_ids = INPUT_IDS
        assert proposal.start_stage(pool)(pool.log_probs, 0).tolist() == [[0, 0]]

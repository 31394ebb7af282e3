"""Both walks over a block, the independent head, and the small objects that travel between parts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_drelay.modeling.configuration_drelay import DRelaySelectorConfig
from hf_drelay.modeling.modeling_base import DraftBlock, Pool
from hf_drelay.modeling.modeling_heads import HeadInputs, IndependentHead, walk_fixed_point, walk_passes, walk_slots
from hf_drelay.modeling.modeling_selector import DRelaySelectorModel


V, H, C, K = 30, 12, 4, 6


def make_selector(seed) -> DRelaySelectorModel:
    """Random weights everywhere and strong ties between neighbours, so that one repair changes the next slots."""
    torch.manual_seed(seed)
    config = DRelaySelectorConfig(
        vocab_size=V,
        hidden_size=H,
        num_target_layers=9,
        num_hidden_layers=1,
        block_size=K,
        layout="shifted",
        pool_size=C,
        selector_hidden_size=8,
        selector_num_heads=2,
        history_window=3,
        pair_rank=4,
    )
    selector = DRelaySelectorModel(config).eval()
    with torch.no_grad():
        for name, weight in selector.named_parameters():
            weight.normal_(mean=1.0 if "norm.weight" in name else 0.0, std=0.8)
    return selector


def make_state(head, seed, num_blocks=1):
    """What a walk takes: the head's state, the pool and the anchors."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    table = noise(V, H)
    pool = Pool.from_logits(noise(num_blocks, K, V), C)
    anchors = torch.randint(V, (num_blocks,), generator=generator)
    inputs = HeadInputs(
        hidden_states=noise(num_blocks, K, H),
        anchor_hidden=None,
        pool=pool,
        anchor_ids=anchors,
        history=noise(num_blocks, 3, H),
        history_mask=torch.ones(num_blocks, 3, dtype=torch.bool),
        offset=0,
        earlier=None,
        embed=lambda ids: table[ids],
        text_ids=torch.randint(4, (num_blocks, 9), generator=generator),
    )
    with torch.no_grad():
        return head.read(inputs), pool, anchors


def greedy(logits, first):
    return logits.argmax(dim=-1)


def noisy(gumbel, temperature):
    """Draws with noise that is fixed for each slot and candidate."""

    def choose(logits, first):
        return (logits / temperature + gumbel[:, first : first + logits.shape[1]]).argmax(dim=-1)

    return choose


class Counting:
    """A head that counts how often it scores."""

    def __init__(self, head):
        self.head, self.calls = head, 0

    def score(self, state, path_ids, first=0):
        self.calls += 1
        return self.head.score(state, path_ids, first)


class Dominoes:
    """Slot 1 is repaired, and every later slot is repaired exactly if the slot before it was: the slowest map."""

    def score(self, state, path_ids, first=0):
        last = path_ids.shape[1]
        was_repaired = path_ids == state.ids[:, :last, 1].roll(1, dims=1)  # token `i` is the one before slot `i`
        was_repaired[:, 0] = True
        scores = torch.zeros(len(path_ids), last, state.ids.shape[-1])
        scores[..., 0] = 0.5
        scores[..., 1] = was_repaired.float()
        return scores[:, first:]


class TestWalks:
    @settings(max_examples=25, deadline=None)
    @given(seed=st.integers(0, 10_000), num_blocks=st.integers(1, 3))
    @torch.no_grad()
    def test_fixed_point_equals_the_walk_when_greedy(self, seed, num_blocks):
        head = Counting(make_selector(seed))
        arguments = make_state(head.head, seed, num_blocks)
        expected = walk_slots(head.head, *arguments, greedy)
        found = walk_fixed_point(head, *arguments, greedy)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
        assert head.calls <= K

    @settings(max_examples=25, deadline=None)
    @given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.5, 1.0, 3.0]))
    @torch.no_grad()
    def test_fixed_point_equals_the_walk_with_fixed_noise(self, seed, temperature):
        head = Counting(make_selector(seed))
        arguments = make_state(head.head, seed)
        gumbel = -torch.empty(1, K, C).exponential_(generator=torch.Generator().manual_seed(seed)).log()
        choose = noisy(gumbel, temperature)
        expected = walk_slots(head.head, *arguments, choose)
        found = walk_fixed_point(head, *arguments, choose)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
        assert head.calls <= K

    @settings(max_examples=25, deadline=None)
    @given(seed=st.integers(0, 10_000), num_blocks=st.integers(1, 3), limit=st.integers(1, K))
    @torch.no_grad()
    def test_settled_slots_of_a_few_passes_are_those_of_the_walk(self, seed, num_blocks, limit):
        head = Counting(make_selector(seed))
        arguments = make_state(head.head, seed, num_blocks)
        expected = walk_slots(head.head, *arguments, greedy)
        choices, logits, num_settled = walk_passes(head, *arguments, greedy, limit)
        assert head.calls == limit
        for row, n in enumerate(num_settled.tolist()):
            assert limit <= n <= K
            assert torch.equal(choices[row, :n], expected[0][row, :n])
            torch.testing.assert_close(logits[row, :n], expected[1][row, :n], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("limit", range(1, K + 1))
    def test_slots_that_have_not_settled_are_not_counted(self, limit):
        pool = Pool.from_logits(torch.randn(1, K, V, generator=torch.Generator().manual_seed(0)), C)
        choices, _, num_settled = walk_passes(Dominoes(), pool, pool, torch.tensor([0]), greedy, limit)
        assert num_settled.tolist() == [limit] and choices[0, :limit].tolist() == [1] * limit

    def test_independent_slots_settle_in_one_pass(self):
        head, pool = Counting(IndependentHead()), Pool.from_logits(torch.randn(2, K, V), C)
        choices, _, num_settled = walk_passes(head.head, pool, pool, torch.tensor([0, 0]), greedy, 1)
        assert num_settled.tolist() == [K, K] and not choices.any()

    @torch.no_grad()
    def test_random_selectors_need_several_passes(self):
        """Otherwise the equality of the walks would say nothing about the passes after the first."""
        calls = []
        for seed in range(12):
            head = Counting(make_selector(seed))
            walk_fixed_point(head, *make_state(head.head, seed), greedy)
            calls.append(head.calls)
        assert max(calls) >= 4

    def test_fixed_point_is_right_after_as_many_passes_as_slots_in_the_worst_case(self):
        pool = Pool.from_logits(torch.randn(1, K, V, generator=torch.Generator().manual_seed(0)), C)
        head, arguments = Counting(Dominoes()), (pool, pool, torch.tensor([0]))
        expected = walk_slots(head.head, *arguments, greedy)
        found = walk_fixed_point(head, *arguments, greedy)
        assert expected[0].tolist() == [[1] * K]
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        assert head.calls == K

    def test_fixed_point_stops_when_the_path_stays(self):
        head = Counting(IndependentHead())
        pool = Pool.from_logits(torch.randn(1, K, V), C)
        choices, logits = walk_fixed_point(head, pool, pool, torch.tensor([0]), greedy)
        assert (head.calls, choices.tolist()) == (1, [[0] * K])
        assert torch.equal(logits, pool.log_probs)

    @torch.no_grad()
    def test_walk_hands_each_slot_the_tokens_chosen_before_it(self):
        """A chooser that always repairs must lead the head along repaired tokens."""
        selector = make_selector(0)
        state, pool, anchors = make_state(selector, 0)
        choices, logits = walk_slots(selector, state, pool, anchors, lambda logits, slot: torch.full((1, 1), 2))
        path = torch.cat([anchors[:, None], pool.ids[:, :-1, 2]], dim=1)
        assert choices.tolist() == [[2] * K]
        torch.testing.assert_close(logits, selector.score(state, path), rtol=1e-5, atol=1e-5)


class TestIndependentHead:
    @pytest.mark.parametrize(("first", "last"), [(0, K), (2, 3), (1, K)])
    def test_scores_are_the_log_probabilities_of_the_asked_slots(self, first, last):
        pool = Pool.from_logits(torch.randn(2, K, V), C)
        scores = IndependentHead().score(pool, torch.randint(V, (2, last)), first)
        assert torch.equal(scores, pool.log_probs[:, first:last])

    def test_state_is_the_pool_and_nothing_is_remembered(self):
        head = IndependentHead()
        state, pool, anchors = make_state(head, 0)
        assert state is pool
        assert head.remember(state, anchors[:, None]) is None


class TestPool:
    def test_candidates_are_sorted_and_the_draft_comes_first(self):
        logits = torch.randn(2, K, V)
        pool = Pool.from_logits(logits, C)
        assert torch.equal(pool.ids[..., 0], logits.argmax(-1))
        assert torch.equal(pool.logits, logits.sort(dim=-1, descending=True).values[..., :C])

    def test_log_probabilities_are_those_of_the_whole_vocabulary(self):
        logits = torch.randn(2, K, V)
        pool = Pool.from_logits(logits, C)
        torch.testing.assert_close(pool.log_probs, logits.log_softmax(-1).gather(2, pool.ids))

    def test_columns_are_named_by_the_shortlist(self):
        logits, tokens = torch.randn(2, K, 5), torch.tensor([3, 9, 11, 20, 28])
        pool = Pool.from_logits(logits, C, tokens)
        assert torch.equal(pool.ids[..., 0], tokens[logits.argmax(-1)])
        torch.testing.assert_close(pool.log_probs.exp().sum(-1) < 1, torch.ones(2, K, dtype=torch.bool))


class TestDraftBlock:
    @staticmethod
    def _block(pool_logits=True):
        return DraftBlock(
            draft_ids=torch.tensor([[5, 6, 7]]),
            choices=torch.tensor([[0, 1, 0]]),
            pool_ids=torch.arange(12).view(1, 3, 4),
            pool_logits=torch.randn(1, 3, 4) if pool_logits else None,
            context_features=torch.randn(1, 3, H),
            slot_log_confidence=torch.tensor([[-1.0, -2.0, -4.0]]),
            remember=lambda n: n,
            pool_log_probs=torch.randn(1, 3, 4).log_softmax(dim=-1),
        )

    def test_confidence_is_the_sum_over_the_slots(self):
        assert self._block().log_confidence.tolist() == [-7.0]

    def test_confidence_counts_the_kept_tokens_only_after_a_cut(self):
        assert self._block().first(2).log_confidence.tolist() == [-3.0]

    def test_every_field_is_cut_to_the_first_tokens(self):
        block, cut = self._block(), self._block().first(1)
        assert (cut.num_tokens, cut.draft_ids.tolist(), cut.choices.tolist()) == (1, [[5]], [[0]])
        assert cut.pool_ids.tolist() == [[[0, 1, 2, 3]]]
        assert (cut.pool_logits.shape, cut.context_features.shape) == ((1, 1, 4), (1, 1, H))
        assert block.num_tokens == 3

    def test_deterministic_block_stays_without_logits_after_a_cut(self):
        assert self._block(pool_logits=False).first(1).pool_logits is None

    def test_cut_beyond_the_end_is_the_block_itself(self):
        block = self._block()
        assert block.first(9) is block

    def test_memory_can_be_asked_for_after_a_cut(self):
        assert self._block().first(2).remember(2) == 2

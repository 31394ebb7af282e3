"""The headroom analyses on cases that were counted by hand, and on scripted drafters."""

import pytest
import torch

from hf_drelay.evaluation.headroom import (
    BlockHeadroom,
    Headroom,
    SuffixCase,
    _score_cases,
    analyse_block,
    headroom_table,
    measure_headroom,
    suffix_log_probs,
)


def pools(*covered: int, size: int = 8) -> list[list[int]]:
    """Pools of eight slots, drafts 50; slots in `covered` hold the target's token 10 + slot."""
    return [[50, 10 + slot if slot in covered else 90] for slot in range(size)]


TRUTH = list(range(10, 18))


class TestBlock:
    @pytest.mark.parametrize(
        ("drafts", "pool", "expected"),
        [
            (TRUTH, pools(), BlockHeadroom(8, False, False, 0, False)),
            # Accepted 2; the oracle repairs slot 3 and wins it and the two right drafts behind it.
            ([10, 11, 50, 13, 14, 50, 16, 17], pools(2), BlockHeadroom(2, True, True, 3, False)),
            ([10, 11, 50, 13, 14, 50, 16, 17], pools(5), BlockHeadroom(2, True, False, 0, False)),
            ([50, 11, 12, 13, 14, 50, 16, 17], pools(0), BlockHeadroom(0, True, True, 5, True)),
            ([50, 11, 12, 13, 14, 50, 16, 17], pools(), BlockHeadroom(0, True, False, 0, False)),
            ([*TRUTH[:7], 50], pools(7), BlockHeadroom(7, True, True, 1, False)),
            ([50, 50, 12, 13, 14, 15, 16, 17], pools(0, 1), BlockHeadroom(0, True, True, 1, False)),
        ],
        ids=["right", "covered", "not-covered", "suffix", "suffix-not-covered", "last-slot", "second-error"],
    )
    def test_block_counted_by_hand(self, drafts, pool, expected):
        assert analyse_block(drafts, pool, TRUTH) == expected

    def test_shares_of_three_blocks(self):
        total = Headroom(selector_gain=2)
        for drafts, pool in [
            (TRUTH, pools()),
            ([10, 11, 50, 13, 14, 50, 16, 17], pools(2)),
            ([50] * 8, pools()),
        ]:
            total.add(analyse_block(drafts, pool, TRUTH))
        record = total.to_dict()
        assert (record["num_blocks"], record["num_errors"], record["num_covered"]) == (3, 2, 1)
        assert record["pool_coverage"] == 0.5 and record["mean_accepted"] == pytest.approx(10 / 3)
        assert record["mean_oracle_gain"] == 1 and record["selector_share_of_ceiling"] == pytest.approx(2 / 3)
        assert record["suffix_share_right"] is None and record["suffix_points_over_control"] is None
        assert "50.0 %" in headroom_table(record) and "+1.00" in headroom_table(record)


def slow_log_probs(target, prefix, candidates, suffix) -> torch.Tensor:
    """One forward over the whole text for each candidate."""
    scores = []
    for candidate in candidates:
        ids = torch.tensor([[*prefix, candidate, *suffix]])
        with torch.no_grad():
            log_probs = target(ids).logits[0].log_softmax(dim=-1)
        start = len(prefix)
        scores.append(sum(log_probs[start + i, token] for i, token in enumerate(suffix)))
    return torch.stack(scores)


class TestSuffix:
    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_scores_are_those_of_whole_forwards(self, tiny, name):
        target = tiny.build_target(name)
        prefix = tiny.prompt_ids(20)[0].tolist()
        arguments = (target, prefix, [5, 9, 11, 40], [7, 8, 30, 31])
        torch.testing.assert_close(suffix_log_probs(*arguments), slow_log_probs(*arguments), rtol=1e-4, atol=1e-4)

    def test_right_suffix_tells_the_candidate_and_a_foreign_one_does_not(self, tiny):
        """Tokens of a cycle name their place, so a suffix fits behind one candidate alone."""
        target = tiny.build_cycle_target(48)

        def text(start: int) -> list[int]:
            return target.generate(torch.tensor([[start]]), do_sample=False, max_new_tokens=12)[0].tolist()

        first, second = text(3), text(40)
        wrong = [i for i in range(48) if i not in first + second][:3]
        total = Headroom()
        for number, ids in enumerate((first, second)):
            total.cases.append(SuffixCase(number, ids[:5], [*wrong, ids[5]], ids[6:10], truth_id=ids[5]))
        _score_cases(total, _Cached(target), max_cases=9)
        assert (total.num_suffix_right, total.num_suffix_cases) == (2, 2)
        assert total.num_control_cases == 2

    def test_control_needs_another_prompt(self, tiny):
        total = Headroom(cases=[SuffixCase(0, [3, 4], [5, 6], [7, 8, 9, 10], 5)] * 2)
        _score_cases(total, tiny.build_target("llama"), max_cases=9)
        assert total.num_suffix_cases == 2 and total.num_control_cases == 0
        assert total.to_dict()["suffix_points_over_control"] is None

    def test_number_of_scored_cases_is_limited(self, tiny):
        total = Headroom(cases=[SuffixCase(0, [3, 4], [5, 6], [7, 8, 9, 10], 5)] * 5)
        _score_cases(total, tiny.build_target("llama"), max_cases=2)
        assert total.num_suffix_cases == 2


class _Cached:
    """A table target has no decoder of its own; its whole forward fills the cache as well."""

    def __init__(self, target):
        self.target, self.config, self.device = target, target.config, target.device

    def get_decoder(self):
        return self.target

    def __call__(self, **kwargs):
        return self.target(**kwargs)


class TestWalk:
    @pytest.fixture
    def response(self, tiny):
        target = tiny.build_target("llama")
        return tiny.greedy(target, tiny.prompt_ids(12), max_new_tokens=45)[0].tolist()

    def test_drafter_without_errors_has_no_headroom(self, tiny, response):
        target = tiny.build_target("llama")
        drafter = tiny.scripted_drafter(target, response, spoiled=0.0, use_selector=False)
        record = measure_headroom(drafter, target, [(response, 12)]).to_dict()
        assert record["num_blocks"] == 9 and record["num_errors"] == 0
        assert record["mean_accepted"] == 4 and record["mean_oracle_gain"] == 0
        assert record["mean_selector_gain"] is None

    def test_scripted_errors_are_covered_and_counted_by_hand(self, tiny, response):
        """The script tells which positions are spoiled; the target's token is always in the pool there."""
        target = tiny.build_target("llama")
        drafter = tiny.scripted_drafter(target, response, spoiled=0.3, seed=1)
        spoiled = drafter.script.is_spoiled.tolist()
        anchor, blocks, accepted, gain, errors = 12, 0, 0, 0, 0
        while anchor + 4 < len(response):
            slots = spoiled[anchor + 1 : anchor + 5]
            blocks += 1
            if True in slots:
                error = slots.index(True)
                behind = slots[error + 1 :]
                run = behind.index(True) if True in behind else len(behind)
                errors, accepted, gain, anchor = errors + 1, accepted + error, gain + 1 + run, anchor + error + 1
            else:
                accepted, anchor = accepted + 4, anchor + 5
        found = measure_headroom(drafter, target, [(response, 12)], max_cases=0)
        assert errors >= 3 and gain > errors
        assert (found.num_blocks, found.num_errors, found.num_covered) == (blocks, errors, errors)
        assert (found.num_accepted, found.oracle_gain) == (accepted, gain)
        assert found.selector_gain is not None and found.selector_gain != 0

    def test_response_shorter_than_a_block_is_no_block(self, tiny, response):
        target = tiny.build_target("llama")
        drafter = tiny.build_drafter(target)
        assert measure_headroom(drafter, target, [(response[:15], 12)]).num_blocks == 0

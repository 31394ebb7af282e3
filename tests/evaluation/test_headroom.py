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
from hf_drelay.modeling.modeling_base import Pool
from hf_drelay.modeling.modeling_drelay import DRelayModel


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
    @pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
    def test_scores_are_those_of_whole_forwards(self, tiny, name):
        target = tiny.build_hybrid_target(name) if name == "qwen3_5" else tiny.build_target(name)
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


# Positions of the text by what the backbone drafts there. At all others it drafts the text.
SECOND, MISSED = (14, 29), (20,)  # the text's token is the second candidate, or none
# What the selector makes of it: it takes the second candidate.
REPAIRED, SPOILED = (14, 29), (22,)
HEADS = {
    "relay": {"head": "relay"},
    "bilinear": {"head": "bilinear"},
    "bilinear_convolutions": {"head": "bilinear", "conv_kernel_size": 2, "conv_group_size": 4},
    "recurrent": {"head": "recurrent", "pure_draft_prefix_len": 1},
    "markov": {"head": "markov"},
    "markov_confidence": {"head": "markov", "use_confidence_head": True, "confidence_threshold": 0.9},
    "independent": {"head": "independent"},
}


class TestEveryHead:
    """
    Blocks of six behind a prompt of 12 and the prefill's token, in a text of 36, counted by hand:

    | anchor | backbone                                | selector                            |
    |--------|-----------------------------------------|-------------------------------------|
    | 12     | 1 right, error at 14, covered, 4 behind | repairs it: 6 right                 |
    | 14     | 5 right, error at 20, not covered       | the same                            |
    | 20     | 6 right                                 | spoils 22: 1 right, covered         |
    | 27     | 1 right, error at 29, covered, 4 behind | repairs it: 6 right                 |
    | 29     | 6 right                                 | 6 right                             |
    """

    @pytest.fixture(scope="class")
    @classmethod
    def text(cls, tiny):
        target = tiny.build_target("llama")
        return tiny.greedy(target, tiny.prompt_ids(12), max_new_tokens=24)[0].tolist()

    def drafter(self, tiny, text, **fields):
        """Pools and choices as above; the head itself adds nothing, as before its training."""
        small = {"layout": "shifted", "block_size": 6, "head_rank": 8, "gru_hidden_dim": 12, "selector_scale": 0.0}
        model = tiny.build_drafter(tiny.build_target("llama"), **(small | fields))
        places = {}

        def head_inputs(rows, anchor_ids, session):
            inputs = DRelayModel.head_inputs(model, rows, anchor_ids, session)
            places["first"] = session.anchor_position + 1
            ids = inputs.pool.ids.clone()
            for slot in range(ids.shape[1]):
                position = places["first"] + slot
                others = [token for token in range(3, 20) if token != text[position]]
                right = [] if position in MISSED else [text[position]]
                order = others[:1] + right + others[1:] if position in SECOND + MISSED else right + others
                ids[0, slot] = torch.tensor(order[: ids.shape[2]])
            logits = (5.0 - torch.arange(ids.shape[2])).expand(ids.shape)
            inputs.pool = Pool(ids, logits, logits.log_softmax(dim=-1))
            return inputs

        def score(state, path_ids, first=0):
            scores = type(model.selector).score(model.selector, state, path_ids, first).clone()
            for slot in range(first, path_ids.shape[1]):
                if places["first"] + slot in REPAIRED + SPOILED:
                    scores[0, slot - first, 1] += 9.0
            return scores

        model.head_inputs = head_inputs
        if model.selector is not None:
            model.selector.score = score
        return model

    @pytest.mark.parametrize("name", HEADS)
    def test_counts_are_those_of_the_table(self, tiny, text, name):
        target, drafter = tiny.build_target("llama"), self.drafter(tiny, text, **HEADS[name])
        record = measure_headroom(drafter, target, [(text, 12)]).to_dict()
        counts = ("num_blocks", "num_accepted", "num_errors", "num_covered", "oracle_gain", "num_suffix_cases")
        assert [record[count] for count in counts] == [5, 1 + 5 + 6 + 1 + 6, 3, 2, 5 + 5, 2]
        assert record["pool_coverage"] == pytest.approx(2 / 3) and record["mean_oracle_gain"] == 2.0
        table = headroom_table(record)
        assert "| pool coverage at the first error | 66.7 % | 2 / 3 |" in table
        if name == "independent":
            assert record["selector_gain"] is record["selector_share_of_ceiling"] is None
            assert "| share of the ceiling that the selector captures | – | – |" in table
            return
        assert record["selector_gain"] == 5 + 0 - 5 + 5 + 0
        assert record["selector_share_of_ceiling"] == 0.5 and record["mean_selector_gain"] == 1.0
        assert (record["num_selector_errors"], record["num_selector_covered"]) == (2, 1)
        assert record["selector_pool_coverage"] == 0.5
        assert "| share of the ceiling that the selector captures | 50.0 % | 5 / 10 |" in table

    def test_shorter_blocks_are_counted_as_such(self, tiny, text):
        """
        Blocks of two at 12, 14, 17, 20, ... 32: one error, at 14, with nothing behind it that the oracle could win
        too. The selector repairs it, and spoils 22.
        """
        target, drafter = tiny.build_target("llama"), self.drafter(tiny, text, head="markov")
        found = measure_headroom(drafter, target, [(text, 12)], num_draft_tokens=2)
        assert (found.num_blocks, found.num_errors, found.oracle_gain, found.selector_gain) == (8, 1, 1, 1 - 1)
        assert not found.cases

    def test_a_chain_has_no_headroom(self, tiny):
        target = tiny.build_target("llama")
        fields = {"backbone": "eagle3", "layout": "shifted", "num_hidden_layers": 1, "use_mask_embedding": False}
        drafter = tiny.build_drafter(target, **fields)
        with pytest.raises(ValueError, match="`drafter` has the backbone 'eagle3', which drafts token by token"):
            measure_headroom(drafter, target, [])

    @pytest.mark.parametrize("option", [{"tree_budget": 4}, {"loop_gate": -1.0}, {"use_selector": False}])
    def test_an_option_without_a_meaning_is_named(self, tiny, option):
        target = tiny.build_target("llama")
        with pytest.raises(ValueError, match=f"`{next(iter(option))}` .* has no meaning in a headroom analysis"):
            measure_headroom(tiny.build_drafter(target), target, [], **option)

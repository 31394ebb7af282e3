"""The figures of a call, on rounds written by hand."""

import json
import math

import pytest
import torch

from hf_drelay.modeling import draft_statistics
from hf_drelay.modeling.draft_statistics import SLOT_CLASSES, DraftStatistics, PhaseClock


def count(draft_ids, choices, pool_ids, chosen_ids) -> dict[str, int]:
    """Slot classes that one round adds, zeros left out."""
    statistics = DraftStatistics()
    statistics.add_round(draft_ids, choices, pool_ids, chosen_ids, num_stages=1)
    return {name: number for name, number in statistics.slot_classes.items() if number}


class TestSlotClasses:
    @pytest.mark.parametrize(
        ("token", "choice", "kept", "chosen", "expected"),
        [
            (5, 0, 5, 5, "kept_right"),
            (5, 0, 5, 6, "kept_wrong"),
            (5, 2, 4, 5, "repaired_right"),
            (5, 2, 4, 4, "repaired_harmful"),
            (5, 2, 4, 6, "both_wrong"),
        ],
    )
    def test_class_of_a_verified_slot(self, token, choice, kept, chosen, expected):
        assert count([token], [choice], [kept], [chosen]) == {expected: 1}

    def test_slots_behind_the_first_rejection_are_unverified(self):
        """Also where a draft happens to equal what the target wrote later: it was judged under another prefix."""
        assert count([5, 6, 7], [0, 0, 1], [5, 6, 8], [9]) == {"kept_wrong": 1, "unverified": 2}

    def test_round_that_is_accepted_whole(self):
        found = count([5, 6, 7], [0, 1, 0], [5, 8, 7], [5, 6, 7, 99])
        assert found == {"kept_right": 2, "repaired_right": 1}

    def test_end_token_that_was_drafted_right_counts_as_right(self):
        """The loop then commits no bonus token behind it."""
        assert count([5, 2], [0, 0], [5, 2], [5, 2]) == {"kept_right": 2}

    def test_every_slot_has_one_class(self):
        statistics = DraftStatistics()
        statistics.add_round([5, 6, 7], [0, 1, 2], [5, 8, 9], [5, 8], 1)
        statistics.add_round([5, 6], [3, 0], [4, 6], [4], 1)
        assert sum(statistics.slot_classes.values()) == sum(statistics.num_drafted) == 5
        assert tuple(statistics.slot_classes) == SLOT_CLASSES


@pytest.fixture
def statistics() -> DraftStatistics:
    """Three rounds of three drafts: all accepted, one accepted, none accepted; and two rounds without a draft."""
    statistics = DraftStatistics()
    statistics.add_round([1, 2, 3], [0, 0, 0], [1, 2, 3], [1, 2, 3, 4], num_stages=1)
    statistics.add_round([1, 2, 3], [0, 1, 0], [1, 5, 3], [1, 5], num_stages=2)
    statistics.add_round([1, 2, 3], [2, 0, 0], [7, 2, 3], [8], num_stages=3)
    statistics.num_plain_rounds = 2
    return statistics


class TestFigures:
    def test_acceptance_length_counts_the_bonus_token_and_no_plain_rounds(self, statistics):
        assert statistics.acceptance_length == pytest.approx((4 + 2 + 1) / 3)

    def test_rounds_and_stages_are_counted_over_rounds_with_a_draft(self, statistics):
        assert (statistics.num_rounds, statistics.mean_stages) == (3, 2.0)

    def test_acceptance_by_slot_is_conditional_on_reaching_the_slot(self, statistics):
        assert statistics.acceptance_by_slot == pytest.approx([2 / 3, 1 / 2, 1.0])

    def test_acceptance_by_slot_leaves_out_shorter_drafts(self):
        statistics = DraftStatistics()
        statistics.add_round([1], [0], [1], [1, 2], 1)
        statistics.add_round([1, 2], [0, 0], [1, 2], [1, 9], 1)
        assert statistics.acceptance_by_slot == [1.0, 0.0]

    def test_acceptance_by_slot_counts_a_right_end_token(self):
        """No bonus token follows an end token, yet the draft was accepted, as the slot classes say too."""
        statistics = DraftStatistics()
        statistics.add_round([1, 2], [0, 0], [1, 2], [1, 2], 1)
        assert statistics.slot_classes["kept_right"] == 2
        assert statistics.acceptance_by_slot == [1.0, 1.0]

    def test_acceptance_by_slot_is_not_a_number_where_no_round_came(self):
        statistics = DraftStatistics()
        statistics.add_round([1, 2], [0, 0], [1, 2], [9], 1)
        first, second = statistics.acceptance_by_slot
        assert first == 0.0 and math.isnan(second)

    def test_repairs_have_names_of_their_own(self, statistics):
        assert (statistics.num_repaired_right, statistics.num_repaired_harmful) == (0, 1)

    def test_means_are_not_a_number_without_rounds(self):
        empty = DraftStatistics()
        assert math.isnan(empty.acceptance_length) and math.isnan(empty.mean_stages)
        assert (empty.num_rounds, empty.acceptance_by_slot) == (0, [])


class TestMerge:
    def test_figures_are_those_of_all_rounds_together(self, statistics):
        other = DraftStatistics(num_plain_rounds=1, phase_ms={"draft": 2.0})
        other.add_round([1], [0], [1], [1, 2], num_stages=1)
        statistics.phase_ms = {"draft": 1.0, "select": 4.0}
        statistics.merge(other)
        assert statistics.num_committed == [4, 2, 1, 2]
        assert statistics.num_drafted == [3, 3, 3, 1]
        assert statistics.num_stages == [1, 2, 3, 1]
        assert statistics.num_plain_rounds == 3
        assert statistics.slot_classes["kept_right"] == 5
        assert statistics.phase_ms == {"draft": 3.0, "select": 4.0}

    def test_other_statistics_stay_as_they_were(self, statistics):
        total = DraftStatistics()
        total.merge(statistics)
        total.merge(statistics)
        assert (total.num_rounds, statistics.num_rounds) == (6, 3)
        assert sum(statistics.slot_classes.values()) == 9


class TestToDict:
    def test_counts_and_derived_figures_survive_json(self, statistics):
        statistics.phase_ms = {"draft": 1.5}
        loaded = json.loads(json.dumps(statistics.to_dict()))
        assert loaded == statistics.to_dict()
        assert loaded["num_committed"] == [4, 2, 1]
        assert (loaded["num_rounds"], loaded["mean_stages"], loaded["num_plain_rounds"]) == (3, 2.0, 2)

    @pytest.mark.parametrize("num_rounds", [0, 1])
    def test_figures_without_a_value_are_valid_json(self, num_rounds):
        """NaN is no JSON: other readers reject a file that holds it. The round here reaches its first slot only."""
        statistics = DraftStatistics()
        for _ in range(num_rounds):
            statistics.add_round([1, 2], [0, 0], [1, 2], [9], 1)
        json.dumps(statistics.to_dict(), allow_nan=False)

    def test_dictionary_is_a_copy(self, statistics):
        statistics.to_dict()["num_committed"].append(99)
        assert statistics.num_committed == [4, 2, 1]


class TestPhaseClock:
    def test_times_add_up_by_phase(self, monkeypatch):
        times = iter([1.0, 1.5, 3.5, 3.75])
        monkeypatch.setattr(PhaseClock, "_now", staticmethod(lambda: next(times)))
        clock = PhaseClock()
        clock.lap("draft")
        clock.lap("verify")
        clock.lap("draft")
        assert clock.phase_ms == {"draft": 750.0, "verify": 2000.0}

    def test_disabled_clock_neither_measures_nor_waits_for_a_device(self, monkeypatch):
        def fail(*_):
            raise AssertionError("a disabled clock asked for the time or for the device")

        monkeypatch.setattr(draft_statistics.time, "perf_counter", fail)
        monkeypatch.setattr(torch.cuda, "is_available", fail)
        clock = PhaseClock(enabled=False)
        clock.lap("draft")
        assert clock.phase_ms == {}

    def test_enabled_clock_waits_for_the_device(self, monkeypatch):
        waits = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
        PhaseClock().lap("draft")
        assert len(waits) == 2

"""Tables and figures of studies: every number is that of the record, seeds are averaged, figures are valid SVG."""

import xml.etree.ElementTree as ET

import pytest

from hf_drelay.evaluation import studies


ENVIRONMENT = {"cpu_threads": 1, "device": "a CPU"}


def row(arm, seed, tau, start="the shared backbone", **fields):
    def way(value):
        return {
            "acceptance_length": value,
            "responses": [[round(10 * value) - 1, 10], [round(10 * value) + 1, 10]],
            "slot_classes": {"repaired_right": 3, "repaired_harmful": 1},
            "ms_per_round": {"draft": 4.0, "select": 1.5},
        }

    base = {"arm": arm, "seed": seed, "command": f"scripts/train_arms.py --arm {arm}", "num_steps": 100 + seed}
    base |= {"start": start}
    base |= {"against": "better", "head_parameters": 2_000_000, "environment": ENVIRONMENT}
    return base | {"one stage": way(tau), "DLoop": way(tau + 0.5)} | fields


ARMS = {
    "num_responses": 7,
    "minutes": 5.0,
    "seconds_per_step": 1.5,
    "DLoop": {"loop_gate": -1.0, "max_stages": 3, "num_draft_tokens": 3},
    "rows": [
        row("worse", 0, 2.0),
        row("better", 1, 2.4, pool_coverage={"backbone": 0.5, "head": 0.7}),
        row("better", 0, 2.2, pool_coverage={"backbone": 0.6, "head": None}),
        row("EAGLE-3", 0, 1.5, "the target's last layer", head_parameters=0),
    ],
}


def test_arms_stand_in_order_and_seeds_are_pooled():
    lines = studies.arms_table(ARMS).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| better", "| worse", "| EAGLE-3"]
    taus = "2.300 (2.20 .. 2.40) |  | 2.800 (2.70 .. 2.90)"
    assert lines[2] == f"| better | 2.00 | {taus} | 6 / 2 | 55.0% / 70.0% | 100 | 2 (2.200, 2.400) |"
    assert lines[3].endswith("| 3 / 1 |  | 100 | 1 |")
    assert "| better: -0.300 (-0.300 .. -0.300) |" in lines[3]  # both have the same spread, so it cancels


def test_coverage_has_a_column_where_it_was_measured():
    bare = ARMS | {"rows": [{k: v for k, v in own.items() if k != "pool_coverage"} for own in ARMS["rows"]]}
    assert "pool at" in studies.arms_table(ARMS) and "pool at" not in studies.arms_table(bare)
    assert "Pool at" not in studies.arms_circumstances(bare)


def test_interval_holds_the_mean_and_shrinks_with_the_spread():
    def rows(*responses):
        return [{"one stage": {"responses": list(responses)}}]

    wide, narrow = rows(*[[2, 2], [6, 2]] * 10), rows(*[[4, 2]] * 20)
    low, high = studies.tau_interval(wide, "one stage")
    assert 1.0 < low < 2.0 < high < 3.0
    assert studies.tau_interval(narrow, "one stage") == (2.0, 2.0)
    difference, low, high = studies.tau_difference(wide, narrow, "one stage")
    assert difference == 0.0 and -1.0 < low < 0.0 < high < 1.0
    with pytest.raises(ValueError, match="20 and 1 responses"):
        studies.tau_difference(wide, rows([4, 2]), "one stage")


def test_circumstances_tell_what_starts_elsewhere():
    text = studies.arms_circumstances(ARMS)
    assert "7 responses" in text and "5 minutes on 1 thread of a CPU" in text
    assert "EAGLE-3 starts from the target's last layer." in text
    assert "Pool at the first error: how often" in text
    assert "`python scripts/train_arms.py --arm worse`" in text


def speed(kind, size, name, rate, **more):
    return {"kind": kind, "batch_size": size, "name": name, "tokens_per_s": rate} | more


LOOP = {
    "command": "scripts/benchmark_loop.py",
    "arguments": {"num_prompts": "2", "max_new_tokens": "8", "temperature": "0.0"},
    "prompt_files": ["a.jsonl", "b.jsonl"],
    "environment": {"cpu_threads": 2, "device": "a CPU"},
    "rows": [
        speed("a", 1, "plain", 10.0, host_ms=1.0),
        speed("b", 1, "plain", 20.0, host_ms=2.0),
        speed("a", 1, "host chain", 15.0, host_ms=3.0),
        speed("b", 1, "host chain", 15.0, host_ms=3.0),
        speed("a", 1, "chain", 30.0, host_ms=2.0),
        speed("a", 4, "plain", 40.0),
        speed("a", 4, "chain", 20.0),
    ],
}


def test_speeds_are_pooled_over_kinds_and_set_against_plain_decoding():
    assert studies.loop_table(LOOP).splitlines() == [
        "| | batch 1 | batch 4 |",
        "|---|---|---|",
        "| plain | 15.0 (1.00) | 40.0 (1.00) |",
        "| host chain | 15.0 (1.00) |  |",
        "| chain | 30.0 (2.00) | 20.0 (0.50) |",
    ]
    assert "1.5 (plain), 3.0 (host chain), 2.0 (chain)" in studies.loop_circumstances(LOOP)


def test_figures_are_drawn_and_name_their_axes(tmp_path):
    studies.draw_arms(ARMS, tmp_path / "arms.svg")
    studies.draw_loop(LOOP, tmp_path / "loop.svg")
    for name, label in (("arms", "tokens committed in a round"), ("loop", "rows of the batch")):
        text = (tmp_path / f"{name}.svg").read_text()
        assert ET.fromstring(text).tag.endswith("svg")
        assert label in text

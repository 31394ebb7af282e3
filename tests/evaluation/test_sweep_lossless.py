"""The grid of a sweep and its best point; losslessness with the reason of each difference."""

import json
from dataclasses import replace

import pytest
import torch

from hf_drelay.evaluation import lossless
from hf_drelay.evaluation.benchmark import BenchmarkConfig
from hf_drelay.evaluation.divergence import Divergence, first_divergence
from hf_drelay.evaluation.lossless import check_lossless, explain, summarize_lossless
from hf_drelay.evaluation.records import recover_rows
from hf_drelay.evaluation.sweep import ALWAYS_LOOP, best_point, sweep_options, sweep_ways, write_best
from hf_drelay.evaluation.tasks import Conversation
from hf_drelay.evaluation.ways import PLAIN, drafter_way


class TestGrid:
    def test_stages_mean_nothing_with_dloop_off(self):
        assert sweep_options([None, -0.5], [2, 3], [4]) == [
            {"loop_gate": None, "num_draft_tokens": 4},
            {"loop_gate": -0.5, "num_draft_tokens": 4, "max_stages": 2},
            {"loop_gate": -0.5, "num_draft_tokens": 4, "max_stages": 3},
        ]

    def test_ways_are_plain_decoding_and_the_points(self, tiny):
        drafter = tiny.build_drafter(tiny.build_target("llama"))
        ways = sweep_ways({5: drafter}, sweep_options([None, -0.5], [2], [2, None]), proposal="greedy")
        assert [way.name for way in ways][0] == PLAIN and len({way.name for way in ways}) == 5
        assert ways[-1].description["loop_gate"] == -0.5 and ways[-1].description["proposal"] == "greedy"
        assert ways[1].description["num_draft_tokens"] == 2

    def test_more_tokens_than_a_block_has_are_refused(self, tiny):
        drafter = tiny.build_drafter(tiny.build_target("llama"))
        with pytest.raises(ValueError, match="`num_draft_tokens` 9 is more than a block of 5 drafts"):
            sweep_ways({5: drafter}, sweep_options([None], [2], [9]))

    def test_best_point_is_written_and_nothing_else_changes(self, invented_rows, tmp_path):
        rows = invented_rows(["gsm8k"], gates=(None, -0.5))
        for row in rows:
            row["tokens_per_s"] = 100.0 if row["loop_gate"] == -0.5 else 1.0
        assert best_point(rows)["loop_gate"] == -0.5
        before = {"block_size": 8, "loop_gate": None, "max_stages": 2, "num_draft_tokens": 4, "hidden_size": 32}
        (tmp_path / "config.json").write_text(json.dumps(before))
        best = {"loop_gate": -0.5, "max_stages": 3, "num_draft_tokens": None}
        best |= {"proposal": "sample", "confidence_threshold": 0.0}  # with which all points were measured
        assert write_best(tmp_path, rows) == best
        assert json.loads((tmp_path / "config.json").read_text()) == before | best

    def test_open_gate_is_written_as_a_number(self, invented_rows, tmp_path):
        rows = invented_rows(["gsm8k"], gates=("-inf",))
        (tmp_path / "config.json").write_text(json.dumps({"block_size": 8}))
        for row in rows:
            row["walltimes_s"] = [0.1 if row["loop_gate"] else 10.0]
        assert write_best(tmp_path, rows)["loop_gate"] == ALWAYS_LOOP
        text = (tmp_path / "config.json").read_text()
        assert json.loads(text)["loop_gate"] == ALWAYS_LOOP and "Infinity" not in text  # which is no JSON

    def test_best_of_another_block_size_is_not_written(self, invented_rows, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"block_size": 16}))
        rows = [r for r in invented_rows(["gsm8k"], gates=(None,)) if r["kind"] != "prompt_lookup"]
        with pytest.raises(ValueError, match="the fastest point has `block_size` 8"):
            write_best(tmp_path, rows)

    @pytest.mark.parametrize("option", [{"use_selector": False}, {"tree_budget": 4}, {"decoding_loop": "host"}])
    def test_options_that_no_configuration_holds_are_not_written(self, invented_rows, tmp_path, option):
        (tmp_path / "config.json").write_text(json.dumps({"block_size": 8}))
        rows = [row | option for row in invented_rows(["gsm8k"])]
        with pytest.raises(ValueError, match=f"`{next(iter(option))}` .* is an option of a call"):
            write_best(tmp_path, rows)

    def test_hub_drafter_cannot_be_written(self, invented_rows):
        with pytest.raises(OSError, match="`drafter` owner/name is no local folder"):
            write_best("owner/name", invented_rows(["gsm8k"]))


CONVERSATIONS = [Conversation("gsm8k", number, (text,)) for number, text in enumerate(["What is 5+7?", "abc", "dd"])]
CONFIG = BenchmarkConfig(max_new_tokens=10)


class TestLossless:
    @pytest.fixture(scope="class")
    @classmethod
    def parts(cls, tiny):
        target = tiny.build_target("llama")
        drafter = tiny.build_drafter(target)
        ways = [drafter_way("off", drafter), drafter_way("open", drafter, loop_gate=float("-inf"))]
        return target, tiny.build_tokenizer(tiny.VOCAB_SIZE), ways

    def test_drafters_are_lossless_and_rows_resume(self, parts, tmp_path, monkeypatch):
        output = tmp_path / "rows.json"
        rows = check_lossless(*parts, CONVERSATIONS, CONFIG, output, quiet=True)
        assert len(rows) == 6 and all(row["divergence"] is None for row in rows)
        lines = output.read_text().splitlines()
        output.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
        again = check_lossless(*parts, CONVERSATIONS, CONFIG, output, resume=True, quiet=True)
        assert sorted((r["prompt"], r["way"]) for r in again) == sorted((r["prompt"], r["way"]) for r in rows)
        assert len(output.read_text().splitlines()) == 6
        monkeypatch.setattr(lossless, "timed_generate", None)
        assert len(check_lossless(*parts, CONVERSATIONS, CONFIG, output, resume=True, quiet=True)) == 6

    def test_other_settings_are_refused(self, parts, tmp_path):
        output = tmp_path / "rows.json"
        check_lossless(*parts, CONVERSATIONS[:1], CONFIG, output, quiet=True)
        with pytest.raises(ValueError, match="has rows of float32 already"):
            check_lossless(*parts, CONVERSATIONS[:1], CONFIG, output, quiet=True)
        with pytest.raises(ValueError, match="rows with other settings"):
            check_lossless(*parts, CONVERSATIONS[:1], BenchmarkConfig(9), output, resume=True, quiet=True)
        with pytest.raises(ValueError, match="`temperature` is 1"):
            check_lossless(*parts, CONVERSATIONS[:1], BenchmarkConfig(9, 1.0), output, quiet=True)

    def test_rows_behind_a_torn_end_stay_readable(self, parts, tmp_path):
        output = tmp_path / "rows.json"
        check_lossless(*parts, CONVERSATIONS[:1], CONFIG, output, quiet=True)
        whole = output.read_bytes()
        output.write_bytes(whole.replace(b"float32", b"bfloat16") + whole[:100])
        check_lossless(*parts, CONVERSATIONS[:1], CONFIG, output, quiet=True)
        assert [row["dtype"] for row in recover_rows(output)] == ["bfloat16"] * 2 + ["float32"] * 2

    def test_prompts_that_changed_are_refused(self, parts, tmp_path):
        output = tmp_path / "rows.json"
        check_lossless(*parts, CONVERSATIONS[:2], CONFIG, output, quiet=True)
        changed = [CONVERSATIONS[0], Conversation("gsm8k", 1, ("another text",))]
        with pytest.raises(ValueError, match="rows of gsm8k prompt 1, whose text has changed"):
            check_lossless(*parts, changed, CONFIG, output, resume=True, quiet=True)

    def test_rows_of_another_drafter_under_the_same_name_are_refused(self, parts, tiny, tmp_path):
        target, tokenizer, _ = parts
        output = tmp_path / "rows.json"
        for seed in (0, 1):
            ways = [drafter_way("mine", tiny.build_drafter(target, seed=seed))]
            call = (target, tokenizer, ways, CONVERSATIONS[:1], CONFIG, output)
            if seed == 0:
                check_lossless(*call, quiet=True)
                continue
            with pytest.raises(ValueError, match="rows of 'mine' with another `drafter_weights_sha256`"):
                check_lossless(*call, resume=True, quiet=True)

    def test_real_difference_is_found_and_not_explained(self, parts, tmp_path, monkeypatch):
        """An assistant that changes a token where the target is sure must be caught."""
        original = lossless.timed_generate

        def spoiled(*args, **kwargs):
            ids, elapsed_s = original(*args, **kwargs)
            return (
                ids if kwargs.get("assistant_model") is None else [*ids[:4], (ids[4] + 1) % 96, *ids[5:]]
            ), elapsed_s

        monkeypatch.setattr(lossless, "timed_generate", spoiled)
        rows = check_lossless(*parts, CONVERSATIONS, CONFIG, tmp_path / "rows.json", quiet=True)
        records = summarize_lossless(rows)
        assert [r["num_different"] for r in records] == [3, 3] and [r["num_unexplained"] for r in records] == [3, 3]
        assert rows[0]["divergence"]["position"] == 4 and rows[0]["divergence"]["logit_gap"] > 1e-3
        assert "token 4 is" in explain(rows[0]) and "does NOT explain" in explain(rows[0])

    def test_lost_token_is_never_explained(self, parts):
        """However close the two best logits are."""
        target, prompt = parts[0], torch.tensor([[1, 2, 3]])
        divergence = first_divergence(target, prompt, [4, 5, 6], [4, 5])
        assert not replace(divergence, logit_gap=0.0).is_explained
        assert replace(divergence, logit_gap=0.0, other_id=7).is_explained

    def test_near_tie_is_explained_by_rounding(self, tiny):
        """Two logits that are the same to the type's precision; the prompt alone decides the gap."""
        table = torch.zeros(8, 8)
        table[3, 4], table[3, 5] = 6.0, 6.0 - 1e-6
        target = tiny.build_table_target(table)
        found = first_divergence(target, torch.tensor([[1, 3]]), [4, 0], [5, 0])
        assert found.position == 0 and found.logit_gap < 1e-5 and found.is_explained
        table[3, 5] = 5.0
        found = first_divergence(tiny.build_table_target(table), torch.tensor([[1, 3]]), [4, 0], [5, 0])
        assert found.logit_gap == pytest.approx(1.0, abs=1e-3) and not found.is_explained

    def test_rounding_grows_with_the_type(self, tiny):
        target = tiny.build_table_target(torch.eye(8) * 8)
        gaps = {}
        for dtype in (torch.float32, torch.bfloat16):
            found = first_divergence(target.to(dtype), torch.tensor([[1, 3]]), [3], [4])
            gaps[dtype] = found.rounding
        assert gaps[torch.bfloat16] == pytest.approx(4 * 2**-7 * 8, rel=0.05)
        assert gaps[torch.float32] == pytest.approx(4 * 2**-23 * 8, rel=0.05)

    def test_shorter_output_is_a_difference(self, tiny):
        target = tiny.build_target("llama")
        found = first_divergence(target, tiny.prompt_ids(), [5, 6, 7], [5, 6])
        assert isinstance(found, Divergence) and (found.position, found.plain_id, found.other_id) == (2, 7, None)

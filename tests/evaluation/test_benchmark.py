"""The benchmark on tiny models: right counts, history, resuming, phases, and drafters whose figures are known."""

import json
import random
import time

import pytest
import torch
from transformers import StaticCache

from hf_drelay.evaluation import benchmark as module
from hf_drelay.evaluation.benchmark import BenchmarkConfig, run_benchmark, token_origins
from hf_drelay.evaluation.measure import PHASES, Measurement, TargetClock, measure
from hf_drelay.evaluation.tasks import Conversation
from hf_drelay.evaluation.ways import (
    COMPILED,
    PLAIN,
    PROMPT_LOOKUP,
    compiled_way,
    drafter_way,
    plain_way,
    prompt_lookup_way,
    standard_ways,
)
from hf_drelay.modeling.candidate_generator import DRelayCandidateGenerator
from hf_drelay.modeling.compat import cache_argument
from hf_drelay.modeling.draft_statistics import DraftStatistics


CONVERSATIONS = [
    Conversation("gsm8k", 0, ("What is 5+7?",)),
    Conversation("mt_bench", 0, ("Hello", "and then?")),
    Conversation("mt_bench", 4, ("", "")),
    Conversation("mt_bench", 2, ("你好 мир", "x" * 900)),
]
NUM_TURNS = 7
CONFIG = BenchmarkConfig(max_new_tokens=10)


@pytest.fixture(scope="module")
def parts(tiny):
    """`(target, tokenizer, ways)`."""
    target = tiny.build_target("llama")
    ways = [plain_way(), prompt_lookup_way(target), drafter_way("tiny", tiny.build_drafter(target))]
    return target, tiny.build_tokenizer(tiny.VOCAB_SIZE), ways


def run(parts, output, config=CONFIG, conversations=CONVERSATIONS, **kwargs) -> list[dict]:
    target, tokenizer, ways = parts
    return run_benchmark(target, tokenizer, ways, conversations, config, output, quiet=True, **kwargs)


def keys(rows) -> list[tuple]:
    return [(row["task"], row["prompt"], row["turn"], row["way"]) for row in rows]


@pytest.fixture(scope="module")
def measured(parts, tmp_path_factory):
    output = tmp_path_factory.mktemp("rows") / "rows.json"
    return run(parts, output), output


class TestRows:
    def test_every_way_has_one_row_for_every_turn(self, measured):
        rows, output = measured
        assert len(rows) == len(set(keys(rows))) == NUM_TURNS * 3
        assert [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] == rows

    def test_phases_add_up_to_the_walltime(self, measured):
        for row in measured[0]:
            assert tuple(row["phases_ms"]) == PHASES
            assert min(row["phases_ms"].values()) >= 0
            assert sum(row["phases_ms"].values()) == pytest.approx(row["phases_walltime_ms"], rel=0.05)
            assert row["phases_walltime_ms"] == pytest.approx(1e3 * row["walltimes_s"][0])

    def test_greedy_outputs_are_compared(self, measured):
        assert all(row["identical"] is True and row["divergence"] is None for row in measured[0])

    def test_long_prompt_is_cut_and_says_so(self, measured):
        cut = {row["prompt_tokens_cut"] for row in measured[0] if (row["prompt"], row["turn"]) == (2, 1)}
        assert len(cut) == 1 and cut.pop() > 0

    def test_plain_is_measured_against_itself(self, measured):
        plain = [row for row in measured[0] if row["way"] == PLAIN]
        assert all(row["speedup"] == 1 and row["break_even_tau"] == 1 and row["overhead_share"] == 0 for row in plain)

    def test_row_says_what_was_measured_and_where(self, measured):
        row = measured[0][2]
        assert row["drafter_weights_sha256"] != row["target_weights_sha256"]
        assert row["settings"]["max_new_tokens"] == 10 and row["environment"]["torch"] == torch.__version__
        assert row["dtype"] == "float32" and row["block_size"] == 5 and row["batch_size"] == 1

    def test_pieces_make_up_the_text(self, measured):
        for row in measured[0]:
            if row["pieces"] is not None:
                plain = next(r for r in measured[0] if keys([r])[0] == (*keys([row])[0][:3], PLAIN))
                assert "".join(text for text, _ in row["pieces"]) == plain["text"]

    def test_second_turn_sees_the_plain_answer(self, parts, tmp_path, monkeypatch):
        asked = []
        original = module.encode_conversation

        def encode(tokenizer, turns, answers, *rest):
            asked.append((list(turns), list(answers)))
            return original(tokenizer, turns, answers, *rest)

        monkeypatch.setattr(module, "encode_conversation", encode)
        rows = run(parts, tmp_path / "rows.json", conversations=CONVERSATIONS[1:2])
        first = next(row["text"] for row in rows if row["way"] == PLAIN and row["turn"] == 0)
        assert asked == [(["Hello"], []), (["Hello", "and then?"], [first])]

    def test_sampled_rows_are_not_compared(self, parts, tmp_path):
        rows = run(parts, tmp_path / "rows.json", BenchmarkConfig(4, temperature=1.0), CONVERSATIONS[:1])
        assert len(rows) == 3 and not any("identical" in row for row in rows)


class TestOrder:
    def test_ways_take_turns_and_the_warm_up_is_no_row(self, parts, tmp_path, monkeypatch):
        calls = []
        monkeypatch.setattr(
            module, "measure", lambda t, i, way, *a, **k: calls.append(way.name) or measure(t, i, way, *a, **k)
        )
        rows = run(parts, tmp_path / "rows.json")
        groups = [calls[i : i + 3] for i in range(0, len(calls), 3)]
        assert len(calls) == len(rows) and all(len(set(group)) == 3 for group in groups)
        assert len({tuple(group) for group in groups}) > 1
        for row in rows:
            assert 0 <= row["order"] < 3

    def test_every_way_is_warmed_up_once_before_the_first_measurement(self, parts, tmp_path, monkeypatch):
        warm = []
        monkeypatch.setattr(module, "timed_generate", lambda *a, **k: warm.append(k.get("max_new_tokens")))
        run(parts, tmp_path / "rows.json", conversations=CONVERSATIONS[:2])
        assert warm == [10] * 6  # timed and profiled, three ways


class TestResume:
    @pytest.mark.parametrize("seed", range(4))
    def test_killed_anywhere_it_neither_loses_nor_repeats_a_row(self, parts, measured, tmp_path, seed):
        rows, output = measured
        data = output.read_bytes()
        cut = random.Random(seed).randrange(1, len(data))
        killed = tmp_path / "rows.json"
        killed.write_bytes(data[:cut])
        resumed = run(parts, killed, resume=True)
        assert sorted(keys(resumed)) == sorted(keys(rows))
        assert [json.loads(line) for line in killed.read_text(encoding="utf-8").splitlines()] == resumed
        # What was whole is kept to the letter, walltimes included.
        whole = data[:cut].count(b"\n") // 3 * 3
        assert resumed[:whole] == rows[:whole]

    def test_finished_run_measures_nothing_more(self, parts, measured, tmp_path, monkeypatch):
        rows, output = measured
        copy = tmp_path / "rows.json"
        copy.write_bytes(output.read_bytes())
        monkeypatch.setattr(module, "measure", None)
        assert run(parts, copy, resume=True) == rows

    def test_history_of_a_resumed_conversation_is_the_stored_answer(self, parts, tmp_path):
        output = tmp_path / "rows.json"
        rows = run(parts, output, conversations=CONVERSATIONS[1:2])
        output.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
        again = run(parts, output, conversations=CONVERSATIONS[1:2], resume=True)
        assert [row["prompt_tokens"] for row in again] == [row["prompt_tokens"] for row in rows]
        assert again[3]["text"] == rows[3]["text"]

    def test_rows_are_not_overwritten_without_the_flag(self, parts, measured):
        with pytest.raises(ValueError, match="has rows already. Add `--resume`"):
            run(parts, measured[1])

    def test_rows_of_other_settings_are_refused(self, parts, measured):
        before = measured[1].read_bytes()
        with pytest.raises(ValueError, match="rows of another run"):
            run(parts, measured[1], BenchmarkConfig(max_new_tokens=11), resume=True)
        assert measured[1].read_bytes() == before

    @pytest.mark.parametrize("change", ["option", "configuration"])
    def test_rows_of_other_options_are_refused(self, parts, tiny, tmp_path, monkeypatch, change):
        target, tokenizer, _ = parts
        drafter = tiny.build_drafter(target, head="markov", use_confidence_head=True)
        before = [plain_way(), drafter_way("mine", drafter)]
        run((target, tokenizer, before), tmp_path / "rows.json", conversations=CONVERSATIONS[:1])
        if change == "configuration":
            monkeypatch.setattr(drafter.config, "history_window", 13)
        options = {"confidence_threshold": 0.5} if change == "option" else {}
        after = [plain_way(), drafter_way("mine", drafter, **options)]
        with pytest.raises(ValueError, match="rows of another run"):
            run((target, tokenizer, after), tmp_path / "rows.json", resume=True)

    def test_two_runs_never_write_to_the_same_file(self, parts, tmp_path, monkeypatch):
        output = tmp_path / "rows.json"

        def second_run(*args, **kwargs):
            with pytest.raises(ValueError, match="is being written by another process"):
                run(parts, output)
            return measure(*args, **kwargs)

        measure = module.measure
        monkeypatch.setattr(module, "measure", second_run)
        rows = run(parts, output, conversations=CONVERSATIONS[:1])
        assert len(rows) == len(output.read_text(encoding="utf-8").splitlines())

    def test_prompts_that_changed_since_are_refused(self, parts, measured, tmp_path):
        output = tmp_path / "rows.json"
        output.write_bytes(measured[1].read_bytes())
        task, index, turns = CONVERSATIONS[0].task, CONVERSATIONS[0].index, CONVERSATIONS[0].turns
        changed = [Conversation(task, index, ("another text", *turns[1:])), *CONVERSATIONS[1:]]
        with pytest.raises(ValueError, match=f"has rows of {task} prompt {index}, whose text has changed"):
            run(parts, output, conversations=changed, resume=True)

    @pytest.mark.parametrize("content", ["my notes", '{"my": "data"}', '{"turns": ["a"]}\n{"turns": ["b"]}'])
    def test_file_of_something_else_is_left_alone(self, parts, tmp_path, content):
        output = tmp_path / "notes.txt"
        output.write_text(content)
        with pytest.raises(ValueError, match="is no file of result rows"):
            run(parts, output, resume=True)
        assert output.read_text() == content

    def test_last_row_without_its_line_end_is_a_row(self, parts, measured, tmp_path, monkeypatch):
        rows, output = measured
        copy = tmp_path / "rows.json"
        copy.write_bytes(output.read_bytes().rstrip(b"\n"))
        monkeypatch.setattr(module, "measure", None)
        assert run(parts, copy, resume=True) == rows and copy.read_bytes() == output.read_bytes()

    def test_answers_of_a_single_token_are_rows(self, parts, tmp_path):
        rows = run(parts, tmp_path / "rows.json", config=BenchmarkConfig(max_new_tokens=1))
        assert len(rows) == NUM_TURNS * 3
        assert all(row["num_tokens"] == 1 and row["num_forwards"] == 0 and row["identical"] for row in rows)

    def test_foreign_file_is_refused(self, parts, tmp_path):
        output = tmp_path / "notes.txt"
        output.write_text("not rows\n")
        with pytest.raises(ValueError, match="no file of result rows"):
            run(parts, output, resume=True)
        assert output.read_text() == "not rows\n"


def inputs_of(tiny, length: int = 12) -> dict:
    ids = tiny.prompt_ids(length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Ticking:
    """A clock that stands still but for the costs that a test names, in the place of `time.perf_counter`."""

    def __init__(self):
        self.now_ms = 1e6
        self.handles = []

    def __call__(self) -> float:
        return self.now_ms / 1e3

    def add(self, ms: float) -> None:
        self.now_ms += ms

    def costs(self, module, ms) -> list[float]:
        """Let each forward of `module` take `ms(width)`; returns what they took so far, as it grows."""
        spent = []

        def charge(module, args, kwargs):
            inputs = next(t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
            spent.append(ms(inputs.shape[1]))
            self.add(spent[-1])

        self.handles.append(module.register_forward_pre_hook(charge, with_kwargs=True))
        return spent


@pytest.fixture
def ticking(monkeypatch):
    clock = Ticking()
    monkeypatch.setattr(time, "perf_counter", clock)
    yield clock
    for handle in clock.handles:
        handle.remove()


class TestCostAwareGate:
    """Rows of `loop_gate="auto"`, with a clock that makes every decision the same on every machine."""

    def measure(self, tiny, ticking, draft_ms: float, num_calls: int = 1, **options):
        """A drafter that is right at every position, a target of `10 + tokens` ms, and a selector of 2 ms."""
        target, inputs = tiny.build_target("llama"), inputs_of(tiny)
        reference = tiny.greedy(target, inputs["input_ids"], max_new_tokens=80)[0].tolist()
        drafter = tiny.scripted_drafter(target, reference, spoiled=0.1, selector_scale=0.0)
        read = drafter.selector.read
        drafter.selector.read = lambda inputs: ticking.add(2.0) or read(inputs)
        way = drafter_way("auto", drafter, loop_gate="auto", **options)
        for view in (way.assistant, way.profiled_assistant):
            view.cost_model().clock = ticking
        verified = ticking.costs(target.get_decoder(), lambda width: 10.0 + width)
        drafted = ticking.costs(drafter.drafter, lambda width: draft_ms)
        results = []
        for _ in range(num_calls):
            verified.clear(), drafted.clear()
            result = measure(target, inputs, way, do_sample=False, max_new_tokens=80)
            assert result.new_ids == reference[12:]
            results.append((result, list(verified), list(drafted)))
        return results

    @pytest.mark.parametrize("draft_ms", [1.0, 60.0], ids=["cheap", "dear"])
    def test_every_ms_is_in_the_drawer_of_its_phase(self, tiny, ticking, draft_ms):
        """The clock moves in the three modules alone, so nothing may be left for the overhead."""
        ((result, verified, drafted),) = self.measure(tiny, ticking, draft_ms)
        phases = result.phases_ms
        assert phases["prefill"] == pytest.approx(22.0) and phases["verify"] == pytest.approx(sum(verified[1:]))
        assert len(drafted) > 1 and phases["draft"] == pytest.approx(sum(drafted))
        assert phases["select"] == pytest.approx(2.0 * sum(result.statistics.num_stages))
        assert phases["overhead"] == pytest.approx(0.0, abs=1e-6)
        assert sum(phases.values()) == pytest.approx(result.phases_walltime_ms) == pytest.approx(ticking_ms(result))

    def test_rounds_with_and_without_a_draft_are_counted_apart(self, tiny, ticking):
        ((result, verified, _),) = self.measure(tiny, ticking, draft_ms=1.0)
        drafted = result.statistics
        assert result.round_widths[:3] == [1, 1, 1], "the first steps measure the target alone"
        assert drafted.num_plain_rounds == result.round_widths.count(1) >= 3
        assert drafted.num_rounds == len(result.round_widths) - drafted.num_plain_rounds >= 10
        assert drafted.num_rounds + drafted.num_plain_rounds == result.num_forwards == len(verified) - 1
        own = [n for n, width in zip(result.round_lengths, result.round_widths, strict=True) if width > 1]
        assert drafted.num_committed == own and 1 + sum(result.round_lengths) == len(result.new_ids)
        assert drafted.num_drafted == [width - 1 for width in result.round_widths if width > 1]
        assert max(drafted.num_stages) > 1, "it never looped"
        assert drafted.acceptance_length == pytest.approx(sum(own) / len(own))
        reached = [n for n, width in zip(own, drafted.num_drafted, strict=True) if width > 1 and n > 1]
        assert drafted.acceptance_by_slot[1] == pytest.approx(sum(n > 2 for n in reached) / len(reached), abs=0.2)
        origins = token_origins(result)
        assert len(origins) == len(result.new_ids) and origins[:4] == "tttt"
        assert origins.count("t") == 1 + result.num_forwards - (result.round_lengths[-1] == drafted.num_accepted[-1])

    def test_drafting_that_loses_is_put_off_and_tau_leaves_those_rounds_out(self, tiny, ticking):
        ((result, _, _),) = self.measure(tiny, ticking, draft_ms=200.0)
        drafted = result.statistics
        assert 1 <= drafted.num_rounds < 0.3 * result.num_forwards
        assert drafted.acceptance_length > 2 > sum(result.round_lengths) / result.num_forwards

    def test_what_was_learned_is_kept_from_prompt_to_prompt(self, tiny, ticking):
        (first, *_), (second, *_) = self.measure(tiny, ticking, draft_ms=1.0, num_calls=2)
        assert first.round_widths[:3] == [1, 1, 1] and second.round_widths[0] > 1
        assert second.statistics.num_plain_rounds < first.statistics.num_plain_rounds

    def test_dear_drafting_waits_until_a_text_can_afford_its_loss(self, tiny, ticking):
        """A round of more than two plain steps: four percent of some forty tokens pay for one that commits one."""
        (_, (second, *_)) = self.measure(tiny, ticking, draft_ms=14.0, num_calls=2)
        first = next(i for i, width in enumerate(second.round_widths) if width > 1)
        assert 32 < first < 60 and set(second.round_widths[:first]) == {1}


def ticking_ms(result: Measurement) -> float:
    return 1e3 * result.walltimes_s[0]


class TestCompiled:
    """Plain decoding with a static cache and compilation; tracing alone, which needs no compiler."""

    @pytest.fixture(scope="class")
    @classmethod
    def compiled(cls, tiny, parts, tmp_path_factory):
        target, tokenizer, ways = parts
        seen = []

        def look(module, args, kwargs):
            cache = cache_argument(kwargs)
            if type(cache) is StaticCache:
                seen.append((kwargs["input_ids"].shape[1], cache.layers[0].max_cache_len))

        handle = target.register_forward_pre_hook(look, with_kwargs=True)
        ways = [ways[0], compiled_way(target, is_asked=True, backend="eager"), ways[2]]
        output = tmp_path_factory.mktemp("compiled") / "rows.json"
        conversations = [CONVERSATIONS[3], CONVERSATIONS[0]]
        rows = run_benchmark(target, tokenizer, ways, conversations, CONFIG, output, quiet=True)
        handle.remove()
        return rows, seen

    def test_every_row_has_its_speedup_over_it(self, compiled):
        rows, _ = compiled
        for row in rows:
            turn = [r for r in rows if (r["prompt"], r["turn"]) == (row["prompt"], row["turn"])]
            (reference,) = (r for r in turn if r["kind"] == "compiled")
            assert row["speedup_over_compiled"] == pytest.approx(row["tokens_per_s"] / reference["tokens_per_s"])
            assert row["identical"]

    def test_it_has_no_phases_and_a_static_cache(self, compiled):
        for row in (row for row in compiled[0] if row["kind"] == "compiled"):
            assert row["phases_ms"] is None and row["cache"] == "static" and row["statistics"] is None

    def test_warm_up_is_the_call_that_is_measured(self, compiled):
        """Each prompt comes twice in a row, with a cache of the same length, which a long one before has no say in."""
        _, seen = compiled
        lengths = [row["prompt_tokens"] for row in compiled[0] if row["kind"] == "compiled"]
        prefills = [(length, slots) for length, slots in seen if length > 1]
        expected = [(length, 512 if length + 10 > 256 else 256) for length in lengths]
        assert prefills == [call for call in expected for _ in range(2)]
        assert lengths[1] + 10 > 256 and lengths[2] < 20, "a long prompt has to come before a short one"

    def test_it_is_absent_where_it_was_not_run(self, measured):
        assert not any("speedup_over_compiled" in row for row in measured[0])

    def test_a_cpu_compiles_only_when_it_is_asked_to(self, tiny):
        target = tiny.build_target("llama")
        assert compiled_way(target) is None and compiled_way(target, is_asked=False) is None
        names = [way.name for way in standard_ways(target, [], compiled=True)]
        assert names == [PLAIN, COMPILED, PROMPT_LOOKUP]

    def test_a_target_that_cannot_be_compiled_is_named(self, tiny, monkeypatch):
        target = tiny.build_target("llama")
        monkeypatch.setattr(target, "_valid_auto_compile_criteria", lambda *arguments: False)
        with pytest.raises(ValueError, match="`compiled` was asked for, but generate\\(\\) cannot compile Llama"):
            compiled_way(target, is_asked=True)


class TestKnownDrafters:
    def test_perfect_drafter_has_a_tau_of_k_plus_one(self, tiny):
        target, inputs = tiny.build_target("llama"), inputs_of(tiny)
        # One token of the prefill, and rounds of five: four drafts and the bonus token.
        reference = tiny.greedy(target, inputs["input_ids"], max_new_tokens=1 + 5 * 6)[0].tolist()
        drafter = tiny.scripted_drafter(target, reference, spoiled=0.0, use_selector=False)
        way = drafter_way("perfect", drafter)
        result = measure(target, inputs, way, do_sample=False, max_new_tokens=31)
        assert result.statistics.acceptance_length == 5 == drafter.config.num_drafts + 1
        assert result.num_forwards == 6 and result.round_lengths == [5] * 6
        assert result.new_ids == reference[12:]
        assert token_origins(result) == "t" + "kkkkt" * 6

    def test_drafter_that_proposes_nothing_loses_exactly_its_overhead(self, tiny, monkeypatch, ticking):
        """Plain decoding spends 1 ms beside each forward, and keeping the states another one."""
        target, inputs = tiny.build_target("llama"), inputs_of(tiny)
        way = drafter_way("silent", tiny.build_drafter(target))

        def no_stages(self, input_ids):
            return []
            yield

        monkeypatch.setattr(DRelayCandidateGenerator, "stages", no_stages)
        ticking.costs(target.get_decoder(), lambda width: 10.0)
        for owner in (torch, torch.Tensor):
            argmax = owner.argmax
            monkeypatch.setattr(owner, "argmax", lambda *a, argmax=argmax, **k: ticking.add(1.0) or argmax(*a, **k))
        feed = DRelayCandidateGenerator.feed
        monkeypatch.setattr(DRelayCandidateGenerator, "feed", lambda g, s: ticking.add(1.0) or feed(g, s))
        arguments = {"do_sample": False, "max_new_tokens": 12}
        plain = measure(target, inputs, plain_way(), **arguments)
        silent = measure(target, inputs, way, **arguments)
        assert silent.new_ids == plain.new_ids and silent.statistics.num_rounds == 0
        assert silent.num_forwards == plain.num_forwards == 11
        assert plain.walltimes_s[0] == pytest.approx(12 * 11e-3) and silent.walltimes_s[0] > plain.walltimes_s[0]
        figures = module._phase_figures(silent, plain)
        speedup = module._speed(silent, plain, None)["speedup"]
        assert 0 < figures["overhead_share"] == pytest.approx(1 - speedup, abs=1e-9)

    def test_prompt_lookup_is_counted_from_the_targets_forwards(self, tiny):
        """On a text that repeats itself, drafts copied from it are accepted."""
        target = tiny.build_cycle_target(8)
        ids = torch.tensor([target.generate(torch.tensor([[1]]), do_sample=False, max_new_tokens=20)[0].tolist()])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        result = measure(target, inputs, prompt_lookup_way(target, 3), do_sample=False, max_new_tokens=17)
        assert result.statistics.acceptance_length > 3
        # The host's loop lets it draft with the prefill already, which is no round.
        assert 17 - sum(result.round_lengths) == 4 and max(result.round_lengths) == 4
        plain = measure(target, inputs, plain_way(), do_sample=False, max_new_tokens=17)
        assert plain.new_ids == result.new_ids and plain.statistics is None

    @pytest.mark.parametrize("options", [{}, {"loop_gate": float("-inf"), "max_stages": 3}], ids=["one", "loop"])
    def test_rounds_seen_from_the_target_are_those_that_the_drafter_counts(self, tiny, options):
        target, inputs = tiny.build_target("llama"), inputs_of(tiny)
        reference = tiny.greedy(target, inputs["input_ids"], max_new_tokens=40)[0].tolist()
        view = tiny.scripted_drafter(target, reference).with_options(**options)
        with TargetClock(target) as clock:
            output = tiny.greedy(target, inputs["input_ids"], view, max_new_tokens=40)
        seen, counted = clock.statistics(output.shape[1]), view.statistics
        assert max(counted.num_accepted) > 2, "nothing accepted shows nothing"
        assert seen.num_committed == counted.num_committed and seen.num_drafted == counted.num_drafted
        assert seen.num_accepted == counted.num_accepted and seen.num_plain_rounds == counted.num_plain_rounds

    def test_clock_leaves_nothing_behind(self, tiny):
        target = tiny.build_target("llama")
        with TargetClock(target):
            pass
        assert not target._forward_hooks and not target._forward_pre_hooks


class TestOrigins:
    def test_plain_rounds_stand_between_drafted_ones(self):
        statistics = DraftStatistics()
        statistics.add_round([5, 6, 7], [0, 1, 0], [5, 8, 7], [5, 6, 9], num_stages=1)
        statistics.num_plain_rounds += 1
        statistics.add_round([5], [0], [5], [5, 6], num_stages=1)
        result = Measurement([0] * 7, [1.0], statistics=statistics, round_lengths=[3, 1, 2], round_widths=[4, 1, 2])
        assert token_origins(result) == "t" + "krt" + "t" + "kt"

    def test_rounds_that_nobody_recorded_count_as_kept(self):
        statistics = DraftStatistics(num_committed=[3], num_accepted=[2], num_drafted=[2], num_stages=[1])
        result = Measurement([0] * 4, [1.0], statistics=statistics, round_lengths=[3], round_widths=[9])
        assert token_origins(result) == "tkkt"


class TestWays:
    def test_prompt_lookup_is_left_out_where_the_host_refuses_it(self, tiny, monkeypatch):
        target = tiny.build_target("llama")
        monkeypatch.setattr(target, "_is_stateful", True, raising=False)
        names = [way.name for way in standard_ways(target, [("tiny", tiny.build_drafter(target))])]
        assert PLAIN in names and PROMPT_LOOKUP not in names

    def test_standard_ways_are_baselines_and_every_gate_the_drafter_takes(self, tiny):
        target = tiny.build_target("llama")
        drafter = tiny.build_drafter(target)
        names = [way.name for way in standard_ways(target, [("a", drafter), ("b", drafter)])]
        assert names[:4] == [PLAIN, PROMPT_LOOKUP, "a", "a + DLoop -0.5"]
        assert {"b", "b + DLoop -0.5"} <= set(names) and len(set(names)) == len(names)

    def test_every_way_becomes_a_row_that_json_takes(self, tiny):
        target = tiny.build_target("llama")
        way = drafter_way("open", tiny.build_drafter(target), loop_gate=float("-inf"))
        assert json.loads(json.dumps(way.description, allow_nan=False))["loop_gate"] == "-inf"

    def test_filters_are_those_of_the_settings_alone(self, tiny, monkeypatch):
        """transformers keeps 50 tokens unless it is told otherwise, and targets have defaults of their own."""
        target = tiny.build_target("llama")
        monkeypatch.setattr(target.generation_config, "top_p", 0.5)
        arguments = BenchmarkConfig(temperature=1.0).generate_arguments()
        config, _ = target._prepare_generation_config(None, **arguments)
        assert (config.temperature, config.top_p, config.top_k) == (1.0, 1.0, 0)

    def test_plain_way_is_needed(self, parts, tmp_path):
        target, tokenizer, ways = parts
        with pytest.raises(ValueError, match="`ways` lacks 'plain'"):
            run_benchmark(target, tokenizer, ways[1:], CONVERSATIONS, CONFIG, tmp_path / "rows.json")

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"max_new_tokens": 0}, "`max_new_tokens` is 0"),
            ({"repeats": 0}, "`repeats` is 0"),
            ({"temperature": -1.0}, "`temperature` is -1.0"),
            ({"temperature": float("nan")}, "`temperature` is nan"),
            ({"temperature": 1.0, "top_p": 5.0}, "`top_p` is 5.0"),
            ({"temperature": 1.0, "top_k": -1}, "`top_k` is -1"),
            ({"top_p": 0.9}, "`top_p` 0.9 has no effect at `temperature` 0"),
        ],
    )
    def test_impossible_settings_are_named(self, fields, message):
        with pytest.raises(ValueError, match=message):
            BenchmarkConfig(**fields)

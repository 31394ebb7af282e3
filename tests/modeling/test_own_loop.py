"""
Our own loop: everything that a call returns, calls or keeps is that of plain decoding.

Plain `generate()` is the oracle, token by token and, with random numbers known ahead, at temperature 1 as well.
"""

import copy
import time

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    StaticCache,
    StoppingCriteria,
)


ALWAYS = float("-inf")
OPTIONS = {
    "chain": {},
    "loop": {"loop_gate": ALWAYS},
    "tree": {"tree_budget": 7},
    "loop+tree": {"loop_gate": ALWAYS, "tree_budget": 7},
    "auto": {"loop_gate": "auto"},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def scripted_view(toolbox, target, expected, **options):
    return toolbox.scripted(target, expected[0].tolist()).with_options(**options)


def ones(ids):
    return {"attention_mask": torch.ones_like(ids)}


def sample(target, prompt, seed=0, **kwargs):
    """Sampled text, and the random number that follows it."""
    torch.manual_seed(seed)
    kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, **ones(prompt)} | kwargs
    return target.generate(prompt, **kwargs), torch.rand(1)


class TestRandomNumbersKnownAhead:
    """A seed gives the text of plain sampling, whatever drafts."""

    @pytest.mark.parametrize("proposal", ["coupled", "greedy"])
    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    @every_option
    def test_text_is_that_of_plain_sampling(self, toolbox, name, proposal, options):
        target, prompt = toolbox.target(name), toolbox.prompt(12)
        for seed in range(2):
            expected, after = sample(target, prompt, seed)
            view = scripted_view(toolbox, target, expected, proposal=proposal, **options)
            ids, own_after = sample(target, prompt, seed, assistant_model=view)
            assert torch.equal(ids, expected)
            assert torch.equal(own_after, after), "the call used up another number of random numbers"
        if options.get("loop_gate") != "auto":
            assert view.statistics.acceptance_length > 2

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"temperature": 0.7, "top_p": 0.8},
            {"repetition_penalty": 1.3, "temperature": 1.2, "top_k": 20},
            {"no_repeat_ngram_size": 2, "min_p": 0.05},
            {"suppress_tokens": list(range(40, 60)), "eos_token_id": [7, 8, 9]},
        ],
        ids=lambda kwargs: "+".join(kwargs),
    )
    @pytest.mark.parametrize("options", [{"loop_gate": ALWAYS}, {"tree_budget": 9}], ids=["loop", "tree"])
    def test_text_is_that_of_plain_sampling_when_processors_change_the_law(self, toolbox, kwargs, options):
        target, prompt = toolbox.target("llama"), toolbox.prompt(12)
        expected, after = sample(target, prompt, **kwargs)
        view = scripted_view(toolbox, target, expected, proposal="coupled", **options)
        ids, own_after = sample(target, prompt, assistant_model=view, **kwargs)
        assert torch.equal(ids, expected) and torch.equal(own_after, after)

    def test_text_does_not_depend_on_the_drafter(self, toolbox):
        target, prompt = toolbox.target("qwen3"), toolbox.prompt(12)
        expected, _ = sample(target, prompt)
        for seed in range(2):
            drafter = toolbox.drafter(target, seed=seed)  # random weights: hardly anything is accepted
            ids, _ = sample(target, prompt, assistant_model=drafter.with_options(proposal="coupled"))
            assert torch.equal(ids, expected)

    def test_draft_hits_more_often_when_it_knows_the_numbers(self, toolbox):
        # A drafter whose q is the target's p: coupled drafts are always right, the likeliest tokens are not.
        table = torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
        target, prompt = toolbox.table_target(table), torch.tensor([[1, 2]])
        drafter = toolbox.drafter(target, pool_size=12, use_selector=False, block_size=2, num_hidden_layers=1)

        def head_inputs(rows, anchor_ids, session):
            inputs = type(drafter).head_inputs(drafter, rows, anchor_ids, session)
            logits = target(anchor_ids[None]).logits[:, -1:]
            inputs.pool = type(inputs.pool).from_logits(logits, 12)
            return inputs

        drafter.head_inputs = head_inputs
        accepted = {}
        for proposal in ("coupled", "greedy"):
            view = drafter.with_options(proposal=proposal)
            sample(target, prompt, assistant_model=view, max_new_tokens=120)
            accepted[proposal] = view.statistics.acceptance_by_slot[0]
        assert accepted["coupled"] == 1.0
        assert accepted["greedy"] < 0.8


@pytest.mark.parametrize("lengths", [range(1, 41), [38], [1]], ids=["always", "near the end", "once"])
def test_no_random_number_is_given_out_twice(toolbox, lengths):
    """Others draw from torch's generator during a call; what they got is not drawn again after it."""
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    view = scripted_view(toolbox, target, toolbox.greedy(target, prompt), proposal="coupled", loop_gate=ALWAYS)
    seen = []

    def draw(input_ids, scores):
        if input_ids.shape[1] - 12 in lengths:
            seen.extend(torch.rand(20, dtype=torch.float64).tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)

    sample(target, prompt, assistant_model=view, stopping_criteria=[draw])
    assert len(seen) == 20 * len(lengths) and not set(seen) & set(torch.rand(8000, dtype=torch.float64).tolist())


class TestCallsOfTheUser:
    @every_option
    def test_stateful_processor_sees_the_calls_of_plain_decoding(self, toolbox, options):
        class Counter(LogitsProcessor):
            def __init__(self):
                self.calls = []

            def __call__(self, input_ids, scores):
                self.calls.append(input_ids[0].tolist())
                return scores.index_fill(1, torch.tensor([3 + 7 * len(self.calls) % 60]), 2.0)

        target, prompt = toolbox.target("llama"), toolbox.prompt(12)
        plain, own = Counter(), Counter()
        expected = toolbox.greedy(target, prompt, logits_processor=LogitsProcessorList([plain]))
        view = scripted_view(toolbox, target, expected, **options)
        ids = toolbox.greedy(target, prompt, view, logits_processor=LogitsProcessorList([own]))
        assert torch.equal(ids, expected) and own.calls == plain.calls

    @every_option
    @pytest.mark.parametrize("offset", range(0, 12, 2))
    def test_criterion_that_reads_scores_sees_the_calls_of_plain_decoding(self, toolbox, options, offset):
        class Recorder(StoppingCriteria):
            def __init__(self):
                self.calls = []

            def __call__(self, input_ids, scores, **kwargs):
                self.calls.append((input_ids[0].tolist(), len(scores), round(scores[-1].max().item(), 3)))
                return torch.tensor([len(scores) > offset])

        target, prompt = toolbox.target("llama"), toolbox.prompt(12)
        wanted = {"return_dict_in_generate": True, "output_scores": True}
        plain, own = Recorder(), Recorder()
        expected = toolbox.greedy(target, prompt, stopping_criteria=[plain], **wanted).sequences
        script = toolbox.greedy(target, prompt)
        view = scripted_view(toolbox, target, script, **options)
        ids = toolbox.greedy(target, prompt, view, stopping_criteria=[own], **wanted).sequences
        assert torch.equal(ids, expected) and own.calls == plain.calls

    @pytest.mark.parametrize("offset", range(11))
    @pytest.mark.parametrize("options", [OPTIONS["loop"], OPTIONS["tree"]], ids=["loop", "tree"])
    def test_sampled_text_ends_where_plain_sampling_ends_when_a_stop_string_completes(self, toolbox, offset, options):
        target, prompt = toolbox.cycle_target(), torch.tensor([[3]])
        full, _ = sample(target, prompt, temperature=0.4)
        tokenizer = toolbox.tokenizer(48)
        text = full[0, 1:].tolist()
        kwargs = {"stop_strings": [tokenizer.decode(text[offset : offset + 2])], "tokenizer": tokenizer}
        expected, after = sample(target, prompt, temperature=0.4, **kwargs)
        assert expected.shape[1] < full.shape[1]
        view = scripted_view(toolbox, target, full, proposal="coupled", **options)
        ids, own_after = sample(target, prompt, temperature=0.4, assistant_model=view, **kwargs)
        assert torch.equal(ids, expected) and torch.equal(own_after, after)

    def test_time_limit_is_tested_behind_every_token(self, toolbox, monkeypatch):
        target, prompt = toolbox.cycle_target(), torch.tensor([[3]])
        expected = toolbox.greedy(target, prompt)
        view = scripted_view(toolbox, target, expected, loop_gate=ALWAYS)
        ticks = iter(range(10_000))
        monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
        criterion = MaxTimeCriteria(max_time=7, initial_timestamp=time.time())
        ids = toolbox.greedy(target, prompt, view, stopping_criteria=[criterion])
        assert ids.shape[1] == 1 + 8  # the clock advances by one with each test
        assert torch.equal(ids, expected[:, : ids.shape[1]])

    def test_rows_of_a_batch_end_together_when_time_is_over(self, toolbox, monkeypatch):
        # Without end tokens plain decoding has one length for all rows.
        target, ids = toolbox.target("llama"), torch.cat([toolbox.prompt(6), toolbox.prompt(6, seed=3)])
        expected = toolbox.greedy(target, ids, max_new_tokens=40)
        view = toolbox.scripted_batch(monkeypatch, target, expected.tolist()).with_options(loop_gate=ALWAYS)
        ticks = iter(range(10_000))
        monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
        criterion = MaxTimeCriteria(max_time=7, initial_timestamp=time.time())
        output = toolbox.greedy(target, ids, view, stopping_criteria=[criterion], max_new_tokens=40)
        assert output.shape[1] == 6 + 8
        assert torch.equal(output, expected[:, : output.shape[1]])

    def test_criterion_is_asked_before_the_streamer_gets_the_token(self, toolbox):
        target, prompt = toolbox.target("llama"), toolbox.prompt(6)

        def events(assistant):
            seen = []

            class Streamer:
                def put(self, value):
                    seen.append(("put", value.numel()))

                def end(self):
                    seen.append("end")

            def criterion(input_ids, scores):
                seen.append(("asked", input_ids.shape[1]))
                return torch.zeros(1, dtype=torch.bool)

            kwargs = {"streamer": Streamer(), "stopping_criteria": [criterion], "max_new_tokens": 12}
            toolbox.greedy(target, prompt, assistant, **kwargs)
            return seen

        view = scripted_view(toolbox, target, toolbox.greedy(target, prompt), loop_gate=ALWAYS)
        assert events(view) == events(None)


class TestReturnedOutputs:
    WANTED = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "max_new_tokens": 24,
    }

    @pytest.mark.parametrize("name", ["qwen3", "gemma3"])
    @pytest.mark.parametrize("cache", [None, "static"])
    @every_option
    def test_every_output_has_the_shape_and_value_of_plain_decoding(self, toolbox, name, cache, options):
        if cache and (toolbox.version < (5, 24) or (name == "gemma3" and "tree_budget" in options)):
            cache = None
        target = copy.deepcopy(toolbox.target(name))
        target.set_attn_implementation("eager")
        prompt, wanted = toolbox.prompt(12), self.WANTED | {"cache_implementation": cache}
        expected = toolbox.greedy(target, prompt, repetition_penalty=1.2, **wanted)
        view = scripted_view(toolbox, target, expected.sequences, **options)
        output = toolbox.greedy(target, prompt, view, repetition_penalty=1.2, **wanted)
        assert type(output) is type(expected)
        assert torch.equal(output.sequences, expected.sequences)
        for own, theirs in ((output.scores, expected.scores), (output.logits, expected.logits)):
            torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)
        for own, theirs in (
            (output.hidden_states, expected.hidden_states),
            (output.attentions, expected.attentions),
        ):
            assert len(own) == len(theirs) == 24
            for own_step, step in zip(own, theirs, strict=True):
                torch.testing.assert_close(own_step, step, atol=1e-4, rtol=0)

    @every_option
    def test_cache_holds_the_text_but_its_newest_token(self, toolbox, options):
        target, prompt = toolbox.target("gemma3"), toolbox.prompt(12)
        wanted = {"return_dict_in_generate": True, "max_new_tokens": 30}
        expected = toolbox.greedy(target, prompt, **wanted)
        view = scripted_view(toolbox, target, expected.sequences, **options)
        output = toolbox.greedy(target, prompt, view, **wanted)
        own, theirs = output.past_key_values, expected.past_key_values
        assert own.get_seq_length() == expected.sequences.shape[1] - 1
        for layer, other in zip(own.layers, theirs.layers, strict=True):
            torch.testing.assert_close((layer.keys, layer.values), (other.keys, other.values), atol=1e-4, rtol=0)
            assert not getattr(layer, "record_past", False)


class TestFilledCache:
    """A conversation that goes on with the returned cache is one that starts anew."""

    @pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
    @pytest.mark.parametrize("ids_are", ["whole", "new"])
    @every_option
    def test_second_turn_equals_a_fresh_run(self, toolbox, name, ids_are, options):
        target, prompt = toolbox.target(name), toolbox.prompt(12)
        first = toolbox.greedy(target, prompt, max_new_tokens=14)
        whole = torch.cat([first, toolbox.prompt(5, seed=9)], dim=1)
        expected = toolbox.greedy(target, whole, max_new_tokens=30)
        view = scripted_view(toolbox, target, expected, **options)
        turn = toolbox.greedy(target, prompt, view, max_new_tokens=14, return_dict_in_generate=True)
        assert torch.equal(turn.sequences, first)
        cache = turn.past_key_values
        ids = whole if ids_are == "whole" else whole[:, cache.get_seq_length() :]
        kwargs = {"attention_mask": torch.ones_like(whole), toolbox.cache_keyword(): cache, "max_new_tokens": 30}
        again = toolbox.greedy(target, ids, view, **kwargs)
        assert torch.equal(again[:, -30:], expected[:, -30:])
        if options.get("loop_gate") != "auto":
            assert view.statistics.num_rounds > 0

    def test_static_cache_of_the_user_serves_two_turns(self, toolbox):
        if toolbox.version < (5, 24):
            pytest.skip("static caches cannot be rolled back by this version")
        target, prompt = toolbox.target("llama"), toolbox.prompt(12)
        first = toolbox.greedy(target, prompt, max_new_tokens=10)
        whole = torch.cat([first, toolbox.prompt(5, seed=9)], dim=1)
        expected = toolbox.greedy(target, whole, max_new_tokens=20)
        view = scripted_view(toolbox, target, expected, loop_gate=ALWAYS)
        cache = StaticCache(config=target.config, max_cache_len=60)
        for ids, length, text in ((prompt, 10, first), (whole, 20, expected)):
            kwargs = {toolbox.cache_keyword(): cache, "max_new_tokens": length}
            assert torch.equal(toolbox.greedy(target, ids, view, **kwargs), text)

    def test_static_cache_of_the_user_may_be_shorter_than_the_text_could_become(self, toolbox):
        if toolbox.version < (5, 24):
            pytest.skip("static caches cannot be rolled back by this version")
        target, prompt = toolbox.target("llama"), toolbox.prompt(12)
        text = toolbox.greedy(target, prompt, max_new_tokens=20)
        kwargs = {"max_new_tokens": 60, "eos_token_id": [text[0, 12 + 9].item()], "pad_token_id": 0}
        expected = toolbox.greedy(target, prompt, **kwargs)
        view = scripted_view(toolbox, target, text, loop_gate=ALWAYS)
        cache = StaticCache(config=target.config, max_cache_len=expected.shape[1] - 1)
        assert torch.equal(
            toolbox.greedy(target, prompt, view, **{toolbox.cache_keyword(): cache}, **kwargs), expected
        )

    def test_tree_knows_the_window_of_a_model_whose_cache_does_not(self, toolbox):
        target, prompt = toolbox.target("mistral"), toolbox.prompt(12)
        expected = toolbox.greedy(target, prompt, max_new_tokens=40)
        view = scripted_view(toolbox, target, expected, tree_budget=7)
        kwargs = {toolbox.cache_keyword(): DynamicCache(), "max_new_tokens": 40}
        assert torch.equal(toolbox.greedy(target, prompt, view, **kwargs), expected)

    def test_cache_of_the_user_is_usable_after_an_error_in_their_code(self, toolbox):
        target, prompt = toolbox.target("mistral"), toolbox.prompt(12)
        cache = DynamicCache(config=target.config)
        view = scripted_view(toolbox, target, toolbox.greedy(target, prompt), loop_gate=ALWAYS)

        def fail(input_ids, scores):
            if input_ids.shape[1] > 20:
                raise RuntimeError("mine")
            return torch.zeros(len(input_ids), dtype=torch.bool)

        with pytest.raises(RuntimeError, match="mine"):
            toolbox.greedy(target, prompt, view, stopping_criteria=[fail], **{toolbox.cache_keyword(): cache})
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)

    @pytest.mark.parametrize(
        "name, way",
        [(name, way) for name in ("llama", "gemma3") for way in ("chain", "loop", "tree")]
        + [("qwen3_5", "chain"), ("qwen3_5", "loop")],  # recurrent layers have no trees
    )
    @pytest.mark.parametrize("num_seen", range(1, 9))
    def test_conversation_goes_on_after_an_error_in_user_code(self, toolbox, name, way, num_seen):
        """A stop button that raises: what was drafted and not seen yet must not become a part of the text."""
        target = toolbox.hybrid(name) if name == "qwen3_5" else toolbox.target(name)
        prompt = toolbox.prompt(12)
        expected = toolbox.greedy(target, prompt, max_new_tokens=24)
        cache = DynamicCache(config=target.config)

        def stop_button(input_ids, scores):
            if input_ids.shape[1] >= 12 + num_seen:
                raise KeyboardInterrupt
            return torch.zeros(len(input_ids), dtype=torch.bool)

        view = scripted_view(toolbox, target, expected, **OPTIONS[way])
        call = {toolbox.cache_keyword(): cache, "max_new_tokens": 24, "stopping_criteria": [stop_button]}
        with pytest.raises(KeyboardInterrupt):
            toolbox.greedy(target, prompt, view, **call)
        assert cache.get_seq_length() == 12 + num_seen - 1  # as plain decoding leaves it
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
        text = torch.cat([expected[:, : 12 + num_seen], toolbox.prompt(6, seed=9)], dim=1)
        again = toolbox.greedy(target, text, max_new_tokens=12, **{toolbox.cache_keyword(): cache})
        toolbox.assert_same_text(target, again, toolbox.greedy(target, text, max_new_tokens=12))

    def test_cache_of_the_user_is_left_as_plain_decoding_leaves_it(self, toolbox):
        target, prompt = toolbox.target("mistral"), toolbox.prompt(12)
        caches = [DynamicCache(config=target.config) for _ in range(2)]
        expected = toolbox.greedy(target, prompt, **{toolbox.cache_keyword(): caches[0]})
        view = scripted_view(toolbox, target, expected, loop_gate=ALWAYS)
        ids = toolbox.greedy(target, prompt, view, **{toolbox.cache_keyword(): caches[1]})
        assert torch.equal(ids, expected)
        for layer, other in zip(caches[1].layers, caches[0].layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 4, 5, 12, 50])
@pytest.mark.parametrize("padding", [0, 3])
def test_text_equals_plain_decoding_when_the_prompt_is_fed_in_chunks(toolbox, chunk, padding):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    mask = (torch.arange(12) >= padding).long()[None]
    expected = toolbox.greedy(target, prompt, attention_mask=mask, prefill_chunk_size=chunk)
    script = expected[:, padding:]
    view = scripted_view(toolbox, target, script)
    lengths = []
    hook = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    ids = toolbox.greedy(target, prompt, view, attention_mask=mask, prefill_chunk_size=chunk)
    hook.remove()
    assert torch.equal(ids, expected)
    assert lengths[: -(-12 // chunk)] == [min(chunk, 12 - start) for start in range(0, 12, chunk)]
    assert view.statistics.acceptance_length > 2


@pytest.mark.parametrize("name", ["gemma3", "mistral", "llama"])
@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
def test_text_equals_plain_decoding_with_a_static_cache(toolbox, name, gate):
    # A full static window cannot take tokens back: its layers are restored and the accepted tokens fed again.
    if toolbox.version < (5, 24):
        pytest.skip("static caches cannot be rolled back by this version")
    target, prompt = toolbox.target(name), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt, cache_implementation="static")
    view = scripted_view(toolbox, target, expected, loop_gate=gate)
    assert torch.equal(toolbox.greedy(target, prompt, view, cache_implementation="static"), expected)
    assert view.statistics.acceptance_length > 2

"""Calls of the demo: they give the target's own text, know their limits, and end when nobody waits for them."""

import threading
from dataclasses import replace

import pytest

from hf_drelay.demo.engine import DemoEngine, PromptError
from hf_drelay.demo.pieces import token_pieces


def ask(engine, text, **settings):
    inputs, _ = engine.encode([{"role": "user", "content": text}])
    return inputs, replace(engine.default_settings(), max_new_tokens=40, **settings)


@pytest.mark.parametrize("gate", [None, float("-inf")], ids=["loop-off", "loop-open"])
def test_drafted_text_is_plain_text_and_its_rounds_add_up(engine, gate):
    inputs, settings = ask(engine, "abcab", loop_gate=gate)
    *_, drafted = engine.run(inputs, settings)
    *_, plain = engine.run(inputs, settings, is_drafted=False)
    assert drafted.token_ids == plain.token_ids and len(plain.token_ids) == 40
    assert [i for traced in drafted.rounds for i in traced.committed_ids] == drafted.token_ids
    assert not plain.rounds
    origins = {origin for traced in drafted.rounds for origin in traced.origins}
    assert {"draft", "correction"} <= origins
    assert ("loop" in origins) == (gate is not None)


def test_updates_only_ever_add_tokens(engine):
    inputs, settings = ask(engine, "abcab")
    updates = list(engine.run(inputs, settings))
    for before, after in zip(updates, updates[1:], strict=False):
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
    assert [update.is_done for update in updates].count(True) == 1 and updates[-1].is_done
    assert len(updates[-1].times_s) == len(updates[-1].token_ids)


def test_sampling_repeats_with_its_seed(engine):
    runs = []
    for seed in (1, 1, 2):
        inputs, settings = ask(engine, "abcab", temperature=1.0, seed=seed)
        *_, last = engine.run(inputs, settings)
        runs.append(last.token_ids)
    assert runs[0] == runs[1] != runs[2]


def test_a_call_ends_when_its_consumer_goes_away(engine):
    inputs, settings = ask(engine, "abcab")
    before = threading.active_count()
    updates = engine.run(inputs, replace(settings, max_new_tokens=256))
    next(updates)
    updates.close()
    assert threading.active_count() == before


def test_an_error_of_the_call_reaches_the_consumer(engine):
    inputs, settings = ask(engine, "abcab", temperature=1.0)
    with pytest.raises(ValueError, match="proposal"):
        list(engine.run(inputs, replace(settings, proposal="guess")))


@pytest.mark.parametrize("text", ["", "  \n "], ids=["empty", "blank"])
def test_empty_prompt_is_refused(engine, text):
    with pytest.raises(PromptError, match="empty"):
        engine.encode([{"role": "user", "content": text}])


@pytest.mark.parametrize("length, unit", [(100, "100 tokens"), (100_000, "100000 characters")])
def test_long_prompt_is_refused_with_its_length_and_the_limit(engine, length, unit):
    with pytest.raises(PromptError, match=f"{unit}; at most 60"):
        engine.encode([{"role": "user", "content": "a" * length}])


def test_oldest_turns_are_dropped_when_the_conversation_is_long(engine):
    old = [{"role": "user", "content": "a" * 30}, {"role": "assistant", "content": "b" * 20}]
    inputs, num_dropped = engine.encode([*old, {"role": "user", "content": "c" * 20}])
    assert num_dropped == 2 and inputs["input_ids"].shape[1] == 20
    assert engine.encode([*old, {"role": "user", "content": "c" * 5}])[1] == 0


def test_a_drafter_of_another_target_is_refused_at_once(engine, tiny_folders):
    from hf_drelay import DRelayConfig, DRelayModel

    small = {"num_hidden_layers": 1, "pool_size": 8, "selector_hidden_size": 16, "pair_rank": 2}
    other = DRelayModel(DRelayConfig.for_target(engine.target.config, **small | {"vocab_size": 13}))
    with pytest.raises(ValueError, match="vocab"):
        DemoEngine(engine.target, engine.tokenizer, {"other": other})


class ByteTokenizer:
    """Tokens are bytes, as in the byte-level vocabularies whose tokens may end inside a character."""

    def decode(self, ids, skip_special_tokens=False):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain", "smörgåsbord für 3 €", "🙂🙃 ends 🙂", "語" * 30])
def test_pieces_add_up_to_the_text(text):
    ids = [*text.encode(), 300]
    pieces = token_pieces(ByteTokenizer(), ids)
    assert "".join(pieces) == text
    assert len(pieces) == len(ids) and pieces[-1] == ""

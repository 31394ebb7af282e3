"""What the page shows, without a browser: origins, pools, notes, the race, and that nothing gets through unescaped."""

import pickle
import re

import pytest

from hf_drelay.demo import render
from hf_drelay.demo.app import COST_AWARE, FIXED, OFF, Page, build_app, device_seconds, launch
from hf_drelay.demo.engine import DemoEngine, DemoLimits
from hf_drelay.modeling.draft_trace import TracedRound, TracedStage


def controls(gate=-100.0, gating=FIXED, temperature=0.0, max_new=40):
    return ["tiny", True, gating, gate, 3, 1, temperature, "sample", max_new, 0]


@pytest.fixture(scope="module")
def page(engine):
    return Page(engine)


def last(updates):
    *_, update = updates
    return update


def test_answer_colors_every_token_by_its_origin(page):
    updates = list(page.answer("abcab", [], *controls()))
    chat, figures, turns, _, _ = updates[-1]
    origins = [origin for traced in turns[-1].rounds for origin in traced.origins]
    answer = chat[chat.index("dr-msg-assistant") :]
    assert re.findall(r'class="dr-tok dr-(\w+)"', answer) == origins
    assert "loop" in origins
    # Later updates leave alone what the visitor types meanwhile, and the pools that they look at.
    assert updates[0][3] == "" and all(update[3:] == (page.unchanged, page.unchanged) for update in updates[1:])
    assert re.sub(r"<[^>]+>", "", answer.partition(">")[2]) == turns[-1].content
    assert f"<b>{len(origins)}</b><span>tokens" in figures


def test_clicked_round_shows_slots_choices_and_the_target(page):
    *_, turns, _, _ = last(page.answer("abcab", [], *controls()))
    rounds = turns[-1].rounds
    index = next(i for i, traced in enumerate(rounds) if len(traced.stages) > 1)
    chat, pools = page.open_round(turns, 1, index)
    assert f'dr-round dr-chosen" role="button" tabindex="0" data-turn="1" data-round="{index}"' in chat
    choices = [choice for stage in rounds[index].stages for choice in stage.choices]
    assert pools.count('<div class="dr-slot ') == len(choices)
    assert re.findall(r">(KEEP|REPAIR)<", pools) == ["REPAIR" if choice else "KEEP" for choice in choices]
    assert pools.count("✓ accepted") == rounds[index].num_accepted
    assert "draft another stage" in pools


def test_cost_aware_gate_is_used_and_shown(page):
    settings = page._settings(*controls(gating=COST_AWARE))
    assert settings.loop_gate == "auto" and page._settings(*controls(gating=OFF)).loop_gate is None
    *_, turns, _, _ = last(page.answer("abcab", [], *controls(gating=COST_AWARE)))
    drafted = [i for i, traced in enumerate(turns[-1].rounds) if traced.stages]
    assert drafted and "cost-aware gate: verify" in page.open_round(turns, 1, drafted[0])[1]


@pytest.mark.parametrize("configured, shown", [("auto", (COST_AWARE, -1.0)), (-2, (FIXED, -2)), (None, (OFF, -1.0))])
def test_page_starts_with_the_configured_gate(engine, monkeypatch, configured, shown):
    pytest.importorskip("gradio")
    monkeypatch.setattr(engine.drafters["tiny"].config, "loop_gate", configured)
    blocks = {block.elem_id: block for block in build_app(engine).blocks.values() if getattr(block, "elem_id", None)}
    assert tuple(blocks[name].value for name in ("dr-loops", "dr-gate")) == shown


def test_prefill_round_says_why_it_has_no_pools(page):
    *_, turns, _, _ = last(page.answer("abcab", [], *controls()))
    assert "The prompt was read here" in page.open_round(turns, 1, 0)[1]


def test_opened_round_stays_marked_while_the_answer_grows(page):
    updates = page.answer("abcab", [], *controls())
    turns = [next(updates)[2] for _ in range(2)][-1]
    page.open_round(turns, 1, 0)
    assert all('dr-chosen" role="button" tabindex="0" data-turn="1" data-round="0"' in chat for chat, *_ in updates)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_answer_without_text_does_not_seem_to_be_waited_for(page, is_stopped):
    turns = [render.Turn("user", "ab"), render.Turn("assistant", "")]
    chat, turns = page.stop(turns) if is_stopped else (render.conversation(turns, None), turns)
    assert ("reading the prompt" not in chat, "no text" in chat) == (is_stopped, is_stopped)


@pytest.mark.parametrize("turn, index", [(0, 1), (7, 0), (1, 999), (-1, -1)])
def test_a_round_that_is_not_there_opens_nothing(page, turn, index):
    *_, turns, _, _ = last(page.answer("abcab", [], *controls(max_new=8)))
    assert "Click a token" in page.open_round(turns, turn, index)[1]


@pytest.mark.parametrize("text, words", [("", "The prompt is empty"), ("a" * 100, "at most 60 fit")])
def test_unusable_prompt_leaves_the_text_and_the_conversation(page, text, words):
    earlier = [render.Turn("user", "ab"), render.Turn("assistant", "cd")]
    (update,) = page.answer(text, earlier, *controls())
    chat, _, turns, prompt, _ = update
    assert words in chat and 'role="alert"' in chat
    assert prompt == text and turns == earlier


def race(page, *arguments) -> list[str]:
    """All that a race shows, from the click to the result."""
    updates = list(page.measure(*arguments))
    return [html for html, _ in updates] + list(page.replay(updates[-1][1]))


@pytest.fixture
def cold(engine, monkeypatch):
    """A page whose engine has not run yet, and the calls of its model: `(is_drafted, max_new_tokens)`."""
    engine, calls = DemoEngine(engine.target, engine.tokenizer, engine.drafters, engine.limits), []
    run = engine.run

    def noted(inputs, settings, *, is_drafted=True):
        calls.append((is_drafted, settings.max_new_tokens, settings.drafter, inputs["input_ids"].shape[1]))
        return run(inputs, settings, is_drafted=is_drafted)

    monkeypatch.setattr(engine, "run", noted)
    return Page(engine), calls


def test_race_is_measured_after_both_ways_ran_with_its_prompt_and_settings(cold):
    page, calls = cold
    race(page, "abcab", *controls(max_new=40))
    assert calls == [(drafted, tokens, "tiny", 5) for tokens in (16, 40) for drafted in (True, False)]
    calls.clear()
    race(page, "abcabc", *controls(max_new=8))
    assert [call[:2] for call in calls] == [(True, 8), (False, 8)] * 2


def test_first_answer_comes_after_every_drafter_ran_and_later_ones_at_once(cold):
    page, calls = cold
    *_, turns, _, _ = last(page.answer("abcab", [], *controls()))
    warm = [(drafted, 16, name, 1) for name in page.engine.drafters for drafted in (True, False)]
    assert calls == [*warm, (True, 40, "tiny", 5)]
    assert len(turns[-1].content) == 40
    last(page.answer("abcab", [], *controls()))
    assert len(calls) == len(warm) + 2


def test_unusable_prompt_of_a_race_runs_and_replays_nothing(cold):
    page, calls = cold
    (shown,) = race(page, "", *controls())
    assert "The prompt is empty" in shown and 'role="alert"' in shown and not calls


def test_everything_that_a_call_yields_can_leave_its_process(page):
    """ZeroGPU runs a call in a process of its own."""
    for update in [*page.answer("abcab", [], *controls(max_new=8)), *page.measure("abcab", *controls(max_new=8))]:
        assert pickle.loads(pickle.dumps(update)) == update


def test_seconds_of_a_device_follow_from_the_limits_and_are_asked_for_calls_of_the_model_only(engine):
    asked = {}
    build_app(engine, lambda function, duration_s: asked.setdefault(function.__name__, duration_s) and function)
    assert asked == {name: device_seconds(engine.limits, n) for name, n in (("answer", 1), ("measure", 2))}
    assert device_seconds(DemoLimits(max_new_tokens=256), 1) < device_seconds(DemoLimits(max_new_tokens=256), 2) <= 90
    assert device_seconds(DemoLimits(max_new_tokens=512), 1) > device_seconds(DemoLimits(max_new_tokens=256), 1)


def test_race_ends_with_equal_texts_and_a_ratio(page):
    html = race(page, "abcab", *controls())
    texts = re.findall(r'dr-lane-text">([^<]*)<', html[-1])
    assert texts[0] == texts[1] and len(texts[0]) == 40
    assert "token for token the same" in html[-1] and "×</b> the speed" in html[-1]
    assert any("Replay" in update for update in html)


def test_sampled_race_claims_no_equal_texts(page):
    assert "distribution is the same" in race(page, "abcab", *controls(temperature=1.0))[-1]


def test_text_of_people_and_models_is_escaped(page):
    class Tokenizer:
        def decode(self, ids, skip_special_tokens=False):
            return "<img src=x>" * len(ids)

    stage = TracedStage((1,), (0,), ((1, 2),), ((0.5, 0.5),), ((0.5, 0.5),), -1.0)
    turn = render.Turn("assistant", "", [TracedRound((stage,), (1, 2))])
    html = render.conversation([render.Turn("user", "<script>"), turn], Tokenizer())
    html += render.pool_view(turn, 0, Tokenizer()) + render.race([render.Lane("<b>", "<i>")], "")
    assert "<img" not in html and "<script" not in html
    assert "&lt;img src=x&gt;" in html and "&lt;script&gt;" in html and "&lt;i&gt;" in html


def test_more_stages_than_usual_fit_the_page(engine, monkeypatch):
    monkeypatch.setattr(engine.drafters["tiny"].config, "max_stages", 9)
    sliders = [block for block in build_app(engine).blocks.values() if getattr(block, "label", "") == "Stages at most"]
    assert [(slider.value, slider.maximum) for slider in sliders] == [(9, 9)]


def test_app_builds_and_asks_no_other_host(engine, monkeypatch):
    app = build_app(engine)
    seen = {}
    monkeypatch.setattr(type(app), "launch", lambda self, **options: seen.update(options))
    launch(app, server_port=1)
    assert seen["server_port"] == 1
    assert not re.search(r"https?://", seen["css"])
    assert not any("http" in sheet for sheet in seen["theme"]._stylesheets)

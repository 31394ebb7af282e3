"""What the page shows, without a browser: origins, pools, notes, the race, and that nothing gets through unescaped."""

import re

import pytest

from hf_drelay.demo import render
from hf_drelay.demo.app import Page, build_app, launch
from hf_drelay.modeling.draft_trace import TracedRound, TracedStage


def controls(gate=-100.0, loops=True, temperature=0.0, max_new=40):
    return ["tiny", True, loops, gate, 3, 1, temperature, "sample", max_new, 0]


@pytest.fixture(scope="module")
def page(engine):
    return Page(engine)


def last(updates):
    *_, update = updates
    return update


def test_answer_colors_every_token_by_its_origin(page):
    chat, figures, turns, prompt, _ = last(page.answer("abcab", [], *controls()))
    origins = [origin for traced in turns[-1].rounds for origin in traced.origins]
    answer = chat[chat.index("dr-msg-assistant") :]
    assert re.findall(r'class="dr-tok dr-(\w+)"', answer) == origins
    assert "loop" in origins and prompt == ""
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


def test_prefill_round_says_why_it_has_no_pools(page):
    *_, turns, _, _ = last(page.answer("abcab", [], *controls()))
    assert "The prompt was read here" in page.open_round(turns, 1, 0)[1]


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


def test_race_ends_with_equal_texts_and_a_ratio(page):
    html = list(page.race("abcab", *controls()))
    texts = re.findall(r'dr-lane-text">([^<]*)<', html[-1])
    assert texts[0] == texts[1] and len(texts[0]) == 40
    assert "token for token the same" in html[-1] and "×</b> the speed" in html[-1]
    assert any("Replay" in update for update in html)


def test_sampled_race_claims_no_equal_texts(page):
    assert "distribution is the same" in list(page.race("abcab", *controls(temperature=1.0)))[-1]


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


def test_app_builds_and_asks_no_other_host(engine, monkeypatch):
    app = build_app(engine)
    seen = {}
    monkeypatch.setattr(type(app), "launch", lambda self, **options: seen.update(options))
    launch(app, server_port=1)
    assert seen["server_port"] == 1
    assert not re.search(r"https?://", seen["css"])
    assert not any("http" in sheet for sheet in seen["theme"]._stylesheets)

"""The demo in a real Chromium: what a visitor does and sees. `DEMO_SCREENSHOTS=folder` keeps pictures."""

import os
import re
from pathlib import Path

import pytest

from hf_drelay.demo.app import build_app


WAIT_MS = 120_000  # machines that run tests are often busy
ROUND = "#dr-chat [data-round]"

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(engine):
    from hf_drelay.demo.app import launch

    app = build_app(engine)
    launch(app, server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    yield app.local_url
    app.close()


@pytest.fixture
def visit(browser, address):
    """Opens the page in a profile of its own; fails the test when a page had errors or asked another host."""
    pages, problems = [], []

    def visit(width=1280, height=900):
        page = browser.new_context(viewport={"width": width, "height": height}).new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.wait_for_selector("#dr-send")
        pages.append(page)
        return page

    requests: list[str] = []
    yield visit
    for page in pages:
        page.context.close()
    assert not problems
    outside = {url for url in requests if not url.startswith((address, "data:", "blob:"))}
    # Gradio's own page asks for this one script, and works without it.
    assert not {url for url in outside if "iframe-resizer" not in url}


def picture(page, name: str) -> None:
    folder = os.environ.get("DEMO_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def send(page, text: str) -> None:
    page.fill("#dr-prompt textarea", text)
    page.click("#dr-send")


def watch_rounds(page) -> None:
    """Note how many rounds the page shows whenever it changes; a look now and then could come too late."""
    page.evaluate(
        """selector => {
            window.seenRounds = [];
            new MutationObserver(() => {
                const count = document.querySelectorAll(selector).length;
                if (count && !window.seenRounds.includes(count)) window.seenRounds.push(count);
            }).observe(document.body, {childList: true, subtree: true});
        }""",
        ROUND,
    )


def wait_until_done(page, tokens: int = 128) -> None:
    page.wait_for_selector(f"#dr-figures >> text=/^{tokens}$/")


def origins(page) -> set[str]:
    names = page.eval_on_selector_all("#dr-chat .dr-round .dr-tok", "all => all.map(one => one.className)")
    return {re.search(r"dr-(?!tok)(\w+)", name)[1] for name in names}


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_answer_arrives_token_by_token_and_a_round_opens(visit, width):
    page = visit(width)
    watch_rounds(page)
    send(page, "abcab")
    wait_until_done(page)
    seen = page.evaluate("window.seenRounds")
    assert len(seen) > 1 and seen == sorted(seen)
    assert seen[-1] == page.locator(ROUND).count()
    assert {"draft", "repair", "correction"} <= origins(page)
    page.locator(ROUND).nth(4).click()
    page.wait_for_selector("#dr-pools .dr-slot")
    assert "Round 4" in page.inner_text("#dr-pools")
    assert page.locator("#dr-pools .dr-picked").count() == page.locator("#dr-pools .dr-slot").count()
    picture(page, f"chat_{width}")
    # Nothing but the pools, which scroll by themselves, may be wider than the window.
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_rounds_open_with_the_keyboard(visit):
    page = visit()
    send(page, "abcab")
    wait_until_done(page)
    page.locator(ROUND).nth(2).focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#dr-pools >> text=Round 2")
    assert page.locator("#dr-chat .dr-chosen").count() == 1


def test_visitor_may_type_and_look_while_the_answer_grows(visit):
    page = visit()
    page.fill("#dr-max-new input[type=number]", "256")
    page.keyboard.press("Tab")
    send(page, "abcab")
    page.wait_for_selector(f"{ROUND} >> nth=2")
    page.fill("#dr-prompt textarea", "next question")
    page.locator(ROUND).nth(2).click()
    page.wait_for_selector("#dr-pools >> text=Round 2")
    wait_until_done(page, 256)
    assert page.input_value("#dr-prompt textarea") == "next question"
    assert "Round 2" in page.inner_text("#dr-pools") and page.locator("#dr-chat .dr-chosen").count() == 1


def test_loop_gate_changes_the_stages(visit):
    page = visit()
    send(page, "abcab")
    wait_until_done(page)
    assert "loop" not in origins(page)
    page.locator("#dr-loops").get_by_label("fixed gate").check()
    page.fill("#dr-gate input[type=number]", "-10")
    page.keyboard.press("Tab")
    page.click("#dr-clear")
    page.wait_for_selector("#dr-chat .dr-empty")
    send(page, "abcab")
    wait_until_done(page)
    assert "loop" in origins(page)
    page.locator("#dr-chat .dr-loop").first.click()
    page.wait_for_selector("#dr-pools >> text=Stage 2")
    assert "at least the gate -10.00: draft another stage" in page.inner_text("#dr-pools")


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_race_is_run_and_won_by_someone(visit, width):
    page = visit(width)
    page.get_by_role("tab", name="Race").click()
    page.fill("#dr-race-prompt textarea", "abcab")
    page.click("#dr-start")
    page.wait_for_selector("#dr-race >> text=the speed of plain decoding")
    assert "token for token the same" in page.inner_text("#dr-race")
    lanes = page.locator("#dr-race .dr-lane-text")
    assert lanes.nth(0).inner_text() == lanes.nth(1).inner_text() != ""
    picture(page, f"race_{width}")


def test_race_with_an_empty_prompt_says_so_and_the_next_one_runs(visit):
    page = visit()
    page.get_by_role("tab", name="Race").click()
    page.fill("#dr-race-prompt textarea", "  ")
    page.click("#dr-start")
    page.wait_for_selector("#dr-race [role=alert] >> text=The prompt is empty")
    page.fill("#dr-race-prompt textarea", "abcab")
    page.click("#dr-start")
    page.wait_for_selector("#dr-race >> text=the speed of plain decoding")
    page.click("#dr-start")  # a second race over the first one's result
    page.wait_for_selector("#dr-race >> text=Warming up")
    page.wait_for_selector("#dr-race >> text=the speed of plain decoding")


def test_two_visitors_at_once_get_their_own_answers(visit):
    texts = {}
    first, second = visit(), visit()
    send(first, "abcab")
    send(second, "kjihg")
    for name, page in (("first", first), ("second", second)):
        wait_until_done(page)
        assert page.locator("#dr-chat .dr-msg-user").count() == 1
        texts[name] = page.inner_text("#dr-chat .dr-msg-assistant")
    assert texts["first"] != texts["second"]
    send(first, "kjihg")  # its own conversation goes on
    first.wait_for_selector("#dr-chat .dr-msg-user >> nth=1")
    assert second.locator("#dr-chat .dr-msg-user").count() == 1


@pytest.mark.parametrize("text, words", [("", "The prompt is empty"), ("a" * 100, "at most 60 fit")])
def test_unusable_prompt_gets_a_sentence_and_keeps_its_text(visit, text, words):
    page = visit()
    send(page, text)
    page.wait_for_selector(f"#dr-chat [role=alert] >> text={words}")
    assert page.input_value("#dr-prompt textarea") == text
    picture(page, f"note_{len(text)}")
    send(page, "abcab")
    wait_until_done(page)
    assert page.locator("#dr-chat [role=alert]").count() == 0


def test_stop_keeps_what_is_there(visit):
    page = visit()
    page.fill("#dr-max-new input[type=number]", "256")
    page.keyboard.press("Tab")
    send(page, "abcab")
    page.wait_for_selector(ROUND)
    page.click("#dr-stop")
    page.wait_for_timeout(1500)
    kept = page.locator(ROUND).count()
    page.wait_for_timeout(500)
    assert page.locator(ROUND).count() == kept > 0

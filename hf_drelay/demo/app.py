"""The page: a chat whose tokens show where they came from, the pools of a clicked round, and a race.

All state of a visitor lives in their own session state and every call in its own view of the drafter, so visitors
cannot disturb each other's text. Model calls run one at a time, because two at once would falsify both speeds; further
visitors wait in the queue.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from hf_drelay.modeling.configuration_drelay import PROPOSALS

from . import render
from .engine import DemoEngine, DemoLimits, DemoSettings, Progress, PromptError
from .pieces import token_pieces


EXAMPLES = [
    "A farmer has 12 sheep and buys 7 more. Then he sells 5. How many sheep are left?",
    "Write a Python function that returns the second largest number of a list.",
    "Give three tips for a good night's sleep.",
]
OFF, FIXED, COST_AWARE = "off", "fixed gate", "cost-aware gate"  # ways of DLoop
_MAX_TURNS = 20  # kept in a visitor's session
_REFRESH_S = 0.08  # the browser gains nothing from faster updates
_QUEUE_SIZE = 32
# What a call asks of a shared device: time to get the models there and to warm up, then a pace that holds for targets
# of some billion weights.
_DEVICE_START_S = 20
_DEVICE_TOKENS_PER_S = 10

# Clicks and the Enter key on a round reach Python with the numbers of turn and round.
_ON_LOAD = """
const open = (event) => {
    const round = event.target.closest("[data-round]");
    if (!round) return;
    trigger("click", { turn: Number(round.dataset.turn), round: Number(round.dataset.round) });
};
element.addEventListener("click", open);
element.addEventListener("keydown", (event) => { if (event.key === "Enter") open(event); });
// Follow the text while it grows, unless the reader has scrolled up.
let isAtEnd = true;
element.addEventListener("scroll", (event) => {
    const box = event.target;
    isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}, true);
watch("value", () => {
    const box = element.querySelector(".dr-chat");
    if (box && isAtEnd) box.scrollTop = box.scrollHeight;
});
"""


def build_app(engine: DemoEngine, on_device=lambda function, duration_s: function):
    """
    The application as `gradio.Blocks`, to be handed to `launch`.

    Args:
        engine (`DemoEngine`): Target and drafters.
        on_device (`Callable`, *optional*): `on_device(function, duration_s)` decorates the functions that call the
            model, as `spaces.GPU` does, with the seconds that one call may take.

    Raises:
        ImportError: If gradio is missing.
    """
    gr = _gradio()
    page = Page(engine, unchanged=gr.skip())
    defaults = engine.default_settings()
    num_drafts = max(drelay.config.num_drafts for drelay in engine.drafters.values())
    with gr.Blocks(title="DRelay: speculative decoding, visible", analytics_enabled=False) as app:
        gr.Markdown(
            f"## DRelay: speculative decoding, visible\nTarget **{engine.target_name}**. A small drafter proposes, a "
            "selector repairs, the target verifies: the text is the target's own."
        )
        turns = gr.State([])
        with gr.Row(equal_height=False):
            with gr.Column(scale=3, min_width=320):
                with gr.Tabs():
                    with gr.Tab("Chat", id="chat"):
                        gr.HTML(render.legend())
                        chat = gr.HTML(render.conversation([], None), js_on_load=_ON_LOAD, elem_id="dr-chat")
                        pools = gr.HTML(render.pool_view(None, -1, None), elem_id="dr-pools")
                        figures = gr.HTML(render.figures([], 0, 0.0), elem_id="dr-figures")
                        prompt = gr.Textbox(
                            label="Prompt", placeholder="Ask something", lines=2, max_lines=8, elem_id="dr-prompt"
                        )
                        with gr.Row():
                            send = gr.Button("Send", variant="primary", elem_id="dr-send", min_width=80)
                            stop = gr.Button("Stop", elem_id="dr-stop", min_width=80)
                            clear = gr.Button("Clear", elem_id="dr-clear", min_width=80)
                        gr.Examples(EXAMPLES, prompt)
                    with gr.Tab("Race", id="race"):
                        gr.Markdown(
                            "The same prompt with the drafter and without. Each is measured alone, then both are "
                            "replayed at their measured pace on one clock."
                        )
                        race_prompt = gr.Textbox(
                            EXAMPLES[1], label="Prompt", lines=2, max_lines=8, elem_id="dr-race-prompt"
                        )
                        with gr.Row():
                            start = gr.Button("Start the race", variant="primary", elem_id="dr-start")
                            halt = gr.Button("Stop", elem_id="dr-halt", min_width=80)
                        race = gr.HTML(page.empty_race(), elem_id="dr-race")
            with gr.Column(scale=1, min_width=260):
                drafter = gr.Dropdown(list(engine.drafters), value=defaults.drafter, label="Drafter")
                selector = gr.Checkbox(defaults.use_selector, label="Selector (repairs the draft)")
                gating = gr.Radio(
                    [OFF, FIXED, COST_AWARE],
                    value={None: OFF, "auto": COST_AWARE}.get(defaults.loop_gate, FIXED),
                    label="DLoop (draft on while confident)",
                    info="Cost-aware: while the expected gain outweighs the measured cost",
                    elem_id="dr-loops",
                )
                gate = gr.Slider(
                    -10.0,
                    0.0,
                    value=max(-10.0, defaults.loop_gate) if isinstance(defaults.loop_gate, int | float) else -1.0,
                    step=0.25,
                    label="Loop gate",
                    info="Log-confidence from which another stage is drafted, when fixed",
                    elem_id="dr-gate",
                )
                stages = gr.Slider(
                    1, max(6, defaults.max_stages), value=defaults.max_stages, step=1, label="Stages at most"
                )
                length = gr.Slider(
                    1, num_drafts, value=defaults.num_draft_tokens, step=1, label="Draft tokens per stage"
                )
                temperature = gr.Slider(0.0, 1.5, value=0.0, step=0.1, label="Temperature", info="0 decodes greedily")
                proposal = gr.Radio(
                    list(PROPOSALS),
                    value=defaults.proposal,
                    label="Proposal",
                    info="How drafts are drawn above temperature 0",
                )
                max_new = gr.Slider(
                    8,
                    engine.limits.max_new_tokens,
                    value=defaults.max_new_tokens,
                    step=8,
                    label="New tokens at most",
                    elem_id="dr-max-new",
                )
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1)
        controls = [drafter, selector, gating, gate, stages, length, temperature, proposal, max_new, seed]
        on_chat = {"inputs": [prompt, turns, *controls], "outputs": [chat, figures, turns, prompt, pools]}
        calls = {"concurrency_id": "model", "concurrency_limit": 1, "show_progress": "hidden"}
        answer = on_device(page.answer, device_seconds(engine.limits, num_calls=1))
        events = [event(answer, **on_chat, **calls) for event in (send.click, prompt.submit)]
        measure = on_device(page.measure, device_seconds(engine.limits, num_calls=2))
        measured = gr.State(None)
        events.append(start.click(measure, [race_prompt, *controls], [race, measured], **calls))
        # It calls no model, so it neither holds a device nor waits for other visitors.
        showing = {"concurrency_limit": None, "show_progress": "hidden"}
        replay = events[-1].success(page.replay, measured, race, **showing)
        light = {"queue": False, "show_progress": "hidden"}
        start.click(None, cancels=[replay], **light)  # the next race has the lanes for itself
        events.append(replay)
        stop.click(page.stop, turns, [chat, turns], cancels=events, **light)
        halt.click(None, cancels=events, **light)
        clear.click(page.clear, None, on_chat["outputs"], cancels=events, **light)

        def open_round(turns, event: gr.EventData):
            return page.open_round(turns, event.turn, event.round)

        chat.click(open_round, turns, [chat, pools], **light)
    return app


def launch(app, **options) -> None:
    """Serve `app` with its queue, its style and no request to other hosts; `options` as in `gradio.Blocks.launch`."""
    gr = _gradio()
    fonts = ["system-ui", "sans-serif"]
    theme = gr.themes.Default(font=fonts, font_mono=["ui-monospace", "monospace"])
    app.queue(max_size=_QUEUE_SIZE)
    app.launch(theme=theme, css=style(), show_error=True, **options)


def style() -> str:
    """The style sheet."""
    return (Path(__file__).with_name("style.css")).read_text(encoding="utf-8")


def device_seconds(limits: DemoLimits, num_calls: int) -> int:
    """Seconds that an event with `num_calls` calls of the model may take on a shared device."""
    return _DEVICE_START_S + num_calls * limits.max_new_tokens // _DEVICE_TOKENS_PER_S


@dataclass
class MeasuredRace:
    """Both runs of a race, the drafted one first."""

    results: list[Progress]
    is_greedy: bool


class Page:
    """What the page's events do. Free of any user interface but HTML, so that it can be tested without a browser."""

    def __init__(self, engine: DemoEngine, unchanged: object = None):
        self.engine = engine
        self.unchanged = unchanged  # stands for an output that stays as the visitor has it

    def answer(self, prompt: str, turns: list, *controls):
        """Answer `prompt` after `turns`; yields `(chat, figures, turns, prompt, pools)`."""
        settings = self._settings(*controls)
        turns = [turn for turn in turns if turn.role != "note"][-_MAX_TURNS:]
        closed = render.pool_view(None, -1, None)
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            inputs, num_dropped = self.engine.encode([*messages, {"role": "user", "content": prompt}])
        except PromptError as error:
            shown = [*turns, render.Turn("note", str(error))]
            yield self._chat(shown), render.figures([], 0, 0.0), turns, prompt, closed
            return
        notes = [render.Turn("note", "The beginning of the conversation was left out to fit.")] if num_dropped else []
        reply = render.Turn("assistant", "", loop_gate=settings.loop_gate)
        turns = [*turns, *notes, render.Turn("user", prompt), reply]
        yield self._chat(turns), render.figures([], 0, 0.0), turns, "", closed
        if not self.engine.is_warm:
            self.engine.warm_up()
        for progress in _thinned(self.engine.run(inputs, settings)):
            reply.rounds, reply.is_done = progress.rounds, progress.is_done
            ids = [token for traced in progress.rounds for token in traced.committed_ids]
            reply.content = self.engine.tokenizer.decode(ids, skip_special_tokens=True)
            figures = render.figures(progress.rounds, len(ids), progress.tokens_per_s)
            # By now the visitor may type the next prompt, or look at a round.
            yield self._chat(turns), figures, turns, self.unchanged, self.unchanged

    def measure(self, prompt: str, *controls):
        """
        Run `prompt` with the drafter and without, after a few tokens of both that are not measured.

        Yields:
            `(html, measured)`: What to show, and at the end the [`MeasuredRace`], `None` before.
        """
        settings = self._settings(*controls)
        try:
            inputs, _ = self.engine.encode([{"role": "user", "content": prompt}])
        except PromptError as error:
            yield render.race([], f'<div class="dr-msg dr-msg-note" role="alert">{error}</div>'), None
            return
        lanes, results = self._lanes(), []
        yield render.race(lanes, "Warming up …"), None
        self.engine.warm_up(inputs, settings)
        for lane, is_drafted in zip(lanes, (True, False), strict=True):
            for progress in _thinned(self.engine.run(inputs, settings, is_drafted=is_drafted)):
                lane.num_tokens, lane.elapsed_s = len(progress.token_ids), progress.elapsed_s
                yield render.race(lanes, f"Measuring: {lane.name} …"), None
            results.append(progress)
        yield render.race(lanes, "Measured"), MeasuredRace(results, is_greedy=settings.temperature == 0)

    def replay(self, measured: MeasuredRace | None):
        """Show both runs at the pace that was measured, and the result; yields HTML, nothing without a race."""
        if measured is None:
            return
        lanes = self._lanes()
        yield from self._replay(lanes, measured.results)
        yield render.race(lanes, _verdict(*measured.results, is_greedy=measured.is_greedy))

    def stop(self, turns: list):
        """The conversation as it is when its answer was stopped."""
        for turn in turns:
            turn.is_done = True
        return self._chat(turns), turns

    def clear(self):
        """An empty conversation."""
        return self._chat([]), render.figures([], 0, 0.0), [], "", render.pool_view(None, -1, None)

    def open_round(self, turns: list, turn: int, index: int):
        """The chat with a round marked, and its pools."""
        selected = turns[turn] if 0 <= turn < len(turns) and turns[turn].role == "assistant" else None
        for other in turns:
            other.chosen = index if other is selected else None
        return self._chat(turns), render.pool_view(selected, index, self.engine.tokenizer)

    def empty_race(self) -> str:
        return render.race(self._lanes(), "")

    def _lanes(self) -> list[render.Lane]:
        return [render.Lane("with the drafter"), render.Lane("plain decoding")]

    def _chat(self, turns) -> str:
        return render.conversation(turns, self.engine.tokenizer)

    def _settings(self, drafter, selector, gating, gate, stages, length, temperature, proposal, max_new, seed):
        return DemoSettings(
            drafter=drafter,
            use_selector=bool(selector),
            loop_gate={OFF: None, FIXED: float(gate), COST_AWARE: "auto"}[gating],
            max_stages=int(stages),
            num_draft_tokens=int(length),
            proposal=proposal,
            temperature=float(temperature),
            max_new_tokens=int(max_new),
            seed=int(seed or 0),
        )

    def _replay(self, lanes, results):
        """Both lanes from the start line, on one clock, at the pace that was measured."""
        pieces = [token_pieces(self.engine.tokenizer, result.token_ids) for result in results]
        begin_s = time.perf_counter()
        is_running = True
        while is_running:
            now_s = time.perf_counter() - begin_s
            is_running = False
            for lane, result, texts in zip(lanes, results, pieces, strict=True):
                lane.total = len(result.token_ids)
                lane.num_tokens = sum(moment <= now_s for moment in result.times_s)
                lane.is_done = lane.num_tokens == lane.total
                lane.elapsed_s = result.elapsed_s if lane.is_done else now_s
                lane.text = "".join(texts[: lane.num_tokens])
                is_running |= not lane.is_done
            yield render.race(lanes, "Replay at the measured pace")
            time.sleep(_REFRESH_S)


def _verdict(drafted, plain, *, is_greedy: bool) -> str:
    """The result of a race in one sentence."""
    ratio = drafted.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else float("nan")
    text = (
        f"<b>{ratio:.2f}×</b> the speed of plain decoding: {drafted.tokens_per_s:.1f} against "
        f"{plain.tokens_per_s:.1f} tokens/s, prefill included."
    )
    if not is_greedy:
        return text + " Sampled texts differ; their distribution is the same."
    same = "token for token the same" if drafted.token_ids == plain.token_ids else "not the same (a rounding tie)"
    return f"{text} The two texts are {same}."


def _thinned(updates):
    """Leave out updates that come faster than a browser can show them, but never the last one."""
    shown_s = 0.0
    for update in updates:
        if update.is_done or time.perf_counter() - shown_s >= _REFRESH_S:
            shown_s = time.perf_counter()
            yield update


def load_engine(target: str | None = None, drafter: str | None = None, device=None, **limits) -> DemoEngine:
    """
    Target and drafter by name.

    Args:
        target (`str`, *optional*): Folder or Hub id; `None` is the embedded demo target.
        drafter (`str`, *optional*): Folder or Hub id; `None` is the drafter that ships for the demo target.
        device (`str`, *optional*): Default: a GPU where there is one.
        limits (`int`): Fields of [`DemoLimits`].
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_drelay import DRelayModel
    from hf_drelay.targets import load_demo_target, resolve_drafter

    if target is not None and drafter is None:
        raise ValueError(
            f"`drafter` is missing: the bundled drafter fits the demo target only, not {target!r}. Pass the folder or "
            "Hub id of a drafter that was trained for this target."
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    location = resolve_drafter(drafter)
    drelay = DRelayModel.from_pretrained(location).eval()
    if target is None:
        model, tokenizer = load_demo_target(device=device)
    else:
        model = AutoModelForCausalLM.from_pretrained(target).eval().to(device)
        tokenizer = AutoTokenizer.from_pretrained(target)
    name = location.rstrip(os.sep).replace(os.sep, "/").rpartition("/")[2]
    return DemoEngine(model, tokenizer, {name: drelay.to(device)}, DemoLimits(**limits))


def _gradio():
    try:
        import gradio
    except ImportError as error:
        raise ImportError("The demo needs gradio: pip install 'hf-drelay[demo]'.") from error
    return gradio


__all__ = ["build_app", "launch", "load_engine"]

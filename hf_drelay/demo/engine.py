"""Runs one `generate()` call for the demo and reports while it runs, with no knowledge of any user interface.

Calls run in a thread of their own. What is shown comes from the trace of the call's own view, so two calls never see
each other's rounds; a consumer that goes away stops its call at the next token.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from transformers import set_seed


# Longer texts are refused without counting their tokens: the longest tokens of a vocabulary have about this size.
_CHARACTERS_PER_TOKEN = 32
_WARM_UP_TOKENS = 16  # some rounds of drafting, and as many plain steps
_MODES = {"thinking": {"enable_thinking": True}, "non_thinking": {"enable_thinking": False}}


class PromptError(ValueError):
    """A prompt that cannot be answered; the message is for the person who typed it."""


@dataclass(frozen=True)
class DemoLimits:
    """
    What one call may cost.

    Attributes:
        max_prompt_tokens (`int`): Of the whole conversation, chat template included.
        max_new_tokens (`int`): Upper end of the control.
    """

    max_prompt_tokens: int = 1024
    max_new_tokens: int = 256


@dataclass(frozen=True)
class DemoSettings:
    """What the controls of the page are set to; drafting options as in [`DRelayModel.with_options`]."""

    drafter: str
    use_selector: bool = True
    loop_gate: float | str | None = None
    max_stages: int = 3
    num_draft_tokens: int = 4
    proposal: str = "sample"
    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0


@dataclass
class Progress:
    """
    A call so far.

    Attributes:
        rounds (`list[TracedRound]`): Rounds with their drafts; empty for plain decoding.
        token_ids (`list[int]`): New tokens.
        times_s (`list[float]`): When each token arrived, counted from the start of the call.
        elapsed_s (`float`): Time so far; after the end, of the whole call.
        is_done (`bool`): Whether the call has ended.
    """

    rounds: list = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    is_done: bool = False

    @property
    def tokens_per_s(self) -> float:
        """Speed so far, prefill included."""
        return len(self.token_ids) / self.elapsed_s if self.elapsed_s else 0.0


class DemoEngine:
    """
    A target with the drafters that fit it.

    Args:
        target (`PreTrainedModel`): In evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        drafters (`dict[str, DRelayModel]`): By the name that the page shows.
        limits (`DemoLimits`, *optional*): What one call may cost.
    """

    def __init__(self, target, tokenizer, drafters: dict, limits: DemoLimits | None = None):
        if not drafters:
            raise ValueError("`drafters` is empty; pass at least one drafter with the name to show for it.")
        self.target = target
        self.tokenizer = tokenizer
        self.drafters = drafters
        self.limits = limits or DemoLimits()
        self._views: dict[tuple, object] = {}  # by drafter and options
        self.is_warm = False
        for drelay in drafters.values():
            drelay.adapter(target)  # an error that names what does not fit, before anybody waits for an answer

    @property
    def target_name(self) -> str:
        return (self.target.name_or_path or type(self.target).__name__).rstrip("/").rpartition("/")[2]

    def default_settings(self) -> DemoSettings:
        """Settings of the first drafter's own configuration, as far as the page has controls for them."""
        name = next(iter(self.drafters))
        config = self.drafters[name].config
        return DemoSettings(
            drafter=name,
            use_selector=config.use_selector,
            loop_gate=config.loop_gate,
            max_stages=config.max_stages,
            num_draft_tokens=config.num_draft_tokens or config.num_drafts,
            proposal=config.proposal,
            max_new_tokens=min(128, self.limits.max_new_tokens),
        )

    def encode(self, turns: list[dict]) -> tuple[dict, int]:
        """
        Token ids of a conversation inside the chat template. Old turns are dropped when all of them do not fit.

        Args:
            turns (`list[dict]`): Messages with `role` and `content`; the last one is the new prompt.

        Returns:
            `(inputs, num_dropped)`: `input_ids` and `attention_mask`, each `(1, P)`, and the number of dropped turns.

        Raises:
            PromptError: If the prompt is empty, or too long without any other turn.
        """
        prompt, limit = turns[-1]["content"], self.limits.max_prompt_tokens
        if not prompt.strip():
            raise PromptError("The prompt is empty. Type a question first.")
        if len(prompt) > limit * _CHARACTERS_PER_TOKEN:
            raise PromptError(f"The prompt has {len(prompt)} characters; at most {limit} tokens fit. Shorten it.")
        for first in range(0, len(turns), 2):  # a question goes together with its answer
            inputs = self._template(turns[first:])
            length = inputs["input_ids"].shape[1]
            if length <= limit:
                return inputs, first
        raise PromptError(f"The prompt has {length} tokens; at most {limit} fit. Shorten it.")

    def run(self, inputs: dict, settings: DemoSettings, *, is_drafted: bool = True) -> Iterator[Progress]:
        """
        Generate, and yield the state of the call whenever there is something new; the last one is done.

        Args:
            inputs (`dict`): From `encode`.
            settings (`DemoSettings`): Of the page.
            is_drafted (`bool`): Off decodes plainly.
        """
        view = self._view(settings) if is_drafted else None
        call = _Call(self.target, inputs, self._arguments(settings), settings.seed, view)
        try:
            call.start()
            yield from call.watch()
        finally:
            call.stop()

    def warm_up(self, inputs: dict | None = None, settings: DemoSettings | None = None) -> None:
        """
        Decode a few tokens with the drafter and without: first calls pay for kernels, memory and threads.

        Args:
            inputs (`dict`, *optional*): From `encode`; default: a short prompt. Kernels are chosen by the length.
            settings (`DemoSettings`, *optional*): Of the call to come; default: those of every drafter in turn.
        """
        if inputs is None:
            inputs, _ = self.encode([{"role": "user", "content": "a"}])
        defaults = [replace(self.default_settings(), drafter=name) for name in self.drafters]
        for case in defaults if settings is None else [settings]:
            short = replace(case, max_new_tokens=min(case.max_new_tokens, _WARM_UP_TOKENS))
            for is_drafted in (True, False):
                list(self.run(inputs, short, is_drafted=is_drafted))
        self.is_warm = True

    def _view(self, settings: DemoSettings):
        drelay = self.drafters[settings.drafter]
        options = {
            "use_selector": settings.use_selector and drelay.selector is not None,
            "loop_gate": settings.loop_gate,
            "max_stages": settings.max_stages,
            "num_draft_tokens": min(settings.num_draft_tokens, drelay.config.num_drafts),
            "proposal": settings.proposal,
        }
        # What the cost-aware gate has measured belongs to a view and should outlive an answer.
        key = (settings.drafter, *options.values())
        if key not in self._views:
            self._views[key] = drelay.with_options(**options, trace=True)
        return self._views[key]

    def _arguments(self, settings: DemoSettings) -> dict:
        arguments = {"max_new_tokens": min(settings.max_new_tokens, self.limits.max_new_tokens)}
        if settings.temperature > 0:
            return arguments | {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
        return arguments | {"do_sample": False}

    def _template(self, turns: list[dict]) -> dict:
        if self.tokenizer.chat_template is None:
            inputs = self.tokenizer(turns[-1]["content"], return_tensors="pt")
        else:
            mode = next(iter(self.drafters.values())).config.chat_template_mode
            inputs = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_tensors="pt", return_dict=True, **_MODES.get(mode, {})
            )
        names = ("input_ids", "attention_mask")
        return {name: inputs[name].to(self.target.device) for name in names}


class _Stopped(Exception):
    """Raised inside a call that nobody waits for any more."""


class _Call:
    """One `generate()` in a thread, observed through its streamer and its trace."""

    def __init__(self, target, inputs, arguments, seed, view):
        self.target, self.inputs, self.arguments, self.seed, self.view = target, inputs, arguments, seed, view
        self.progress = Progress()
        self.error: BaseException | None = None
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.is_stopped = False
        self.is_prompt_seen = False
        self.thread = threading.Thread(target=self._generate, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """End the call at its next token, and wait for that."""
        self.is_stopped = True
        self.thread.join()

    def watch(self) -> Iterator[Progress]:
        is_done = False
        while not is_done:
            is_done = self.events.get()
            while not self.events.empty():
                is_done = self.events.get()
            if self.error is not None:
                raise self.error
            yield self._snapshot(is_done)

    def _snapshot(self, is_done: bool) -> Progress:
        """A copy that later tokens do not change. Its rounds and its tokens may be one round apart until the end."""
        progress, trace = self.progress, self.view.trace if self.view else None
        times_s = list(progress.times_s)
        elapsed_s = progress.elapsed_s if is_done else (times_s[-1] if times_s else 0.0)
        rounds = list(trace.rounds) if trace is not None else []
        return Progress(rounds, list(progress.token_ids), times_s, elapsed_s, is_done)

    def _generate(self) -> None:
        try:
            set_seed(self.seed)
            self.start_s = time.perf_counter()
            self.target.generate(**self.inputs, **self.arguments, assistant_model=self.view, streamer=self)
            self.progress.elapsed_s = time.perf_counter() - self.start_s
        except _Stopped:
            pass
        except BaseException as error:  # handed to the thread that watches
            self.error = error
        self.events.put(True)

    def put(self, ids: torch.LongTensor) -> None:
        """Streamer protocol: the prompt comes first, then every round's tokens."""
        if self.is_stopped:
            raise _Stopped
        if not self.is_prompt_seen:
            self.is_prompt_seen = True
            return
        new_ids = ids.flatten().tolist()
        now_s = time.perf_counter() - self.start_s
        self.progress.times_s += [now_s] * len(new_ids)
        self.progress.token_ids += new_ids
        self.events.put(False)

    def end(self) -> None:
        """Streamer protocol."""

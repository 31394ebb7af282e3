"""HTML of the demo: the conversation token by token, the pools of a round, figures, and the lanes of the race.

Everything that a model or a person wrote is escaped here and nowhere else.
"""

from dataclasses import dataclass, field
from html import escape

from .pieces import token_pieces, visible


# origin -> (name in the legend, what it means)
LEGEND = {
    "draft": ("draft", "the drafter's first choice, accepted by the target"),
    "repair": ("repaired", "the selector took another candidate of the pool, and the target accepted it"),
    "loop": ("DLoop", "from a second or later drafting stage of the same round, accepted"),
    "bonus": ("bonus", "added by the target after a draft that was right to its end"),
    "correction": ("correction", "the target's own token where it rejected the draft"),
    "target": ("target", "decoded without a draft"),
}
NUM_CANDIDATES = 5  # shown of each pool


@dataclass
class Turn:
    """
    One message of a conversation.

    Attributes:
        role (`str`): `"user"`, `"assistant"`, or `"note"` for what the application says itself.
        content (`str`): Text.
        rounds (`list[TracedRound]`): Of an answer.
        loop_gate (`float` or `"auto"`, *optional*): The gate of an answer's call.
        is_done (`bool`): Whether an answer has ended or was stopped.
        chosen (`int`, *optional*): Round of an answer whose pools are open.
    """

    role: str
    content: str
    rounds: list = field(default_factory=list)
    loop_gate: float | str | None = None
    is_done: bool = False
    chosen: int | None = None


def legend() -> str:
    items = "".join(
        f'<span class="dr-tok dr-{origin}" title="{escape(meaning)}">{name}</span>'
        for origin, (name, meaning) in LEGEND.items()
    )
    return f'<div class="dr-legend">{items}<span class="dr-hint">Click a token to open its round.</span></div>'


def conversation(turns: list[Turn], tokenizer) -> str:
    """The messages; tokens of one round stand together and can be clicked."""
    if not turns:
        return (
            '<div class="dr-chat dr-empty">Ask something. Every token of the answer is colored by where it came '
            "from.</div>"
        )
    parts = []
    for number, turn in enumerate(turns):
        if turn.role == "assistant":
            body = _answer(turn, number, tokenizer)
        else:
            body = escape(turn.content)
        role = ' role="alert"' if turn.role == "note" else ""
        parts.append(f'<div class="dr-msg dr-msg-{turn.role}" dir="auto"{role}>{body}</div>')
    return f'<div class="dr-chat">{"".join(parts)}</div>'


def _answer(turn: Turn, number: int, tokenizer) -> str:
    ids = [token for traced in turn.rounds for token in traced.committed_ids]
    pieces = iter(token_pieces(tokenizer, ids))
    html = []
    for index, traced in enumerate(turn.rounds):
        tokens = []
        for origin in traced.origins:
            piece = next(pieces)
            if piece:
                name, meaning = LEGEND[origin]
                tokens.append(
                    f'<span class="dr-tok dr-{origin}" title="{name}: {escape(meaning)} (round {index})">'
                    f"{escape(piece)}</span>"
                )
        if tokens:
            state = " dr-chosen" if index == turn.chosen else ""
            html.append(
                f'<span class="dr-round{state}" role="button" tabindex="0" data-turn="{number}" '
                f'data-round="{index}">{"".join(tokens)}</span>'
            )
    waiting = "no text" if turn.is_done else "reading the prompt …"
    return "".join(html) or f'<span class="dr-wait">{waiting}</span>'


def figures(rounds: list, num_tokens: int, tokens_per_s: float) -> str:
    """τ, speed and counts of a call."""
    drafted = [traced for traced in rounds if traced.stages]
    tau = sum(len(traced.committed_ids) for traced in drafted) / len(drafted) if drafted else None
    stages = sum(len(traced.stages) for traced in drafted) / len(drafted) if drafted else None
    cells = [
        ("tokens / s", f"{tokens_per_s:.1f}" if num_tokens else "–", "prefill included"),
        ("τ", "–" if tau is None else f"{tau:.2f}", "tokens committed per round, bonus counted"),
        ("rounds", str(len(drafted)), "forwards of the target that verified a draft"),
        ("tokens", str(num_tokens), "new tokens"),
        ("stages / round", "–" if stages is None else f"{stages:.2f}", "drafting stages before a verification"),
        ("repairs accepted", str(_num_repairs(drafted)), "tokens that the selector changed and the target accepted"),
    ]
    body = "".join(
        f'<div class="dr-fig" title="{escape(hint)}"><b>{value}</b><span>{name}</span></div>'
        for name, value, hint in cells
    )
    return f'<div class="dr-figures">{body}</div>'


def _num_repairs(drafted: list) -> int:
    return sum(
        bool(choice)
        for traced in drafted
        for choice in [c for stage in traced.stages for c in stage.choices][: traced.num_accepted]
    )


def pool_view(turn: Turn | None, index: int, tokenizer) -> str:
    """What round `index` of an answer drafted, slot by slot: candidates, choice, and the target's word."""
    if turn is None or not 0 <= index < len(turn.rounds):
        return '<div class="dr-pools dr-empty">Click a token of an answer to see the pools of its round.</div>'
    traced = turn.rounds[index]
    names = [escape(visible(tokenizer.decode([i]))) for i in traced.committed_ids]
    committed = " ".join(f'<span class="dr-tok dr-{o}">{n}</span>' for o, n in zip(traced.origins, names, strict=True))
    head = f'<div class="dr-pools-head"><b>Round {index}</b> committed {committed}</div>'
    if not traced.stages:
        reason = "The prompt was read here: the target decoded this token itself." if index == 0 else "No draft."
        return f'<div class="dr-pools">{head}<p>{reason}</p></div>'
    parts, slot = [head], 0
    for depth, stage in enumerate(traced.stages):
        parts.append(_stage_head(depth, stage, turn.loop_gate, is_last=depth + 1 == len(traced.stages)))
        slots = []
        for place in range(len(stage.draft_ids)):
            slots.append(_slot(stage, place, slot, traced, tokenizer))
            slot += 1
        parts.append(f'<div class="dr-slots">{"".join(slots)}</div>')
    parts.append(
        '<div class="dr-key"><i class="dr-bar-p"></i>drafter’s probability <i class="dr-bar-o"></i>after the selector '
        "(share of the pool)</div>"
    )
    return f'<div class="dr-pools">{"".join(parts)}</div>'


def _stage_head(depth: int, stage, gate: float | str | None, *, is_last: bool) -> str:
    confidence = f"log-confidence {stage.log_confidence:.2f}"
    if gate is None:
        verdict = "DLoop is off: verify"
    elif gate == "auto":
        verdict = f"cost-aware gate: {'verify' if is_last else 'draft another stage'}"
    elif not is_last:
        verdict = f"at least the gate {gate:.2f}: draft another stage"
    elif stage.log_confidence >= gate:
        verdict = f"at least the gate {gate:.2f}, but no stage or length is left: verify"
    else:
        verdict = f"below the gate {gate:.2f}: verify"
    return f'<div class="dr-stage"><b>Stage {depth + 1}</b> {confidence}, {verdict}</div>'


def _slot(stage, place: int, slot: int, traced, tokenizer) -> str:
    """One slot: its candidates, the selector's choice, and what the target said."""
    choice, pool = stage.choices[place], stage.pool_ids[place]
    is_reached = slot < len(traced.committed_ids)
    chosen_id = traced.committed_ids[slot] if is_reached else None
    wanted = {k for k, token in enumerate(pool) if token == chosen_id}
    shown = sorted({*range(min(NUM_CANDIDATES, len(pool))), choice} | wanted)
    rows = "".join(_candidate(stage, place, k, choice, chosen_id, tokenizer) for k in shown)
    decision = "KEEP" if choice == 0 else "REPAIR"
    if not is_reached:
        state, verdict = "unverified", "not reached"
    elif slot < traced.num_accepted:
        state, verdict = "accepted", "✓ accepted"
    else:
        text = escape(visible(tokenizer.decode([chosen_id])))
        state, verdict = "rejected", f"✗ target: {text}" + ("" if wanted else " (not in the pool)")
    return (
        f'<div class="dr-slot dr-{state}"><div class="dr-slot-head">slot {slot + 1}'
        f'<span class="dr-{decision.lower()}">{decision}</span></div>{rows}'
        f'<div class="dr-verdict">{verdict}</div></div>'
    )


def _candidate(stage, place: int, k: int, choice: int, chosen_id, tokenizer) -> str:
    token = stage.pool_ids[place][k]
    text = escape(visible(tokenizer.decode([token])))
    before = stage.pool_probs[place][k] if stage.pool_probs else 0.0
    after = stage.selection_probs[place][k] if stage.selection_probs else 0.0
    classes = "dr-cand" + (" dr-picked" if k == choice else "") + (" dr-wanted" if token == chosen_id else "")
    hint = f"candidate {k + 1}, token {token}: drafter {before:.3f}, selector {after:.3f}"
    return (
        f'<div class="{classes}" title="{escape(hint)}"><span class="dr-cand-text">{text}</span>'
        f'<span class="dr-bars"><i class="dr-bar-p" style="width:{before:.1%}"></i>'
        f'<i class="dr-bar-o" style="width:{after:.1%}"></i></span>'
        f'<span class="dr-cand-p">{before:.2f}<br>{after:.2f}</span></div>'
    )


@dataclass
class Lane:
    """
    One runner of the race.

    Attributes:
        name (`str`): Shown above it.
        text (`str`): What it has written.
        num_tokens (`int`): Tokens it has written, of `total`.
        total (`int`): Tokens of its whole text; 0 while unknown.
        elapsed_s (`float`): Its clock.
        is_done (`bool`): Whether it has arrived.
    """

    name: str
    text: str = ""
    num_tokens: int = 0
    total: int = 0
    elapsed_s: float = 0.0
    is_done: bool = False


def race(lanes: list[Lane], status: str) -> str:
    """Lanes side by side, and a line that says what is going on."""
    body = []
    for lane in lanes:
        share = lane.num_tokens / lane.total if lane.total else 0.0
        speed = f"{lane.num_tokens / lane.elapsed_s:.1f} tokens/s" if lane.elapsed_s else "–"
        state = " dr-lane-done" if lane.is_done else ""
        body.append(
            f'<div class="dr-lane{state}">'
            f'<div class="dr-lane-head"><b>{escape(lane.name)}</b><span>{speed}</span></div>'
            f'<div class="dr-track"><i style="width:{share:.1%}"></i></div>'
            f'<div class="dr-lane-head"><span>{lane.num_tokens} tokens</span><span>{lane.elapsed_s:.2f} s</span></div>'
            f'<div class="dr-lane-text">{escape(lane.text)}</div></div>'
        )
    status = f'<div class="dr-race-status">{status}</div>'
    return f'<div class="dr-race">{status}<div class="dr-lanes">{"".join(body)}</div></div>'

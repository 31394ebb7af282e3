"""Figures of a benchmark, each drawn once for light paper, once for dark, and once for the page.

The page's figures take their colours from the style sheet, so they follow the reader's scheme: they are drawn in
marker colours that are replaced by CSS variables afterwards.
"""

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .measure import PHASES
from .summary import ALL_TASKS
from .ways import PLAIN


# Distinguishable with the common kinds of colour blindness, and readable on their ground.
LIGHT_SERIES = (
    *("#0b62a8", "#c2410c", "#15803d", "#7c3aed", "#a16207", "#0e7490"),
    *("#be185d", "#4d5d18", "#4b5563", "#7f1d1d", "#1e3a8a", "#86198f"),
)
DARK_SERIES = (
    *("#6cb6ff", "#ff9d5c", "#5fd38a", "#c4a3ff", "#f2c14e", "#5ad1e6"),
    *("#ff8fc2", "#b9cf62", "#c3cad3", "#ff7a7a", "#93a8ff", "#f0a6ff"),
)
ROUND_PHASES = tuple(phase for phase in PHASES if phase != "prefill")
MARKERS = "osD^vP*X<>dh"
WIDTH = 9.0  # inches


@dataclass(frozen=True)
class Palette:
    """Colours of a figure: text and axes, grid, ground (`None` is transparent), series."""

    text: str
    grid: str
    ground: str | None
    series: tuple[str, ...]

    def color(self, number: int) -> str:
        return self.series[number % len(self.series)]


LIGHT = Palette("#1f2328", "#d5d9de", "#ffffff", LIGHT_SERIES)
DARK = Palette("#e6e9ec", "#3a424b", "#15191e", DARK_SERIES)
# Marker colours of the page, and the variables that take their place.
PAGE = Palette("#010101", "#010102", None, tuple(f"#0102{number:02x}" for number in range(len(LIGHT_SERIES))))
_VARIABLES = {PAGE.text: "--text", PAGE.grid: "--grid"} | {
    color: f"--series-{number}" for number, color in enumerate(PAGE.series)
}


@dataclass(frozen=True)
class FigureText:
    """A drawn figure for the page."""

    name: str
    caption: str
    svg: str


def _plotting():
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Drawing figures needs `matplotlib`. Install it with `pip install 'hf-drelay[bench]'`."
        ) from error
    matplotlib.rcParams["svg.hashsalt"] = "hf_drelay"  # the same figure gives the same file
    return Figure


def start_figure(palette: Palette, height: float):
    figure = _plotting()(figsize=(WIDTH, height), layout="constrained")
    figure.patch.set_facecolor(palette.ground or "none")
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.tick_params(colors=palette.text, labelcolor=palette.text)
    axes.grid(color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(palette.text)
    return figure, axes


def label_axes(axes, palette: Palette, x: str, y: str) -> None:
    axes.set_xlabel(x, color=palette.text)
    axes.set_ylabel(y, color=palette.text)


def draw_legend(figure, axes, palette: Palette) -> None:
    """Above the axes, in room of its own: the figure grows by the height of the legend."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    longest = max(len(label) for label in labels)
    columns = max(1, min(len(labels), int(125 / (longest + 8))))
    figure.set_figheight(figure.get_figheight() + 0.22 * math.ceil(len(labels) / columns))
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, frameon=False, labelcolor=palette.text, fontsize=9
    )


def _ways(records: list[dict], condition: Callable[[dict], bool] = lambda record: True) -> list[str]:
    return list(dict.fromkeys(record["way"] for record in records if condition(record)))


def _numbers(records: list[dict]) -> dict[str, int]:
    """Colour of each way, the same in all figures."""
    return {way: number for number, way in enumerate(w for w in _ways(records) if w != PLAIN)}


def _tasks(records: list[dict]) -> list[str]:
    tasks = list(dict.fromkeys(record["task"] for record in records))
    return tasks if len(tasks) > 2 else [task for task in tasks if task != ALL_TASKS] or tasks


def _find(records: list[dict], task: str, way: str) -> dict | None:
    return next((r for r in records if r["task"] == task and r["way"] == way), None)


def _grouped_bars(records, palette, ways, value, error=None, height=4.2):
    """Bars of each way side by side for each task; a bar's whisker spans the quartiles."""
    figure, axes = start_figure(palette, height)
    tasks, numbers = _tasks(records), _numbers(records)
    width = 0.8 / max(1, len(ways))
    for place, way in enumerate(ways):
        positions, values, whiskers = [], [], [[], []]
        for group, task in enumerate(tasks):
            record = _find(records, task, way)
            found = None if record is None else value(record)
            if found is None:
                continue
            positions.append(group - 0.4 + width * (place + 0.5))
            values.append(found)
            low, high = (found, found) if error is None else error(record)
            whiskers[0].append(max(0.0, found - low))
            whiskers[1].append(max(0.0, high - found))
        axes.bar(
            positions,
            values,
            width * 0.9,
            label=way,
            color=palette.color(numbers[way]),
            yerr=None if error is None else whiskers,
            error_kw={"ecolor": palette.text, "elinewidth": 1.0, "capsize": 2},
        )
    axes.set_xticks(range(len(tasks)), tasks, fontsize=10 if len(tasks) <= 6 else 8)
    axes.grid(axis="x", visible=False)
    return figure, axes


def speedup_figure(records, palette):
    """Speedup by task and way, with quartiles over turns."""
    ways = _ways(records, lambda r: r["kind"] != "plain" and r["speedup"] is not None)
    if not ways:
        return None
    figure, axes = _grouped_bars(
        records,
        palette,
        ways,
        lambda r: None if r["speedup"] is None else r["speedup"][1],
        lambda r: (r["speedup"][0], r["speedup"][2]),
    )
    axes.axhline(1.0, color=palette.text, linewidth=1.2, linestyle="--", label="plain generate()")
    label_axes(axes, palette, "task", "speedup over plain (×)")
    draw_legend(figure, axes, palette)
    return figure


def tau_figure(records, palette):
    """Acceptance length by task and way."""
    ways = _ways(records, lambda r: _tau(r) is not None)
    if not ways:
        return None
    figure, axes = _grouped_bars(records, palette, ways, _tau)
    axes.axhline(1.0, color=palette.text, linewidth=1.2, linestyle="--", label="nothing accepted")
    label_axes(axes, palette, "task", "τ (tokens a round, bonus counted)")
    draw_legend(figure, axes, palette)
    return figure


def _tau(record: dict) -> float | None:
    return None if record["statistics"] is None else record["statistics"]["acceptance_length"]


def acceptance_figure(records, palette):
    """Conditional acceptance at each slot of a round."""
    ways = _ways(records, lambda r: r["statistics"] is not None and r["statistics"]["acceptance_by_slot"])
    if not ways:
        return None
    figure, axes = start_figure(palette, 4.2)
    numbers = _numbers(records)
    longest = 1
    for way in ways:
        rates = _find(records, ALL_TASKS, way)["statistics"]["acceptance_by_slot"]
        points = [(slot, 100 * rate) for slot, rate in enumerate(rates, start=1) if rate is not None]
        longest = max(longest, len(rates))
        axes.plot(
            [slot for slot, _ in points],
            [rate for _, rate in points],
            marker=MARKERS[numbers[way] % len(MARKERS)],
            markersize=5,
            label=way,
            color=palette.color(numbers[way]),
        )
    axes.set_ylim(0, 104)
    axes.set_xlim(0.5, longest + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    label_axes(axes, palette, "slot in the round", "accepted, given all earlier slots (%)")
    draw_legend(figure, axes, palette)
    return figure


def phases_figure(records, palette):
    """Where the milliseconds of a round go."""
    chosen = [r for r in records if r["task"] == ALL_TASKS and r["round_ms"] is not None]
    if not chosen:
        return None
    figure, axes = start_figure(palette, 1.6 + 0.42 * len(chosen))
    left = [0.0] * len(chosen)
    for number, phase in enumerate(ROUND_PHASES):
        values = [max(0.0, r["round_ms"][phase]) for r in chosen]
        label = "verify (target forward)" if phase == "verify" else phase
        axes.barh(range(len(chosen)), values, left=left, height=0.62, label=label, color=palette.color(number))
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(chosen)), [r["way"] for r in chosen])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    label_axes(axes, palette, "time of a round (ms)", "")
    draw_legend(figure, axes, palette)
    return figure


def break_even_figure(records, palette):
    """
    Speedup against the tokens of a round, with the line of each way: its rounds cost break-even τ times a plain step.
    Rounds without a draft count in both.
    """
    ways = _ways(records, lambda r: _tau(r) is not None and r["break_even_tau"] is not None)
    if not ways:
        return None
    figure, axes = start_figure(palette, 4.4)
    numbers = _numbers(records)
    points = [r for r in records if r["way"] in ways and r["tokens_per_round"] and r["speedup"] is not None]
    highest = max([r["tokens_per_round"] for r in points] + [r["break_even_tau"] or 1.0 for r in points]) * 1.08
    for way in ways:
        color, even = palette.color(numbers[way]), _find(records, ALL_TASKS, way)["break_even_tau"]
        own = [r for r in points if r["way"] == way]
        axes.plot([1.0, highest], [1.0 / even, highest / even], color=color, linewidth=1.2, alpha=0.7)
        axes.scatter(
            [r["tokens_per_round"] for r in own],
            [r["speedup"][1] for r in own],
            color=color,
            marker=MARKERS[numbers[way] % len(MARKERS)],
            s=28,
            label=f"{way}: breaks even at τ = {even:.2f}",
            zorder=3,
        )
    axes.axhline(1.0, color=palette.text, linewidth=1.2, linestyle="--", label="plain generate()")
    label_axes(axes, palette, "tokens a round, bonus counted", "speedup over plain (×)")
    draw_legend(figure, axes, palette)
    return figure


def gate_figure(records, palette):
    """What DLoop wins over the same drafter without it, against the gate."""
    lines = _gate_lines(records)
    if not lines:
        return None
    figure, axes = start_figure(palette, 4.2)
    for number, (label, points) in enumerate(lines.items()):
        color = palette.color(number)
        xs = [gate for gate, *_ in points]
        axes.plot(xs, [100 * (tau - 1) for _, tau, _ in points], color=color, marker="o", label=f"{label}: τ")
        speeds = [100 * (speed - 1) for *_, speed in points]
        axes.plot(xs, speeds, color=color, marker="s", linestyle=":", label=f"{label}: speed")
    axes.axhline(0.0, color=palette.text, linewidth=1.2, linestyle="--", label="DLoop off")
    label_axes(axes, palette, "loop gate (log-confidence of a stage, nats)", "gain over DLoop off (%)")
    draw_legend(figure, axes, palette)
    return figure


def _gate_lines(records) -> dict[str, list[tuple[float, float, float]]]:
    """`(gate, ratio of τ, ratio of speed)` by drafter and options, against the same with DLoop off."""
    chosen = [r for r in records if r["task"] == ALL_TASKS and r["kind"] == "drafter" and _tau(r) is not None]
    lines: dict[str, list] = {}
    for r in chosen:
        gate = r["loop_gate"]
        if not isinstance(gate, int | float):
            continue
        same = [b for b in chosen if b["loop_gate"] is None and _base(b) == _base(r)]
        base = next((b for b in same if r["way"].startswith(b["way"])), same[0] if same else None)
        if base is None or not base["speedup_total"]:
            continue
        tokens = "" if r["num_draft_tokens"] is None else f", {r['num_draft_tokens']} drafts"
        label = f"{base['way']}{tokens}" if len(same) > 1 else f"{r['drafter']}{tokens}"
        label = f"{label}, ≤ {r['max_stages']} stages"
        point = (gate, _tau(r) / _tau(base), r["speedup_total"] / base["speedup_total"])
        lines.setdefault(label, []).append(point)
    return {label: sorted(points) for label, points in lines.items()}


def _base(record: dict) -> tuple:
    return record["drafter"], record["num_draft_tokens"], record["block_size"]


def repairs_figure(records, palette):
    """Repairs that made a slot right, and repairs that spoiled one."""
    chosen = [r for r in records if r["task"] == ALL_TASKS and r["kind"] == "drafter" and r["statistics"] is not None]
    chosen = [r for r in chosen if any(_repair_counts(r))]
    if not chosen:
        return None
    figure, axes = start_figure(palette, 1.6 + 0.5 * len(chosen))
    labels = ("right: the target's token", "harmful: the draft was right", "both wrong")
    places = range(len(chosen))
    left = [0.0] * len(chosen)
    for label, color, counts in zip(labels, (2, 1, 5), zip(*map(_repair_counts, chosen), strict=True), strict=True):
        axes.barh(places, counts, left=left, height=0.62, label=label, color=palette.color(color))
        left = [a + b for a, b in zip(left, counts, strict=True)]
    axes.set_yticks(places, [r["way"] for r in chosen])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    label_axes(axes, palette, "repaired slots that were verified (count)", "")
    draw_legend(figure, axes, palette)
    return figure


def _repair_counts(record: dict) -> tuple[int, int, int]:
    classes = record["statistics"]["slot_classes"]
    return classes["repaired_right"], classes["repaired_harmful"], classes["both_wrong"]


FIGURES: dict[str, tuple[Callable, str]] = {
    "speedup": (speedup_figure, "Speedup by task: median over turns, whiskers span the quartiles. Higher is better."),
    "tau": (tau_figure, "Acceptance length τ by task. Rounds without a draft are left out."),
    "break_even": (
        break_even_figure,
        "Speedup against τ, a point for each task. A line shows what the measured cost of a round makes of a τ; where "
        "it crosses the dashed line, drafting neither wins nor loses.",
    ),
    "acceptance_by_slot": (acceptance_figure, "Acceptance at each slot among rounds that accepted all earlier slots."),
    "round_ms": (phases_figure, "Where a round's milliseconds go, mean over all rounds."),
    "dloop_gain": (gate_figure, "What DLoop wins over the same drafter with one stage, by its gate."),
    "repairs": (repairs_figure, "Repairs of the selector, by what the target chose."),
}


def draw_figures(records: list[dict], folder: str | Path | None = None) -> list[FigureText]:
    """
    Draw every figure that the records have data for.

    Args:
        records (`list[dict]`): Of `summarize`.
        folder (`str` or `Path`, *optional*): Gets `<name>.svg`, `<name>.png`, and the same with `_dark`.

    Returns:
        The figures for the page.
    """
    drawn = []
    for name, (draw, caption) in FIGURES.items():
        figure = draw(records, PAGE)
        if figure is None:
            continue
        drawn.append(FigureText(name, caption, _page_svg(figure, caption)))
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for suffix, palette in (("", LIGHT), ("_dark", DARK)):
                figure = draw(records, palette)
                for extension in ("svg", "png"):
                    path = Path(folder) / f"{name}{suffix}.{extension}"
                    # No date, so that the same data gives the same file.
                    metadata = {"Date": None} if extension == "svg" else None
                    figure.savefig(path, dpi=160, facecolor=figure.get_facecolor(), metadata=metadata)
    return drawn


def _page_svg(figure, caption: str) -> str:
    """The figure as an SVG element that fills its column and takes its colours from the style sheet."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Identifiers must be unique in the page, which holds several figures.
    prefix = re.sub(r"[^a-z]", "", caption.lower())[:12]
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    label = caption.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)

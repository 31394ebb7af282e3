"""Figures of a benchmark, each drawn once for light paper, once for dark, and once for the page.

The page's figures take their colours from the style sheet, so they follow the reader's scheme: they are drawn in
marker colours that are replaced by CSS variables afterwards.
"""

import io
import math
import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_drelay.modeling.configuration_drelay import AUTO

from .measure import PHASES
from .summary import ALL_TASKS


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
HATCHES = ("", "////", "....", "xxxx")
LINES = ("-", "--", ":", "-.")
WIDTH = 9.0  # inches
MIN_ROUNDS = 10  # that must have reached a slot to show its acceptance
BARS_IN_A_LINE = 64  # of grouped bars; more are spread over several lines of axes


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
    matplotlib.rcParams["text.parse_math"] = False  # a name may hold dollars
    return Figure


def start_figure(palette: Palette, height: float):
    figure, (axes,) = _start_lines(palette, height, 1)
    return figure, axes


def _start_lines(palette: Palette, height: float, num_lines: int):
    """A figure with axes below each other, each `height` inches high."""
    figure = _plotting()(figsize=(WIDTH, height * num_lines), layout="constrained")
    figure.patch.set_facecolor(palette.ground or "none")
    lines = figure.subplots(num_lines, sharey=True, squeeze=False)[:, 0]
    for axes in lines:
        axes.set_facecolor("none")
        axes.tick_params(colors=palette.text, labelcolor=palette.text)
        axes.grid(color=palette.grid, linewidth=0.8)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(palette.text)
    return figure, lines


def label_axes(axes, palette: Palette, x: str, y: str) -> None:
    axes.set_xlabel(x, color=palette.text)
    axes.set_ylabel(y, color=palette.text)


def draw_legend(figure, axes, palette: Palette) -> None:
    """Above the axes, in room of its own: the figure grows by the height of the legend."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    labels = [_wrapped(label, 110) for label in labels]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = max(1, min(len(labels), int(125 / (longest + 8))))
    num_lines = math.ceil(len(labels) / columns) * max(label.count("\n") + 1 for label in labels)
    figure.set_figheight(figure.get_figheight() + 0.22 * num_lines)
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, frameon=False, labelcolor=palette.text, fontsize=9
    )


def _wrapped(name: str, width: int) -> str:
    """A name in at most two lines of `width` characters, which is what a row of a figure has room for."""
    lines = textwrap.wrap(name, width)
    if len(lines) > 2:
        lines = [lines[0], lines[1][: width - 2] + " …"]
    return "\n".join(lines) or " "


def _legend_name(name: str) -> str:
    """The library leaves names that begin with an underscore out of a legend."""
    return f" {name}" if name.startswith("_") else name


def _name_bars(axes, names: list[str]) -> None:
    """Names of horizontal bars, the first one on top."""
    axes.set_yticks(range(len(names)), [_wrapped(name, 44) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def _ways(records: list[dict], condition: Callable[[dict], bool] = lambda record: True) -> list[str]:
    return list(dict.fromkeys(record["way"] for record in records if condition(record)))


def _numbers(records: list[dict]) -> dict[str, int]:
    """
    Number of each way, the same in all figures. It stands for a colour; where there are more ways than colours, those
    of one colour differ by their marker and line, or by their hatch.
    """
    return {way: number for number, way in enumerate(_ways(records, lambda r: r["kind"] != "plain"))}


def _marker(number: int) -> str:
    return MARKERS[(number + number // len(LIGHT_SERIES)) % len(MARKERS)]


def _variant(number: int, variants: tuple[str, ...]) -> str:
    return variants[number // len(LIGHT_SERIES) % len(variants)]


def _tasks(records: list[dict]) -> list[str]:
    tasks = list(dict.fromkeys(record["task"] for record in records))
    return tasks if len(tasks) > 2 else [task for task in tasks if task != ALL_TASKS] or tasks


def _find(records: list[dict], task: str, way: str) -> dict | None:
    return next((r for r in records if r["task"] == task and r["way"] == way), None)


def _grouped_bars(records, palette, ways, value, line: tuple[float, str], y: str, error=None):
    """
    Bars of each way side by side for each task, and a horizontal line with its name; a bar's whisker spans the
    quartiles.
    """
    tasks, numbers = _tasks(records), _numbers(records)
    num_lines = math.ceil(len(tasks) / max(1, BARS_IN_A_LINE // len(ways)))
    groups = math.ceil(len(tasks) / num_lines)
    figure, lines = _start_lines(palette, 4.2 if num_lines == 1 else 2.8, num_lines)
    width = 0.8 / len(ways)
    for number, axes in enumerate(lines):
        own = tasks[number * groups : (number + 1) * groups]
        for place, way in enumerate(ways):
            positions, values, whiskers = [], [], [[], []]
            for group, task in enumerate(own):
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
                label=_legend_name(way),
                color=palette.color(numbers[way]),
                hatch=_variant(numbers[way], HATCHES),
                edgecolor=palette.text,
                linewidth=0.0,
                yerr=None if error is None else whiskers,
                error_kw={"ecolor": palette.text, "elinewidth": 1.0, "capsize": 2 if len(ways) < 12 else 0},
            )
        axes.axhline(line[0], color=palette.text, linewidth=1.2, linestyle="--", label=line[1])
        axes.set_xticks(range(len(own)), own, fontsize=10 if len(own) <= 6 else 8)
        axes.set_xlim(-0.5, groups - 0.5)
        axes.grid(axis="x", visible=False)
        label_axes(axes, palette, "task" if number == num_lines - 1 else "", y)
    draw_legend(figure, lines[0], palette)
    return figure


def speedup_figure(records, palette):
    """Speedup by task and way, with quartiles over turns."""
    ways = _ways(records, lambda r: r["kind"] != "plain" and r["speedup"] is not None)
    if not ways:
        return None
    return _grouped_bars(
        records,
        palette,
        ways,
        lambda r: None if r["speedup"] is None else r["speedup"][1],
        (1.0, "plain generate()"),
        "speedup over plain (×)",
        lambda r: (r["speedup"][0], r["speedup"][2]),
    )


def tau_figure(records, palette):
    """Acceptance length by task and way."""
    ways = _ways(records, lambda r: _tau(r) is not None)
    if not ways:
        return None
    line = (1.0, "nothing accepted")
    return _grouped_bars(records, palette, ways, _tau, line, "τ (tokens a round, bonus counted)")


def _tau(record: dict) -> float | None:
    return None if record["statistics"] is None else record["statistics"]["acceptance_length"]


def acceptance_figure(records, palette):
    """Conditional acceptance at each slot of a round."""
    ways = _ways(
        [record for record in records if record["task"] == ALL_TASKS],
        lambda r: r["statistics"] is not None and _acceptance(r["statistics"]),
    )
    if not ways:
        return None
    figure, axes = start_figure(palette, 4.2)
    numbers = _numbers(records)
    longest = 1
    for way in ways:
        points = _acceptance(_find(records, ALL_TASKS, way)["statistics"])
        longest = max([longest, *(slot for slot, _ in points)])
        axes.plot(
            [slot for slot, _ in points],
            [rate for _, rate in points],
            marker=_marker(numbers[way]),
            linestyle=_variant(numbers[way], LINES),
            markersize=5,
            label=_legend_name(way),
            color=palette.color(numbers[way]),
        )
    axes.set_ylim(0, 104)
    axes.set_xlim(0.5, longest + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    label_axes(axes, palette, "slot in the round", "accepted, given all earlier slots (%)")
    draw_legend(figure, axes, palette)
    return figure


def _acceptance(statistics: dict) -> list[tuple[int, float]]:
    """`(slot, accepted %)` of the slots that enough rounds reached to tell."""
    rounds = list(zip(statistics["num_committed"], statistics["num_drafted"], strict=True))
    points = []
    for slot, rate in enumerate(statistics["acceptance_by_slot"], start=1):
        num_reached = sum(committed >= slot and drafted >= slot for committed, drafted in rounds)
        if num_reached >= MIN_ROUNDS:
            points.append((slot, 100 * rate))
    return points


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
    _name_bars(axes, [r["way"] for r in chosen])
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
    for way in ways:
        color, even = palette.color(numbers[way]), _find(records, ALL_TASKS, way)["break_even_tau"]
        own = [r for r in points if r["way"] == way]
        highest = 1.08 * max([even, *(r["tokens_per_round"] for r in own)])
        line = _variant(numbers[way], LINES)
        axes.plot([1.0, highest], [1.0 / even, highest / even], color=color, linewidth=1.2, alpha=0.7, linestyle=line)
        axes.scatter(
            [r["tokens_per_round"] for r in own],
            [r["speedup"][1] for r in own],
            color=color,
            marker=_marker(numbers[way]),
            s=28,
            label=_legend_name(f"{way}: breaks even at τ = {even:.2f}"),
            zorder=3,
        )
    axes.axhline(1.0, color=palette.text, linewidth=1.2, linestyle="--", label="plain generate()")
    label_axes(axes, palette, "tokens a forward of the target, bonus counted", "speedup over plain (×)")
    draw_legend(figure, axes, palette)
    return figure


def gate_figure(records, palette):
    """What DLoop wins over the same drafter without it, against the gate; the cost-aware one stands beside them."""
    lines = _gate_lines(records)
    if not lines:
        return None
    figure, axes = start_figure(palette, 4.2)
    gates = sorted({gate for points in lines.values() for gate in points}, key=_gate_order)
    for number, (label, points) in enumerate(lines.items()):
        color, mark = palette.color(number), _variant(number, ("full", "none", "left", "right"))
        for gain, (what, marker, line) in enumerate((("tokens", "o", "-"), ("speed", "s", ":"))):
            for known in (True, False):  # no line leads to the gate that is no number
                own = {gate: ratios for gate, ratios in points.items() if (gate != AUTO) == known}
                axes.plot(
                    [gates.index(gate) for gate in own],
                    [100 * (ratios[gain] - 1) for ratios in own.values()],
                    color=color,
                    marker=marker,
                    fillstyle=mark,
                    linestyle=line,
                    label=_legend_name(f"{label}: {what}") if known == (set(points) != {AUTO}) else "_",
                )
    axes.axhline(0.0, color=palette.text, linewidth=1.2, linestyle="--", label="DLoop off")
    axes.set_xticks(range(len(gates)), [gate if isinstance(gate, str) else f"{gate:g}" for gate in gates])
    axes.set_xlim(-0.5, len(gates) - 0.5)
    label_axes(axes, palette, "loop gate (log-confidence of a stage, nats)", "gain over DLoop off (%)")
    draw_legend(figure, axes, palette)
    return figure


def _gate_order(gate: float | str) -> float:
    """Wide open, then numbers, then cost-aware."""
    return {"-inf": -math.inf, AUTO: math.inf}.get(gate, gate)


def _gate_lines(records) -> dict[str, dict[float | str, tuple[float, float]]]:
    """
    By drafter and options, for each gate, the ratios of tokens by forwards and of speed to the same with DLoop off.
    Tokens by forwards is τ with the rounds counted that did not draft: a cost-aware gate has many of them.
    """
    chosen = [r for r in records if r["task"] == ALL_TASKS and r["kind"] == "drafter" and r["tokens_per_round"]]
    lines: dict[str, dict] = {}
    for r in chosen:
        same = [b for b in chosen if b["loop_gate"] is None and _base(b) == _base(r)]
        if r["loop_gate"] is None or not same:
            continue
        # Of several, the one whose name this way's continues.
        base = max(same, key=lambda b: len(os.path.commonprefix([b["way"], r["way"]])))
        if not base["speedup_total"] or not r["speedup_total"]:
            continue
        label = f"{base['way'].removesuffix(', DLoop off')}, ≤ {r['max_stages']} stages"
        ratios = r["tokens_per_round"] / base["tokens_per_round"], r["speedup_total"] / base["speedup_total"]
        lines.setdefault(label, {})[r["loop_gate"]] = ratios
    return {label: dict(sorted(points.items(), key=lambda p: _gate_order(p[0]))) for label, points in lines.items()}


def _base(record: dict) -> tuple:
    """What two ways must share to differ in DLoop alone."""
    names = ("run", "drafter", "drafter_weights_sha256", "num_draft_tokens", "block_size", "use_selector")
    return tuple(record[name] for name in names)


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
    _name_bars(axes, [r["way"] for r in chosen])
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
    "acceptance_by_slot": (
        acceptance_figure,
        "Acceptance at each slot among rounds that accepted all earlier slots, where at least ten did.",
    ),
    "round_ms": (phases_figure, "Where a round's milliseconds go, mean over all rounds."),
    "dloop_gain": (
        gate_figure,
        "What DLoop wins over the same drafter with one stage, by its gate: in tokens a forward of the target, and in "
        "tokens/s.",
    ),
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

"""Tables and figures of the project's own studies: arms that were trained alike, and our loop by batch size.

The records are those of `scripts/train_arms.py` and `scripts/benchmark_loop.py`.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from .figures import LIGHT, MARKERS, draw_legend, label_axes, start_figure


WAYS = ("one stage", "DLoop")
_ABOUT_COVERAGE = (
    "Pool at the first error: how often the pool of that slot holds the target's token, for blocks of the backbone "
    "alone / of the head, on every fifth response. "
)


def arms_table(record: dict) -> str:
    """Arms of a study as Markdown, a row each; several seeds of an arm are pooled."""
    arms = _by_arm(record)
    columns = ["arm", "head, M parameters", "τ (95 %)", "against", "τ with DLoop", "repairs right / harmful"]
    has_coverage = _has_coverage(record)
    columns += ["pool at the first error"] * has_coverage + ["steps", "seeds (τ)"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for arm, rows in arms.items():
        classes = [row["one stage"]["slot_classes"] for row in rows]
        repairs = [sum(c[name] for c in classes) for name in ("repaired_right", "repaired_harmful")]
        cells = [arm, f"{_mean(rows, 'head_parameters') / 1e6:.2f}"]
        cells += [_tau(rows, "one stage"), _against(arms, arm), _tau(rows, "DLoop")]
        cells.append(f"{repairs[0]} / {repairs[1]}" if any(repairs) else "")
        cells += [_coverage(rows)] * has_coverage
        seeds = ", ".join(f"{row['one stage']['acceptance_length']:.3f}" for row in rows) if len(rows) > 1 else ""
        cells += [f"{_mean(rows, 'num_steps'):.0f}", f"{len(rows)} ({seeds})" if seeds else "1"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def arms_circumstances(record: dict) -> str:
    """What was measured, where and how, in one paragraph."""
    environment, dloop = record["rows"][0]["environment"], record["DLoop"]
    starts = [r["start"] for r in record["rows"]]
    usual = statistics.mode(starts)
    odd = [f"{r['arm']} starts from {r['start']}" for r in record["rows"] if r["start"] != usual]
    threads = "thread" if environment["cpu_threads"] == 1 else "threads"
    return (
        f"Greedy replay on {record['num_responses']} responses that nothing was trained on. An arm starts from "
        f"{usual} and trains for {record['minutes']:g} minutes on {environment['cpu_threads']} {threads} of "
        f"{environment['device']}: as many steps as fit into that time, by what a step of each arm took side by side. "
        + "".join(f"{text}. " for text in sorted(set(odd)))
        + f"One stage drafts the whole block; DLoop: gate {dloop['loop_gate']}, at most {dloop['max_stages']} stages "
        f"of {dloop['num_draft_tokens']} tokens. "
        + (_ABOUT_COVERAGE if _has_coverage(record) else "")
        + "Seeds of an arm are pooled; "
        f"an interval holds 95 % of 2 000 draws of the responses, and a difference draws the same ones for both arms. "
        f"Command of the first: `python {record['rows'][0]['command']}`."
    )


def draw_arms(record: dict, path: Path) -> None:
    """τ of every arm with its interval, DLoop off and on, as an SVG."""
    arms = _by_arm(record)
    figure, axes = start_figure(LIGHT, 0.9 + 0.36 * len(arms))
    for number, way in enumerate(WAYS):
        for place, rows in enumerate(arms.values()):
            low, high = tau_interval(rows, way)
            y, color = place + 0.16 * (2 * number - 1), LIGHT.color(number)
            axes.plot([low, high], [y, y], color=color, linewidth=1.6, alpha=0.6)
            taus = [row[way]["acceptance_length"] for row in rows]
            label = way if place == 0 else None
            axes.plot(taus, [y] * len(taus), MARKERS[number], color=color, markersize=5, label=label)
    axes.set_yticks(range(len(arms)), list(arms))
    axes.invert_yaxis()
    label_axes(axes, LIGHT, "τ, tokens committed in a round (bonus counted)", "")
    draw_legend(figure, axes, LIGHT)
    _save(figure, path)


def loop_table(record: dict) -> str:
    """tokens/s of every way by batch size, speedup over plain decoding in brackets; kinds of prompts are pooled."""
    speeds, sizes = _speeds(record)
    lines = ["| | " + " | ".join(f"batch {size}" for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for name, by_size in speeds.items():
        cells = [f"{by_size[s]:.1f} ({by_size[s] / speeds['plain'][s]:.2f})" if s in by_size else "" for s in sizes]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def loop_circumstances(record: dict) -> str:
    """What was measured, where and how, and the time of a round beside the models."""
    arguments, environment = record["arguments"], record["environment"]
    host = {}
    for name in ("plain", "host chain", "chain"):
        found = [row["host_ms"] for row in record["rows"] if row["name"] == name and "host_ms" in row]
        if found:
            host[name] = statistics.mean(found)
    beside = ", ".join(f"{ms:.1f} ({name})" for name, ms in host.items())
    return (
        f"tokens/s, in brackets over plain `generate()`; {arguments['num_prompts']} prompts of each of "
        f"{', '.join(record['prompt_files'])}{_limit(arguments)}, {arguments['max_new_tokens']} new tokens, "
        f"temperature {arguments['temperature']}, float32, {environment['cpu_threads']} threads of "
        f"{environment['device']}, all ways interleaved in one process. A round's ms outside the forwards of target "
        f"and drafter, batch 1: {beside}. Command: `python {record['command']}`."
    )


def _limit(arguments: dict) -> str:
    limit = arguments.get("num_batches", "None")
    return "" if limit == "None" else f", at most {limit} batches of each size"


def draw_loop(record: dict, path: Path) -> None:
    """Speedup over plain decoding by batch size, as an SVG."""
    speeds, sizes = _speeds(record)
    figure, axes = start_figure(LIGHT, 3.6)
    ways = [name for name in speeds if name != "plain"]
    for number, name in enumerate(ways):
        own = [size for size in sizes if size in speeds[name]]
        ratios = [speeds[name][size] / speeds["plain"][size] for size in own]
        axes.plot(own, ratios, f"{MARKERS[number]}-", color=LIGHT.color(number), markersize=5, label=name)
    axes.axhline(1.0, color=LIGHT.text, linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    label_axes(axes, LIGHT, "rows of the batch", "speedup over plain decoding")
    draw_legend(figure, axes, LIGHT)
    _save(figure, path)


def _by_arm(record: dict) -> dict[str, list[dict]]:
    arms = defaultdict(list)
    for row in sorted(record["rows"], key=lambda row: row["seed"]):
        arms[row["arm"]].append(row)
    return dict(sorted(arms.items(), key=lambda item: -_mean_tau(item[1], "one stage")))


def _mean(rows: list[dict], name: str) -> float:
    return statistics.mean(row[name] for row in rows)


def _mean_tau(rows: list[dict], way: str) -> float:
    return statistics.mean(row[way]["acceptance_length"] for row in rows)


def _pooled(rows: list[dict], way: str) -> list[tuple[int, int]]:
    """Tokens and rounds of each response, all seeds together."""
    seeds = [row[way]["responses"] for row in rows]
    return [tuple(map(sum, zip(*response, strict=True))) for response in zip(*seeds, strict=True)]


def _ratio(pairs: list[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in pairs) / max(1, sum(rounds for _, rounds in pairs))


def _interval(of_draw: Callable[[list[int]], float], num_responses: int, num_draws: int = 2000) -> tuple[float, float]:
    """What holds 95 % of `of_draw(places)` when the responses are drawn anew."""
    generator = random.Random(0)
    draws = sorted(of_draw(generator.choices(range(num_responses), k=num_responses)) for _ in range(num_draws))
    return draws[int(0.025 * num_draws)], draws[int(0.975 * num_draws) - 1]


def tau_interval(rows: list[dict], way: str) -> tuple[float, float]:
    """95 % interval of τ of the pooled seeds of an arm."""
    pairs = _pooled(rows, way)
    return _interval(lambda places: _ratio([pairs[i] for i in places]), len(pairs))


def tau_difference(rows: list[dict], others: list[dict], way: str) -> tuple[float, float, float]:
    """τ of an arm less that of another one on the same responses, and its 95 % interval."""
    mine, theirs = _pooled(rows, way), _pooled(others, way)
    if len(mine) != len(theirs):
        raise ValueError(f"Arms with {len(mine)} and {len(theirs)} responses cannot be compared; measure them alike.")

    def difference(places: Iterable[int]) -> float:
        places = list(places)
        return _ratio([mine[i] for i in places]) - _ratio([theirs[i] for i in places])

    return difference(range(len(mine))), *_interval(difference, len(mine))


def _tau(rows: list[dict], way: str) -> str:
    low, high = tau_interval(rows, way)
    return f"{_ratio(_pooled(rows, way)):.3f} ({low:.2f} .. {high:.2f})"


def _against(arms: dict[str, list[dict]], arm: str) -> str:
    reference = arms[arm][0]["against"]
    if reference == arm or reference not in arms:
        return ""
    return "{}: {:+.3f} ({:+.3f} .. {:+.3f})".format(
        reference, *tau_difference(arms[arm], arms[reference], "one stage")
    )


def _has_coverage(record: dict) -> bool:
    return any(row.get("pool_coverage") for row in record["rows"])


def _coverage(rows: list[dict]) -> str:
    """Mean coverage of the pool at the first error, without and with the head; empty where it was not measured."""
    found = [row["pool_coverage"] for row in rows if row.get("pool_coverage")]
    parts = [[own[name] for own in found if own[name] is not None] for name in ("backbone", "head")]
    return " / ".join(f"{statistics.mean(part):.1%}" for part in parts if part)


def _speeds(record: dict) -> tuple[dict[str, dict[int, float]], list[int]]:
    """Mean tokens/s over the kinds of prompts, by way and batch size; and the sizes."""
    found = defaultdict(lambda: defaultdict(list))
    for row in record["rows"]:
        found[row["name"]][row["batch_size"]].append(row["tokens_per_s"])
    sizes = sorted({row["batch_size"] for row in record["rows"]})
    return {name: {s: statistics.mean(v) for s, v in by_size.items()} for name, by_size in found.items()}, sizes


def _save(figure, path: Path) -> None:
    figure.savefig(path, facecolor=figure.get_facecolor(), metadata={"Date": None})


__all__ = [
    "arms_circumstances",
    "arms_table",
    "draw_arms",
    "draw_loop",
    "loop_circumstances",
    "loop_table",
    "tau_difference",
    "tau_interval",
]

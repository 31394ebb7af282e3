"""The report: one HTML file that needs nothing else, with figures, tables, a coloured sample and the circumstances."""

import json
import os
from importlib.resources import files
from pathlib import Path

from .figures import DARK, LIGHT, draw_figures
from .headroom import headroom_table
from .summary import ALL_TASKS, COLUMNS, circumstances, markdown, summarize, table_rows


ORIGINS = {"k": "drafted and kept", "r": "repaired by the selector", "t": "the target's own"}
MAX_SAMPLES = 6


def write_report(
    rows: list[dict],
    output: str | Path,
    figures_dir: str | Path | None = None,
    markdown_output: str | Path | None = None,
    headroom: dict | None = None,
    title: str = "Speculative decoding benchmark",
) -> list[Path]:
    """
    Write the report of benchmark rows.

    Args:
        rows (`list[dict]`): Of one or several benchmark files.
        output (`str` or `Path`): The HTML file.
        figures_dir (`str` or `Path`, *optional*): Gets the figures as PNG and SVG, light and dark.
        markdown_output (`str` or `Path`, *optional*): Gets the tables for a README or a card.
        headroom (`dict`, *optional*): What `hf-drelay headroom` wrote.

    Returns:
        The files and folders that were written.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(
            "Writing a report needs `jinja2`. Install it with `pip install 'hf-drelay[bench]'`."
        ) from error
    if not rows:
        raise ValueError("`rows` is empty; a report needs at least one measured row.")
    records = summarize(rows)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = (files("hf_drelay.evaluation") / "templates" / "report.html.j2").read_text(encoding="utf-8")
    tasks = list(dict.fromkeys(record["task"] for record in records))
    tasks = [ALL_TASKS, *[task for task in tasks if task != ALL_TASKS]] if len(tasks) > 2 else tasks[:1]
    page = environment.from_string(source).render(
        title=title,
        headlines=_headlines(records),
        figures=draw_figures(records, figures_dir),
        headings=[heading for heading, _ in COLUMNS],
        tables=[(task, table_rows(records, task)) for task in tasks],
        samples=_samples(rows),
        origins=ORIGINS,
        headroom=None if headroom is None else _cells(headroom_table(headroom)),
        circumstances=circumstances(rows),
        commands=list(dict.fromkeys(row["command"] for row in rows if row.get("command"))),
        light=LIGHT,
        dark=DARK,
    )
    written = [_write_text(output, page)]
    if markdown_output is not None:
        written.append(_write_text(markdown_output, markdown(rows)))
    return written if figures_dir is None else [*written, Path(figures_dir)]


def _write_text(path: str | Path, text: str) -> Path:
    """Atomically."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
    return path


def _headlines(records: list[dict]) -> list[dict]:
    """The fastest way with its figures, and how many outputs were the same."""
    total = [r for r in records if r["task"] == ALL_TASKS and r["kind"] == "drafter" and r["speedup_total"]]
    lines = []
    if total:
        best = max(total, key=lambda r: r["speedup_total"])
        lines.append({"value": f"{best['speedup_total']:.2f}×", "text": f"tokens/s of {best['way']} over plain"})
        drafted = best["statistics"] or {}
        if drafted.get("acceptance_length"):
            lines.append(
                {"value": f"{drafted['acceptance_length']:.2f}", "text": "its τ, tokens a round with a draft"}
            )
        if best["break_even_tau"] and best["tokens_per_round"]:
            even = f"tokens a forward of the target; it breaks even at {best['break_even_tau']:.2f} here"
            lines.append({"value": f"{best['tokens_per_round']:.2f}", "text": even})
        over_compiled = best.get("speedup_over_compiled")
        value = "not measured" if over_compiled is None else f"{over_compiled[1]:.2f}×"
        lines.append({"value": value, "text": "its median speedup over compiled plain decoding"})
    compared = sum(r["num_compared"] for r in total)
    if compared:
        same = sum(r["num_identical"] for r in total)
        lines.append({"value": f"{same} / {compared}", "text": "drafted outputs identical to plain decoding"})
    return lines


def _samples(rows: list[dict]) -> list[dict]:
    """The first turn of each task as the drafter with most repairs or acceptances wrote it."""
    samples = []
    for task in list(dict.fromkeys(row["task"] for row in rows))[:MAX_SAMPLES]:
        first = next(row for row in rows if row["task"] == task)
        chosen = [
            row
            for row in rows
            if (row["task"], row["prompt"], row["turn"]) == (task, first["prompt"], first["turn"])
            and row.get("pieces")
        ]
        if chosen:
            best = max(chosen, key=_interest)
            samples.append({"task": task, "way": best["way"], "pieces": best["pieces"]})
    return samples


def _interest(row: dict) -> tuple:
    counts = row["statistics"] or {"slot_classes": {}, "acceptance_length": None}
    return counts["slot_classes"].get("repaired_right", 0), counts["acceptance_length"] or 0.0


def _cells(table: str) -> list[list[str]]:
    """Cells of a Markdown table behind its heading."""
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]


def read_headroom(path: str | Path) -> dict:
    """The figures in a file of `hf-drelay headroom`."""
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(record, dict) or "pool_coverage" not in record.get("headroom", ()):
        raise ValueError(f"`headroom` {path} is no file of `hf-drelay headroom`; pass the one that command wrote.")
    return record["headroom"]

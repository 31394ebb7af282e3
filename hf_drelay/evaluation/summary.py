"""Figures of many rows: medians and quartiles by task and way, and the tables made from them."""

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from hf_drelay.modeling.draft_statistics import DraftStatistics

from .measure import PHASES
from .records import cut_prompts, recover_rows, target_name
from .tasks import ALL_TASKS


# What a summary and a report need of every row; a row without a drafter or without phases holds `None` there.
FIELDS = frozenset(
    {
        *("task", "prompt", "turn", "way", "kind", "run", "source", "num_tokens", "walltimes_s", "tokens_per_s"),
        *("speedup", "phases_ms", "overhead_share", "break_even_tau", "peak_memory_mb", "statistics"),
        *("target", "target_origin", "target_revision", "target_weights_sha256", "dtype", "attention", "batch_size"),
        *("settings", "environment"),
    }
)


def read_rows(paths: Iterable[str | Path]) -> list[dict]:
    """
    Rows of benchmark files; a file that is named twice counts once.

    Raises:
        OSError: If a file is missing.
        ValueError: If a file holds no rows, or something else.
    """
    rows = []
    for path in dict.fromkeys(Path(path).resolve() for path in paths):
        if not path.is_file():
            raise OSError(f"`rows` {path} is no file; pass what `hf-drelay benchmark` wrote.")
        found = recover_rows(path)
        if not found:
            raise ValueError(f"`rows` {path} holds no rows; run `hf-drelay benchmark` first.")
        for number, row in enumerate(found, start=1):
            missing = sorted(FIELDS - set(row)) if isinstance(row, dict) else ["anything"]
            if missing:
                raise ValueError(
                    f"`rows` {path}, row {number}, holds something else than a benchmark row, for it lacks "
                    f"`{missing[0]}`: {str(row)[:80]!r}. Pass files of `hf-drelay benchmark` or `sweep`."
                )
        rows += found
    return rows


def quartiles(values: list[float]) -> tuple[float, float, float] | None:
    """Lower quartile, median and upper quartile; `None` without a value."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    if len(values) == 1:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def merged_statistics(rows: Iterable[dict]) -> DraftStatistics | None:
    """Statistics of all calls together; `None` if none of them drafted."""
    total, found = DraftStatistics(), False
    for row in rows:
        if row["statistics"] is None:
            continue
        fields = DraftStatistics.__dataclass_fields__
        known = {name: value for name, value in row["statistics"].items() if name in fields}
        total.merge(DraftStatistics(**known))
        found = True
    return total if found else None


def summarize(rows: list[dict]) -> list[dict]:
    """
    One record for each task and way, and for all tasks together (`task` is `"all"`).

    `tokens_per_s` and `speedup` hold `(lower quartile, median, upper quartile)` over the prompts; `speedup_total` is
    the ratio of all tokens by all seconds, which long answers dominate.
    """
    rows = _named_apart(rows)
    names = list(dict.fromkeys(row["way"] for row in rows))  # plain decoding of other circumstances has another name
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    records = []
    for task in [*tasks, ALL_TASKS]:
        for name in names:
            chosen = [row for row in rows if row["way"] == name and task in (ALL_TASKS, row["task"])]
            if chosen:
                turns = {_turn(row) for row in chosen}
                plain = [row for row in rows if row["kind"] == "plain" and _turn(row) in turns]
                records.append(_summarize_way(task, name, chosen, plain))
    return records


def _turn(row: dict) -> tuple:
    """What two ways must share to be set against each other."""
    return row.get("run"), row["task"], row["prompt"], row["turn"], row.get("turns_sha256")


def run_labels(rows: list[dict]) -> dict[str | None, str]:
    """A short name of each run: its target if that tells the runs apart, else the beginning of its hash."""
    targets = {row["run"]: Path(str(row["target"])).name for row in rows}
    if len(set(targets.values())) == len(targets):
        return targets
    return {run: str(run)[:6] for run in targets}


def _named_apart(rows: list[dict]) -> list[dict]:
    """
    Rows whose ways bear the name of their run where runs have ways of the same name. Plain decoding of the same
    target, settings and machine is one way, however many runs measured it.
    """
    labels, kinds = run_labels(rows), {}
    for row in rows:
        same = ("target_weights_sha256", "dtype", "attention", "settings", "environment")
        own = str([row[name] for name in same]) if row["kind"] == "plain" else row["run"]
        kinds.setdefault(row["way"], set()).add(own)
    shared = {way for way, found in kinds.items() if len(found) > 1}
    return [row | {"way": f"{row['way']} [{labels[row['run']]}]"} if row["way"] in shared else row for row in rows]


def _summarize_way(task: str, name: str, rows: list[dict], plain_rows: list[dict]) -> dict:
    drafted = merged_statistics(rows)
    rate, plain_rate = _total_rate(rows), _total_rate(plain_rows)
    compared = [row for row in rows if row.get("identical") is not None]
    first = rows[0]
    over_compiled = quartiles([row.get("speedup_over_compiled") for row in rows])
    return {
        "task": task,
        "way": name,
        "kind": first["kind"],
        "run": first["run"],
        "loop_gate": first.get("loop_gate"),
        "max_stages": first.get("max_stages"),
        "num_draft_tokens": first.get("num_draft_tokens"),
        "drafter": first.get("drafter"),
        "drafter_weights_sha256": first.get("drafter_weights_sha256"),
        "use_selector": first.get("use_selector"),
        "block_size": first.get("block_size"),
        "num_prompts": len({_turn(row)[1:] for row in rows if row["turn"] == 0}),
        "num_turns": len(rows),
        "num_tokens": sum(row["num_tokens"] for row in rows),
        "tokens_per_s": quartiles([row["tokens_per_s"] for row in rows]),
        "speedup": quartiles([row["speedup"] for row in rows]),
        "speedup_total": rate / plain_rate if plain_rate else None,
        "break_even_tau": _median(row["break_even_tau"] for row in rows),
        "overhead_share": _median(row["overhead_share"] for row in rows),
        "tokens_per_round": _tokens_per_round(rows),
        "round_ms": _round_ms(rows),
        "peak_memory_mb": max(row["peak_memory_mb"] for row in rows),
        "num_compared": len(compared),
        "num_identical": sum(row["identical"] for row in compared),
        "largest_gap": max((row["divergence"]["logit_gap"] for row in compared if row["divergence"]), default=None),
        "statistics": None if drafted is None else drafted.to_dict(),
    } | ({} if over_compiled is None else {"speedup_over_compiled": over_compiled})


def _total_rate(rows: list[dict]) -> float:
    seconds = sum(row["num_tokens"] / row["tokens_per_s"] for row in rows if row["tokens_per_s"])
    return sum(row["num_tokens"] for row in rows) / seconds if seconds else 0.0


def _median(values: Iterable[float | None]) -> float | None:
    found = quartiles(list(values))
    return None if found is None else found[1]


def _tokens_per_round(rows: list[dict]) -> float | None:
    """Tokens that a forward of the target yields, those without a draft counted, the prefill and its tokens not."""
    rows = [row for row in rows if row.get("num_forwards")]
    num_rounds = sum(row["num_forwards"] for row in rows)
    num_tokens = sum(row.get("round_tokens", row["num_tokens"] - 1) for row in rows)
    return num_tokens / num_rounds if num_rounds else None


def _round_ms(rows: list[dict]) -> dict[str, float] | None:
    """Mean ms of each phase in a round; the prefill is no round. Its overhead counts among that of the rounds."""
    rows = [row for row in rows if row["phases_ms"] is not None]
    # On a GPU the phases are those of a call of their own.
    num_rounds = sum(row.get("phases_num_forwards", row.get("num_forwards")) or 0 for row in rows)
    if not num_rounds:
        return None
    return {phase: sum(row["phases_ms"][phase] for row in rows) / num_rounds for phase in PHASES if phase != "prefill"}


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def spread(values: tuple | None, digits: int = 2) -> str:
    """Median with its quartiles."""
    return "–" if values is None else f"{values[1]:.{digits}f} ({values[0]:.{digits}f} .. {values[2]:.{digits}f})"


# Heading and content of the columns of a result table.
COLUMNS: tuple[tuple[str, Callable[[dict], str]], ...] = (
    ("way", lambda r: r["way"]),
    ("τ", lambda r: number(_drafted(r, "acceptance_length"))),
    # Rounds without a draft, which a cost-aware gate has many of, are left out of τ but cost time as all others.
    ("tokens / forward", lambda r: number(r["tokens_per_round"])),
    ("break-even τ", lambda r: number(r["break_even_tau"] if r["kind"] in ("drafter", "prompt_lookup") else None)),
    ("stages / round", lambda r: number(_drafted(r, "mean_stages"))),
    ("repairs right / harmful", lambda r: _repairs(r)),
    ("draft / select / verify / overhead, ms a round", lambda r: _phases(r)),
    ("overhead, % of the time", lambda r: _percent(r["overhead_share"] if r["kind"] == "drafter" else None)),
    ("tokens/s", lambda r: spread(r["tokens_per_s"], 1)),
    ("speedup", lambda r: spread(r["speedup"])),
    (
        "speedup over compiled plain",
        lambda r: spread(r["speedup_over_compiled"]) if "speedup_over_compiled" in r else "not measured",
    ),
    ("peak memory, MiB", lambda r: number(r["peak_memory_mb"], 0)),
    ("identical", lambda r: _identical(r)),
)


def _drafted(record: dict, name: str) -> float | None:
    return None if record["statistics"] is None else record["statistics"][name]


def _repairs(record: dict) -> str:
    if record["statistics"] is None or record["kind"] != "drafter":
        return "–"
    classes = record["statistics"]["slot_classes"]
    return f"{classes['repaired_right']} / {classes['repaired_harmful']}"


def _phases(record: dict) -> str:
    if record["round_ms"] is None:
        return "–"
    return " / ".join(number(record["round_ms"][phase], 1) for phase in PHASES if phase != "prefill")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}"


def _identical(record: dict) -> str:
    if not record["num_compared"]:
        return "–"
    gap = "" if record["largest_gap"] is None else f", largest logit gap {record['largest_gap']:.2g}"
    return f"{record['num_identical']} / {record['num_compared']}{gap}"


def table_rows(records: list[dict], task: str) -> list[list[str]]:
    """Cells of the table of one task."""
    return [[cell(record) for _, cell in COLUMNS] for record in records if record["task"] == task]


def markdown_table(records: list[dict], task: str) -> str:
    """The table of one task for README files and cards."""
    lines = ["| " + " | ".join(heading for heading, _ in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in table_rows(records, task)
    ]
    return "\n".join(lines)


def circumstances(rows: list[dict]) -> list[str]:
    """What was measured, where and how: a sentence for each run in the rows."""
    sentences = []
    labels = run_labels(rows)
    for run, label in labels.items():
        chosen = [row for row in rows if row["run"] == run]
        row, settings, machine = chosen[0], chosen[0]["settings"], chosen[0]["environment"]
        counts = {}
        for other in chosen:
            if other["turn"] == 0:
                counts.setdefault(other["source"] or other["task"], set()).add(_turn(other))
        num_cut = len({(other["task"], other["prompt"]) for other in chosen if other.get("prompt_tokens_cut")})
        sampling = _sampling(settings, row.get("generation_config", {}))
        data = ", ".join(f"{len(prompts)} of {source}" for source, prompts in counts.items()) + cut_prompts(num_cut)
        sha = (row["target_weights_sha256"] or "unknown")[:12]
        run_name = f"[{label}] " if len(labels) > 1 else ""
        is_compiled = any(other["kind"] == "compiled" for other in chosen)
        sentences.append(
            f"{run_name}Prompts: {data}; at most {settings['max_new_tokens']} new tokens, {sampling}, seed "
            f"{settings['seed']}, batch {row['batch_size']}, template mode {settings['template_mode'] or 'default'}. "
            f"Target {target_name(row)} ({row['target_origin']}, revision "
            f"{row['target_revision'] or 'unknown'}, weights {sha}), {row['dtype']}, attention {row['attention']}; "
            f"{machine['device']}, {machine['cpu_threads']} threads, torch {machine['torch']}, transformers "
            f"{machine['transformers']}, hf_drelay {machine['hf_drelay']}. All ways ran interleaved in one process "
            "behind a warm-up; times include the prefill; τ counts the bonus token and leaves out rounds without a "
            "draft, tokens / forward counts them, and is to be compared with the break-even τ. Speedup is the ratio "
            "of tokens/s to plain eager generate() on the same prompt, median and quartiles over turns; plain "
            f"decoding with a static cache and compilation was {'measured too' if is_compiled else 'not measured'}. A "
            "cost-aware gate keeps what it learned from prompt to prompt."
        )
    return sentences


def _sampling(settings: dict, of_target: dict) -> str:
    """What shapes the distribution that tokens come from, without what is off."""
    off = {"top_p": (None, 1.0), "top_k": (None, 0)}
    filters = [(name, settings[name]) for name, values in off.items() if settings.get(name) not in values]
    shown = [("temperature", settings["temperature"]), *filters, *of_target.items()]
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown)


def markdown(rows: list[dict]) -> str:
    """All tables with their circumstances."""
    records = summarize(rows)
    parts = []
    tasks = list(dict.fromkeys(record["task"] for record in records))
    for task in tasks if len(tasks) > 2 else tasks[:1]:
        parts += [f"**{task}**", markdown_table(records, task)]
    return "\n\n".join([*parts, *circumstances(rows)]) + "\n"

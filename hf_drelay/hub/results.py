"""Measured JSON to what a card shows: tables, sentences, and structured entries. Every number comes out of a file."""

import json
from pathlib import Path

from hf_drelay.evaluation.lossless import summarize_lossless
from hf_drelay.evaluation.records import read_jsonl
from hf_drelay.evaluation.summary import markdown, read_rows, summarize


def read_records(paths) -> dict[str, list]:
    """
    Results by kind, which is told by what a file holds.

    Args:
        paths (`Iterable[Path]`): What `hf-drelay benchmark`, `hf-drelay check-lossless`, `scripts/benchmark_demo.py`
            and `scripts/check_lossless_demo.py` wrote.

    Returns:
        `{"speed": [...], "lossless": [...], "benchmark": [...]}`.

    Raises:
        ValueError: For a file of another kind.
    """
    records: dict[str, list] = {"speed": [], "lossless": [], "benchmark": []}
    for path in map(Path, paths):
        kind, record = _read_record(path)
        records[kind].append(record)
    return records


def _read_record(path: Path) -> tuple[str, dict | list]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:  # a row a line
        record = None
    if isinstance(record, dict) and "rows" in record:
        return "speed", record
    if isinstance(record, dict) and "summary" in record:
        return "lossless", record
    rows = list(read_jsonl(path)) if record is None else [record]
    shared = set.intersection(*(set(row) if isinstance(row, dict) else set() for row in rows)) if rows else set()
    if {"way", "task", "statistics"} <= shared:
        return "benchmark", read_rows([path])
    if {"way", "dtype", "divergence"} <= shared:
        return "lossless", {"summary": _lossless_counts(rows)}
    raise ValueError(
        f"`results` names {path}, which is no result of `hf-drelay benchmark` or `check-lossless`; measure again."
    )


def _lossless_counts(rows: list[dict]) -> dict[str, dict[str, int]]:
    counts = ("num_prompts", "num_tokens", "num_different", "num_unexplained")
    return {
        f"{record['way']}, {record['dtype']}": {name: record[name] for name in counts}
        for record in summarize_lossless(rows)
    }


def results_section(records: dict[str, list[dict]]) -> str:
    """Tables, circumstances and commands as Markdown."""
    parts = []
    for record in records["speed"]:
        parts += [speed_table(record), circumstances(record), f"Command: `python {record['command']}`."]
    for rows in records["benchmark"]:
        parts.append(markdown(rows).strip())
        parts += [f"Command: `{command}`." for command in dict.fromkeys(row["command"] for row in rows)]
    for name, counts in lossless_summary(records["lossless"]).items():
        parts.append(
            f"Losslessness, {name}: {counts['num_prompts']} prompts, {counts['num_tokens']} tokens, "
            f"{counts['num_different']} outputs differ from plain decoding, {counts['num_unexplained']} of them by "
            "more than rounding."
        )
    commands = dict.fromkeys(record["command"] for record in records["lossless"] if "command" in record)
    parts += [f"Command: `python {command}`." for command in commands]
    return "\n\n".join(parts) if parts else "Not measured yet."


def speed_table(record: dict) -> str:
    """Ways of decoding, a row each."""
    lines = [
        "| | τ | stages / round | repairs right / harmful | tokens/s | speedup, median (quartiles) | identical |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        drafted = row.get("statistics")
        low, high = row["speedup_quartiles"]
        cells = ["", "", ""]
        if drafted is not None:
            classes = drafted["slot_classes"]
            cells = [
                f"{drafted['acceptance_length']:.2f}",
                f"{drafted['mean_stages']:.2f}",
                f"{classes['repaired_right']} / {classes['repaired_harmful']}",
            ]
        speed = f"{row['speedup_median']:.2f} ({low:.2f} .. {high:.2f})"
        identical = f"{row['num_identical']} / {_num_prompts(row)}"
        lines.append("| " + " | ".join([row["name"], *cells, f"{row['tokens_per_s']:.1f}", speed, identical]) + " |")
    return "\n".join(lines)


def circumstances(record: dict) -> str:
    """What was measured, where and how, in one paragraph."""
    arguments, environment, target = record["arguments"], record["environment"], record["target"]
    return (
        f"{_num_prompts(record['rows'][0])} prompts ({', '.join(record['prompt_files'])}), "
        f"{arguments['max_new_tokens']} new tokens, temperature {arguments['temperature']}, float32, batch 1, "
        f"{environment['cpu_threads']} threads of {environment['device']}, torch {environment['torch']}, transformers "
        f"{environment['transformers']}; target {target['target']} from {target['target_origin']} "
        f"({target['target_revision']}). τ counts the bonus token. DLoop: gate {arguments['loop_gate']}, at most "
        f"{arguments['max_stages']} stages. Decoding loop: {arguments['decoding_loop']}. All ways ran interleaved in "
        "one process; speedup is the ratio of tokens/s to plain `generate()`, prefill included, median and quartiles "
        "over prompts."
    )


def lossless_summary(records: list[dict]) -> dict[str, dict[str, int]]:
    """Counts of each way, added up over files."""
    total: dict[str, dict[str, int]] = {}
    for record in records:
        for name, entry in record["summary"].items():
            counts = total.setdefault(name, dict.fromkeys(entry, 0))
            total[name] = {field: counts[field] + entry[field] for field in entry}
    return total


def measurements(records: dict[str, list[dict]], datasets: dict[str, str]) -> list[dict]:
    """
    Single figures by data set, for structured entries.

    Args:
        datasets (`dict[str, str]`): Name of a prompt file without its suffix to the Hub's id of the data set; what is
            not in it has no entry.

    Returns:
        Dictionaries with `dataset`, `prompts`, `way`, `speedup`, `num_prompts`, `notes`.
    """
    of_rows = [
        {
            "dataset": datasets[record["task"]],
            "prompts": record["task"],
            "way": record["way"],
            "speedup": record["speedup"][1],
            "num_prompts": record["num_prompts"],
            "notes": f"{record['way']}; median over {record['num_prompts']} prompts of tokens/s against plain "
            f"generate(); {rows[0]['environment']['cpu_threads']} threads of {rows[0]['environment']['device']}",
        }
        for rows in records["benchmark"]
        for record in summarize(rows)
        if record["statistics"] is not None and record["kind"] == "drafter" and record["task"] in datasets
    ]
    return of_rows + [
        {
            "dataset": datasets[kind],
            "prompts": kind,
            "way": row["name"],
            "speedup": entry["speedup_median"],
            "num_prompts": entry["num_prompts"],
            "notes": f"{row['name']}, {record['arguments']['decoding_loop']} loop; median over "
            f"{entry['num_prompts']} prompts of tokens/s against plain generate(); "
            f"{record['environment']['cpu_threads']} threads of {record['environment']['device']}",
        }
        for record in records["speed"]
        for row in record["rows"]
        if row.get("statistics") is not None
        for kind, entry in row["by_kind"].items()
        if kind in datasets
    ]


def _num_prompts(row: dict) -> int:
    return sum(kind["num_prompts"] for kind in row["by_kind"].values())

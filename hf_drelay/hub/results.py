"""Measured JSON to what a card shows: tables, sentences, and structured entries. Every number comes out of a file."""

import json
from pathlib import Path


def read_records(paths) -> dict[str, list[dict]]:
    """
    Results by kind.

    Args:
        paths (`Iterable[Path]`): JSON files of `scripts/benchmark_demo.py` and `scripts/check_lossless_demo.py`.

    Returns:
        `{"speed": [...], "lossless": [...]}`.

    Raises:
        ValueError: For a file that is neither.
    """
    records: dict[str, list[dict]] = {"speed": [], "lossless": []}
    for path in map(Path, paths):
        record = json.loads(path.read_text(encoding="utf-8"))
        kind = "speed" if "rows" in record else "lossless" if "summary" in record else None
        if kind is None:
            raise ValueError(f"`results` names {path}, which has neither `rows` nor a `summary`; measure it again.")
        records[kind].append(record)
    return records


def results_section(records: dict[str, list[dict]]) -> str:
    """Tables, circumstances and commands as Markdown."""
    parts = []
    for record in records["speed"]:
        parts += [speed_table(record), circumstances(record), f"Command: `python {record['command']}`."]
    for name, counts in lossless_summary(records["lossless"]).items():
        command = records["lossless"][0]["command"]
        parts.append(
            f"Losslessness, {name}: {counts['num_prompts']} prompts, {counts['num_tokens']} tokens, "
            f"{counts['num_different']} outputs differ from plain decoding, {counts['num_unexplained']} of them by "
            f"more than rounding (`python {command}`)."
        )
    return "\n\n".join(parts) if parts else "Not measured yet."


def speed_table(record: dict) -> str:
    """Ways of decoding, a row each."""
    lines = [
        "| | τ | stages / round | repairs right / harmful | tokens/s | speedup (quartiles over prompts) | identical |",
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
        speed = f"{row['speedup_total']:.2f} ({low:.2f} .. {high:.2f})"
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
        "one process; speedup is the ratio of tokens/s to plain `generate()`, prefill included."
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
    return [
        {
            "dataset": datasets[kind],
            "prompts": kind,
            "way": row["name"],
            "speedup": entry["speedup_median"],
            "num_prompts": entry["num_prompts"],
            "notes": f"{row['name']}; median over prompts of tokens/s against plain generate(); "
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

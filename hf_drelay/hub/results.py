"""Measured JSON to what a card shows: tables, sentences, and structured entries. Every number comes out of a file."""

import json
from pathlib import Path

import torch

from hf_drelay.evaluation import lossless
from hf_drelay.evaluation.records import read_jsonl, weights_sha256
from hf_drelay.evaluation.summary import markdown, read_rows, summarize


_LOSSLESS_COUNTS = ("num_prompts", "num_tokens", "num_different", "num_unexplained")
_LOSSLESS_FIELDS = {
    *("task", "prompt", "way", "dtype", "num_tokens", "divergence", "settings", "environment"),
    *("target", "target_origin", "target_revision", "target_weights_sha256"),
}
_SPEED_FIELDS = {"name", "tokens_per_s", "speedup_median", "speedup_quartiles", "num_identical", "by_kind"}


def read_records(paths, folder: str | Path | None = None) -> dict:
    """
    Results by kind, which is told by what a file holds.

    Args:
        paths (`Iterable[Path]`): What `hf-drelay benchmark`, `hf-drelay check-lossless`, `scripts/benchmark_demo.py`
            and `scripts/check_lossless_demo.py` wrote.
        folder (`str` or `Path`, *optional*): Checkpoint of the drafter: rows of other drafters are left out, by the
            hash of the weights. The files of the two scripts have no such hash and stay as they are.

    Returns:
        `{"speed": [...], "lossless": [...], "benchmark": [...], "rows": {...}}`. Benchmark files are lists of rows; in
        a losslessness record of the command they are in `rows`. The last entry holds the rows of both by file name.

    Raises:
        ValueError: For a file of another kind, or one that knows other drafters only.
    """
    records: dict = {"speed": [], "lossless": [], "benchmark": [], "rows": {}}
    hashes: dict[str, str | None] = {}
    for path in map(Path, paths):
        kind, record = _read_record(path)
        rows = record if kind == "benchmark" else record.get("rows") if kind == "lossless" else None
        if rows is not None:
            rows = rows if folder is None else _own_rows(path, rows, Path(folder), hashes)
            record = rows if kind == "benchmark" else _lossless_record(rows)
            records["rows"][path.name] = rows
        records[kind].append(record)
    return records


def _own_rows(path: Path, rows: list[dict], folder: Path, hashes: dict[str, str | None]) -> list[dict]:
    """Rows without a drafter, and those of the drafter in `folder`; `hashes` keeps its hash in each type."""

    def is_own(row: dict) -> bool:
        if not _is_drafted(row):
            return True
        dtype = str(row.get("drafter_dtype"))
        if dtype not in hashes:
            hashes[dtype] = _checkpoint_sha256(folder, dtype)
        return row.get("drafter_weights_sha256") is not None and row["drafter_weights_sha256"] == hashes[dtype]

    own = [row for row in rows if is_own(row)]
    drafters = {str(row.get("drafter")) for row in rows if _is_drafted(row)}
    if drafters and all(not _is_drafted(row) for row in own):
        names = ", ".join(sorted(drafters))
        raise ValueError(
            f"`results` names {path}, whose drafters ({names}) have other weights than {folder}. Measure this "
            "drafter, or leave the file out."
        )
    return own


def _is_drafted(row: dict) -> bool:
    """Rows of losslessness have no kind; all of them are of drafters."""
    return row.get("kind", "drafter") == "drafter"


def _checkpoint_sha256(folder: Path, dtype: str) -> str | None:
    """The hash that rows have, which are measured with weights in this type."""
    from hf_drelay import DRelayModel

    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        return None
    return weights_sha256(DRelayModel.from_pretrained(folder, dtype=torch_dtype))


def _read_record(path: Path) -> tuple[str, dict | list]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:  # a row a line
        record = None
    if _is_speed_record(record):
        return "speed", record
    if _is_lossless_record(record):
        return "lossless", record
    rows = list(read_jsonl(path)) if record is None else [record]
    shared = set.intersection(*(set(row) if isinstance(row, dict) else set() for row in rows)) if rows else set()
    if {"way", "task", "statistics"} <= shared:
        return "benchmark", read_rows([path])
    if _LOSSLESS_FIELDS <= shared:
        return "lossless", _lossless_record(rows)
    raise ValueError(
        f"`results` names {path}, which is no result of `hf-drelay benchmark` or `check-lossless`; measure again."
    )


def _has(record, keys: set[str]) -> bool:
    return isinstance(record, dict) and keys <= record.keys()


def _is_speed_record(record) -> bool:
    """Whether `scripts/benchmark_demo.py` wrote it."""
    return (
        _has(record, {"rows", "arguments", "environment", "target", "prompt_files", "command"})
        and isinstance(record["rows"], list)
        and bool(record["rows"])
        and all(_has(row, _SPEED_FIELDS) for row in record["rows"])
    )


def _is_lossless_record(record) -> bool:
    """Whether `scripts/check_lossless_demo.py` wrote it."""
    return (
        _has(record, {"summary"})
        and isinstance(record["summary"], dict)
        and all(_has(entry, set(_LOSSLESS_COUNTS)) for entry in record["summary"].values())
    )


def _lossless_record(rows: list[dict]) -> dict:
    summary = {
        f"{record['way']}, {record['dtype']}": {name: record[name] for name in _LOSSLESS_COUNTS}
        for record in lossless.summarize_lossless(rows)
    }
    return {"summary": summary, "rows": rows}


def results_section(records: dict[str, list[dict]]) -> str:
    """Tables, circumstances and commands as Markdown."""
    parts = []
    for record in records["speed"]:
        parts += [speed_table(record), circumstances(record), f"Command: `python {record['command']}`."]
    for rows in records["benchmark"]:
        parts.append(markdown(rows).strip())
        parts += _commands(rows)
    for name, counts in lossless_summary(records["lossless"]).items():
        parts.append(
            f"Losslessness, {name}: {counts['num_prompts']} prompts, {counts['num_tokens']} tokens, "
            f"{counts['num_different']} outputs differ from plain decoding, {counts['num_unexplained']} of them by "
            "more than rounding."
        )
    for record in records["lossless"]:
        if "rows" in record:
            parts += [lossless.circumstances(record["rows"]), *_commands(record["rows"])]
    commands = dict.fromkeys(record["command"] for record in records["lossless"] if "command" in record)
    parts += [f"Command: `python {command}`." for command in commands]
    return "\n\n".join(parts) if parts else "Not measured yet."


def _commands(rows: list[dict]) -> list[str]:
    """Rows that Python code measured may have none."""
    return [f"Command: `{command}`." for command in dict.fromkeys(row.get("command") for row in rows) if command]


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
            counts = total.setdefault(name, dict.fromkeys(_LOSSLESS_COUNTS, 0))
            total[name] = {field: counts[field] + entry[field] for field in _LOSSLESS_COUNTS}
    return total


def measurements(records: dict[str, list[dict]], datasets: dict[str, str]) -> list[dict]:
    """
    Single figures by data set, for structured entries.

    Args:
        datasets (`dict[str, str]`): Name of a prompt file without its suffix to the Hub's id of the data set; what is
            not in it has no entry.

    Returns:
        Dictionaries with `dataset`, `task_id`, `prompts`, `way`, `temperature`, `speedup`, `num_prompts`, `notes`.

    Raises:
        ValueError: If two measurements would have the same data set and task id, so that one hides the other.
    """
    found = [
        {"task_id": _task_id(entry)} | entry
        for entry in (*_of_rows(records, datasets), *_of_scripts(records, datasets))
    ]
    names = [(entry["dataset"], entry["task_id"]) for entry in found]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ValueError(
            f"`results` hold two measurements of {double[1]!r} on {double[0]!r}, which cannot be told apart. Leave "
            "one file out of `results`, or one of its prompt files out of `result_datasets`."
        )
    return found


def _task_id(entry: dict) -> str:
    name = f"speedup_{entry['way'].replace(' + ', '_').replace(' ', '_').lower()}"
    return f"{name}_t{entry['temperature']:g}" if entry["temperature"] else name


def _notes(way: str, num_prompts: int, settings: dict, dtype: str, environment: dict) -> str:
    """`settings` has the temperature and the limit of new tokens."""
    return (
        f"{way}; temperature {float(settings['temperature']):g}, {dtype}, at most {settings['max_new_tokens']} "
        f"new tokens; median over {num_prompts} prompts of tokens/s against plain generate(); "
        f"{environment['cpu_threads']} threads of {environment['device']}"
    )


def _of_rows(records: dict[str, list], datasets: dict[str, str]) -> list[dict]:
    return [
        {
            "dataset": datasets[record["task"]],
            "prompts": record["task"],
            "way": record["way"],
            "speedup": record["speedup"][1],
            "num_prompts": record["num_prompts"],
            "temperature": row["settings"]["temperature"],
            "notes": _notes(record["way"], record["num_prompts"], row["settings"], row["dtype"], row["environment"]),
        }
        for rows in records["benchmark"]
        for record in summarize(rows)
        for row in [next(row for row in rows if row["run"] == record["run"])]
        if record["statistics"] is not None and record["kind"] == "drafter" and record["task"] in datasets
    ]


def _of_scripts(records: dict[str, list], datasets: dict[str, str]) -> list[dict]:
    return [
        {
            "dataset": datasets[kind],
            "prompts": kind,
            "way": row["name"],
            "speedup": entry["speedup_median"],
            "num_prompts": entry["num_prompts"],
            "temperature": float(record["arguments"]["temperature"]),  # the script writes its flags as texts
            "notes": _notes(
                f"{row['name']}, {record['arguments']['decoding_loop']} loop",
                entry["num_prompts"],
                record["arguments"],
                "float32",  # the script knows no other
                record["environment"],
            ),
        }
        for record in records["speed"]
        for row in record["rows"]
        if row.get("statistics") is not None
        for kind, entry in row["by_kind"].items()
        if kind in datasets
    ]


def _num_prompts(row: dict) -> int:
    return sum(kind["num_prompts"] for kind in row["by_kind"].values())

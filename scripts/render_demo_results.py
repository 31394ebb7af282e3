"""Write the measured tables of the demo drafter into README.md and its card, between the `results` markers.

python scripts/render_demo_results.py
"""

import json
import re
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", ROOT / "hub_cards" / "SmolLM2-135M-Instruct-DRelay" / "README.md"]
MARKERS = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)


def grid_table(record: dict) -> str:
    """Selector on/off times DLoop on/off, from `benchmark_demo.py`."""
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
        total = sum(kind["num_prompts"] for kind in row["by_kind"].values())
        speed = f"{row['speedup_total']:.2f} ({low:.2f} .. {high:.2f})"
        identical = f"{row['num_identical']} / {total}"
        lines.append("| " + " | ".join([row["name"], *cells, f"{row['tokens_per_s']:.1f}", speed, identical]) + " |")
    return "\n".join(lines)


def circumstances(record: dict) -> str:
    """What was measured, where and how, in one paragraph."""
    arguments, environment, target = record["arguments"], record["environment"], record["target"]
    count = sum(kind["num_prompts"] for kind in record["rows"][0]["by_kind"].values())
    return (
        f"{count} prompts ({', '.join(record['prompt_files'])}), {arguments['max_new_tokens']} new tokens, "
        f"temperature {arguments['temperature']}, float32, batch 1, {environment['cpu_threads']} threads of "
        f"{environment['device']}, torch {environment['torch']}, transformers {environment['transformers']}; "
        f"target {target['target']} from {target['target_origin']} ({target['target_revision']}). "
        f"τ counts the bonus token. DLoop: gate {arguments['loop_gate']}, at most {arguments['max_stages']} stages. "
        "All ways ran interleaved in one process; speedup is the ratio of tokens/s to plain `generate()`, "
        "prefill included."
    )


def lossless_summary() -> dict[str, dict[str, int]]:
    """Counts of each way, added up over the files that `check_lossless_demo.py` wrote."""
    total: dict[str, dict[str, int]] = {}
    for path in sorted(RESULTS.glob("demo_lossless*.json")):
        for name, entry in json.loads(path.read_text())["summary"].items():
            counts = total.setdefault(name, dict.fromkeys(entry, 0))
            total[name] = {field: counts[field] + entry[field] for field in entry}
    return total


def results() -> str:
    record = json.loads((RESULTS / "demo_grid.json").read_text())
    parts = [grid_table(record), circumstances(record), "Command: `python scripts/benchmark_demo.py`."]
    for name, entry in lossless_summary().items():
        parts.append(
            f"Losslessness, {name}: {entry['num_prompts']} prompts, {entry['num_tokens']} tokens, "
            f"{entry['num_different']} outputs differ from plain decoding, {entry['num_unexplained']} of them by more "
            "than rounding (`python scripts/check_lossless_demo.py`)."
        )
    return "\n\n".join(parts)


def main() -> None:
    text = results()
    for page in PAGES:
        before = page.read_text()
        after = MARKERS.sub(lambda match: f"{match[1]}{text}\n{match[2]}", before)
        if before == after and "<!-- results -->" not in before:
            raise SystemExit(f"{page} has no results markers; add `<!-- results -->` and `<!-- /results -->`.")
        page.write_text(after)


if __name__ == "__main__":
    main()

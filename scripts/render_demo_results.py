"""Write the measured tables into README.md, the figures of the studies, and the model card from template and JSON.

python scripts/render_demo_results.py
"""

import json
import re
from pathlib import Path

from hf_drelay.evaluation import studies
from hf_drelay.evaluation.summary import ALL_TASKS, circumstances, markdown_table, read_rows, summarize
from hf_drelay.hub.card import folder_records, render_card
from hf_drelay.hub.results import results_section


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
FOLDER = ROOT / "hub_cards" / "SmolLM2-135M-Instruct-DRelay"
ARMS = (studies.arms_table, studies.arms_circumstances, studies.draw_arms)
LOOP = (studies.loop_table, studies.loop_circumstances, studies.draw_loop)
# By the name of the JSON file and of the marker.
STUDIES = {"comparison": ARMS, "ablation": ARMS, "recipe": ARMS, "loop": LOOP}
# Rows of `hf-drelay benchmark` with the drafters of the comparison, a file for each temperature.
WALLTIMES = "comparison_walltime*.jsonl"


def study_section(name: str) -> str:
    """Table, figure and circumstances of a study as Markdown."""
    table, circumstances, _ = STUDIES[name]
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return "\n\n".join([table(record), f"![{name}](docs/results/{name}.svg)", circumstances(record)])


def measured_studies() -> list[str]:
    """Studies that have a record; each needs its markers in README.md."""
    return [name for name in STUDIES if (RESULTS / f"{name}.json").exists()]


def walltime_section() -> str | None:
    """Table and circumstances of every file of walltimes as Markdown; `None` without any."""
    parts = []
    for path in sorted(RESULTS.glob(WALLTIMES)):
        rows = read_rows([path])
        parts += [f"Temperature {rows[0]['settings']['temperature']:g}:", markdown_table(summarize(rows), ALL_TASKS)]
        parts += [*circumstances(rows), f"Command: `{rows[0]['command']}`."]
    return "\n\n".join(parts) or None


def rendered_pages() -> dict[Path, str]:
    """Every page with measured numbers, as it should be."""
    page = ROOT / "README.md"
    readme = page.read_text(encoding="utf-8")
    sections = {"results": results_section(folder_records(FOLDER))}
    sections |= {name: study_section(name) for name in measured_studies()}
    if (text := walltime_section()) is not None:
        sections["walltime"] = text
    for name, text in sections.items():
        markers = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not markers.search(readme):
            raise SystemExit(f"{page} has no markers `<!-- {name} -->` and `<!-- /{name} -->`; add them.")
        readme = markers.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", readme)
    return {page: readme, FOLDER / "README.md": render_card(FOLDER)}


def main() -> None:
    for page, text in rendered_pages().items():
        page.write_text(text, encoding="utf-8")
    for name in measured_studies():
        _, _, draw = STUDIES[name]
        draw(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")), RESULTS / f"{name}.svg")


if __name__ == "__main__":
    main()

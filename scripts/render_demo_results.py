"""Write the measured tables of the demo drafter into README.md, and its model card from template and JSON.

python scripts/render_demo_results.py
"""

import re
from pathlib import Path

from hf_drelay.hub.card import read_card_file, render_card, result_files
from hf_drelay.hub.results import read_records, results_section


ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "hub_cards" / "SmolLM2-135M-Instruct-DRelay"
MARKERS = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)


def rendered_pages() -> dict[Path, str]:
    """Every page with measured numbers, as it should be."""
    page = ROOT / "README.md"
    before = page.read_text(encoding="utf-8")
    if not MARKERS.search(before):
        raise SystemExit(f"{page} has no results markers; add `<!-- results -->` and `<!-- /results -->`.")
    results = results_section(read_records(result_files(FOLDER, read_card_file(FOLDER))))
    readme = MARKERS.sub(lambda match: f"{match[1]}{results}\n{match[2]}", before)
    return {page: readme, FOLDER / "README.md": render_card(FOLDER)}


def main() -> None:
    for page, text in rendered_pages().items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

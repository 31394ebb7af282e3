"""The losslessness matrix: every combination of what can be combined, on tiny targets, against plain `generate()`.

    python scripts/lossless_matrix.py --output docs/results/lossless_matrix.json

Cells are drafter x loop x batch x shape of the draft x cache x proposal. Drafts follow the target's text and are
spoiled at random places, so that they are accepted, rejected and, with a selector, repaired; the cost-aware gate
("auto") has a clock that counts its looks, and drafts in every round. A cell that drafts nothing fails. At temperature
0 the token ids must be those of plain decoding; so must they at temperature 1 where the random numbers of plain
sampling are known ahead ("greedy" and "coupled" in our own loop, same seed). The other sampled cells draw with
`top_k=1`, where every right law is one text; their laws at temperature 1 are tested by chi-square in the suite.
`--pairwise` runs a covering set of all pairs.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm.auto import tqdm

from hf_drelay.evaluation.records import environment, write_json
from hf_drelay.modeling.candidate_generator import DRelayCandidateGenerator
from hf_drelay.modeling.compat import supports_static_cache


# The targets and the drafters that follow a script are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "modeling"))
import conftest as fixtures  # noqa: E402


AXES = {
    "drafter": ("relay-fill_in", "relay-shifted", "independent-fill_in", "independent-shifted"),
    "loop": ("own", "host"),
    "batch": (1, 2, 5),
    "draft": ("chain", "tree", "dloop", "dloop+tree", "auto"),
    "cache": ("dynamic", "static", "sliding"),
    "proposal": ("temperature_0", "sample", "greedy", "coupled"),
}
LENGTHS = (9, 4, 7, 1, 6)


def is_possible(cell: dict) -> bool:
    """The host's loop takes one row, one chain and its own random numbers."""
    if cell["cache"] == "static" and not supports_static_cache():
        return False
    if cell["loop"] == "own":
        return True
    return cell["batch"] == 1 and "tree" not in cell["draft"] and cell["proposal"] != "coupled"


def cells() -> list[dict]:
    """All possible combinations."""
    combinations = (dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values()))
    return [cell for cell in combinations if is_possible(cell)]


def pairs_of(cell: dict) -> set:
    return {frozenset(pair) for pair in itertools.combinations(cell.items(), 2)}


def pairwise(candidates: Iterable[dict]) -> list[dict]:
    """A small set of cells that holds every pair of values that any cell holds, chosen greedily."""
    candidates = list(candidates)
    missing = set().union(*(pairs_of(cell) for cell in candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda cell: len(pairs_of(cell) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def prompts(num_rows: int) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Unequal prompts, padded left, and their mask."""
    ids = torch.zeros(num_rows, max(LENGTHS[:num_rows]), dtype=torch.long)
    for row, length in enumerate(LENGTHS[:num_rows]):
        ids[row, ids.shape[1] - length :] = fixtures.prompt_ids(length, seed=row)[0]
    return ids, (ids != 0).long()


class FollowRows:
    """Lets every row of a batch follow its own text while the block is open."""

    def __init__(self, texts: list[list[int]]):
        self.texts = texts
        self.right = DRelayCandidateGenerator.stages

    def __enter__(self):
        texts, right = self.texts, self.right

        def stages(generator, input_ids):
            ids = input_ids[0].tolist()
            ids = ids[next(i for i, token in enumerate(ids) if token) :]
            generator.session.script_text = next((text for text in texts if text[: len(ids)] == ids), [])
            return (yield from right(generator, input_ids))

        DRelayCandidateGenerator.stages = stages

    def __exit__(self, *exception):
        DRelayCandidateGenerator.stages = self.right


def run_cell(cell: dict, max_new_tokens: int = 24, seed: int = 0) -> dict:
    """Decode plainly and with the drafter; returns whether the texts are equal, and how much was accepted."""
    target = fixtures.build_target("gemma3" if cell["cache"] == "sliding" else "llama")
    ids, mask = prompts(cell["batch"])
    call = {"attention_mask": mask, "max_new_tokens": max_new_tokens, "do_sample": False}
    call["cache_implementation"] = "static" if cell["cache"] == "static" else None
    if cell["proposal"] != "temperature_0":
        knows_numbers = cell["loop"] == "own" and (cell["proposal"] != "sample" or "tree" in cell["draft"])
        call |= {"do_sample": True, "top_k": 0 if knows_numbers else 1}
    torch.manual_seed(seed)
    expected = target.generate(ids, **call)
    texts = [row[next(i for i, token in enumerate(row) if token) :] for row in expected.tolist()]
    head, layout = cell["drafter"].split("-")
    model = fixtures.scripted_drafter(target, texts[0], layout=layout)
    options = {"use_selector": head == "relay", "decoding_loop": cell["loop"]}
    if "dloop" in cell["draft"]:
        options["loop_gate"] = float("-inf")
    if cell["draft"] == "auto":
        options["loop_gate"] = "auto"
    if "tree" in cell["draft"]:
        options["tree_budget"] = 7
    if cell["proposal"] != "temperature_0":
        options["proposal"] = cell["proposal"]
    view = fixtures.with_free_costs(model.with_options(**options), cell["batch"])
    torch.manual_seed(seed)
    with FollowRows(texts):
        output = target.generate(ids, assistant_model=view, **call)
    statistics = view.statistics.to_dict()
    return {
        "is_identical": torch.equal(output, expected),
        "acceptance_length": statistics["acceptance_length"],
        "num_rounds": statistics["num_rounds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--pairwise", action="store_true", help="a covering set of all pairs instead of all cells")
    arguments = parser.parse_args()
    chosen = pairwise(cells()) if arguments.pairwise else cells()
    rows = [cell | run_cell(cell) for cell in tqdm(chosen, unit="cell")]
    lossy = [row for row in rows if not row["is_identical"]]
    idle = [row for row in rows if not row["num_rounds"]]
    record = {
        "command": "scripts/lossless_matrix.py" + (" --pairwise" if arguments.pairwise else ""),
        "environment": environment(),
        "axes": AXES,
        "num_cells": len(rows),
        "num_identical": len(rows) - len(lossy),
        "rows": rows,
    }
    write_json(arguments.output, record)
    print(f"{record['num_identical']} of {len(rows)} cells are identical to plain decoding")
    for row in lossy:
        print("differs:", row)
    for row in idle:
        print("drafted nothing:", row)
    raise SystemExit(bool(lossy or idle))


if __name__ == "__main__":
    main()

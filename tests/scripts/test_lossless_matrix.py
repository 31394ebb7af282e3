"""A covering set of the losslessness matrix: every pair of values of its axes occurs in some cell."""

import importlib.util
from pathlib import Path

import pytest


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lossless_matrix.py"
spec = importlib.util.spec_from_file_location("lossless_matrix", SCRIPT)
matrix = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matrix)

COVER = matrix.pairwise(matrix.cells())


def test_cover_holds_every_pair_that_a_cell_holds():
    pairs = set().union(*(matrix.pairs_of(cell) for cell in matrix.cells()))
    assert set().union(*(matrix.pairs_of(cell) for cell in COVER)) == pairs
    assert len(COVER) < len(matrix.cells()) / 10


@pytest.mark.parametrize("cell", COVER, ids=lambda cell: "-".join(str(value) for value in cell.values()))
def test_cell_is_identical_to_plain_decoding(cell):
    result = matrix.run_cell(cell)
    assert result["is_identical"]
    assert result["num_rounds"] > 0

"""Sweep of drafting options on a small sample: which loop gate, how many stages, how many tokens to verify.

A sweep is a benchmark whose ways are the points of a grid, so it is measured, resumed and reported like one.
"""

import itertools
import json
from pathlib import Path

from .records import write_json
from .summary import ALL_TASKS, summarize
from .ways import Way, drafter_way, plain_way


# Stands for minus infinity, which JSON does not have: no block of a draft is that unlikely.
ALWAYS_LOOP = -1e9
SWEPT = ("loop_gate", "max_stages", "num_draft_tokens")
# Options that the configuration of a drafter does not hold, or that would build another drafter, with their defaults.
CALL_OPTIONS = {"use_selector": True, "tree_budget": None, "decoding_loop": "own"}


def sweep_options(
    gates: list[float | str | None], max_stages: list[int], num_draft_tokens: list[int | None]
) -> list[dict]:
    """
    Points of the grid as options of `with_options`. With DLoop off `max_stages` means nothing, so those points occur
    once. Tokens to verify are at most `num_draft_tokens` for each stage.
    """
    points = []
    for gate, stages, tokens in itertools.product(gates, max_stages, num_draft_tokens):
        point = {"loop_gate": gate, "num_draft_tokens": tokens}
        if gate is not None:
            point["max_stages"] = stages
        if point not in points:
            points.append(point)
    return points


def sweep_ways(drafters: dict[int, object], points: list[dict], **options) -> list[Way]:
    """
    Plain decoding and one way for each point.

    Args:
        drafters (`dict[int, DRelayModel]`): The drafter by block size.
        options: Further options of `with_options`, the same for all points.
    """
    ways = [plain_way()]
    for size, drelay in drafters.items():
        for point in points:
            if point["num_draft_tokens"] is not None and point["num_draft_tokens"] > drelay.config.num_drafts:
                raise ValueError(
                    f"`num_draft_tokens` {point['num_draft_tokens']} is more than a block of {size} drafts "
                    f"({drelay.config.num_drafts}); use a smaller one."
                )
            way = drafter_way(point_name(size, point), drelay, **(options | point))
            ways.append(way)
    return ways


def point_name(block_size: int, point: dict) -> str:
    tokens = "all" if point["num_draft_tokens"] is None else point["num_draft_tokens"]
    loop = "off" if point["loop_gate"] is None else f"gate {point['loop_gate']}, at most {point['max_stages']} stages"
    return f"block {block_size}, drafts {tokens}, DLoop {loop}"


def check_defaults(options: dict) -> None:
    """Raise a `ValueError` for an option that no configuration can make the default of a drafter."""
    for name, usual in CALL_OPTIONS.items():
        if options.get(name, usual) != usual:
            raise ValueError(
                f"`{name}` {options[name]!r} is an option of a call and cannot be written into a configuration; sweep "
                "without it to write the best."
            )


def best_point(rows: list[dict]) -> dict:
    """Summary of the fastest point: the highest ratio of all tokens by all seconds to plain decoding."""
    records = [r for r in summarize(rows) if r["task"] == ALL_TASKS and r["kind"] == "drafter"]
    if not records:
        raise ValueError("`rows` hold no point of a sweep; measure at least one.")
    return max(records, key=lambda record: record["speedup_total"] or 0.0)


def write_best(folder: str | Path, rows: list[dict]) -> dict:
    """
    Make the fastest point the default of a drafter's `config.json`.

    Returns:
        The fields that were written.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise OSError(
            f"`drafter` {folder} is no local folder with a `config.json`, so nothing can be written into it."
        )
    best = best_point(rows)
    row = next(row for row in rows if row["way"] == best["way"])
    check_defaults(row)
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("block_size") != row["block_size"]:
        raise ValueError(
            f"the fastest point has `block_size` {row['block_size']}, but {path} has {config.get('block_size')}; its "
            "weights belong to that size. Sweep without other block sizes to write the best."
        )
    fields = {name: row[name] for name in (*SWEPT, "proposal", "confidence_threshold")}
    if fields["loop_gate"] == "-inf":
        fields["loop_gate"] = ALWAYS_LOOP
    write_json(path, config | fields)
    return fields

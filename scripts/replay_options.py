"""Replay τ of a drafter on held-out greedy responses over drafting options: stage length, gate, norm.

    python scripts/replay_options.py --responses FILE [FILE ...] --output docs/results/demo_replay.json

The responses must not be among those that the drafter was trained on.
"""

import argparse
from pathlib import Path

from hf_drelay import DRelayModel, load_demo_target
from hf_drelay.evaluation.records import command_line, environment, write_json
from hf_drelay.evaluation.replay import replay
from hf_drelay.targets import describe_demo_target, resolve_drafter
from hf_drelay.training.data import load_responses


OPTIONS = (
    {"use_selector": False},
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 2},
    {"num_draft_tokens": 3},
    {"num_draft_tokens": 4},
    {"num_draft_tokens": 2, "use_selector": False},
    {"num_draft_tokens": 3, "use_selector": False},
    {"num_draft_tokens": 2, "loop_gate": -1.0},
    {"num_draft_tokens": 3, "loop_gate": -0.5},
    {"num_draft_tokens": 3, "loop_gate": -1.0},
    {"num_draft_tokens": 3, "loop_gate": -0.5, "provisional_norm": "final"},
    {"num_draft_tokens": 3, "loop_gate": -1.0, "provisional_norm": "final"},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", required=True, nargs="+", help="response files of the demo target")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--drafter", help="folder or Hub id; default: the bundled one")
    parser.add_argument("--num-responses", type=int, default=16)
    arguments = parser.parse_args()
    target, tokenizer = load_demo_target()
    drelay = DRelayModel.from_pretrained(resolve_drafter(arguments.drafter))
    held_out = [e for e in load_responses(arguments.responses, tokenizer, max_length=512) if e.mode == "greedy"]
    count = min(arguments.num_responses, len(held_out))
    held_out = [held_out[i * len(held_out) // count] for i in range(count)]  # spread over the files
    rows = []
    for options in OPTIONS:
        # The norm belongs to the weights; every other option is one of the call.
        drelay.drafter.config.provisional_norm = options.get("provisional_norm", "hidden")
        call = {name: value for name, value in options.items() if name != "provisional_norm"}
        view = drelay.with_options(**({"loop_gate": None, "num_draft_tokens": None} | call))
        statistics = replay(view, target, held_out, max_response=128)
        row = {"options": options, "acceptance_length": statistics.acceptance_length}
        rows.append(row | {"mean_stages": statistics.mean_stages, "num_rounds": statistics.num_rounds})
        print(options, round(statistics.acceptance_length, 3), round(statistics.mean_stages, 2))
    record = {"command": command_line(), "environment": environment()}
    record |= {"target": describe_demo_target(target), "num_responses": len(held_out), "rows": rows}
    write_json(arguments.output, record)


if __name__ == "__main__":
    main()

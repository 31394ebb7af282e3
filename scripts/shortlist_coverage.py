"""How much of held-out responses a shortlist of a given size covers.

python scripts/shortlist_coverage.py --responses responses.jsonl.gz
"""

import argparse
from collections import Counter

from hf_drelay import load_demo_target
from hf_drelay.training.data import frequent_tokens, load_responses, read_jsonl, split_by_prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", required=True, help="response file of the demo target")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192, 12288])
    parser.add_argument("--num-held-out", type=int, default=300)
    arguments = parser.parse_args()
    target, tokenizer = load_demo_target()
    kinds = {row["prompt"]: row.get("set", "all") for row in read_jsonl(arguments.responses)}
    examples = load_responses(arguments.responses, tokenizer, max_length=512)
    train, held_out = split_by_prompt(examples, arguments.num_held_out)
    for size in arguments.sizes:
        shortlist = set(frequent_tokens(train, size, always=[target.config.eos_token_id]).tolist())
        total, covered = Counter(), Counter()
        for example in held_out:
            ids = example.response_ids.tolist()
            total[kinds[example.prompt]] += len(ids)
            covered[kinds[example.prompt]] += sum(token in shortlist for token in ids)
        print(size, {kind: round(covered[kind] / total[kind], 4) for kind in sorted(total)})


if __name__ == "__main__":
    main()

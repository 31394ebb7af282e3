"""Look at single rounds: what was drafted, repaired and accepted.

    python examples/08_trace.py

Needs: the demo target, fetched on first use; a CPU is enough.
Prints a line for each round.
"""

from hf_drelay import DRelayModel, load_demo_target
from hf_drelay.targets import resolve_drafter


target, tokenizer = load_demo_target()
drelay = DRelayModel.from_pretrained(resolve_drafter())

inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Write a Python function that adds two numbers."}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)

view = drelay.with_options(loop_gate=-1.0, trace=True)
target.generate(**inputs, assistant_model=view, do_sample=False, max_new_tokens=32)
for number, traced in enumerate(view.trace.rounds):
    tokens = [f"{tokenizer.decode([i])!r} ({o})" for i, o in zip(traced.committed_ids, traced.origins, strict=True)]
    print(f"round {number}: {', '.join(tokens)}")

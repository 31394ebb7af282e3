"""DLoop: draft further stages while the drafter is confident.

    python examples/04_dloop.py

Needs: the demo target, fetched on first use; a CPU is enough.
Prints a line for each gate; the text is always the same.
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

texts = set()
for gate in (None, -0.5, -2.0, float("-inf")):
    view = drelay.with_options(loop_gate=gate, max_stages=3)
    output = target.generate(**inputs, assistant_model=view, do_sample=False, max_new_tokens=48)
    texts.add(tuple(output[0].tolist()))
    statistics = view.statistics
    print(f"gate {gate}: τ {statistics.acceptance_length:.2f}, {statistics.mean_stages:.2f} stages a round")
print("same text at every gate:", len(texts) == 1)

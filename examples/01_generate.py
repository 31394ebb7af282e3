"""Generate with a drafter, and see what it won.

    python examples/01_generate.py

Needs: the demo target, fetched on first use; a CPU is enough.
Prints the answer, then the acceptance length.
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

output = target.generate(**inputs, assistant_model=drelay, do_sample=False, max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"acceptance length: {drelay.statistics.acceptance_length:.2f} tokens for each forward of the target")

plain = target.generate(**inputs, do_sample=False, max_new_tokens=64)
print("same tokens as without the drafter:", output.tolist() == plain.tolist())

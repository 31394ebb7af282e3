"""Stop strings end the text where plain decoding ends it, inside a drafted block too.

    python examples/06_stop_strings.py

Needs: the demo target, fetched on first use; a CPU is enough.
Prints a text that ends at the first full stop.
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

call = {"stop_strings": ["."], "tokenizer": tokenizer, "do_sample": False, "max_new_tokens": 64}
drafted = target.generate(**inputs, assistant_model=drelay, **call)
plain = target.generate(**inputs, **call)
print(tokenizer.decode(drafted[0, inputs["input_ids"].shape[1] :]))
print("same as without the drafter:", drafted.tolist() == plain.tolist())

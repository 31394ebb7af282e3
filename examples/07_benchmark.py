"""Measure a drafter on a few prompts.

    python examples/07_benchmark.py

Needs: the demo target, fetched on first use; a CPU is enough.
Prints tokens/s with and without the drafter. The full measurement is scripts/benchmark_demo.py.
"""

from hf_drelay import DRelayModel, load_demo_target
from hf_drelay.evaluation.timing import timed_generate
from hf_drelay.targets import resolve_drafter


target, tokenizer = load_demo_target()
drelay = DRelayModel.from_pretrained(resolve_drafter())

inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Write a Python function that adds two numbers."}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)

call = {"do_sample": False, "max_new_tokens": 64}
timed_generate(target, inputs, assistant_model=drelay, do_sample=False, max_new_tokens=2)  # first calls are slower
for name, assistant in (("plain", None), ("drafted", drelay)):
    ids, elapsed_s = timed_generate(target, inputs, assistant_model=assistant, **call)
    print(f"{name}: {len(ids) / elapsed_s:.1f} tokens/s")

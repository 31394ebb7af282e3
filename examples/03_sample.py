"""Sample: the distribution is the target's, whichever way the drafts are drawn.

    python examples/03_sample.py

Needs: the demo target, fetched on first use; a CPU is enough.
Prints a text and the acceptance length of each proposal. The last two have one text: with these, a seed gives that of
plain decoding.
"""

from transformers import set_seed

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

for proposal in ("sample", "greedy", "coupled"):
    set_seed(0)
    view = drelay.with_options(proposal=proposal)
    output = target.generate(
        **inputs, assistant_model=view, do_sample=True, temperature=0.8, top_p=0.95, max_new_tokens=48
    )
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"--- proposal {proposal}: acceptance length {view.statistics.acceptance_length:.2f}")

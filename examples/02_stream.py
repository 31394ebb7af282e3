"""Stream an answer while it is drafted.

    python examples/02_stream.py

Needs: the demo target, fetched on first use; a CPU is enough.
Words appear in groups: a round commits several tokens at once.
"""

from transformers import TextStreamer

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

streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
target.generate(**inputs, assistant_model=drelay, streamer=streamer, do_sample=False, max_new_tokens=64)

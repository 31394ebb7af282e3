"""A text-generation pipeline with a drafter.

    python examples/05_pipeline.py

Needs: the demo target, fetched on first use; a CPU is enough.
Prints the answer of the pipeline.
"""

from transformers import pipeline

from hf_drelay import DRelayModel, load_demo_target
from hf_drelay.targets import resolve_drafter


target, tokenizer = load_demo_target()
drelay = DRelayModel.from_pretrained(resolve_drafter())

generate = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drelay)
messages = [{"role": "user", "content": "Give three tips for a good night's sleep."}]
print(generate(messages, do_sample=False, max_new_tokens=48)[0]["generated_text"][-1]["content"])

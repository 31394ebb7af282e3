"""A demo with a tiny target and drafter, so that a whole conversation takes moments."""

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_drelay import DRelayModel
from hf_drelay.demo.engine import DemoEngine, DemoLimits


@pytest.fixture(scope="session")
def engine(tiny_folders) -> DemoEngine:
    target = LlamaForCausalLM.from_pretrained(tiny_folders.target).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders.target)
    drafters = {name: DRelayModel.from_pretrained(tiny_folders.drafter).eval() for name in ("tiny", "tiny again")}
    return DemoEngine(target, tokenizer, drafters, DemoLimits(max_prompt_tokens=60, max_new_tokens=256))

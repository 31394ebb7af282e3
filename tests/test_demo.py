"""The shipped drafter on the real demo target: it is there, it is small enough, and it changes no token."""

import json
from pathlib import Path

import pytest
import torch

from hf_drelay import DRelayModel, load_demo_target
from hf_drelay.training.data import encode_prompt


FOLDER = Path(__file__).resolve().parents[1] / "hub_cards" / "SmolLM2-135M-Instruct-DRelay"
PROMPTS = [
    "A farmer has 12 sheep and buys 7 more. Then he sells half of them plus one. How many sheep are left?",
    "Write a Python function that returns the second largest number of a list.",
    "Give three tips for a good night's sleep.",
]

pytestmark = pytest.mark.demo_target


@pytest.fixture(scope="module")
def target_and_tokenizer():
    return load_demo_target()


@pytest.fixture(scope="module")
def drelay():
    return DRelayModel.from_pretrained(FOLDER)


@pytest.mark.parametrize("gate", [None, float("-inf")], ids=["loop-off", "loop-open"])
def test_greedy_tokens_equal_plain_decoding_on_the_demo_target(target_and_tokenizer, drelay, gate):
    target, tokenizer = target_and_tokenizer
    committed = []
    for prompt in PROMPTS:
        ids = torch.tensor([encode_prompt(tokenizer, prompt)])
        call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 48, "do_sample": False}
        view = drelay.with_options(loop_gate=gate, max_stages=3)
        assert torch.equal(target.generate(ids, assistant_model=view, **call), target.generate(ids, **call))
        committed += view.statistics.num_committed
    # An untrained drafter would commit hardly more than the bonus token of each round.
    assert sum(committed) / len(committed) > 1.4


def test_checkpoint_is_small_and_says_what_it_is():
    assert (FOLDER / "model.safetensors").stat().st_size <= 25_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["target_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (FOLDER / "training_log.json").exists()


def test_shortlist_holds_the_end_token(drelay):
    assert set(drelay.config.eos_token_ids) <= set(drelay.drafter.draft_token_ids.tolist())

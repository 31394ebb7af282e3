"""Calls that few make: targets whose rope depends on the length, weights of fused attention, prompts of padding."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.modeling.conftest import VOCAB_SIZE, build_drafter, build_target, first_divergence, greedy, prompt_ids


@pytest.fixture(scope="module")
def target():
    return build_target("llama")


@pytest.fixture
def drafter(target):
    return build_drafter(target)


@pytest.fixture(scope="module")
def stretched_target():
    """Its rotary embedding changes with the length beyond 24 positions."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
        max_position_embeddings=24,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("loop", ["own", "host"])
class TestRopeThatDependsOnTheLength:
    def test_calls_within_the_limit_are_exact(self, stretched_target, loop):
        view = build_drafter(stretched_target).with_options(decoding_loop=loop, loop_gate=float("-inf"))
        ids = prompt_ids(12)
        plain = greedy(stretched_target, ids, max_new_tokens=12)
        assert first_divergence(greedy(stretched_target, ids, view, 12), plain) is None

    def test_calls_beyond_it_are_refused(self, stretched_target, loop):
        view = build_drafter(stretched_target).with_options(decoding_loop=loop)
        with pytest.raises(ValueError, match="`max_length` 25 goes beyond the 24 positions"):
            greedy(stretched_target, prompt_ids(12), view, 13)


def test_attention_weights_of_fused_attention_are_those_of_plain_decoding(target, drafter):
    arguments = {"output_attentions": True, "return_dict_in_generate": True}
    outputs = [greedy(target, prompt_ids(12), assistant, 12, **arguments) for assistant in (None, drafter)]
    plain, drafted = outputs
    assert drafted.sequences.equal(plain.sequences)
    assert len(drafted.attentions) == len(plain.attentions)


def test_prompt_of_padding_only_is_decoded_as_without_a_drafter(target, drafter):
    ids = prompt_ids(12)
    arguments = {"attention_mask": torch.zeros_like(ids)}
    assert greedy(target, ids, drafter, 10, **arguments).equal(greedy(target, ids, None, 10, **arguments))


def test_options_follow_the_configuration(target, drafter):
    drafter.config.num_draft_tokens = 1
    greedy(target, prompt_ids(12), drafter, 20)
    assert set(drafter.statistics.num_drafted) == {1}
    assert drafter.with_options(num_draft_tokens=None).options.num_draft_tokens is None


@pytest.mark.parametrize(
    ("options", "match"),
    [({"loop_gate": [1]}, "`loop_gate` is .1."), ({"use_selector": "no"}, "`use_selector` is 'no'")],
)
def test_options_of_a_wrong_kind_are_named(drafter, options, match):
    with pytest.raises(ValueError, match=match):
        drafter.with_options(**options)

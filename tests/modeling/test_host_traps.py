"""Traps of the host's assisted loop that change the text without an error unless the drafter works around them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_drelay import DRelayModel


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, eos_token_id=2, pad_token_id=0, initializer_range=0.3
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def make_drafter(target, **overrides) -> DRelayModel:
    torch.manual_seed(1)
    fields = {"num_hidden_layers": 1, "block_size": 4, "pool_size": 8, "selector_hidden_size": 16, "pair_rank": 4}
    return DRelayModel(DRelayConfig.for_target(target.config, **(fields | overrides))).eval()


class CallCounter(LogitsProcessor):
    """Favors a token that depends on the number of calls so far, which only plain decoding gets right."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        scores = scores.clone()
        scores[:, 3 + 7 * self.num_calls % 60] += 100.0
        return scores


@pytest.mark.parametrize("padding", [0, 3], ids=["unpadded", "left-padded"])
def test_text_equals_plain_decoding_with_embeddings_alone(target, padding):
    """The host cuts the mask to the length of the ids, which are empty here."""
    ids = torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    call = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    embeds = target.get_input_embeddings()(ids)
    plain = target.generate(inputs_embeds=embeds, **call)
    view = make_drafter(target).with_options(loop_gate=float("-inf"), decoding_loop="host")
    assert torch.equal(target.generate(inputs_embeds=embeds, assistant_model=view, **call), plain)
    assert view.statistics.num_rounds > 0


def test_stateful_processor_is_called_as_in_plain_decoding(target):
    ids = torch.tensor([[5, 6, 7]])
    call = {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(ids, logits_processor=LogitsProcessorList([CallCounter()]), **call)
    view = make_drafter(target).with_options(decoding_loop="host")
    ours = target.generate(ids, logits_processor=LogitsProcessorList([CallCounter()]), assistant_model=view, **call)
    assert torch.equal(ours, plain)
    assert view.statistics.num_rounds == 0  # a draft would have been a call too many


def test_prompt_that_ends_with_an_end_token_is_continued(target):
    """Before transformers 5.18 the host asked the criteria about the prompt and returned it bare."""
    ids = torch.tensor([[5, 6, 2]])
    call = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": 2}
    plain = target.generate(ids, **call)
    assert plain.shape[1] > ids.shape[1]
    view = make_drafter(target).with_options(decoding_loop="host")
    assert torch.equal(target.generate(ids, assistant_model=view, **call), plain)


def test_new_drafter_with_a_shortlist_drafts(target):
    """Both parts start with the same list of tokens."""
    view = make_drafter(target, draft_vocab_size=40).with_options()
    ids = torch.tensor([[5, 6, 7]])
    call = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=view, **call), target.generate(ids, **call))
    assert view.statistics.num_rounds > 0

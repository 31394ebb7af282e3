"""Model inputs that grow with the text reach every forward as in plain decoding, or are refused by name."""

import pytest
import torch
from transformers import LlamaForCausalLM


ALWAYS = float("-inf")
TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class TypedLlama(LlamaForCausalLM):
    """A target whose text depends on the kinds of its tokens."""

    def forward(
        self, input_ids=None, token_type_ids=None, mm_token_type_ids=None, moe_mm_token_type_ids=None, **kwargs
    ):
        embeds = self.get_input_embeddings()(input_ids)
        for weight, types in enumerate((token_type_ids, mm_token_type_ids, moe_mm_token_type_ids), start=1):
            if types is not None:
                assert types.shape == input_ids.shape
                embeds = embeds + weight * types[..., None] * torch.linspace(-1, 1, embeds.shape[-1])
        return super().forward(inputs_embeds=embeds, **kwargs)


class SuffixLlama(TypedLlama):
    """Generated tokens are of kind 1 whatever the prompt ends with, as in PaliGemma."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=1):
        types = model_kwargs.get("token_type_ids")
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder, num_new_tokens
        )
        if types is not None:
            new = types.new_ones((len(types), num_new_tokens))
            model_kwargs["token_type_ids"] = torch.cat([types, new], dim=-1)
        return model_kwargs


class CrossLlama(LlamaForCausalLM):
    """An input that grows by a rule of its own, as in Mllama."""

    def forward(self, input_ids=None, cross_attention_mask=None, **kwargs):
        return super().forward(input_ids, **kwargs)

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, is_encoder_decoder, **kwargs):
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder, **kwargs)
        if (mask := model_kwargs.get("cross_attention_mask")) is not None:
            model_kwargs["cross_attention_mask"] = torch.cat([mask, mask[:, -1:]], dim=1)
        return model_kwargs


def built(toolbox, kind):
    target = kind(toolbox.target("llama").config).eval()
    target.load_state_dict(toolbox.target("llama").state_dict())
    target.generation_config.eos_token_id = None
    return target


def batch(toolbox):
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), toolbox.prompt(5)], dim=1)
    ids = torch.cat([ids, toolbox.prompt(9, seed=1)])
    return ids, {"attention_mask": (ids != 0).long(), "pad_token_id": 0, "max_new_tokens": 20, "do_sample": False}


@pytest.mark.parametrize("kind", [TypedLlama, SuffixLlama], ids=["repeated", "suffix"])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("chunk", [None, 4], ids=["whole", "chunked_prefill"])
def test_kinds_of_tokens_are_those_of_plain_decoding(toolbox, monkeypatch, kind, name, chunk):
    if name != "token_type_ids" and toolbox.version < (5, 24):
        pytest.skip("plain decoding of older versions leaves this input to the target")
    target, (ids, kwargs) = built(toolbox, kind), batch(toolbox)
    plain = target.generate(ids, **kwargs)
    # The last token of one row is of another kind than that of the other.
    kwargs |= {name: torch.tensor([[0] * 4 + [1, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0, 0, 1, 1]])}
    # Plain decoding of older versions gives every chunk the kinds of the prompt's end; the whole prompt is the oracle.
    expected = target.generate(ids, **kwargs, prefill_chunk_size=chunk if toolbox.version >= (5, 24) else None)
    kwargs |= {"prefill_chunk_size": chunk}
    assert not torch.equal(expected, plain), "the kinds must matter"
    texts = [row[row.ne(0).int().argmax() :].tolist() for row in expected]
    view = toolbox.scripted_batch(monkeypatch, target, texts).with_options(loop_gate=ALWAYS)
    assert torch.equal(target.generate(ids, assistant_model=view, **kwargs), expected)
    assert view.statistics.acceptance_length > 1


def test_input_that_grows_by_a_rule_of_its_own_is_refused_by_name(toolbox):
    target, (ids, kwargs) = built(toolbox, CrossLlama), batch(toolbox)
    view = toolbox.drafter(target).with_options()
    target.generate(ids, assistant_model=view, **kwargs)  # without it there is nothing to refuse
    with pytest.raises(ValueError, match="`cross_attention_mask` is an input of CrossLlama that changes with every"):
        target.generate(ids, assistant_model=view, cross_attention_mask=torch.ones(2, 9, 1), **kwargs)

"""What a drafter borrows of a target: embedding, head, hidden states; and the check that both fit."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.modeling.target_adapter import HeadRows, TargetAdapter


SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def make_target(config_class=LlamaConfig, model_class=LlamaForCausalLM, **fields):
    torch.manual_seed(0)
    return model_class(config_class(**SIZES | fields)).eval()


def make_drelay(**fields) -> DRelayModel:
    config = DRelayConfig.for_target(
        LlamaConfig(**SIZES),
        **{
            "num_hidden_layers": 1,
            "pool_size": 4,
            "block_size": 4,
            "selector_hidden_size": 8,
            "selector_num_heads": 2,
            "pair_rank": 2,
            "draft_vocab_size": 6,
            "eos_token_id": 2,
        }
        | fields,
    )
    torch.manual_seed(0)
    drelay = DRelayModel(config).eval()
    if config.draft_vocab_size:
        drelay.set_shortlist(torch.tensor([2, 5, 9, 17, 30, 39]))
    return drelay


SHORTLIST = torch.tensor([2, 5, 9, 17, 30, 39])


class TestLogits:
    def test_logits_of_the_whole_vocabulary_are_the_heads(self):
        target, hidden = make_target(), torch.randn(2, 3, 24)
        found = TargetAdapter(target, HeadRows()).logits(hidden)
        torch.testing.assert_close(found, target.lm_head(hidden))

    @pytest.mark.parametrize("bias", [False, True])
    def test_shortlist_logits_are_the_heads_restricted(self, bias):
        target, hidden = make_target(), torch.randn(2, 3, 24)
        target.lm_head = torch.nn.Linear(24, 40, bias=bias)
        found = TargetAdapter(target, HeadRows()).logits(hidden, SHORTLIST)
        torch.testing.assert_close(found, target.lm_head(hidden)[..., SHORTLIST])

    @pytest.mark.parametrize("token_ids", [None, SHORTLIST], ids=["whole", "shortlist"])
    @pytest.mark.parametrize(
        ("config_class", "model_class", "fields"),
        [
            (LlamaConfig, LlamaForCausalLM, {}),
            (Gemma2Config, Gemma2ForCausalLM, {"final_logit_softcapping": 0.4, "head_dim": 6}),
            (Gemma3TextConfig, Gemma3ForCausalLM, {"final_logit_softcapping": 0.4, "head_dim": 6}),
            (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}),
            (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 8.0, "embedding_multiplier": 3.0}),
        ],
        ids=["llama", "gemma2", "gemma3", "cohere", "granite"],
    )
    def test_logits_of_the_targets_own_states_are_the_targets(self, config_class, model_class, fields, token_ids):
        """Scales and soft-caps are part of a target's forward and not of its head."""
        target = make_target(config_class, model_class, **fields)
        with torch.no_grad():
            output = target(torch.randint(40, (1, 7)), output_hidden_states=True)
            found = TargetAdapter(target, HeadRows()).logits(output.hidden_states[-1], token_ids)
        expected = output.logits if token_ids is None else output.logits[..., token_ids]
        torch.testing.assert_close(found, expected)

    def test_logits_are_single_precision_when_the_target_is_not(self):
        target = make_target().to(torch.bfloat16)
        for token_ids in (None, SHORTLIST):
            logits = TargetAdapter(target, HeadRows()).logits(torch.randn(1, 2, 24), token_ids)
            assert logits.dtype == torch.float32

    def test_gradient_reaches_the_hidden_states_through_the_shortlist(self):
        hidden = torch.randn(1, 2, 24, requires_grad=True)
        TargetAdapter(make_target(), HeadRows()).logits(hidden, SHORTLIST).sum().backward()
        assert hidden.grad.abs().sum() > 0

    def test_embedding_is_the_targets_own_module(self):
        """Gemma scales its embeddings inside the module, so the table alone would be wrong."""
        target = make_target(Gemma3TextConfig, Gemma3ForCausalLM, head_dim=6)
        ids = torch.tensor([[3, 4]])
        found = TargetAdapter(target, HeadRows()).embed(ids)
        torch.testing.assert_close(found, target.model.embed_tokens(ids))
        assert not torch.allclose(found, target.model.embed_tokens.weight[ids])


class Doubled(torch.nn.Module):
    """A head without a plain weight, as a quantised or wrapped one."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.widths = linear, []

    def forward(self, hidden_states):
        logits = 2 * self.linear(hidden_states)
        self.widths.append(logits.shape[-1])
        return logits


class SubclassedLinear(torch.nn.Linear):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class TestWrappedHead:
    def test_head_without_a_plain_weight_is_called_whole(self):
        target, hidden = make_target(), torch.randn(1, 2, 24)
        plain, target.lm_head = target.lm_head, Doubled(target.lm_head)
        found = TargetAdapter(target, HeadRows()).logits(hidden, SHORTLIST)
        assert target.lm_head.widths == [40]
        torch.testing.assert_close(found, 2 * plain(hidden)[..., SHORTLIST])

    def test_subclass_of_a_linear_layer_is_called_whole(self):
        """Adapters subclass the layer and add to what its weight alone would give."""
        target, hidden = make_target(), torch.randn(1, 2, 24)
        target.lm_head = SubclassedLinear(24, 40, bias=False)
        found = TargetAdapter(target, HeadRows()).logits(hidden, SHORTLIST)
        torch.testing.assert_close(found, target.lm_head(hidden)[..., SHORTLIST])


class TestHeadRows:
    @staticmethod
    def _check_fresh(rows, head, token_ids):
        weight, bias = rows.get(head, token_ids)
        assert torch.equal(weight, head.weight[token_ids])
        assert bias is None if head.bias is None else torch.equal(bias, head.bias[token_ids])

    def test_rows_are_gathered_once(self):
        rows, head = HeadRows(), torch.nn.Linear(24, 40)
        assert rows.get(head, SHORTLIST)[0] is rows.get(head, SHORTLIST)[0]

    def test_rows_are_fresh_after_the_weight_was_written_to(self):
        rows, head = HeadRows(), torch.nn.Linear(24, 40)
        rows.get(head, SHORTLIST)
        with torch.no_grad():
            head.weight.mul_(2)
        self._check_fresh(rows, head, SHORTLIST)

    def test_rows_are_fresh_after_the_weight_was_replaced(self):
        rows, head = HeadRows(), torch.nn.Linear(24, 40)
        rows.get(head, SHORTLIST)
        head.weight = torch.nn.Parameter(torch.randn(40, 24))
        self._check_fresh(rows, head, SHORTLIST)

    def test_rows_are_fresh_after_the_bias_was_written_to(self):
        rows, head = HeadRows(), torch.nn.Linear(24, 40)
        rows.get(head, SHORTLIST)
        with torch.no_grad():
            head.bias.add_(1)
        self._check_fresh(rows, head, SHORTLIST)

    def test_rows_are_fresh_after_a_change_of_dtype(self):
        rows, head = HeadRows(), torch.nn.Linear(24, 40)
        rows.get(head, SHORTLIST)
        head.to(torch.bfloat16)
        self._check_fresh(rows, head, SHORTLIST)

    def test_rows_are_fresh_after_the_shortlist_was_written_to(self):
        """`set_shortlist` and `load_state_dict` write into the same buffer."""
        rows, head, shortlist = HeadRows(), torch.nn.Linear(24, 40), SHORTLIST.clone()
        rows.get(head, shortlist)
        shortlist.copy_(torch.tensor([1, 2, 3, 4, 5, 6]))
        self._check_fresh(rows, head, shortlist)

    def test_each_head_has_its_own_rows(self):
        rows, heads = HeadRows(), [torch.nn.Linear(24, 40) for _ in range(2)]
        for head in heads:
            self._check_fresh(rows, head, SHORTLIST)

    def test_new_head_of_a_target_is_used_after_the_old_one_was_replaced(self):
        target, rows, hidden = make_target(), HeadRows(), torch.randn(1, 2, 24)
        TargetAdapter(target, rows).logits(hidden, SHORTLIST)
        target.set_output_embeddings(torch.nn.Linear(24, 40, bias=False))
        found = TargetAdapter(target, rows).logits(hidden, SHORTLIST)
        torch.testing.assert_close(found, target.lm_head(hidden)[..., SHORTLIST])

    def test_rows_are_forgotten_with_their_head(self):
        rows, head = HeadRows(), torch.nn.Linear(24, 40)
        kept = weakref.ref(rows.get(head, SHORTLIST)[0])
        del head
        gc.collect()
        assert kept() is None

    def test_head_is_not_kept_alive(self):
        rows, head = HeadRows(), torch.nn.Linear(24, 40)
        rows.get(head, SHORTLIST)
        alive = weakref.ref(head)
        del head
        gc.collect()
        assert alive() is None

    def test_weights_made_in_inference_mode_are_accepted(self):
        """Such tensors count no versions."""
        with torch.inference_mode():
            rows, head = HeadRows(), torch.nn.Linear(24, 40)
            self._check_fresh(rows, head, SHORTLIST)

    def test_rows_gathered_in_inference_mode_serve_training_later(self):
        """Autograd refuses to save tensors made in inference mode."""
        rows, head, hidden = HeadRows(), torch.nn.Linear(24, 40), torch.randn(2, 24, requires_grad=True)
        with torch.inference_mode():
            rows.get(head, SHORTLIST)
        torch.nn.functional.linear(hidden, *rows.get(head, SHORTLIST)).sum().backward()
        assert hidden.grad.abs().sum() > 0


class TestDRelayModelHoldsNothingOfTheTarget:
    @staticmethod
    def _used_drelay():
        drelay, target = make_drelay(), make_target()
        drelay.adapter(target).logits(torch.randn(1, 2, 24), drelay.drafter.draft_token_ids)
        return drelay, target

    def test_state_has_no_tensor_of_the_target(self):
        drelay, _ = self._used_drelay()
        assert set(drelay.state_dict()) == set(make_drelay().state_dict())
        assert not [name for name, _ in drelay.named_modules() if "head" in name or "target" in name]

    def test_copy_works_after_use(self):
        drelay, target = self._used_drelay()
        twin = copy.deepcopy(drelay)
        assert twin.default_view.model is twin
        hidden = torch.randn(1, 2, 24)
        expected = drelay.adapter(target).logits(hidden, SHORTLIST)
        torch.testing.assert_close(twin.adapter(target).logits(hidden, SHORTLIST), expected)

    def test_copy_holds_no_rows(self):
        drelay, target = self._used_drelay()
        size = len(pickle.dumps(drelay))
        target.set_output_embeddings(torch.nn.Linear(24, 4000, bias=False))
        drelay.adapter(target).logits(torch.randn(1, 2, 24), SHORTLIST)
        assert len(pickle.dumps(drelay)) == size

    def test_pickle_works_after_use(self):
        drelay, _ = self._used_drelay()
        loaded = pickle.loads(pickle.dumps(drelay))
        for name, tensor in drelay.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)
        assert loaded.default_view.model is loaded

    def test_target_is_freed_when_nobody_else_holds_it(self):
        drelay, target = self._used_drelay()
        alive = weakref.ref(target)
        del target
        gc.collect()
        assert alive() is None
        assert drelay.drafter is not None


class TestTapped:
    def test_layer_is_the_entry_behind_it_and_order_is_kept(self):
        """Entry 0 of the tuple is the embedding output, so that layer -1 is the embedding."""
        target = make_target()
        with torch.no_grad():
            states = target(torch.tensor([[3, 4, 5]]), output_hidden_states=True).hidden_states
            embeds = target.model.embed_tokens(torch.tensor([[3, 4, 5]]))
        found = TargetAdapter(target, HeadRows()).tapped(states, [2, -1, 0])
        assert torch.equal(found, torch.cat([states[3], embeds, states[1]], dim=-1))

    def test_last_layer_is_tapped_behind_the_final_norm(self):
        target = make_target()
        with torch.no_grad():
            output = target(torch.tensor([[3, 4, 5]]), output_hidden_states=True)
            found = TargetAdapter(target, HeadRows()).tapped(output.hidden_states, [2])
            torch.testing.assert_close(target.lm_head(found), output.logits)

    def test_missing_states_raise_and_name_the_argument(self):
        states = (torch.randn(1, 2, 24), None, torch.randn(1, 2, 24), torch.randn(1, 2, 24))
        with pytest.raises(RuntimeError, match="LlamaForCausalLM did not return .*`target_layer_ids` .*0, 1.*honour"):
            TargetAdapter(make_target(), HeadRows()).tapped(states, [0, 1])


class TestCheck:
    def test_fitting_target_passes(self):
        assert make_drelay().adapter(make_target()).config.vocab_size == 40

    @pytest.mark.parametrize(
        ("fields", "match"),
        [
            ({"vocab_size": 50}, "`assistant_model` has `vocab_size` 40, but the target LlamaForCausalLM has 50"),
            ({"hidden_size": 32}, "`assistant_model` has `hidden_size` 24, but the target LlamaForCausalLM has 32"),
            ({"num_hidden_layers": 1}, "`target_layer_ids` .* need a target of more than 1 layers, .* has 1"),
        ],
    )
    def test_target_of_another_shape_raises_and_names_the_field(self, fields, match):
        with pytest.raises(ValueError, match=match):
            make_drelay().adapter(make_target(**fields))

    def test_encoder_decoder_raises(self):
        target = T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=24, d_ff=8, num_layers=1, num_heads=2))
        with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder model"):
            make_drelay().adapter(target)

    def test_target_without_a_head_raises(self):
        sizes = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        with pytest.raises(ValueError, match="embedding and an LM head; BertModel lacks one"):
            make_drelay().adapter(BertModel(BertConfig(**sizes, intermediate_size=8)))

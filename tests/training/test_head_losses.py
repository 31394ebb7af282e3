"""Losses of the published drafters, against the whole vocabulary and against drafting itself."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_base import Pool
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.training.head_losses import (
    base_anchor_weight,
    contiguous,
    domino_loss,
    dspark_loss,
    eagle3_loss,
    pool_cross_entropy,
    restricted_l1,
    slot_decay,
    unroll_chain,
)


N, K, V = 3, 4, 12


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestSlotLosses:
    def setup_method(self):
        self.logits, self.target = noise(0, N, K, V), noise(1, N, K, V)
        self.labels = torch.randint(0, V, (N, K), generator=torch.Generator().manual_seed(2))
        self.weights = slot_decay(K, 4.0).expand(N, K)

    def pool(self, size):
        pool = Pool.from_logits(self.logits, size)
        return pool, self.target.log_softmax(-1).gather(2, pool.ids)

    def test_whole_pool_gives_the_losses_over_the_vocabulary(self):
        pool, target = self.pool(V)
        losses, covered = pool_cross_entropy(pool.log_probs, pool.ids, self.labels)
        expected = F.cross_entropy(self.logits.flatten(0, 1), self.labels.flatten(), reduction="none").view(N, K)
        assert covered.all()
        torch.testing.assert_close(losses, expected)
        distance = (self.logits.softmax(-1) - self.target.softmax(-1)).abs().sum(-1)
        torch.testing.assert_close(restricted_l1(pool.log_probs, target), distance)

    def test_l1_of_a_pool_counts_what_lies_outside(self):
        pool, target = self.pool(3)
        q = torch.zeros(N, K, V).scatter(2, pool.ids, pool.log_probs.softmax(-1))
        distance = (q - self.target.softmax(-1)).abs().sum(-1)
        torch.testing.assert_close(restricted_l1(pool.log_probs, target), distance)

    def test_domino_moves_from_the_base_to_the_correction(self):
        pool, _ = self.pool(3)
        base = noise(3, N, K).abs()
        args = (pool.log_probs, pool.ids, base, self.labels, self.weights)
        only_base, terms = domino_loss(*args, base_weight=1.0)
        only_corrected, _ = domino_loss(*args, base_weight=0.0)
        torch.testing.assert_close(only_base, terms["base"])
        torch.testing.assert_close(only_corrected, terms["corrected"])
        torch.testing.assert_close(domino_loss(*args, base_weight=0.25)[0], 0.75 * only_corrected + 0.25 * only_base)

    def test_curriculum_falls_linearly_to_zero(self):
        assert [base_anchor_weight(p, 0.8, 0.5) for p in (0.0, 0.25, 0.5, 1.0)] == [0.8, 0.4, 0.0, 0.0]
        with pytest.raises(ValueError, match="`progress` 1.5"):
            base_anchor_weight(1.5)

    def test_dspark_adds_its_three_parts(self):
        pool, target = self.pool(5)
        scores = pool.log_probs.clone().requires_grad_()
        confidence = noise(4, N, K).requires_grad_()
        loss, terms = dspark_loss(scores, pool.ids, target, self.labels, self.weights, confidence)
        torch.testing.assert_close(loss, 0.1 * terms["ce"] + 0.9 * terms["l1"] + terms["confidence"])
        accepted = torch.minimum(
            torch.zeros(N, K, V).scatter(2, pool.ids, scores.softmax(-1)), self.target.softmax(-1)
        ).sum(-1)
        bce = F.binary_cross_entropy_with_logits(confidence, accepted.detach(), reduction="none")
        torch.testing.assert_close(terms["confidence"], ((bce * self.weights).sum() / self.weights.sum()).detach())
        only_confidence = dspark_loss(
            scores, pool.ids, target, self.labels, self.weights, confidence, ce_weight=0, l1_weight=0
        )[0]
        gradient = torch.autograd.grad(only_confidence, [scores, confidence], allow_unused=True)
        assert gradient[0] is None or not gradient[0].any()
        assert gradient[1].any()

    def test_slots_behind_an_invalid_one_are_dropped(self):
        valid = torch.tensor([[True, True, False, True], [True, True, True, True]])
        assert contiguous(valid).tolist() == [[True, True, False, False], [True] * 4]


class TestEagle3:
    @pytest.fixture
    def target(self):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            initializer_range=0.3,
        )
        return LlamaForCausalLM(config).eval()

    def build(self, target, **fields):
        torch.manual_seed(1)
        fields = {"backbone": "eagle3", "layout": "shifted", "block_size": 3, "num_hidden_layers": 1} | fields
        fields |= {"use_mask_embedding": False, "target_layer_ids": [0, 1], "pool_size": 4, "use_own_head": True}
        return DRelayModel(DRelayConfig.for_target(target.config, initializer_range=0.3, **fields))

    @torch.no_grad()
    def test_a_step_is_what_a_chain_computes_after_the_same_tokens(self, target):
        model = self.build(target).eval()
        adapter = model.adapter(target)
        ids = torch.randint(0, 40, (1, 12), generator=torch.Generator().manual_seed(0))
        states = adapter.tapped(target(ids, output_hidden_states=True).hidden_states, [0, 1])
        unrolled = unroll_chain(model.drafter, states, ids, adapter, num_steps=3)
        for anchor in (1, 4, 7):
            session = model.new_session(adapter)
            session.extend(states[:, :anchor])
            state = model.drafter._first_state(session, ids[:, anchor : anchor + 1], ids[:, : anchor + 1])
            for step in range(3):
                torch.testing.assert_close(unrolled[step][:, anchor - 1], state[:, 0], rtol=1e-4, atol=1e-5)
                state = model.drafter._next_state(session, state, ids[:, anchor + 1 + step][:, None])

    @pytest.mark.parametrize("draft_vocab_size", [None, 25])
    def test_training_lowers_the_loss(self, target, draft_vocab_size):
        model = self.build(target, draft_vocab_size=draft_vocab_size).train()
        adapter = model.adapter(target)
        ids = torch.randint(0, 40, (2, 14), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            output = target(ids, output_hidden_states=True)
        states = adapter.tapped(output.hidden_states, [0, 1])
        valid = torch.arange(14).expand(2, -1) >= 3
        optimizer = torch.optim.Adam(model.drafter.parameters(), lr=3e-3)
        losses = []
        for _ in range(25):
            loss, terms = eagle3_loss(model.drafter, states, output.logits, ids, valid, adapter, num_steps=3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert set(terms) == {"step_0", "step_1", "step_2"}
        assert losses[-1] < losses[0] - 0.3

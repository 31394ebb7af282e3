"""Every head and backbone in the same trainer, and the losses that their papers state."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_base import Pool
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.training.config import DRelayTrainingConfig
from hf_drelay.training.data import ResponseExample
from hf_drelay.training.features import SoftTargets
from hf_drelay.training.objective import mass_in_pool, restricted_kl, restricted_l1
from hf_drelay.training.trainer import DRelayTrainer
from hf_drelay.training.unroll import ChainUnroll


V = 40
SIZES = {"layout": "shifted", "block_size": 3, "num_hidden_layers": 1, "target_layer_ids": [0, 2], "pool_size": 6}
RELAY = {"selector_hidden_size": 8, "selector_num_heads": 2, "selector_num_layers": 1, "pair_rank": 2}
EAGLE3 = {"backbone": "eagle3", "use_mask_embedding": False}
# Fields of the drafter and arguments of the run, by name: the published recipe where there is one.
DRAFTERS: dict[str, tuple[dict, dict]] = {
    "relay": ({"head": "relay", **RELAY}, {}),
    "relay, soft targets": ({"head": "relay", **RELAY}, {"head_kl_share": 0.5}),
    "independent": ({"head": "independent"}, {}),
    "independent, D-PACE": ({"head": "independent"}, {"slot_weight": "dpace"}),
    "bilinear": ({"head": "bilinear", "head_rank": 4, "conv_kernel_size": 2}, {}),
    "recurrent": ({"head": "recurrent", "head_rank": 4, "gru_hidden_dim": 8}, {"base_anchor_end": 1.0}),
    "markov": ({"head": "markov", "head_rank": 4}, {"head_l1_share": 0.9}),
    "markov, gated, confidence": (
        {"head": "markov", "head_rank": 4, "markov_head_type": "gated", "use_confidence_head": True},
        {"head_l1_share": 0.9},
    ),
    "markov, rnn": ({"head": "markov", "head_rank": 4, "markov_head_type": "rnn"}, {"head_l1_share": 0.9}),
    "eagle3": ({**EAGLE3, "use_own_head": True}, {"base_loss": "kl", "soft_weight": 1.0}),
    "eagle3, reduced": ({**EAGLE3, "use_own_head": True, "draft_vocab_size": 25}, {"base_loss": "kl"}),
}


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def build(target, **fields) -> DRelayModel:
    torch.manual_seed(1)
    return DRelayModel(DRelayConfig.for_target(target.config, initializer_range=0.3, **SIZES | fields))


def make_trainer(target, folder, drelay, **options) -> DRelayTrainer:
    arguments = {
        "max_steps": 30,
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-2,
        "num_anchors": 4,
        "num_selector_anchors": 4,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "least_acceptance_length": 0.0,
    }
    config = DRelayTrainingConfig(output_dir=str(folder), **arguments | options)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(V, (10 + i,), generator=generator) for i in range(3)]
    examples = [ResponseExample(row, 3, f"prompt {i}", "greedy") for i, row in enumerate(rows)]
    return DRelayTrainer(drelay, target, config, examples, examples[:1])


class TestTrainer:
    @pytest.mark.parametrize("name", DRAFTERS)
    @pytest.mark.parametrize("loop", [False, True], ids=["", "loop-aware"])
    def test_every_weight_learns_and_the_loss_falls(self, target, tmp_path, name, loop):
        fields, run = DRAFTERS[name]
        if loop:
            run = run | {"loop_start": 0.0, "loop_depth": 2, "loop_tokens": 2}
        if "base_anchor_end" in run:  # under a moving weight the sum says nothing
            run = run | {"max_steps": 60}
        drelay = build(target, **fields)
        before = {name: weight.detach().clone() for name, weight in drelay.named_parameters()}
        trainer = make_trainer(target, tmp_path, drelay, **run)
        trainer.train()
        same = {name for name, weight in drelay.named_parameters() if torch.equal(weight, before[name])}
        assert same <= ({"selector.repaired_proj.weight"} if not loop else set())
        logs = [row for row in trainer.state.log_history if "loss" in row]
        for term in ("base", "repair", "confidence"):
            if term in logs[0]:
                assert logs[-1][term] < logs[0][term] - 0.02, term
        assert ("repair" in logs[-1]) == (drelay.selector is not None)
        assert ("base_stage2" in logs[-1]) == loop

    def test_domino_moves_from_the_base_to_the_correction(self, target, tmp_path):
        drelay = build(target, head="recurrent", head_rank=4, gru_hidden_dim=8)
        trainer = make_trainer(target, tmp_path, drelay, base_anchor_end=0.5, repair_weight=2.0, max_steps=100)
        seen = []
        for step in (0, 25, 50, 100):
            trainer.state.global_step, trainer.state.max_steps = step, 100
            trainer._schedule()
            seen.append((trainer.objective.config.base_weight, trainer.objective.config.repair_weight))
        assert seen == [(1.0, 0.0), (0.5, 1.0), (0.0, 2.0), (0.0, 2.0)]

    def test_handing_over_to_no_head_is_refused(self, target, tmp_path):
        with pytest.raises(ValueError, match="`base_anchor_end` 1.0"):
            make_trainer(target, tmp_path, build(target, head="independent"), base_anchor_end=1.0)

    def test_start_from_the_target_gives_eagle3_its_last_layer(self, target):
        """Fed with the state before that layer, the chain's first step then is the target's own last layer."""
        drelay = build(target, **EAGLE3, use_own_head=True)
        drelay.drafter.initialize_from_target(target)
        ids = torch.randint(V, (1, 9), generator=torch.Generator().manual_seed(0))
        adapter = drelay.adapter(target)
        with torch.no_grad():
            output = target(ids, output_hidden_states=True)
            states = adapter.tapped(output.hidden_states, [0, 2])
            features = drelay.drafter.fuse(states)
            unroll = ChainUnroll(drelay, adapter, features, ids, torch.arange(1, 9)[None])
            logits = drelay.drafter.logits(unroll.draft()[:, :, 0], adapter)
        torch.testing.assert_close(logits, output.logits[:, :-1], rtol=1e-4, atol=1e-4)


class TestDistance:
    def setup_method(self):
        self.logits, self.target = noise(0, 3, 4, V), noise(1, 3, 4, V).log_softmax(-1)
        self.pool = Pool.from_logits(self.logits, 5)
        self.log_q = self.pool.log_probs.log_softmax(-1)
        self.q = torch.zeros(3, 4, V).scatter(2, self.pool.ids, self.log_q.exp())

    def teacher(self, size):
        top = self.target.topk(size, dim=-1)
        return SoftTargets(top.indices, top.values)

    def test_whole_target_gives_the_distance_over_the_vocabulary(self):
        distance = restricted_l1(self.log_q, mass_in_pool(self.pool.ids, self.teacher(V)))
        torch.testing.assert_close(distance, (self.q - self.target.exp()).abs().sum(-1))

    def test_unknown_mass_counts_as_outside_the_pool(self):
        known = torch.zeros_like(self.q).scatter(2, self.teacher(6).ids, self.teacher(6).log_probs.exp())
        inside = known.gather(2, self.pool.ids)
        distance = (self.log_q.exp() - inside).abs().sum(-1) + 1 - inside.sum(-1)
        p = mass_in_pool(self.pool.ids, self.teacher(6))
        torch.testing.assert_close(p, inside)
        torch.testing.assert_close(restricted_l1(self.log_q, p), distance)

    def test_divergence_is_the_sum_over_the_pool_and_least_at_the_law_of_the_target(self):
        p = mass_in_pool(self.pool.ids, self.teacher(V))
        divergence = restricted_kl(self.log_q, p)
        expected = (p * (p.log() - self.log_q)).sum(-1)
        torch.testing.assert_close(divergence, expected)
        share = p / p.sum(-1, keepdim=True)
        assert (restricted_kl(share.log(), p) < divergence).all()
        assert restricted_kl(self.log_q, torch.zeros_like(p)).eq(0).all()  # nothing known of the pool


def test_confidence_learns_the_chance_of_acceptance(target, tmp_path):
    """Its label is `1 - D / 2` and does not pull at the head itself."""
    fields = {"head": "markov", "head_rank": 4, "use_confidence_head": True}
    drelay = build(target, **fields)
    trainer = make_trainer(target, tmp_path, drelay, confidence_weight=1.0, repair_weight=1.0)
    objective = trainer.objective
    assert objective.needs_soft_targets
    row = trainer.train_dataset[0]
    states, soft = trainer.features.get([row["key"]], row["input_ids"][None], [len(row["input_ids"])])
    batch = {"states": states, "input_ids": row["input_ids"][None], "lengths": torch.tensor([len(row["input_ids"])])}
    batch |= {"anchors": torch.tensor([[3, 5]]), "soft_targets": soft}

    def gradient(weight):
        objective.config.confidence_weight = weight
        drelay.zero_grad()
        loss, terms = objective(**batch)
        loss.backward()
        own = drelay.selector.confidence_head["proj"].weight.grad
        return drelay.selector.markov_w2.weight.grad.clone(), own, terms

    (without, _, _), (with_it, own, terms) = gradient(0.0), gradient(1.0)
    torch.testing.assert_close(with_it, without)
    assert own.abs().max() > 0
    with torch.no_grad():  # an untrained confidence is 1/2 or near it, whatever the label
        bias = drelay.selector.confidence_head["proj"].bias
        drelay.selector.confidence_head["proj"].weight.zero_()
        bias.zero_()
        torch.testing.assert_close(objective(**batch)[1]["confidence"], F.softplus(torch.tensor(0.0)))
    assert terms["confidence"] > 0


class TestChainUnroll:
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @torch.no_grad()
    def test_a_step_is_what_a_chain_computes_after_the_same_tokens(self, target, implementation):
        model = build(target, **EAGLE3, use_own_head=True).eval()
        model.set_attn_implementation(implementation)
        adapter = model.adapter(target)
        ids = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(0))
        states = adapter.tapped(target(ids, output_hidden_states=True).hidden_states, [0, 2])
        anchors = torch.tensor([[1, 4, 7], [2, 5, -1]])
        unroll = ChainUnroll(model, adapter, model.drafter.fuse(states), ids, anchors, stage_tokens=2)
        first = unroll.draft()
        unroll.go_on(first)
        chain = torch.cat([first[:, :, :2], unroll.draft()], dim=2)  # two tokens of a stage, and the next stage
        assert unroll.offset == 2
        for row, column in (anchors > 0).nonzero().tolist():
            anchor = int(anchors[row, column])
            own = ids[row : row + 1]
            session = model.new_session(adapter)
            session.extend(states[row : row + 1, :anchor])
            state = model.drafter.first_state(session, own[:, anchor : anchor + 1], own[:, : anchor + 1])
            for step in range(chain.shape[2]):
                torch.testing.assert_close(chain[row, column, step], state[0, 0], rtol=1e-4, atol=1e-5)
                if anchor + 1 + step < own.shape[1]:
                    state = model.drafter.next_state(session, state, own[:, anchor + 1 + step][:, None])
                else:
                    break

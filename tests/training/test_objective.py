"""The joint loss: training sees what drafting sees, and every term equals the sum written out by hand."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.draft_session import DraftSession
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.modeling.proposal import Proposal
from hf_drelay.training.blocks import arrange_blocks, sample_anchors, training_masks
from hf_drelay.training.features import SoftTargets
from hf_drelay.training.objective import JointObjective, ObjectiveConfig, contribution_weights


V, H, C = 40, 24, 5
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def make_drelay(target, **fields) -> DRelayModel:
    """Random weights everywhere, so that every part of the loss has something to say."""
    sizes = {
        "num_hidden_layers": 2,
        "target_layer_ids": [0, 2],
        "block_size": 4,
        "pool_size": C,
        "selector_hidden_size": 8,
        "selector_num_heads": 2,
        "pair_rank": 3,
        "history_window": 4,
    }
    torch.manual_seed(0)
    drelay = DRelayModel(DRelayConfig.for_target(target.config, **sizes | fields)).eval()
    with torch.no_grad():
        for name, weight in drelay.named_parameters():
            weight.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    if drelay.config.draft_vocab_size:
        drelay.set_shortlist(torch.arange(0, 2 * drelay.config.draft_vocab_size, 2))
    return drelay


# Two sequences of different lengths; anchors at the first and last possible place, next to each other, and padding.
LENGTHS = [17, 11]
ANCHORS = torch.tensor([[1, 6, 7, 12, 15], [3, 9, -1, -1, -1]])
NUM_BLOCKS = 7


def make_batch(target):
    """`(states, input_ids, lengths, anchors)`; what stands behind the shorter sequence is garbage."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(V, (2, 5), generator=generator).repeat(1, 4)[:, :17]  # repeats itself, for the copy path
    with torch.no_grad():
        hidden = target(input_ids, output_hidden_states=True).hidden_states
    return torch.cat([hidden[1], hidden[3]], dim=-1), input_ids, torch.tensor(LENGTHS), ANCHORS


def known_text(inputs, block: int) -> list[int]:
    """Tokens before the anchor of a block; in front of a shorter text there are none."""
    text = inputs.text_ids[block].tolist()
    return text[text.count(-1) :]


class Recorder:
    """The adapter and the selector of a model, noting what passes through them."""

    def __init__(self, drelay, target, monkeypatch):
        self.adapter = drelay.adapter(target)
        self.hidden, self.head_inputs, self.states, self.scores = [], [], [], []
        logits = self.adapter.logits
        monkeypatch.setattr(self.adapter, "logits", lambda h, ids=None: (self.hidden.append(h), logits(h, ids))[1])
        if drelay.selector is not None:
            read, score = drelay.selector.read, drelay.selector.score

            def noting_read(inputs):
                self.head_inputs.append(inputs)
                self.states.append(read(inputs))
                return self.states[-1]

            monkeypatch.setattr(drelay.selector, "read", noting_read)
            monkeypatch.setattr(drelay.selector, "score", lambda *a: self.scores.append(score(*a)) or self.scores[-1])


def run_objective(drelay, target, monkeypatch, config=None, **changes):
    """Loss, terms and what passed through adapter and selector."""
    recorder = Recorder(drelay, target, monkeypatch)
    states, input_ids, lengths, anchors = make_batch(target)
    objective = JointObjective(drelay, recorder.adapter, config or ObjectiveConfig())
    loss, terms = objective(states, input_ids, lengths, changes.pop("anchors", anchors), **changes)
    monkeypatch.undo()
    terms = {name: value.item() for name, value in terms.items()}
    return SimpleNamespace(loss=loss, terms=terms, recorder=recorder, input_ids=input_ids, objective=objective)


LAYOUTS = [
    {"layout": "shifted"},
    {"layout": "fill_in"},
    {"layout": "shifted", "block_causal": [True, False]},
    {"layout": "fill_in", "layer_types": [SLIDING, FULL], "sliding_window": 4},
    {"layout": "shifted", "layer_types": [SLIDING, SLIDING], "sliding_window": 3, "block_causal": [False, True]},
    {"layout": "shifted", "use_mask_embedding": False, "mask_token_id": 7},
    {"layout": "shifted", "draft_vocab_size": 12},
    {"layout": "shifted", "pool_size": 30},
]
every_layout = pytest.mark.parametrize(
    "fields", LAYOUTS, ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items())
)


class TestTrainingEqualsDrafting:
    @staticmethod
    def _drafting_inputs(drelay, target, states, input_ids, sequence, anchor, monkeypatch):
        """Rows and head inputs of a real draft at one anchor of one sequence, from a session of its own."""
        recorder = Recorder(drelay, target, monkeypatch)
        session = DraftSession(drelay.drafter, recorder.adapter)
        with torch.no_grad():
            session.extend(states[sequence : sequence + 1, :anchor])
            proposal = Proposal(None, V, is_sampled=False)
            proposal.input_ids = input_ids[sequence : sequence + 1, : anchor + 1]
            session.begin_stage(proposal.input_ids)
            drelay.draft(session.anchor_ids, session, proposal)
        monkeypatch.undo()
        return recorder.hidden[0], recorder.head_inputs[0]

    @every_layout
    def test_blocks_of_a_batch_equal_drafts_at_their_anchors(self, target, fields, monkeypatch):
        drelay = make_drelay(target, **fields)
        run = run_objective(drelay, target, monkeypatch)
        states, input_ids, _, _ = make_batch(target)
        hidden, trained = run.recorder.hidden[0], run.recorder.head_inputs[0]
        places = [(b, a.item()) for b in range(2) for a in ANCHORS[b] if a >= 0]
        assert len(hidden) == len(places) == NUM_BLOCKS
        for n, (sequence, anchor) in enumerate(places):
            rows, drafted = self._drafting_inputs(drelay, target, states, input_ids, sequence, anchor, monkeypatch)
            close = {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(hidden[n : n + 1], rows, **close)
            torch.testing.assert_close(trained.hidden_states[n : n + 1], drafted.hidden_states, **close)
            if drafted.anchor_hidden is not None:
                torch.testing.assert_close(trained.anchor_hidden[n : n + 1], drafted.anchor_hidden, **close)
            assert trained.anchor_ids[n] == drafted.anchor_ids[0]
            assert torch.equal(trained.pool.ids[n : n + 1], drafted.pool.ids)
            torch.testing.assert_close(trained.pool.log_probs[n : n + 1], drafted.pool.log_probs, **close)
            assert torch.equal(trained.history_mask[n : n + 1], drafted.history_mask)
            seen = drafted.history_mask[0]
            torch.testing.assert_close(trained.history[n, seen], drafted.history[0, seen], **close)
            assert (trained.offset, trained.earlier) == (drafted.offset, drafted.earlier)
            assert known_text(trained, n) == drafted.text_ids[0].tolist() == input_ids[sequence, :anchor].tolist()

    @pytest.mark.parametrize("layout", ["shifted", "fill_in"])
    def test_scores_equal_those_along_the_targets_tokens_in_drafting(self, target, layout, monkeypatch):
        drelay = make_drelay(target, layout=layout)
        run = run_objective(drelay, target, monkeypatch)
        states, input_ids, _, _ = make_batch(target)
        sequence, anchor, n = 0, 7, 2
        _, inputs = self._drafting_inputs(drelay, target, states, input_ids, sequence, anchor, monkeypatch)
        path = input_ids[sequence : sequence + 1, anchor : anchor + drelay.config.num_drafts]
        with torch.no_grad():
            expected = drelay.selector.score(drelay.selector.read(inputs), path)
        torch.testing.assert_close(run.recorder.scores[0][n : n + 1], expected, rtol=1e-4, atol=1e-5)

    def test_a_block_does_not_see_the_other_blocks(self, target, monkeypatch):
        drelay = make_drelay(target)
        together = run_objective(drelay, target, monkeypatch).recorder.hidden[0]
        alone = torch.tensor([[7], [-1]])
        hidden = run_objective(drelay, target, monkeypatch, anchors=alone).recorder.hidden[0]
        torch.testing.assert_close(hidden[0], together[2], rtol=1e-5, atol=1e-5)

    def test_mask_rows_of_padding_anchors_see_something(self):
        """A row that sees nothing would be NaN, and NaN times zero stays NaN in the gradient."""
        config = SimpleNamespace(block_size=3, layer_types=[FULL], block_causal=[True], sliding_window=None)
        (mask,) = training_masks(config, torch.tensor([[2, -1]]), context_length=5)
        assert mask.any(-1).all()


class TestAnchors:
    @settings(max_examples=30, deadline=None)
    @given(
        prompt=st.integers(1, 8), response=st.integers(2, 12), num_anchors=st.integers(1, 14), seed=st.integers(0, 99)
    )
    def test_anchors_are_distinct_response_tokens_with_a_successor(self, prompt, response, num_anchors, seed):
        length = prompt + response
        (row,) = sample_anchors([prompt], [length], num_anchors, [torch.Generator().manual_seed(seed)]).tolist()
        real = [anchor for anchor in row if anchor >= 0]
        assert len(row) == num_anchors
        assert len(real) == min(num_anchors, response - 1)
        assert real == sorted(set(real)) and row == real + [-1] * (num_anchors - len(real))
        assert all(prompt <= anchor < length - 1 for anchor in real)

    def test_every_place_is_drawn_when_there_is_room(self):
        row = sample_anchors([2], [7], 10, [torch.Generator().manual_seed(0)])
        assert row.tolist() == [[2, 3, 4, 5, -1, -1, -1, -1, -1, -1]]

    def test_anchors_depend_on_their_own_generator_alone(self):
        def draw(seeds):
            return sample_anchors(
                [2] * len(seeds), [30] * len(seeds), 4, [torch.Generator().manual_seed(s) for s in seeds]
            )

        assert torch.equal(draw([5, 6])[1], draw([9, 6])[1])
        assert not torch.equal(draw([5])[0], draw([6])[0])

    def test_tokens_are_those_behind_the_anchor(self):
        input_ids = torch.arange(20).view(2, 10)
        blocks = arrange_blocks(torch.tensor([[2, -1], [1, 3]]))
        assert (blocks.sequence.tolist(), blocks.anchor.tolist()) == ([0, 1, 1], [2, 1, 3])
        assert blocks.tokens(input_ids, 1, 3).tolist() == [[3, 4, 5], [12, 13, 14], [14, 15, 16]]
        assert blocks.tokens(input_ids, 4, 2).tolist() == [[6, 7], [15, 16], [17, 18]]
        lengths = torch.tensor([10, 6])
        assert blocks.inside(lengths, 1, 3).tolist() == [[True] * 3, [True] * 3, [True, True, False]]
        assert blocks.inside(lengths, 4, 2).tolist() == [[True] * 2, [True, False], [False, False]]

    def test_what_lies_behind_the_end_does_not_count(self):
        """The anchor before the last token has one label; what is read beyond the tensor's end must not count."""
        blocks = arrange_blocks(torch.tensor([[3]]))
        assert blocks.tokens(torch.arange(5)[None], 1, 3).shape == (1, 3)
        assert blocks.inside(torch.tensor([5]), 1, 3).tolist() == [[True, False, False]]

    @given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=4), limit=st.one_of(st.none(), st.integers(1, 9)))
    def test_blocks_of_the_selector_come_first_and_are_spread_over_each_sequence(self, counts, limit):
        anchors = torch.tensor([[2 * i if i < count else -1 for i in range(9)] for count in counts])
        blocks = arrange_blocks(anchors, limit)
        places = list(zip(blocks.sequence.tolist(), blocks.column.tolist(), strict=True))
        assert sorted(places) == [(b, i) for b, count in enumerate(counts) for i in range(count)]
        assert blocks.anchor.tolist() == [anchors[place].item() for place in places]
        chosen = places[: blocks.num_selected]
        for b, count in enumerate(counts):
            own = sorted(i for sequence, i in chosen if sequence == b)
            assert len(own) == min(count, limit or count)
            gaps = [after - before for before, after in zip([-1, *own], [*own, count], strict=False)]
            assert max(gaps) - min(gaps[:-1]) <= 1 or count <= (limit or count)


def labelled(run, K: int) -> SimpleNamespace:
    """Right tokens `(N, K)` of all slots of a run, and which of them count."""
    blocks = arrange_blocks(ANCHORS)
    labels, valid = blocks.tokens(run.input_ids, 1, K), blocks.inside(torch.tensor(LENGTHS), 1, K)
    return SimpleNamespace(labels=labels, valid=valid)


def naive_terms(run, drelay, config) -> dict[str, float]:
    """Every term of the loss, slot by slot, from the states and scores that passed by."""
    K, shortlist = drelay.config.num_drafts, drelay.drafter.draft_token_ids
    allowed = list(range(V)) if shortlist is None else shortlist.tolist()
    logits = run.objective.adapter.logits(run.recorder.hidden[0], shortlist).detach()
    places = [(b, a.item()) for b in range(2) for a in ANCHORS[b] if a >= 0]
    sums = dict.fromkeys(("base", "support", "repair"), 0.0)
    weights = dict.fromkeys(sums, 0.0)
    for n, (sequence, anchor) in enumerate(places):
        labels = [
            run.input_ids[sequence, anchor + i].item() if anchor + i < LENGTHS[sequence] else None
            for i in range(1, K + 1)
        ]
        scored = {i: allowed.index(y) for i, y in enumerate(labels) if y in allowed}
        for i, column in scored.items():
            weight = math.exp(-i / config.decay)
            row = logits[n, i]
            others = sorted((z.item() for c, z in enumerate(row) if c != column), reverse=True)
            sums["base"] += weight * -row.log_softmax(0)[column].item()
            sums["support"] += weight * max(
                0.0, others[drelay.config.pool_size - 1] - row[column].item() + config.support_margin
            )
            weights["base"] += weight
            weights["support"] += weight
        if not run.recorder.head_inputs:
            continue
        pool = run.recorder.head_inputs[0].pool.ids[n].tolist()
        log_probs = run.recorder.scores[0][n].detach().log_softmax(-1)
        found = [pool[i].index(y) if y in pool[i] else None for i, y in enumerate(labels)]
        accepted = torch.tensor([0.0 if k is None else log_probs[i, k].exp().item() for i, k in enumerate(found)])
        shares = gradient_of_expected_length(accepted).clamp(min=config.contribution_floor)
        for i, k in enumerate(found):
            if k is not None:
                weight = (1 - config.contribution) * math.exp(-i / config.decay)
                weight += config.contribution * shares[i].item()
                sums["repair"] += weight * -log_probs[i, k].item()
                weights["repair"] += weight
    return {name: sums[name] / weights[name] for name in sums if weights[name]}


def gradient_of_expected_length(accepted) -> torch.Tensor:
    """Derivative of `sum_i prod_{j <= i} a_j` by automatic differentiation, for one row."""
    leaf = accepted.clone().double().requires_grad_()
    total = sum(torch.prod(leaf[: i + 1]) for i in range(len(leaf)))
    return torch.autograd.grad(total, leaf)[0].float()


class TestLoss:
    @every_layout
    @pytest.mark.parametrize("contribution", [0.0, 0.3, 1.0])
    def test_terms_equal_the_sums_written_out(self, target, fields, contribution, monkeypatch):
        drelay = make_drelay(target, **fields)
        config = ObjectiveConfig(decay=2.0, support_margin=0.7, contribution=contribution, contribution_floor=0.2)
        run = run_objective(drelay, target, monkeypatch, config)
        expected = naive_terms(run, drelay, config)
        assert 0 < run.terms["coverage"] < 1, "the rival of a token depends on whether the pool holds the token"
        assert {name: run.terms[name] for name in expected} == pytest.approx(expected, rel=1e-4)

    def test_loss_is_the_weighted_sum_of_its_terms(self, target, monkeypatch):
        config = ObjectiveConfig(support_weight=0.3, repair_weight=0.7)
        run = run_objective(make_drelay(target), target, monkeypatch, config)
        terms = run.terms
        expected = terms["base"] + 0.3 * terms["support"] + 0.7 * terms["repair"]
        assert run.loss.item() == pytest.approx(expected, rel=1e-5)

    def test_repair_counts_only_slots_whose_pool_holds_the_token(self, target, monkeypatch):
        drelay = make_drelay(target)
        run = run_objective(drelay, target, monkeypatch)
        pool = run.recorder.head_inputs[0].pool.ids
        labels = labelled(run, drelay.config.num_drafts).labels
        held = (pool == labels[..., None]).any(-1)
        assert held.any() and not held.all(), "this batch must have slots of both kinds"
        (gradient,) = torch.autograd.grad(run.loss, run.recorder.scores[0])
        assert not gradient[~held].any()

    def test_tokens_outside_the_shortlist_are_not_scored(self, target, monkeypatch):
        """The shortlist holds even tokens below 24; every label of this batch is odd."""
        drelay = make_drelay(target, draft_vocab_size=12)
        states, input_ids, lengths, anchors = make_batch(target)
        input_ids = input_ids // 2 * 2 + 1
        objective = JointObjective(drelay, drelay.adapter(target), ObjectiveConfig())
        loss, terms = objective(states, input_ids, lengths, anchors)
        loss.backward()
        assert (loss.item(), terms["base"], terms["support"], terms["repair"]) == (0.0, 0.0, 0.0, 0.0)
        assert not any(p.grad is not None and p.grad.any() for p in drelay.parameters())

    def test_garbage_behind_a_sequence_does_not_matter(self, target):
        drelay = make_drelay(target)
        states, input_ids, lengths, anchors = make_batch(target)
        objective = JointObjective(drelay, drelay.adapter(target), ObjectiveConfig())
        loss, _ = objective(states, input_ids, lengths, anchors)
        states, input_ids = states.clone(), input_ids.clone()
        states[1, 11:], input_ids[1, 11:] = 7.0, 3
        torch.testing.assert_close(objective(states, input_ids, lengths, anchors)[0], loss)

    def test_accuracies_are_those_of_the_walk_along_right_tokens(self, target, monkeypatch):
        run = run_objective(make_drelay(target), target, monkeypatch)
        inputs, scores = run.recorder.head_inputs[0], run.recorder.scores[0]
        blocks = labelled(run, scores.shape[1])
        lengths = {"expected_accepted": [], "expected_accepted_kept": []}
        for n in range(NUM_BLOCKS):
            for name, choose in (
                ("expected_accepted", lambda i, n=n: scores[n, i].argmax()),
                ("expected_accepted_kept", lambda i: 0),
            ):
                accepted = 0
                while accepted < scores.shape[1] and blocks.valid[n, accepted]:
                    if inputs.pool.ids[n, accepted, choose(accepted)] != blocks.labels[n, accepted]:
                        break
                    accepted += 1
                lengths[name].append(accepted)
        for name, values in lengths.items():
            assert run.terms[name] == pytest.approx(sum(values) / NUM_BLOCKS)


class TestSelectorBlocks:
    @pytest.mark.parametrize("limit", [1, 3, NUM_BLOCKS, 99, None])
    def test_selector_sees_the_asked_number_of_blocks(self, target, limit, monkeypatch):
        run = run_objective(make_drelay(target), target, monkeypatch, num_selector_anchors=limit)
        assert len(run.recorder.head_inputs[0].anchor_ids) == min(limit or 5, 5) + min(limit or 2, 2)
        assert len(run.recorder.hidden[0]) == NUM_BLOCKS

    def test_selector_sees_blocks_of_every_sequence(self, target, monkeypatch):
        run = run_objective(make_drelay(target), target, monkeypatch, num_selector_anchors=1)
        ids = run.input_ids
        assert run.recorder.head_inputs[0].anchor_ids.tolist() == [ids[0, 15].item(), ids[1, 9].item()]


def gradients(drelay, run) -> dict[str, torch.Tensor]:
    drelay.zero_grad()
    run.loss.backward()
    return {name: p.grad.clone() for name, p in drelay.named_parameters() if p.grad is not None and p.grad.any()}


class TestGradients:
    def test_selector_alone_learns_with_a_frozen_backbone(self, target, monkeypatch):
        drelay = make_drelay(target)
        run = run_objective(drelay, target, monkeypatch, ObjectiveConfig(freeze_backbone=True))
        names = gradients(drelay, run)
        assert names and all(name.startswith("selector.") for name in names)
        assert "base" not in run.terms and "support" not in run.terms

    def test_loss_is_that_of_the_selector_alone_with_a_frozen_backbone(self, target, monkeypatch):
        drelay = make_drelay(target)
        frozen = run_objective(drelay, target, monkeypatch, ObjectiveConfig(freeze_backbone=True))
        joint = run_objective(drelay, target, monkeypatch)
        assert frozen.loss.item() == pytest.approx(joint.terms["repair"], rel=1e-5)

    def test_backbone_learns_from_the_selectors_loss_when_joint(self, target, monkeypatch):
        drelay = make_drelay(target)
        with_repair = gradients(drelay, run_objective(drelay, target, monkeypatch))
        without = gradients(drelay, run_objective(drelay, target, monkeypatch, ObjectiveConfig(repair_weight=0.0)))
        for name in ("drafter.fc.weight", "drafter.layers.0.mlp.up_proj.weight", "drafter.mask_embedding"):
            assert not torch.allclose(with_repair[name], without[name], rtol=1e-3)

    def test_every_part_learns_when_joint(self, target, monkeypatch):
        """All but the projection of repaired tokens, which only a second stage uses."""
        drelay = make_drelay(target)
        missing = set(dict(drelay.named_parameters())) - set(
            gradients(drelay, run_objective(drelay, target, monkeypatch))
        )
        assert missing == {"selector.repaired_proj.weight"}

    def test_backbone_alone_learns_without_the_selectors_loss(self, target, monkeypatch):
        drelay = make_drelay(target)
        run = run_objective(drelay, target, monkeypatch, ObjectiveConfig(repair_weight=0.0))
        assert all(name.startswith("drafter.") for name in gradients(drelay, run))
        assert not run.recorder.head_inputs

    def test_drafter_without_a_selector_can_be_trained(self, target, monkeypatch):
        drelay = make_drelay(target, use_selector=False)
        run = run_objective(drelay, target, monkeypatch)
        assert run.loss.item() == pytest.approx(run.terms["base"] + 0.1 * run.terms["support"], rel=1e-5)

    def test_weight_of_the_selectors_loss_gets_no_gradient(self, target, monkeypatch):
        """The contribution weight says where to learn; lowering it must not become a way to lower the loss."""
        drelay = make_drelay(target, pool_size=30)  # so large that neighboring slots hold their tokens
        config = ObjectiveConfig(contribution=1.0, freeze_backbone=True)
        run = run_objective(drelay, target, monkeypatch, config)
        (found,) = torch.autograd.grad(run.loss, run.recorder.scores[0], retain_graph=True)
        scores = run.recorder.scores[0].detach().requires_grad_()
        labels = labelled(run, scores.shape[1])
        hits = (run.recorder.head_inputs[0].pool.ids == labels.labels[..., None]) & labels.valid[..., None]
        held, own = hits.any(-1), (scores.log_softmax(-1) * hits).sum(-1)
        shares = contribution_weights(torch.where(held, own.exp(), torch.zeros_like(own)).detach()).clamp(min=0.1)
        loss = -(own * held * shares).sum() / (held * shares).sum()
        torch.testing.assert_close(found, torch.autograd.grad(loss, scores)[0], rtol=1e-4, atol=1e-6)


class TestContributionWeights:
    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8))
    def test_weights_are_the_derivative_of_the_expected_accepted_length(self, row):
        accepted = torch.tensor(row)
        expected = gradient_of_expected_length(accepted)
        torch.testing.assert_close(contribution_weights(accepted[None])[0], expected, rtol=1e-4, atol=1e-5)

    def test_rows_are_independent(self):
        rows = torch.rand(5, 4)
        torch.testing.assert_close(contribution_weights(rows)[2:3], contribution_weights(rows[2:3]))

    def test_slots_behind_a_sure_rejection_contribute_nothing(self):
        assert contribution_weights(torch.tensor([[0.5, 0.0, 0.9]])).tolist() == [[1.0, pytest.approx(0.95), 0.0]]


def chunked(target, monkeypatch, **fields):
    drelay = make_drelay(target)
    whole = run_objective(drelay, target, monkeypatch, ObjectiveConfig(**fields))
    parts = run_objective(drelay, target, monkeypatch, ObjectiveConfig(chunk_rows=8, **fields))
    return drelay, whole, parts


class TestChunks:
    def test_loss_and_gradients_do_not_depend_on_the_chunks(self, target, monkeypatch):
        drelay, whole, parts = chunked(target, monkeypatch)
        assert max(len(hidden) for hidden in parts.recorder.hidden) == 2 < NUM_BLOCKS
        torch.testing.assert_close(parts.loss, whole.loss)
        expected, found = gradients(drelay, whole), gradients(drelay, parts)
        assert expected.keys() == found.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def soft_targets(target, input_ids, k=6) -> SoftTargets:
    with torch.no_grad():
        top = target(input_ids).logits.log_softmax(-1).topk(k, dim=-1)
    return SoftTargets(top.indices, top.values)


class TestSoftTargets:
    @pytest.mark.parametrize("base_loss", ["kl", "l1"])
    @pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 12}], ids=["all", "shortlist"])
    def test_base_loss_is_the_mixture_written_out(self, target, base_loss, fields, monkeypatch):
        drelay = make_drelay(target, **fields)
        config = ObjectiveConfig(base_loss=base_loss, soft_weight=0.3, repair_weight=0.0)
        soft = soft_targets(target, make_batch(target)[1])
        run = run_objective(drelay, target, monkeypatch, config, soft_targets=soft)
        shortlist = drelay.drafter.draft_token_ids
        allowed = list(range(V)) if shortlist is None else shortlist.tolist()
        logits = run.objective.adapter.logits(run.recorder.hidden[0], shortlist).detach()
        slots, blocks = labelled(run, drelay.config.num_drafts), arrange_blocks(ANCHORS)
        total = weights = 0.0
        for n, i in slots.valid.nonzero().tolist():
            label = slots.labels[n, i].item()
            if label not in allowed:
                continue
            q = dict(zip(allowed, logits[n, i].softmax(-1).tolist(), strict=True))
            place = blocks.sequence[n], blocks.anchor[n] + i  # the label is what the target wrote after this position
            p = dict(zip(soft.ids[place].tolist(), soft.log_probs[place].exp().tolist(), strict=True))
            p = {token: share for token, share in p.items() if token in allowed}
            if base_loss == "kl":
                mass = sum(p.values())
                other = sum(share / mass * math.log(share / mass / q[token]) for token, share in p.items())
            else:
                other = sum(abs(share - q[token]) for token, share in p.items())
                other = 0.5 * (other + abs(sum(p.values()) - sum(q[token] for token in p)))
            weight = math.exp(-i / config.decay)
            total += weight * (0.7 * -math.log(q[label]) + 0.3 * other)
            weights += weight
        assert run.terms["base"] == pytest.approx(total / weights, rel=1e-4)

    def test_missing_soft_targets_are_named(self, target, monkeypatch):
        with pytest.raises(ValueError, match="`soft_targets` are needed by `base_loss` 'kl'"):
            run_objective(make_drelay(target), target, monkeypatch, ObjectiveConfig(base_loss="kl"))

    @pytest.mark.parametrize("fields", [{"base_loss": "mse"}, {"slot_weight": "flat"}, {"soft_weight": 1.5}])
    def test_impossible_settings_raise(self, fields):
        with pytest.raises(ValueError, match=f"`{next(iter(fields))}` is"):
            ObjectiveConfig(**fields)


class TestSlotWeight:
    def test_dpace_weight_is_the_chance_to_get_as_far_and_beyond(self, target, monkeypatch):
        drelay = make_drelay(target)
        config = ObjectiveConfig(slot_weight="dpace", dpace_floor=0.4, repair_weight=0.0)
        run = run_objective(drelay, target, monkeypatch, config)
        log_probs = run.objective.adapter.logits(run.recorder.hidden[0]).detach().log_softmax(-1)
        slots = labelled(run, drelay.config.num_drafts)
        total = weights = 0.0
        for n in range(NUM_BLOCKS):
            losses = [-log_probs[n, i, slots.labels[n, i]].item() for i in range(slots.valid[n].sum())]
            chances = [0.6 * math.exp(-loss) + 0.4 for loss in losses]
            reach = [math.prod(chances[: i + 1]) for i in range(len(chances))]
            for i, loss in enumerate(losses):
                total += sum(reach[i:]) * loss
                weights += sum(reach[i:])
        assert run.terms["base"] == pytest.approx(total / weights, rel=1e-4)


def remember_known(selector, state, known, num_tokens):
    return selector.remember(state, known[:, :num_tokens])


class TestLoop:
    """Training unrolls what DLoop drafts."""

    @every_layout
    @pytest.mark.parametrize("norm", ["hidden", "final"])
    @pytest.mark.parametrize("loop_tokens", [2, None])
    def test_last_stage_equals_the_third_stage_of_a_session(self, target, fields, norm, loop_tokens, monkeypatch):
        drelay = make_drelay(target, provisional_norm=norm, **fields)
        run = run_objective(
            drelay, target, monkeypatch, ObjectiveConfig(loop_depth=3, loop_tokens=loop_tokens), **LONG_ENOUGH
        )
        states, input_ids, _, _ = make_batch(target)
        n = loop_tokens or drelay.config.num_drafts
        sequence, anchor = 0, 1
        recorder = Recorder(drelay, target, monkeypatch)
        session = DraftSession(drelay.drafter, recorder.adapter)
        with torch.no_grad():
            session.extend(states[sequence : sequence + 1, :anchor])
            for stage in range(3):
                start = anchor + stage * n
                session.begin_stage(input_ids[sequence : sequence + 1, : start + 1])
                proposal = Proposal(None, V, is_sampled=False)
                proposal.input_ids = input_ids[sequence : sequence + 1, : start + 1]
                block = drelay.draft(session.anchor_ids, session, proposal).first(n)
                # What was drafted is what the target wrote.
                known = input_ids[sequence : sequence + 1, start : start + n + 1]
                block.draft_ids = known[:, 1:]
                block.remember = partial(remember_known, drelay.selector, recorder.states[-1], known)
                drelay.continue_after(block, session)
        monkeypatch.undo()
        drafted, trained = recorder.head_inputs[2], run.recorder.head_inputs[2]
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(trained.hidden_states[:1], drafted.hidden_states, **close)
        seen = drafted.history_mask
        assert trained.history_mask[:1].equal(seen)
        torch.testing.assert_close(trained.history[:1][seen], drafted.history[seen], **close)
        torch.testing.assert_close(trained.earlier[:1], drafted.earlier, **close)
        assert (trained.offset, trained.anchor_ids[0]) == (drafted.offset, drafted.anchor_ids[0])
        assert trained.pool.ids[:1].equal(drafted.pool.ids)
        assert known_text(trained, 0) == drafted.text_ids[0].tolist() == input_ids[0, : anchor + 2 * n].tolist()

    def test_loss_is_the_mean_of_the_first_and_the_last_stage(self, target, monkeypatch):
        run = run_objective(
            make_drelay(target), target, monkeypatch, ObjectiveConfig(loop_depth=3, loop_tokens=2), **LONG_ENOUGH
        )
        stages = [
            run.terms[f"base{suffix}"] + 0.1 * run.terms[f"support{suffix}"] + run.terms[f"repair{suffix}"]
            for suffix in ("", "_stage3")
        ]
        assert run.loss.item() == pytest.approx(sum(stages) / 2, rel=1e-5)
        alone = run_objective(make_drelay(target), target, monkeypatch, **LONG_ENOUGH)
        assert alone.loss.item() == pytest.approx(stages[0], rel=1e-5)

    def test_chain_of_hidden_states_and_every_part_get_a_gradient(self, target, monkeypatch):
        drelay = make_drelay(target)
        run = run_objective(drelay, target, monkeypatch, ObjectiveConfig(loop_depth=2, loop_tokens=2), **LONG_ENOUGH)
        assert set(gradients(drelay, run)) == set(dict(drelay.named_parameters()))

    def test_anchors_near_the_end_keep_the_loss_of_their_first_stage(self, target, monkeypatch):
        late = {"anchors": torch.tensor([[14, 15], [8, 9]])}
        run = run_objective(make_drelay(target), target, monkeypatch, ObjectiveConfig(loop_depth=3), **late)
        assert run.terms["base_stage3"] == run.terms["repair_stage3"] == 0.0
        assert run.terms["base"] > 0.0 and math.isfinite(run.loss.item())


LONG_ENOUGH = {"anchors": torch.tensor([[1, 3, 5], [1, 2, -1]])}


class TestShares:
    def test_parts_of_a_batch_have_the_loss_of_the_whole(self, target):
        """As two processes would compute it: weights are averaged over them, and so are the losses."""
        drelay = make_drelay(target)
        states, input_ids, lengths, anchors = make_batch(target)
        adapter = drelay.adapter(target)
        whole, _ = JointObjective(drelay, adapter, ObjectiveConfig())(states, input_ids, lengths, anchors)
        totals: list[list[torch.Tensor]] = []

        def part(b, share):
            return JointObjective(drelay, adapter, ObjectiveConfig(), share)(
                states[b : b + 1], input_ids[b : b + 1], lengths[b : b + 1], anchors[b : b + 1]
            )[0]

        for b in range(2):
            totals.append([])
            part(b, lambda total: totals[-1].append(total) or total)
        losses = []
        for b in range(2):
            means = iter([(first + second) / 2 for first, second in zip(*totals, strict=True)])
            losses.append(part(b, lambda total, means=means: next(means)))
        torch.testing.assert_close(sum(losses) / 2, whole)

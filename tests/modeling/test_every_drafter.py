"""Every drafter of the field through the same `generate(assistant_model=...)`: one table of cases, loop on and off.

Greedy text must be the target's own, token by token; at temperature 1 the counts of the tokens must follow the
target's law. Pools follow a script, so that drafts are accepted, rejected late and repaired.
"""

from collections import Counter

import pytest
import torch
from scipy import stats

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_base import Pool
from hf_drelay.modeling.modeling_drelay import DRelayModel, _build_head
from hf_drelay.modeling.modeling_heads import HeadInputs
from hf_drelay.modeling.proposal import StageDraw


ALWAYS = float("-inf")
SMALL = {"head_rank": 8, "gru_hidden_dim": 12}
DRAFTERS = {
    "independent": {"head": "independent"},
    "relay": {"head": "relay"},
    "bilinear": {"head": "bilinear"},
    "bilinear_convolutions": {"head": "bilinear", "conv_kernel_size": 2, "conv_group_size": 4},
    "recurrent": {"head": "recurrent"},
    "recurrent_shifted": {"head": "recurrent", "layout": "shifted", "pure_draft_prefix_len": 2},
    "markov": {"head": "markov", "layout": "shifted"},
    "markov_gated": {"head": "markov", "layout": "shifted", "markov_head_type": "gated"},
    "markov_rnn": {"head": "markov", "layout": "shifted", "markov_head_type": "rnn"},
    "markov_confidence": {"head": "markov", "layout": "shifted", "use_confidence_head": True},
    "eagle3": {"backbone": "eagle3", "layout": "shifted", "num_hidden_layers": 1, "use_mask_embedding": False},
    "eagle3_own_head": {
        "backbone": "eagle3",
        "layout": "shifted",
        "num_hidden_layers": 1,
        "use_mask_embedding": False,
        "use_own_head": True,
        "draft_vocab_size": 40,
    },
}
OPTIONS = {"markov_confidence": {"confidence_threshold": 0.4}}
GATES = {"one_stage": None, "loop": ALWAYS}
CASES = [(name, gate) for name in DRAFTERS for gate in GATES]


@pytest.fixture(scope="module")
def target(toolbox):
    return toolbox.target("qwen3")


@pytest.mark.parametrize(("name", "gate"), CASES)
def test_greedy_text_is_the_targets_own(toolbox, target, record, name, gate):
    prompt = toolbox.prompt(9)
    expected = toolbox.greedy(target, prompt, max_new_tokens=72)
    drafter = toolbox.scripted(target, expected[0].tolist(), **SMALL, **DRAFTERS[name])
    view = drafter.with_options(loop_gate=GATES[gate], max_stages=3, **OPTIONS.get(name, {}))
    ids = toolbox.greedy(target, prompt, view, max_new_tokens=72)
    toolbox.assert_same_text(target, ids, expected)
    assert record.count(lambda r: r.num_accepted > 0) >= 3
    assert record.count(lambda r: r.num_accepted < len(r.draft_ids)) >= 2
    if view.options.use_selector:
        assert record.num_accepted_repairs >= 1
    if gate == "loop":
        assert record.count(lambda r: len(r.stage_lengths) > 1) >= 3


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("loop", ["own", "host"])
def test_text_is_the_targets_own_in_either_loop(toolbox, target, record, name, loop):
    prompt = toolbox.prompt(7, seed=4)
    expected = toolbox.greedy(target, prompt, max_new_tokens=40)
    drafter = toolbox.scripted(target, expected[0].tolist(), **SMALL, **DRAFTERS[name])
    view = drafter.with_options(loop_gate=-3.0, decoding_loop=loop)
    toolbox.assert_same_text(target, toolbox.greedy(target, prompt, view, max_new_tokens=40), expected)
    assert record.count(lambda r: r.num_accepted > 0) >= 2


@pytest.mark.parametrize(("name", "gate"), CASES)
def test_batch_equals_its_rows_run_alone(toolbox, target, monkeypatch, name, gate):
    lengths = [9, 4, 12]
    prompts = [toolbox.prompt(length, seed=row) for row, length in enumerate(lengths)]
    expected = [toolbox.greedy(target, prompt)[0].tolist() for prompt in prompts]
    ids = torch.zeros(3, 12, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, 12 - length :] = prompts[row][0]
    drafter = toolbox.scripted_batch(monkeypatch, target, expected, **SMALL, **DRAFTERS[name])
    view = drafter.with_options(loop_gate=GATES[gate], **OPTIONS.get(name, {}))
    output = toolbox.greedy(target, ids, view, attention_mask=(ids != 0).long())
    assert [row[12 - length :] for row, length in zip(output.tolist(), lengths, strict=True)] == expected
    assert view.statistics.acceptance_length > 1.5


@pytest.mark.parametrize("name", DRAFTERS)
def test_second_turn_with_the_returned_cache_equals_a_fresh_run(toolbox, target, name):
    prompt = toolbox.prompt(9)
    first = toolbox.greedy(target, prompt, max_new_tokens=13)
    whole = torch.cat([first, toolbox.prompt(4, seed=8)], dim=1)
    expected = toolbox.greedy(target, whole, max_new_tokens=20)
    view = toolbox.scripted(target, expected[0].tolist(), **SMALL, **DRAFTERS[name]).with_options(loop_gate=ALWAYS)
    turn = toolbox.greedy(target, prompt, view, max_new_tokens=13, return_dict_in_generate=True)
    kwargs = {toolbox.cache_keyword(): turn.past_key_values, "max_new_tokens": 20}
    assert torch.equal(toolbox.greedy(target, whole, view, **kwargs), expected)


def build_sampling_drafter(toolbox, target, fields):
    """A drafter whose pools know something of the target's logits; its head has random weights."""
    small = {"num_hidden_layers": 1, "block_size": 2, "pool_size": 4, "selector_hidden_size": 16}
    model = toolbox.drafter(target, selector_scale=0.8, **(SMALL | {"layout": "shifted"} | fields | small))
    noise = 0.4 * torch.randn(2, 6, generator=torch.Generator().manual_seed(0))

    def pool_after(token, slot):
        return Pool.from_logits(0.8 * target(token[None]).logits[:, -1:] + noise[slot], 4)

    def head_inputs(rows, anchor_ids, session):
        inputs = DRelayModel.head_inputs(model, rows, anchor_ids, session)
        token, pools = anchor_ids, []
        for slot in range(inputs.hidden_states.shape[1]):
            pools.append(pool_after(token, slot))
            token = pools[-1].ids[:, 0, 0]
        parts = (torch.cat([getattr(p, name) for p in pools], dim=1) for name in ("ids", "logits", "log_probs"))
        inputs.pool = Pool(*parts)
        return inputs

    model.head_inputs = head_inputs
    if model.config.backbone != "parallel":
        # The chain's own states decide; a plain pool of them is as good as any for exactness.
        model.drafter.pool = lambda states, session, slot: pool_after(session.anchor_ids, slot)
    return model


def p_value(target, ids, prompt_length: int) -> float:
    """Fit of the tokens of one long text with the law of each, given the token before it."""
    with torch.no_grad():
        laws = target(torch.arange(6)[None]).logits[0].softmax(dim=-1).double()
    pairs = Counter(zip(ids[prompt_length - 1 : -1], ids[prompt_length:], strict=True))
    statistic, freedom = 0.0, 0
    for row in range(6):
        total = sum(pairs[row, token] for token in range(6))
        means = total * laws[row]
        cells = [(pairs[row, t], means[t].item()) for t in range(6) if means[t] >= 5]
        rest = [(pairs[row, t], means[t].item()) for t in range(6) if means[t] < 5]
        if rest and sum(m for _, m in rest) >= 5:
            cells.append((sum(c for c, _ in rest), sum(m for _, m in rest)))
        elif rest and cells:
            cells[-1] = (cells[-1][0] + sum(c for c, _ in rest), cells[-1][1] + sum(m for _, m in rest))
        statistic += sum((c - m) ** 2 / m for c, m in cells)
        freedom += max(0, len(cells) - 1)
    return float(stats.chi2.sf(statistic, freedom))


@pytest.fixture(scope="module")
def table_target(toolbox):
    return toolbox.table_target(1.2 * torch.randn(6, 6, generator=torch.Generator().manual_seed(3)))


def sampled_text(target, view, length: int = 600) -> list[int]:
    torch.manual_seed(0)
    prompt = torch.tensor([[1, 2]])
    kwargs = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": length, "top_k": 0}
    return target.generate(prompt, assistant_model=view, do_sample=True, **kwargs)[0].tolist()


SAMPLED = {name: fields for name, fields in DRAFTERS.items() if "draft_vocab_size" not in fields}


@pytest.mark.statistical
@pytest.mark.parametrize(("name", "gate"), [(name, gate) for name in SAMPLED for gate in GATES])
def test_sampled_text_follows_the_targets_law(toolbox, table_target, record, name, gate):
    drafter = build_sampling_drafter(toolbox, table_target, SAMPLED[name])
    view = drafter.with_options(loop_gate=GATES[gate], max_stages=2, **OPTIONS.get(name, {}))
    assert p_value(table_target, sampled_text(table_target, view), 2) > 1e-4
    assert record.count(lambda r: r.num_accepted > 0) >= 20
    assert record.count(lambda r: r.num_accepted < len(r.draft_ids)) >= 20


@pytest.mark.statistical
def test_a_head_that_hides_its_correction_from_q_fails(toolbox, table_target, monkeypatch):
    drafter = build_sampling_drafter(toolbox, table_target, SAMPLED["markov"])
    drafter.selector.markov_w2.weight.data.mul_(2.0)
    monkeypatch.setattr(StageDraw, "proposal_logits", lambda self, n: self.pool.log_probs[:, :n])
    assert p_value(table_target, sampled_text(table_target, drafter.with_options()), 2) < 1e-7


@pytest.mark.statistical
@pytest.mark.parametrize("anticipates", [False, True], ids=["before_the_token", "at_the_token"])
def test_a_confidence_cut_is_exact_when_it_is_decided_before_the_token(
    toolbox, table_target, monkeypatch, anticipates
):
    drafter = build_sampling_drafter(toolbox, table_target, SAMPLED["markov_confidence"])
    right = DRelayModel.draft

    def by_parity(ids):  # strong and arbitrary: even tokens end the block
        return torch.where(ids % 2 == 0, -9.0, 9.0)

    def draft(self, *args, **kwargs):
        block = right(self, *args, **kwargs)
        survives = (by_parity(block.draft_ids) > 0).long().cumprod(dim=1).sum()
        return block.first(int(survives))

    if anticipates:
        monkeypatch.setattr(DRelayModel, "draft", draft)
    else:
        drafter.selector.confidence = lambda state, path_ids: by_parity(path_ids)
    view = drafter.with_options(confidence_threshold=0.0 if anticipates else 0.5)
    p = p_value(table_target, sampled_text(table_target, view, 2000), 2)
    assert p < 1e-7 if anticipates else p > 1e-4


class TestHeads:
    """Heads against the formulas of their papers, one slot at a time."""

    V, H, R, G, K, C = 20, 12, 4, 6, 5, 20

    def build(self, toolbox, head, **fields):
        torch.manual_seed(0)
        config = DRelayConfig(
            vocab_size=self.V,
            hidden_size=self.H,
            num_target_layers=9,
            num_hidden_layers=1,
            block_size=self.K,
            layout="shifted",
            pool_size=self.C,
            head=head,
            head_rank=self.R,
            gru_hidden_dim=self.G,
            **fields,
        )
        module = _build_head(config).eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.7)
        return module

    def state(self, module):
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(self.V, self.H, generator=generator)
        hidden = torch.randn(1, self.K, self.H, generator=generator)
        logits = torch.randn(1, self.K, self.V, generator=generator)
        path = torch.randint(0, self.V, (1, self.K), generator=generator)
        inputs = HeadInputs(
            hidden_states=hidden,
            anchor_hidden=None,
            pool=Pool.from_logits(logits, self.C),
            anchor_ids=path[:, 0],
            history=torch.zeros(1, 1, self.H),
            history_mask=torch.zeros(1, 1, dtype=torch.bool),
            offset=0,
            earlier=None,
            embed=lambda ids: table[ids],
        )
        return module.read(inputs), inputs, table, path

    def expected(self, module, inputs, table, path, slot):
        """Correction over the whole vocabulary `(V,)` of one slot, by the paper's formula."""
        h, y = inputs.hidden_states[0, slot], path[0, slot]
        if module.config.head == "bilinear":
            return module.successor_codebook @ (module.predecessor_codebook[y] * (module.hidden_projection.weight @ h))
        if module.config.head == "recurrent":
            _, s = module.prefix_gru(table[path[:, : slot + 1]])
            joined = torch.cat([h, s[0, 0]])
            correction = module.embed_proj(joined)
            return correction if slot >= module.config.pure_draft_prefix_len else torch.zeros_like(correction)
        rows = module.markov_w1.weight[path[0]]
        if module.config.markov_head_type == "gated":
            gate = torch.sigmoid(module.gate_proj(torch.cat([h, rows[slot]])))
            return module.markov_w2.weight @ (gate * rows[slot])
        if module.config.markov_head_type == "rnn":
            s = torch.zeros(self.R)
            for j in range(slot + 1):
                g, c, o = module.joint_proj(torch.cat([s, rows[j], inputs.hidden_states[0, j]])).chunk(3)
                s = g.sigmoid() * s + (1 - g.sigmoid()) * c.tanh()
            return module.markov_w2.weight @ o.tanh()
        return module.markov_w2.weight @ rows[slot]

    KINDS = {
        "bilinear": {},
        "recurrent": {"pure_draft_prefix_len": 2},
        "vanilla": {"markov_head_type": "vanilla"},
        "gated": {"markov_head_type": "gated"},
        "rnn": {"markov_head_type": "rnn"},
    }

    @pytest.mark.parametrize("kind", KINDS)
    @torch.no_grad()
    def test_score_is_the_formula_of_the_paper(self, toolbox, kind):
        head = kind if kind in ("bilinear", "recurrent") else "markov"
        module = self.build(toolbox, head, **self.KINDS[kind])
        state, inputs, table, path = self.state(module)
        together = module.score(state, path)
        for slot in range(self.K):
            alone = module.score(state, path[:, : slot + 1], slot)[:, 0]
            torch.testing.assert_close(alone, together[:, slot])
            correction = self.expected(module, inputs, table, path, slot)[inputs.pool.ids[0, slot]]
            torch.testing.assert_close(alone[0], inputs.pool.log_probs[0, slot] + correction, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("head", ["bilinear", "recurrent", "markov"])
    @torch.no_grad()
    def test_untrained_head_is_the_independent_one(self, toolbox, head):
        target = toolbox.target("qwen3")
        config = DRelayConfig.for_target(target.config, block_size=5, pool_size=8, head=head, **SMALL)
        model = DRelayModel(config).eval()
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, 4, config.hidden_size, generator=generator)
        pool = Pool.from_logits(torch.randn(1, 4, config.vocab_size, generator=generator), 8)
        none = torch.zeros(1, 1, config.hidden_size)
        anchor = torch.tensor([5])
        embed = target.get_input_embeddings()
        inputs = HeadInputs(hidden, None, pool, anchor, none, none[..., 0].bool(), 0, None, embed)
        path = torch.tensor([[5, 7, 9, 11]])
        torch.testing.assert_close(model.selector.score(model.selector.read(inputs), path), pool.log_probs)

    @torch.no_grad()
    def test_confidence_is_the_formula_of_the_paper(self, toolbox):
        module = self.build(toolbox, "markov", use_confidence_head=True)
        state, inputs, _, path = self.state(module)
        logits = module.confidence(state, path)
        proj = module.confidence_head["proj"]
        for slot in range(self.K):
            joined = torch.cat([inputs.hidden_states[0, slot], module.markov_w1.weight[path[0, slot]]])
            torch.testing.assert_close(logits[0, slot], proj(joined)[0])

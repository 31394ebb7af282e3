"""Every drafter of the field through the same `generate(assistant_model=...)`: one table of cases, loop on and off.

Greedy text must be the target's own, token by token; at temperature 1 the counts of the tokens must follow the
target's law. Pools follow a script, so that drafts are accepted, rejected late and repaired.
"""

import pytest
import torch
from scipy import stats

from hf_drelay.modeling import speculative_loop
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
    # Published with their targets, see `build_published`.
    "mtp": {"published": "mtp"},
    "mtp_recurrent": {"published": "mtp_recurrent"},
    "gemma4_assistant": {"published": "gemma4"},
}
# Layers with a state that the host's loop cannot roll back.
RECURRENT = {"mtp_recurrent"}
# Rows of a batch advance by what all of them accept: a recurrent layer cannot take a token back, and what reads the
# target's own caches can have no holes in them.
LOCKSTEP = RECURRENT | {"gemma4_assistant"}
OPTIONS = {"markov_confidence": {"confidence_threshold": 0.4}}
GATES = {"one_stage": None, "loop": ALWAYS}
CASES = [(name, gate) for name in DRAFTERS for gate in GATES]


def target_of(toolbox, name: str):
    published = DRAFTERS[name].get("published")
    return toolbox.target("qwen3") if published is None else toolbox.published(published)[0]


def scripted(toolbox, name: str, reference: list[int]):
    """The drafter of a case, with pools that follow `reference`."""
    published = DRAFTERS[name].get("published")
    if published is None:
        return toolbox.scripted(target_of(toolbox, name), reference, **SMALL, **DRAFTERS[name])
    return toolbox.follow(toolbox.published(published)[1](block_size=4, pool_size=8), reference)


@pytest.mark.parametrize(("name", "gate"), CASES)
def test_greedy_text_is_the_targets_own(toolbox, record, name, gate):
    target = target_of(toolbox, name)
    prompt = toolbox.prompt(9)
    expected = toolbox.greedy(target, prompt, max_new_tokens=72)
    drafter = scripted(toolbox, name, expected[0].tolist())
    view = drafter.with_options(loop_gate=GATES[gate], max_stages=3, **OPTIONS.get(name, {}))
    ids = toolbox.greedy(target, prompt, view, max_new_tokens=72)
    toolbox.assert_same_text(target, ids, expected)
    assert record.count(lambda r: r.num_accepted > 0) >= 3
    assert record.count(lambda r: r.num_accepted < len(r.draft_ids)) >= 2
    if view.options.use_selector:
        assert record.num_accepted_repairs >= 1
    if gate == "loop":
        assert record.count(lambda r: len(r.stage_lengths) > 1) >= 3


@pytest.mark.parametrize(
    ("name", "loop"), [(name, loop) for name in DRAFTERS for loop in ("own", "host")[: 2 - (name in RECURRENT)]]
)
def test_text_is_the_targets_own_in_either_loop(toolbox, record, name, loop):
    target = target_of(toolbox, name)
    prompt = toolbox.prompt(7, seed=4)
    expected = toolbox.greedy(target, prompt, max_new_tokens=40)
    drafter = scripted(toolbox, name, expected[0].tolist())
    view = drafter.with_options(loop_gate=-3.0, decoding_loop=loop)
    toolbox.assert_same_text(target, toolbox.greedy(target, prompt, view, max_new_tokens=40), expected)
    assert record.count(lambda r: r.num_accepted > 0) >= 2


@pytest.mark.parametrize(("name", "gate"), CASES)
def test_batch_equals_its_rows_run_alone(toolbox, monkeypatch, name, gate):
    target = target_of(toolbox, name)
    lengths = [9, 4, 12]
    prompts = [toolbox.prompt(length, seed=row) for row, length in enumerate(lengths)]
    expected = [toolbox.greedy(target, prompt)[0].tolist() for prompt in prompts]
    ids = torch.zeros(3, 12, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, 12 - length :] = prompts[row][0]
    drafter = toolbox.follow_begun(monkeypatch, scripted(toolbox, name, expected[0]), expected)
    view = drafter.with_options(loop_gate=GATES[gate], **OPTIONS.get(name, {}))
    output = toolbox.greedy(target, ids, view, attention_mask=(ids != 0).long())
    assert [row[12 - length :] for row, length in zip(output.tolist(), lengths, strict=True)] == expected
    assert view.statistics.acceptance_length > (1.1 if name in LOCKSTEP else 1.5)


@pytest.mark.parametrize("name", DRAFTERS)
def test_second_turn_with_the_returned_cache_equals_a_fresh_run(toolbox, name):
    target = target_of(toolbox, name)
    prompt = toolbox.prompt(9)
    first = toolbox.greedy(target, prompt, max_new_tokens=13)
    whole = torch.cat([first, toolbox.prompt(4, seed=8)], dim=1)
    expected = toolbox.greedy(target, whole, max_new_tokens=20)
    view = scripted(toolbox, name, expected[0].tolist()).with_options(loop_gate=ALWAYS)
    turn = toolbox.greedy(target, prompt, view, max_new_tokens=13, return_dict_in_generate=True)
    kwargs = {toolbox.cache_keyword(): turn.past_key_values, "max_new_tokens": 20}
    assert torch.equal(toolbox.greedy(target, whole, view, **kwargs), expected)


def sampling_pair(toolbox, table_target, name: str):
    """
    `(target, drafter)` of a case, with a vocabulary so small that every token is drawn often. Drafters that come with
    their targets, and the one with a vocabulary of its own, draft with random weights and nothing else.
    """
    fields = DRAFTERS[name]
    if "published" in fields:
        target, build = toolbox.published(fields["published"], vocab_size=8)
        return target, build(block_size=2, pool_size=4)
    if "draft_vocab_size" not in fields:
        return table_target, build_sampling_drafter(toolbox, table_target, fields)
    small = {"block_size": 2, "pool_size": 3, "draft_vocab_size": 4}
    drafter = toolbox.drafter(table_target, **(fields | small))
    drafter.set_shortlist(REDUCED)
    torch.nn.init.normal_(drafter.drafter.lm_head.weight, generator=torch.Generator().manual_seed(0))
    return table_target, drafter


# Random weights can be so sure of the next token that there is nothing to test.
TEMPERATURES = {"mtp": 3.0, "gemma4_assistant": 3.0}
REDUCED = torch.tensor([0, 2, 3, 5])  # of six tokens; as `d2t` of a public file: [0, 1, 1, 2]


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


def p_value(target, ids, prompt_length: int, temperature: float = 1.0) -> float:
    """
    Fit of the tokens of one long text with the law of each, given all tokens before it. They are counted by the token
    before, and so are the laws.
    """
    with torch.no_grad():
        laws = (target(torch.tensor([ids])).logits[0] / temperature).softmax(dim=-1).double()
    size = laws.shape[1]
    counts, expected = torch.zeros(size, size, dtype=torch.double), torch.zeros(size, size, dtype=torch.double)
    for place in range(prompt_length - 1, len(ids) - 1):
        counts[ids[place], ids[place + 1]] += 1
        expected[ids[place]] += laws[place]
    statistic, freedom = 0.0, 0
    for row in range(size):
        cells = [(counts[row, t].item(), expected[row, t].item()) for t in range(size) if expected[row, t] >= 5]
        rest = [(counts[row, t].item(), expected[row, t].item()) for t in range(size) if expected[row, t] < 5]
        if rest and sum(m for _, m in rest) >= 5:
            cells.append((sum(c for c, _ in rest), sum(m for _, m in rest)))
        elif rest and cells:
            cells[-1] = (cells[-1][0] + sum(c for c, _ in rest), cells[-1][1] + sum(m for _, m in rest))
        statistic += sum((c - m) ** 2 / m for c, m in cells)
        freedom += max(0, len(cells) - 1)
    assert freedom >= 4, "too few draws for a test"
    return float(stats.chi2.sf(statistic, freedom))


@pytest.fixture(scope="module")
def table_target(toolbox):
    return toolbox.table_target(1.2 * torch.randn(6, 6, generator=torch.Generator().manual_seed(3)))


def sampled_text(target, view, length: int = 600, temperature: float = 1.0) -> list[int]:
    torch.manual_seed(0)
    prompt = torch.tensor([[1, 2]])
    kwargs = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": length,
        "top_k": 0,
        "temperature": temperature,
    }
    return target.generate(prompt, assistant_model=view, do_sample=True, **kwargs)[0].tolist()


@pytest.mark.statistical
@pytest.mark.parametrize(("name", "gate"), CASES)
def test_sampled_text_follows_the_targets_law(toolbox, table_target, record, name, gate):
    target, drafter = sampling_pair(toolbox, table_target, name)
    view = drafter.with_options(loop_gate=GATES[gate], max_stages=2, **OPTIONS.get(name, {}))
    temperature = TEMPERATURES.get(name, 1.0)
    assert p_value(target, sampled_text(target, view, temperature=temperature), 2, temperature) > 1e-4
    assert record.count(lambda r: r.num_accepted > 0) >= 20
    assert record.count(lambda r: r.num_accepted < len(r.draft_ids)) >= 20
    if name == "eagle3_own_head":  # tokens that it cannot draft come from the target alone
        assert {token for r in record.rounds for token in r.draft_ids} == set(REDUCED.tolist())


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["mtp", "gemma4_assistant"])
def test_a_chain_that_drafts_the_likeliest_token_and_hands_over_q_fails(toolbox, table_target, monkeypatch, name):
    monkeypatch.setattr(StageDraw, "_noise", lambda self, token_ids, first: None)
    target, drafter = sampling_pair(toolbox, table_target, name)
    temperature = TEMPERATURES.get(name, 1.0)
    ids = sampled_text(target, drafter.with_options(), 800, temperature)
    assert p_value(target, ids, 2, temperature) < 1e-7


@pytest.mark.statistical
def test_a_reduced_vocabulary_whose_q_names_its_own_columns_fails(toolbox, table_target, monkeypatch):
    """The draft is in tokens, q in places of the shortlist."""
    right = speculative_loop._row_draft

    def row_draft(generator, blocks):
        draft = right(generator, blocks)
        if draft.pool_ids is not None:
            draft.pool_ids = (draft.pool_ids[..., None] == REDUCED).long().argmax(dim=-1)
        return draft

    monkeypatch.setattr(speculative_loop, "_row_draft", row_draft)
    target, drafter = sampling_pair(toolbox, table_target, "eagle3_own_head")
    assert p_value(target, sampled_text(target, drafter.with_options(), 800), 2) < 1e-7


@pytest.mark.statistical
def test_a_head_that_hides_its_correction_from_q_fails(toolbox, table_target, monkeypatch):
    drafter = build_sampling_drafter(toolbox, table_target, DRAFTERS["markov"])
    drafter.selector.markov_w2.weight.data.mul_(2.0)
    monkeypatch.setattr(StageDraw, "proposal_logits", lambda self, n: self.pool.log_probs[:, :n])
    assert p_value(table_target, sampled_text(table_target, drafter.with_options()), 2) < 1e-7


@pytest.mark.statistical
@pytest.mark.parametrize("anticipates", [False, True], ids=["before_the_token", "at_the_token"])
def test_a_confidence_cut_is_exact_when_it_is_decided_before_the_token(
    toolbox, table_target, monkeypatch, anticipates
):
    drafter = build_sampling_drafter(toolbox, table_target, DRAFTERS["markov_confidence"])
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
            text_ids=path[:, :0],
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
        inputs = HeadInputs(
            hidden, None, pool, anchor, none, none[..., 0].bool(), 0, None, embed, anchor[:, None][:, :0]
        )
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

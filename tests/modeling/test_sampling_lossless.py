"""
At temperature > 0 the text follows the target's own distribution exactly, however badly the drafter drafts.

The target's logits are known. A text of any length is tested against the exact law of each of its tokens, given the
tokens before it: summed over all places with the same previous token, the observed counts must fit the expected ones
(chi-square). Seeds are fixed. Variants with a known bias must fail the same test.
"""

from collections import defaultdict

import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_drelay.modeling import batch_drafting, candidate_generator, modeling_drelay, verification
from hf_drelay.modeling.candidate_generator import DRelayCandidateGenerator
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.modeling.modeling_heads import Pool
from hf_drelay.modeling.proposal import Proposal, StageDraw
from hf_drelay.modeling.speculative_loop import SpeculativeLoop
from hf_drelay.modeling.verification import RejectionPicker


pytestmark = pytest.mark.statistical

ALWAYS = float("-inf")
SIZE = 6
PROMPT = [1, 2]
STOP = 1
PLAUSIBLE = 1e-4  # smallest p-value of a right law, for any of the tests
IMPOSSIBLE = 1e-7  # largest p-value of a wrong one


@pytest.fixture(scope="module")
def target(toolbox):
    generator = torch.Generator().manual_seed(3)
    return toolbox.table_target(1.2 * torch.randn(SIZE, SIZE, generator=generator))


def build_drafter(toolbox, target, knowledge, noise, selector_scale):
    """
    A drafter that knows some of the target's logits after the likeliest tokens, with pools smaller than the
    vocabulary. Its selector has random weights, so q depends on the drafted tokens in its own way.
    """
    fields = {"layout": "shifted", "block_size": 2, "pool_size": 4, "selector_hidden_size": 16, "max_stages": 2}
    model = toolbox.drafter(target, num_hidden_layers=1, selector_scale=selector_scale, **fields)
    noises = noise * torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0))

    def head_inputs(rows, anchor_ids, session):
        inputs = DRelayModel.head_inputs(model, rows, anchor_ids, session)
        logits, token = [], anchor_ids
        for slot in range(inputs.hidden_states.shape[1]):
            after = target(token[None]).logits[0]
            logits.append(knowledge * after + noises[slot])
            token = after.argmax(dim=-1)
        inputs.pool = Pool.from_logits(torch.stack(logits, dim=1), model.config.pool_size)
        return inputs

    model.head_inputs = head_inputs
    return model


@pytest.fixture(scope="module")
def drafter(toolbox, target):
    """A drafter good enough for drafts to be accepted over the end of a stage."""
    return build_drafter(toolbox, target, knowledge=0.8, noise=0.4, selector_scale=0.8)


@pytest.fixture(scope="module")
def poor_drafter(toolbox, target):
    """A drafter whose q has little to do with the target."""
    return build_drafter(toolbox, target, knowledge=0.5, noise=1.0, selector_scale=1.3)


def draw(target, view, num_texts, max_new_tokens, **kwargs) -> list[list[int]]:
    """Texts of `generate()` with their prompt; `top_k=0` because transformers filters by default."""
    torch.manual_seed(0)
    prompt = torch.tensor([PROMPT])
    kwargs = {"top_k": 0, "attention_mask": torch.ones_like(prompt), "max_new_tokens": max_new_tokens} | kwargs
    return [
        target.generate(prompt, assistant_model=view, do_sample=True, **kwargs)[0].tolist() for _ in range(num_texts)
    ]


def law(target, prefix: list[int], processors) -> torch.Tensor:
    """Exact distribution `(V,)` of the token after `prefix`."""
    with torch.no_grad():
        logits = target(torch.tensor([prefix[-1:]])).logits[:, -1]
    return LogitsProcessorList(processors)(torch.tensor([prefix]), logits)[0].softmax(dim=-1)


def fit(observed: dict, expected: dict) -> float:
    """P-value of counts by row and token; tokens that are expected less than five times share a cell in their row."""
    statistic, freedom = 0.0, 0
    for row in expected:
        counts, means = observed[row], expected[row]
        assert not counts[means == 0].any(), "a token of probability zero was drawn"
        rare = means < 5
        cells = list(zip(counts[~rare].tolist(), means[~rare].tolist(), strict=True))
        if means[rare].sum() >= 5:
            cells.append((counts[rare].sum().item(), means[rare].sum().item()))
        elif cells:
            cells[-1] = (cells[-1][0] + counts[rare].sum().item(), cells[-1][1] + means[rare].sum().item())
        if len(cells) > 1:
            statistic += sum((count - mean) ** 2 / mean for count, mean in cells)
            freedom += len(cells) - 1
    assert freedom >= 4, "too few draws for a test"
    return float(stats.chi2.sf(statistic, freedom))


def p_value(target, texts, processors=(), only=None) -> float:
    """Fit of all generated tokens with their exact laws, by previous token; `only` this token against all others."""
    observed, expected = (defaultdict(lambda: torch.zeros(SIZE, dtype=torch.double)) for _ in range(2))
    known: dict = {}
    depends_on_last_only = not any(type(p) in PENALTIES for p in processors)
    for text in texts:
        for end in range(len(PROMPT), len(text)):
            prefix = text[:end]
            key = prefix[-1] if depends_on_last_only else tuple(prefix)
            if key not in known:
                known[key] = law(target, prefix, processors)
            observed[prefix[-1]][text[end]] += 1
            expected[prefix[-1]] += known[key]
    if only is not None:
        observed, expected = (
            {row: torch.stack([counts[only], counts.sum() - counts[only]]) for row, counts in table.items()}
            for table in (observed, expected)
        )
    return fit(observed, expected)


PENALTIES = (RepetitionPenaltyLogitsProcessor, NoRepeatNGramLogitsProcessor, SequenceBiasLogitsProcessor)
BIAS = {(0,): 2.5, (2, 3): -2.0, (4,): -2.5}

# Arguments of generate() and the processors they stand for, in the host's order.
SETTINGS = {
    "temperature_1.0": ({}, []),
    "temperature_0.7": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top_k": ({"temperature": 1.3, "top_k": 3}, [TemperatureLogitsWarper(1.3), TopKLogitsWarper(3)]),
    "top_p": ({"temperature": 0.7, "top_p": 0.8}, [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "repetition_penalty": (
        {"repetition_penalty": 5.0, "temperature": 0.9},
        [RepetitionPenaltyLogitsProcessor(5.0), TemperatureLogitsWarper(0.9)],
    ),
    "bias_and_suppression": (
        {"sequence_bias": BIAS, "suppress_tokens": [5], "top_k": 4},
        [SequenceBiasLogitsProcessor(BIAS), SuppressTokensLogitsProcessor([5]), TopKLogitsWarper(4)],
    ),
    "no_repeat_ngram": ({"no_repeat_ngram_size": 3}, [NoRepeatNGramLogitsProcessor(3)]),
}

# Setting, proposal, gate: each setting with "sample", the ones of the host's main features with both and both gates.
CASES = [
    ("temperature_1.0", "sample", None),
    ("temperature_1.0", "greedy", ALWAYS),
    ("temperature_0.7", "sample", ALWAYS),
    ("temperature_0.7", "greedy", None),
    ("top_k", "sample", None),
    ("top_k", "greedy", ALWAYS),
    ("top_p", "sample", ALWAYS),
    ("top_p", "greedy", None),
    ("min_p", "sample", None),
    ("repetition_penalty", "sample", ALWAYS),
    ("repetition_penalty", "greedy", None),
    ("bias_and_suppression", "sample", None),
    ("no_repeat_ngram", "sample", ALWAYS),
]


@pytest.mark.usefixtures("decoding_loop")
@pytest.mark.parametrize(
    ("setting", "proposal", "gate"), CASES, ids=[f"{s}-{p}-{'always' if g else 'one_stage'}" for s, p, g in CASES]
)
def test_text_follows_the_targets_law(target, drafter, record, setting, proposal, gate):
    kwargs, processors = SETTINGS[setting]
    view = drafter.with_options(loop_gate=gate, proposal=proposal)
    # A penalty on what was said says the same of every token after a while: many short texts instead of a long one.
    is_short = any(type(p) in PENALTIES for p in processors)
    texts = draw(target, view, *((60, 12) if is_short else (1, 700)), **kwargs)
    assert p_value(target, texts, processors) > PLAUSIBLE
    assert record.count(lambda r: r.num_accepted > 0) >= 20
    assert record.num_accepted_repairs >= 10
    assert record.count(lambda r: r.num_accepted < len(r.draft_ids)) >= 20
    assert record.count(lambda r: r.crosses_stages) >= (5 if gate else 0)
    assert record.count(lambda r: r.is_rejected_late) >= (5 if gate else 0)


class EndsWith(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids[0, -1].item() == self.token])


@pytest.mark.usefixtures("decoding_loop")
@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
@pytest.mark.parametrize("kind", ["stop_string", "criterion", "end_token"])
def test_text_follows_the_targets_law_when_generation_may_stop_inside_a_block(
    toolbox, target, drafter, record, kind, gate
):
    tokenizer = toolbox.tokenizer(48)
    kwargs = {
        "stop_string": {"stop_strings": [tokenizer.decode([STOP])], "tokenizer": tokenizer},
        "criterion": {"stopping_criteria": [EndsWith(STOP)]},
        "end_token": {"eos_token_id": STOP},
    }[kind]
    texts = draw(target, drafter.with_options(loop_gate=gate, proposal="sample"), 90, 30, **kwargs)
    assert p_value(target, texts) > PLAUSIBLE
    assert p_value(target, texts, only=STOP) > PLAUSIBLE
    stops = [text.index(STOP, len(PROMPT)) if STOP in text[len(PROMPT) :] else None for text in texts]
    assert all(end is None or end == len(text) - 1 for end, text in zip(stops, texts, strict=True))
    assert sum(end is not None for end in stops) >= 50
    assert record.count(lambda r: r.num_accepted > 0) >= 20


@pytest.mark.parametrize(("proposal", "gate"), [("sample", ALWAYS), ("greedy", None)], ids=["sample", "greedy"])
def test_first_three_tokens_follow_their_joint_law(target, drafter, proposal, gate):
    # By enumeration, so that dependence between the tokens of a round would show as well.
    kwargs, processors = SETTINGS["repetition_penalty"]
    view = drafter.with_options(loop_gate=gate, proposal=proposal)
    texts = draw(target, view, 350, 4, **kwargs)
    expected, observed = {}, {}
    for first in range(SIZE):  # the prefill's token
        expected[first] = torch.zeros(SIZE, SIZE, dtype=torch.double)
        observed[first] = torch.zeros(SIZE, SIZE, dtype=torch.double)
        share = law(target, [*PROMPT], processors)[first].double() * len(texts)
        for second in range(SIZE):
            given = law(target, [*PROMPT, first], processors)[second].double()
            expected[first][second] = share * given * law(target, [*PROMPT, first, second], processors).double()
    for text in texts:
        first, second, third = text[2:5]
        observed[first][second, third] += 1
    cells = {"all": torch.cat([t.flatten() for t in expected.values()])}
    assert fit({"all": torch.cat([t.flatten() for t in observed.values()])}, cells) > PLAUSIBLE


def test_sampled_texts_differ_when_the_seed_differs(target, drafter):
    texts = draw(target, drafter.with_options(proposal="sample"), 2, 40)
    assert texts[0] != texts[1]


def draw_batch(target, view, num_rows, max_new_tokens, **kwargs) -> list[list[int]]:
    """Texts of one call with a batch of the same prompt."""
    torch.manual_seed(0)
    prompt = torch.tensor([PROMPT] * num_rows)
    kwargs = {"top_k": 0, "attention_mask": torch.ones_like(prompt), "max_new_tokens": max_new_tokens} | kwargs
    return target.generate(prompt, assistant_model=view, do_sample=True, **kwargs).tolist()


class TestOwnLoop:
    """Batches, trees and the cost-aware gate, which only our own loop has."""

    @pytest.mark.parametrize("scheme", ["ragged", "lockstep"])
    @pytest.mark.parametrize("options", [{}, {"loop_gate": ALWAYS}], ids=["one_stage", "always"])
    def test_rows_of_a_batch_follow_the_targets_law(self, target, drafter, monkeypatch, record, scheme, options):
        # In lockstep a row is cut by what the others accepted, which its own later tokens must not see.
        monkeypatch.setattr(SpeculativeLoop, "_can_be_ragged", lambda self: scheme == "ragged")
        texts = draw_batch(target, drafter.with_options(proposal="sample", **options), 3, 300)
        assert p_value(target, texts) > PLAUSIBLE
        assert record.count(lambda r: r.num_accepted > 0) >= 20

    @pytest.mark.parametrize("proposal", ["sample", "coupled"])
    def test_trees_follow_the_targets_law(self, target, drafter, proposal):
        view = drafter.with_options(proposal=proposal, tree_budget=5, loop_gate=ALWAYS)
        assert p_value(target, draw(target, view, 1, 700)) > PLAUSIBLE
        assert view.statistics.acceptance_length > 1.5

    @pytest.mark.parametrize("proposal", ["sample", "greedy", "coupled"])
    def test_cost_aware_gate_follows_the_targets_law(self, target, drafter, proposal):
        view = drafter.with_options(proposal=proposal, loop_gate="auto")
        ticks = iter(range(10**9))  # time is the number of times somebody looked at the clock
        view.cost_model().clock = lambda: 1e-3 * next(ticks)
        view.cost_model().drafts = lambda: True  # every round chooses the length of its stages
        texts = draw(target, view, 1, 700)
        assert p_value(target, texts) > PLAUSIBLE
        assert view.statistics.num_rounds >= 50

    @pytest.mark.parametrize("scheme", ["ragged", "lockstep"])
    def test_rows_that_plan_their_stages_together_follow_the_law(self, target, drafter, monkeypatch, scheme):
        monkeypatch.setattr(SpeculativeLoop, "_can_be_ragged", lambda self: scheme == "ragged")
        view = drafter.with_options(proposal="sample", loop_gate="auto")
        ticks = iter(range(10**9))
        cost_model = view.cost_model(3)
        cost_model.clock, cost_model.drafts = (lambda: 1e-3 * next(ticks)), lambda: True
        assert p_value(target, draw_batch(target, view, 3, 300)) > PLAUSIBLE
        assert view.statistics.num_rounds >= 100 and len(set(view.statistics.num_drafted)) > 1

    def test_coupled_text_is_that_of_plain_sampling(self, target, drafter):
        expected = draw(target, None, 3, 60)
        for options in ({}, {"loop_gate": ALWAYS}, {"tree_budget": 6}, {"loop_gate": "auto"}):
            assert draw(target, drafter.with_options(proposal="coupled", **options), 3, 60) == expected


def with_stepped_costs(view):
    """A gate to which a second token in a forward is dear and a third one free: two drafts pay, and one does not."""
    model = view.cost_model()
    for num_tokens, ms in ((1, 30.0), (2, 60.0), (3, 60.0)):
        model.verify_ms.observe(num_tokens, ms)
    model.plain_ms.add(30.0)
    model.clock, model.drafts = lambda: 0.0, lambda: True
    model.observe_round = lambda *arguments: None
    model.calibration.acceptance = lambda *arguments: 0.9
    return view


class TestWithoutLooks:
    """On a device that must not be waited for, tokens are chosen ahead and walks end before they have settled."""

    @pytest.fixture(autouse=True)
    def queued(self, monkeypatch):
        for module in (modeling_drelay, candidate_generator, verification):
            monkeypatch.setattr(module, "look_is_free", lambda device: False)
        monkeypatch.setattr(modeling_drelay, "_MAX_PASSES", 1)  # a draft ends behind its first repair

    @pytest.mark.parametrize("options", [{}, {"loop_gate": ALWAYS}], ids=["one_stage", "loop"])
    def test_text_follows_the_law(self, target, poor_drafter, options):
        view = poor_drafter.with_options(proposal="sample", **options)
        texts = draw(target, view, 1, 1200)
        assert p_value(target, texts) > PLAUSIBLE
        assert len(set(view.statistics.num_drafted)) > 1, "no draft was cut"

    def test_text_follows_the_law_with_processors(self, target, drafter):
        kwargs = {"temperature": 0.8, "top_k": 4, "repetition_penalty": 1.3}
        stock = [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.8), TopKLogitsWarper(4)]
        texts = draw(target, drafter.with_options(proposal="sample"), 60, 14, **kwargs)
        assert p_value(target, texts, stock) > PLAUSIBLE

    def test_rows_in_lockstep_follow_the_law(self, target, poor_drafter, monkeypatch):
        # Their drafts differ in length and are cut to the shortest; what was cut is neither drafted nor accepted.
        monkeypatch.setattr(SpeculativeLoop, "_can_be_ragged", lambda self: False)
        view = poor_drafter.with_options(proposal="sample", loop_gate=-1.0)
        assert p_value(target, draw_batch(target, view, 3, 400)) > PLAUSIBLE
        counts = zip(view.statistics.num_drafted, view.statistics.num_accepted, strict=True)
        rounds = list(zip(*[counts] * 3, strict=True))  # a row after the other
        assert {1, 2} <= {rows[0][0] for rows in rounds}
        for rows in rounds:
            assert len({num_drafted for num_drafted, _ in rows}) == 1
            assert all(num_accepted <= num_drafted for num_drafted, num_accepted in rows)

    def test_gate_plans_a_stage_as_if_nothing_was_cut(self, target, drafter):
        view = with_stepped_costs(drafter.with_options(proposal="sample", loop_gate="auto", max_stages=1))
        texts = draw(target, view, 1, 1500)
        assert p_value(target, texts) > PLAUSIBLE
        assert set(view.statistics.num_drafted) == {1, 2}

    def test_gate_plans_a_chain_as_if_nothing_was_cut(self, toolbox, target, monkeypatch):
        fields = {"backbone": "eagle3", "layout": "shifted", "num_hidden_layers": 1, "use_mask_embedding": False}
        drafter = toolbox.drafter(target, block_size=2, pool_size=2, target_layer_ids=[0], **fields)

        def pool(states, session, slot):  # its second slot has nothing to draw behind token 1
            ids = torch.tensor([[[0, 1 if slot == 0 else 2]]])
            return Pool(ids, torch.zeros(1, 1, 2), torch.full((1, 1, 2), 0.5).log())

        monkeypatch.setattr(drafter.drafter, "pool", pool)
        view = with_stepped_costs(drafter.with_options(proposal="sample", loop_gate="auto", max_stages=1))
        bad_words = [[1, 0], [1, 2]]
        texts = draw(target, view, 1, 1500, bad_words_ids=bad_words)
        assert p_value(target, texts, [NoBadWordsLogitsProcessor(bad_words)]) > PLAUSIBLE
        assert set(view.statistics.num_drafted) == {1, 2}

    def test_walk_that_ends_at_its_first_repair_fails(self, target, poor_drafter, monkeypatch):
        # Right is to end behind it: this variant looks at the token that it drops.
        right = modeling_drelay.walk_passes

        def walk(*arguments):
            choices, logits, _ = right(*arguments)
            return choices, logits, (choices == 0).long().cumprod(dim=1).sum(dim=1)

        monkeypatch.setattr(modeling_drelay, "walk_passes", walk)
        texts = draw(target, poor_drafter.with_options(proposal="sample"), 1, 4000)
        assert p_value(target, texts) < IMPOSSIBLE


class TestBiasedVariantsFail:
    """The test has the power to see what it is for."""

    def test_own_loop_takes_rejected_tokens_from_p(self, target, poor_drafter, monkeypatch):
        def row(p, draft, place):
            if place < draft.tree.num_nodes:
                q = torch.zeros_like(p).scatter_(0, draft.pool_ids[place], draft.pool_logits[place].softmax(dim=-1))
                token = draft.tree.token_ids[place]
                if torch.rand(()) * q[token] < p[token]:
                    return torch.tensor([token])
            return torch.multinomial(p, 1)

        monkeypatch.setattr(RejectionPicker, "_row", staticmethod(row))
        texts = draw(target, poor_drafter.with_options(proposal="sample"), 1, 1500)
        assert p_value(target, texts) < IMPOSSIBLE

    def test_own_loop_chooses_the_length_of_a_stage_by_the_tokens_it_drew(self, target, drafter, monkeypatch):
        # The cost-aware gate must choose it from the pools alone.
        right = DRelayCandidateGenerator._cut_stage

        def cut_stage(self, block, input_ids):
            block, is_final = right(self, block, input_ids)
            return (block.first(0) if block.choices[:, :1].any() else block), is_final

        monkeypatch.setattr(DRelayCandidateGenerator, "_cut_stage", cut_stage)
        texts = draw(target, drafter.with_options(proposal="sample"), 1, 1500)
        assert p_value(target, texts) < IMPOSSIBLE

    def test_rows_plan_their_stages_by_the_tokens_they_drew(self, target, drafter, monkeypatch):
        # Cut alike, as a plan of all rows is, but by what the first of them drew.
        right = batch_drafting._draft_stage

        def stage(generators):
            blocks = right(generators)
            return [block.first(0) for block in blocks] if blocks[0].choices[:, :1].any() else blocks

        monkeypatch.setattr(batch_drafting, "_draft_stage", stage)
        texts = draw_batch(target, drafter.with_options(proposal="sample"), 2, 2000)
        assert p_value(target, texts[:1]) < IMPOSSIBLE

    def test_q_of_another_temperature(self, target, poor_drafter, monkeypatch):
        right = DRelayCandidateGenerator._vocabulary_logits
        monkeypatch.setattr(DRelayCandidateGenerator, "_vocabulary_logits", lambda self: 0.15 * right(self))
        view = poor_drafter.with_options(proposal="sample", decoding_loop="host")
        texts = draw(target, view, 1, 900)
        assert p_value(target, texts) < IMPOSSIBLE

    @pytest.mark.usefixtures("decoding_loop")
    def test_q_of_the_slot_without_the_tokens_before_it(self, target, poor_drafter, monkeypatch):
        monkeypatch.setattr(StageDraw, "proposal_logits", lambda self, n: self.pool.log_probs[:, :n])
        texts = draw(target, poor_drafter.with_options(proposal="sample"), 1, 900)
        assert p_value(target, texts) < IMPOSSIBLE

    @pytest.mark.usefixtures("decoding_loop")
    def test_drafted_tokens_are_dropped_for_their_own_low_probability(self, target, drafter, monkeypatch):
        right = DRelayCandidateGenerator._cut_stage

        def cut_stage(self, block, input_ids):
            block, is_final = right(self, block, input_ids)
            own = block.pool_logits.softmax(dim=-1).gather(2, block.choices[..., None])[0, :, 0]
            unlikely = (own < 0.4).nonzero().flatten().tolist()
            return block.first(unlikely[0]) if unlikely else block, is_final

        monkeypatch.setattr(DRelayCandidateGenerator, "_cut_stage", cut_stage)
        texts = draw(target, drafter.with_options(proposal="sample"), 1, 1500)
        assert p_value(target, texts) < IMPOSSIBLE

    def test_sampled_drafts_are_cut_before_a_token_that_stops(self, target, drafter, monkeypatch):
        right = DRelayCandidateGenerator.__init__

        def init(self, *args, **kwargs):
            right(self, *args, **kwargs)
            self.proposal = Proposal(kwargs["logits_processor"], SIZE, is_sampled=True)

        monkeypatch.setattr(DRelayCandidateGenerator, "__init__", init)
        view = drafter.with_options(proposal="sample", decoding_loop="host")
        texts = draw(target, view, 200, 20, stopping_criteria=[EndsWith(STOP)])
        assert p_value(target, texts, only=STOP) < IMPOSSIBLE

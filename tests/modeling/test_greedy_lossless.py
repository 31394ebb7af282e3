"""Greedy text with a drafter is that of plain `generate()`, while drafts are accepted, repaired and rejected."""

import threading

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)


pytestmark = pytest.mark.usefixtures("decoding_loop")

ALWAYS = float("-inf")
SOMETIMES = -2.0  # between the confidences of the scripted blocks
BLOCK_SIZE = 5

# Every pair of target and gate, and of layout and gate.
CASES = [
    (target, layout, gate)
    for i, target in enumerate(["llama", "qwen3", "gemma3", "mistral", "qwen3_moe"])
    for layout, gate in zip(
        ["fill_in", "shifted", "fill_in"] if i % 2 else ["shifted", "fill_in", "shifted"],
        [None, ALWAYS, SOMETIMES],
        strict=True,
    )
]


def case_id(case) -> str:
    target, layout, gate = case
    return f"{target}-{layout}-{ {None: 'one_stage', ALWAYS: 'always', SOMETIMES: 'sometimes'}[gate] }"


def assert_exercised(record, view, gate) -> None:
    """The call must have done what could go wrong: repair, accept over a stage's end, be rejected behind it."""
    classes = view.statistics.slot_classes
    assert record.num_accepted_repairs >= 10
    assert classes["repaired_right"] >= 10
    assert classes["repaired_harmful"] >= 1
    assert classes["kept_right"] >= 20
    if gate is None:
        assert set(view.statistics.num_stages) == {1}
    else:
        assert record.count(lambda r: r.crosses_stages) >= 2
        assert record.count(lambda r: r.is_rejected_late) >= 1
    if gate == SOMETIMES:
        assert record.count(lambda r: len(r.stage_lengths) == 1) >= 1
        assert record.count(lambda r: len(r.stage_lengths) == 3) >= 1


def run_both(toolbox, target, input_ids, layout="fill_in", gate=None, drafter_fields=None, options=None, **kwargs):
    """Plain text, drafted text and the view, with a drafter that follows the plain text."""
    expected = toolbox.greedy(target, input_ids, **kwargs)
    drafter = toolbox.scripted(target, expected[0].tolist(), layout=layout, **(drafter_fields or {}))
    view = drafter.with_options(loop_gate=gate, **(options or {}))
    return expected, toolbox.greedy(target, input_ids, view, **kwargs), view


@pytest.fixture(scope="module")
def cycle(toolbox):
    """A target whose greedy tokens are all different, its prompt, and 40 tokens of its text."""
    target, prompt = toolbox.cycle_target(), torch.tensor([[3]])
    return target, prompt, toolbox.greedy(target, prompt, max_new_tokens=40)[0, 1:].tolist()


def agreeing_view(toolbox, cycle, layout="fill_in", gate=None, **fields):
    """A view whose drafts are always right, so that every block is accepted to its end."""
    target, prompt, text = cycle
    drafter = toolbox.scripted(
        target, prompt[0].tolist() + text, spoiled=0.0, selector_scale=0.0, layout=layout, **fields
    )
    return drafter.with_options(loop_gate=gate)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_text_equals_plain_decoding_when_drafts_are_partly_wrong(toolbox, record, case):
    name, layout, gate = case
    target, prompt = toolbox.target(name), toolbox.prompt(12)
    expected, ids, view = run_both(toolbox, target, prompt, layout, gate, max_new_tokens=96)
    toolbox.assert_same_text(target, ids, expected)
    assert_exercised(record, view, gate)


def test_counts_tell_when_nothing_is_repaired_and_nothing_loops(toolbox, record):
    # The control of the test above: a drafter that keeps all and drafts one stage is lossless and proves nothing.
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    options = {"use_selector": False}
    expected, ids, view = run_both(toolbox, target, prompt, "fill_in", None, options=options, max_new_tokens=96)
    assert torch.equal(ids, expected)
    with pytest.raises(AssertionError):
        assert_exercised(record, view, ALWAYS)


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
@pytest.mark.parametrize("length", [1, 5, 30])
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_text_equals_plain_decoding_when_the_target_has_a_sliding_window(toolbox, name, length, gate):
    # Windows of 8: entered during generation, or shorter than the prompt; blocks and chains cross the window.
    target, prompt = toolbox.target(name), toolbox.prompt(length, seed=length)
    expected, ids, view = run_both(toolbox, target, prompt, "shifted", gate, max_new_tokens=32)
    toolbox.assert_same_text(target, ids, expected)
    assert view.statistics.acceptance_length > 1.5


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 30, "eos_token_id": [5, 73]},
        {"suppress_tokens": [5, 54, 73]},
        {"begin_suppress_tokens": [54, 5]},
        {"sequence_bias": {(5,): -6.0, (54, 81): 8.0, (22,): 3.0}},
        {"bad_words_ids": [[73], [54, 5], [5, 5]]},
        {"forced_eos_token_id": 7},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [i for i in range(96) if (i + len(ids)) % 3]},
        {"exponential_decay_length_penalty": (10, 1.2), "eos_token_id": 7},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [16]},
    ],
    ids=lambda kwargs: "+".join(kwargs),
)
@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
def test_text_equals_plain_decoding_when_processors_change_the_logits(toolbox, kwargs, gate):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    layout = "fill_in" if gate is None else "shifted"
    expected, ids, view = run_both(toolbox, target, prompt, layout, gate, **kwargs)
    assert torch.equal(ids, expected)
    assert not torch.equal(expected, toolbox.greedy(target, prompt)), "the processors changed nothing"
    assert view.statistics.acceptance_length > 2
    assert view.statistics.num_repaired_right >= 3


def test_text_equals_plain_decoding_when_the_head_has_a_shortlist(toolbox):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt)
    drafter = toolbox.drafter(target, draft_vocab_size=40)
    drafter.set_shortlist(torch.tensor([2, *range(57, 96)]))  # the end token, and others
    view = drafter.with_options(loop_gate=ALWAYS)
    assert torch.equal(toolbox.greedy(target, prompt, view), expected)
    assert view.statistics.num_rounds > 10


@pytest.mark.parametrize("layout", ["fill_in", "shifted"])
@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
@pytest.mark.parametrize("offset", range(2 * BLOCK_SIZE + 2))
def test_generation_ends_like_plain_decoding_when_a_draft_holds_an_end_token(
    toolbox, cycle, record, offset, gate, layout
):
    target, prompt, text = cycle
    ends = [text[offset], text[-1]]  # the second one comes much later
    expected = toolbox.greedy(target, prompt, eos_token_id=ends)
    view = agreeing_view(toolbox, cycle, layout, gate)
    assert torch.equal(toolbox.greedy(target, prompt, view, eos_token_id=ends), expected)
    assert expected.shape[1] == offset + 2
    assert all(set(r.draft_ids[:-1]).isdisjoint(ends) for r in record.rounds), "drafted on after an end token"


def test_generation_ends_like_plain_decoding_when_a_wrong_draft_is_an_end_token(toolbox, cycle):
    target, prompt, text = cycle
    expected = toolbox.greedy(target, prompt, eos_token_id=text[20])
    view = agreeing_view(toolbox, cycle, gate=ALWAYS)
    view.model.script.reference_ids[4] = text[20]  # comes far too early and must be rejected
    assert torch.equal(toolbox.greedy(target, prompt, view, eos_token_id=text[20]), expected)
    assert expected.shape[1] == 22


def test_text_equals_plain_decoding_when_the_prompt_ends_with_an_end_token(toolbox, cycle):
    target, prompt, text = cycle
    ends = [prompt[0, -1].item(), text[20]]
    expected = toolbox.greedy(target, prompt, eos_token_id=ends)
    view = agreeing_view(toolbox, cycle, gate=ALWAYS)
    assert torch.equal(toolbox.greedy(target, prompt, view, eos_token_id=ends), expected)
    assert expected.shape[1] == 22


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
@pytest.mark.parametrize("layout", ["fill_in", "shifted"])
def test_text_has_the_right_length_when_few_tokens_are_left(toolbox, cycle, record, layout, gate):
    target, prompt, _ = cycle
    view = agreeing_view(toolbox, cycle, layout, gate)
    for max_new_tokens in range(1, 2 * BLOCK_SIZE + 3):
        record.rounds.clear()
        expected = toolbox.greedy(target, prompt, max_new_tokens=max_new_tokens)
        ids = toolbox.greedy(target, prompt, view, max_new_tokens=max_new_tokens)
        assert torch.equal(ids, expected)
        # A cache of `max_length - 1` places must hold the context, the anchor and every drafted token.
        length = prompt.shape[1] + 1
        for r in record.rounds:
            assert length + len(r.draft_ids) <= prompt.shape[1] + max_new_tokens - 1
            length += len(r.committed_ids)


def test_text_equals_plain_decoding_when_the_prompt_is_one_token(toolbox):
    target = toolbox.target("qwen3")
    expected, ids, view = run_both(toolbox, target, torch.tensor([[7]]), "fill_in", ALWAYS)
    toolbox.assert_same_text(target, ids, expected)
    assert view.statistics.acceptance_length > 2


def test_text_equals_plain_decoding_when_the_model_itself_is_the_assistant(toolbox):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt)
    drafter = toolbox.scripted(target, expected[0].tolist(), loop_gate=-100.0, max_stages=2)
    assert torch.equal(toolbox.greedy(target, prompt, drafter), expected)
    # Options come from the configuration.
    assert max(drafter.statistics.num_stages) == 2
    assert drafter.statistics.acceptance_length > 2


def test_streamer_gets_the_tokens_of_plain_decoding(toolbox, decoding_loop):
    class Collector:
        def __init__(self):
            self.tokens, self.shapes, self.has_ended = [], [], False

        def put(self, value):
            self.shapes.append(value.shape)
            self.tokens += value.flatten().tolist()

        def end(self):
            self.has_ended = True

    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt)
    view = toolbox.scripted(target, expected[0].tolist()).with_options(loop_gate=ALWAYS)
    plain, drafted = Collector(), Collector()
    toolbox.greedy(target, prompt, streamer=plain)
    toolbox.greedy(target, prompt, view, streamer=drafted)
    assert drafted.tokens == plain.tokens == expected[0].tolist()
    assert drafted.has_ended
    if decoding_loop == "own":  # the host streams whole rounds
        assert drafted.shapes == plain.shapes


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
def test_returned_dictionary_equals_plain_decoding(toolbox, gate):
    target, prompt = toolbox.target("qwen3"), toolbox.prompt(12)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    wanted |= {"output_hidden_states": True, "repetition_penalty": 1.2, "max_new_tokens": 24}
    expected = toolbox.greedy(target, prompt, **wanted)
    view = toolbox.scripted(target, expected.sequences[0].tolist()).with_options(loop_gate=gate)
    output = toolbox.greedy(target, prompt, view, **wanted)
    assert type(output) is type(expected)
    assert torch.equal(output.sequences, expected.sequences)
    assert len(output.scores) == len(output.logits) == 24
    torch.testing.assert_close(output.scores, expected.scores, atol=1e-4, rtol=0)
    torch.testing.assert_close(output.logits, expected.logits, atol=1e-4, rtol=0)
    assert len(output.hidden_states) == len(expected.hidden_states)
    for own, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        assert len(own) == target.config.num_hidden_layers + 1
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)
    assert view.statistics.acceptance_length > 2


def test_returned_dictionary_has_no_hidden_states_when_none_are_asked_for(toolbox):
    target, prompt = toolbox.target("qwen3"), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt)
    view = toolbox.scripted(target, expected[0].tolist()).with_options(loop_gate=ALWAYS)
    output = toolbox.greedy(target, prompt, view, return_dict_in_generate=True)
    assert output.hidden_states is None and output.scores is None
    assert torch.equal(output.sequences, expected)
    # As after plain decoding, the newest token is not in the cache.
    assert output.past_key_values.get_seq_length() == expected.shape[1] - 1


def test_text_equals_plain_decoding_when_hidden_states_are_asked_for_without_a_dictionary(toolbox):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    expected, ids, view = run_both(toolbox, target, prompt, gate=ALWAYS, output_hidden_states=True)
    assert torch.equal(ids, expected)
    assert view.statistics.acceptance_length > 2


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_text_equals_plain_decoding_when_the_prompt_is_padded_left(toolbox, name):
    target, prompt = toolbox.target(name), toolbox.prompt(9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(13) >= 4).long()[None]
    expected = toolbox.greedy(target, padded, attention_mask=mask)
    # Padding is no context: the drafter's positions are those of the unpadded text.
    view = toolbox.scripted(target, expected[0, 4:].tolist()).with_options(loop_gate=ALWAYS)
    assert torch.equal(toolbox.greedy(target, padded, view, attention_mask=mask), expected)
    assert torch.equal(expected[:, 4:], toolbox.greedy(target, prompt))
    assert view.statistics.acceptance_length > 2


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
def test_text_equals_plain_decoding_when_only_embeddings_are_given(toolbox, gate):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    embeds = target.get_input_embeddings()(prompt).detach()
    mask = torch.ones_like(prompt)
    expected = toolbox.greedy(target, inputs_embeds=embeds, attention_mask=mask)
    script = prompt[0].tolist() + expected[0].tolist()
    view = toolbox.scripted(target, script).with_options(loop_gate=gate)
    assert torch.equal(toolbox.greedy(target, None, view, inputs_embeds=embeds, attention_mask=mask), expected)
    assert view.statistics.acceptance_length > 2


def test_text_equals_plain_decoding_when_embeddings_are_padded_left(toolbox):
    target, prompt = toolbox.target("llama"), toolbox.prompt(9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt], dim=1)
    embeds = target.get_input_embeddings()(padded).detach()
    mask = (torch.arange(13) >= 4).long()[None]
    expected = toolbox.greedy(target, inputs_embeds=embeds, attention_mask=mask)
    script = prompt[0].tolist() + expected[0].tolist()
    view = toolbox.scripted(target, script).with_options(loop_gate=ALWAYS)
    assert torch.equal(toolbox.greedy(target, None, view, inputs_embeds=embeds, attention_mask=mask), expected)
    assert view.statistics.acceptance_length > 2


def test_static_cache_is_never_overrun_when_the_length_limit_is_near(toolbox):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    static = {"cache_implementation": "static"}
    script = toolbox.greedy(target, prompt, max_new_tokens=20)[0].tolist()
    view = toolbox.scripted(target, script, spoiled=0.0, selector_scale=0.0).with_options(loop_gate=ALWAYS)
    if toolbox.version < (5, 24):
        with pytest.raises(ValueError, match=r"`cache_implementation='static'`.*transformers>=5\.24"):
            toolbox.greedy(target, prompt, view, **static)
        return
    for max_new_tokens in (1, 2, 3, 6, 7, 14, 20):
        ids = toolbox.greedy(target, prompt, view, max_new_tokens=max_new_tokens, **static)
        assert ids[0].tolist() == script[: 12 + max_new_tokens]


class EndsWith(StoppingCriteria):
    """A criterion that only the end of the text decides, so that it is missed when tokens come after it."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores, **kwargs):
        ids = input_ids[0].tolist()
        return torch.tensor([ids[len(ids) - len(self.tokens) :] == self.tokens])


def stopping_arguments(kind, text, offset, toolbox):
    last_two = text[max(0, offset - 1) : offset + 1]
    if kind == "criterion":
        return {"stopping_criteria": [EndsWith(last_two)]}
    tokenizer = toolbox.tokenizer(48)
    return {"stop_strings": [tokenizer.decode(last_two)], "tokenizer": tokenizer}


@pytest.mark.parametrize("kind", ["stop_string", "criterion"])
@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
@pytest.mark.parametrize("offset", range(2 * BLOCK_SIZE + 2))
def test_generation_stops_like_plain_decoding_when_a_draft_completes_a_criterion(toolbox, cycle, offset, gate, kind):
    target, prompt, text = cycle
    kwargs = stopping_arguments(kind, text, offset, toolbox)
    expected = toolbox.greedy(target, prompt, **kwargs)
    assert expected.shape[1] == offset + 2
    view = agreeing_view(toolbox, cycle, "shifted" if offset % 2 else "fill_in", gate)
    assert torch.equal(toolbox.greedy(target, prompt, view, **kwargs), expected)


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
@pytest.mark.parametrize("offset", range(2 * BLOCK_SIZE + 2))
def test_generation_stops_like_plain_decoding_when_the_user_passes_criteria_of_the_host(toolbox, cycle, offset, gate):
    # End tokens and a length limit that the generation config does not know.
    target, prompt, text = cycle
    view = agreeing_view(toolbox, cycle, gate=gate)
    for criterion in (EosTokenCriteria(text[offset]), MaxLengthCriteria(offset + 2)):
        expected = toolbox.greedy(target, prompt, stopping_criteria=[criterion])
        assert expected.shape[1] == offset + 2
        assert torch.equal(toolbox.greedy(target, prompt, view, stopping_criteria=[criterion]), expected)


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
def test_criterion_stops_like_plain_decoding_when_scores_are_collected(toolbox, cycle, gate):
    # Such a criterion may read the scores, which a draft has not: the host's loop then goes on without drafts.
    class LowScore(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            # Old versions of the host also ask about drafts, and then without scores.
            return torch.tensor([scores is not None and scores[-1].softmax(-1).max().item() < 0.43])

    target, prompt, _ = cycle
    kwargs = {"stopping_criteria": [LowScore()], "return_dict_in_generate": True, "output_scores": True}
    expected = toolbox.greedy(target, prompt, **kwargs).sequences
    assert 5 < expected.shape[1] < 49
    view = agreeing_view(toolbox, cycle, gate=gate)
    assert torch.equal(toolbox.greedy(target, prompt, view, **kwargs).sequences, expected)


@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_draft_ends_before_a_slot_when_all_its_candidates_are_banned(toolbox, record, slot, do_sample):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    banned = torch.arange(40, 48)
    kwargs = {"suppress_tokens": banned.tolist(), "max_new_tokens": 30}
    expected = toolbox.greedy(target, prompt, **kwargs)
    drafter = toolbox.scripted(target, expected[0].tolist())
    scripted_inputs = drafter.head_inputs

    def head_inputs(rows, anchor_ids, session):
        inputs = scripted_inputs(rows, anchor_ids, session)
        if inputs.pool.ids.shape[1] > slot:  # near the length limit there are fewer slots
            inputs.pool.ids[0, slot] = banned
        return inputs

    drafter.head_inputs = head_inputs
    view = drafter.with_options(loop_gate=ALWAYS)
    if do_sample:
        torch.manual_seed(0)
        ids = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), assistant_model=view, do_sample=True, **kwargs
        )
        assert set(banned.tolist()).isdisjoint(ids[0, 12:].tolist())
    else:
        assert torch.equal(toolbox.greedy(target, prompt, view, **kwargs), expected)
    if slot == 0:
        assert view.statistics.num_plain_rounds == 29 and not record.rounds
    else:
        assert {tuple(r.stage_lengths) for r in record.rounds} <= {(slot,), (1,)}


class NotThisNext(LogitsProcessor):
    """A user's processor: bans one token after each, and remembers on which lengths it was called."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        scores = scores.clone()
        scores[:, (input_ids[0, -1] * 7 + 5) % scores.shape[1]] = float("-inf")
        return scores


class CountingPenalty(RepetitionPenaltyLogitsProcessor):
    """A user's variant of a known processor, which grows with every call."""

    def __init__(self):
        super().__init__(1.0)
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        self.penalty += 0.05
        return super().__call__(input_ids, scores)


@pytest.mark.parametrize("kind", [NotThisNext, CountingPenalty])
def test_users_processor_sees_the_calls_of_plain_decoding_when_it_may_hold_state(toolbox, kind, decoding_loop):
    # The host's verification would call it on prefixes that are taken back later, which a state does not survive.
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    plain, own = kind(), kind()
    expected = toolbox.greedy(target, prompt, logits_processor=LogitsProcessorList([plain]))
    assert not torch.equal(expected, toolbox.greedy(target, prompt))
    view = toolbox.scripted(target, expected[0].tolist()).with_options(loop_gate=ALWAYS)
    ids = toolbox.greedy(target, prompt, view, logits_processor=LogitsProcessorList([own]))
    assert torch.equal(ids, expected)
    assert own.lengths == plain.lengths
    assert (view.statistics.num_rounds > 0) == (decoding_loop == "own")
    if decoding_loop == "own":
        assert view.statistics.acceptance_length > 2


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
def test_users_processor_is_called_by_the_target_alone_when_it_says_that_it_is_stateless(toolbox, gate, decoding_loop):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt, logits_processor=LogitsProcessorList([NotThisNext()]))
    view = toolbox.scripted(target, expected[0].tolist()).with_options(loop_gate=gate)
    processor = NotThisNext()
    processor.is_stateless = True
    ids = toolbox.greedy(target, prompt, view, logits_processor=LogitsProcessorList([processor]))
    assert torch.equal(ids, expected)
    statistics = view.statistics
    if decoding_loop == "own":
        assert processor.lengths == list(range(12, expected.shape[1]))
    else:
        # The host calls it once for each verified position: the prefill's, and all drafted ones with the bonus.
        verified = 1 + sum(drafted + 1 for drafted in statistics.num_drafted) + statistics.num_plain_rounds
        assert len(processor.lengths) == verified
    assert statistics.acceptance_length > 2


@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
def test_text_equals_plain_decoding_when_one_side_is_bfloat16(toolbox, side, gate):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    if side == "target":
        target = type(target)(target.config).eval()
        target.load_state_dict(toolbox.target("llama").state_dict())
        target.generation_config.eos_token_id = None
        target = target.to(torch.bfloat16)
    expected = toolbox.greedy(target, prompt)
    drafter = toolbox.scripted(target, expected[0].tolist())
    if side == "drafter":
        drafter = drafter.to(torch.bfloat16)
    view = drafter.with_options(loop_gate=gate)
    ids = toolbox.greedy(target, prompt, view)
    # A pass over many tokens rounds otherwise than one over a single token: near-ties of bfloat16 may flip.
    toolbox.assert_same_text(target, ids, expected, tie=0.05 if side == "target" else 1e-5)
    assert view.statistics.acceptance_length > 1.5


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 99])
def test_stages_are_capped_when_num_draft_tokens_is_set(toolbox, record, num_draft_tokens, gate):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    options = {"num_draft_tokens": num_draft_tokens}
    expected, ids, view = run_both(toolbox, target, prompt, "shifted", gate, options=options)
    assert torch.equal(ids, expected)
    assert max(max(r.stage_lengths) for r in record.rounds) == min(num_draft_tokens, BLOCK_SIZE)
    assert record.num_accepted_repairs >= 3


@pytest.mark.parametrize("max_stages", [1, 2, 5])
def test_rounds_have_no_more_stages_than_allowed(toolbox, record, max_stages):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    options = {"max_stages": max_stages}
    expected, ids, view = run_both(toolbox, target, prompt, "fill_in", ALWAYS, options=options)
    assert torch.equal(ids, expected)
    assert max(view.statistics.num_stages) == max_stages


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "always"])
def test_nothing_is_repaired_when_the_selector_is_off(toolbox, record, gate):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    options = {"use_selector": False}
    expected, ids, view = run_both(toolbox, target, prompt, "shifted", gate, options=options)
    assert torch.equal(ids, expected)
    assert not any(choice for r in record.rounds for choice in r.choices)
    assert view.statistics.acceptance_length > 2


def test_text_equals_plain_decoding_when_the_drafter_has_no_selector(toolbox):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    fields = {"use_selector": False}
    expected, ids, view = run_both(toolbox, target, prompt, "shifted", ALWAYS, drafter_fields=fields)
    assert torch.equal(ids, expected)
    assert view.model.selector is None
    assert view.statistics.acceptance_length > 2


def test_threads_that_share_a_drafter_get_their_own_texts_and_statistics(toolbox):
    target = toolbox.target("llama")
    prompts = [toolbox.prompt(12, seed=1), toolbox.prompt(17, seed=2)]
    options = [{"loop_gate": None}, {"loop_gate": ALWAYS, "max_stages": 2}]
    expected = [toolbox.greedy(target, prompt, max_new_tokens=64) for prompt in prompts]
    drafter = toolbox.scripted(target, expected[0][0].tolist())
    drafted, counts = [None, None], [None, None]

    def work(i, barrier=None):
        drafter.script.follow(expected[i][0].tolist())
        view = drafter.with_options(**options[i])
        if barrier is not None:
            barrier.wait()
        drafted[i] = toolbox.greedy(target, prompts[i], view, max_new_tokens=64)
        counts[i] = view.statistics.to_dict()

    for i in range(2):
        work(i)
    alone = list(counts)
    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(i, barrier)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert torch.equal(drafted[i], expected[i])
        assert counts[i] == alone[i]
    assert counts[0] != counts[1]

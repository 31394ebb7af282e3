"""
A batch with unequal prompts, padded left, is its rows run alone: greedily by token ids, and with random numbers known
ahead it is the batch of plain sampling. Rows accept different numbers of tokens and end at different places.
"""

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria

from hf_drelay.modeling.cache_rollback import CacheRollback
from hf_drelay.modeling.speculative_loop import SpeculativeLoop


ALWAYS = float("-inf")
LENGTHS = [12, 5, 9, 1, 7]
OPTIONS = {
    "chain": {},
    "loop": {"loop_gate": ALWAYS},
    "sometimes": {"loop_gate": -2.0},
    "tree": {"tree_budget": 7},
    "loop+tree": {"loop_gate": ALWAYS, "tree_budget": 7},
    "auto": {"loop_gate": "auto"},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(params=["ragged", "lockstep"])
def scheme(request, monkeypatch) -> str:
    """How rows advance."""
    if request.param == "lockstep":
        monkeypatch.setattr(SpeculativeLoop, "_can_be_ragged", lambda self: False)
    return request.param


def padded(toolbox, num_rows):
    """Prompts of unequal lengths as a batch with its mask."""
    width = max(LENGTHS[:num_rows])
    ids = torch.zeros(num_rows, width, dtype=torch.long)
    for row, length in enumerate(LENGTHS[:num_rows]):
        ids[row, width - length :] = toolbox.prompt(length, seed=row)[0]
    return ids, (ids != 0).long()


def strip(ids) -> list[list[int]]:
    """Rows without their left padding."""
    return [row[next(i for i, token in enumerate(row) if token) :] for row in ids.tolist()]


def alone(toolbox, target, num_rows, **kwargs) -> list[list[int]]:
    """Text of each prompt run alone by plain decoding."""
    return [
        toolbox.greedy(target, toolbox.prompt(length, seed=row), **kwargs)[0].tolist()
        for row, length in enumerate(LENGTHS[:num_rows])
    ]


@pytest.mark.parametrize("num_rows", [2, 5])
@every_option
def test_batch_equals_its_rows_run_alone(toolbox, monkeypatch, scheme, num_rows, options):
    target = toolbox.target("llama")
    expected = alone(toolbox, target, num_rows)
    ids, mask = padded(toolbox, num_rows)
    view = toolbox.scripted_batch(monkeypatch, target, expected).with_options(**options)
    output = toolbox.greedy(target, ids, view, attention_mask=mask)
    assert strip(output) == expected
    if options.get("loop_gate") != "auto":
        assert view.statistics.acceptance_length > (2 if scheme == "ragged" else 1.2)


@pytest.mark.parametrize("options", [OPTIONS["loop"], OPTIONS["tree"]], ids=["loop", "tree"])
@pytest.mark.parametrize("name", ["gemma3", "mistral", "qwen3_moe"])
def test_batch_equals_plain_decoding_whatever_the_target(toolbox, monkeypatch, name, options):
    # Sliding windows count slots, so their rows advance in lockstep.
    target, (ids, mask) = toolbox.target(name), padded(toolbox, 3)
    expected = toolbox.greedy(target, ids, attention_mask=mask)
    view = toolbox.scripted_batch(monkeypatch, target, strip(expected)).with_options(**options)
    output = toolbox.greedy(target, ids, view, attention_mask=mask)
    assert torch.equal(output, expected)
    assert view.statistics.num_rounds > 0


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_batch_equals_plain_decoding_whatever_the_cache(toolbox, monkeypatch, cache):
    if cache == "static" and toolbox.version < (5, 24):
        pytest.skip("static caches cannot be rolled back by this version")
    target, (ids, mask) = toolbox.target("llama"), padded(toolbox, 4)
    expected = toolbox.greedy(target, ids, attention_mask=mask, cache_implementation=cache)
    view = toolbox.scripted_batch(monkeypatch, target, strip(expected)).with_options(loop_gate=ALWAYS)
    output = toolbox.greedy(target, ids, view, attention_mask=mask, cache_implementation=cache)
    assert torch.equal(output, expected)


@every_option
def test_rows_end_where_they_end_alone(toolbox, monkeypatch, scheme, options):
    target, (ids, mask) = toolbox.target("llama"), padded(toolbox, 5)
    texts = alone(toolbox, target, 5)
    # Ends that come early in some rows, late in others, and never in one.
    ends = sorted({texts[0][12 + 3], texts[1][5 + 11], texts[2][9 + 30]})
    expected = toolbox.greedy(target, ids, attention_mask=mask, eos_token_id=ends, pad_token_id=0)
    lengths = {(row != 0).sum().item() for row in expected}
    assert len(lengths) >= 3
    view = toolbox.scripted_batch(monkeypatch, target, texts).with_options(**options)
    output = toolbox.greedy(target, ids, view, attention_mask=mask, eos_token_id=ends, pad_token_id=0)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("proposal", ["coupled", "greedy"])
@pytest.mark.parametrize("options", [OPTIONS["loop"], OPTIONS["tree"]], ids=["loop", "tree"])
def test_sampled_batch_is_that_of_plain_sampling(toolbox, monkeypatch, scheme, proposal, options):
    target, (ids, mask) = toolbox.target("llama"), padded(toolbox, 4)
    kwargs = {"do_sample": True, "attention_mask": mask, "max_new_tokens": 30, "temperature": 0.9, "pad_token_id": 0}
    kwargs["eos_token_id"] = list(range(60, 64))
    torch.manual_seed(5)
    expected, after = target.generate(ids, **kwargs), torch.rand(1)
    assert len({(row != 0).sum().item() for row in expected}) > 1
    drafter = toolbox.scripted_batch(monkeypatch, target, strip(expected))
    torch.manual_seed(5)
    view = drafter.with_options(proposal=proposal, **options)
    output = target.generate(ids, assistant_model=view, **kwargs)
    assert torch.equal(output, expected)
    assert torch.equal(torch.rand(1), after)


def test_several_sequences_are_those_of_plain_sampling(toolbox, monkeypatch):
    target, (ids, mask) = toolbox.target("llama"), padded(toolbox, 2)
    kwargs = {"do_sample": True, "attention_mask": mask, "max_new_tokens": 20, "num_return_sequences": 3}
    torch.manual_seed(1)
    expected = target.generate(ids, **kwargs)
    view = toolbox.scripted_batch(monkeypatch, target, strip(expected)).with_options(proposal="coupled")
    torch.manual_seed(1)
    assert torch.equal(target.generate(ids, assistant_model=view, **kwargs), expected)
    assert len({tuple(row) for row in expected.tolist()}) == 6


def test_batch_without_a_mask_equals_plain_decoding(toolbox, monkeypatch, scheme):
    target = toolbox.target("qwen3")
    ids = torch.cat([toolbox.prompt(8, seed=row) for row in range(3)])
    expected = toolbox.greedy(target, ids)
    view = toolbox.scripted_batch(monkeypatch, target, expected.tolist()).with_options(loop_gate=ALWAYS)
    assert torch.equal(toolbox.greedy(target, ids, view), expected)
    assert view.statistics.acceptance_length > 1.5


def test_calls_of_the_user_are_those_of_plain_decoding(toolbox, monkeypatch):
    class Processor(LogitsProcessor):
        def __init__(self):
            self.calls = []

        def __call__(self, input_ids, scores):
            self.calls.append(input_ids.tolist())
            return scores.index_fill(1, torch.tensor([3 + 7 * len(self.calls) % 60]), 1.0)

    class Criterion(StoppingCriteria):
        def __init__(self):
            self.calls = []

        def __call__(self, input_ids, scores, **kwargs):
            self.calls.append(input_ids.tolist())
            return (input_ids[:, -1] % 13 == 0) & (input_ids.shape[1] > 20)

    target, (ids, mask) = toolbox.target("llama"), padded(toolbox, 3)

    def run(view):
        processor, criterion = Processor(), Criterion()
        text = toolbox.greedy(
            target,
            ids,
            view,
            attention_mask=mask,
            logits_processor=LogitsProcessorList([processor]),
            stopping_criteria=[criterion],
        )
        return text, processor.calls, criterion.calls

    expected = run(None)
    view = toolbox.scripted_batch(monkeypatch, target, strip(expected[0])).with_options(loop_gate=ALWAYS)
    output = run(view)
    assert torch.equal(output[0], expected[0]) and output[1:] == expected[1:]
    assert view.statistics.acceptance_length > 1


@pytest.mark.parametrize("options", [OPTIONS["loop"], OPTIONS["tree"]], ids=["loop", "tree"])
def test_returned_outputs_are_those_of_plain_decoding(toolbox, monkeypatch, options):
    target, (ids, mask) = toolbox.target("llama"), padded(toolbox, 3)
    texts = alone(toolbox, target, 3)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    wanted |= {"attention_mask": mask, "eos_token_id": texts[1][5 + 6], "pad_token_id": 0, "max_new_tokens": 24}
    expected = toolbox.greedy(target, ids, **wanted)
    view = toolbox.scripted_batch(monkeypatch, target, texts).with_options(**options)
    output = toolbox.greedy(target, ids, view, **wanted)
    assert torch.equal(output.sequences, expected.sequences)
    torch.testing.assert_close(output.scores, expected.scores, atol=1e-4, rtol=0)
    torch.testing.assert_close(output.hidden_states, expected.hidden_states, atol=1e-4, rtol=0)
    for layer, other in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        seen = mask[:, None, :, None].bool()
        own, theirs = (x[:, :, : mask.shape[1]] * seen for x in (layer.keys, other.keys))
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)
        torch.testing.assert_close(
            layer.keys[..., mask.shape[1] :, :], other.keys[..., mask.shape[1] :, :], atol=1e-4, rtol=0
        )


def test_ragged_rows_need_fewer_rounds_than_rows_in_lockstep(toolbox, monkeypatch):
    target, (ids, mask) = toolbox.target("llama"), padded(toolbox, 5)
    drafter = toolbox.scripted_batch(monkeypatch, target, alone(toolbox, target, 5))
    forwards = []
    monkeypatch.setattr(
        SpeculativeLoop,
        "_verify",
        (lambda right: lambda self, *args: (forwards.append(self.is_ragged), right(self, *args))[1])(
            SpeculativeLoop._verify
        ),
    )
    toolbox.greedy(target, ids, drafter.with_options(), attention_mask=mask)
    monkeypatch.setattr(SpeculativeLoop, "_can_be_ragged", lambda self: False)
    toolbox.greedy(target, ids, drafter.with_options(), attention_mask=mask)
    assert 0 < forwards.count(True) < forwards.count(False)


def test_finished_rows_leave_layers_that_lie_on_another_device_than_the_tokens():
    cache = DynamicCache()
    keys = torch.arange(3.0).view(3, 1, 1, 1)
    cache.update(keys, keys, 0)
    loop = SpeculativeLoop.__new__(SpeculativeLoop)
    loop.is_ragged, loop.cached_rows, loop.device = True, [0, 1, 2], torch.device("meta")
    loop.cache, loop.rollback = cache, CacheRollback(cache)
    loop._kept_rows = lambda: [0, 2]
    loop._drop_finished_rows()
    assert cache.layers[0].keys.flatten().tolist() == [0.0, 2.0] and loop.cached_rows == [0, 2]


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_penalty": {"encoder_repetition_penalty": 1.2},
    "encoder_ngram": {"encoder_no_repeat_ngram_size": 3},
    "allowed_by_row": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(1 + row, 40, 2))},
}


@pytest.mark.parametrize("options", [OPTIONS["loop"], OPTIONS["tree"]], ids=["loop", "tree"])
@pytest.mark.parametrize("kwargs", PROCESSORS.values(), ids=PROCESSORS)
def test_processors_that_know_rows_act_as_in_plain_decoding(toolbox, monkeypatch, kwargs, options):
    # Left padding gives the repetition penalty a number for each row; others look up the row by its place.
    target, (ids, mask) = toolbox.target("llama"), padded(toolbox, 3)
    expected = toolbox.greedy(target, ids, attention_mask=mask, max_new_tokens=24, **kwargs)
    view = toolbox.scripted_batch(monkeypatch, target, strip(expected)).with_options(**options)
    output = toolbox.greedy(target, ids, view, attention_mask=mask, max_new_tokens=24, **kwargs)
    assert torch.equal(output, expected)
    assert view.statistics.num_rounds > 0


def test_padding_of_a_single_row_serves_the_penalties_of_a_tree(toolbox):
    target = toolbox.target("llama")
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), toolbox.prompt(7)], dim=1)
    kwargs = {"attention_mask": (ids != 0).long(), "repetition_penalty": 1.3, "max_new_tokens": 24}
    expected = toolbox.greedy(target, ids, **kwargs)
    view = toolbox.scripted(target, expected[0, 3:].tolist()).with_options(tree_budget=7)
    assert torch.equal(toolbox.greedy(target, ids, view, **kwargs), expected)


def test_several_sequences_of_a_prompt_keep_to_what_is_allowed(toolbox):
    target, ids = toolbox.target("llama"), toolbox.prompt(6)
    kwargs = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 16, "attention_mask": ids * 0 + 1}
    kwargs["prefix_allowed_tokens_fn"] = lambda row, ids: list(range(2, 30, 2))
    view = toolbox.drafter(target).with_options(proposal="coupled")
    torch.manual_seed(3)
    expected = target.generate(ids, **kwargs)
    torch.manual_seed(3)
    assert torch.equal(target.generate(ids, assistant_model=view, **kwargs), expected)

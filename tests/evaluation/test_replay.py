"""Replay along a response equals the real drafting that a call does, round by round."""

import functools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drelay.evaluation.replay import replay, replay_response
from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.draft_statistics import DraftStatistics
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.training.data import ResponseExample
from hf_drelay.training.objective import JointObjective, ObjectiveConfig


V, PROMPT_LENGTH, NUM_NEW = 12, 5, 30
FIELDS = ("num_committed", "num_drafted", "num_stages", "num_plain_rounds", "slot_classes")


@functools.cache
def make_target():
    """A tiny target without an end token, until a test makes one of a token of its text."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        initializer_range=0.25,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def make_prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Not token 0, which a call would take for padding.
    return [torch.randint(1, V, (1, PROMPT_LENGTH), generator=generator) for _ in range(2)]


@functools.cache
def greedy_responses() -> tuple[torch.Tensor, ...]:
    arguments = {"do_sample": False, "max_new_tokens": NUM_NEW}
    return tuple(make_target().generate(prompt, **arguments)[0] for prompt in make_prompts())


@functools.cache
def make_drelay(layout) -> DRelayModel:
    """
    A drafter that has half learned one of two responses, so that there are long and short acceptances, and repairs
    that help and harm.
    """
    target = make_target()
    config = DRelayConfig.for_target(
        target.config,
        num_hidden_layers=1,
        target_layer_ids=[0, 1],
        layout=layout,
        block_size=5,
        pool_size=4,
        selector_hidden_size=16,
        selector_num_heads=2,
        selector_num_layers=1,
        pair_rank=4,
        history_window=6,
    )
    torch.manual_seed(0)
    drelay = DRelayModel(config)
    drelay.drafter.initialize_from_target(target)
    adapter = drelay.adapter(target)
    ids = greedy_responses()[0][None]
    with torch.no_grad():
        states = adapter.tapped(target(ids, output_hidden_states=True).hidden_states, config.target_layer_ids)
    objective = JointObjective(drelay, adapter, ObjectiveConfig())
    optimizer = torch.optim.Adam(drelay.parameters(), lr=3e-3)
    anchors = torch.arange(PROMPT_LENGTH, ids.shape[1] - 1)[None]
    for _ in range(16):
        optimizer.zero_grad()
        objective(states, ids, torch.tensor([ids.shape[1]]), anchors)[0].backward()
        optimizer.step()
    with torch.no_grad():
        for name in ("rank_down.weight", "repaired_proj.weight", "pair_path.successor_table"):
            drelay.selector.get_parameter(name).normal_(std=0.7)
        drelay.selector.gate_down.bias += 1.0
    return drelay.eval()


OPTIONS = {
    "backbone": {"use_selector": False},
    "selector": {},
    "short": {"num_draft_tokens": 2},
    "loop": {"loop_gate": float("-inf"), "max_stages": 3},
    "gate": {"loop_gate": -2.0, "max_stages": 4},
    "short_loop": {"loop_gate": float("-inf"), "max_stages": 3, "num_draft_tokens": 2},
    "backbone_loop": {"use_selector": False, "loop_gate": -2.0, "max_stages": 3},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_layout = pytest.mark.parametrize("layout", ["shifted", "fill_in"])


def real_and_replayed(view, prompt, max_new_tokens=NUM_NEW):
    """Statistics of a real call and of a replay along what it wrote, and the ids it wrote."""
    target = make_target()
    output = target.generate(prompt, assistant_model=view, do_sample=False, max_new_tokens=max_new_tokens)[0]
    real = view.statistics
    limit = prompt.shape[1] + max_new_tokens
    replayed = replay_response(view, target, output, prompt.shape[1], max_length=limit)
    return real, replayed, output


def assert_same(real, replayed):
    assert {name: getattr(replayed, name) for name in FIELDS} == {name: getattr(real, name) for name in FIELDS}


def possible_ends() -> list[tuple[int, int]]:
    """Numbers of responses, and tokens that first occur after the first few of their tokens."""
    texts = [ids[PROMPT_LENGTH:].tolist() for ids in greedy_responses()]
    pairs = [(n, token) for n, text in enumerate(texts) for token in sorted(set(text)) if text.index(token) >= 4]
    assert len(pairs) >= 4
    return pairs


def set_end(view, end, monkeypatch) -> None:
    """Make `end` the end token of the target and of the drafter."""
    monkeypatch.setattr(make_target().generation_config, "eos_token_id", end)
    monkeypatch.setattr(view.config, "eos_token_id", end)


class TestEqualsRealDrafting:
    @every_layout
    @every_option
    def test_rounds_are_the_same_when_the_length_ends_the_response(self, layout, options):
        view = make_drelay(layout).with_options(**options)
        for prompt in make_prompts():
            real, replayed, output = real_and_replayed(view, prompt)
            assert len(output) == PROMPT_LENGTH + NUM_NEW
            assert_same(real, replayed)

    @every_layout
    @pytest.mark.parametrize("options", [OPTIONS["selector"], OPTIONS["loop"]], ids=["selector", "loop"])
    def test_rounds_are_the_same_when_an_end_token_ends_the_response(self, layout, options, monkeypatch):
        """Any token of the text may become the end token; drafts stop behind it, right or wrong."""
        view = make_drelay(layout).with_options(**options)
        for number, end in possible_ends():
            set_end(view, end, monkeypatch)
            real, replayed, output = real_and_replayed(view, make_prompts()[number])
            assert output[-1] == end and len(output) < PROMPT_LENGTH + NUM_NEW
            assert_same(real, replayed)

    @pytest.mark.parametrize("max_new_tokens", range(1, 7))
    def test_rounds_are_the_same_when_there_is_hardly_room(self, max_new_tokens):
        view = make_drelay("shifted").with_options(**OPTIONS["loop"])
        real, replayed, _ = real_and_replayed(view, make_prompts()[0], max_new_tokens=max_new_tokens)
        assert_same(real, replayed)

    def test_comparison_sees_acceptance_rejection_and_repairs_of_both_kinds(self):
        """Rounds in which nothing is accepted would be the same whatever was drafted."""
        total = DraftStatistics()
        for layout in ("shifted", "fill_in"):
            view = make_drelay(layout).with_options(**OPTIONS["loop"])
            for prompt in make_prompts():
                total.merge(real_and_replayed(view, prompt)[0])
        classes = total.slot_classes
        assert min(total.num_committed) == 1 and max(total.num_committed) > 6, "no acceptance across two stages"
        assert classes["kept_right"] >= 10 and classes["kept_wrong"] >= 3
        assert classes["repaired_right"] >= 2 and classes["repaired_harmful"] >= 2
        assert max(total.num_stages) == 3


class TestArguments:
    def test_known_states_give_the_same_as_computed_ones(self):
        target, ids = make_target(), greedy_responses()[0]
        view = make_drelay("shifted").with_options()
        with torch.no_grad():
            hidden = target(ids[None], output_hidden_states=True).hidden_states
        states = torch.cat([hidden[1], hidden[2]], dim=-1)[0]
        expected = replay_response(view, target, ids, PROMPT_LENGTH)
        assert_same(replay_response(view, target, ids, PROMPT_LENGTH, states=states), expected)

    def test_statistics_become_those_of_the_view(self):
        view = make_drelay("shifted").with_options()
        statistics = replay_response(view, make_target(), greedy_responses()[0], PROMPT_LENGTH)
        assert view.statistics is statistics

    @pytest.mark.parametrize("num_response", [1, 2, 7, None])
    def test_examples_are_merged_and_cut(self, num_response):
        view = make_drelay("shifted").with_options()
        examples = [ResponseExample(ids, PROMPT_LENGTH, "p", "greedy") for ids in greedy_responses()]
        end = None if num_response is None else PROMPT_LENGTH + num_response
        alone = [replay_response(view, make_target(), ids[:end], PROMPT_LENGTH) for ids in greedy_responses()]
        total = replay(view, make_target(), examples, num_response)
        assert total.num_committed == [n for statistics in alone for n in statistics.num_committed]
        assert total.num_plain_rounds == sum(statistics.num_plain_rounds for statistics in alone)

    @every_layout
    def test_response_with_an_end_token_counts_as_in_a_call_with_room_left(self, layout, monkeypatch):
        """Only a response that was cut ends at a length limit; one that ended by itself had room to draft on."""
        view = make_drelay(layout).with_options()
        for number, end in possible_ends():
            set_end(view, end, monkeypatch)
            real, _, output = real_and_replayed(view, make_prompts()[number], max_new_tokens=2 * NUM_NEW)
            assert output[-1] == end
            example = ResponseExample(output, PROMPT_LENGTH, "p", "greedy")
            assert replay(view, make_target(), [example]).num_committed == real.num_committed

    def test_tokens_of_all_rounds_are_the_response_but_its_first(self):
        """The prefill gives the first token; every other one is committed by a round."""
        view = make_drelay("shifted").with_options()
        statistics = replay_response(view, make_target(), greedy_responses()[0], PROMPT_LENGTH)
        assert sum(statistics.num_committed) + statistics.num_plain_rounds == NUM_NEW - 1

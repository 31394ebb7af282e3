"""
A round waits for the device once for each stage and once for the verification.

No device is needed to count: the tests pretend that a look at a tensor is not free, and count the calls that would
wait for one. The text must stay that of the walks that look whenever they want.
"""

import os
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hf_drelay.modeling import batch_drafting, candidate_generator, modeling_drelay, verification
from hf_drelay.modeling.host_transfer import read, send
from hf_drelay.modeling.speculative_loop import SpeculativeLoop


ALWAYS = float("-inf")
MODELING = os.path.dirname(verification.__file__)
LOOKS = ("item", "tolist", "cpu", "numpy", "nonzero", "equal", "allclose", "masked_select", "unique", "multinomial")
LOOKS += ("__bool__", "__int__", "__float__", "__index__", "__contains__")
COPIES = ("tensor", "as_tensor", "new_tensor", "from_numpy")


class Waits(TorchFunctionMode):
    """Counts calls that wait for a device: looks at values, and copies to it that are not `send`."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.is_paused = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        frame = sys._getframe(1)
        while f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
            frame = frame.f_back
        is_ours = os.path.dirname(frame.f_code.co_filename) == MODELING
        name = getattr(func, "__name__", "")
        if is_ours and not self.is_paused and frame.f_code is not send.__code__ and _waits(name, args):
            self.calls.append(f"{name} in {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))


def _waits(name: str, args) -> bool:
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(_waits_as_index(part) for part in index)
    if name == "equal" and args[0].dtype == torch.uint8:
        return False  # states of random number generators, which lie in the host's memory
    return name in LOOKS or name in COPIES


def _waits_as_index(part) -> bool:
    if isinstance(part, torch.Tensor):
        return part.dtype == torch.bool or part.dim() == 0
    return isinstance(part, list)


@pytest.fixture
def queued(monkeypatch):
    """As on a device with a queue."""
    for module in (modeling_drelay, candidate_generator, verification):
        monkeypatch.setattr(module, "look_is_free", lambda device: False)


@pytest.fixture
def rounds(monkeypatch):
    """For each round of a call: what waited, and how many stages were drafted."""
    waits, counted, stages = Waits(), [], []
    draft_stage, whole_round = batch_drafting._draft_stage, SpeculativeLoop._round

    def one_round(self):
        stages.clear()
        waits.calls = []
        # What the target and the host's code around it do is theirs, and the script of a drafter is no part of it.
        model, drafter, forward = self.view.model, self.view.model.drafter, self.forward
        prepare = self.target.prepare_inputs_for_generation
        with monkeypatch.context() as patch:
            patch.setattr(self, "forward", paused(forward))
            patch.setattr(self.target, "prepare_inputs_for_generation", paused(prepare))
            patch.setattr(model, "head_inputs", paused(model.head_inputs))
            if hasattr(drafter, "pool"):
                patch.setattr(drafter, "pool", paused(drafter.pool))
            with waits:
                whole_round(self)
        counted.append((waits.calls, len(stages)))

    def paused(function):
        def call(*args, **kwargs):
            waits.is_paused = True
            try:
                return function(*args, **kwargs)
            finally:
                waits.is_paused = False

        return call

    monkeypatch.setattr(batch_drafting, "_draft_stage", lambda rows: (stages.append(len(rows)), draft_stage(rows))[1])
    monkeypatch.setattr(SpeculativeLoop, "_round", one_round)
    return counted


GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
CALLS = {
    "greedy": (GREEDY, {"loop_gate": ALWAYS}),
    "greedy_penalty": (GREEDY | {"repetition_penalty": 1.2, "min_new_tokens": 4}, {"loop_gate": ALWAYS}),
    "greedy_gate": (GREEDY, {"loop_gate": -3.0}),
    "greedy_auto": (GREEDY, {"loop_gate": "auto"}),
    "greedy_scores": (GREEDY | {"return_dict_in_generate": True, "output_scores": True}, {"loop_gate": ALWAYS}),
    "tree": (GREEDY, {"loop_gate": ALWAYS, "tree_budget": 6}),
    "sample": (SAMPLED, {"proposal": "sample", "loop_gate": ALWAYS}),
    "sample_lockstep": (SAMPLED | {"return_dict_in_generate": True}, {"proposal": "sample", "loop_gate": -3.0}),
    "sample_penalty": (SAMPLED | {"repetition_penalty": 1.2}, {"proposal": "sample"}),
    "coupled": (SAMPLED, {"proposal": "coupled", "loop_gate": ALWAYS}),
    "coupled_penalty": (SAMPLED | {"repetition_penalty": 1.2}, {"proposal": "coupled", "loop_gate": ALWAYS}),
    "sampled_tree": (SAMPLED, {"proposal": "coupled", "tree_budget": 6}),
}


def batch(toolbox, num_rows):
    ids = torch.zeros(num_rows, 9, dtype=torch.long)
    for row in range(num_rows):
        ids[row, 2 * row :] = toolbox.prompt(9 - 2 * row, seed=row)
    return ids, {"attention_mask": (ids != 0).long(), "pad_token_id": 0, "max_new_tokens": 24}


@pytest.mark.usefixtures("queued")
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("call", "options"), CALLS.values(), ids=CALLS)
def test_round_waits_once_for_each_stage_and_once_more(toolbox, monkeypatch, rounds, call, options, num_rows):
    target, (ids, kwargs) = toolbox.target("llama"), batch(toolbox, num_rows)
    texts = [toolbox.greedy(target, row[row != 0][None])[0].tolist() for row in ids]
    view = toolbox.scripted_batch(monkeypatch, target, texts).with_options(**options)
    if view.cost_model(num_rows) is not None:
        view.cost_model(num_rows).drafts = lambda: True
    torch.manual_seed(0)
    target.generate(ids, assistant_model=view, **kwargs, **call)
    assert sum(num_stages for _, num_stages in rounds) >= 3
    for waits, num_stages in rounds:
        assert len(waits) <= num_stages + 1, waits


@pytest.mark.usefixtures("queued")
@pytest.mark.parametrize("backbone", ["eagle3", "markov"])
def test_round_of_other_drafters_waits_as_often(toolbox, rounds, backbone):
    target, prompt = toolbox.target("llama"), toolbox.prompt(9)
    fields = {
        "eagle3": {"backbone": "eagle3", "layout": "shifted", "num_hidden_layers": 1, "use_mask_embedding": False},
        "markov": {"head": "markov", "head_rank": 6, "use_confidence_head": True, "layout": "shifted"},
    }[backbone]
    options = {"confidence_threshold": 0.3} if backbone == "markov" else {}
    view = toolbox.drafter(target, **fields).with_options(loop_gate=ALWAYS, **options)
    target.generate(prompt, assistant_model=view, attention_mask=prompt * 0 + 1, **SAMPLED, max_new_tokens=20)
    assert sum(num_stages for _, num_stages in rounds) >= 3
    for waits, num_stages in rounds:
        assert len(waits) <= num_stages + 1, waits


def test_counter_sees_the_looks_of_a_walk_that_looks(toolbox, rounds):
    target, prompt = toolbox.target("llama"), toolbox.prompt(9)
    view = toolbox.drafter(target).with_options(proposal="sample")
    target.generate(prompt, assistant_model=view, attention_mask=prompt * 0 + 1, **SAMPLED, max_new_tokens=20)
    assert max(len(waits) - num_stages for waits, num_stages in rounds) > 1


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", [name for name, (_, options) in CALLS.items() if options.get("loop_gate") != "auto"])
def test_text_is_that_of_plain_decoding(toolbox, monkeypatch, queued, num_rows, name):
    call, options = CALLS[name]
    if options.get("proposal") == "sample":
        pytest.skip("its law is tested, its random numbers are others")
    target, (ids, kwargs) = toolbox.target("llama"), batch(toolbox, num_rows)
    torch.manual_seed(3)
    expected = target.generate(ids, **kwargs, **call)
    expected = expected if isinstance(expected, torch.Tensor) else expected.sequences
    texts = [[token for token in row if token] for row in expected.tolist()]
    view = toolbox.scripted_batch(monkeypatch, target, texts).with_options(**options)
    torch.manual_seed(3)
    output = target.generate(ids, assistant_model=view, **kwargs, **call)
    output = output if isinstance(output, torch.Tensor) else output.sequences
    assert torch.equal(output, expected)
    assert view.statistics.acceptance_length > 1.2


def test_values_are_read_as_they_are():
    tensors = [
        torch.tensor([[1, -2], [3, 2**40]]),
        torch.tensor([0.1, float("-inf"), -3e-30]),
        torch.tensor(True),
        torch.zeros(2, 0, 3),
        torch.tensor([[[7]]], dtype=torch.int32),
    ]
    assert read(*tensors) == [tensor.tolist() for tensor in tensors]


def test_values_are_sent_as_they_are():
    assert send([[1, 2], [3, 4]], torch.device("cpu")).tolist() == [[1, 2], [3, 4]]

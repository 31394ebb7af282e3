"""`compile_drafter`: the text and the drafts stay what they are, and shapes come back instead of growing."""

import copy

import pytest
import torch

from hf_drelay.modeling import batch_drafting, draft_view


SLIDING = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
DRAFTERS = {"relay": {}, "shifted": {"layout": "shifted"}, "sliding": SLIDING}
WAYS = {
    "one_stage": {"loop_gate": None},
    "loop": {"loop_gate": float("-inf"), "max_stages": 3, "num_draft_tokens": 2},
    "tree": {"loop_gate": None, "tree_budget": 4},
    "auto": {"loop_gate": "auto"},
}


@pytest.fixture
def shapes(monkeypatch):
    """Shapes that were compiled; the compiler itself only runs what it was given."""
    compiled = []

    def backend(graph, inputs):
        compiled.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)])
        return graph.forward

    right = torch.compile
    monkeypatch.setattr(draft_view.torch, "compile", lambda f, **kwargs: right(f, backend=backend, **kwargs))
    monkeypatch.setattr(batch_drafting, "_SHORTEST", 16)
    torch._dynamo.reset()
    yield compiled
    torch._dynamo.reset()


CASES = [*((name, "one_stage") for name in DRAFTERS), *(("relay", way) for way in list(WAYS)[1:])]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_text_and_drafts_are_those_without_it(toolbox, shapes, name, way):
    target, prompt = toolbox.target("llama"), toolbox.prompt(7)
    drafter = toolbox.drafter(target, **DRAFTERS[name])
    plain, compiled = (drafter.with_options(**WAYS[way], compile_drafter=is_on) for is_on in (False, True))
    if way == "auto":
        for view in (plain, compiled):
            view.cost_model().clock, view.cost_model().drafts = (lambda: 0.0), lambda: True
    expected = toolbox.greedy(target, prompt, max_new_tokens=30)
    assert toolbox.greedy(target, prompt, plain, max_new_tokens=30).tolist() == expected.tolist()
    assert toolbox.greedy(target, prompt, compiled, max_new_tokens=30).tolist() == expected.tolist()
    assert compiled.statistics.num_committed == plain.statistics.num_committed
    assert compiled.statistics.num_drafted == plain.statistics.num_drafted
    assert shapes


@pytest.mark.parametrize("num_rows", [1, 3])
def test_few_shapes_are_compiled(toolbox, shapes, num_rows):
    target = toolbox.target("llama")
    drafter = toolbox.drafter(target)
    prompt = torch.cat([toolbox.prompt(7)] * num_rows)
    view = drafter.with_options(loop_gate=None, compile_drafter=True)
    for _ in range(2):
        out = target.generate(prompt, assistant_model=view, do_sample=False, max_new_tokens=50, eos_token_id=None)
        assert out.shape[1] == 57
    assert len(view.statistics.num_committed) >= 10
    assert len(shapes) <= 3  # contexts of up to 16, 32 and 64


def test_copy_of_a_view_drafts_with_its_own_weights(toolbox, shapes):
    target, prompt = toolbox.target("llama"), toolbox.prompt(7)
    view = toolbox.drafter(target).with_options(compile_drafter=True)
    toolbox.greedy(target, prompt, view, max_new_tokens=8)
    twin = copy.deepcopy(view)
    for parameter in twin.model.drafter.parameters():
        parameter.data.zero_()
    toolbox.greedy(target, prompt, twin, max_new_tokens=8)
    embeds = torch.ones(1, twin.config.block_size, twin.config.hidden_size)
    positions = torch.arange(twin.config.block_size)[None]
    rows = twin.compiled_backbone(embeds, positions, twin.model.drafter.new_cache()).last_hidden_state
    assert not rows.any()


def test_compilation_is_refused_where_nothing_would_be_gained(toolbox):
    target = toolbox.target("llama")
    chain = toolbox.drafter(
        target,
        backbone="eagle3",
        layout="shifted",
        num_hidden_layers=1,
        use_mask_embedding=False,
        target_layer_ids=[0],
    )
    with pytest.raises(ValueError, match="`compile_drafter` is True, but a drafter with `backbone` 'eagle3'"):
        chain.with_options(compile_drafter=True)
    with pytest.raises(ValueError, match="`compile_drafter` is 1; expected True or False"):
        toolbox.drafter(target).with_options(compile_drafter=1)
    drafter = toolbox.drafter(target)
    drafter.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="`compile_drafter` pads the context"):
        drafter.with_options(compile_drafter=True)

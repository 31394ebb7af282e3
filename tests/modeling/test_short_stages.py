"""Stages that are shorter than a block, because of a cap or of the length limit, read the slots that are left."""

import pytest
import torch

from hf_drelay.modeling.modeling_selector import CandidateRead


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_candidates_are_read_at_their_true_distance_when_a_stage_is_short(toolbox, num_slots):
    # The same as in a whole block whose later slots cannot be read, since all their candidates have probability zero.
    drafter = toolbox.drafter(toolbox.target("llama"), layout="shifted")
    read = drafter.selector.candidate_read
    assert isinstance(read, CandidateRead)
    config = drafter.config
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, config.num_drafts, config.selector_hidden_size, generator=generator)
    embeds = torch.randn(1, config.num_drafts, config.pool_size, config.selector_hidden_size, generator=generator)
    log_probs = torch.randn(1, config.num_drafts, config.pool_size, generator=generator).log_softmax(dim=-1)
    hidden = log_probs.clone()
    hidden[:, num_slots:] = float("-inf")
    with torch.no_grad():
        read.log_prob_scale.fill_(1.0)
        read.distance_bias.table.normal_(generator=generator)
        whole = read(x, embeds, hidden)[:, :num_slots]
        short = read(x[:, :num_slots], embeds[:, :num_slots], log_probs[:, :num_slots])
    torch.testing.assert_close(short, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["fill_in", "shifted"])
def test_no_slot_is_scored_that_cannot_be_verified(toolbox, layout):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt, max_new_tokens=20)
    drafter = toolbox.scripted(target, expected[0].tolist(), layout=layout)
    head_inputs, scored = drafter.head_inputs, []

    def counted(rows, anchor_ids, session):
        inputs = head_inputs(rows, anchor_ids, session)
        scored.append((session.anchor_position, inputs.pool.ids.shape[1]))
        return inputs

    drafter.head_inputs = counted
    view = drafter.with_options(loop_gate=float("-inf"), num_draft_tokens=3)
    assert torch.equal(toolbox.greedy(target, prompt, view, max_new_tokens=20), expected)
    # The last token of the limit is always the target's own.
    assert all(num_slots == min(3, 32 - 1 - (anchor + 1)) for anchor, num_slots in scored)
    assert min(num_slots for _, num_slots in scored) < 3

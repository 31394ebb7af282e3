"""Stages that are shorter than a block, because of a cap or of the length limit."""

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
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_short_stage_drafts_the_first_tokens_of_a_whole_one(toolbox, record, layout, num_draft_tokens):
    # Without the Global Read, which sees the slots that are scored, no slot depends on later ones.
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    drafter = toolbox.drafter(target, layout=layout, selector_scale=4.0, use_global_read=False)
    first_rounds = []
    for limit in (None, num_draft_tokens):
        record.rounds.clear()
        toolbox.greedy(target, prompt, drafter.with_options(num_draft_tokens=limit), max_new_tokens=8)
        first_rounds.append(record.rounds[0])
    whole, short = first_rounds
    assert len(whole.draft_ids) == drafter.config.num_drafts
    assert any(whole.choices), "nothing was repaired"
    assert short.draft_ids == whole.draft_ids[:num_draft_tokens]
    assert short.choices == whole.choices[:num_draft_tokens]

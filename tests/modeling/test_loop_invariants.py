"""Invariants of our own loop over random batches, drafts and options: what the cache holds, and what is committed."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_drelay.modeling.speculative_loop import SpeculativeLoop


ALWAYS = float("-inf")
OPTIONS = [
    {},
    {"loop_gate": ALWAYS},
    {"loop_gate": -2.0, "num_draft_tokens": 2},
    {"tree_budget": 5},
    {"loop_gate": ALWAYS, "tree_budget": 5},
]


def checked(round_of_loop):
    """The round of the loop, followed by a look at the cache."""

    def run(self):
        round_of_loop(self)
        going_on = [group for group in self.groups if not group.is_done]
        for group in going_on:
            for row in group.rows:
                # Every token but the newest, and but those that wait for a replay.
                held = group.input_ids.shape[1] - 1 - self.rollback.num_pending
                assert self.lengths[row] == held
        if going_on:
            lengths = [self.lengths[row] for group in going_on for row in group.rows]
            assert int(self.cache.get_seq_length()) == self.num_slots == max(lengths)

    return run


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    spoiled=st.floats(0.0, 1.0),
    options=st.sampled_from(OPTIONS),
    is_ragged=st.booleans(),
    seed=st.integers(0, 99),
)
def test_batch_is_its_rows_and_the_cache_holds_what_is_committed(toolbox, lengths, spoiled, options, is_ragged, seed):
    target, width = toolbox.target("llama"), max(lengths)
    prompts = [toolbox.prompt(length, seed=seed + row) for row, length in enumerate(lengths)]
    alone = [toolbox.greedy(target, prompt, max_new_tokens=14)[0].tolist() for prompt in prompts]
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - lengths[row] :] = prompt[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeLoop, "_round", checked(SpeculativeLoop._round))
        if not is_ragged:
            patch.setattr(SpeculativeLoop, "_can_be_ragged", lambda self: False)
        drafter = toolbox.scripted_batch(patch, target, alone, spoiled=spoiled, seed=seed)
        view = drafter.with_options(**options)
        output = toolbox.greedy(target, ids, view, attention_mask=(ids != 0).long(), max_new_tokens=14)
    assert [row[width - length :] for row, length in zip(output.tolist(), lengths, strict=True)] == alone

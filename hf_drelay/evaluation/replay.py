"""Replay: what a drafter would have accepted on responses that the target itself wrote greedily.

For greedy decoding the match of the drafts with such a response, anchor by anchor, is exactly what verification would
have accepted, so τ needs no verification. The drafting itself is that of the candidate generator, several responses at
a time as in a batch of our own loop.
"""

from collections.abc import Iterable
from itertools import islice

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, LogitsProcessorList

from hf_drelay.modeling.batch_drafting import draft_rounds
from hf_drelay.modeling.draft_statistics import DraftStatistics


@torch.no_grad()
def tapped_states(model, target, input_ids: torch.LongTensor) -> torch.FloatTensor:
    """Hidden states `(T, L*H)` that the drafter of `model` taps from the target, of tokens `(T,)`."""
    ids = input_ids.to(target.device)
    outputs = target.get_decoder()(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    return model.adapter(target).tapped(outputs.hidden_states, model.config.target_layer_ids)[0]


class ReplayedResponse:
    """
    One response along which is drafted.

    Args:
        view (`DraftView`): Drafter with its options.
        target (`PreTrainedModel`): The target that wrote the response.
        input_ids (`torch.LongTensor` of shape `(T,)`): Prompt and response.
        prompt_length (`int`): Tokens of the prompt.
        max_length (`int`, *optional*): Length limit of the call that wrote the response. By default `T`, or beyond a
            whole round when the response ends with an end token.
        states (`torch.FloatTensor` of shape `(T, L*H)`, *optional*): Tapped hidden states, if they are known already.
    """

    def __init__(self, view, target, input_ids, prompt_length, max_length=None, states=None):
        self.ids = input_ids.to(target.device)
        self.states = tapped_states(view.model, target, self.ids) if states is None else states
        if max_length is None:
            max_length = len(self.ids)
            if self.ids[-1].item() in view.config.eos_token_ids:  # it ended by itself: there was room for a round
                max_length += view.options.max_stages * view.config.num_drafts + 1
        generation_config = GenerationConfig(do_sample=False, max_length=max_length)
        generation_config._eos_token_tensor = torch.tensor(view.config.eos_token_ids, device=target.device)
        self.generator = view.build_candidate_generator(
            target, generation_config, self.ids[None], LogitsProcessorList(), {}
        )
        self.anchor, self.num_fed = prompt_length, 0  # the anchor is the prefill's token

    @property
    def is_over(self) -> bool:
        return self.anchor >= len(self.ids) - 1

    @property
    def statistics(self) -> DraftStatistics:
        return self.generator.statistics

    def committed(self) -> torch.LongTensor:
        """Tokens `(1, T)` up to the anchor; the states before it are given to the drafter."""
        self.generator.feed(self.states[None, self.num_fed : self.anchor])
        self.num_fed = self.anchor
        return self.ids[None, : self.anchor + 1]

    def verify(self, blocks: list) -> None:
        """Accept of the drafted `blocks` what the response says, and its next token."""
        drafts = torch.cat([block.draft_ids[0] for block in blocks]) if blocks else self.ids[:0]
        truth = self.ids[self.anchor + 1 : self.anchor + 1 + len(drafts)]
        right = drafts[: len(truth)].to(truth.device) == truth
        num_accepted = int(right.long().cumprod(0).sum())
        committed = self.ids[self.anchor + 1 : self.anchor + 2 + num_accepted]
        self.generator.record_round(committed.tolist())
        self.anchor += len(committed)


@torch.no_grad()
def replay_responses(responses: Iterable[ReplayedResponse], batch_size: int = 8) -> list[DraftStatistics]:
    """Replay `batch_size` responses at a time; returns the statistics of each, in order."""
    waiting, live, results = iter(responses), [], []
    while True:
        started = list(islice(waiting, batch_size - len(live)))
        results += [response.statistics for response in started]
        live = [response for response in (*live, *started) if not response.is_over]
        if not live and not started:
            return results
        if live:
            rounds = draft_rounds([r.generator for r in live], [r.committed() for r in live])
            for response, blocks in zip(live, rounds, strict=True):
                response.verify(blocks)


def replay_response(view, target, input_ids, prompt_length, max_length=None, states=None) -> DraftStatistics:
    """Draft along one greedy response; arguments as in [`ReplayedResponse`]."""
    return replay_responses([ReplayedResponse(view, target, input_ids, prompt_length, max_length, states)])[0]


def replay(
    view, target, examples: Iterable, max_response: int | None = None, quiet: bool = True, batch_size: int = 8
) -> DraftStatistics:
    """Merged statistics of examples; `max_response` cuts their responses to that many tokens."""

    def responses():
        for example in tqdm(list(examples), desc="replay", unit="response", disable=quiet):
            end = None if max_response is None else example.prompt_length + max_response
            yield ReplayedResponse(view, target, example.input_ids[:end], example.prompt_length)

    total = DraftStatistics()
    for statistics in replay_responses(responses(), batch_size):
        total.merge(statistics)
    return total


__all__ = ["ReplayedResponse", "replay", "replay_response", "replay_responses", "tapped_states"]

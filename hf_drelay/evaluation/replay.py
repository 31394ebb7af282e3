"""Replay: what a drafter would have accepted on responses that the target itself wrote greedily.

For greedy decoding the match of the drafts with such a response, anchor by anchor, is exactly what verification would
have accepted, so τ needs no verification. The drafting itself is that of the candidate generator.
"""

from collections.abc import Iterable

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, LogitsProcessorList

from hf_drelay.modeling.draft_statistics import DraftStatistics


@torch.no_grad()
def tapped_states(model, target, input_ids: torch.LongTensor) -> torch.FloatTensor:
    """Hidden states `(T, L*H)` that the drafter of `model` taps from the target, of tokens `(T,)`."""
    ids = input_ids.to(target.device)
    outputs = target.get_decoder()(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    return model.adapter(target).tapped(outputs.hidden_states, model.config.target_layer_ids)[0]


@torch.no_grad()
def replay_response(view, target, input_ids, prompt_length, max_length=None, states=None) -> DraftStatistics:
    """
    Draft along one greedy response.

    Args:
        view (`DraftView`): Drafter with its options.
        target (`PreTrainedModel`): The target that wrote the response.
        input_ids (`torch.LongTensor` of shape `(T,)`): Prompt and response.
        prompt_length (`int`): Tokens of the prompt.
        max_length (`int`, *optional*): Length limit of the call that wrote the response. By default `T`, or beyond a
            whole round when the response ends with an end token.
        states (`torch.FloatTensor` of shape `(T, L*H)`, *optional*): Tapped hidden states, if they are known already.
    """
    ids = input_ids.to(target.device)
    if states is None:
        states = tapped_states(view.model, target, ids)
    if max_length is None:
        max_length = len(ids)
        if ids[-1].item() in view.config.eos_token_ids:  # it ended by itself, so the call had room for a whole round
            max_length += view.options.max_stages * view.config.num_drafts + 1
    generation_config = GenerationConfig(do_sample=False, max_length=max_length)
    generation_config._eos_token_tensor = torch.tensor(view.config.eos_token_ids, device=target.device)
    generator = view.build_candidate_generator(target, generation_config, ids[None], LogitsProcessorList(), {})
    end, fed = len(ids), 0
    anchor = prompt_length  # the prefill's token
    while anchor < end - 1:
        generator.session.extend(states[None, fed:anchor])
        fed = anchor
        blocks = generator.draft_round(ids[None, : anchor + 1])
        drafts = torch.cat([b.draft_ids[0] for b in blocks]) if blocks else ids[:0]
        truth = ids[anchor + 1 : anchor + 1 + len(drafts)]
        right = drafts[: len(truth)].to(truth.device) == truth
        num_accepted = int(right.long().cumprod(0).sum())
        committed = ids[anchor + 1 : anchor + 2 + num_accepted]
        generator.record_round(committed.tolist())
        anchor += len(committed)
    return generator.statistics


def replay(view, target, examples: Iterable, max_response: int | None = None, quiet: bool = True) -> DraftStatistics:
    """Merged statistics of examples; `max_response` cuts their responses to that many tokens."""
    total = DraftStatistics()
    for example in tqdm(list(examples), desc="replay", unit="response", disable=quiet):
        end = None if max_response is None else example.prompt_length + max_response
        total.merge(replay_response(view, target, example.input_ids[:end], example.prompt_length))
    return total

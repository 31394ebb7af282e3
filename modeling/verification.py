"""Verification: the target's logits of a whole draft are walked as plain decoding would have walked them.

A walk repeats the body of the host's decoding loop (processors, choice, stopping criteria, outputs) for one verified
position after the other while the draft holds the chosen token. Everything a user can hook into therefore sees the
calls of plain decoding: the same arguments, in the same order, for committed positions only. Rows that advance
together form a group; a group of all rows is exactly the batch of plain decoding.
"""

import time
from dataclasses import dataclass, field

import torch
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria as host_criteria

from .draft_tree import DraftTree
from .sampling_noise import SamplingNoise


@dataclass
class RowGroup:
    """
    Rows of the batch that advance together.

    Attributes:
        rows (`list[int]`): Their places in the batch.
        input_ids (`torch.LongTensor` of shape `(G, T)`): Prompt and committed tokens, as plain decoding holds them.
        prompt_length (`int`): Columns of the prompt.
        logits_processor (`LogitsProcessorList`): Processors of the call, as these rows are asked about.
        is_finished (`list[bool]`): Which rows met a stopping criterion.
    """

    rows: list[int]
    input_ids: torch.LongTensor
    prompt_length: int
    logits_processor: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    is_finished: list[bool] = field(default_factory=list)

    def __post_init__(self):
        self.is_finished = [False] * len(self.rows)

    @property
    def num_new(self) -> int:
        """Tokens generated so far, which is the step of the next one."""
        return self.input_ids.shape[1] - self.prompt_length

    @property
    def is_done(self) -> bool:
        return all(self.is_finished)


@dataclass
class RowDraft:
    """
    What one row wants verified.

    Attributes:
        tree (`DraftTree`): Drafted tokens; place 0 is the anchor.
        pool_ids, pool_logits (`torch.Tensor` of shape `(K, C)`, *optional*): Proposal of each token of a chain that
            was drawn from exactly `softmax(pool_logits)`; `None` when any draft is fine because the target samples by
            itself.
    """

    tree: DraftTree
    pool_ids: torch.LongTensor | None = None
    pool_logits: torch.FloatTensor | None = None


class StopRule:
    """
    The stopping criteria of a call. Length, end tokens and time are decided on the host; all others are called as
    plain decoding calls them.
    """

    def __init__(self, criteria):
        self.max_length = None
        self.eos_ids: set[int] = set()
        self.deadline_s = None
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is host_criteria.MaxLengthCriteria:
                length = criterion.max_length
                self.max_length = length if self.max_length is None else min(self.max_length, length)
            elif type(criterion) is host_criteria.EosTokenCriteria:
                self.eos_ids |= set(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is host_criteria.MaxTimeCriteria:
                deadline_s = criterion.initial_timestamp + criterion.max_time
                self.deadline_s = deadline_s if self.deadline_s is None else min(self.deadline_s, deadline_s)
            else:
                self.others.append(criterion)
        # As in plain decoding: finished rows are padded only when one of the criteria knows end tokens.
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)

    @property
    def is_row_wise(self) -> bool:
        """Whether each row can be asked about alone."""
        return all(type(criterion) is host_criteria.StopStringCriteria for criterion in self.others)

    def __call__(self, input_ids: torch.LongTensor, length: int, last_ids: list[int], scores) -> list[bool]:
        """
        Which rows are done, that have `length` tokens and end with `last_ids`. Only criteria that are called need
        `input_ids` `(G, length)`.
        """
        is_over = self.max_length is not None and length >= self.max_length
        is_over = is_over or (self.deadline_s is not None and time.time() > self.deadline_s)
        done = [is_over or token in self.eos_ids for token in last_ids]
        if self.others:
            done = [a or b for a, b in zip(done, self.others(input_ids, scores).tolist(), strict=True)]
        return done


class GreedyPicker:
    """The most likely token."""

    def pick(self, scores, group: RowGroup, drafts, places) -> torch.LongTensor:
        return scores.argmax(dim=-1)


class NoisePicker:
    """The token that plain sampling draws with its random numbers of this step; drafts count while they are equal."""

    def __init__(self, noise: SamplingNoise):
        self.noise = noise

    def pick(self, scores, group: RowGroup, drafts, places) -> torch.LongTensor:
        return self.noise.pick(scores.softmax(dim=-1), group.num_new, group.rows)


class RejectionPicker:
    """
    Speculative sampling (arXiv 2211.17192, algorithm 1): a drafted token `y` drawn from `q` is taken with probability
    `min(1, p(y) / q(y))`, else the token comes from the normalised positive part of `p - q`, which never is `y`. A row
    without a draft at this place draws from `p`.
    """

    def pick(self, scores, group: RowGroup, drafts, places) -> torch.LongTensor:
        probs = scores.softmax(dim=-1)
        return torch.cat([self._row(probs[i], drafts[i], places[i]) for i in range(len(places))])

    @staticmethod
    def _row(p: torch.FloatTensor, draft: RowDraft, place: int) -> torch.LongTensor:
        if draft.pool_logits is None or place >= draft.tree.num_nodes:
            return torch.multinomial(p, 1)
        ids = draft.pool_ids[place].to(p.device)
        q = torch.zeros_like(p).scatter_(0, ids, draft.pool_logits[place].to(p.device).softmax(dim=-1))
        token = draft.tree.token_ids[place]
        if torch.rand((), device=p.device) * q[token] < p[token]:
            return ids.new_tensor([token])
        rest = (p - q).clamp_(min=0)
        # Rounding alone can leave nothing although the draft was rejected.
        return torch.multinomial(rest if rest.sum() > 0 else p, 1)


@dataclass
class Walk:
    """
    What one walk committed.

    Attributes:
        places (`list[list[int]]`): For each row, the places of the verified inputs whose successor was committed: the
            anchor and the accepted drafts before the last committed token.
        num_steps (`int`): Tokens committed by each row.
        token_ids (`list[list[int]]`): These tokens, by row.
        num_texts (`list[int]`): How many of them are text and not padding behind the end of a row.
    """

    places: list[list[int]]
    num_steps: int
    token_ids: list[list[int]]
    num_texts: list[int]


class Verifier:
    """
    Walks verified logits.

    Args:
        picker: Chooses the tokens of a step.
        stop (`StopRule`): Its stopping criteria.
        pad_token_id (`int`, *optional*): What finished rows are padded with.
        streamer (`BaseStreamer`, *optional*): Gets the tokens one step at a time.
        outputs (`StepOutputs`): Collects what the call returns for each token.
    """

    def __init__(self, picker, stop: StopRule, pad_token_id, streamer, outputs):
        self.picker = picker
        self.stop = stop
        self.pad_token_id = pad_token_id
        self.streamer = streamer
        self.outputs = outputs

    def walk(self, group: RowGroup, logits: torch.FloatTensor, drafts: list[RowDraft], step_outputs) -> Walk:
        """
        Commit tokens of `group` while its rows agree with their drafts.

        Args:
            logits (`torch.FloatTensor` of shape `(G, N, V)`): Raw logits of the verified places.
            drafts (`list[RowDraft]`): Of each row; a finished row agrees with every token.
            step_outputs (`Callable`): `step_outputs(places)` are the outputs of the target for one place of each row.
        """
        # Without processors the best tokens of all places are found at once.
        is_argmax = isinstance(self.picker, GreedyPicker) and not group.logits_processor
        best = logits.argmax(dim=-1).tolist() if is_argmax and not self.outputs.keeps_logits else None
        num_places = logits.shape[1]
        places = [0] * len(group.rows)
        walked: list[list[int]] = [[] for _ in group.rows]
        token_ids: list[list[int]] = [[] for _ in group.rows]
        num_texts = [0] * len(group.rows)
        # If nobody looks at the tokens meanwhile, they are appended at once.
        is_watched = best is None or bool(self.stop.others) or self.streamer is not None
        length, agrees = group.input_ids.shape[1], True
        while agrees and not group.is_done:
            tokens, ids, scores = self._choose(group, logits, drafts, places, best)
            length += 1
            if is_watched:
                tokens = group.input_ids.new_tensor(ids) if tokens is None else tokens
                group.input_ids = torch.cat([group.input_ids, tokens[:, None]], dim=-1)
            self.outputs.add(scores, lambda p=tuple(places): step_outputs(list(p)))
            for row, (place, token) in enumerate(zip(places, ids, strict=True)):
                walked[row].append(place)
                token_ids[row].append(token)
                num_texts[row] += not group.is_finished[row]
            done = self.stop(group.input_ids, length, ids, self.outputs.scores)
            group.is_finished = [f or d for f, d in zip(group.is_finished, done, strict=True)]
            if self.streamer is not None:  # behind the criteria, as plain decoding
                self.streamer.put(tokens.cpu())
            for row, token in enumerate(ids):
                following = drafts[row].tree.child(places[row], token)
                # Tokens behind the end of a row are padding; what the target saw there matters only if it is returned.
                is_padding = group.is_finished[row] and self.stop.has_eos and not self.outputs.is_collecting
                agrees = agrees and (following is not None or is_padding)
                places[row] = following if following is not None else min(places[row] + 1, num_places - 1)
            agrees = agrees and len(walked[0]) < num_places
        if not is_watched:
            group.input_ids = torch.cat([group.input_ids, group.input_ids.new_tensor(token_ids)], dim=-1)
        return Walk(walked, len(walked[0]), token_ids, num_texts)

    def _choose(self, group: RowGroup, logits, drafts, places, best):
        """Tokens of a step as a tensor (unless they are known already), as integers, and what they were chosen by."""
        if best is not None:
            ids = [best[row][place] for row, place in enumerate(places)]
            if self.stop.has_eos and any(group.is_finished):
                ids = [self.pad_token_id if f else i for i, f in zip(ids, group.is_finished, strict=True)]
            return None, ids, None
        index = torch.tensor(places, device=logits.device)
        raw = logits[torch.arange(len(places), device=logits.device), index].clone()  # processors may write to it
        scores = group.logits_processor(group.input_ids, raw)
        tokens = self.picker.pick(scores, group, drafts, places)
        if self.stop.has_eos and any(group.is_finished):
            is_finished = torch.tensor(group.is_finished, device=tokens.device)
            tokens = tokens.masked_fill(is_finished, self.pad_token_id)
        return tokens, tokens.tolist(), (scores, raw)

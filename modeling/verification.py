"""Verification: the target's logits of a whole draft are walked as plain decoding would have walked them.

A walk repeats the body of the host's decoding loop (processors, choice, stopping criteria, outputs) for one verified
position after the other while the draft holds the chosen token. Everything a user can hook into therefore sees the
calls of plain decoding: the same arguments, in the same order, for committed positions only. Rows that advance
together form a group; a group of all rows is exactly the batch of plain decoding.

On a device that works through a queue such a walk would wait for it at every token. There, if processors are known to
be functions of their arguments, the tokens of all places are chosen ahead (`Verifier.choose_ahead`), each as if its
place were reached, and read by one copy; the walk then only looks them up.
"""

import time
from dataclasses import dataclass, field

import torch
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria as host_criteria

from .draft_tree import DraftTree
from .host_transfer import look_is_free, read, send
from .proposal import is_row_wise, is_warper
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
        walked (`list[list[int]]`): Places of each row that the current or last walk committed the successor of.
    """

    rows: list[int]
    input_ids: torch.LongTensor
    prompt_length: int
    logits_processor: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    is_finished: list[bool] = field(default_factory=list)
    walked: list[list[int]] = field(default_factory=list)

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
        """
        The token of a step for each row.

        Args:
            scores (`torch.FloatTensor` of shape `(G, V)`): Processed logits of one place of each row.
            drafts (`list[RowDraft]`), places (`list[int]`): Of each row.
        """
        return scores.argmax(dim=-1)

    def pick_ahead(self, scores, group: RowGroup, drafts) -> torch.LongTensor:
        """The tokens `(G, N)` of all places, each as if it were reached, from processed logits `(G, N, V)`."""
        return scores.argmax(dim=-1)


class NoisePicker:
    """The token that plain sampling draws with its random numbers of this step; drafts count while they are equal."""

    def __init__(self, noise: SamplingNoise):
        self.noise = noise

    def pick(self, scores, group: RowGroup, drafts, places) -> torch.LongTensor:
        return self.noise.pick(scores.softmax(dim=-1), group.num_new, group.rows)

    def pick_ahead(self, scores, group: RowGroup, drafts) -> torch.LongTensor:
        num_places = scores.shape[1]
        tokens = []
        for i, draft in enumerate(drafts):
            # Behind the nodes of a row nothing is reached; any numbers do.
            depths = draft.tree.depths() + [0] * (num_places - 1 - draft.tree.num_nodes)
            noise = torch.stack([self.noise.at(group.num_new + depth)[group.rows[i]] for depth in depths])
            tokens.append((scores[i].softmax(dim=-1) / noise).argmax(dim=-1))
        return torch.stack(tokens)


class RejectionPicker:
    """
    Speculative sampling (arXiv 2211.17192, algorithm 1): a drafted token `y` drawn from `q` is taken with probability
    `min(1, p(y) / q(y))`, else the token comes from the normalised positive part of `p - q`, which never is `y`. A row
    without a draft at this place draws from `p`.
    """

    def pick(self, scores, group: RowGroup, drafts, places) -> torch.LongTensor:
        probs = scores.softmax(dim=-1)
        return torch.cat([self._row(probs[i], drafts[i], places[i]) for i in range(len(places))])

    def pick_ahead(self, scores, group: RowGroup, drafts) -> torch.LongTensor:
        return torch.stack(
            [self._places(own.softmax(dim=-1), draft) for own, draft in zip(scores, drafts, strict=True)]
        )

    @staticmethod
    def _places(p: torch.FloatTensor, draft: RowDraft) -> torch.LongTensor:
        """Tokens `(N,)` of all places of a row with laws `p` `(N, V)`, each by what `_row` does for one of them."""
        n = 0 if draft.pool_logits is None else draft.tree.num_nodes
        law, before = p.clone(), p[:n]
        if n:
            q = torch.zeros_like(before).scatter_(
                1, draft.pool_ids.to(p.device), draft.pool_logits.to(p.device).softmax(dim=-1)
            )
            rest = (before - q).clamp_(min=0)
            law[:n] = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, before)
        tokens = (law / torch.empty_like(law).exponential_(1)).argmax(dim=-1)  # `multinomial` would look at its input
        if n:
            drafted = send(draft.tree.token_ids, p.device)[:, None]
            is_accepted = torch.rand(n, 1, device=p.device) * q.gather(1, drafted) < before.gather(1, drafted)
            tokens[:n] = torch.where(is_accepted, drafted, tokens[:n, None])[:, 0]
        return tokens

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
class Ahead:
    """
    Tokens of all places of a group, chosen as if each place were reached.

    Attributes:
        token_ids (`list[list[int]]`): By row and place.
        scores (`torch.FloatTensor` of shape `(G, N, V)`): What they were chosen by.
    """

    token_ids: list[list[int]]
    scores: torch.FloatTensor


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

    def choose_ahead(self, groups: list[RowGroup], logits: list[torch.FloatTensor], drafts) -> list[Ahead | None]:
        """
        Choose the tokens of all places of all groups, and read them by one copy.

        Args:
            logits (`list[torch.FloatTensor]` of shape `(G, N, V)`), drafts (`list[list[RowDraft]]`): Of each group.

        Returns:
            `None` for each group where the tokens must be chosen one after the other, or are better so: where a look
            is free, nothing is processed for places that are not reached.
        """
        is_argmax = isinstance(self.picker, GreedyPicker) and not groups[0].logits_processor
        is_free = look_is_free(logits[0].device)
        if is_free and (not is_argmax or self.outputs.keeps_logits):
            return [None] * len(groups)
        if not all(_can_process_ahead(group) for group in groups):
            return [None] * len(groups)
        scores = _process_ahead(groups, logits, drafts)
        tokens = [self.picker.pick_ahead(*own) for own in zip(scores, groups, drafts, strict=True)]
        return [Ahead(ids, own) for ids, own in zip(read(*tokens), scores, strict=True)]

    def walk(
        self, group: RowGroup, logits: torch.FloatTensor, drafts: list[RowDraft], step_outputs, ahead=None
    ) -> Walk:
        """
        Commit tokens of `group` while its rows agree with their drafts.

        Args:
            logits (`torch.FloatTensor` of shape `(G, N, V)`): Raw logits of the verified places.
            drafts (`list[RowDraft]`): Of each row; a finished row agrees with every token.
            step_outputs (`Callable`): `step_outputs(places)` are the outputs of the target for one place of each row.
            ahead (`Ahead`, *optional*): What `choose_ahead` chose.
        """
        num_places = logits.shape[1]
        places = [0] * len(group.rows)
        group.walked = walked = [[] for _ in group.rows]
        token_ids: list[list[int]] = [[] for _ in group.rows]
        num_texts = [0] * len(group.rows)
        # If nobody looks at the tokens meanwhile, they are appended at once.
        is_watched = ahead is None or bool(self.stop.others) or self.streamer is not None
        length, agrees = group.input_ids.shape[1], True
        while agrees and not group.is_done:
            ids, scores = self._choose(group, logits, drafts, places, ahead)
            length += 1
            if is_watched:
                group.input_ids = torch.cat([group.input_ids, send(ids, group.input_ids.device)[:, None]], dim=-1)
            self.outputs.add(scores, lambda p=tuple(places): step_outputs(list(p)))
            for row, (place, token) in enumerate(zip(places, ids, strict=True)):
                walked[row].append(place)
                token_ids[row].append(token)
                num_texts[row] += not group.is_finished[row]
            done = self.stop(group.input_ids, length, ids, self.outputs.scores)
            group.is_finished = [f or d for f, d in zip(group.is_finished, done, strict=True)]
            if self.streamer is not None:  # behind the criteria, as plain decoding
                self.streamer.put(torch.tensor(ids))
            for row, token in enumerate(ids):
                following = drafts[row].tree.child(places[row], token)
                # Tokens behind the end of a row are padding; what the target saw there matters only if it is returned.
                is_padding = group.is_finished[row] and self.stop.has_eos and not self.outputs.is_collecting
                agrees = agrees and (following is not None or is_padding)
                places[row] = following if following is not None else min(places[row] + 1, num_places - 1)
            agrees = agrees and len(walked[0]) < num_places
        if not is_watched:
            group.input_ids = torch.cat([group.input_ids, send(token_ids, group.input_ids.device)], dim=-1)
        return Walk(walked, len(walked[0]), token_ids, num_texts)

    def _choose(self, group: RowGroup, logits, drafts, places, ahead: Ahead | None):
        """Tokens of a step, and what they were chosen by: processed and raw logits `(G, V)`."""
        if ahead is not None:
            ids = [own[place] for own, place in zip(ahead.token_ids, places, strict=True)]
            scores = None
            if self.outputs.keeps_logits:
                scores = (_at(ahead.scores, places), _at(logits, places))
        else:
            raw = _at(logits, places)  # a copy, processors may write to it
            processed = group.logits_processor(group.input_ids, raw)
            ids = self.picker.pick(processed, group, drafts, places).tolist()
            scores = (processed, raw)
        if self.stop.has_eos and any(group.is_finished):
            ids = [self.pad_token_id if f else i for i, f in zip(ids, group.is_finished, strict=True)]
        return ids, scores


def _at(logits: torch.FloatTensor, places: list[int]) -> torch.FloatTensor:
    """One place of each row: `(G, N, V)` to `(G, V)`."""
    return torch.stack([own[place] for own, place in zip(logits, places, strict=True)])


def _can_process_ahead(group: RowGroup) -> bool:
    """Whether the processors are known functions that can be asked about any rows, reached or not."""
    return all(
        is_row_wise(processor)
        # Left padding gives the repetition penalty a number for each row, which a row at another depth would miss.
        and not isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
        for processor in group.logits_processor
    )


def _process_ahead(groups: list[RowGroup], logits: list[torch.FloatTensor], drafts) -> list[torch.FloatTensor]:
    """Processed logits `(G, N, V)` of all places of each group; the groups have the same processors, one for one."""
    if not groups[0].logits_processor:
        return logits
    scores, sizes = torch.cat(logits), [len(own) for own in logits]
    for k, processor in enumerate(groups[0].logits_processor):
        if is_warper(processor):  # looks at no tokens
            scores = processor(None, scores.flatten(0, 1)).view_as(scores)
            continue
        of_groups = zip(groups, scores.split(sizes), drafts, strict=True)
        scores = torch.cat([_process_tokens(group, group.logits_processor[k], *own) for group, *own in of_groups])
    return list(scores.split(sizes))


def _process_tokens(group: RowGroup, processor, scores: torch.FloatTensor, drafts: list[RowDraft]) -> torch.Tensor:
    """What a processor that looks at the tokens makes of `scores` `(G, N, V)`; it is asked once for each depth."""
    by_depth: dict[int, list[tuple[int, int]]] = {}
    for row, draft in enumerate(drafts):
        for place, depth in enumerate(draft.tree.depths()):
            by_depth.setdefault(depth, []).append((row, place))
    scores = scores.clone()
    for nodes in by_depth.values():
        rows, places = (send(list(part), scores.device) for part in zip(*nodes, strict=True))
        drafted = [
            [drafts[row].tree.token_ids[p - 1] for p in drafts[row].tree.path(place)[1:]] for row, place in nodes
        ]
        ids = torch.cat([group.input_ids[rows], send(drafted, group.input_ids.device).view(len(nodes), -1)], dim=1)
        scores[rows, places] = processor(ids, scores[rows, places])
    return scores

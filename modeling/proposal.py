"""How a draft's tokens are drawn from the pools, and the exact distribution q that is handed to the verifier.

Order for a slot: raw pool logits -> change made by context-dependent penalties, added to the selection logits ->
warpers, once -> softmax over the pool = q, in fp32; tokens outside the pool have q = 0. A sampled token is drawn from
exactly this q, given the drafted tokens before it. Only processors known to be functions of their arguments act on
drafts.
"""

import copy

import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation import logits_process

from .modeling_base import Pool


def _known(*names: str) -> tuple[type, ...]:
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# Penalties look at the tokens so far; warpers look at the distribution only. Exact types: a subclass may hold state.
_PENALTIES = _known(
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
)
_WARPERS = _known(
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)


# Functions of their arguments that do nothing for a draft.
_TARGET_ONLY = _known(
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "PrefixConstrainedLogitsProcessor",
    "TopHLogitsWarper",
    "WatermarkLogitsProcessor",
)


def is_stateless(processor) -> bool:
    """Whether a logits processor is known to be a function of its arguments; others may say so with `is_stateless`."""
    known = _PENALTIES + _WARPERS + _TARGET_ONLY
    return type(processor) in known or bool(getattr(processor, "is_stateless", False))


def is_warper(processor) -> bool:
    """Whether a logits processor is known to look at the logits only."""
    return type(processor) in _WARPERS


# Functions of their arguments and of the row's place in the batch, which a row asked alone does not have.
_BATCH_WISE = _known(
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
)


def is_row_wise(processor) -> bool:
    """Whether a logits processor can be asked about one row alone, see `for_row`."""
    return type(processor) in _PENALTIES + _WARPERS + _TARGET_ONLY and type(processor) not in _BATCH_WISE


def for_row(logits_processor, row: int) -> LogitsProcessorList:
    """
    The processors as one row of the batch is asked about. Left padding makes the repetition penalty hold a number for
    each row.
    """
    own = LogitsProcessorList()
    for processor in logits_processor or []:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(ignored, torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = int(ignored[row])
        own.append(processor)
    return own


class Proposal:
    """
    How one call draws its drafts.

    Args:
        logits_processor (`LogitsProcessorList`): Processors of the call, in the order of the target.
        vocab_size (`int`): Width `V` of the target's logits.
        is_sampled (`bool`): Draw from q and hand q over; else take the most likely candidate and hand nothing over.
        noise (`Callable`, *optional*): `noise(num_tokens, token_ids (W, C))` is the Gumbel noise `(W, C)` of these
            candidates with which the target will choose the token after the first `num_tokens`; the draft then
            chooses with the same.
    """

    def __init__(self, logits_processor, vocab_size: int, is_sampled: bool, noise=None):
        processors = logits_processor or []
        self.penalties = [p for p in processors if type(p) in _PENALTIES]
        self.warpers = [p for p in processors if type(p) in _WARPERS] if is_sampled or noise else []
        self.vocab_size = vocab_size
        self.is_sampled = is_sampled
        self.noise = noise
        self.input_ids: torch.LongTensor | None = None  # (B, T), the committed and drafted tokens before the stage

    def start_stage(self, pool: Pool) -> "StageDraw":
        """Chooser of one stage that starts after `input_ids`."""
        return StageDraw(self, pool)

    def gumbel(self, token_ids: torch.LongTensor, first: int) -> torch.FloatTensor | None:
        """
        Noise `(B, R, C)` with which the target will choose among `token_ids` `(B, R, C)` in the slots `first ..` of a
        stage; `None` when it is not known ahead.
        """
        if self.noise is None:
            return None
        length = self.input_ids.shape[1] + first
        return torch.stack([self.noise(length + i, token_ids[:, i]) for i in range(token_ids.shape[1])], dim=1)

    def penalty_change(self, input_ids, token_ids, logits) -> torch.FloatTensor:
        """What the penalties add to the raw `logits` `(B, C)` of `token_ids` after `input_ids`; may be -inf."""
        token_ids, before = token_ids.to(input_ids.device), logits.to(input_ids.device)
        scores = before.new_zeros(len(before), self.vocab_size).scatter_(1, token_ids, before)
        for penalty in self.penalties:
            scores = penalty(input_ids, scores)
        return (scores.gather(1, token_ids) - before).to(logits.device)


class StageDraw:
    """
    Draws the tokens of one stage; see `Chooser` in `modeling_heads.py`. A slot of the pool is read when it is drawn.
    """

    def __init__(self, proposal: Proposal, pool: Pool):
        self.proposal = proposal
        self.pool = pool
        self.depends_on_path = bool(proposal.penalties)
        self.path_ids = proposal.input_ids
        self.logits = torch.zeros_like(pool.logits)
        self.is_possible = torch.ones_like(pool.ids[..., 0], dtype=torch.bool)  # something is left to draw
        # argmax(log q + g) is a sample of q. One draw for the stage: a walk may ask for a slot again.
        self.gumbel = -torch.empty_like(pool.logits).exponential_().log() if proposal.is_sampled else None

    def __call__(self, logits: torch.FloatTensor, first: int) -> torch.LongTensor:
        last = first + logits.shape[1]
        if self.depends_on_path:
            ids = self.pool.ids[:, first]
            logits = logits + self.proposal.penalty_change(self.path_ids, ids, self.pool.logits[:, first])[:, None]
        logits, is_possible = self._warp(logits)
        self.logits[:, first:last], self.is_possible[:, first:last] = logits, is_possible
        gumbel = self._noise(self.pool.ids[:, first:last], first)
        choices = (logits if gumbel is None else logits + gumbel).argmax(dim=-1)
        if self.depends_on_path:
            chosen = self.pool.ids[:, first].gather(1, choices).to(self.path_ids.device)
            self.path_ids = torch.cat([self.path_ids, chosen], dim=1)
        return choices

    def num_possible(self, num_slots: int) -> torch.LongTensor | None:
        """
        Slots `(B,)` of the first `num_slots` before the first one that has nothing left to draw; `None` when only
        warpers act, which always leave something. Known before a token of that slot is drawn.
        """
        if not self.depends_on_path:
            return None
        return self.is_possible[:, :num_slots].long().cumprod(dim=1).sum(dim=1)

    def _noise(self, token_ids: torch.LongTensor, first: int) -> torch.FloatTensor | None:
        if self.gumbel is not None:
            return self.gumbel[:, first : first + token_ids.shape[1]]
        return self.proposal.gumbel(token_ids, first)

    def path_log_probs(self, logits, slot: int, path_ids: torch.LongTensor, pool: Pool | None = None):
        """
        Log-scores `(W, C)` of the candidates of a slot for `W` paths of a tree: log-probabilities over the vocabulary,
        shifted by the noise if the target's is known.

        Args:
            logits (`torch.FloatTensor` of shape `(W, C)`): Selection logits given each path.
            path_ids (`torch.LongTensor` of shape `(W, slot)`): Tokens of the paths.
            pool (`Pool` of shape `(W, 1, C)`, *optional*): Candidates behind each path, if each has its own.
        """
        pool = pool or Pool(*(part[:, slot : slot + 1] for part in vars(self.pool).values()))
        ids = pool.ids[:, 0].expand(len(logits), -1)
        if self.depends_on_path:
            before = self.path_ids.expand(len(logits), -1)
            before = torch.cat([before, path_ids.to(before.device)], dim=1)
            logits = logits + self.proposal.penalty_change(before, ids, pool.logits[:, 0].expand_as(logits))
        logits, is_possible = (part[:, 0] for part in self._warp(logits[:, None]))
        gumbel = self.proposal.gumbel(ids[:, None], slot)
        if gumbel is not None:
            logits = logits + gumbel[:, 0]
        pool_mass = pool.log_probs[:, 0].logsumexp(dim=-1, keepdim=True)
        return logits.log_softmax(dim=-1).where(is_possible[:, None], float("-inf")) + pool_mass

    def proposal_logits(self, num_slots: int) -> torch.FloatTensor | None:
        """Logits of q `(B, num_slots, C)` over the pool; `None` for a deterministic draft."""
        return self.logits[:, :num_slots] if self.proposal.is_sampled else None

    def _warp(self, logits: torch.FloatTensor) -> tuple[torch.FloatTensor, torch.BoolTensor]:
        """Warped `logits` `(B, R, C)`, and the slots `(B, R)` that have something left to draw; others get zeros."""
        is_possible = (logits > float("-inf")).any(dim=-1)
        logits = logits.where(is_possible[..., None], 0.0)  # some warpers refuse rows without a finite number
        rows = logits.flatten(0, 1)
        for warper in self.proposal.warpers:
            rows = warper(None, rows)
        return rows.view_as(logits), is_possible

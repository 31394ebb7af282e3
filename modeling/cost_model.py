"""The cost-aware loop gate: what drafting and verifying cost here and now, and what a draft is worth.

`loop_gate="auto"` learns, while it decodes, the time of a drafting stage, the time of a target forward by its number
of tokens, and how often drafts of each slot are accepted. With these it decides three things: how many tokens a stage
drafts (before the first one is drawn, so that q stays exact), whether another stage pays, and whether speculation pays
at all. Between observations it is a function of its state: no clock and no randomness are read here except through
`clock`, so that tests can drive it with numbers of their own.
"""

import time


class Average:
    """Exponentially weighted mean; it starts as the plain mean of what it saw."""

    def __init__(self, rate: float):
        self.rate = rate
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        weight = max(self.rate, 1 / self._count)
        self.value = value if self.value is None else self.value + weight * (value - self.value)


class LatencyTable:
    """
    Running estimate of the ms of a forward by its number of tokens.

    Between observed sizes it interpolates; beyond them it goes on with the slope of the last two, never downwards. A
    single outlier moves an estimate by a bounded factor.
    """

    RATE = 0.15
    OUTLIER = 2.0
    PRIOR_SLOPE = 0.1  # of a one-token forward, for each further token, as long as one size only was observed

    def __init__(self):
        self._ms: dict[int, Average] = {}

    def observe(self, num_tokens: int, ms: float) -> None:
        average = self._ms.setdefault(num_tokens, Average(self.RATE))
        average.add(ms if average.value is None else min(ms, self.OUTLIER * average.value))

    def __contains__(self, num_tokens: int) -> bool:
        return num_tokens in self._ms

    def estimate(self, num_tokens: int) -> float | None:
        """Expected ms; `None` before the first observation."""
        if not self._ms:
            return None
        if num_tokens in self._ms:
            return self._ms[num_tokens].value
        sizes = sorted(self._ms)
        below = [n for n in sizes if n < num_tokens]
        above = [n for n in sizes if n > num_tokens]
        if below and above:
            return self._line(below[-1], above[0], num_tokens)
        if len(sizes) == 1:
            per_token = self.PRIOR_SLOPE * self._ms[sizes[0]].value / (1 + self.PRIOR_SLOPE * (sizes[0] - 1))
            return self._ms[sizes[0]].value + per_token * (num_tokens - sizes[0])
        ends = (sizes[-2], sizes[-1]) if below else (sizes[0], sizes[1])
        nearest = self._ms[sizes[-1] if below else sizes[0]].value
        value = self._line(*ends, num_tokens)
        return max(value, nearest) if below else max(min(value, nearest), 0.0)

    def _line(self, first: int, second: int, num_tokens: int) -> float:
        a, b = self._ms[first].value, self._ms[second].value
        return a + (b - a) * (num_tokens - first) / (second - first)


class Calibration:
    """How often a slot is accepted, given that all before it were, by what the drafter believed."""

    FORGET = 0.95
    PRIOR = 3.0  # observations that the drafter's own belief is worth

    def __init__(self):
        self._sums: dict[tuple[int, int], list[float]] = {}

    def observe(self, stage: int, slot: int, belief: float, is_accepted: bool) -> None:
        sums = self._sums.setdefault(self._key(stage, slot), [0.0, 0.0])
        sums[0] = self.FORGET * sums[0] + is_accepted
        sums[1] = self.FORGET * sums[1] + belief

    def acceptance(self, stage: int, slot: int, belief: float) -> float:
        """Expected acceptance of a slot of which the drafter believes `belief`."""
        accepted, believed = self._sums.get(self._key(stage, slot), (0.0, 0.0))
        return min(1.0, belief * (accepted + self.PRIOR) / (believed + self.PRIOR))

    @staticmethod
    def _key(stage: int, slot: int) -> tuple[int, int]:
        return min(stage, 1), min(slot, 15)  # later stages are alike


class CostModel:
    """
    State and decisions of the cost-aware gate of one caller.

    Args:
        clock (`Callable`): Returns seconds; replaced in tests.
        num_rows (`int`): Rows of the batch. They are verified together, so whoever decides for some of them decides
            as if the others did alike.

    Attributes:
        WARM_UP (`int`): Plain steps before anything is drafted; all but the first, which may pay for a compilation,
            measure the target alone.
        RENEWAL (`int`): Drafting rounds after which one plain step measures it again.
        LOSS (`float`): Tokens that speculation may recently have cost, compared with plain decoding, before it is put
            off.
        SHARE (`float`), SHORT_TEXT (`int`): Share of the plain steps of a text, its prefill included, that speculation
            may cost in all; a text is taken to have at least so many tokens.
        FIRST (`float`): Plain steps that the first round of all with a draft counts as at most. It may pay for
            warm-ups, which say little of the rounds behind it and must not rule them out.
        PAUSES (`tuple[int, ...]`): Tokens decoded plainly after the first, second, ... losing trial.
    """

    WARM_UP = 3
    RENEWAL = 16
    LOSS = 1.0
    MEMORY = 0.9
    SHARE = 0.04
    SHORT_TEXT = 32
    FIRST = 4.0
    PAUSES = (16, 48, 144, 432)

    def __init__(self, clock=time.perf_counter, num_rows: int = 1):
        self.clock = clock
        self.num_rows = num_rows
        self.verify_ms = LatencyTable()
        self.draft_ms = Average(0.15)  # of a stage of all rows; a later one costs what a first one does
        self.slot_ms = Average(0.15)  # of one token of a drafter that drafts token by token
        self.calibration = Calibration()
        self.later_gain = Average(0.1)  # accepted tokens of a later stage that was reached
        self.later_length = Average(0.1)
        # Of a round without a draft. There are few of them, and one that was interrupted must not make losses look
        # like gains for many rounds behind it.
        self.plain_ms = Average(0.3)
        self.drafting_ms = Average(0.15)  # of a round with one, or with a look at what could be drafted
        self.read_share = Average(0.3)  # time in which the drafter reads a prompt, by that of the target's prefill
        self.warm_up_ms: float | None = None  # of the first such round of all
        self.tokens_per_ms: float | None = None
        self._num_plain = 0
        self._num_drafting = 0  # rounds since the last plain step
        self._has_drafted = False  # a stage, in this round
        self.begin_call()

    def begin_call(self) -> None:
        """A new text: what was slow stays slow, but it may be easier to draft for."""
        self._balance = 0.0
        self._lead = 0.0  # tokens that speculation won or lost in this text; little of what was won may be lost again
        self._num_tokens = 0.0
        self._prefill_ms = 0.0
        self._is_prompt_read = False
        self._pause = 0  # plain tokens left
        self._num_losses = 0
        self._drafts = self._may_draft()

    # Decisions.

    def drafts(self) -> bool:
        """Whether the coming round drafts at all."""
        return self._drafts

    def stage_length(
        self, beliefs: list[list[float]], stage: int, num_before: int, reach: list[float], first: int = 0
    ) -> int:
        """
        Tokens to draft for each of some rows, from what is known before the first of them is drawn.

        Args:
            beliefs (`list[list[float]]`): By row, the probability of the best candidate of each slot from `first` on.
            stage (`int`): 0 for the first of the round.
            num_before (`int`): Tokens of a row drafted before, in this stage and in the stages before.
            reach (`list[float]`): By row, the probability that all of those are accepted.
            first (`int`): Slots of this stage that were drafted already.
        """
        rate, slot_ms = self._rate(), self.num_rows * (self.slot_ms.value or 0.0)
        best, best_value, gain = 0, 0.0, 0.0
        for i, of_rows in enumerate(zip(*beliefs, strict=True)):
            accepted = [self.calibration.acceptance(stage, first + i, belief) for belief in of_rows]
            reach = [before * own for before, own in zip(reach, accepted, strict=True)]
            gain += sum(reach) / len(reach)
            # A drafter that goes token by token has paid for the first of them when it is asked about it.
            value = gain - rate * (self._extra_ms(num_before, i + 1) + i * slot_ms)
            if value > best_value:
                best, best_value = i + 1, value
        return best

    def goes_on(self, known: list[float], belief: float, num_slots: int, stage: int, num_before: int, reach: float):
        """
        Whether a drafter that goes token by token drafts another one. The slots behind it are taken to be like it.

        Args:
            known (`list[float]`), belief (`float`): Probability of the best candidate of each slot of this stage so
                far, and of the slot in question.
            num_slots (`int`): Slots that the stage may have.
            stage, num_before, reach: Of the stages before, as in `stage_length`.
        """
        for slot, earlier in enumerate(known):
            reach *= self.calibration.acceptance(stage, slot, earlier)
        first = len(known)
        alike = [[belief] * (num_slots - first)]
        return self.stage_length(alike, stage, num_before + first, [reach], first) > 0

    def loops(self, reach: float, num_drafted: int) -> bool:
        """Whether another stage pays when `num_drafted` tokens are accepted with probability `reach`."""
        length = max(1, round(self.later_length.value or num_drafted))
        gain = self.later_gain.value if self.later_gain.value is not None else 0.5 * length
        cost_ms = (self.draft_ms.value or 0.0) + self._extra_ms(num_drafted, length)
        return reach * gain > self._rate() * cost_ms

    # Observations.

    def observe_prefill(self, ms: float) -> None:
        """Time until the first token of the call, which plain decoding spends too."""
        self._prefill_ms = ms
        self._drafts = self._may_draft()

    def observe_draft(self, ms: float) -> None:
        """A stage was drafted, in `ms` for all rows."""
        self._has_drafted = True
        usual_ms = self.draft_ms.value
        self.draft_ms.add(ms if usual_ms is None else min(ms, LatencyTable.OUTLIER * usual_ms))

    def observe_slots(self, num_slots: int, ms: float) -> None:
        """A stage of `num_slots` tokens, drafted one after the other."""
        self.slot_ms.add(ms / max(num_slots, 1))

    def observe_round(self, num_verified: int, verify_ms: float, num_committed: int, round_ms: float) -> None:
        """
        One round is over.

        Args:
            num_verified (`int`): Tokens of the target's forward, the anchor included; 1 is a plain step.
            verify_ms (`float`): Of the forward and the walk.
            num_committed (`int`): Tokens that one row gained, in the mean over the rows.
            round_ms (`float`): Of the whole round, drafting included.
        """
        self.verify_ms.observe(num_verified, verify_ms)
        rate = num_committed / max(round_ms, 1e-6)
        self.tokens_per_ms = rate if self.tokens_per_ms is None else 0.9 * self.tokens_per_ms + 0.1 * rate
        self._num_tokens += num_committed
        # A round that was to draft and had no room for it is a plain one.
        if self._drafts and (self._has_drafted or num_verified > 1):
            self._observe_drafting(num_committed, round_ms)
        else:
            value = self.plain_ms.value
            if self._num_plain > 0:
                self.plain_ms.add(round_ms if value is None else min(round_ms, LatencyTable.OUTLIER * value))
            self._num_plain += 1
            self._num_drafting = 0
            self._pause -= num_committed
        self._drafts = self._may_draft()
        self._has_drafted = False

    def _observe_drafting(self, num_committed: int, round_ms: float) -> None:
        if self.warm_up_ms is None:
            round_ms = self.warm_up_ms = min(round_ms, self.FIRST * self.plain_ms.value)
        elif not self._is_prompt_read and self._prefill_ms > 0:
            self._observe_reading(round_ms)
        else:
            # An interruption by something else is no loss of ours.
            round_ms = min(round_ms, LatencyTable.OUTLIER * (self.drafting_ms.value or self.warm_up_ms))
            self.drafting_ms.add(round_ms)
        self._num_drafting += 1
        won = num_committed - round_ms / max(self.plain_ms.value, 1e-6)
        if self._is_prompt_read:  # what reading a prompt cost tells nothing of the coming rounds
            self._balance = self.MEMORY * self._balance + won
        self._is_prompt_read = True
        self._lead = min(self._lead + won, self.LOSS)
        if self._balance < -self.LOSS or not self._can_lose():
            self._pause = self.PAUSES[min(self._num_losses, len(self.PAUSES) - 1)]
            self._num_losses += 1
            self._balance = 0.0
        elif self._balance > self.LOSS:
            self._num_losses = 0

    def _observe_reading(self, round_ms: float) -> None:
        """The first round of a text with a draft, which counts as long as it was."""
        share = max(0.0, round_ms - (self.drafting_ms.value or self.warm_up_ms)) / self._prefill_ms
        usual = self.read_share.value
        self.read_share.add(share if not usual else min(share, LatencyTable.OUTLIER * usual))

    def _may_draft(self) -> bool:
        is_due = self._num_plain >= self.WARM_UP and self._pause <= 0 and self._num_drafting < self.RENEWAL
        return is_due and self._can_lose()

    def _can_lose(self) -> bool:
        """Whether a text stays within its share of losses when all drafts of the coming round are rejected."""
        if self.plain_ms.value is None:
            return True
        plain_ms = max(self.plain_ms.value, 1e-6)
        # The first one of all tells of the others as long as nothing else does.
        coming_ms = self.drafting_ms.value or self.warm_up_ms
        risk = 0.0
        if coming_ms is not None:
            read_ms = 0.0 if self._is_prompt_read else (self.read_share.value or 0.0) * self._prefill_ms
            risk = (coming_ms + read_ms) / plain_ms - 1
        num_steps = max(self._num_tokens, self.SHORT_TEXT) + self._prefill_ms / plain_ms
        return self._lead - risk >= -self.SHARE * num_steps

    def observe_acceptance(self, stage_beliefs: list[list[float]], num_accepted: int, num_judged: int) -> None:
        """
        Which of the drafted slots were accepted.

        Args:
            stage_beliefs (`list[list[float]]`): What the drafter believed of the slots of each stage.
            num_accepted (`int`): Accepted drafts.
            num_judged (`int`): Slots whose place got a token; those behind the first rejection tell nothing.
        """
        before = 0
        for stage, beliefs in enumerate(stage_beliefs):
            if stage and num_accepted >= before:
                self.later_gain.add(min(num_accepted - before, len(beliefs)))
                self.later_length.add(len(beliefs))
            for slot, belief in enumerate(beliefs):
                if before + slot >= num_judged:
                    return
                self.calibration.observe(stage, slot, belief, before + slot < num_accepted)
            before += len(beliefs)

    def _rate(self) -> float:
        """Tokens/ms that time spent elsewhere would yield: the better of plain decoding and the recent rate."""
        plain = 1 / self.plain_ms.value if self.plain_ms.value else 0.0
        return max(plain, self.tokens_per_ms or 0.0)

    def _extra_ms(self, num_before: int, num_more: int) -> float:
        """What verifying `num_more` tokens adds to a round that verifies `num_before` drafts."""
        more, before = (self.verify_ms.estimate(n + 1) for n in (num_before + num_more, num_before))
        return max(0.0, (more or 0.0) - (before or 0.0))

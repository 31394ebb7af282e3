"""What one call did, counted: rounds, accepted tokens, stages, repairs, time. The only definition of these figures."""

import math
import time
from dataclasses import asdict, dataclass, field

import torch


# Fate of a drafted slot. "Right" is the token that the target chose; slots behind the first rejection are unverified.
SLOT_CLASSES = ("kept_right", "kept_wrong", "repaired_right", "repaired_harmful", "both_wrong", "unverified")


class PhaseClock:
    """Adds up the time of the phases of a round, in ms. Disabled it does nothing, and never synchronises a device."""

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self.phase_ms: dict[str, float] = {}
        self._last = self._now() if enabled else 0.0

    def lap(self, phase: str) -> None:
        """Count the time since the last lap towards `phase`."""
        if self.enabled:
            now = self._now()
            self.phase_ms[phase] = self.phase_ms.get(phase, 0.0) + (now - self._last) * 1e3
            self._last = now

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass
class DraftStatistics:
    """
    Statistics of one `generate()` call.

    Attributes:
        num_committed (`list[int]`): Tokens committed in each round with a draft: accepted drafts and one bonus token.
        num_accepted (`list[int]`): Accepted drafts of each such round. One less than committed, but for rounds that an
            accepted end token or the length limit cut.
        num_drafted (`list[int]`): Tokens drafted in each such round.
        num_stages (`list[int]`): Stages of each such round.
        num_plain_rounds (`int`): Rounds without a draft; the prefill is not one.
        slot_classes (`dict[str, int]`): Drafted slots by fate, see `SLOT_CLASSES`.
        num_nodes (`list[int]`): Nodes of the tree of each round that verified one. Such a round counts its depth as
            the tokens drafted, and no slots by fate.
        origins (`list[str]`): Of each such round, where its tokens came from, one letter for each: `k` accepted and
            kept, `r` accepted after a repair, `t` the target's own.
        phase_ms (`dict[str, float]`): Total ms by phase (`draft`, `select`, `verify`), filled with `profile=True`.
            `verify` is everything between handing a draft over and being asked for the next one, the host loop
            included.
    """

    num_committed: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    num_drafted: list[int] = field(default_factory=list)
    num_stages: list[int] = field(default_factory=list)
    num_plain_rounds: int = 0
    slot_classes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SLOT_CLASSES, 0))
    num_nodes: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    phase_ms: dict[str, float] = field(default_factory=dict)

    @property
    def num_rounds(self) -> int:
        """Rounds with a draft."""
        return len(self.num_committed)

    @property
    def acceptance_length(self) -> float:
        """τ: mean tokens committed in a round with a draft, bonus counted. Not a number without such a round."""
        return _mean(self.num_committed)

    @property
    def mean_stages(self) -> float:
        """Mean stages of a round with a draft."""
        return _mean(self.num_stages)

    @property
    def num_repaired_right(self) -> int:
        return self.slot_classes["repaired_right"]

    @property
    def num_repaired_harmful(self) -> int:
        return self.slot_classes["repaired_harmful"]

    @property
    def acceptance_by_slot(self) -> list[float]:
        """Share of accepted tokens at slot 1, 2, ... among the rounds in which all earlier slots were accepted."""
        rates = []
        for slot in range(max(self.num_drafted, default=0)):
            rounds = zip(self.num_accepted, self.num_committed, self.num_drafted, strict=True)
            reached = [accepted for accepted, committed, drafted in rounds if drafted > slot and committed > slot]
            rates.append(sum(accepted > slot for accepted in reached) / len(reached) if reached else float("nan"))
        return rates

    def add_round(self, draft_ids, choices, pool_ids, chosen_ids, num_stages: int) -> None:
        """
        Count one round with a draft.

        Args:
            draft_ids, choices (`list[int]`): Drafted tokens and their places in the pool.
            pool_ids (`list[int]`): First candidate of each slot, the backbone's own draft.
            chosen_ids (`list[int]`): Tokens committed in this round.
            num_stages (`int`): Stages of the draft.
        """
        self.num_committed.append(len(chosen_ids))
        agrees = [token == chosen for token, chosen in zip(draft_ids, chosen_ids, strict=False)]
        self.num_accepted.append(next((i for i, right in enumerate(agrees) if not right), len(agrees)))
        self.num_drafted.append(len(draft_ids))
        self.num_stages.append(num_stages)
        accepted = choices[: self.num_accepted[-1]]
        letters = "".join("r" if choice else "k" for choice in accepted)
        self.origins.append(letters + "t" * (len(chosen_ids) - len(accepted)))
        for slot, (token, choice, kept) in enumerate(zip(draft_ids, choices, pool_ids, strict=True)):
            self.slot_classes[self._slot_class(slot, token, choice, kept, chosen_ids)] += 1

    def add_tree_round(
        self, num_committed: int, num_accepted: int, depth: int, num_nodes: int, num_stages: int
    ) -> None:
        """Count one round that verified a tree of `num_nodes` nodes and `depth` levels."""
        self.num_committed.append(num_committed)
        self.num_accepted.append(num_accepted)
        self.num_drafted.append(depth)
        self.num_stages.append(num_stages)
        self.num_nodes.append(num_nodes)

    @staticmethod
    def _slot_class(slot, token, choice, kept, chosen_ids) -> str:
        if slot >= len(chosen_ids):
            return "unverified"
        if token == chosen_ids[slot]:
            return "repaired_right" if choice else "kept_right"
        if not choice:
            return "kept_wrong"
        return "repaired_harmful" if kept == chosen_ids[slot] else "both_wrong"

    def merge(self, other: "DraftStatistics") -> None:
        """Add the rounds of another call."""
        self.num_committed += other.num_committed
        self.num_accepted += other.num_accepted
        self.num_drafted += other.num_drafted
        self.num_stages += other.num_stages
        self.num_nodes += other.num_nodes
        self.origins += other.origins
        self.num_plain_rounds += other.num_plain_rounds
        for name, count in other.slot_classes.items():
            self.slot_classes[name] += count
        for name, value in other.phase_ms.items():
            self.phase_ms[name] = self.phase_ms.get(name, 0.0) + value

    def to_dict(self) -> dict:
        """Counts and derived figures, ready for JSON: a figure without a value is `None`, because NaN is no JSON."""
        derived = {
            "num_rounds": self.num_rounds,
            "acceptance_length": _number_or_none(self.acceptance_length),
            "mean_stages": _number_or_none(self.mean_stages),
            "acceptance_by_slot": [_number_or_none(rate) for rate in self.acceptance_by_slot],
        }
        return asdict(self) | derived


def _number_or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else float("nan")

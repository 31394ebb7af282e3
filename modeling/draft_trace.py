"""A record of what was drafted in every round and what became of it, for displays and analyses.

Invariant: the committed tokens of all rounds, one after the other, are the generated text. Rounds are complete and
immutable when they are added, so another thread may read the list while the call is running.
"""

from dataclasses import dataclass, field

import torch


# Where a token of the text came from. "repair" and "draft" belong to a round's first stage.
ORIGINS = ("draft", "repair", "loop", "bonus", "correction", "target")


@dataclass(frozen=True)
class TracedStage:
    """
    One stage of a round, in plain Python values.

    Attributes:
        draft_ids (`tuple[int]`): Drafted tokens, one for each of `K` slots.
        choices (`tuple[int]`): Their places in the pool; 0 is KEEP, above is REPAIR.
        pool_ids (`tuple[tuple[int]]`): `C` candidates of each slot, the backbone's own draft first.
        pool_probs (`tuple[tuple[float]]`): The backbone's probabilities of the candidates over its whole vocabulary.
            Empty, as is the next, when the drafter does not tell.
        selection_probs (`tuple[tuple[float]]`): What the selector made of them, a distribution over the pool, before
            processors and temperature.
        log_confidence (`float`): What DLoop compares with its gate.
    """

    draft_ids: tuple[int, ...]
    choices: tuple[int, ...]
    pool_ids: tuple[tuple[int, ...], ...]
    pool_probs: tuple[tuple[float, ...], ...]
    selection_probs: tuple[tuple[float, ...], ...]
    log_confidence: float

    @classmethod
    def of(cls, block) -> "TracedStage":
        """The stage that a `DraftBlock` of one row holds."""
        return cls(
            draft_ids=tuple(block.draft_ids[0].tolist()),
            choices=tuple(block.choices[0].tolist()),
            pool_ids=_rows(block.pool_ids),
            pool_probs=_rows(block.pool_log_probs, torch.exp),
            selection_probs=_rows(block.selection_logits, lambda logits: logits.softmax(dim=-1)),
            log_confidence=block.log_confidence.item(),
        )


@dataclass(frozen=True)
class TracedRound:
    """
    One forward of the target.

    Attributes:
        stages (`tuple[TracedStage]`): What was drafted before it; empty for the prefill and for rounds without
            a draft.
        committed_ids (`tuple[int]`): Tokens that it added to the text.
    """

    stages: tuple[TracedStage, ...]
    committed_ids: tuple[int, ...]

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """Drafted tokens of all stages."""
        return tuple(token for stage in self.stages for token in stage.draft_ids)

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that the target agreed with, up to the first that it did not."""
        agrees = [draft == chosen for draft, chosen in zip(self.draft_ids, self.committed_ids, strict=False)]
        return next((i for i, right in enumerate(agrees) if not right), len(agrees))

    @property
    def origins(self) -> tuple[str, ...]:
        """Where each committed token came from, one of `ORIGINS`."""
        if not self.stages:
            return ("target",) * len(self.committed_ids)
        drafted = [
            "loop" if depth else "repair" if choice else "draft"
            for depth, stage in enumerate(self.stages)
            for choice in stage.choices
        ]
        own = "bonus" if self.num_accepted == len(drafted) else "correction"
        behind = len(self.committed_ids) - self.num_accepted
        return (*drafted[: self.num_accepted], *[own] * behind)


@dataclass
class DraftTrace:
    """
    Rounds of one call.

    Attributes:
        rounds (`list[TracedRound]`): In order, the prefill first.
    """

    rounds: list[TracedRound] = field(default_factory=list)

    def add_round(self, blocks, committed_ids: list[int]) -> None:
        """Add a verified round: the `DraftBlock`s of its stages, of one row, and what was committed."""
        self.rounds.append(TracedRound(tuple(TracedStage.of(block) for block in blocks), tuple(committed_ids)))


def _rows(values: torch.Tensor | None, transform=lambda values: values) -> tuple[tuple, ...]:
    """The only row of `values` `(1, K, C)`, slot by slot."""
    return () if values is None else tuple(tuple(row) for row in transform(values)[0].tolist())

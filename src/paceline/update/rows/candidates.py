"""Candidates: ids that were pushed, but not often enough yet to become rows, counted in bounded memory.

The counts lie in two generations. Each holds a limited number of ids; when the young one is full it becomes the old
one, and what the old one held is forgotten. An id that is pushed again moves to the young one with its count. So an id
is never counted too often and never admitted too early; one that was forgotten is admitted later than it could be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import torch

from paceline.update.rows.column import RowColumn
from paceline.update.rows.index import RowIndex
from paceline.update.rows.layout import index_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rows.contribution import RowContribution
    from paceline.update.rows.ops import RowOps
    from paceline.update.rows.spec import Lifecycle

_MOST_CANDIDATES: Final = 1 << 20  # of a generation
_BUDGET_BYTES: Final = 1024  # of a memory budget for each candidate of a generation: a tenth of it at most


def most_candidates(life: Lifecycle) -> int:
    """Return how many ids a generation holds; 0 where every id becomes a row at once."""
    if life.admit_after == 1:
        return 0
    return min(_MOST_CANDIDATES, life.memory_bytes // _BUDGET_BYTES) if life.memory_bytes else _MOST_CANDIDATES


def most_candidate_bytes(life: Lifecycle) -> int:
    """Return the most main memory that candidates take: in both generations index, id, count, and a list of gaps."""
    limit = most_candidates(life)
    return 2 * (index_bytes(limit) + (8 + 4 + 16) * limit) if limit else 0


@dataclass(frozen=True, slots=True)
class AdmittedIds:
    """What is left of an update without the pushes of ids that are not admitted yet; nothing is counted so far.

    Args:
        contributions: with those rows alone that are to be applied.
        num_dropped: rows of pushes that are lost.
        ripe: ids that become rows.
        unripe: ids that stay candidates.
        counts: how often the unripe were pushed.
    """

    contributions: Sequence[RowContribution]
    num_dropped: int
    ripe: Tensor
    unripe: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class _Generation:
    index: RowIndex
    ids: RowColumn
    counts: Tensor  # (most candidates,), int32, by slot


@final
class Candidates:
    """Counts pushes of ids that have no row.

    Args:
        ops: finds ids.
        life: when ids are admitted, and how many can wait for it.
    """

    def __init__(self, ops: RowOps, life: Lifecycle) -> None:
        self._ops = ops
        self._admit_after = life.admit_after
        self._limit = most_candidates(life)
        self._young, self._old = self._generation(), self._generation()

    def __len__(self) -> int:
        return len(self._young.index) + len(self._old.index)

    @property
    def memory_bytes(self) -> int:
        """Main memory of ids, counts and their index."""
        return sum(g.index.memory_bytes + 4 * g.index.num_slots for g in (self._young, self._old))

    def admit(self, contributions: Sequence[RowContribution], find: Callable[[Tensor], Tensor]) -> AdmittedIds:
        """Look at the pushes of an update one after the other: an id is admitted with the n-th that has it.

        An id that repeats within a push was pushed once. What comes before is left out, and that gradient is lost.

        Args:
            contributions: in their order.
            find: returns the slots of ids, -1 for those without a row.
        """
        ids, inverse = self._ops.unique(torch.cat([contribution.ids for contribution in contributions]))
        absent = find(ids) < 0
        counts = torch.full((len(ids),), self._admit_after, dtype=torch.int32)
        counts[absent] = self._counts(ids[absent])
        left: list[RowContribution] = []
        for contribution, pushed in zip(contributions, inverse.split([len(c.ids) for c in contributions]), strict=True):
            counts[pushed] = (counts[pushed] + 1).clamp_(max=self._admit_after)
            left.append(contribution.only(counts[pushed] >= self._admit_after))
        num_dropped = len(inverse) - sum(len(contribution.ids) for contribution in left)
        ripe = counts >= self._admit_after
        return AdmittedIds(left, num_dropped, ids[absent & ripe], ids[~ripe], counts[~ripe])

    def settle(self, admitted: AdmittedIds) -> None:
        """Count the pushes that `admit` has looked at; those that became rows are no candidates any more."""
        self._forget(admitted.ripe)
        self._remember(admitted.unripe, admitted.counts)

    def close(self) -> None:
        """Give the memory back."""
        for generation in (self._young, self._old):
            generation.index.close()

    def _remember(self, ids: Tensor, counts: Tensor) -> None:
        """Keep the counts of some distinct ids."""
        self._forget(ids)
        for start in range(0, len(ids), self._limit):
            part = slice(start, start + self._limit)
            if len(self._young.index) + len(ids[part]) > self._limit:
                self._turn()
            slots, _ = self._young.index.add(ids[part])
            self._young.counts[slots] = counts[part]

    def _forget(self, ids: Tensor) -> None:
        """Drop what is known of some distinct ids."""
        for generation in (self._young, self._old):
            slots = generation.index.find(ids)
            generation.index.remove(slots[slots >= 0])

    def _counts(self, ids: Tensor) -> Tensor:
        """Return how often each of some distinct ids was pushed, (n,) int32."""
        counts = torch.zeros(len(ids), dtype=torch.int32)
        for generation in (self._young, self._old):
            slots = generation.index.find(ids)
            counts[slots >= 0] = generation.counts[slots[slots >= 0]]
        return counts

    def _turn(self) -> None:
        self._old.index.close()
        self._old, self._young = self._young, self._generation()

    def _generation(self) -> _Generation:
        ids = RowColumn(1, torch.int64)
        return _Generation(RowIndex(self._ops, ids), ids, torch.zeros(self._limit, dtype=torch.int32))

"""Sharding of rows: the server of each id, computed equally on every worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

from torch import Tensor

from paceline.update.rows.ops import RowOps

NUM_PIECES: Final = 1024  # of all rows, about as many in each; a server's share is rounded to them


@dataclass(frozen=True, slots=True)
class RowSharding:
    """The servers of all rows, by the hashes of their ids: a stretch of these each, as long as its share.

    Args:
        shares: of the servers, as proportions; none for equal parts.
    """

    ops: RowOps
    num_servers: int
    shares: tuple[float, ...] = ()
    # Where the pieces of each server end. Invariant: empty if and only if servers have equal parts.
    _ends: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Deal the pieces out."""
        reached = list(accumulate(self.shares)) if len(set(self.shares)) > 1 else []
        object.__setattr__(self, "_ends", tuple(round(NUM_PIECES * each / reached[-1]) for each in reached))

    def split(self, ids: Tensor) -> tuple[Tensor, list[int]]:
        """Return the positions of ids by the server that owns them, and how many each has.

        With equal parts those of each server are in the order given.
        """
        if not self._ends:
            return self.ops.split(ids, self.num_servers)
        order, counts = self.ops.split(ids, NUM_PIECES)
        before = [0, *accumulate(counts)]
        return order, [before[stop] - before[start] for start, stop in pairwise((0, *self._ends))]

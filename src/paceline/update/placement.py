"""Placement of tables: the range or the rows of each server, computed equally on every worker and server."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from paceline.core.partition import Range, partition
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.errors import UsageError
from paceline.update.named_rules import granularity
from paceline.update.rows.ops import RowOps
from paceline.update.table import TableSpec

NUM_PIECES: Final = 1024  # of all rows, about as many in each; a server's share is rounded to them


def spans(spec: TableSpec, settings: WorkerSettings | ServerSettings) -> tuple[Range, ...]:
    """Return the range of each server, by rank.

    Raises:
        UsageError: the table has fewer parameters (or whole tensors, where its rule needs them) than servers.
    """
    cut = "anywhere" if granularity(spec.rule) == "element" else "between_tensors"
    try:
        lengths = [segment.numel for segment in spec.segments]
        return partition(lengths, settings.num_servers, cut=cut, shares=settings.shares)
    except UsageError as error:
        raise UsageError(f"table '{spec.name}': {error}") from None


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

    def split(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return by server the positions of the ids that it owns.

        Those of a server that owns all are in the order given, and with equal parts those of each server.
        """
        if self.num_servers == 1:
            return (torch.arange(ids.numel()),)
        if not self._ends:
            order, counts = self.ops.split(ids, self.num_servers)
            return order.split_with_sizes(counts)
        order, pieces = self.ops.split(ids, NUM_PIECES)
        before = [0, *accumulate(pieces)]
        counts = [before[stop] - before[start] for start, stop in pairwise((0, *self._ends))]
        return (torch.arange(ids.numel()) if ids.numel() in counts else order).split_with_sizes(counts)


def as_tensor(body: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over received memory, without a copy."""
    return torch.frombuffer(body, dtype=dtype) if len(body) else torch.empty(0, dtype=dtype)

"""Pending rows of a worker: the sum of its unsent pushes for each row, and which rows are sent first."""

from __future__ import annotations

from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from paceline.update.rows.column import RowColumn
from paceline.update.rows.index import RowIndex
from paceline.update.rows.ops import RowOps

Priority = Literal["relative_magnitude", "random", "fifo"]

_FREE = -1  # the clock of a slot without a row


class TakenRows(NamedTuple):
    """Rows that are to be sent now: int64 ids [n], distinct, and rows [n, width]."""

    ids: Tensor
    rows: Tensor


@final
class PendingRows:
    """The sums of rows that wait to be sent, by id; for one thread at a time.

    A row takes its numbers, 24 bytes for its clock, its push and its weight, and what `RowIndex` says. Taking rows
    looks at every row that waits.

    Args:
        width: numbers a row.
        dtype: of the rows.
        ops: what does the work.
        priority: which rows go first. "relative_magnitude": those whose weights, summed since they were last sent, are
            greatest; "fifo": those that have waited longest; "random": any.
        seed: of the draws.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, ops: RowOps, priority: Priority = "relative_magnitude", seed: int = 0
    ) -> None:
        self._width = width
        self._dtype = dtype
        self._ops = ops
        self._priority: Priority = priority
        self._draws = torch.Generator().manual_seed(seed)
        self._index = RowIndex(ops, RowColumn(1, torch.int64))
        self._rows = RowColumn(width, dtype)
        # Of each row that waits: the clock and the number of the first push in it, and the sum of its weights.
        self._since = RowColumn(1, torch.int64)
        self._first = RowColumn(1, torch.int64)
        self._weights = RowColumn(1, torch.float64)
        self._num_pushes = 0

    def __len__(self) -> int:
        """Count the rows that wait."""
        return len(self._index)

    @property
    def num_pushes(self) -> int:
        """How many pushes were added so far; they are numbered from 0."""
        return self._num_pushes

    @property
    def oldest_push(self) -> int:
        """The number of the oldest push that may have rows waiting; where nothing waits, that of the next."""
        slots = self._live()
        return int(self._column(self._first)[slots].min()) if len(slots) else self._num_pushes

    def add(self, ids: Tensor, rows: Tensor, clock: int, weights: Tensor) -> None:
        """Add a push.

        Args:
            ids: int64 [n], distinct.
            rows: [n, width]; added to those of the same ids that wait.
            clock: at which it was made; never lower than that of the push before.
            weights: float64 [n], how much the push changes each row.
        """
        slots, new = self._index.add(ids)
        for column in (self._rows, self._since, self._first, self._weights):
            column.grow(self._index.num_slots)
        fresh = slots[new]
        self._rows.tensor[fresh] = 0
        self._column(self._weights)[fresh] = 0
        self._column(self._since)[fresh] = clock
        self._column(self._first)[fresh] = self._num_pushes
        self._rows.tensor[slots] += rows
        self._column(self._weights)[slots] += weights
        self._num_pushes += 1

    def read(self, ids: Tensor) -> Tensor:
        """Return what waits of these rows, [n, width]; zeros where nothing does."""
        rows = torch.zeros(len(ids), self._width, dtype=self._dtype)
        self._ops.gather(self._rows.tensor, self._index.find(ids), rows)
        return rows

    def num_due(self, clock: int) -> int:
        """Count the rows with something in them that was made at `clock` or before."""
        since = self._column(self._since)[: self._index.num_slots]
        return int(((since != _FREE) & (since <= clock)).sum())

    def pop(self, limit: int, due: int) -> TakenRows:
        """Take out at most `limit` rows: those with something made at clock `due` or before first, then by priority."""
        slots = self._live()
        if len(slots) > limit:
            slots = self._first_to_go(slots, limit, due)
        taken = TakenRows(self._index.ids_of(slots), self._rows.tensor[slots])
        self._column(self._since)[slots] = _FREE
        self._index.remove(slots)
        return taken

    def close(self) -> None:
        """Release all memory."""
        self._index.close()
        for column in (self._rows, self._since, self._first, self._weights):
            column.close()

    def _first_to_go(self, slots: Tensor, limit: int, due: int) -> Tensor:
        late = self._column(self._since)[slots] <= due
        chosen = self._highest(slots[late], limit)
        return torch.cat((chosen, self._highest(slots[~late], limit - len(chosen))))

    def _highest(self, slots: Tensor, limit: int) -> Tensor:
        if len(slots) <= limit:
            return slots
        return slots[torch.topk(self._ranks(slots), limit).indices]

    def _ranks(self, slots: Tensor) -> Tensor:
        """Return a number for each row, the greater the sooner it goes."""
        if self._priority == "random":
            return torch.rand(len(slots), generator=self._draws)
        return -self._column(self._first)[slots] if self._priority == "fifo" else self._column(self._weights)[slots]

    def _live(self) -> Tensor:
        since = self._column(self._since)[: self._index.num_slots]
        return (since != _FREE).nonzero().view(-1)

    def _column(self, column: RowColumn) -> Tensor:
        return column.tensor.view(-1)


def relative_magnitude(change: Tensor, values: Tensor) -> Tensor:
    """Return for each row the sum of |change / value| over its numbers, |change| where the value is 0 or unknown.

    Args:
        change: [n, width], what is added to the values.
        values: [n, width]; NaN where a value is not known.

    Returns:
        float64 [n].

    Example:
        >>> relative_magnitude(torch.tensor([[1.0, -3.0], [0.5, 0.0]]), torch.tensor([[4.0, 2.0], [0.0, 9.0]]))
        tensor([1.7500, 0.5000], dtype=torch.float64)
    """
    size = values.double().abs()
    size[(size == 0) | size.isnan()] = 1.0
    return (change.double().abs() / size).sum(dim=1)

"""Error feedback: the parts of pushes that a worker keeps back, by id, each with the clock since when it waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.update.rows.column import RowColumn
from paceline.update.rows.index import RowIndex
from paceline.update.rows.ops import RowOps

NEVER = -1  # the clock of rows that wait for their next push, however late


class Kept(NamedTuple):
    """Rows that were kept back: int64 ids [n], rows [n, width], and since when, int64 [n]."""

    ids: Tensor
    rows: Tensor
    since: Tensor


class KeptChange(NamedTuple):
    """The change of the rows kept back by a push: int64 ids [n], rows [n, width] before and after, and the old clocks.

    It allows to undo a push that is refused.
    """

    ids: Tensor
    before: Tensor
    since: Tensor
    after: Tensor

    def part(self, where: Tensor) -> KeptChange:
        """Return the change of some of the rows, bool [n]."""
        return KeptChange(self.ids[where], self.before[where], self.since[where], self.after[where])


@final
class ErrorFeedback:
    """Rows that are kept back, by id; rows of zeros are not kept.

    A row takes its numbers, 8 bytes for its clock and what `RowIndex` says.

    Args:
        width: numbers a row.
        dtype: of the rows.
        ops: the operations on rows.
    """

    def __init__(self, width: int, dtype: torch.dtype, ops: RowOps) -> None:
        self._width = width
        self._dtype = dtype
        self._ops = ops
        self._forget()

    def __len__(self) -> int:
        return len(self._index)

    def read(self, ids: Tensor) -> Kept:
        """Return the rows of `ids`, in order; zeros since `NEVER` for ids without one."""
        return self._read(ids, self._index.find(ids))

    def pop(self, ids: Tensor) -> Kept:
        """Remove and return the rows of distinct `ids`, in order; zeros since `NEVER` for ids without one."""
        slots = self._index.find(ids)
        kept = self._read(ids, slots)
        slots = slots[slots >= 0]
        self._since.tensor[slots] = NEVER
        self._index.remove(slots)
        return kept

    def keep(self, ids: Tensor, rows: Tensor, since: Tensor) -> None:
        """Keep finite rows of distinct ids without a row now; rows of zeros are left out."""
        some = rows.any(dim=1)
        if not some.any():
            return
        slots, _ = self._index.add(ids[some])
        for column in (self._rows, self._since):
            column.grow(self._index.num_slots)
        self._ops.scatter(self._rows.tensor, slots, rows[some])
        self._ops.scatter(self._since.tensor, slots, since[some].unsqueeze(1))

    def overdue(self, latest: int) -> Tensor:
        """Return the ids of the rows that wait since clock `latest` or earlier, ascending."""
        since = self._since.tensor[: self._index.num_slots, 0]  # NEVER where a slot is free
        slots = ((since != NEVER) & (since <= latest)).nonzero().squeeze(1)
        return self._index.ids_of(slots).sort().values

    def pop_all(self) -> Kept:
        """Remove and return all rows, ids ascending."""
        kept = self._everything()
        self._forget()
        return kept

    def state(self) -> dict[str, Tensor]:
        """Return copies of all rows, ids ascending, for a checkpoint."""
        return self._everything()._asdict()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace all rows by those of a state.

        Raises:
            UsageError: the state is of a table of another width or dtype.
        """
        ids, rows, since = state["ids"], state["rows"], state["since"]
        if rows.dtype != self._dtype or rows.shape != (len(ids), self._width) or since.shape != ids.shape:
            raise UsageError(
                f"What was kept back of pushes is {rows.dtype} {tuple(rows.shape)} for {len(ids)} ids, expected "
                f"{self._dtype} rows of {self._width}. Is it the checkpoint of another table?"
            )
        self._forget()
        self.keep(ids, rows, since)

    def _everything(self) -> Kept:
        ids = self._index.ids_of(self._index.live_slots()).sort().values
        return self.read(ids)

    def _read(self, ids: Tensor, slots: Tensor) -> Kept:
        rows = torch.zeros(len(ids), self._width, dtype=self._dtype)
        since = torch.full((len(ids), 1), NEVER)
        self._ops.gather(self._rows.tensor, slots, rows)
        self._ops.gather(self._since.tensor, slots, since)
        return Kept(ids, rows, since.squeeze(1))

    def _forget(self) -> None:
        self._index = RowIndex(self._ops, RowColumn(1, torch.int64))
        self._rows = RowColumn(self._width, self._dtype)
        self._since = RowColumn(1, torch.int64)

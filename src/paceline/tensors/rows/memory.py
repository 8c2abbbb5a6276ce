"""Where the rows of one table lie on one server: their index, their columns, and the budget of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, final

import torch

from paceline.errors import UsageError
from paceline.tensors.rows.candidates import most_candidate_bytes
from paceline.tensors.rows.columns import RowColumns
from paceline.tensors.rows.index import RowIndex
from paceline.tensors.rows.layout import IDS, index_bytes, least_bytes, row_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.tensors.rows.ops import RowOps
    from paceline.tensors.rows.rule import RowRule
    from paceline.tensors.rows.spec import RowTableSpec

_ERASE_TIMES = 16  # the ids that closing one gap in the index looks at, at most but for bad luck


@final
class RowMemory:
    """Finds, makes and removes rows; used by one thread at a time.

    With a budget, the index and the candidates lie in main memory in full, and columns are mapped to what they leave.

    Args:
        spec: of the table.
        rule: whose state is kept.
        ops: does the work.

    Raises:
        UsageError: the budget is too small for any table like this, or there can be no files.
    """

    def __init__(self, spec: RowTableSpec, rule: RowRule, ops: RowOps) -> None:
        self._table = spec.name
        self._ops = ops
        self._row_bytes = row_bytes(spec, rule)
        self._spilled = bool(spec.life.spill)
        self._budget_bytes = spec.life.memory_bytes - most_candidate_bytes(spec.life)  # of index and columns
        self._least_bytes = least_bytes(spec, rule)
        self._given_bytes = spec.life.memory_bytes
        self._require(self._least_bytes, "any rows at all")
        self.columns = RowColumns(spec, rule)
        self._index = RowIndex(ops, self.columns.ids)
        self._entry_bytes = index_bytes(0)
        self._share_out()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_slots(self) -> int:
        """Slots that were ever used: all rows are in slots below."""
        return self._index.num_slots

    @property
    def index_bytes(self) -> int:
        """Main memory of the index, without ids."""
        return self._index.memory_bytes - 8 * self._index.num_slots

    @property
    def column_bytes(self) -> int:
        """Main memory of all columns; in files, what is mapped of them at most."""
        return self.columns.mapped_bytes if self._spilled else self._row_bytes * self.num_slots

    @property
    def spilled_bytes(self) -> int:
        """What lies in files."""
        return self._row_bytes * self.num_slots if self._spilled else 0

    def pieces(self, num_rows: int) -> Iterator[slice]:
        """Return slices to work on rows; see `RowColumns.pieces`."""
        return self.columns.pieces(num_rows)

    def find(self, ids: Tensor) -> Tensor:
        """Return the slots of ids, (n,), -1 for those without a row."""
        slots = torch.empty_like(ids)
        for piece in self.pieces(len(ids)):
            slots[piece] = self._index.find(ids[piece])
            self.columns.visit(slots[piece])
        return slots

    def ids_of(self, slots: Tensor) -> Tensor:
        """Return the ids of rows; for a piece."""
        self.columns.visit(slots)
        return self._index.ids_of(slots)

    def take(self, name: str, slots: Tensor, out: Tensor) -> None:
        """Copy rows of a column to `out`, (n, its width), but for slot -1; for a piece that was found before."""
        self._ops.gather(self.columns[name], slots, out)

    def put(self, name: str, slots: Tensor, rows: Tensor) -> None:
        """Copy `rows` to distinct slots of a column; for a piece that was found before."""
        self._ops.scatter(self.columns[name], slots, rows)

    def slots_in(self, start: int, stop: int) -> Tensor:
        """Return those slots between two that have a row, ascending; for a piece."""
        slots = torch.arange(start, min(stop, self.num_slots))
        self.columns.visit(slots)
        return slots[self._index.find(self.columns[IDS].view(-1)[slots]) == slots]

    def has_room(self, num_new: int) -> bool:
        """Return whether so many rows would need no more memory than there is."""
        same_index = index_bytes(len(self) + num_new) <= self._entry_bytes
        return same_index and self._slots_with(num_new) <= self.columns.num_rows

    def reserve(self, ids: Tensor) -> None:
        """Make room for those of distinct ids that have no row; raises UsageError, and changes nothing, without."""
        if not self.has_room(len(ids)):
            num_new = int((self.find(ids) < 0).sum())
            self._require_index(num_new)
            self.columns.grow(self._slots_with(num_new))

    def add(self, ids: Tensor) -> Tensor:
        """Return the slots of new, distinct rows that room was made for; for a piece."""
        entry_bytes = max(self._entry_bytes, index_bytes(len(self) + len(ids)))
        grows = entry_bytes > self._entry_bytes
        if grows:  # all ids are read
            self.columns.trim()
        slots, _ = self._index.add(ids)
        if grows:
            self.columns.trim()
            self._entry_bytes = entry_bytes
            self._share_out()
        self.columns.visit(slots)
        return slots

    def remove(self, slots: Tensor) -> None:
        """Let rows go; their slots are for others."""
        for piece in self.columns.pieces(len(slots), _ERASE_TIMES):
            self._index.remove(slots[piece])
            self.columns.trim()  # whatever other ids were looked at
        self._share_out()

    def close(self) -> None:
        """Give everything back."""
        self._index.close()
        self.columns.close()

    def _slots_with(self, num_new: int) -> int:
        return max(self.num_slots, len(self) + num_new)

    def _require_index(self, num_new: int) -> None:
        num_rows = len(self) + num_new
        if index_bytes(num_rows) > self._entry_bytes:
            # While the index is built anew, all ids are mapped and nothing else; afterwards pieces of all columns.
            mapped_bytes = max(8 * self.num_slots, self._least_bytes - index_bytes(0))
            self._require(index_bytes(num_rows) + mapped_bytes, f"{num_rows} rows")

    def _require(self, needed_bytes: int, what: str) -> None:
        if self._spilled and needed_bytes > self._budget_bytes:
            needed_bytes += self._given_bytes - self._budget_bytes
            raise UsageError(
                f"Row table '{self._table}': memory_bytes={self._given_bytes} does not suffice for {what}, expected at "
                f"least {needed_bytes}: an index does not spill. Give it more, use more servers, or let rows go: "
                "expire_after, max_rows."
            )

    def _share_out(self) -> None:
        """Leave to the columns what the index does not take."""
        self.columns.room_bytes = self._budget_bytes - self.index_bytes

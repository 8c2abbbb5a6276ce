"""Memory of the rows of one table on one server: its columns and the index of ids, within a budget where it has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, final

import torch

from paceline.errors import UsageError
from paceline.update.rows.column import WINDOW_BYTES, RowColumn, Windows, unnamed_file
from paceline.update.rows.contribution import part_of
from paceline.update.rows.index import RowIndex
from paceline.update.rows.layout import IDS, LEAST_PIECE_ROWS, index_bytes, layouts, least_bytes, piece_bytes, row_bytes
from paceline.update.rows.lifecycle import most_candidate_bytes
from paceline.update.rows.read_ahead import PieceReadAhead, SpillReads

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.lasting import RowsMemory
    from paceline.update.rows.ops import RowOps
    from paceline.update.rows.rules import RowRule
    from paceline.update.rows.spec import RowTableSpec

_ERASE_TIMES: Final = 16  # the ids that closing one gap in the index looks at, at most but for bad luck
# Of the memory of columns in files, for the record of their pieces: 8 bytes of it stand for up to 64 KiB in the files,
# so that it holds an iteration over a hundred times the memory.
_RECORD_SHARE: Final = 64
PIECE_ROWS: Final = 16 * 1024  # that are worked on together: few enough to stay in the cache


@final
class RowColumns:
    """All columns of a table; one row has the same slot in each. For one thread at a time.

    For columns in files, the mapped memory stays within what `share` gives: callers announce the rows they touch by
    `visit`, before or at once after, and work in pieces, between which memory is released if needed. The windows of
    later pieces are read ahead where the order of `pieces_of` repeats.

    Args:
        spec: of the table.
        rule: whose state is kept.
        lasting: where they lie if they outlive this process.

    Raises:
        UsageError: a file cannot be created.
    """

    def __init__(self, spec: RowTableSpec, rule: RowRule, lasting: RowsMemory | None = None) -> None:
        self._room_bytes = 0  # that may be mapped, of columns in files
        self._columns: dict[str, RowColumn] = {}
        self._windows: dict[str, Windows] = {}
        self._ahead: PieceReadAhead | None = None
        self._piece_bytes = piece_bytes(spec, rule)
        try:
            for name, layout in layouts(spec, rule).items():
                if lasting is not None:
                    descriptor = lasting.column(name)
                else:
                    descriptor = unnamed_file(spec.life.spill) if spec.life.spill else None
                outlives = lasting is not None
                self._columns[name] = RowColumn(layout.width, layout.dtype, descriptor, outlives=outlives)
        except UsageError as error:
            self.close()
            raise UsageError(f"Row table '{spec.name}': {error}") from error
        if spec.life.spill:
            self._windows = {name: Windows(column) for name, column in self._columns.items()}
            block_rows = max(1, WINDOW_BYTES // max(column.row_bytes for column in self._columns.values()))
            self._ahead = PieceReadAhead(spec.name, self._windows, block_rows)

    def __getitem__(self, name: str) -> Tensor:
        """Return a whole column, (capacity, width); keep it no longer than a piece."""
        return self._columns[name].tensor

    @property
    def ids(self) -> RowColumn:
        """The column of ids, for the index."""
        return self._columns[IDS]

    @property
    def num_rows(self) -> int:
        """How many rows all columns have room for."""
        return min(len(column.tensor) for column in self._columns.values())

    @property
    def mapped_bytes(self) -> int:
        """The most memory that columns in files map now."""
        return sum(windows.mapped_bytes for windows in self._windows.values())

    @property
    def reads(self) -> SpillReads:
        """What was mapped for pieces of known rows so far, of columns in files."""
        return SpillReads() if self._ahead is None else self._ahead.reads

    def share(self, num_bytes: int) -> None:
        """Set what columns in files may take of main memory: their windows, and the record of how these are used."""
        self._room_bytes = num_bytes
        if self._ahead is not None:
            record_bytes = num_bytes // _RECORD_SHARE
            if num_bytes - record_bytes < 2 * LEAST_PIECE_ROWS * self._piece_bytes:
                record_bytes = 0
            self._room_bytes -= record_bytes
            self._ahead.share(self._room_bytes, record_bytes)

    def grow(self, num_rows: int) -> None:
        """Make room for `num_rows` rows in all; raises UsageError, without changes, if memory is full."""
        if self._ahead is not None:
            if num_rows > self.num_rows:
                self._ahead.stop()  # columns may move
            for windows in self._windows.values():
                windows.grow(num_rows)
        else:
            for column in self._columns.values():
                column.grow(num_rows)

    def pieces(self, num_rows: int, times: int = 1) -> Iterator[slice]:
        """Return slices of `num_rows` rows that come one after the other.

        While it has a slice, the caller may touch `times` as many rows in all columns.
        """
        start = 0
        while start < num_rows:
            self._make_room()
            stop = min(start + max(1, self._piece_rows() // times), num_rows)
            yield slice(start, stop)
            start = stop

    def pieces_of(self, slots: Tensor) -> Iterator[slice]:
        """Return slices of rows, (n,), that come one after the other and count as touched; -1 is a row yet to be made.

        They are longer than those of `pieces` where rows lie together. Later ones may be read ahead.
        """
        if self._ahead is None:
            yield from self.pieces(len(slots))
            return
        for first in range(0, len(slots), PIECE_ROWS):
            for piece in self._cut(slots[first : first + PIECE_ROWS], self._ahead):
                yield slice(first + piece.start, first + piece.stop)

    def pieces_in(self, name: str, num_rows: int) -> Iterator[slice]:
        """Return slices of `num_rows` rows of which the caller touches one column, of all columns in files."""
        windows, half_bytes = self._windows[name], self._room_bytes // 2
        most = PIECE_ROWS
        if windows.most_bytes > half_bytes:
            most = min(most, max(LEAST_PIECE_ROWS, half_bytes // windows.row_bytes))
        for start in range(0, num_rows, most):
            self._make_room(min(half_bytes, windows.most_bytes))
            yield slice(start, min(start + most, num_rows))

    def visit(self, slots: Tensor) -> None:
        """Count rows as touched; -1 is no row."""
        for name in self._windows:
            self.visit_in(name, slots)

    def visit_in(self, name: str, slots: Tensor) -> None:
        """Count rows of one column as touched; -1 is no row."""
        if self._windows:
            self._windows[name].visit(slots[slots >= 0])

    def visit_span(self, name: str, start: int, stop: int) -> None:
        """Count neighbouring rows of one column as touched, before they are."""
        if self._windows:
            self._make_room()
            self._windows[name].visit_span(start, stop)

    def trim(self) -> None:
        """Release the memory that columns in files map."""
        if self._ahead is not None:
            self._ahead.stop()
        for windows in self._windows.values():
            windows.trim()

    def close(self) -> None:
        """Give everything back."""
        if self._ahead is not None:
            self._ahead.close()
        for column in self._columns.values():
            column.close()

    def _make_room(self, num_bytes: int | None = None) -> None:
        if self._ahead is not None:
            self._ahead.make_room(self._room_bytes // 2 if num_bytes is None else num_bytes)

    def _cut(self, slots: Tensor, ahead: PieceReadAhead) -> Iterator[slice]:
        """Return slices of known rows that need no more than half of the room, each when it is begun."""
        costs = torch.stack([windows.costs(slots) for windows in self._windows.values()]).sum(0).cumsum(0)
        start = 0
        while start < len(slots):
            most = int(costs[start]) + self._room_bytes // 2 - self._piece_bytes
            stop = max(start + LEAST_PIECE_ROWS, int(torch.searchsorted(costs, most, right=True)))
            piece = slice(start, min(stop, len(slots)))
            self._make_room(int(costs[piece.stop - 1] - costs[start]) + self._piece_bytes)
            mapped_bytes = self.mapped_bytes
            self.visit(slots[piece])
            ahead.begin(slots[piece], self.mapped_bytes - mapped_bytes)
            yield piece
            start = piece.stop

    def _piece_rows(self) -> int:
        if not self._windows:
            return PIECE_ROWS
        return min(PIECE_ROWS, max(LEAST_PIECE_ROWS, self._room_bytes // 2 // self._piece_bytes))


@final
class RowMemory:
    """Memory of rows: finds, creates and removes them; used by one thread at a time.

    With a memory budget, the index and the candidates lie in main memory, and columns are mapped to the rest of it.

    Args:
        spec: of the table.
        rule: whose state is kept.
        ops: does the work.
        lasting: where rows lie if they outlive this process; those that a predecessor has left there are taken over.

    Raises:
        UsageError: the budget is too small for any table like this, or files cannot be created.
    """

    def __init__(self, spec: RowTableSpec, rule: RowRule, ops: RowOps, lasting: RowsMemory | None = None) -> None:
        self._table = spec.name
        self._ops = ops
        self._row_bytes = row_bytes(spec, rule)
        self._spilled = bool(spec.life.spill)
        self._budget_bytes = spec.life.memory_bytes - most_candidate_bytes(spec.life)  # of index and columns
        self._least_bytes = least_bytes(spec, rule)
        self._given_bytes = spec.life.memory_bytes
        self._require(self._least_bytes, "any rows at all")
        self.columns = RowColumns(spec, rule, lasting)
        self._index = RowIndex(ops, self.columns.ids)
        if lasting is not None:
            self._index.take_over(lasting.record.numbers["num_slots"])
        self._entry_bytes = index_bytes(len(self))
        self._share_out()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_slots(self) -> int:
        """The number of slots ever used; all rows are in slots below it."""
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
        """Bytes in files."""
        return self._row_bytes * self.num_slots if self._spilled else 0

    def pieces(self, num_rows: int) -> Iterator[slice]:
        """Return slices to work on rows; see `RowColumns.pieces`."""
        return self.columns.pieces(num_rows)

    def pieces_of(self, slots: Tensor) -> Iterator[slice]:
        """Return slices to work on known rows; see `RowColumns.pieces_of`."""
        return self.columns.pieces_of(slots)

    def located(self, ids: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Return slices to work on rows, one after the other, and the slots of each: -1 for ids without a row.

        No row may be removed meanwhile; rows that are added have ids that do not repeat.
        """
        if not self._spilled:
            for piece in self.pieces(len(ids)):
                yield piece, self._index.find(part_of(ids, piece).contiguous())
            return
        slots = self.find(ids)
        for piece in self.pieces_of(slots):
            yield piece, slots[piece]

    def find(self, ids: Tensor) -> Tensor:
        """Return the slots of ids, (n,), -1 for those without a row; touches nothing else of these rows."""
        if not self._spilled:
            return self._index.find(ids)
        slots = torch.empty_like(ids)
        for piece in self.columns.pieces_in(IDS, len(ids)):
            slots[piece] = self._index.find(ids[piece].contiguous())
            self.columns.visit_in(IDS, slots[piece])
        return slots

    def ids_of(self, slots: Tensor) -> Tensor:
        """Return the ids of rows; for a piece."""
        self.columns.visit(slots)
        return self._index.ids_of(slots)

    def read_column(self, name: str, slots: Tensor, out: Tensor) -> None:
        """Copy rows of a column to `out`, (n, its width), but for slot -1; for a piece that was found before."""
        self._ops.gather(self.columns[name], slots, out)

    def write_column(self, name: str, slots: Tensor, rows: Tensor) -> None:
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

    def make_room(self, num_new: int) -> bool:
        """Make room for so many rows if that costs nothing until they are there; return whether there is room."""
        if self._spilled:
            return self.has_room(num_new)
        try:
            self.columns.grow(self._slots_with(num_new))
        except UsageError:  # the system promises no more than it has: then it matters how many are new
            return False
        return True

    def reserve(self, ids: Tensor) -> None:
        """Make room for the rows of distinct new ids; raises UsageError and changes nothing if memory is full."""
        if not self.make_room(ids.numel()):
            num_new = int((self.find(ids) < 0).sum())
            self._require_index(num_new)
            self.columns.grow(self._slots_with(num_new))

    def add(self, ids: Tensor) -> Tensor:
        """Return the slots of new, distinct rows, for which `reserve` has made room; for a piece.

        The caller visits all rows of the piece afterwards: what it had touched may have been released.
        """
        entry_bytes = max(self._entry_bytes, index_bytes(len(self) + len(ids)))
        grows = entry_bytes > self._entry_bytes
        if grows:  # all ids are read
            self.columns.trim()
        slots, _ = self._index.add(ids)
        if grows:
            self.columns.trim()
            self._entry_bytes = entry_bytes
            self._share_out()
        return slots

    def remove(self, slots: Tensor) -> None:
        """Remove rows and free their slots."""
        for piece in self.columns.pieces(len(slots), _ERASE_TIMES):
            self._index.remove(slots[piece])
            self.columns.trim()  # the index has read other ids too
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
        """Give the columns the memory that the index leaves."""
        self.columns.share(self._budget_bytes - self.index_bytes)

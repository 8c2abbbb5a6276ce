"""The columns of a row table: ids, values, state and use, in main memory or in mapped files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, final

from paceline.errors import UsageError
from paceline.update.rows.column import RowColumn, unnamed_file
from paceline.update.rows.layout import IDS, LEAST_PIECE_ROWS, layouts, piece_bytes
from paceline.update.rows.spill import Windows

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rows.rule import RowRule
    from paceline.update.rows.spec import RowTableSpec

PIECE_ROWS: Final = 16 * 1024  # that are worked on together: few enough to stay in the cache


@final
class RowColumns:
    """All columns of a table; one row has the same slot in each. For one thread at a time.

    In files, what is mapped to main memory stays within `room_bytes`: whoever touches rows says so by `visit`, before
    or at once after, and works in `pieces`, between which the memory is given back where it is needed.

    Args:
        spec: of the table.
        rule: whose state is kept.

    Raises:
        UsageError: there can be no file.
    """

    def __init__(self, spec: RowTableSpec, rule: RowRule) -> None:
        self.room_bytes = 0  # that may be mapped, of columns in files
        self._columns: dict[str, RowColumn] = {}
        self._windows: dict[str, Windows] = {}
        self._piece_bytes = piece_bytes(spec, rule)
        try:
            for name, layout in layouts(spec, rule).items():
                descriptor = unnamed_file(spec.life.spill) if spec.life.spill else None
                self._columns[name] = RowColumn(layout.width, layout.dtype, descriptor)
        except UsageError as error:
            self.close()
            raise UsageError(f"Row table '{spec.name}': {error}") from error
        if spec.life.spill:
            self._windows = {name: Windows(column) for name, column in self._columns.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Return all of a column, (rows there is room for, width); keep it no longer than a piece."""
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
        """What is mapped of columns in files, at most."""
        return sum(windows.mapped_bytes for windows in self._windows.values())

    def grow(self, num_rows: int) -> None:
        """Make room for so many rows in all; raises UsageError, with all rows as they were, when there is none."""
        if self._windows:
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

    def visit(self, slots: Tensor) -> None:
        """Note that rows are touched; -1 is none."""
        for windows in self._windows.values():
            windows.visit(slots[slots >= 0])

    def visit_span(self, name: str, start: int, stop: int) -> None:
        """Note that neighbouring rows of one column are going to be touched."""
        if self._windows:
            self._make_room()
            self._windows[name].visit_span(start, stop)

    def trim(self) -> None:
        """Give the memory of columns in files back."""
        for windows in self._windows.values():
            windows.trim()

    def close(self) -> None:
        """Give everything back."""
        for column in self._columns.values():
            column.close()

    def _make_room(self) -> None:
        if self._windows and self.mapped_bytes > self.room_bytes // 2:
            self.trim()

    def _piece_rows(self) -> int:
        if not self._windows:
            return PIECE_ROWS
        return min(PIECE_ROWS, max(LEAST_PIECE_ROWS, self.room_bytes // 2 // self._piece_bytes))

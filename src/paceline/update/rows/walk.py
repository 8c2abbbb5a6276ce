"""Iteration of a user's function over all rows of a table on one server, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, final

import torch

from paceline.errors import UsageError
from paceline.update.rows.layout import RowPiece
from paceline.update.summing import num_nonfinite

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rows.spec import RowTableSpec
    from paceline.update.rows.store import RowStore

PIECE_BYTES: Final = 1 << 22  # of a piece, about: what a walk takes of main memory, twice
_LEAST_ROWS: Final = 64


@final
class RowWalk:
    """One walk through the rows of one server.

    Args:
        store: the rows; nothing else may change them meanwhile.
        clock: the clock of the table.
        note: called with the ids of changed rows.

    Example:
        >>> def halve(rows: RowWalk) -> dict[str, torch.Tensor]:
        ...     for piece in rows.pieces():
        ...         piece.values.mul_(0.5)
        ...         rows.put(piece)
        ...     return {"rows": torch.tensor(len(rows))}
    """

    def __init__(self, store: RowStore, clock: int, note: Callable[[Tensor], None]) -> None:
        self._store = store
        self._clock = clock
        self._note = note
        self._given: RowPiece | None = None  # the current piece, as it was given
        self.num_changed = 0

    def __len__(self) -> int:
        return len(self._store)

    @property
    def spec(self) -> RowTableSpec:
        """The table as it was declared."""
        return self._store.spec

    def pieces(self) -> Iterator[RowPiece]:
        """Return copies of all rows, some thousands at a time, each row once; a look at a row is no use of it.

        A piece has `ids`, (n,) int64, `values`, (n, width), and `columns` by name: "state.<name>" is a state of the
        rule, (n, its width). No piece is empty.
        """
        start: int | None = 0
        while start is not None:
            piece = self._store.rows(start, self._piece_slots())
            if len(piece.ids):
                self._given = _copy(piece)
                yield piece
            start = piece.next_slot
        self._given = None

    def put(self, piece: RowPiece) -> None:
        """Write the current piece back, with your changes to its values and columns; ids stay.

        Raises:
            UsageError: it is another piece, has another shape or dtype, or values that are not finite (unless the table
                ignores those). The rows of this piece are unchanged then.
        """
        given = self._given
        if given is None or not torch.equal(piece.ids, given.ids) or piece.columns.keys() != given.columns.keys():
            raise UsageError("only the piece at hand can be put back, with the ids and columns that it came with")
        for name, column in piece.columns.items():
            was = given.columns[name]
            if (column.shape, column.dtype) != (was.shape, was.dtype):
                raise UsageError(
                    f"{name} came back as {tuple(column.shape)} {column.dtype}, expected {tuple(was.shape)} {was.dtype}"
                )
        num_bad = num_nonfinite(piece.values.contiguous().view(-1))
        if num_bad and self.spec.nonfinite != "ignore":
            raise UsageError(f"{num_bad} of {piece.values.numel()} new values of a piece are NaN or infinite")
        self._write(piece, given)

    def _write(self, piece: RowPiece, given: RowPiece) -> None:
        """Write the rows with changed bits."""
        differs = torch.zeros(len(piece.ids), dtype=torch.bool)
        for name, column in piece.columns.items():
            differs |= (_bits(column) != _bits(given.columns[name])).any(1)
        changed = RowPiece(piece.ids[differs], {name: column[differs] for name, column in piece.columns.items()})
        if not len(changed.ids):
            return
        self._store.load(changed, self._clock)
        self._given = _copy(piece)
        self.num_changed += len(changed.ids)
        self._note(changed.ids)

    def _piece_slots(self) -> int:
        return piece_slots(self._store)


def piece_slots(store: RowStore) -> int:
    """Return the number of slots of a piece of about `PIECE_BYTES`."""
    statistics = store.statistics()
    num_bytes = statistics.spilled_bytes or statistics.column_bytes
    row_bytes = -(-num_bytes // max(1, len(store)))  # no less than it is: free slots count as well
    return max(_LEAST_ROWS, PIECE_BYTES // max(row_bytes, store.spec.width))


def _copy(piece: RowPiece) -> RowPiece:
    return RowPiece(piece.ids.clone(), {name: column.clone() for name, column in piece.columns.items()})


def _bits(column: Tensor) -> Tensor:
    """Return numbers as bytes, (n, bytes a row), so that NaNs compare."""
    return column.contiguous().view(torch.uint8)

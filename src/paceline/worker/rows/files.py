"""Export of a row table to a file, and back, in pieces: no process holds more than one piece in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import Refused, UsageError
from paceline.update.rows.export import load_rows, save_rows
from paceline.update.rows.layout import RowPiece, RowStatistics
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import RowTableSpec
from paceline.worker.whole_calls import WholeCalls


@dataclass(frozen=True, slots=True)
class RowFile:
    """The file of a row table, and access to its servers."""

    path: Path
    spec: RowTableSpec
    whole: WholeCalls

    def save(self) -> None:
        """Write all rows with their rule state to the file; raises as `RowTable.export` does."""
        num_rows = sum(self.whole.statistics(exact=True), RowStatistics()).num_rows
        save_rows(self.path, self.spec, row_rule(self.spec.rule, None), self._pieces(num_rows), num_rows)

    def load(self) -> None:
        """Write the rows of the file to their servers; raises as `RowTable.load` does."""
        num_loaded = 0
        for piece in load_rows(self.path, self.spec, row_rule(self.spec.rule, None)):
            try:
                self.whole.write(piece)
            except Refused as error:
                raise Refused(f"{error} Of {self.path}, {num_loaded} rows are loaded for certain.") from error
            num_loaded += len(piece.ids)

    def _pieces(self, num_rows: int) -> Iterator[RowPiece]:
        """Yield all rows; raises UsageError if their number has changed meanwhile."""
        num_found = 0
        for piece in self.whole.pieces(values_only=False, exact=True):
            num_found += len(piece.ids)
            self._require(num_found <= num_rows, num_rows)
            yield piece
        self._require(num_found == num_rows, num_rows)

    def _require(self, is_whole: bool, num_rows: int) -> None:
        if not is_whole:
            raise UsageError(
                f"table '{self.spec.name}' had {num_rows} rows when its export to {self.path} began, and other rows "
                "came or went meanwhile. Have all workers meet at a barrier before it and after it."
            )

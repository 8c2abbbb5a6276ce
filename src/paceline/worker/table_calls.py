"""Operations of a worker on whole tables: functions, statistics, export and import of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from safetensors.torch import load, save
from torch import Tensor

from paceline.errors import Refused, UsageError
from paceline.update.rows.export import load_rows, save_rows
from paceline.update.rows.layout import IDS, VALUES, RowPiece, RowStatistics
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import Hyper
from paceline.wire.malformed import read_answer_of
from paceline.wire.requests import COUNT_BYTES, NEXT_SLOT, CallFunction, CountRows, ReadRows, TableCall, WriteRows
from paceline.worker.node import WorkerNode
from paceline.worker.validation import brief

_STATISTICS = msgspec.msgpack.Decoder(RowStatistics)


class CallResult(msgspec.Struct, frozen=True):
    """The results of a function by server, and how many values or rows it changed in all."""

    results: list[dict[str, Tensor]]
    num_changed: int


class TableCalls(msgspec.Struct, frozen=True):
    """One table of one worker, on all servers or on `servers`. Every call blocks until all of them have answered.

    With `exact`, servers wait until they have every update of the clocks below that of this worker.

    Raises:
        Refused: a server could not do it; the message says which, and why.
        DeadlineExceeded: not all servers have answered in time.
        PeerError: a server is gone, or this worker was given up.
    """

    node: WorkerNode
    table: str
    servers: Sequence[int] | None = None

    def call(self, name: str, numbers: Hyper, *, exact: bool) -> CallResult:
        """Run a function on every server; raises UsageError if it has no name, or an argument is not a number."""
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
            raise UsageError(
                f"table '{self.table}': the function to call is {brief(name)}, expected a name such as 'summary', or "
                "'package.module:function'."
            )
        _require_numbers(name, numbers)
        bodies = self.node.rpc.call_all(
            lambda number: CallFunction(self._table_call(number, exact=exact), name, numbers),
            f"servers to run {name} over table '{self.table}'",
            servers=self.servers,
        )
        num_changed = sum(int.from_bytes(body[:COUNT_BYTES], "little") for body in bodies)
        what = f"what {name} returns"
        parts = zip(self._asked, bodies, strict=True)
        return CallResult(
            [read_answer_of(server, what, _tensors, body[COUNT_BYTES:]) for server, body in parts], num_changed
        )

    def statistics(self, *, exact: bool) -> list[RowStatistics]:
        """Return the statistics of each server's rows, by rank."""
        what = f"statistics of table '{self.table}'"
        bodies = self.node.rpc.call_all(lambda number: CountRows(self._table_call(number, exact=exact)), what)
        return [read_answer_of(server, what, _STATISTICS.decode, body) for server, body in enumerate(bodies)]

    def pieces(self, *, values_only: bool, exact: bool) -> Iterator[RowPiece]:
        """Return all rows, server by server, a piece of a few megabytes at a time."""
        for server in range(self.node.num_servers):
            start: int | None = 0
            while start is not None:
                piece = self._piece(server, start, values_only=values_only, exact=exact)
                if len(piece.ids):
                    yield piece
                start = piece.next_slot

    def write(self, piece: RowPiece) -> None:
        """Overwrite rows on their servers, after all updates of earlier clocks."""
        bodies = [
            memoryview(save({IDS: piece.ids[at], **{name: column[at] for name, column in piece.columns.items()}}))
            for at in self.node.context.row_sharding.split(piece.ids)
        ]
        self.node.rpc.call_all(
            lambda number: WriteRows(self._table_call(number, exact=True)),
            f"servers to load rows of table '{self.table}'",
            bodies,
        )

    def _piece(self, server: int, start: int, *, values_only: bool, exact: bool) -> RowPiece:
        body = self.node.rpc.call(
            server,
            lambda number: ReadRows(self._table_call(number, exact=exact), start, values_only),
            f"rows of table '{self.table}' from server {server}",
        )
        return read_answer_of(server, f"rows of table '{self.table}'", _read_piece, body)

    @property
    def _asked(self) -> Sequence[int]:
        return range(self.node.num_servers) if self.servers is None else self.servers

    def _table_call(self, number: int, *, exact: bool) -> TableCall:
        return TableCall(number, self.table, self.node.clock if exact else 0, self.node.rpc.settled(number))


class RowFile(msgspec.Struct, frozen=True):
    """The file of a row table, and access to its servers; no process holds more than a piece of it in memory."""

    path: Path
    spec: RowTableSpec
    calls: TableCalls

    def save(self) -> None:
        """Write all rows with their rule state to the file; raises as `RowTable.export` does."""
        num_rows = sum(self.calls.statistics(exact=True), RowStatistics()).num_rows
        save_rows(self.path, self.spec, row_rule(self.spec.rule, None), self._pieces(num_rows), num_rows)

    def load(self) -> None:
        """Write the rows of the file to their servers; raises as `RowTable.load` does."""
        num_loaded = 0
        for piece in load_rows(self.path, self.spec, row_rule(self.spec.rule, None)):
            try:
                self.calls.write(piece)
            except Refused as error:
                raise Refused(f"{error} Of {self.path}, {num_loaded} rows are loaded for certain.") from error
            num_loaded += len(piece.ids)

    def _pieces(self, num_rows: int) -> Iterator[RowPiece]:
        """Yield all rows; raises UsageError if their number has changed meanwhile."""
        num_found = 0
        for piece in self.calls.pieces(values_only=False, exact=True):
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


def _tensors(body: memoryview) -> dict[str, Tensor]:
    return load(bytes(body))


def _read_piece(body: memoryview) -> RowPiece:
    columns = _tensors(body)
    ids, next_slot = columns.pop(IDS), int(columns.pop(NEXT_SLOT))
    if VALUES not in columns:
        raise KeyError(VALUES)
    return RowPiece(ids, columns, next_slot if next_slot >= 0 else None)


def _require_numbers(function: str, numbers: Hyper) -> None:
    """Raise UsageError for arguments that cannot be encoded."""
    for name, value in numbers.items():
        for number in value if isinstance(value, tuple) else (value,):
            is_number = number is None or type(number) in (bool, int, float)
            if not is_number or (isinstance(number, int) and not -(1 << 63) <= number < 1 << 63):
                raise UsageError(
                    f"function {function}: {name} is {value!r}, expected a number (int of 64 bits, float, bool), None, "
                    "or a tuple of those."
                )

"""Operations on a server's whole shard of a table: run a function, count rows, read and write them in pieces."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.errors import PacelineError, UsageError
from paceline.server.dense_tables import DenseTables
from paceline.server.memory_check import require_memory
from paceline.server.row_tables import RowTables, ServedRowTable
from paceline.update.functions import MAX_RESULT_BYTES, function_at
from paceline.update.rows.layout import IDS, VALUES, RowPiece
from paceline.update.rows.walk import RowWalk, piece_slots
from paceline.update.shard import Shard
from paceline.update.summing import num_nonfinite
from paceline.wire.requests import COUNT_BYTES, NEXT_SLOT, CallFunction, CountRows, ReadRows, WholeTable, WriteRows


@dataclass(slots=True)
class WholeTables:
    """Operations on whole tables of one server, of both kinds.

    Args:
        changed: called with the name of a table whose values have changed.
        allowed_paths: the functions that may be imported by path; None allows all.
    """

    dense_tables: DenseTables
    row_tables: RowTables
    changed: Callable[[str], None]
    allowed_paths: frozenset[str] | None = None

    def __contains__(self, table: str) -> bool:
        """Return whether there is a table of this name, of either kind."""
        return table in self.dense_tables.shards or table in self.row_tables

    def carry_out(self, request: WholeTable, body: memoryview, clock_of: Callable[[str], int]) -> memoryview:
        """Carry out a request, and return the body of the answer.

        Raises:
            PacelineError: it failed; the message says what and where.
            SafetensorError: the tensors in its body cannot be read.
        """
        table = request.table_call.table
        if table not in self:
            names = ", ".join(sorted({*self.dense_tables.shards, *self.row_tables.tables})) or "none"
            raise UsageError(f"there is no table '{table}' on server {self.dense_tables.server}; tables: {names}")
        broken = self.row_tables.tables[table].broken if table in self.row_tables else self.dense_tables.settle(table)
        if broken:
            raise UsageError(broken)
        match request:
            case CallFunction():
                return self._call(request, clock_of(table))
            case CountRows():
                return memoryview(msgspec.msgpack.encode(self._rows_of(table).store.statistics()))
            case ReadRows():
                return _packed_piece(self._rows_of(table), request.start_slot, values_only=request.values_only)
            case WriteRows():
                self._write(table, load(bytes(body)), clock_of(table))
                return memoryview(b"")

    # -- functions ---------------------------------------------------------------------------------------------------

    def _call(self, request: CallFunction, clock: int) -> memoryview:
        table = request.table_call.table
        try:
            with torch.no_grad():
                return (
                    self._call_over_rows(request, clock) if table in self.row_tables else self._call_over_range(request)
                )
        except BaseException as error:  # a user's function may raise anything; the server goes on
            where = f"function {request.name} over table '{table}' on server {self.dense_tables.server}"
            raise UsageError(f"{where} failed: {_story(error)}") from error

    def _call_over_range(self, request: CallFunction) -> memoryview:
        shard = self.dense_tables.shards[request.table_call.table]
        function = function_at(request.name, "range", self.allowed_paths)
        if not shard.initialised:
            raise UsageError("the table has no values yet")
        require_memory(f"a copy of table '{shard.spec.name}'", shard.values.nbytes)
        values = shard.values.clone()
        result = _packed_result(function(values, shard.span.start, **request.numbers))
        num_changed = _num_changed(shard, values)
        if num_changed:
            shard.store(values)
            self.changed(shard.spec.name)
        return _answer(num_changed, result)

    def _call_over_rows(self, request: CallFunction, clock: int) -> memoryview:
        served = self.row_tables.tables[request.table_call.table]
        function = function_at(request.name, "rows", self.allowed_paths)
        walk = RowWalk(served.store, clock, served.note_changed)
        try:
            result = _packed_result(function(walk, **request.numbers))
        except BaseException as error:
            if not walk.num_changed:
                raise
            raise UsageError(
                f"{_story(error)}; {walk.num_changed} rows had been changed before, and stay so"
            ) from error
        finally:
            if walk.num_changed:
                self.changed(request.table_call.table)
        return _answer(walk.num_changed, result)

    # -- rows --------------------------------------------------------------------------------------------------------

    def _write(self, table: str, tensors: Mapping[str, Tensor], clock: int) -> None:
        served = self._rows_of(table)
        columns = dict(tensors)
        ids = columns.pop(IDS, torch.empty(0))
        if ids.dim() != 1 or ids.dtype != torch.int64:
            raise UsageError(f"rows of table '{table}' came without ids")
        served.store.reserve([*(waiting.ids for waiting in served.waiting.values()), ids])
        served.store.load(RowPiece(ids, columns), clock)
        served.note_changed(ids)
        self.changed(table)

    def _rows_of(self, table: str) -> ServedRowTable:
        served = self.row_tables.tables.get(table)
        if served is None:
            raise UsageError(f"table '{table}' on server {self.dense_tables.server} has a shape, and no rows")
        return served


def _num_changed(shard: Shard, values: Tensor) -> int:
    """Return how many values a function has changed; raises UsageError if they do not fit the table."""
    if values.shape != shard.values.shape or values.dtype != shard.values.dtype:
        raise UsageError(
            f"its values are {tuple(values.shape)} {values.dtype} now, expected {tuple(shard.values.shape)} "
            f"{shard.values.dtype}: change them in place"
        )
    item = values.element_size()
    differs = (values.view(torch.uint8) != shard.values.view(torch.uint8)).view(-1, item).any(1)
    num_changed = int(differs.sum())
    num_bad = num_nonfinite(values) if num_changed else 0
    if num_bad and shard.spec.nonfinite != "ignore":
        raise UsageError(f"{num_bad} of its {values.numel()} new values are NaN or infinite")
    return num_changed


def _packed_result(result: object) -> bytes:
    """Encode the tensors that a function returned; raises UsageError for other objects, or too many bytes."""
    found: object = {} if result is None else result
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor)
        for name, tensor in cast("dict[object, object]", found).items()
    ):
        raise UsageError(f"it returned {type(result).__name__}, expected a dict of tensors by name, or None")
    tensors = {
        name: tensor.detach().cpu().contiguous().clone() for name, tensor in cast("dict[str, Tensor]", found).items()
    }
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if size_bytes > MAX_RESULT_BYTES:
        raise UsageError(f"it returned {size_bytes} bytes, expected at most {MAX_RESULT_BYTES}: return less, or export")
    return save(tensors)


def _answer(num_changed: int, result: bytes) -> memoryview:
    return memoryview(num_changed.to_bytes(COUNT_BYTES, "little") + result)


def _packed_piece(served: ServedRowTable, start_slot: int, *, values_only: bool) -> memoryview:
    if start_slot < 0:
        raise UsageError(f"there is no slot {start_slot}")
    piece = served.store.rows(start_slot, piece_slots(served.store))
    columns = {VALUES: piece.values} if values_only else dict(piece.columns)
    next_slot = torch.tensor(-1 if piece.next_slot is None else piece.next_slot)
    return memoryview(save({IDS: piece.ids, NEXT_SLOT: next_slot, **columns}))


def _story(error: BaseException) -> str:
    """Return what went wrong and, for errors from user code, where."""
    if isinstance(error, PacelineError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].name}, line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"

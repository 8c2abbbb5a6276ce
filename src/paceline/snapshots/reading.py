"""What a snapshot has of a table: for a job with any number of servers, and for other programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from paceline.core.partition import Range
from paceline.errors import CheckpointError, PeerError, UsageError
from paceline.snapshots.folder import Snapshot, SnapshotTable
from paceline.snapshots.tensor_files import TensorFile
from paceline.update.dtypes import torch_dtype
from paceline.update.rows.layout import IDS, RowPiece
from paceline.update.rows.spec import RowTableSpec, row_differences
from paceline.update.rules import Hyper
from paceline.update.shard import VALUES
from paceline.update.table import SegmentPiece, TableSpec, cut, decode_table, differences

_ROWS: Final = msgspec.msgpack.Decoder(RowTableSpec)
_HYPER: Final = msgspec.msgpack.Decoder(tuple[Hyper, ...])
_LOADED_BYTES: Final = 4 << 20  # of rows, in one piece


def spec_of(table: SnapshotTable) -> TableSpec | RowTableSpec:
    """Return the declaration of a table; raises CheckpointError if it is none of this version."""
    try:
        return decode_table(table.spec) if table.kind == "shape" else _ROWS.decode(table.spec)
    except (PeerError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"table '{table.name}' of a snapshot cannot be read by this version: {error}") from error


def hyper_of(table: SnapshotTable) -> tuple[Hyper, ...]:
    """Return the hyperparameters of each group, as of the last update; raises CheckpointError if these are none."""
    try:
        return _HYPER.decode(table.hyper)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"table '{table.name}' of a snapshot has hyperparameters that cannot be read: {error}"
        ) from error


@dataclass(frozen=True)
class SavedDense:
    """A dense table in a snapshot. Its files are mapped, and read as far as they are used."""

    folder: Path
    table: SnapshotTable

    @cached_property
    def spec(self) -> TableSpec:
        """Its declaration."""
        found = spec_of(self.table)
        if not isinstance(found, TableSpec) or len(found.segments) != len(self.table.names):
            raise CheckpointError(f"the snapshot {self.folder} says of table '{self.table.name}' what does not fit")
        return found

    @cached_property
    def _values(self) -> TensorFile:
        return TensorFile(self.folder / self.table.values)

    @cached_property
    def _states(self) -> dict[str, TensorFile]:
        return {state: TensorFile(self.folder / file) for state, file in self.table.states.items()}

    @cached_property
    def _fixed(self) -> TensorFile | None:
        return TensorFile(self.folder / self.table.fixed) if self.table.fixed else None

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values of each parameter."""
        for name, segment in zip(self.table.names, self.spec.segments, strict=True):
            yield name, self._whole(self._values, name, segment.shape)

    def states(self, index: int) -> dict[str, Tensor]:
        """Return the states of a parameter, by their names."""
        name, found = self.table.names[index], dict[str, Tensor]()
        for state, file in self._states.items():
            if f"{name}.{state}" in file.names:
                found[state] = self._whole(file, f"{name}.{state}", self.spec.segments[index].shape)
        if self._fixed is not None:
            prefix = f"{name}."
            found |= {
                key.removeprefix(prefix): self._fixed.tensor(key)
                for key in self._fixed.names
                if key.startswith(prefix) and "." not in key.removeprefix(prefix)
            }
        return found

    def part(self, span: Range) -> dict[str, Tensor]:
        """Return what a server with this range loads; see `Shard.load_state`. It copies the values of the range."""
        pieces, found = cut(self.spec, span), dict[str, Tensor]()
        values = [piece.cut(self._whole_of(piece)).reshape(-1) for piece in pieces]
        found[VALUES] = torch.cat(values) if values else torch.empty(0, dtype=torch_dtype(self.spec.dtype))
        for piece in pieces:
            shape = self.spec.segments[piece.segment].shape
            for name, state in self.states(piece.segment).items():
                found[f"{piece.segment}.{name}"] = piece.cut(state) if state.shape == shape else state
        return found

    def _whole_of(self, piece: SegmentPiece) -> Tensor:
        return self._whole(self._values, self.table.names[piece.segment], self.spec.segments[piece.segment].shape)

    def _whole(self, file: TensorFile, name: str, shape: tuple[int, ...]) -> Tensor:
        found = file.tensor(name)
        if tuple(found.shape) != shape:
            raise CheckpointError(f"{file.path} has '{name}' of shape {tuple(found.shape)}, expected {shape}")
        return found


def saved_dense(snapshot: Snapshot, spec: TableSpec) -> SavedDense | None:
    """Return what a snapshot has of a table; None if it has none of this name.

    Raises:
        UsageError: the table was another one.
    """
    table = snapshot.table(spec.name)
    if table is None:
        return None
    known = spec_of(table)
    if isinstance(known, TableSpec):  # numbers and policies may be others now
        rule = replace(known.rule, groups=spec.rule.groups, quorum=spec.rule.quorum)
        known = replace(known, rule=rule, consistency=spec.consistency, scale=spec.scale, nonfinite=spec.nonfinite)
        _require_same(snapshot, spec.name, differences(spec, known))
    else:
        _require_same(snapshot, spec.name, ["It has rows there, and a shape here."])
    return SavedDense(snapshot.folder, table)


def saved_rows(snapshot: Snapshot, spec: RowTableSpec) -> SnapshotTable | None:
    """Return what a snapshot has of a row table; as `saved_dense`."""
    table = snapshot.table(spec.name)
    if table is None:
        return None
    known = spec_of(table)
    if isinstance(known, RowTableSpec):
        now = replace(spec, rule=replace(spec.rule, groups=known.rule.groups), consistency=known.consistency)
        now = replace(now, scale=known.scale, nonfinite=known.nonfinite, life=known.life)
        now = replace(now, filters=known.filters, hold=known.hold)
        _require_same(snapshot, spec.name, row_differences(now, known))
    else:
        _require_same(snapshot, spec.name, ["It has a shape there, and rows here."])
    return table


def row_pieces(snapshot: Snapshot, table: SnapshotTable) -> Iterator[RowPiece]:
    """Yield the rows of a table, a few megabytes at a time, those of the snapshots that it is based on among them.

    Raises:
        CheckpointError: one of these cannot be read.
    """
    newer = torch.empty(0, dtype=torch.int64)  # what was yielded or is gone, sorted
    while True:
        mine = list[Tensor]()
        for piece in _pieces_in(snapshot, table):
            if table.changed_only:
                mine.append(piece.ids)
            yield _without(piece, newer)
        if not table.changed_only:
            return
        if table.removed:
            mine.append(TensorFile(snapshot.folder / table.removed).tensor(IDS))
        newer = torch.cat([newer, *mine]).unique()
        base = snapshot.base()
        earlier = None if base is None else base.table(table.name)
        if base is None or earlier is None or earlier.kind != "rows":
            raise CheckpointError(
                f"{snapshot.folder} has changes of table '{table.name}', and its base has no such rows"
            )
        snapshot, table = base, earlier


def _without(piece: RowPiece, ids: Tensor) -> RowPiece:
    """Return the rows of a piece that are not among ids, which are sorted."""
    if not len(ids):
        return piece
    places = torch.searchsorted(ids, piece.ids).clamp_(max=len(ids) - 1)
    others = ids[places] != piece.ids
    return RowPiece(piece.ids[others], {name: column[others] for name, column in piece.columns.items()})


def _pieces_in(snapshot: Snapshot, table: SnapshotTable) -> Iterator[RowPiece]:
    for name in table.rows:
        file = TensorFile(snapshot.folder / name)
        columns = {column: file.tensor(column) for column in file.names}
        ids = columns.pop(IDS, None)
        is_list = ids is not None and ids.dim() == 1 and ids.dtype == torch.int64
        if ids is None or not is_list or any(column.shape[:1] != ids.shape for column in columns.values()):
            raise CheckpointError(f"{file.path} has no rows that belong together")
        row_bytes = 8 + sum(column[:1].nbytes for column in columns.values())
        step = max(1, _LOADED_BYTES // row_bytes)
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            yield RowPiece(ids[part].clone(), {column: rows[part].clone() for column, rows in columns.items()})


def _require_same(snapshot: Snapshot, name: str, problems: list[str]) -> None:
    if problems:
        raise UsageError(
            f"table '{name}' differs from the one in the snapshot {snapshot.folder} (there): {' '.join(problems)} "
            "Resume with the model and optimizer that it was made with."
        )

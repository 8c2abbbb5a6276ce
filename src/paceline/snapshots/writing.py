"""Writes cuts of tables as files, as their pieces come: no table is ever in memory as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import link as hard_link
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import torch
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from paceline.core.partition import Range
from paceline.errors import CheckpointError
from paceline.snapshots.files import FileEntry, FileWriter, sync, write_file
from paceline.snapshots.folder import INDEX, Snapshot, SnapshotTable, digest_of_manifest
from paceline.snapshots.tensor_files import dtype_of, header_of
from paceline.update.placement import spans
from paceline.update.rows.cuts import REMOVED
from paceline.update.rows.layout import IDS
from paceline.update.rows.spec import RowTableSpec
from paceline.update.shard import VALUES
from paceline.update.table import Segment, TableSpec, cut
from paceline.wire.requests import CutHead

if TYPE_CHECKING:
    from paceline.core.settings import ServerSettings, WorkerSettings

ROWS_FILE_BYTES: Final = 64 << 20  # of a file of rows, before it is written: these are in memory
SegmentSpan = tuple[int, int, int]  # where elements begin and end in a piece, and the number of their segment


class NoBase(CheckpointError):
    """What has changed since the snapshot before is not known: the next one has all rows, and need not wait."""


class PieceReader(Protocol):
    """Reads the parts of a cut."""

    def pieces(self, server: int, num_pieces: int) -> Iterator[memoryview]:
        """Return the pieces of one server's part, in order; may block for each, and raise PacelineError."""
        ...


class CutOfTable(msgspec.Struct, frozen=True):
    """A table that is cut: its declaration, what its servers have said, and what reads their parts."""

    spec: TableSpec | RowTableSpec
    encoded: bytes  # the declaration as it came
    heads: Sequence[CutHead]
    reader: PieceReader

    @property
    def clock(self) -> int:
        """Every update of the clocks below is in it."""
        return min(head.clock for head in self.heads)

    @property
    def versions(self) -> tuple[int, ...]:
        """The number of updates in each server's part."""
        return tuple(head.version for head in self.heads)

    @property
    def has_values(self) -> bool:
        """Whether every server has values of it."""
        return all(head.num_pieces >= 0 for head in self.heads)

    @property
    def has_changed_only(self) -> bool:
        """Whether it has only rows that have changed; raises NoBase where that holds for some servers only."""
        found = {bool(head.base) for head in self.heads}
        if len(found) > 1:
            lost = [server for server, head in enumerate(self.heads) if not head.base]
            raise NoBase(
                f"servers {lost} have not marked what has changed of table '{self.spec.name}', as they were replaced "
                "since the snapshot before: the next one has all rows"
            )
        return True in found


@dataclass(slots=True)
class FolderWriter:
    """Writes tables into a new folder, and notes the files.

    Args:
        folder: exists, and is empty.
        settings: how the tables are spread over servers.
        num_dense: dense tables that will come.
    """

    folder: Path
    settings: WorkerSettings | ServerSettings
    num_dense: int
    files: list[FileEntry] = field(default_factory=list[FileEntry])
    tables: list[SnapshotTable] = field(default_factory=list[SnapshotTable])
    _taken: set[str] = field(default_factory=set[str])  # names of parameters
    _weight_map: dict[str, str] = field(default_factory=dict[str, str])
    _num_values_bytes: int = 0
    _num_dense: int = 0
    _base: tuple[str, str] = ("", "")  # of tables that were kept: see `based_on`

    def keep(self, snapshot: Snapshot, table: SnapshotTable) -> None:
        """Take a table over from another snapshot of the same folder, by links to its files; before any is added.

        Where it has only rows that have changed, all that are added have all rows. Raises OSError.
        """
        number, entries = len(self.tables) + 1, {entry.name: entry for entry in snapshot.manifest.files}
        names = {"": ""}
        for index, name in enumerate(sorted(table.files)):
            names[name] = f"kept-{number:05d}-{index:05d}.safetensors"
            _link(snapshot.folder / name, self.folder / names[name])
            self.files.append(replace(entries[name], name=names[name]))
        moved = replace(
            table,
            values=names[table.values],
            states={state: names[name] for state, name in table.states.items()},
            fixed=names[table.fixed],
            rows=tuple(names[name] for name in table.rows),
            removed=names[table.removed],
        )
        self.tables.append(moved)
        self._taken |= set(table.names)
        self._weight_map |= dict.fromkeys(table.names, moved.values)
        self._num_values_bytes += entries[table.values].size_bytes if table.values else 0
        if table.changed_only:
            self._base = snapshot.manifest.base, snapshot.manifest.base_sha256

    def add(self, each: CutOfTable) -> None:
        """Write a table; blocks, and raises what reading its cut or writing to the disk raises."""
        found = self._dense(each, each.spec) if isinstance(each.spec, TableSpec) else self._rows(each)
        self.tables.append(found)

    def finish(self) -> None:
        """Write which values are in which file."""
        index = {"metadata": {"total_size": self._num_values_bytes}, "weight_map": self._weight_map}
        self.files.append(write_file(self.folder / INDEX, msgspec.json.format(msgspec.json.encode(index), indent=1)))

    def based_on(self, base: Snapshot | None) -> tuple[str, str]:
        """Return name and digest of the snapshot that has the rows which have not changed; empty if this has all.

        Raises:
            NoBase: it is not there.
        """
        if self._base != ("", "") or not any(table.changed_only for table in self.tables):
            return self._base
        digest = "" if base is None else digest_of_manifest(base.folder)
        if base is None or not digest:
            raise NoBase("the snapshot before is not there any more: the next one has all rows")
        return base.folder.name, digest

    # -- dense tables ------------------------------------------------------------------------------------------------

    def _dense(self, each: CutOfTable, spec: TableSpec) -> SnapshotTable:
        self._num_dense += 1
        number, names, layout = self._num_dense, self._names_of(spec), spans(spec, self.settings)
        values = f"model-{number:05d}-of-{self.num_dense:05d}.safetensors"
        states = _states_of(spec, each.heads, layout)
        with ExitStack() as opened:
            parts = [_Part(VALUES, spec.dtype, range(len(names)), self._open(opened, values, spec, names))]
            for state, (dtype, holders) in states.items():
                file = self._open(opened, _state_file(number, state), spec, names, (state, dtype, holders))
                parts.append(_Part(state, dtype, holders, file))
            for span, head in zip(layout, each.heads, strict=True):
                for piece, start, stop in _pieces(each, span, head):
                    found, places = _split(piece, head, start, stop, span), list(_places(spec, span, start, stop))
                    for part in parts:
                        part.write(found.get(part.name), places)
            self.files += [part.file.finish() for part in parts]
        fixed = self._fixed(number, names, spec, each.heads)
        self._weight_map |= dict.fromkeys(names, values)
        self._num_values_bytes += spec.numel * dtype_of(spec.dtype).itemsize
        return SnapshotTable(
            spec.name,
            "shape",
            each.encoded,
            each.clock,
            each.versions,
            msgspec.msgpack.encode(each.heads[0].hyper),
            names,
            values,
            {state: _state_file(number, state) for state in states},
            fixed,
        )

    def _open(
        self,
        opened: ExitStack,
        name: str,
        spec: TableSpec,
        names: Sequence[str],
        state: tuple[str, str, Collection[int]] | None = None,
    ) -> FileWriter:
        """Open a file of the values, or of one state of the segments that have it."""
        file = opened.enter_context(FileWriter(self.folder / name))
        shapes = [segment.shape for segment in spec.segments]
        if state is None:
            tensors = [(each, spec.dtype, shape) for each, shape in zip(names, shapes, strict=True)]
        else:
            suffix, dtype, holders = state
            tensors = [(f"{names[index]}.{suffix}", dtype, shapes[index]) for index in sorted(holders)]
        file.write(header_of(tensors, {}))
        return file

    def _names_of(self, spec: TableSpec) -> tuple[str, ...]:
        """Return what parameters are called: their names, or with that of the table before them where one is taken."""
        names = [segment.name for segment in spec.segments]
        if self._taken & set(names) or "__metadata__" in names:
            names = [f"{spec.name}.{name}" for name in names]
        self._taken |= set(names)
        return tuple(names)

    def _fixed(self, number: int, names: Sequence[str], spec: TableSpec, heads: Sequence[CutHead]) -> str:
        """Write the states that are in no piece; return the name of the file, "" if there is nothing."""
        parts: dict[str, list[Tensor]] = {}
        for head in heads:
            for key, value in load(head.fixed).items() if head.fixed else ():
                parts.setdefault(key, []).append(value)
        if not parts:
            return ""
        found: dict[str, Tensor] = {}
        for key, values in parts.items():
            segment, _, name = key.partition(".")
            found[f"{names[int(segment)]}.{name}"] = _joined(values, spec.segments[int(segment)])
        file = _state_file(number, "fixed")
        self.files.append(write_file(self.folder / file, save(found)))
        return file

    # -- rows --------------------------------------------------------------------------------------------------------

    def _rows(self, each: CutOfTable) -> SnapshotTable:
        number, files, num_rows = len(self.tables) + 1, list[str](), 0
        waiting, waiting_bytes = list[dict[str, Tensor]](), 0
        changed_only = each.has_changed_only

        def write() -> None:
            columns = {name: torch.cat([part[name] for part in waiting]) for name in waiting[0]}
            files.append(f"rows-{number:05d}-{len(files):05d}.safetensors")
            content = save(columns, {"format": "pt", "table": each.spec.name})
            self.files.append(write_file(self.folder / files[-1], content))
            waiting.clear()

        for server, head in enumerate(each.heads):
            for piece in each.reader.pieces(server, head.num_pieces):
                columns = _columns(piece, each.spec.name)
                if not len(columns[IDS]):
                    continue
                num_rows += len(columns[IDS])
                waiting.append(columns)
                waiting_bytes += piece.nbytes
                if waiting_bytes >= ROWS_FILE_BYTES:
                    write()
                    waiting_bytes = 0
        if waiting:
            write()
        hyper = msgspec.msgpack.encode(each.heads[0].hyper)
        return SnapshotTable(
            each.spec.name,
            "rows",
            each.encoded,
            each.clock,
            each.versions,
            hyper,
            rows=tuple(files),
            num_rows=num_rows,
            changed_only=changed_only,
            removed=self._removed(number, each) if changed_only else "",
        )

    def _removed(self, number: int, each: CutOfTable) -> str:
        """Write the ids of rows that are gone; return the name of the file, "" if there are none."""
        try:
            ids = torch.cat([load(head.fixed)[REMOVED] for head in each.heads])
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"a server did not say which rows of table '{each.spec.name}' are gone") from error
        if not len(ids):
            return ""
        file = f"rows-{number:05d}-removed.safetensors"
        self.files.append(write_file(self.folder / file, save({IDS: ids}, {"format": "pt", "table": each.spec.name})))
        return file


def _link(file: Path, name: Path) -> None:
    """Give a file another name; where the file system has one for each alone, copy it. Raises OSError."""
    try:
        hard_link(file, name)
    except OSError:
        shutil.copyfile(file, name)
        sync(name)


def _state_file(number: int, state: str) -> str:
    return f"optimizer-{number:05d}-{state}.safetensors"


def _joined(values: Sequence[Tensor], segment: Segment) -> Tensor:
    """Return a state from the parts of it that servers have, in order: elements of a segment, or the same number."""
    if sum(value.numel() for value in values) == segment.numel and values[0].dim():
        return torch.cat([value.reshape(-1) for value in values]).view(segment.shape)
    return values[0]


def _columns(piece: memoryview, table: str) -> dict[str, Tensor]:
    try:
        columns = load(bytes(piece))
    except SafetensorError as error:
        raise CheckpointError(f"a server sent rows of table '{table}' that cannot be read: {error}") from error
    if IDS not in columns:
        raise CheckpointError(f"a server sent rows of table '{table}' without ids")
    return columns


States = Mapping[str, tuple[str, frozenset[int]]]  # by name: dtype, and the segments that have it


def _states_of(spec: TableSpec, heads: Sequence[CutHead], layout: Sequence[Range]) -> States:
    """Return the states by element that some server has."""
    found: dict[str, tuple[str, frozenset[int]]] = {}
    for span, head in zip(layout, heads, strict=True):
        if head.layout is None:
            continue
        dtypes = dict(head.layout.parts)
        for piece, names in zip(cut(spec, span), head.layout.held, strict=False):
            for name in names:
                dtype, holders = found.get(name, (dtypes[name], frozenset[int]()))
                found[name] = dtype, holders | {piece.segment}
    return found


def _pieces(each: CutOfTable, span: Range, head: CutHead) -> Iterator[tuple[memoryview, int, int]]:
    """Yield the pieces of one server's part, and which elements of its range they have."""
    layout = head.layout
    if layout is None or layout.num_elements != span.length:
        raise CheckpointError(
            f"server {span.server} sent a cut of {0 if layout is None else layout.num_elements} elements of table "
            f"'{each.spec.name}', expected {span.length}"
        )
    for index, piece in enumerate(each.reader.pieces(span.server, head.num_pieces)):
        start = index * layout.piece_elements
        yield piece, start, min(start + layout.piece_elements, layout.num_elements)


def _split(piece: memoryview, head: CutHead, start: int, stop: int, span: Range) -> dict[str, memoryview]:
    """Return the bytes of each part of a piece."""
    found, at = dict[str, memoryview](), 0
    for name, dtype in head.layout.parts if head.layout is not None else ():
        size_bytes = (stop - start) * dtype_of(dtype).itemsize
        found[name] = piece[at : at + size_bytes]
        at += size_bytes
    if at != piece.nbytes:
        raise CheckpointError(f"server {span.server} sent a piece of {piece.nbytes} bytes, expected {at}")
    return found


def _places(spec: TableSpec, span: Range, start: int, stop: int) -> Iterator[SegmentSpan]:
    """Yield the stretches of segments in elements `start` to `stop` of a range, counted from `start`."""
    for piece in cut(spec, Range(span.server, span.start + start, span.start + stop)):
        yield piece.offset, piece.offset + piece.numel, piece.segment


class _Part(msgspec.Struct, frozen=True):
    """The values, or a state, of a table on their way into a file: of the segments that have it."""

    name: str
    dtype: str
    holders: Collection[int]
    file: FileWriter

    def write(self, content: memoryview | None, places: Sequence[SegmentSpan]) -> None:
        """Append what a piece has of it; zeros for None, where a server has no such state yet."""
        size_bytes, runs = dtype_of(self.dtype).itemsize, list[list[int]]()
        for first, last, segment in places:
            if segment in self.holders:
                if runs and runs[-1][1] == first:
                    runs[-1][1] = last
                else:
                    runs.append([first, last])
        for first, last in runs:
            start, stop = first * size_bytes, last * size_bytes
            self.file.write(bytes(stop - start) if content is None else content[start:stop])

"""Snapshots of a namespace: its tables are cut between two events, and written while its workers go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.errors import CheckpointError, PacelineError, UsageError
from paceline.server.cuts import head_of
from paceline.snapshots.folder import (
    Snapshot,
    SnapshotManifest,
    SnapshotTable,
    newest,
    now_s,
    snapshots_in,
    write_snapshot,
)
from paceline.snapshots.increments import Increments, marks_of
from paceline.snapshots.reading import SavedDense, hyper_of, row_pieces, spec_of
from paceline.snapshots.writing import CutOfTable, FolderWriter
from paceline.update.table import TableSpec
from paceline.wire.malformed import REQUEST_ERRORS, describe_error

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.partition import Range
    from paceline.core.settings import ServerSettings
    from paceline.server.served_table import ServedTable
    from paceline.server.tables import ServerState
    from paceline.update.cuts import TableCut
    from paceline.update.rows.layout import RowPiece
    from paceline.update.rows.rules import RowRule
    from paceline.update.rows.spec import RowTableSpec

KEPT_SNAPSHOTS = 2  # the newest, and the one before it, for the case that the newest is damaged
Read = Callable[[], memoryview]
AskServer = Callable[[Read], memoryview]  # has the thread of the server read, and blocks until it has


class TableVersions(msgspec.Struct, frozen=True):
    """The versions of a server's tables: equal versions mean equal values."""

    clock: int
    versions: tuple[tuple[str, int, int], ...]

    @staticmethod
    def read(held: ServerState) -> TableVersions:
        """Read the versions of the tables that have values."""
        versions = [
            (name, held.core.tables[name].version, table.version)
            for name, table in held.tables.items()
            if table.has_values
        ]
        return TableVersions(clock_of(held), tuple(sorted(versions)))


def clock_of(held: ServerState) -> int:
    """Return the largest clock of the tables."""
    return max((held.core.clock_of(name) for name in held.core.tables), default=held.core.settings.clock)


class _Cut(msgspec.Struct, frozen=True):
    """A cut of one table; see `PieceReader`."""

    cut: TableCut
    ask: AskServer

    def pieces(self, server: int, num_pieces: int) -> Iterator[memoryview]:
        del server  # there is one
        for index in range(num_pieces):
            yield self.ask(partial(self._read, index))

    def _read(self, index: int) -> memoryview:
        try:
            return self.cut.read(index)
        except REQUEST_ERRORS as error:  # such as torch, where memory is short: the server goes on
            raise UsageError(describe_error(error)) from error


class NamespaceCut(msgspec.Struct, frozen=True):
    """All tables of a namespace as they were between two events, until they are written.

    Of a table whose update has failed (`failed`, by name why), what the newest snapshot has of it is kept.
    """

    settings: ServerSettings
    versions: TableVersions
    num_workers: int
    tables: tuple[CutOfTable, ...]
    failed: dict[str, str]
    increments: Increments
    base: Snapshot | None
    opened: ExitStack  # the cuts: closed on the thread of the server

    @staticmethod
    def make(held: ServerState, ask: AskServer, increments: Increments) -> NamespaceCut:
        """Cut the tables that have values, on the thread of the server.

        Raises:
            PacelineError: memory is short.
        """
        failed = {name: table.broken for name, table in held.tables.items() if table.broken}
        if failed:
            increments.begin()  # all others have all rows: a snapshot has one base, which what is kept may need
        with ExitStack() as opened:
            made = [
                _cut_table(table, held.core.clock_of(name), ask, increments.since(name, 1)[0], opened)
                for name, table in held.tables.items()
                if table.has_values and name not in failed
            ]
            return NamespaceCut(
                held.core.settings,
                TableVersions.read(held),
                len(held.core.members),
                tuple(made),
                failed,
                increments,
                increments.begin(),
                opened.pop_all(),
            )

    def write(self, folder: Path) -> Snapshot:
        """Write it to disk as a snapshot; blocks. Raises OSError or PacelineError if that fails."""
        began_s = time.monotonic()

        def fill(path: Path) -> SnapshotManifest:
            writer = FolderWriter(path, self.settings, sum(isinstance(each.spec, TableSpec) for each in self.tables))
            self._keep_failed(folder, writer)
            for each in self.tables:
                writer.add(each)
            writer.finish()
            base, base_sha256 = writer.based_on(self.base)
            return SnapshotManifest(
                self.versions.clock,
                self.settings.generation,
                self.num_workers,
                self.settings.num_servers,
                tuple(writer.tables),
                tuple(writer.files),
                written_at_s=now_s(),
                took_s=time.monotonic() - began_s,
                base=base,
                base_sha256=base_sha256,
            )

        written = write_snapshot(folder, fill, KEPT_SNAPSHOTS)
        self.increments.note(written, marks_of({each.spec.name: each.heads for each in self.tables}))
        return written

    def _keep_failed(self, folder: Path, writer: FolderWriter) -> None:
        """Have the new snapshot hold, of tables whose update has failed, what the one before it has."""
        if not self.failed or not snapshots_in(folder):
            return
        before = newest(folder)
        for name in self.failed:
            table = before.table(name)
            if table is not None:
                writer.keep(before, table)

    def describe_failed(self, namespace: str, written: Snapshot) -> dict[str, str]:
        """Return what the snapshot has of each table whose update has failed, and why that has."""
        return {
            name: f"table '{name}' of namespace '{namespace}' is not saved: {reason}"
            if written.table(name) is None
            else f"table '{name}' of namespace '{namespace}' is saved as it was in the snapshot before: {reason}"
            for name, reason in self.failed.items()
        }


def _cut_table(table: ServedTable, clock: int, ask: AskServer, since: str, opened: ExitStack) -> CutOfTable:
    made = table.cut(since=since)
    opened.callback(made.close)
    encoded = table.encoded_spec()
    spec = spec_of(SnapshotTable("", table.kind, encoded, clock, (), b""))
    return CutOfTable(spec, encoded, [head_of(table, made, clock)], _Cut(made, ask))


class _Saved(msgspec.Struct, frozen=True):
    """A table of a snapshot; see `SavedTable`."""

    snapshot: Snapshot
    table: SnapshotTable

    def tensors(self, span: Range) -> Mapping[str, Tensor]:
        return SavedDense(self.snapshot.folder, self.table).part(span)

    def rows(self, spec: RowTableSpec, rule: RowRule) -> Iterator[RowPiece]:
        del spec, rule  # those of the snapshot
        return row_pieces(self.snapshot, self.table)


def restore_tables(snapshot: Snapshot, held: ServerState) -> None:
    """Restore the tables of a snapshot on a server without tables.

    Raises:
        CheckpointError: a table cannot be restored.
    """
    for table in snapshot.manifest.tables:
        try:
            served = held.tables[held.declare(spec_of(table)).table]
            saved, version = _Saved(snapshot, table), max(table.versions, default=0)
            served.restore(saved, snapshot.manifest.clock, version, hyper_of(table))
        except (PacelineError, msgspec.DecodeError, KeyError, RuntimeError, OSError) as error:
            raise CheckpointError(
                f"table '{table.name}' cannot be taken from the snapshot {snapshot.folder}: {error}"
            ) from error

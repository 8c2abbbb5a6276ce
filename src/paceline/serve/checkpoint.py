"""Saves all tables of a server to files, and restores them, on the thread that serves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.core.events import Declared
from paceline.errors import CheckpointError, PacelineError
from paceline.serve.state import Manifest, ManifestEntry, digest_of, sync
from paceline.update.rows.export import load_rows, save_rows
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rows.walk import RowWalk
from paceline.update.rules import Hyper
from paceline.update.table import TableSpec, decode_table, encode_table

if TYPE_CHECKING:
    from paceline.serve.state import Save
    from paceline.server.commands import Holdings
    from paceline.server.row_tables import ServedRowTable

_ROWS = msgspec.msgpack.Decoder(RowTableSpec)
_HYPER = msgspec.msgpack.Decoder(tuple[Hyper, ...])


@dataclass(frozen=True, slots=True)
class TableVersions:
    """The versions of a server's tables: equal versions mean equal values."""

    clock: int
    versions: tuple[tuple[str, int, int], ...]

    @staticmethod
    def read(held: Holdings) -> TableVersions:
        """Read the versions of the tables that have values."""
        dense = [
            (name, held.core.tables[name].version, held.dense_tables.shards[name].version)
            for name in _initialised(held)
        ]
        rows = [(name, held.core.tables[name].version, 0) for name in held.row_tables.tables]
        return TableVersions(clock_of(held), tuple(sorted([*dense, *rows])))


def clock_of(held: Holdings) -> int:
    """Return the clock at which the tables stand: the one that is furthest, where they differ."""
    return max((held.core.clock_of(name) for name in held.core.tables), default=held.core.settings.clock)


def save_tables(held: Holdings, namespace: str, folder: Path) -> Manifest:
    """Write every table that has values to a file of its own; raises OSError or PacelineError where it cannot."""
    files = (folder / f"{number}.safetensors" for number in count())
    dense = [_save_dense(held, name, next(files)) for name in _initialised(held)]
    rows = [_save_rows(held, name, next(files)) for name in held.row_tables.tables]
    return Manifest(namespace, clock_of(held), (*dense, *rows))


def restore_tables(save: Save, held: Holdings) -> None:
    """Let a server that has no table yet have those of a save.

    Raises:
        CheckpointError: they cannot be had here.
    """
    for entry in save.manifest.entries:
        path = save.folder / entry.file
        try:
            hyper = _HYPER.decode(entry.hyper)
            if entry.kind == "shape":
                _restore_dense(held, entry, hyper, path)
            else:
                _restore_rows(held, entry, hyper, path, save.manifest.clock)
        except (PacelineError, SafetensorError, msgspec.DecodeError, KeyError, RuntimeError, OSError) as error:
            raise CheckpointError(f"table '{entry.name}' cannot be taken from {path}: {error}") from error


def _initialised(held: Holdings) -> Sequence[str]:
    return [name for name, shard in held.dense_tables.shards.items() if shard.initialised]


def _save_dense(held: Holdings, name: str, path: Path) -> ManifestEntry:
    shard, spec = held.dense_tables.shards[name], held.dense_tables.specs[name]
    try:
        save_file({key: value.contiguous() for key, value in held.dense_tables.state(name).items()}, path)
    except SafetensorError as error:  # a full disk, for example, which safetensors does not tell as an OSError
        raise CheckpointError(f"table '{name}' cannot be written to {path}: {error}") from error
    sync(path)
    hyper = msgspec.msgpack.encode(shard.hyper)
    return ManifestEntry(name, "shape", path.name, digest_of(path), shard.version, encode_table(spec), hyper)


def _restore_dense(held: Holdings, entry: ManifestEntry, hyper: tuple[Hyper, ...], path: Path) -> None:
    spec: TableSpec = decode_table(entry.spec)
    consistency = held.dense_tables.declare(spec)
    held.core.handle(Declared(spec.name, consistency), held.core.started)
    shard = held.dense_tables.shards[spec.name]
    shard.load_state(load_file(path), version=entry.version)
    shard.hyper = hyper


def _save_rows(held: Holdings, name: str, path: Path) -> ManifestEntry:
    served = held.row_tables.tables[name]
    if served.broken:
        raise CheckpointError(served.broken)
    rule = row_rule(served.spec.rule, held.row_tables.allowed_paths)
    walk = RowWalk(served.store, clock_of(held), served.note_changed)
    save_rows(path, served.spec, rule, walk.pieces(), len(served.store))
    hyper = msgspec.msgpack.encode(served.store.hyper)
    spec = msgspec.msgpack.encode(served.spec)
    return ManifestEntry(name, "rows", path.name, digest_of(path), held.core.tables[name].version, spec, hyper)


def _restore_rows(held: Holdings, entry: ManifestEntry, hyper: tuple[Hyper, ...], path: Path, clock: int) -> None:
    spec = _ROWS.decode(entry.spec)
    consistency = held.row_tables.declare(spec)
    held.core.handle(Declared(spec.name, consistency, keyed=True), held.core.started)
    served: ServedRowTable = held.row_tables.tables[spec.name]
    for piece in load_rows(path, spec, row_rule(spec.rule, held.row_tables.allowed_paths)):
        served.store.load(piece, clock)
    served.store.hyper = hyper

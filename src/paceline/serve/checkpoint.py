"""Saves all tables of a server to files, and restores them, on the thread that serves them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from safetensors import SafetensorError

from paceline.errors import CheckpointError, PacelineError
from paceline.serve.state import Manifest, ManifestEntry, digest_of, sync
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import Hyper
from paceline.update.table import decode_table

if TYPE_CHECKING:
    from paceline.serve.state import Save
    from paceline.server.node import ServerState

_HYPER = msgspec.msgpack.Decoder(tuple[Hyper, ...])
_SPEC_DECODERS = {"shape": decode_table, "rows": msgspec.msgpack.Decoder(RowTableSpec).decode}


@dataclass(frozen=True, slots=True)
class TableVersions:
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
    """Return the clock at which the tables stand: the one that is furthest, where they differ."""
    return max((held.core.clock_of(name) for name in held.core.tables), default=held.core.settings.clock)


def save_tables(held: ServerState, namespace: str, folder: Path) -> Manifest:
    """Write every table that has values to a file of its own; raises OSError or PacelineError where it cannot."""
    names = [name for name, table in held.tables.items() if table.has_values]
    entries = [_save_table(held, name, folder / f"{number}.safetensors") for number, name in enumerate(names)]
    return Manifest(namespace, clock_of(held), tuple(entries))


def restore_tables(save: Save, held: ServerState) -> None:
    """Let a server that has no table yet have those of a save.

    Raises:
        CheckpointError: they cannot be had here.
    """
    for entry in save.manifest.entries:
        path = save.folder / entry.file
        try:
            declared = held.tables.declare(_SPEC_DECODERS[entry.kind](entry.spec))
            held.core.handle(declared, held.core.started)
            hyper = _HYPER.decode(entry.hyper)
            held.tables[declared.table].restore(path, save.manifest.clock, entry.version, hyper)
        except (PacelineError, SafetensorError, msgspec.DecodeError, KeyError, RuntimeError, OSError) as error:
            raise CheckpointError(f"table '{entry.name}' cannot be taken from {path}: {error}") from error


def _save_table(held: ServerState, name: str, path: Path) -> ManifestEntry:
    table = held.tables[name]
    try:
        table.save(path, clock_of(held))
    except SafetensorError as error:  # a full disk, for example, which safetensors does not tell as an OSError
        raise CheckpointError(f"table '{name}' cannot be written to {path}: {error}") from error
    sync(path)
    hyper = msgspec.msgpack.encode(table.hyper)
    return ManifestEntry(name, table.kind, path.name, digest_of(path), table.version, table.encoded_spec(), hyper)

"""`paceline snapshot`: what is in a folder of snapshots, whether it is whole, and how other programs get it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from paceline.errors import CheckpointError, UsageError
from paceline.notices import printable
from paceline.snapshots.folder import MANIFEST, Snapshot, newest, snapshots_in

EXIT_DAMAGED: Final = 1
Target = Literal["torch", "dcp", "parquet"]

app = App(name="snapshot", help="Look into snapshots, check them, and convert them for other programs.")


@app.command(name="ls")
def list_snapshots(folder: Path, /) -> int:
    """List the snapshots of a folder, oldest first.

    Parameters
    ----------
    folder
        What was given to --snapshots.
    """
    exit_code, found = 0, _required_in(folder)
    print("snapshot            clock      size       age  took")
    for path in found:
        try:
            snapshot = Snapshot.read(path)
        except CheckpointError as error:
            print(f"{path.name:<16} {error}")
            exit_code = EXIT_DAMAGED
            continue
        manifest = snapshot.manifest
        age_s, size = max(0.0, time.time() - manifest.written_at_s), _size(manifest.size_bytes)
        name = snapshot.folder.name
        since = f"  changes since {printable(manifest.base)}" if manifest.base else ""
        print(f"{name:<16} {manifest.clock:>8} {size:>9} {_time(age_s):>9} {_time(manifest.took_s):>5}{since}")
    return exit_code


@app.command
def show(folder: Path, /) -> int:
    """Show what is in a snapshot, or in the newest of a folder.

    Parameters
    ----------
    folder
        Folder of one snapshot, or of several.
    """
    from paceline.snapshots.reading import spec_of
    from paceline.update.table import TableSpec

    found = newest(folder)
    manifest = found.manifest
    version = printable(manifest.written_by)
    print(f"{found.folder}: clock {manifest.clock}, {_size(manifest.size_bytes)}, of paceline {version}")
    print(f"workers: {manifest.num_workers}, servers: {manifest.num_servers}, generation: {manifest.generation}")
    for table in manifest.tables:
        spec, name = spec_of(table), printable(table.name)
        if isinstance(spec, TableSpec):
            states = printable(", ".join(table.states)) or "no state by element"
            size = f"{spec.numel} {spec.dtype} in {len(spec.segments)} tensors"
            print(f"table {name}: {size}, {spec.rule.name}, {states}")
        else:
            rows = f"{table.num_rows} rows of {spec.width} {spec.dtype}"
            since = f", changed since {printable(manifest.base)}" if table.changed_only else ""
            print(f"table {name}: {rows}, {spec.rule.name}{since}")
    for number, position in enumerate(manifest.sources):
        print(f"source {number}: epoch {position.get('epoch', '?')}, {position.get('num_done', '?')} batches done")
    return 0


@app.command
def verify(folder: Path, /) -> int:
    """Compare all files with their digests; ends with 1 if one is damaged.

    Parameters
    ----------
    folder
        Folder of one snapshot, or of several.
    """
    exit_code, is_one = 0, (folder / MANIFEST).exists()
    for path in [folder] if is_one else _required_in(folder):
        try:
            found = Snapshot.read(path)
            found.verify_files()
            found.base()
            print(f"{path}: whole, {len(found.manifest.files)} files of {_size(found.manifest.size_bytes)}")
        except CheckpointError as error:
            print(f"{path}: {error}")
            exit_code = EXIT_DAMAGED
    return exit_code


@app.command
def convert(folder: Path, out: Path, /, *, to: Annotated[Target, Parameter(name="--to")] = "torch") -> int:
    """Write a snapshot, or the newest of a folder, in the form of another program.

    Parameters
    ----------
    folder
        Folder of one snapshot, or of several.
    out
        The file to write (torch), or the folder (dcp, parquet).
    to
        A file of torch.save with model, optimizer and rows; a folder of torch.distributed.checkpoint; or rows as
        Parquet, which needs pyarrow.
    """
    from paceline.snapshots import converting

    found = newest(folder)
    found.verify()
    {"torch": converting.to_torch, "dcp": converting.to_dcp, "parquet": converting.to_parquet}[to](found, out)
    print(f"{out}: {found.folder.name}, clock {found.manifest.clock}")
    return 0


def _required_in(folder: Path) -> list[Path]:
    found = snapshots_in(folder)
    if not found:
        raise UsageError(f"there is no snapshot in {folder}: name a folder that was given to --snapshots")
    return found


def _size(num_bytes: int) -> str:
    """Return a size for people.

    >>> _size(999), _size(5_120), _size(3 << 30)
    ('999 B', '5.0 KiB', '3.0 GiB')
    """
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _time(seconds: float) -> str:
    """Return a time for people.

    >>> _time(3.21), _time(200), _time(90_000)
    ('3.2 s', '3 min', '25 h')
    """
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.0f} h"

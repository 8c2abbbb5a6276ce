"""A folder of snapshots: each is whole or not there, and the newest ones are kept.

    DIR/snapshot-12/manifest.json                     what is in it, with a digest of every file
    DIR/snapshot-12/manifest.sha256                   digest of that
    DIR/snapshot-12/model.safetensors.index.json      which values are in which file
    DIR/snapshot-12/model-00001-of-00002.safetensors  values of a dense table, by the names of its parameters
    DIR/snapshot-12/optimizer-00001-exp_avg.safetensors   a state of its rule; `...-fixed` has what is not by element
    DIR/snapshot-12/rows-00002-00000.safetensors      rows of a row table: ids, values, state.NAME, uses

A snapshot is written in a folder beside the others, whose name begins with a dot, synced to disk, and renamed last.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from paceline.errors import CheckpointError, UsageError
from paceline.job.folders import open_file
from paceline.snapshots.files import Count, FileEntry, digest_of, sync, write_file
from paceline.snapshots.options import DEFAULT_KEEP
from paceline.version import __version__

FORMAT: Final = "paceline snapshot 1"
MANIFEST: Final = "manifest.json"
MANIFEST_DIGEST: Final = "manifest.sha256"
INDEX: Final = "model.safetensors.index.json"
MAX_MANIFEST_BYTES: Final = 256 << 20
_PREFIX: Final = "snapshot-"
_UNFINISHED: Final = ".unfinished-"
_DAMAGED: Final = ".damaged"
_LOCK: Final = ".lock"
_MAX_DIGITS: Final = 18
_DIGEST_BYTES: Final = 80  # of the file that has one, with a newline


class SnapshotTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of a snapshot.

    Args:
        name: of the table.
        kind: "shape" or "rows".
        spec: its declaration, as msgpack.
        clock: every update of the clocks below is in it; where updates show on clocks, no other is.
        versions: by server that there was, the number of updates in its part.
        hyper: hyperparameters of each group as of the last update, as msgpack.
        names: of a dense table, what its parameters are called in the files, in the order of the declaration.
        values: file of the values of a dense table.
        states: by name, the file of a state of its rule.
        fixed: file of the states that do not have the shape of their parameters; empty without any.
        rows: files of a row table.
        num_rows: in these.
        changed_only: these are the rows that have changed since the base of the snapshot; it has the others.
        removed: file with ids of rows that are gone since then; empty without any.
    """

    name: str
    kind: Literal["shape", "rows"]
    spec: bytes
    clock: Count
    versions: tuple[Count, ...]
    hyper: bytes
    names: tuple[str, ...] = ()
    values: str = ""
    states: dict[str, str] = {}
    fixed: str = ""
    rows: tuple[str, ...] = ()
    num_rows: Count = 0
    changed_only: bool = False
    removed: str = ""

    @property
    def files(self) -> set[str]:
        """The names of its files."""
        return {name for name in (self.values, *self.states.values(), self.fixed, *self.rows, self.removed) if name}


class SnapshotManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a snapshot.

    Args:
        clock: the next one: a job that resumes has finished all below.
        generation: of the job that wrote it.
        num_workers: that the job was started with.
        num_servers: that the tables were spread over.
        tables: in the order of their declarations.
        files: all but the manifest.
        sources: the positions of what `paceline.shard` has returned, in order.
        state: what the script has added, as JSON, in snapshots of earlier versions, which lost some of it.
        written_at_s: seconds since 1970.
        took_s: seconds from the cut to the disk.
        base: name of the snapshot that has the rows which have not changed; empty if this one has all.
        base_sha256: digest of the manifest of that one.
        packed_state: what the script has added, as msgpack, which keeps numbers that are not finite, and keys that are
            no texts, as schedulers have them; empty for nothing.
    """

    clock: Count
    generation: Count
    num_workers: Count
    num_servers: Count
    tables: tuple[SnapshotTable, ...]
    files: tuple[FileEntry, ...]
    sources: tuple[dict[str, int | bool], ...] = ()
    state: msgspec.Raw = msgspec.Raw(b"null")
    written_at_s: float = 0.0
    took_s: float = 0.0
    base: str = ""
    base_sha256: str = ""
    format: str = FORMAT
    written_by: str = __version__
    packed_state: bytes = b""

    @property
    def script_state(self) -> Any:  # noqa: ANN401 - whatever the script has added
        """What the script has added; None for nothing. Raises CheckpointError if it cannot be read."""
        try:
            return msgspec.msgpack.decode(self.packed_state) if self.packed_state else msgspec.json.decode(self.state)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"the state of the script in a snapshot cannot be read: {error}") from error

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size_bytes for entry in self.files)


class Snapshot(msgspec.Struct, frozen=True):
    """A whole snapshot on disk."""

    folder: Path
    manifest: SnapshotManifest

    @staticmethod
    def read(folder: Path) -> Snapshot:
        """Read a snapshot's manifest; raises CheckpointError if that is missing, damaged, or of another format."""
        path = folder / MANIFEST
        try:
            with open_file(path) as manifest_file, open_file(folder / MANIFEST_DIGEST) as digest_file:
                if os.fstat(manifest_file.fileno()).st_size > MAX_MANIFEST_BYTES:
                    raise CheckpointError(f"{path} has more than {MAX_MANIFEST_BYTES} bytes: it is not a manifest")
                content, expected = manifest_file.read(), digest_file.read(_DIGEST_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"the snapshot {folder} cannot be read: {error}") from error
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is {found}, expected {expected}")
        try:
            manifest = msgspec.json.decode(content, type=SnapshotManifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a manifest: {error}") from error
        if manifest.format != FORMAT:
            raise CheckpointError(f"{path} has the format {manifest.format!r}, expected {FORMAT!r}")
        listed = {entry.name for entry in manifest.files}
        for name in sorted(listed | {manifest.base} - {""}):
            if Path(name).name != name or name in ("", os.pardir) or "\0" in name:
                raise CheckpointError(f"{path} names a file outside of its folder: {name!r}")
        for table in manifest.tables:
            for name in sorted(table.files - listed):
                raise CheckpointError(f"{path} lists no file {name!r}, which table {table.name!r} is to be in")
        return Snapshot(folder, manifest)

    def base(self) -> Snapshot | None:
        """Return the snapshot that has the rows which have not changed; None if this one has all.

        Raises:
            CheckpointError: it is not there, or is another one by now.
        """
        name = self.manifest.base
        if not name:
            return None
        path = self.folder.absolute().with_name(Path(name).name)
        found = digest_of_manifest(path)
        if found != self.manifest.base_sha256:
            why = "another one is there" if found else "it is not there: copy it, too"
            raise CheckpointError(f"{self.folder} has only the rows that have changed since {path}, and {why}")
        return Snapshot.read(path)

    def verify(self) -> None:
        """Compare every file with its digest, also of the snapshots that this one is based on.

        Raises:
            CheckpointError: one is missing or damaged.
        """
        self.verify_files()
        base = self.base()
        if base is not None:
            base.verify()

    def verify_files(self) -> None:
        """Compare the files of this snapshot alone with their digests; raises as `verify`."""
        for entry in self.manifest.files:
            path = self.folder / entry.name
            try:
                found = digest_of(path)
            except OSError as error:
                raise CheckpointError(f"the snapshot {self.folder} is not whole: {error}") from error
            if found != entry.sha256:
                raise CheckpointError(f"{path} is damaged: its SHA-256 is {found}, expected {entry.sha256}")

    def table(self, name: str) -> SnapshotTable | None:
        """Return a table of the snapshot, or None."""
        return next((each for each in self.manifest.tables if each.name == name), None)


def snapshots_in(folder: Path) -> list[Path]:
    """Return the folders of all snapshots, oldest first."""
    found = {number: path for path in folder.glob(f"{_PREFIX}*") if (number := _number_of(path)) is not None}
    return [path for _, path in sorted(found.items())]


def newest(folder: Path) -> Snapshot:
    """Return the newest snapshot of a folder, or the one that the folder is.

    Raises:
        UsageError: there is none.
        CheckpointError: the newest one cannot be read.
    """
    if (folder / MANIFEST).exists():
        return Snapshot.read(folder)
    found = snapshots_in(folder)
    if not found:
        raise UsageError(f"there is no snapshot in {folder}: name a folder that was given to --snapshots")
    return Snapshot.read(found[-1])


def set_aside(snapshot: Path) -> None:
    """Rename a snapshot that is damaged: it does not count any more, and is not removed."""
    snapshot.rename(snapshot.with_name(f"{snapshot.name}{_DAMAGED}"))


def digest_of_manifest(snapshot: Path) -> str:
    """Return the digest that a snapshot says that its manifest has; empty if it cannot be read."""
    try:
        return (snapshot / MANIFEST_DIGEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def has_any(folder: Path) -> bool:
    """Return whether there is a snapshot in a folder, or was one that is damaged."""
    return any(_number_of(path, set_aside=True) is not None for path in folder.glob(f"{_PREFIX}*"))


def write_snapshot(
    folder: Path, fill: Callable[[Path], SnapshotManifest], keep: int = DEFAULT_KEEP, resumed: Path | None = None
) -> Snapshot:
    """Write a snapshot, whose files `fill` writes into a new folder, and keep the newest ones; blocks.

    `resumed`: the snapshot that the job goes on from, which stays, too: workers that are started again read it.

    Raises:
        UsageError: another process writes snapshots there now.
        CheckpointError: its manifest would be too large to be read again.
        OSError: the disk is full or fails. What was there before counts then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        for left in folder.glob(f"{_UNFINISHED}*"):
            _remove(left)
        numbers = [_number_of(path, set_aside=True) or 0 for path in folder.glob(f"{_PREFIX}*")]
        number = max(numbers, default=0) + 1
        unfinished = folder / f"{_UNFINISHED}{number}"
        unfinished.mkdir()
        try:
            manifest = fill(unfinished)
            entry = write_file(unfinished / MANIFEST, _encoded(manifest, folder))
            write_file(unfinished / MANIFEST_DIGEST, entry.sha256.encode())
            sync(unfinished)
            final = unfinished.rename(folder / f"{_PREFIX}{number}")
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        sync(folder)
        unneeded = _unneeded(snapshots_in(folder), max(1, keep), resumed)
        for old in reversed(unneeded):  # what one is based on goes after it
            _discard(old)
    return Snapshot(final, manifest)


def now_s() -> float:
    """Return the seconds since 1970."""
    return time.time()


def _unneeded(found: list[Path], keep: int, resumed: Path | None) -> list[Path]:
    """Return the snapshots that are not among the newest ones, nor `resumed`, nor what these are based on."""
    needed = set(found[-keep:])
    if resumed is not None:
        needed |= {path for path in found if path.resolve() == resumed.resolve()}
    for path in list(needed):
        try:
            base = Snapshot.read(path).base()
            while base is not None:
                needed.add(path.with_name(base.folder.name))
                base = base.base()
        except CheckpointError:  # what it needs is not known: nothing goes before it does
            return []
    return [path for path in found if path not in needed]


def _encoded(manifest: SnapshotManifest, folder: Path) -> bytes:
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the manifest of a snapshot in {folder} would have {len(text)} bytes, at most {MAX_MANIFEST_BYTES} are "
            "read: declare fewer tables, or tables with fewer parameters"
        )
    return text


def _remove(path: Path) -> None:
    """Remove a folder with all its content, or a file, or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _discard(old: Path) -> None:
    """Remove a snapshot: its name goes first, so that a part of it never looks like one."""
    aside = old.with_name(f"{_UNFINISHED}{old.name}")
    with suppress(OSError):
        old.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process writes a snapshot to {folder} now: give each job a folder of its own"
            ) from None
        try:
            yield
        finally:  # a child that was forked meanwhile, to load samples, has the file open for as long as it lives
            fcntl.flock(lock, fcntl.LOCK_UN)
    finally:
        os.close(lock)


def _number_of(path: Path, *, set_aside: bool = False) -> int | None:
    text = path.name.removeprefix(_PREFIX)
    text = text.removesuffix(_DAMAGED) if set_aside else text
    is_number = text.isdecimal() and text.isascii() and len(text) <= _MAX_DIGITS
    return int(text) if path.name.startswith(_PREFIX) and is_number else None

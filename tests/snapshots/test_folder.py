"""A snapshot on disk is whole or not there, wherever its writer ends, and the newest ones are kept."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CheckpointError, UsageError
from paceline.snapshots.files import FileWriter, write_file
from paceline.snapshots.folder import (
    MANIFEST,
    Snapshot,
    SnapshotManifest,
    SnapshotTable,
    newest,
    snapshots_in,
    write_snapshot,
)


class Killed(BaseException):
    """The process that writes is killed here: it does nothing more."""


def fill_with(content: bytes) -> Callable[[Path], SnapshotManifest]:
    def fill(folder: Path) -> SnapshotManifest:
        files = tuple(write_file(folder / f"{number}.bin", content) for number in range(2))
        return SnapshotManifest(len(content), 1, 1, 1, (), files)

    return fill


class EndsAt:
    """Has all steps from one on fail: as a kill, after which nothing is cleared up, or as a full disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int, *, is_kill: bool) -> None:
        self.num_steps, self._last, self._is_kill = 0, last, is_kill
        for owner, name in (
            (FileWriter, "write"),
            (FileWriter, "finish"),
            (Path, "mkdir"),
            (Path, "rename"),
            (os, "fsync"),
            (shutil, "rmtree"),
        ):
            monkeypatch.setattr(owner, name, self._step(getattr(owner, name), frees=name == "rmtree"))

    def _step(self, real: Callable[..., Any], *, frees: bool) -> Callable[..., Any]:
        def step(*args: Any, **named: Any) -> Any:
            self.num_steps += 1
            if self.num_steps > self._last and self._is_kill:
                raise Killed
            if self.num_steps > self._last and not frees:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **named)

        return step


def num_steps_of(folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patched:
        counted = EndsAt(patched, 1 << 30, is_kill=True)
        for _ in range(3):
            write_snapshot(folder, fill_with(b"x"), keep=2)
        before = counted.num_steps
        write_snapshot(folder, fill_with(b"x"), keep=2)
        return counted.num_steps - before


@pytest.mark.parametrize("is_kill", [True, False])
def test_wherever_the_writer_ends_a_snapshot_is_whole_or_not_there(tmp_path: Path, *, is_kill: bool) -> None:
    num_steps = num_steps_of(tmp_path / "count")
    assert num_steps > 10
    for step in range(num_steps + 1):
        folder = tmp_path / str(step)
        for content in (b"first", b"second"):
            write_snapshot(folder, fill_with(content), keep=2)
        with pytest.MonkeyPatch.context() as patched:
            EndsAt(patched, step, is_kill=is_kill)
            with suppress(Killed, OSError):
                write_snapshot(folder, fill_with(b"the third"), keep=2)
        for path in snapshots_in(folder):
            Snapshot.read(path).verify()
        assert newest(folder).manifest.clock in (len(b"second"), len(b"the third"))

        write_snapshot(folder, fill_with(b"the one after it"), keep=2)
        assert newest(folder).manifest.clock == len(b"the one after it")
        assert len(snapshots_in(folder)) == 2
        assert [path.name for path in folder.glob(".unfinished*")] == [], "what was left is cleared up"


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    found = write_snapshot(tmp_path, fill_with(b"content"))
    found.verify()
    file = found.folder / "1.bin"
    file.write_bytes(b"contenT")
    with pytest.raises(CheckpointError, match=r"1\.bin is damaged: its SHA-256 is .*, expected"):
        found.verify()
    file.unlink()
    with pytest.raises(CheckpointError, match="is not whole"):
        found.verify()
    manifest = found.folder / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"1.bin", b"2.bin"))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        newest(tmp_path)


def test_a_folder_without_snapshots_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no snapshot in"):
        newest(tmp_path)

    def meanwhile(folder: Path) -> SnapshotManifest:
        with pytest.raises(UsageError, match="another process writes a snapshot"):
            write_snapshot(tmp_path, fill_with(b""))
        return fill_with(b"x")(folder)

    assert write_snapshot(tmp_path, meanwhile).folder == snapshots_in(tmp_path)[0]


@pytest.mark.parametrize("name", ["../0.bin", "..", ".", "", "/dev/zero", "a/0.bin", "0\0"])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    def fill(folder: Path) -> SnapshotManifest:
        entry = write_file(folder / "0.bin", b"x")
        return SnapshotManifest(1, 1, 1, 1, (), (type(entry)(name, entry.sha256, 1),))

    with pytest.raises(CheckpointError, match="names a file outside of its folder"):
        Snapshot.read(write_snapshot(tmp_path, fill).folder)


@pytest.mark.parametrize(
    "table",
    [
        SnapshotTable("w", "shape", b"", 1, (), b"", values="../0.bin"),
        SnapshotTable("w", "shape", b"", 1, (), b"", values="0.bin", states={"momentum": "/0.bin"}),
        SnapshotTable("w", "shape", b"", 1, (), b"", values="0.bin", fixed="1.bin"),
        SnapshotTable("w", "rows", b"", 1, (), b"", rows=("0.bin", "../0.bin")),
        SnapshotTable("w", "rows", b"", 1, (), b"", rows=("0.bin",), removed="1.bin"),
    ],
    ids=["values", "a state", "fixed states", "rows", "rows that are gone"],
)
def test_a_table_is_in_files_that_the_manifest_lists(tmp_path: Path, table: SnapshotTable) -> None:
    def fill(folder: Path) -> SnapshotManifest:
        return SnapshotManifest(1, 1, 1, 1, (table,), (write_file(folder / "0.bin", b"x"),))

    with pytest.raises(CheckpointError, match=r"lists no file '.*', which table 'w' is to be in"):
        Snapshot.read(write_snapshot(tmp_path, fill).folder)


def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    """Without that, a reader waits for as long as no process writes to the pipe."""
    found = write_snapshot(tmp_path, fill_with(b"content"))
    for name, match in (("0.bin", "is not whole"), ("manifest.sha256", "cannot be read"), (MANIFEST, "cannot be read")):
        (found.folder / name).unlink()
        os.mkfifo(found.folder / name)
        with pytest.raises(CheckpointError, match=match):
            Snapshot.read(found.folder).verify()


@pytest.mark.parametrize("stray", ["file", "link", "folder"])
def test_what_lies_where_a_snapshot_is_written_blocks_nothing(tmp_path: Path, stray: str) -> None:
    folder, elsewhere = tmp_path / "snapshots", tmp_path / "elsewhere"
    for path in (folder, elsewhere):
        path.mkdir()
    (elsewhere / "kept").write_text("kept")
    place = folder / ".unfinished-1"
    if stray == "file":
        place.write_text("stray")
    elif stray == "link":
        place.symlink_to(elsewhere)
    else:
        place.mkdir()
        (place / "half").write_text("half")
    assert write_snapshot(folder, fill_with(b"one")).folder.name == "snapshot-1"
    assert (elsewhere / "kept").read_text() == "kept"
    assert not list(folder.glob(".unfinished*"))


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_snapshot(tmp_path, fill_with(b"one"))
    monkeypatch.setattr("paceline.snapshots.folder.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"would have \d+ bytes, at most 100 are read: declare fewer tables"):
        write_snapshot(tmp_path, fill_with(b"two"))
    monkeypatch.undo()
    assert newest(tmp_path).manifest.clock == len(b"one")


def test_a_child_forked_while_a_snapshot_is_written_does_not_lock_the_folder(tmp_path: Path) -> None:
    held: list[int] = []

    def fill(folder: Path) -> SnapshotManifest:
        lock = os.stat(folder.parent / ".lock")
        numbers = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
        # What a forked child has open is what its parent has, as is a descriptor that is made of another one.
        held.extend(os.dup(number) for number in numbers if os.path.samestat(os.fstat(number), lock))
        return fill_with(b"a")(folder)

    try:
        write_snapshot(tmp_path, fill)
        assert len(held) == 1
        assert write_snapshot(tmp_path, fill_with(b"b")).folder.name == "snapshot-2"
    finally:
        for number in held:
            os.close(number)

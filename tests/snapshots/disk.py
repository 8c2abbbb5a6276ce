"""A folder on a disk that fills up, whose writer may end at any step, and whose power may be cut.

After a power cut the names are those of some moment since they were last synced, as file systems with a journal keep
them, and of bytes that were not synced any number from the start on is there.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline.snapshots.files import FileWriter


class Killed(BaseException):
    """The process that writes has ended here: it does nothing more."""


def _go_on() -> None:
    """Do nothing between two steps."""


@dataclass
class Disk:
    """What steps of writers do to a folder, and what a power cut leaves of it.

    `between` is called before each step, and may have the writer end (`is_dead`) or the disk be full.
    """

    folder: Path
    rng: Random
    between: Callable[[], None] = _go_on
    is_dead: bool = False
    is_full: bool = False
    num_steps: int = 0
    _undo: list[Callable[[], object]] = field(default_factory=list)  # of changes of names that are not synced, in order
    _synced: dict[int, int] = field(default_factory=dict)  # by inode with bytes that are not synced: how many are
    _is_between: bool = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Pass all steps of writers through this disk."""
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, note in (
                (FileWriter, "__init__", self._note_created),
                (FileWriter, "write", self._note_written),
                (Path, "mkdir", self._note_made),
                (Path, "rename", self._note_renamed),
                (os, "fsync", self._note_synced),
                (os, "fdatasync", self._note_synced),
                (shutil, "rmtree", self._note_removed),
            ):
                patch.setattr(owner, name, self._step(getattr(owner, name), note, frees=name == "rmtree"))
            yield

    def cut_power(self) -> None:
        """Have the folder be what the disk has after a power cut."""
        with self._unwatched():
            for path in self.folder.rglob("*"):
                found = path.stat()
                if found.st_ino in self._synced and path.is_file():
                    os.truncate(path, self.rng.randint(min(self._synced[found.st_ino], found.st_size), found.st_size))
            self._synced.clear()
            for undo in reversed(self._undo[self.rng.randint(0, len(self._undo)) :]):
                undo()  # last, as a file that is there again may have the number of one that is gone with it
            self._undo.clear()

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        before, self._is_between = self._is_between, True
        try:
            yield
        finally:
            self._is_between = before

    def _step(self, real: Callable[..., Any], note: Callable[..., Any], *, frees: bool) -> Callable[..., Any]:
        def step(*args: Any, **named: Any) -> Any:
            if self._is_between:
                return real(*args, **named)
            self.num_steps += 1
            with self._unwatched():
                if not self.is_dead:
                    self.between()
            if self.is_dead:
                raise Killed
            if self.is_full and not frees:
                raise OSError(errno.ENOSPC, "No space left on device", str(self.folder))
            with self._unwatched():
                undo = note(*args)
                made = real(*args, **named)
                if undo is not None:
                    self._undo.append(undo)
                return made

        return step

    def _note_created(self, _: FileWriter, path: Path) -> Callable[[], object]:
        return lambda: path.unlink(missing_ok=True)

    def _note_written(self, file: FileWriter, _: object) -> None:
        self._synced.setdefault(file._path.stat().st_ino, 0)

    def _note_made(self, path: Path, *_: object, **__: object) -> Callable[[], object] | None:
        return None if path.exists() else lambda: shutil.rmtree(path, ignore_errors=True)

    def _note_renamed(self, path: Path, target: Path) -> Callable[[], object]:
        return lambda: Path(target).rename(path)

    def _note_synced(self, descriptor: int) -> None:
        self._undo.clear()  # a journal is written in order
        found = os.fstat(descriptor)
        if found.st_ino in self._synced:
            del self._synced[found.st_ino]

    def _note_removed(self, path: Path, *_: object, **__: object) -> Callable[[], object]:
        for file in path.rglob("*"):
            self._synced.pop(file.stat().st_ino, None)  # the number may be that of another file next
        aside = Path(tempfile.mkdtemp(prefix="removed-", dir=self.folder.parent)) / "content"
        shutil.copytree(path, aside)
        return lambda: shutil.copytree(aside, path, dirs_exist_ok=True)

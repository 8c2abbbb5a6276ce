"""Input files of a source: finding them by path or pattern, and reading pieces of them."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from typing import Final, NamedTuple

from paceline.errors import DataError

_MOST_OPEN: Final = 64
_MOST_LISTED: Final = 5  # paths that a message names


class FileState(NamedTuple):
    """The state of a file, by which a change since it was opened is noticed.

    It does not include ctime, which links and permissions change too.
    """

    size_bytes: int
    modified_ns: int
    inode: int

    @staticmethod
    def of(status: os.stat_result) -> FileState:
        """Return the state of a file with this status."""
        return FileState(status.st_size, status.st_mtime_ns, status.st_ino)


def find_files(paths: Sequence[str]) -> list[str]:
    """Return the files that paths and patterns name, those of each pattern sorted by name.

    Raises:
        DataError: no file is found, or a file is named twice, by the same name or another one.
    """
    found = [file for path in paths for file in _matching(path)]
    whole, names = WholePaths(), dict[str, str]()
    for file in found:
        at = whole.of(file)
        if names.get(at) == file:
            num = found.count(file)
            raise DataError(f"{file} is {num} times among the files of {_listed(paths)}: name each file once.")
        if at in names:
            raise DataError(f"{names[at]} and {file} are one file, {at}: name each file once.")
        names[at] = file
    return found


def position_in(firsts: Sequence[int], index: int) -> tuple[int, int]:
    """Return in which part a sample is, and which one there, from the number of the first sample of each part.

    >>> position_in([0, 3, 5], 4)
    (1, 1)
    """
    part = bisect_right(firsts, index) - 1
    return part, index - firsts[part]


class WholePaths:
    """Resolves paths, without links in them; each folder is resolved once."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}

    def of(self, path: str) -> str:
        """Return the resolved path of a file."""
        if os.path.islink(path):
            return os.path.realpath(path)
        folder, name = os.path.split(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        return os.path.join(self._folders[folder], name)


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MOST_LISTED} more" if len(paths) > _MOST_LISTED else ""
    return ", ".join(paths[:_MOST_LISTED]) + more


def _matching(path: str) -> list[str]:
    if not has_magic(path) or os.path.exists(path):
        file_state(path)
        return [path]
    found = sorted(file for file in glob(path, recursive=True) if os.path.isfile(file))
    if not found:
        raise DataError(f"no file matches {path}, looked for in {os.getcwd()}. Is the pattern right?")
    return found


def file_state(path: str) -> FileState:
    """Return the state of a file; raises DataError unless it is a regular file."""
    with reading(path):
        status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no file on a disk"
        raise DataError(f"{path} is {kind}, expected a file; a pattern names those of a folder: 'folder/*.txt'.")
    return FileState.of(status)


@contextmanager
def reading(path: str) -> Generator[None]:
    """Turn errors of the system into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        where = "" if os.path.isabs(path) else f" (in {os.getcwd()})"
        raise DataError(
            f"{path}{where} cannot be read: {error.strerror or error}. It has to be there, and this process has to be "
            "permitted to read it."
        ) from error


class FixedFiles:
    """Files that must not change: access to a mapped file that has shrunk would end the process."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._states = {path: file_state(path) for path in paths}

    def check(self) -> None:
        """Raise DataError if one of the files has changed."""
        for path in self._states:
            self.check_one(path)

    def check_one(self, path: str) -> None:
        """Raise DataError if this file has changed."""
        _check_state(path, self._states[path], file_state(path))

    def describe(self) -> list[tuple[str, int]]:
        """Return the name and size of each."""
        return [(path, state.size_bytes) for path, state in self._states.items()]


class OpenFiles:
    """Files that are read in pieces; only some are open at a time."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths: Final = tuple(paths)
        self._states: Final = tuple(map(file_state, paths))
        self._open: OrderedDict[int, int] = OrderedDict()

    def size_bytes(self, number: int) -> int:
        """Return the size of a file, by number, when it was first opened."""
        return self._states[number].size_bytes

    def read(self, number: int, offset: int, size_bytes: int) -> bytes:
        """Return a piece of a file, by number; raises DataError if the file has changed."""
        with reading(self.paths[number]):
            descriptor = self._descriptor(number)
            data = os.pread(descriptor, size_bytes, offset)
            status = os.fstat(descriptor)
        found = (status.st_size, status.st_mtime_ns, status.st_ino)  # after it was read
        if found != self._states[number]:
            _check_state(self.paths[number], self._states[number], FileState(*found))
        if len(data) < size_bytes:
            raise DataError(f"{self.paths[number]} ends at {offset + len(data)}, expected {offset + size_bytes}.")
        return data

    def describe(self) -> list[tuple[str, int]]:
        """Return the name and size of each."""
        return [(path, state.size_bytes) for path, state in zip(self.paths, self._states, strict=True)]

    def close(self) -> None:
        """Close the open files; a read opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            self._open[number] = os.open(self.paths[number], os.O_RDONLY | os.O_CLOEXEC)
            if len(self._open) > _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(number)
        return self._open[number]


def _check_state(path: str, expected: FileState, found: FileState) -> None:
    if found == expected:
        return
    now, before = found.size_bytes, expected.size_bytes
    how = (
        f"has {now} bytes, and had {before} when it was opened"
        if now != before
        else f"was written to or replaced since it was opened, although it has {now} bytes as before"
    )
    raise DataError(
        f"{path} {how}. Files must not change while they are read: write new ones beside them, and start again."
    )

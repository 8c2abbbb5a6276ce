"""Files of training examples: which ones are meant, and reading pieces of them."""

from __future__ import annotations

import os
import stat
from collections import Counter, OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from typing import Final

from paceline.errors import DataError

_MOST_OPEN: Final = 64


def find_files(paths: Sequence[str]) -> list[str]:
    """Return the files that are meant, those of each pattern sorted by name.

    Raises:
        DataError: nothing is there, or a file is meant twice.
    """
    found = [file for path in paths for file in _matching(path)]
    for file, num in Counter(found).items():
        if num > 1:
            raise DataError(f"{file} is {num} times among the files of {', '.join(paths)}: name each file once.")
    return found


def _matching(path: str) -> list[str]:
    if not has_magic(path) or os.path.exists(path):
        file_size(path)
        return [path]
    found = sorted(file for file in glob(path, recursive=True) if os.path.isfile(file))
    if not found:
        raise DataError(f"no file matches {path}, looked for in {os.getcwd()}. Is the pattern right?")
    return found


def file_size(path: str) -> int:
    """Return the size of a file in bytes; raises DataError when there is no such file."""
    with reading(path):
        status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no file on a disk"
        raise DataError(f"{path} is {kind}, expected a file; a pattern names those of a folder: 'folder/*.txt'.")
    return status.st_size


@contextmanager
def reading(path: str) -> Generator[None]:
    """Turn what the system says of a file into a DataError that names it."""
    try:
        yield
    except OSError as error:
        where = "" if os.path.isabs(path) else f" (in {os.getcwd()})"
        raise DataError(
            f"{path}{where} cannot be read: {error.strerror or error}. It has to be there, and this process has to be "
            "permitted to read it."
        ) from error


class FixedFiles:
    """Files that must stay as large as they were: what is mapped of a file that shrinks would end the process."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._sizes = {path: file_size(path) for path in paths}

    def check(self) -> None:
        """Raise DataError when one of them has another size by now."""
        for path in self._sizes:
            self.check_one(path)

    def check_one(self, path: str) -> None:
        """Raise DataError when this one of them has."""
        _check_size(path, self._sizes[path], file_size(path))

    def describe(self) -> list[tuple[str, int]]:
        """Return the name and size of each."""
        return list(self._sizes.items())


class OpenFiles:
    """Files of which pieces are read, some of them open at a time."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths: Final = tuple(paths)
        self.sizes: Final = tuple(map(file_size, paths))
        self._open: OrderedDict[int, int] = OrderedDict()

    def read(self, number: int, offset: int, size_bytes: int) -> bytes:
        """Return this piece of the file of this number; raises DataError when it is not there any more."""
        with reading(self.paths[number]):
            data = os.pread(self._descriptor(number), size_bytes, offset)
        if len(data) < size_bytes:
            self.check()
            raise DataError(f"{self.paths[number]} ends at {offset + len(data)}, expected {offset + size_bytes}.")
        return data

    def check(self) -> None:
        """Raise DataError when one that is open has another size by now."""
        for number, descriptor in self._open.items():
            _check_size(self.paths[number], self.sizes[number], os.fstat(descriptor).st_size)

    def describe(self) -> list[tuple[str, int]]:
        """Return the name and size of each."""
        return list(zip(self.paths, self.sizes, strict=True))

    def close(self) -> None:
        """Close what is open; it is opened again when it is read."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            descriptor = os.open(self.paths[number], os.O_RDONLY | os.O_CLOEXEC)
            self._open[number] = descriptor
            if len(self._open) > _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            _check_size(self.paths[number], self.sizes[number], os.fstat(descriptor).st_size)
        self._open.move_to_end(number)
        return self._open[number]


def _check_size(path: str, expected_bytes: int, found_bytes: int) -> None:
    if found_bytes != expected_bytes:
        raise DataError(
            f"{path} has {found_bytes} bytes, and had {expected_bytes} when it was opened. Files must not change while "
            "they are read: write new ones beside them, and start again."
        )

"""Files on the disk itself, with digests: written from start to end, and there once they are finished."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Final, final

import msgspec

from paceline.job.folders import open_file

_SYNC_BYTES: Final = 256 << 20  # after which bytes are sent to the disk, so that the end of a file is not a long wait

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a snapshot, and what it has to be."""

    name: str
    sha256: str
    size_bytes: Count


@final
class FileWriter:
    """A new file that is written from its start to its end, and what it is in the end. A context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb", buffering=0)
        self._digest = hashlib.sha256()
        self.size_bytes = 0
        self._unsynced = 0

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; raises OSError if the disk is full."""
        left = memoryview(data).cast("B")
        self._digest.update(left)
        self.size_bytes += left.nbytes
        self._unsynced += left.nbytes
        while left:
            left = left[self._file.write(left) :]
        if self._unsynced >= _SYNC_BYTES:
            os.fdatasync(self._file.fileno())
            self._unsynced = 0

    def finish(self) -> FileEntry:
        """Return what the file is, once it is on the disk."""
        os.fsync(self._file.fileno())
        return FileEntry(self._path.name, self._digest.hexdigest(), self.size_bytes)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, content: bytes) -> FileEntry:
    """Write a whole file."""
    with FileWriter(path) as file:
        file.write(content)
        return file.finish()

"""The record of a server: what it receives, in a file, so that another process can repeat its work without workers.

It has what a replica would be told (`replica_link.py`), in the same order and form: events of the core with their
times, the tensors of pushes, and requests that change tables. At its end is a digest of each table, which a replay
compares.
A frame counts once all of it is in the file, so a process that is killed leaves all that it was told before.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import zlib
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, final

from paceline.errors import PacelineError
from paceline.server.journal import FORMAT
from paceline.transport.base import EMPTY

if TYPE_CHECKING:
    from paceline.server.served_table import ServedTable

RECORDS: Final = "record"  # folder of the records of a run
_START: Final = struct.Struct("<16sQ")
_MARK: Final = b"paceline record\n"
_HEAD: Final = struct.Struct("<IQI")  # of a frame: lengths of header and body, and the header's checksum
_MOST_HEADER: Final = 1 << 26


class UnreadableRecord(PacelineError):
    """A file is not a record of a server, of another version, or damaged."""


def record_path(run_dir: Path, server: int) -> Path:
    """Return where the record of a server of a run lies."""
    return run_dir / RECORDS / f"server-{server}.record"


def has_ended_early(path: Path) -> bool:
    """Return whether a record has ended before its run, as its bound was reached or its disk was full."""
    return path.exists() and not path.stat().st_mode & stat.S_IWUSR


@final
@dataclass(slots=True)
class RecordFile:
    """Appends frames to the record of a server, at most `max_bytes` in all. Used by one thread.

    What cannot be written, or has no room, ends the record, with one notice; the run goes on. A record that has ended
    is read-only: a process in the place of this one would write what comes after a gap.

    Args:
        path: of the file; what a process before this one has written there is gone on with.
        max_bytes: that it may have.
        tell: called with a line for the user when the record ends early.
    """

    path: Path
    max_bytes: int
    tell: Callable[[str], None]
    _descriptor: int = -1
    _size: int = 0
    _is_over: bool = field(default=False)

    def open(self) -> bool:
        """Open the file, without an unfinished frame at its end; return whether it is new. Idempotent."""
        if self._descriptor >= 0:
            return False
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._is_over = self._is_over or has_ended_early(self.path)
            if self._is_over:  # as a process before this one has told
                return False
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.fstat(self._descriptor).st_size == 0:
                self._write(_START.pack(_MARK, FORMAT))
                return True
            self._size = max((stop for _, _, stop in self._frames()), default=_START.size)
            os.truncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
        except (OSError, UnreadableRecord) as error:
            self.end(str(error))
        return False

    def last_headers(self, num: int) -> list[bytes]:
        """Return the headers of the last frames, at most so many."""
        return [] if self._is_over else list(deque((header for header, _, _ in self._frames()), num))

    def append(self, header: bytes, body: memoryview = EMPTY) -> None:
        """Add a frame."""
        if self._is_over:
            return
        size_bytes = _HEAD.size + len(header) + body.nbytes
        if self._size + size_bytes > self.max_bytes:
            self.end(f"it has the {self.max_bytes / 2**30:.3g} GiB that it may have; for more: --record-gib")
            return
        try:
            self._write(_HEAD.pack(len(header), body.nbytes, zlib.crc32(header)) + header, body)
        except OSError as error:
            self.end(error.strerror or str(error))

    def end(self, reason: str) -> None:
        """Write nothing more, and say why."""
        if not self._is_over:
            self._is_over = True
            self.tell(f"the record {self.path} ends here, and so will its replay; the run goes on: {reason}")
            with suppress(OSError):
                if self._size:  # else it is a file that cannot be read, and stays as it is
                    os.truncate(self.path, self._size)  # a frame of which only a part is there
                self.path.chmod(stat.S_IRUSR)

    def close(self) -> None:
        """Let go of the file."""
        self._is_over = True
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _frames(self) -> Generator[tuple[bytes, memoryview, int]]:
        return read_frames(self.path, with_bodies=False)

    def _write(self, head: bytes, body: memoryview = EMPTY) -> None:
        for part in (memoryview(head), body.cast("B")):
            rest = part
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        self._size += len(head) + body.nbytes


def read_frames(path: Path, *, with_bodies: bool = True) -> Generator[tuple[bytes, memoryview, int]]:
    """Yield header and body of each whole frame of a record, and the size of the file up to its end.

    The body is writable memory of its own; it is empty unless `with_bodies`.

    Raises:
        UnreadableRecord: it is not a record of this version.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_START.size)
        if len(start) < _START.size or _START.unpack(start) != (_MARK, FORMAT):
            raise UnreadableRecord(f"{path} is not a record of a server of this version of paceline")
        position = _START.size
        while position + _HEAD.size <= size:
            num_header, num_body, checksum = _HEAD.unpack(file.read(_HEAD.size))
            position += _HEAD.size + num_header + num_body
            if position > size:
                return
            header = file.read(num_header) if num_header <= _MOST_HEADER else b""
            if zlib.crc32(header) != checksum or len(header) != num_header:
                raise UnreadableRecord(f"{path} is damaged before byte {position}")
            body = EMPTY
            if with_bodies:
                body = memoryview(bytearray(num_body))
                file.readinto(body)
            else:
                file.seek(num_body, os.SEEK_CUR)
            yield header, body, position


def digests(tables: Mapping[str, ServedTable], clock_of: Callable[[str], int]) -> dict[str, str]:
    """Return by name digests of the values of tables and the state of their rules; writes them to files on the way.

    Without tables that have no values yet, or of which an update has failed. Raises as `ServedTable.save` does.
    """
    whole = {name: table for name, table in tables.items() if table.has_values and not table.broken}
    return {name: digest(table, clock_of(name)) for name, table in whole.items()}


def digest(table: ServedTable, clock: int, folder: Path | None = None) -> str:
    """Return a digest of a table; see `digests`."""
    with TemporaryDirectory(prefix="paceline-digest-", dir=folder) as place:
        path = Path(place) / "table"
        table.save(path, clock)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

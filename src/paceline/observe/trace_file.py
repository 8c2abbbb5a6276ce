"""File behind a trace: bounded in size, and abandoned with one notice, not raised, where it cannot be written."""

from __future__ import annotations

import os
import sys
from io import FileIO
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Of one process of a run without a folder of its own: twice as much at most is on the disk, see `TraceFile`.
UNNAMED_TRACE_BYTES: Final = 8 * 1024 * 1024
OLDER: Final = ".old"
_BLOCK_BYTES: Final = 64 * 1024


def tell_on_stderr(text: str) -> None:
    """Write on stderr what works less well than it could."""
    if sys.stderr is not None:  # as under pythonw, or a launcher that has closed it
        sys.stderr.write(f"paceline: {text}\n")
        sys.stderr.flush()


@final
class TraceFile:
    """Appends whole lines to a file; what goes wrong is told once, and ends the trace, not the training.

    With `max_bytes` the file is put aside as `NAME.old` when it has become so large, in place of the one before, and
    a new one is begun: the latest records are kept, and twice `max_bytes` are on the disk at most.
    """

    def __init__(self, path: Path, max_bytes: int = 0, tell: Callable[[str], None] = tell_on_stderr) -> None:
        self._path = path
        self._max_bytes = max_bytes  # 0: no bound
        self._tell = tell
        self._file: FileIO | None = None
        self._size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            self._give_up(error)

    @property
    def is_open(self) -> bool:
        """Whether more is written."""
        return self._file is not None

    def append(self, lines: bytes) -> None:
        """Write whole lines, or tell that the trace ends here."""
        if self._file is None:
            return
        try:
            if self._max_bytes and self._size and self._size + len(lines) > self._max_bytes:
                self.close()
                self._path.replace(self._path.with_name(self._path.name + OLDER))
                self._open()
            self._write(lines)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write no more; may be repeated."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _open(self) -> None:
        """Open for appending, without the torn line that a killed process may have left at the end."""
        self._file = FileIO(self._path, "a+")
        self._size = _end_of_lines(self._file.fileno())
        self._file.truncate(self._size)

    def _write(self, lines: bytes) -> None:
        assert self._file is not None
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._file.fileno(), rest) :]
        self._size += len(lines)

    def _give_up(self, error: OSError) -> None:
        try:
            self.close()
        except OSError as another:  # of a file server, which tells so late that the disk is full
            error = another
        self._tell(
            f"the trace {self._path} ends here: {error.strerror}. Training goes on; the live display and reports lack "
            "what follows. Free space, raise a limit (`ulimit -f`), or name another folder with --run-dir"
        )


def _end_of_lines(descriptor: int) -> int:
    """Return where the last whole line ends; reads the file from its end, and no more of it than that line."""
    end = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - _BLOCK_BYTES)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0

"""Reload of files that change while the process runs, such as tokens, certificates and revocations."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar, final

T = TypeVar("T")

_Mark = tuple[int, int, int]


@final
class FileWatch(Generic[T]):
    """A value made from files, made again when one of them has changed, appeared or disappeared. Thread-safe.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "word"
    ...     word = FileWatch([path], lambda: path.read_text() if path.exists() else "none")
    ...     before = word.get()
    ...     _ = path.write_text("hello")
    ...     before, word.get()
    ('none', 'hello')
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[], T]) -> None:
        self._paths = paths
        self._make = make
        self._lock = threading.Lock()
        self._made: tuple[list[_Mark | None], T] | None = None

    def get(self) -> T:
        """Return the current value; raises what `make` raises, and calls it again the next time."""
        with self._lock:
            marks = [_mark(path) for path in self._paths]  # first: what changes meanwhile is seen the next time
            if self._made is None or self._made[0] != marks:
                self._made = None
                self._made = marks, self._make()
            return self._made[1]


def _mark(path: Path) -> _Mark | None:
    """Return what differs between two states of a file; None if it cannot be read."""
    try:
        found = os.stat(path)
    except OSError:  # reading it raises the error
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size

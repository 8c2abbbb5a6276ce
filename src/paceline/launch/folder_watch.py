"""Looks into the folder of a job now and then, in a thread, for a process that must not wait for a file server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, Self, TypeVar, final

LOOK_S: Final = 1.0
_END_TIMEOUT_S: Final = 1.0  # a file server that does not answer does not keep the process from ending

_Seen = TypeVar("_Seen")


@final
class FolderWatch(Generic[_Seen]):
    """What was seen last, looked for once a second while it is entered.

    Args:
        look: returns what is there; what it raises as OSError leaves what was seen before.
        before: what counts until the first look has come to its end.
        every_s: seconds between two looks.

    Example:
        >>> with FolderWatch(lambda: ["server-0.view-1"], before=[]) as watch:
        ...     watch.seen in ([], ["server-0.view-1"])
        True
    """

    def __init__(self, look: Callable[[], _Seen], before: _Seen, every_s: float = LOOK_S) -> None:
        self._look = look
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-folder", daemon=True)
        self.seen = before

    def __enter__(self) -> Self:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Look no longer."""
        self._ended.set()
        self._thread.join(_END_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with suppress(OSError):  # the file server is away for a while, or the job is over and its folder cleared
                self.seen = self._look()
            if self._ended.wait(self._every_s):
                return

"""Buffers the news of a process until its launcher fetches them."""

from __future__ import annotations

from collections import deque
from threading import Condition
from typing import Final, final

from paceline.ray.messages import News

NUM_LINES_MAX: Final = 2000


@final
class NewsBuffer:
    """Collects news in one thread, and returns them in another.

    Lines that are not fetched block the process, as a full pipe does.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        # Invariant: no exit code before everything else has been put.
        self._lines: deque[tuple[bool, str]] = deque()
        self._address = ""
        self._trace = b""
        self._exit_code: int | None = None

    def relay(self, name: str, colour: int, line: str, *, to_stderr: bool) -> None:
        """Put one line that the process has written; blocks while there are too many."""
        with self._changed:
            # No deadline: who fetches is gone only when this process is about to be.
            self._changed.wait_for(lambda: len(self._lines) < NUM_LINES_MAX)
            self._lines.append((to_stderr, line))
            self._changed.notify_all()

    def add(self, *, address: str = "", trace: bytes = b"", exit_code: int | None = None) -> None:
        """Put anything else."""
        with self._changed:
            self._address = address or self._address
            self._trace += trace
            self._exit_code = exit_code
            self._changed.notify_all()

    def wait_news(self, timeout_s: float) -> News:
        """Return all that is there; blocks until there is something, or `timeout_s` have passed."""
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            news = News(list(self._lines), self._address, self._trace, self._exit_code)
            self._lines.clear()
            self._address, self._trace = "", b""
            self._changed.notify_all()
            return news

    def _has_news(self) -> bool:
        return bool(self._lines or self._address or self._trace) or self._exit_code is not None

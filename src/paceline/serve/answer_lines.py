"""Queues of clients that wait for an answer, one for each namespace, so that no namespace delays another."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, final

from paceline.launch.limits import explain
from paceline.notices import tell
from paceline.wire.malformed import REQUEST_ERRORS

MOST_AT_ONCE: Final = 4  # answers of one namespace: each may wait until that is read from disk
MOST_DEFERRED: Final = 64

Answer = Callable[[], None]


@dataclass(slots=True)
class _Line:
    waiting: deque[Answer] = field(default_factory=deque[Answer])
    num_threads: int = 0


@final
class AnswerLines:
    """Gives answers in threads, those of one namespace in the order of their clients. A context manager.

    Leaving it blocks until all are given.

    Args:
        num_namespaces: that may each keep `MOST_AT_ONCE` threads.
    """

    def __init__(self, num_namespaces: int) -> None:
        self._pool = ThreadPoolExecutor(num_namespaces * MOST_AT_ONCE, thread_name_prefix="paceline-gateway")
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._deferred: list[tuple[str, Answer]] | None = []  # None at the end

    def __enter__(self) -> Self:
        """Return these lines."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Give the answers that are left."""
        with self._lock:
            deferred, self._deferred = self._deferred or [], None
        for name, answer in deferred:
            self.add(name, answer)
        self._pool.shutdown()

    def add(self, name: str, answer: Answer) -> None:
        """Have an answer given behind those of the same namespace.

        Where the system has no thread left it stays in line for one that is done.
        """
        with self._lock:
            line = self._lines.setdefault(name, _Line())
            line.waiting.append(answer)
            if line.num_threads >= MOST_AT_ONCE:
                return
            line.num_threads += 1
        try:
            self._pool.submit(self._give_all, name, line)
        except RuntimeError as error:
            tell(f"a client waits for its answer: {explain(error)}")

    def defer(self, name: str, answer: Answer) -> bool:
        """Have an answer given after the next `resume`; False where too many wait for that, or all is over."""
        with self._lock:
            if self._deferred is None or len(self._deferred) >= MOST_DEFERRED:
                return False
            self._deferred.append((name, answer))
            return True

    def resume(self) -> None:
        """Put the answers that were deferred in line."""
        with self._lock:
            if not self._deferred:
                return
            deferred, self._deferred = self._deferred, []
        for name, answer in deferred:
            self.add(name, answer)

    def _give_all(self, name: str, line: _Line) -> None:
        while True:
            with self._lock:
                if not line.waiting:
                    line.num_threads -= 1
                    if not line.num_threads:
                        del self._lines[name]
                    return
                answer = line.waiting.popleft()
            try:
                answer()
            except REQUEST_ERRORS as error:  # a fault of ours, which the client learns by the end of its connection
                traceback.print_exception(error)

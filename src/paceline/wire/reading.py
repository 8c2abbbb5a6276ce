"""Which thread reads the connections of a worker: one that waits for an answer, or each connection's own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, final

from paceline.transport.base import Connection
from paceline.transport.poller import Poller

ASIDE_S = 0.02  # after a wait, the next one mostly follows as soon, and nothing else is worth a wake-up


class ReadByTurns(Protocol):
    """A connection that another thread may read in the place of its own."""

    def take_reading(self) -> Connection | None:
        """Keep the connection's own thread from reading until `end_reading`; None if it reads, or has to."""
        ...

    def read_ready(self) -> None:
        """Receive and handle the frames that have arrived; does not block. Between `take_reading` and `end_reading`."""
        ...

    def end_reading(self) -> None:
        """Let other threads read."""
        ...


@final
@dataclass(slots=True)
class ReadTurns:
    """Lets threads that wait for answers read the connections, so that no thread has to wake them.

    The connections' own threads stand aside meanwhile and for 20 ms after. So what comes while no thread waits is read
    that much later, and turns are enabled only where other workers do not wait for it.

    Args:
        notify: wakes waiting threads, so that one of them takes the turn.
    """

    notify: Callable[[], None]
    is_enabled: bool = False
    num_waiting: int = 0  # threads
    num_turns: int = 0
    _connections: list[ReadByTurns] = field(default_factory=list[ReadByTurns])
    _taken: list[tuple[Connection, ReadByTurns]] = field(default_factory=list[tuple[Connection, ReadByTurns]])
    _is_polling: bool = False
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _poller: Poller = field(default_factory=Poller)

    def add(self, connection: ReadByTurns) -> None:
        """Add a connection."""
        self._connections.append(connection)

    @property
    def is_taken(self) -> bool:
        """Whether a thread that waits reads."""
        return bool(self._taken)

    def take(self) -> bool:
        """Take the turn to read; False if the connections' own threads read, or another thread that waits.

        `take`, `end` and `wake` are called under the lock of the worker, `read` between `take` and `end` without it.
        """
        if not self.is_enabled or not self._turn.acquire(blocking=False):
            return False
        self._taken = [(taken, each) for each in self._connections if (taken := each.take_reading()) is not None]
        if not self._taken:
            self._turn.release()
            return False
        self.num_turns += 1
        self._is_polling = True
        return True

    def read(self, timeout_s: float, asleep: AbstractContextManager[None]) -> None:
        """Wait until something has arrived, and handle it. `asleep`: see `Poller.wait`."""
        ready = self._poller.wait([connection for connection, _ in self._taken], timeout_s, asleep)
        self._is_polling = False
        for connection, each in self._taken:
            if connection in ready:
                each.read_ready()

    def end(self) -> None:
        """Let other threads read."""
        for _, each in self._taken:
            each.end_reading()
        self._taken, self._is_polling = [], False
        self._turn.release()

    def wake(self) -> None:
        """End the `read` that waits, if any: what its thread waits for may have come by another way."""
        if self._is_polling:
            self._poller.wake()

    def close(self) -> None:
        """Free what is used to wait, once no thread reads."""
        self.is_enabled = False
        with self._turn:
            self._poller.close()

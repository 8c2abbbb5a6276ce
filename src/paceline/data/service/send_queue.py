"""Send queue of one worker, emptied by a thread of its own, so that a slow worker delays no other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from paceline.errors import PeerError, UsageError
from paceline.transport.base import EMPTY, Connection

_TIMEOUT_S: Final = 60.0
_LEAST_BYTES_PER_S: Final = 1e6  # a worker that takes in batches more slowly than this is given up
_MOST_WAITING: Final = 2  # one that is being sent, and one that is ready when it has left
_JOIN_TIMEOUT_S: Final = 5.0


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ServiceAnswer:
    """A frame; `on_sent` is called by the sending thread once the carrier has taken it."""

    header: bytes
    body: memoryview = EMPTY
    on_sent: Callable[[], None] = _nothing


@dataclass(slots=True)
class ServiceSendQueue:
    """Sends answers over one connection, in order. Any thread may call it.

    Args:
        on_room: called by the sending thread whenever an answer has left.
    """

    connection: Connection
    on_room: Callable[[], None]
    num_sent: int = 0  # written by the sending thread alone
    # Invariant: what is being sent stays the first until it has left.
    _waiting: deque[ServiceAnswer] = field(default_factory=deque[ServiceAnswer])
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False
    _thread: threading.Thread = field(init=False)

    def open(self) -> None:
        """Start to send.

        Raises:
            PeerError: the system gives no more threads; who is turned away now may come again.
        """
        name = f"paceline-send-{self.connection.peer}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            raise PeerError("there is no thread to answer it by") from None

    @property
    def has_room(self) -> bool:
        """Say whether a batch should be made for this worker now."""
        return len(self._waiting) < _MOST_WAITING

    def put(self, answer: ServiceAnswer) -> None:
        """Have this sent after all that came before; once closed it is dropped. Does not block."""
        with self._changed:
            if not self._closed:
                self._waiting.append(answer)
                self._changed.notify_all()

    def close(self) -> None:
        """End the connection and the thread; what has not left is lost."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self.connection.close()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                answer = self._waiting[0]
            if not self._send(answer):
                self.connection.close()
                return
            with self._changed:
                if not self._closed:
                    self._waiting.popleft()
            self.num_sent += 1
            answer.on_sent()
            del answer  # while it waits for the next one, this one's memory is others' to use
            self.on_room()

    def _send(self, answer: ServiceAnswer) -> bool:
        """Send; False when the connection is over, or this one has to end."""
        timeout_s = _TIMEOUT_S + answer.body.nbytes / _LEAST_BYTES_PER_S
        try:
            self.connection.send(answer.header, answer.body, timeout_s=timeout_s)
        except (PeerError, UsageError):  # it is gone, takes in nothing, or made us say more than a frame may have
            return False
        return True

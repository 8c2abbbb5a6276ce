"""Queue of the connections that a listener has yet to give to `accept`."""

import threading
from collections import deque
from typing import Final, Generic, TypeVar, final

from paceline.errors import ConnectionLost, DeadlineExceeded
from paceline.transport.base import Connection
from paceline.transport.deadline import seconds

C = TypeVar("C", bound=Connection)


@final
class AcceptQueue(Generic[C]):
    """A `Listener` of connections that other threads put into it."""

    def __init__(self, address: str) -> None:
        self.address: Final = address
        self._changed = threading.Condition()
        self._waiting: deque[C] = deque()
        self._closed = False

    def put(self, connection: C) -> bool:
        """Queue a connection for `accept`; after `close`, end it and return False."""
        with self._changed:
            if not self._closed:
                self._waiting.append(connection)
                self._changed.notify_all()
                return True
        connection.close()
        return False

    def accept(self, *, timeout_s: float) -> C:
        """Wait for the next connection; see `Listener.accept`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or bool(self._waiting), timeout_s):
                raise DeadlineExceeded(f"waited {seconds(timeout_s)} for a connection at {self.address}; none came")
            if self._closed:
                raise ConnectionLost(f"the listener at {self.address} was closed")
            return self._waiting.popleft()

    def close(self) -> None:
        """Accept no more, and end the connections in the queue; see `Listener.close`."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for connection in left:
            connection.close()

"""The handoff of connections from the gateway to the server node of a namespace."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from paceline.core.messages import Sender, WorkerRefused
from paceline.errors import ConnectionLost, DeadlineExceeded, PeerError
from paceline.transport.base import EMPTY, Connection, Frame, PeerIdentity, Place
from paceline.transport.deadline import seconds
from paceline.wire.messages import Hello, decode, encode

if TYPE_CHECKING:
    from paceline.serve.messages import EnterFrame

_REFUSAL_TIMEOUT_S: Final = 1.0


@final
class NamespaceConnection:
    """A connection whose identity is the client's `Hello` to the server of its namespace."""

    def __init__(self, connection: Connection, frame: EnterFrame) -> None:
        self.identity: Final = frame.hello
        self._connection = connection

    @property
    def peer(self) -> str:
        """Who is at the other end."""
        return self._connection.peer

    @property
    def peer_identity(self) -> PeerIdentity:
        """What the client's certificate says."""
        return self._connection.peer_identity

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        """Send one frame; see `Connection.send`."""
        self._connection.send(header, body, timeout_s=timeout_s)

    def try_send(self, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
        """Send frames together; see `Connection.try_send`."""
        return self._connection.try_send(frames, timeout_s=timeout_s)

    def has_room(self, body: memoryview) -> bool:
        """Return whether `send` would take a body without waiting; see `Connection.has_room`."""
        return self._connection.has_room(body)

    def receive(self, *, timeout_s: float, place: Place | None = None) -> Frame:
        """Wait for the next frame; see `Connection.receive`."""
        return self._connection.receive(timeout_s=timeout_s, place=place)

    def has_frame(self) -> bool:
        """Return whether the next frame is here; see `Connection.has_frame`."""
        return self._connection.has_frame()

    def close(self) -> None:
        """End the connection; see `Connection.close`."""
        self._connection.close()

    def turn_away(self, reason: str) -> None:
        """Refuse a worker whose namespace has ended, so that it does not reconnect, and end the connection."""
        with suppress(PeerError):
            hello = decode(self.identity)
            if isinstance(hello, Hello):
                refusal = WorkerRefused(Sender(hello.generation, hello.rank, hello.incarnation), reason)
                self.send(encode(refusal), timeout_s=_REFUSAL_TIMEOUT_S)
        self.close()


@final
class HandoffQueue:
    """A `Listener` whose connections come from the gateway."""

    def __init__(self, address: str) -> None:
        self.address: Final = address
        self._changed = threading.Condition()
        self._waiting: deque[Connection] = deque()
        self._closed = False

    def hand_over(self, connection: Connection) -> None:
        """Queue a connection to be accepted; after `close` it is ended."""
        with self._changed:
            if not self._closed:
                self._waiting.append(connection)
                self._changed.notify_all()
                return
        connection.close()

    def accept(self, *, timeout_s: float) -> Connection:
        """Wait for the next connection; see `Listener.accept`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or bool(self._waiting), timeout_s):
                raise DeadlineExceeded(f"waited {seconds(timeout_s)} for a client of {self.address}; none came")
            if self._closed:
                raise ConnectionLost(f"{self.address} is closed")
            return self._waiting.popleft()

    def close(self) -> None:
        """Accept no more, and end the connections in the queue. Idempotent."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for connection in left:
            connection.close()

"""A worker's connection to one data server, opened by a thread of its own and reopened whenever it breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from paceline.errors import AuthenticationFailed, DeadlineExceeded, PeerError, UsageError
from paceline.transport.base import EMPTY, Connection, Frame, Transport
from paceline.wire.messages import Hello, encode
from paceline.wire.send_queue import SendQueue

_POLL_S: Final = 0.5
_CONNECT_TIMEOUT_S: Final = 5.0
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0
_JOIN_TIMEOUT_S: Final = 10.0


@dataclass(slots=True)
class ServiceConnection:
    """Receives frames from a data server on a thread of its own, and reconnects.

    Args:
        server: rank of the data server, which its certificate, if it has one, must name.
        address: returns the address, before each attempt: a restarted server has a new one.
        greeting: header and body of the first frame on each connection.
        on_frame: called with each frame; ends the connection by raising a PeerError.
        on_lost: called with the reason when a connection has ended or failed, before the next attempt.
    """

    server: int
    address: Callable[[], str]
    hello: Hello
    transport: Transport
    greeting: tuple[bytes, memoryview]
    on_frame: Callable[[Frame], None]
    on_lost: Callable[[str], None]
    _post: SendQueue | None = None
    _has_heard: bool = False  # whether the current or the previous connection has received a frame
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def open(self) -> None:
        """Start the thread; does not wait for the connection."""
        self._thread = threading.Thread(target=self._run, name=f"paceline-feed-{self.server}", daemon=True)
        self._thread.start()

    def send(self, header: bytes, body: memoryview = EMPTY) -> None:
        """Send one frame, without waiting for the other end; a broken connection loses it."""
        if self._post is not None:
            self._post.send(header, body)

    def close(self) -> None:
        """End the connection and the thread."""
        self._closing.set()
        if self._post is not None:
            self._post.close()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            self._has_heard = False
            self.on_lost(self._be_connected())
            pause_s = _FIRST_PAUSE_S if self._has_heard else min(_LONGEST_PAUSE_S, 2 * pause_s)
            self._closing.wait(pause_s)

    def _be_connected(self) -> str:
        """Connect, and pass on frames until the connection ends; return the reason."""
        try:
            post = self._connect()
        except (PeerError, UsageError, OSError) as error:  # OSError: too many open files, for example
            return str(error)
        try:
            return self._read_on(post.connection)
        finally:
            post.close()

    def _connect(self) -> SendQueue:
        address = self.address()
        connection = self.transport.connect(address, encode(self.hello), timeout_s=_CONNECT_TIMEOUT_S)
        if not connection.peer_identity.permit("data", self.server):
            connection.close()
            raise AuthenticationFailed(
                f"{connection.peer} was to be data server {self.server}, but its certificate is for "
                f"{connection.peer_identity.holder}; do not trust it"
            )
        self.hello = replace(self.hello, connection=self.hello.connection + 1)
        post = self._post = SendQueue(connection, on_broken=connection.close)
        if self._closing.is_set():  # `close` may have come before the connection was stored
            post.close()
        post.send(*self.greeting)
        return post

    def _read_on(self, connection: Connection) -> str:
        while not self._closing.is_set():
            try:
                self.on_frame(connection.receive(timeout_s=_POLL_S))
                self._has_heard = True
            except DeadlineExceeded:
                continue
            except PeerError as error:
                return str(error)
        return "it was closed here"

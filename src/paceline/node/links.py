"""A worker's connection to one server, made again whenever it breaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import AuthenticationFailed, DeadlineExceeded, PeerError
from paceline.transport.base import EMPTY, Connection, Frame, Transport

_POLL_S = 0.5
_SEND_TIMEOUT_S = 60.0
_FIRST_PAUSE_S = 0.02


@dataclass(slots=True)
class Link:
    """Sends to a server, and hands over what comes from it on a thread of its own.

    Args:
        on_frame: called with each frame, on the reader thread.
        on_reconnected: called when the connection was made again, on the reader thread.
        on_lost: called with the reason when the server could not be reached for `patience_s`.
    """

    address: str
    identity: bytes
    transport: Transport
    patience_s: float
    on_frame: Callable[[Frame], None]
    on_reconnected: Callable[[], None]
    on_lost: Callable[[str], None]
    _connection: Connection = field(init=False)
    _closing: threading.Event = field(default_factory=threading.Event)
    _reader: threading.Thread = field(init=False)

    def open(self, timeout_s: float) -> None:
        """Connect, and start to read. Blocks until connected; raises as `Transport.connect` does."""
        self._connection = self.transport.connect(self.address, self.identity, timeout_s=timeout_s)
        self._reader = threading.Thread(target=self._read, name=f"paceline-link-{self.address}", daemon=True)
        self._reader.start()

    def allocate(self, size_bytes: int) -> memoryview:
        """Return memory whose content travels to this server without a copy where the carrier can."""
        return self._connection.allocate(size_bytes)

    def send(self, header: bytes, body: memoryview = EMPTY) -> None:
        """Send one frame. If the connection is broken it is lost, and repeated when there is a new connection."""
        connection = self._connection
        try:
            connection.send(header, body, timeout_s=_SEND_TIMEOUT_S)
        except PeerError:
            connection.close()

    def close(self) -> None:
        """End the connection and its thread."""
        self._closing.set()
        self._connection.close()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=5.0)

    def _read(self) -> None:
        while not self._closing.is_set():
            try:
                self.on_frame(self._connection.receive(timeout_s=_POLL_S))
            except DeadlineExceeded:
                continue
            except PeerError as error:
                if self._closing.is_set() or not self._reconnect(str(error)):
                    return
                self.on_reconnected()

    def _reconnect(self, problem: str) -> bool:
        """Try until connected or out of patience; say whether there is a connection."""
        self._connection.close()
        give_up, pause_s = time.monotonic() + self.patience_s, _FIRST_PAUSE_S
        while time.monotonic() < give_up and not self._closing.wait(pause_s):
            pause_s = min(1.0, 2 * pause_s)
            try:
                self._connection = self.transport.connect(self.address, self.identity, timeout_s=_POLL_S)
            except AuthenticationFailed as error:
                problem = str(error)
                break
            except PeerError as error:
                problem = str(error)
                continue
            return True
        if not self._closing.is_set():
            self.on_lost(f"the connection to {self.address} is lost and did not come back: {problem}")
        return False

"""A bounded number of threads that answer browsers and scrapers; silent connections make room for others."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler

MAX_CONNECTIONS: Final = 32  # each has a thread
REQUEST_TIMEOUT_S: Final = 10.0  # for each piece of a request to come, and of an answer to be taken


class BoundedHttpServer(ThreadingHTTPServer):
    """Answers each connection in a thread, at most MAX_CONNECTIONS at a time.

    One that comes when there is no room takes the place of the oldest that `keep` was not called for: a connection that
    is silent, or slow, keeps no other out. Where all are to be kept, it is closed.
    """

    allow_reuse_address = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], *, listens: bool = True
    ) -> None:
        self._open: dict[socket.socket, bool] = {}  # in the order in which they came: whether it is to be kept
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)  # of a connection
        super().__init__(address, handler, bind_and_activate=listens)

    def keep(self, connection: socket.socket) -> None:
        """Let no other connection take the place of this one, which has shown that it may have it."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = True

    def end_all(self, patience_s: float) -> None:
        """End the connections that have not ended by themselves after this time."""
        with self._lock:
            self._ended.wait_for(lambda: not self._open, patience_s)
            for connection in self._open:
                _end(connection)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the base class has it
        """Answer a connection in a thread of its own, if there is room or can be made."""
        connection = cast("socket.socket", request)
        with self._lock:
            has_room = len(self._open) < MAX_CONNECTIONS or self._make_room()
            if has_room:
                self._open[connection] = False
        if has_room:
            super().process_request(request, client_address)
        else:
            super().shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - as the base class has it
        """End a connection that was answered."""
        with self._lock:
            self._open.pop(cast("socket.socket", request), None)
            self._ended.notify_all()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the base class has it
        """Say nothing of a client that has gone away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _make_room(self) -> bool:
        oldest = next((connection for connection, is_kept in self._open.items() if not is_kept), None)
        if oldest is None:
            return False
        del self._open[oldest]
        _end(oldest)
        return True


def _end(connection: socket.socket) -> None:
    """Have the thread of a connection find it ended."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

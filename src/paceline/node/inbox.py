"""How frames reach the one thread of a server: a listener thread, a reader thread per connection, one queue."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from paceline.errors import DeadlineExceeded, PeerError
from paceline.transport.base import Connection, Frame, Listener

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Incoming:
    """Something for the server's thread: a frame, or the end of a connection (frame is None)."""

    connection: Connection
    frame: Frame | None
    problem: str = ""


@dataclass(slots=True)
class Inbox:
    """Everything that arrives at a listener, in one queue. `close` ends all its threads and connections."""

    listener: Listener
    # Bounded by what the workers may have unsettled, not by the queue: a full queue could make a reader wait for the
    # very thread that waits for it.
    _queue: queue.SimpleQueue[object] = field(default_factory=queue.SimpleQueue[object])
    _connections: dict[int, Connection] = field(default_factory=dict[int, Connection])
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _closing: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> None:
        """Start to accept connections."""
        self._spawn(self._accept, "paceline-accept")

    def put(self, item: object) -> None:
        """Add an event of the server's own making."""
        self._queue.put(item)

    def get(self, timeout_s: float | None) -> object | None:
        """Wait for the next item; None when `timeout_s` has passed."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop listening, end all connections and wait for the threads."""
        self._closing.set()
        self.listener.close()
        with self._lock:
            connections, threads = list(self._connections.values()), list(self._threads)
        for connection in connections:
            connection.close()
        for thread in threads:
            thread.join(timeout=5.0)

    def drop(self, connection: Connection) -> None:
        """End one connection."""
        connection.close()
        with self._lock:
            self._connections.pop(id(connection), None)

    def _spawn(self, target: object, name: str, *args: object) -> None:
        thread = threading.Thread(target=target, name=name, args=args, daemon=True)  # pyright: ignore[reportArgumentType]
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self.listener.accept(timeout_s=_POLL_S)
            except DeadlineExceeded:
                continue
            except PeerError:
                return
            with self._lock:
                self._connections[id(connection)] = connection
            self._spawn(self._read, f"paceline-read-{connection.peer}", connection)

    def _read(self, connection: Connection) -> None:
        while not self._closing.is_set():
            try:
                self._queue.put(Incoming(connection, connection.receive(timeout_s=_POLL_S)))
            except DeadlineExceeded:
                continue
            except PeerError as error:
                self._queue.put(Incoming(connection, None, str(error)))
                return

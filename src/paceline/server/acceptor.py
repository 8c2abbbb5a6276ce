"""Incoming frames of a server: a listener thread and a reader thread per connection fill one queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.errors import DeadlineExceeded, PeerError
from paceline.transport.base import Connection, Frame, Listener, Place, receive_all

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Incoming:
    """A frame for the server's thread, or the end of a connection (frame is None)."""

    connection: Connection
    frame: Frame | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Expel:
    """Close connections whose certificate has one of these holders or serial numbers: an item of the queue."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the server's loop: an item of the queue."""


@dataclass(slots=True)
class Acceptor:
    """Accepts connections and queues their frames. `close` ends all its threads and connections."""

    listener: Listener
    place: Place | None = None  # allocates memory for bodies that the transport copies
    # Bounded by how many messages workers may have unanswered, not by the queue: with a full queue a reader could wait
    # for the very thread that waits for it.
    _queue: queue.SimpleQueue[object] = field(default_factory=queue.SimpleQueue[object])
    _connections: dict[int, Connection] = field(default_factory=dict[int, Connection])
    _expelled: Collection[str] = frozenset()
    _accepting: threading.Thread = field(init=False)
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _closing: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> None:
        """Start to accept connections."""
        self._accepting = threading.Thread(target=self._accept, name="paceline-accept", daemon=True)
        self._accepting.start()

    def put(self, item: object) -> None:
        """Add an item that did not come from a connection."""
        self._queue.put(item)

    def get(self, timeout_s: float | None) -> object | None:
        """Wait for the next item; None when `timeout_s` has passed."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def num_waiting(self) -> int:
        """Return the number of items in the queue."""
        return self._queue.qsize()

    def close(self) -> None:
        """Stop listening, end all connections, join the threads and drop what is left in the queue."""
        self._closing.set()
        self.listener.close()
        self._accepting.join(timeout=5.0)  # first: it may hold a connection that is not registered yet
        with self._lock:
            connections, threads = list(self._connections.values()), list(self._threads)
        for connection in connections:
            connection.close()
        for thread in threads:
            thread.join(timeout=5.0)
        self._queue = queue.SimpleQueue()  # frames in the old one keep workers' memory

    def connections(self) -> list[Connection]:
        """Return the connections that have not ended."""
        with self._lock:
            return list(self._connections.values())

    def expel(self, names: Collection[str]) -> list[Connection]:
        """Refuse connections whose certificate has one of these holders or serial numbers; return those that are open.

        `names` are all revoked ones, and replace earlier ones.
        """
        with self._lock:
            self._expelled = names
            return [
                connection for connection in self._connections.values() if connection.peer_identity.are_among(names)
            ]

    def drop(self, connection: Connection) -> None:
        """End one connection."""
        connection.close()
        with self._lock:
            self._connections.pop(id(connection), None)

    def _start_reader(self, connection: Connection) -> None:
        name = f"paceline-read-{connection.peer}"
        thread = threading.Thread(target=self._read, name=name, args=(connection,), daemon=True)
        with self._lock:
            revoked = connection.peer_identity.are_among(self._expelled)  # since its handshake
            if not revoked:
                self._connections[id(connection)] = connection
        if revoked:
            connection.close()
            return
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left; the peer may connect again later
            self.drop(connection)
            return
        with self._lock:
            self._threads = [*(known for known in self._threads if known.is_alive()), thread]

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self.listener.accept(timeout_s=_POLL_S)
            except DeadlineExceeded:
                continue
            except PeerError:
                return
            self._start_reader(connection)

    def _read(self, connection: Connection) -> None:
        while not self._closing.is_set():
            try:
                for frame in receive_all(connection, timeout_s=_POLL_S, place=self.place):
                    self._queue.put(Incoming(connection, frame))
            except DeadlineExceeded:
                continue
            except PeerError as error:
                self._queue.put(Incoming(connection, None, str(error)))
                return
            except MemoryError:  # the connection ends, and the peer repeats the frame over a new one
                self._queue.put(Incoming(connection, None, "this machine has no memory for a frame"))
                return

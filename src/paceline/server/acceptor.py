"""Incoming frames of a server: the server's thread reads them itself, and reader threads those with large bodies."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.errors import DeadlineExceeded, PeerError
from paceline.transport.base import Connection, Frame, Listener, Place, receive_all
from paceline.transport.buffer_pool import Buffer
from paceline.transport.deadline import Deadline
from paceline.transport.poller import Poller

_POLL_S = 0.5  # between two looks at all connections: whether a peer is silent
_LARGE_BYTES = 256 << 10  # of a body that the transport copies: it is received beside other work, by a thread
_NO_MEMORY = "this machine has no memory for a frame"


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
    """Accepts connections and gives their frames to one thread, the one that calls `get`.

    That thread reads the connections itself while it has nothing else to do, so no thread has to wake it. A connection
    that has brought a large body, or cannot be waited for together with others, gets a reader thread. `close` ends all
    threads and connections.
    """

    listener: Listener
    place: Place | None = None  # allocates memory for bodies that the transport copies
    # Bounded by how many messages workers may have unanswered, not by the queue: with a full queue a reader could wait
    # for the very thread that waits for it.
    _queue: queue.SimpleQueue[object] = field(default_factory=queue.SimpleQueue[object])
    _received: deque[Incoming] = field(default_factory=deque[Incoming])  # by the thread that calls `get`
    _has_looked: bool = False  # whether frames have arrived, since the last item of the queue
    _connections: dict[int, Connection] = field(default_factory=dict[int, Connection])
    _polled: tuple[Connection, ...] = ()  # the connections without a reader thread; replaced when they change
    _poller: Poller = field(default_factory=Poller)
    _looked_s: float = 0.0
    _is_large: bool = False  # the frame that is being received
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
        """Add an item; from any thread."""
        self._queue.put(item)
        self._poller.wake()

    def get(self, timeout_s: float | None) -> object | None:
        """Wait for the next item; None when `timeout_s` has passed. One thread at a time."""
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        while not self._received:
            if not self._queue.empty() and self._has_looked:
                self._has_looked = False
                return self._queue.get_nowait()
            # Frames that have arrived come before the next item, such as the death of their sender.
            left_s = _POLL_S if deadline is None else deadline.remaining_s()
            self._receive_ready(0.0 if not self._queue.empty() else min(left_s, _POLL_S))
            self._has_looked = not self._queue.empty()
            if not left_s and not self._received and not self._has_looked:
                return None
        return self._received.popleft()

    def num_waiting(self) -> int:
        """Return the number of items that are here; called by the thread that calls `get`."""
        self._receive_ready(0.0)
        return len(self._received) + self._queue.qsize()

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
        self._poller.close()
        self._queue = queue.SimpleQueue()  # frames in the old one keep workers' memory
        self._received.clear()

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
        """End one connection; its end is an item that comes after its frames."""
        connection.close()
        with self._lock:
            self._connections.pop(id(connection), None)
        if self._unpoll(connection):
            self.put(Incoming(connection, None, "it was closed here"))

    def _unpoll(self, connection: Connection) -> bool:
        """Read a connection no more; return whether it was read by the thread that calls `get`."""
        with self._lock:
            before = self._polled
            self._polled = tuple(each for each in before if each is not connection)
            return len(self._polled) < len(before)

    def _admit(self, connection: Connection) -> None:
        is_polled = connection.fileno() is not None
        with self._lock:
            revoked = connection.peer_identity.are_among(self._expelled)  # since its handshake
            if not revoked:
                self._connections[id(connection)] = connection
            if not revoked and is_polled:
                self._polled = (*self._polled, connection)
        if revoked:
            connection.close()
        elif is_polled:
            self._poller.wake()
        else:
            self._start_reader(connection)

    def _start_reader(self, connection: Connection) -> None:
        name = f"paceline-read-{connection.peer}"
        thread = threading.Thread(target=self._read, name=name, args=(connection,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left; the peer may connect again later
            self.drop(connection)
            self.put(Incoming(connection, None, "this machine has no thread for it"))
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
            self._admit(connection)

    def _receive_ready(self, timeout_s: float) -> None:
        """Wait for connections that have something to receive, and take their frames."""
        polled = self._polled
        ready = self._poller.wait(polled, timeout_s)
        now_s = time.monotonic()
        if now_s - self._looked_s >= _POLL_S:
            self._looked_s, ready = now_s, list(polled)
        for connection in ready:
            self._receive(connection)

    def _receive(self, connection: Connection) -> None:
        """Take the frames that a connection has; give it to a reader thread if it brings a large body."""
        self._is_large = False
        try:
            for frame in receive_all(connection, timeout_s=0.0, place=self._place):
                self._received.append(Incoming(connection, frame))
        except DeadlineExceeded:
            pass
        except PeerError as error:
            self._end(connection, str(error))
        except MemoryError:  # the connection ends, and the peer repeats the frame over a new one
            self._end(connection, _NO_MEMORY)
        if self._is_large and self._unpoll(connection):
            self._start_reader(connection)

    def _end(self, connection: Connection, problem: str) -> None:
        if self._unpoll(connection):
            self._received.append(Incoming(connection, None, problem))

    def _place(self, header: bytes, size_bytes: int) -> Buffer | memoryview | None:
        self._is_large = self._is_large or size_bytes > _LARGE_BYTES
        return None if self.place is None else self.place(header, size_bytes)

    def _read(self, connection: Connection) -> None:
        while not self._closing.is_set():
            try:
                for frame in receive_all(connection, timeout_s=_POLL_S, place=self.place):
                    self.put(Incoming(connection, frame))
            except DeadlineExceeded:
                continue
            except PeerError as error:
                self.put(Incoming(connection, None, str(error)))
                return
            except MemoryError:  # the connection ends, and the peer repeats the frame over a new one
                self.put(Incoming(connection, None, _NO_MEMORY))
                return

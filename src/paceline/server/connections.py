"""The connections of a server: incoming frames, send queues to workers and other servers, and the load of both.

The server's thread reads connections itself, and reader threads those with large bodies. Busy time and bytes go to the
trace, from which shares of servers are planned.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import msgspec

from paceline.core.messages import Clock, Delivered, Fetched, Held, Ticked
from paceline.core.work_queue import Life
from paceline.errors import DeadlineExceeded, PeerError
from paceline.observe.resources import SAMPLE_INTERVAL_S, ProcessSamples, ResourceUsage
from paceline.observe.row_counts import RowCounts
from paceline.observe.trace import ArrivedRecord, Load, Serving, Trace
from paceline.observe.traffic import Traffic
from paceline.server.readers import ReaderService
from paceline.transport.base import EMPTY, AllocateBody, Connection, Frame, Listener, Transport
from paceline.transport.buffer_pool import Buffer
from paceline.transport.buffers import LentBody
from paceline.transport.deadline import Deadline
from paceline.transport.poller import Poller, receive_all
from paceline.wire.connection import LARGE_BYTES, SMALL_IN_A_ROW, LargeBodies
from paceline.wire.messages import (
    EarlyValues,
    FactoredPush,
    FetchedRest,
    Hello,
    PushFrame,
    PushPiece,
    RowPushFrame,
    StepFrame,
    check_caller,
    check_sender,
    check_server,
    decode,
    encode,
)
from paceline.wire.send_queue import SendHold, SendQueue

_CARRIED_INTERVAL_S = 1.0  # between two records of the bytes by worker and table
_POLL_S = 0.5  # between two looks at all connections: whether a peer is silent
_NO_MEMORY = "this machine has no memory for a frame"
# What a reader thread has read and the server's thread has yet to take: so many frames, of which a large one counts
# as several.
MOST_AHEAD = 64
LARGE_COUNTS = 8


class Incoming(msgspec.Struct, frozen=True):
    """A frame for the server's thread, or the end of a connection (frame is None).

    `note_taken` is called once that thread has it.
    """

    connection: Connection
    frame: Frame | None
    problem: str = ""
    note_taken: Callable[[], None] | None = None


def said_by(item: object, num_servers: int) -> tuple[Life, object] | None:
    """Return sender and message of an item of the queue, if it is one that its sender may say."""
    if not isinstance(item, Incoming) or item.frame is None:
        return None
    try:
        hello = check_caller(decode(item.connection.identity), item.connection)
        message = decode(item.frame.header)
        check_sender(hello, message, num_servers)
    except PeerError:
        return None
    return (hello.rank, hello.incarnation), message


class Expel(msgspec.Struct, frozen=True):
    """Certificates with these holders or serial numbers were revoked: an item of the queue.

    `connections`: those that had one, which are closed already.
    """

    names: frozenset[str]
    connections: tuple[Connection, ...]


class Stop(msgspec.Struct, frozen=True):
    """End the server's loop: an item of the queue."""


class _OnlySmall(msgspec.Struct, frozen=True):
    """A reader thread has ended, as bodies are small again: an item of the queue, after the frames that it has read."""

    connection: Connection


@dataclass(slots=True)
class Acceptor:
    """Accepts connections and gives their frames to one thread, the one that calls `get`.

    That thread reads the connections itself while it has nothing else to do, so no thread has to wake it. A connection
    that brings large bodies, or cannot be waited for together with others, gets a reader thread. `readers` serves those
    that only read what is published. `close` ends all threads and connections.
    """

    listener: Listener
    place: AllocateBody | None = None  # allocates memory for bodies that the transport copies
    readers: ReaderService | None = None
    # Its length is bounded by what each reader thread may put into it before some of that is taken, see `_read`.
    _queue: SimpleQueue[object] = field(default_factory=SimpleQueue[object])
    _received: deque[Incoming] = field(default_factory=deque[Incoming])  # by the thread that calls `get`
    _has_looked: bool = False  # whether frames have arrived, since the last item of the queue
    _connections: dict[int, Connection] = field(default_factory=dict[int, Connection])
    _polled: tuple[Connection, ...] = ()  # the connections without a reader thread; replaced when they change
    _poller: Poller = field(default_factory=Poller)
    _looked_s: float = 0.0
    _large: LargeBodies = field(default_factory=LargeBodies)  # of what is being received here
    _expelled: Collection[str] = frozenset()
    _accepting: threading.Thread | None = None
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
                item = self._queue.get_nowait()
                if isinstance(item, Incoming) and item.note_taken is not None:
                    item.note_taken()
                if not isinstance(item, _OnlySmall):
                    return item
                self._read_here(item.connection)
                continue
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
        if self._accepting is not None:
            self._accepting.join(timeout=5.0)  # first: it may hold a connection that is not registered yet
        if self.readers is not None:
            self.readers.close()
        with self._lock:
            connections, threads = list(self._connections.values()), list(self._threads)
        for connection in connections:
            connection.close()
        for thread in threads:
            thread.join(timeout=5.0)
        self._poller.close()
        self._queue = SimpleQueue()  # frames in the old one keep workers' memory
        self._received.clear()

    def connections(self) -> list[Connection]:
        """Return the connections that have not ended."""
        with self._lock:
            return list(self._connections.values())

    def expel(self, names: frozenset[str]) -> None:
        """End connections whose certificate has one of these holders or serial numbers, and refuse others; any thread.

        Also while the thread that calls `get` is busy: `Expel` tells it later. `names` are all revoked ones, and
        replace earlier ones.
        """
        if self.readers is not None:
            self.readers.expel(names)
        with self._lock:
            self._expelled = names
            found = [each for each in self._connections.values() if each.peer_identity.are_among(names)]
        for connection in found:
            connection.close()
        self.put(Expel(names, tuple(found)))

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
        if self.readers is not None and self.readers.take(connection):
            return
        is_polled = connection.fileno() is not None
        with self._lock:
            revoked = connection.peer_identity.are_among(self._expelled)  # since its handshake
            is_late = revoked or self._closing.is_set()  # `close` does not see what comes to it from here on
            if not is_late:
                self._connections[id(connection)] = connection
            if not is_late and is_polled:
                self._polled = (*self._polled, connection)
        if is_late:
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
        self._large.num_left = 0
        try:
            for frame in receive_all(connection, timeout_s=0.0, place=partial(self._place, self._large)):
                self._received.append(Incoming(connection, frame))
        except DeadlineExceeded:
            pass
        except PeerError as error:
            self._end(connection, str(error))
        except MemoryError:  # the connection ends, and the peer repeats the frame over a new one
            self._end(connection, _NO_MEMORY)
        if self._large.num_left and self._unpoll(connection):
            self._start_reader(connection)

    def _end(self, connection: Connection, problem: str) -> None:
        if self._unpoll(connection):
            self._received.append(Incoming(connection, None, problem))

    def _read_here(self, connection: Connection) -> None:
        """Have the thread that calls `get` read a connection again, unless that was dropped meanwhile."""
        with self._lock:
            is_open = id(connection) in self._connections
            if is_open:
                self._polled = (*self._polled, connection)
        if not is_open:
            self._received.append(Incoming(connection, None, "it was closed here"))

    def _place(self, large: LargeBodies, header: bytes, size_bytes: int) -> Buffer | memoryview | None:
        large.note_body(size_bytes)
        return None if self.place is None else self.place(header, size_bytes)

    def _read(self, connection: Connection) -> None:
        large, room = LargeBodies(SMALL_IN_A_ROW), threading.Semaphore(MOST_AHEAD)
        while not self._closing.is_set():
            try:
                frames = receive_all(connection, timeout_s=_POLL_S, place=partial(self._place, large))
                for frame in frames:
                    num = LARGE_COUNTS if frame.body.nbytes > LARGE_BYTES else 1
                    self._wait_for_room(room, num)
                    self.put(Incoming(connection, frame, note_taken=partial(room.release, num)))
                large.note_frames(len(frames))
                if not large.num_left and connection.fileno() is not None:
                    self.put(_OnlySmall(connection))
                    return
            except DeadlineExceeded:
                continue
            except PeerError as error:
                self.put(Incoming(connection, None, str(error)))
                return
            except MemoryError:  # the connection ends, and the peer repeats the frame over a new one
                self.put(Incoming(connection, None, _NO_MEMORY))
                return

    def _wait_for_room(self, room: threading.Semaphore, num: int) -> None:
        """Block until so much of what was read before is taken, or all of this ends."""
        for _ in range(num):
            while not room.acquire(timeout=_POLL_S) and not self._closing.is_set():
                pass


_URGENT = Held | Ticked  # a clock cannot complete before a worker has received these
_CONNECT_TIMEOUT_S = 5.0


def _table_of(message: object) -> str:
    """Return the table whose values travel with a message to a worker; an empty text if there is none."""
    match message:
        case Fetched() | Delivered() | EarlyValues():
            return message.table
        case FetchedRest():
            return message.fetched.table
        case _:
            return ""


@dataclass(slots=True)
class Connections:
    """Connections by peer.

    A message to a peer that is not connected is dropped: the process that needs an answer repeats its message.
    `may_send`, if there is one, is called with each before it leaves, and may block; False drops it.
    """

    server: int
    generation: int
    transport: Transport
    addresses: Callable[[], tuple[str, ...]]
    drop: Callable[[Connection], None]
    may_send: Callable[[object], bool] | None = None
    hold: SendHold = field(default_factory=SendHold)  # gathers small frames that are sent while it is entered
    sent_bytes: int = 0  # in bodies, to workers
    traffic: Traffic = field(default_factory=Traffic)  # the same, by worker and table
    # By (rank, incarnation): the number of the newest connection, and its send queue.
    _workers: dict[tuple[int, int], tuple[int, SendQueue]] = field(
        default_factory=dict[tuple[int, int], tuple[int, SendQueue]]
    )
    _servers: dict[int, SendQueue] = field(default_factory=dict[int, SendQueue])
    _heard: dict[int, Connection] = field(default_factory=dict[int, Connection])  # the newest that a server has made

    def register(self, hello: Hello, connection: Connection) -> None:
        """Use this connection to reach a worker, unless a newer one is known."""
        life = hello.rank, hello.incarnation
        newest, known = self._workers.get(life, (-1, None))
        if hello.connection < newest or (known is not None and known.connection is connection):
            return
        if known is not None:
            known.close()
        # Mapped memory is sent as a reference, and does not change until the worker has read it.
        copies = not self.transport.maps_memory
        queue = SendQueue(connection, lambda: self.drop(connection), bounded=True, copies=copies, hold=self.hold)
        self._workers[life] = hello.connection, queue

    def is_current(self, hello: Hello, connection: Connection) -> bool:
        """Return whether this is the newest connection to its worker."""
        return hello.role == "worker" and self.connection_of(hello.rank, hello.incarnation) is connection

    def connection_of(self, worker: int, incarnation: int) -> Connection | None:
        """Return the newest connection to this incarnation of a worker, None if it is not connected."""
        _, queue = self._workers.get((worker, incarnation), (0, None))
        return None if queue is None else queue.connection

    def forget(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        over = [life for life, (_, queue) in self._workers.items() if queue.connection is connection]
        for life in over:
            self._workers.pop(life)[1].close()

    def send_worker(
        self,
        worker: int,
        incarnation: int,
        message: object,
        body: memoryview = EMPTY,
        lent: LentBody | None = None,
    ) -> None:
        """Queue a message for this incarnation of a worker; a large body that does not fit its queue is left out.

        A body that has to wait is copied unless it is `lent`, so `body` may change as soon as this returns; memory that
        the transport maps may not.
        """
        _, queue = self._workers.get((worker, incarnation), (0, None))
        if queue is not None and (self.may_send is None or self.may_send(message)):
            if body:
                self.sent_bytes += len(body)
                self.traffic.sent_to[worker] += len(body)
                self.traffic.sent_of[_table_of(message)] += len(body)
            urgent, owed = isinstance(message, _URGENT), message.table if isinstance(message, Delivered) else ""
            queue.send(encode(message), body, urgent=urgent, owed=owed, lent=lent)

    def send_server(self, server: int, message: object) -> None:
        """Queue a message for another server; connects when first needed. Dropped if the server cannot be reached."""
        if self.may_send is not None and not self.may_send(message):
            return
        queue = self._servers.get(server)
        if queue is None or queue.is_over:
            try:
                queue = self._connect(server)
            except PeerError:
                return
        queue.send(encode(message))

    def note_heard(self, server: int, connection: Connection) -> None:
        """Connect anew to a server that has: another process may be in its place, which our connection misses."""
        before, self._heard[server] = self._heard.get(server), connection
        if before is not None and before is not connection and server in self._servers:
            self._servers.pop(server).close()

    def expel(self, names: frozenset[str]) -> None:
        """Close connections to servers whose certificate has one of these holders or serial numbers."""
        for server in [
            rank for rank, known in self._servers.items() if known.connection.peer_identity.are_among(names)
        ]:
            self._servers.pop(server).close()

    def close(self) -> None:
        """Close all connections."""
        for _, queue in self._workers.values():
            queue.close()
        self._workers.clear()
        for queue in self._servers.values():
            queue.close()
        self._servers.clear()
        self._heard.clear()

    def _connect(self, server: int) -> SendQueue:
        identity = encode(Hello("server", self.server, 0, self.generation))
        connection = self.transport.connect(self.addresses()[server], identity, timeout_s=_CONNECT_TIMEOUT_S)
        check_server(connection, server)
        queue = self._servers[server] = SendQueue(connection, connection.close, bounded=True, hold=self.hold)
        return queue


@dataclass(slots=True)
class LoadMeter:
    """Counts the time in which the server's thread does not wait, and the bytes that arrive, and records both.

    Args:
        server: its rank.
        trace: gets the totals while the server works, and at its end.
        peers: count the bytes that are sent.
        acceptor: has the frames that wait for the server's thread.
        num_behind: returns by how many clocks the server's replica lags; None without one.
        now: a monotonic clock.
    """

    server: int
    trace: Trace
    peers: Connections
    acceptor: Acceptor
    num_behind: Callable[[], int | None] = lambda: None
    now: Callable[[], float] = time.monotonic
    _resources: ResourceUsage = field(default_factory=ResourceUsage)
    _process: ProcessSamples = field(init=False)
    _rows: RowCounts = field(default_factory=RowCounts)
    # Times of the first and the last item, and the idle time between them.
    _first_t: float | None = None
    _last_t: float = 0.0
    _idle_s: float = 0.0
    _received_bytes: int = 0
    _due_t: float = 0.0
    _carried_due_t: float = 0.0

    def __post_init__(self) -> None:
        """Count nothing yet."""
        self._process = ProcessSamples(self.trace, "server", self.server, self._resources)

    def wait(self, get: Callable[[], object | None]) -> object | None:
        """Return the next item; blocks as `get` does, and counts that as idle."""
        began_t = self.now()
        item = get()
        if not isinstance(item, Incoming):
            return item
        now = self._last_t = self.now()
        if self._first_t is None:
            self._first_t = now
        else:
            self._idle_s += now - began_t
        self._received_bytes += 0 if item.frame is None else len(item.frame.body)
        if now >= self._due_t and self.trace.is_kept:
            self._record_serving(now)
        return item

    def note_message(self, worker: int, message: object, body: memoryview) -> None:
        """Record when a worker's clock comes to its end here, count its bytes, and sample which rows are pushed."""
        if body:
            self.peers.traffic.note_received(worker, len(body))
        if isinstance(message, StepFrame):
            if message.ends >= 0:
                self.trace.record(ArrivedRecord(self.now(), self.server, worker, message.ends - 1))
            for push, part in zip(message.all_pushes, message.bodies(body), strict=True):
                self._note_push(push, part)
        elif isinstance(message, Clock):
            self.trace.record(ArrivedRecord(self.now(), self.server, worker, message.clock - 1))
        elif isinstance(message, PushFrame | RowPushFrame):
            self._note_push(message, body)
        elif isinstance(message, PushPiece | FactoredPush):
            self._note_push(message.push, body)

    def _note_push(self, message: PushFrame | RowPushFrame, body: memoryview) -> None:
        self.peers.traffic.note_pushed(message.push.table, len(body))
        if isinstance(message, RowPushFrame) and message.keys.sent:
            self._rows.note(message.push.table, body, message.keys.num, self.now())

    def sample(self) -> None:
        """Read the byte counts of connections before one of them closes."""
        self._resources.sample()

    def close(self) -> None:
        """Write the totals to the trace, unless nothing ever arrived."""
        self._process.close()
        if self._first_t is not None:
            self.trace.record(self.peers.traffic.carried(self.now(), self.server))
            usage = self._resources.usage()
            in_use_s = self._last_t - self._first_t
            sending_s = 0.0 if usage is None else usage.sending_s
            busy_s, sent_bytes = in_use_s - self._idle_s, self.peers.sent_bytes
            self.trace.record(
                Load(self.now(), self.server, in_use_s, busy_s, sending_s, self._received_bytes, sent_bytes)
            )

    def _record_serving(self, now: float) -> None:
        self._due_t = now + SAMPLE_INTERVAL_S
        in_use_s = now - (self._first_t or now)
        self.trace.record(
            Serving(
                now,
                self.server,
                in_use_s,
                in_use_s - self._idle_s,
                self._received_bytes,
                self.peers.sent_bytes,
                self.acceptor.num_waiting(),
                self._rows.hottest(),
                self.num_behind(),
            )
        )
        if now >= self._carried_due_t:
            self._carried_due_t = now + _CARRIED_INTERVAL_S
            self.trace.record(self.peers.traffic.carried(now, self.server))
        self._process.sample(now)

"""Data server: one thread receives requests, one makes batches, and one for each worker sends them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import msgspec
import numpy as np

from paceline.data.service.buffer_pool import BatchBuffers, LendingLimit, LentPiece
from paceline.data.service.messages import (
    INDEX_BYTES,
    MAX_RECIPE_BYTES,
    MAX_SAMPLES,
    MAX_UNANSWERED,
    BatchAnswer,
    BatchFailed,
    OpenSource,
    ReadBatches,
    SourceOpened,
    decode,
    encode,
)
from paceline.data.service.source_cache import (
    MAX_OPEN_BY_WORKER,
    USER_CODE_ERRORS,
    CachedSource,
    RecipeOpener,
    SourceCache,
)
from paceline.data.sources.batch import BatchRequest, require_served
from paceline.data.sources.records import open_recipe
from paceline.errors import DataError, PeerError, ProtocolBug, UsageError
from paceline.observe.trace import Fed, Refusal, Trace
from paceline.server.connections import Acceptor, Expel, Incoming, Stop
from paceline.transport.base import EMPTY, Connection, Limits, Listener, Transport
from paceline.transport.deadline import Deadline
from paceline.wire.malformed import describe_error
from paceline.wire.messages import Hello, check_caller
from paceline.wire.messages import decode as decode_hello
from paceline.wire.send_queue import SendQueue

_MOST_WAITING: Final = 2  # one that is being sent, and the next one


@dataclass(slots=True, eq=False)
class ReaderConnection:
    """State of one worker's connection; it ends with the connection.

    Args:
        on_room: called, on any thread, whenever an answer has been sent.
    """

    hello: Hello
    send_queue: SendQueue
    batch_buffers: BatchBuffers
    on_room: Callable[[], None]
    sources: dict[int, CachedSource] = field(default_factory=dict[int, CachedSource])  # by number
    num_asked: int = 0
    _num_sent: int = 0  # written by the sending thread alone

    @property
    def has_room(self) -> bool:
        """Whether there is room for another batch of this worker."""
        return self.send_queue.num_waiting < _MOST_WAITING

    def answer(self, header: bytes, piece: LentPiece | None = None) -> None:
        """Send an answer, with a batch if there is one; does not block. May be called on any thread."""
        self.send_queue.send(header, EMPTY if piece is None else piece.memory, on_sent=partial(self._note_sent, piece))

    def _note_sent(self, piece: LentPiece | None) -> None:
        self._num_sent += 1
        if piece is not None:
            self.batch_buffers.on_sent(piece)
        self.on_room()

    def count_request(self) -> None:
        """Count a request; raises PeerError when too many are unanswered."""
        self.num_asked += 1  # each gets exactly one answer
        if self.num_asked - self._num_sent > MAX_UNANSWERED:
            raise PeerError(f"a worker has more than {MAX_UNANSWERED} unanswered requests")

    def close(self) -> None:
        """End the connection and its thread, and free its buffers."""
        self.send_queue.close()
        self.batch_buffers.clear()


def accept_reader(
    connection: Connection,
    generation: int,
    num_workers: int | None,
    on_room: Callable[[], None],
    batch_buffers: BatchBuffers,
) -> ReaderConnection:
    """Return the state of a new connection; raises PeerError unless it is from a worker of this job."""
    hello = check_caller(decode_hello(connection.identity), connection)
    if hello.role != "worker":
        raise PeerError(f"a {hello.role} may not read from a data server")
    if hello.generation != generation:
        raise PeerError(f"worker {hello.rank} is of generation {hello.generation} of the job, expected {generation}")
    if hello.rank < 0 or (num_workers is not None and hello.rank >= num_workers):
        raise PeerError(f"worker {hello.rank} is not in this job, which has {num_workers} workers")
    reader = ReaderConnection(hello, SendQueue(connection, connection.close), batch_buffers, on_room)
    reader.send_queue.open()
    return reader


MAX_WAITING: Final = 1 << 24  # samples in the waiting requests of one worker

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


class QueuedRead(msgspec.Struct, frozen=True, eq=False):
    """A worker's request for a batch."""

    reader: ReaderConnection
    number: int
    source: CachedSource
    epoch: int
    indices: Indices

    def batch_request(self) -> BatchRequest:
        """Return the batch request; made on demand, as it takes more memory than the indices."""
        return BatchRequest(self.epoch, tuple(self.indices.tolist()))


@dataclass(slots=True)
class FairQueue:
    """Batch requests by worker, served in turn. Safe to use from several threads."""

    # By rank, the longest-waiting worker first. Invariant: no queue is empty.
    _waiting: dict[int, deque[QueuedRead]] = field(default_factory=dict[int, deque[QueuedRead]])
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def put(self, queued: QueuedRead, *, urgent: bool) -> None:
        """Add a request; an urgent one goes before the others of its worker.

        Raises:
            PeerError: the worker has more requests waiting than the queue holds.
        """
        with self._changed:
            queue = self._waiting.setdefault(queued.reader.hello.rank, deque())
            if sum(other.indices.size for other in queue) > MAX_WAITING:
                raise PeerError(f"a worker waits for more than {MAX_WAITING} samples")
            queue.appendleft(queued) if urgent else queue.append(queued)
            self._changed.notify_all()

    def get(self) -> QueuedRead | None:
        """Wait for the next request whose worker has room in its send queue; None once closed."""
        with self._changed:
            while not self._closed:
                queued = self._next()
                if queued is not None:
                    return queued
                self._changed.wait()
            return None

    def wake(self) -> None:
        """Wake `get`, because a send queue may have room."""
        with self._changed:
            self._changed.notify_all()

    def forget(self, reader: ReaderConnection) -> None:
        """Drop the requests of a connection that has ended."""
        with self._changed:
            rank = reader.hello.rank
            left = deque(queued for queued in self._waiting.pop(rank, ()) if queued.reader is not reader)
            if left:
                self._waiting[rank] = left

    def close(self) -> None:
        """Drop all requests and wake `get`."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _next(self) -> QueuedRead | None:
        for rank, queue in self._waiting.items():
            queued = next((queued for queued in queue if queued.reader.has_room), None)
            if queued is not None:
                queue.remove(queued)
                del self._waiting[rank]
                if queue:
                    self._waiting[rank] = queue  # at the end, behind the other workers
                return queued
        return None


_MAX_HEADER_BYTES: Final = Limits().max_header_bytes


@dataclass(slots=True)
class BatchBuilder:
    """Makes the batches that are next in the queue, straight into their send buffers.

    An error in a batch is the answer to its request, and affects no other.
    """

    queue: FairQueue
    max_batch_bytes: int
    now: Callable[[], float] = time.monotonic
    num_batches: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0

    def run(self) -> None:
        """Make batches until the queue is closed."""
        while self._serve_next():
            pass

    def record(self, server: int) -> Fed:
        """Return the totals so far."""
        counts = self.num_batches, self.num_samples, self.num_skipped, self.num_bytes
        return Fed(self.now(), server, *counts, self.busy_s)

    def _serve_next(self) -> bool:
        queued = self.queue.get()
        if queued is None:
            return False
        began_t = self.now()
        self._answer(queued)
        self.busy_s += self.now() - began_t
        return True

    def _answer(self, queued: QueuedRead) -> None:
        reader = queued.reader
        pieces: list[LentPiece] = []
        try:
            with queued.source.lock:
                answer = self._make(queued, pieces)
            header = encode(answer)
            if len(header) > _MAX_HEADER_BYTES:
                raise UsageError("a batch is of too many parts to be described in one message")
        except USER_CODE_ERRORS as error:
            for piece in pieces:
                reader.batch_buffers.drop(piece)
            reader.answer(encode(BatchFailed.of(queued.number, error, describe_error(error))))
            return
        self._count(answer, pieces[0])
        reader.answer(header, pieces[0])

    def _make(self, queued: QueuedRead, pieces: list[LentPiece]) -> BatchAnswer:
        """Make a batch in a buffer, which is appended to `pieces`."""
        records = queued.source.records
        if records is None:
            raise DataError("the source was closed here in the meantime")
        prepared = records.prepare(queued.batch_request(), self.max_batch_bytes)
        require_served(queued.indices.size, prepared.size_bytes, self.max_batch_bytes)
        pieces.append(queued.reader.batch_buffers.allocate(prepared.size_bytes))
        prepared.fill(pieces[0].memory)
        reasons = records.skipped().reasons if prepared.layout.num_skipped else ()
        return BatchAnswer(queued.number, pieces[0].lent_buffer, prepared.layout, reasons)

    def _count(self, answer: BatchAnswer, piece: LentPiece) -> None:
        self.num_batches += 1
        self.num_samples += answer.layout.num_samples
        self.num_skipped += answer.layout.num_skipped
        self.num_bytes += piece.memory.nbytes


_MAX_CONNECTIONS: Final = 64  # of one worker
_SMALL_BYTES: Final = 64 << 10
_CLOSING_TIMEOUT_S: Final = 2.0  # for user code that is running; `stop` waits no longer


class _SourceSettled(msgspec.Struct, frozen=True):
    """Event: a recipe has been opened, or could not be."""

    source: CachedSource


class _BuilderEnded(msgspec.Struct, frozen=True):
    """Event: the thread of the batch builder has ended."""


@dataclass(slots=True)
class DataServer:
    """One data server of a job. `run` blocks until `stop` is called from another thread.

    It is stateless: a batch is a function of the recipe and of the request, and the assignment of samples to workers is
    made elsewhere. So it may be killed at any time, and any other data server makes the same batches.

    Args:
        rank: among the data servers.
        listener: where workers connect to.
        transport: that of the listener.
        generation: of the job, as in the hello of its workers.
        allowed_paths: limits which datasets and transforms may be imported by path; None allows all.
        trace: records refused workers, and the totals of the work at the end.
        open_records: opens a recipe.
        max_batch_bytes: larger batches are refused.
        checks_memory: overwrites buffers that become free, so that late reads of them are noticed.
        num_workers: of the job, which has no others; None if not known.

    Raises:
        ProtocolBug: by `run`; the thread that makes batches has failed.
    """

    rank: int
    listener: Listener
    transport: Transport
    generation: int
    allowed_paths: AbstractSet[str] | None = None
    trace: Trace = field(default_factory=lambda: Trace(None))
    open_records: RecipeOpener = open_recipe
    max_batch_bytes: int = 2 << 30
    checks_memory: bool = False
    num_workers: int | None = None
    _acceptor: Acceptor = field(init=False)
    _source_cache: SourceCache = field(init=False)
    _queue: FairQueue = field(default_factory=FairQueue)
    _builder: BatchBuilder = field(init=False)
    # By the id of their connection.
    _readers: dict[int, ReaderConnection] = field(default_factory=dict[int, ReaderConnection])
    _limit: LendingLimit = field(default_factory=LendingLimit)  # for the lent buffers of all of them

    def __post_init__(self) -> None:
        """Make the acceptor, the source cache and the batch builder."""
        self._acceptor = Acceptor(self.listener, _place)
        self._source_cache = SourceCache(
            self.open_records, self.allowed_paths, lambda source: self._acceptor.put(_SourceSettled(source))
        )
        self._builder = BatchBuilder(self._queue, self.max_batch_bytes)

    def run(self) -> None:
        """Serve until `stop`; all connections, threads, files and shared memory are gone afterwards."""
        thread = threading.Thread(target=self._make, name="paceline-make", daemon=True)
        self._acceptor.open()
        thread.start()
        try:
            while True:
                item = self._acceptor.get(None)
                if isinstance(item, Stop):
                    return
                if isinstance(item, Incoming):
                    self._handle(item)
                elif isinstance(item, _SourceSettled):
                    self._source_cache.settle(item.source)
                elif isinstance(item, Expel):
                    self._expel(item)
                elif isinstance(item, _BuilderEnded):
                    raise ProtocolBug(
                        f"data server {self.rank}: the thread that makes batches has failed; its traceback is above"
                    )
        finally:
            self._close(thread)

    def stop(self) -> None:
        """Make `run` return; may be called from any thread."""
        self._acceptor.put(Stop())

    def expel(self, names: frozenset[str]) -> None:
        """End the connections whose certificate has one of these subjects or serial numbers, from any thread."""
        self._acceptor.expel(names)

    def _make(self) -> None:
        try:
            self._builder.run()
        finally:
            self._acceptor.put(_BuilderEnded())

    def _close(self, thread: threading.Thread) -> None:
        self._queue.close()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._acceptor.close()
        deadline = Deadline.after(_CLOSING_TIMEOUT_S)
        thread.join(deadline.remaining_s())
        self._source_cache.close(deadline)
        self.trace.record(self._builder.record(self.rank))
        self.trace.close()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _handle(self, item: Incoming) -> None:
        """Handle a frame; a worker that violates the protocol loses its connection, without effect on others."""
        connection = item.connection
        try:
            if item.frame is None:
                self._forget(connection)
                return
            reader = self._readers.get(id(connection)) or self._accept(connection)
            if reader is not None:
                self._dispatch(reader, decode(item.frame.header), item.frame.body)
        except PeerError as error:
            self.trace.record(Refusal(time.monotonic(), self.rank, -1, "", f"{connection.peer}: {error}"))
            self._forget(connection)

    def _accept(self, connection: Connection) -> ReaderConnection | None:
        """Register the worker of a new connection; None for a frame that came before the connection was ended here."""
        if all(known is not connection for known in self._acceptor.connections()):
            return None
        reader = accept_reader(
            connection,
            self.generation,
            self.num_workers,
            self._queue.wake,
            BatchBuffers(self.transport, self._limit, self.checks_memory),
        )
        self._readers[id(connection)] = reader
        rank = reader.hello.rank
        if sum(other.hello.rank == rank for other in self._readers.values()) > _MAX_CONNECTIONS:
            raise PeerError(f"worker {rank} makes more than {_MAX_CONNECTIONS} connections")
        return reader

    def _dispatch(self, reader: ReaderConnection, message: object, body: memoryview) -> None:
        if isinstance(message, ReadBatches):
            reader.count_request()
            self._on_read(reader, message, body)
        elif isinstance(message, OpenSource):
            reader.count_request()
            self._on_open(reader, message, body)
        else:
            raise PeerError(f"a worker may not send {type(message).__name__}")

    def _on_open(self, reader: ReaderConnection, message: OpenSource, body: memoryview) -> None:
        if message.number in reader.sources or len(reader.sources) >= MAX_OPEN_BY_WORKER:
            raise PeerError(f"a connection opens more than {MAX_OPEN_BY_WORKER} sources, or one under a number twice")
        if body.nbytes > MAX_RECIPE_BYTES:
            raise PeerError(f"a recipe has {body.nbytes} bytes, expected at most {MAX_RECIPE_BYTES}")
        answer = partial(_answer_open, reader, message.number)
        try:
            reader.sources[message.number] = self._source_cache.open(bytes(body), reader.hello.rank, answer)
        except UsageError as error:
            reader.answer(encode(BatchFailed.of(message.number, error, describe_error(error))))

    def _on_read(self, reader: ReaderConnection, message: ReadBatches, body: memoryview) -> None:
        for lent_buffer in message.returned:
            if not reader.batch_buffers.release(lent_buffer):
                raise PeerError(f"a worker returns buffer {lent_buffer}, which is not lent to it")
        source = reader.sources.get(message.source)
        if source is None or not source.settled or source.problem is not None:
            raise PeerError(f"a worker reads source {message.source}, which is not open")
        indices = _indices(message, body)
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < source.num_samples:
            text = f"a batch has an index outside of the {source.num_samples} samples of the source"
            reader.answer(encode(BatchFailed.of(message.number, UsageError(text), text)))
            return
        self._queue.put(QueuedRead(reader, message.number, source, message.epoch, indices), urgent=message.urgent)

    def _forget(self, connection: Connection) -> None:
        """Free everything that belongs to a connection."""
        reader = self._readers.pop(id(connection), None)
        self._acceptor.drop(connection)
        if reader is None:
            return
        self._queue.forget(reader)
        reader.close()
        for source in reader.sources.values():
            self._source_cache.leave(source, reader.hello.rank)

    def _expel(self, order: Expel) -> None:
        for connection in order.connections:
            self._forget(connection)


def _answer_open(reader: ReaderConnection, number: int, source: CachedSource) -> None:
    if source.problem is None:
        answer = encode(SourceOpened(number, source.num_samples, source.fingerprint))
    else:
        answer = encode(BatchFailed.of(number, source.problem, describe_error(source.problem)))
    reader.answer(answer)


def _place(header: bytes, size_bytes: int) -> None:
    """Leave the place of bodies to the transport; raises PeerError for an invalid size, before memory is allocated."""
    if size_bytes > _SMALL_BYTES:
        message = decode(header)
        is_batch = (
            isinstance(message, ReadBatches) and size_bytes == message.num * INDEX_BYTES and message.num <= MAX_SAMPLES
        )
        if not is_batch and not (isinstance(message, OpenSource) and size_bytes <= MAX_RECIPE_BYTES):
            raise PeerError(f"a {type(message).__name__} came with {size_bytes} bytes")


def _indices(message: ReadBatches, body: memoryview) -> Indices:
    """Return the requested samples, in private memory that the worker cannot change."""
    if not 0 <= message.num <= MAX_SAMPLES or body.nbytes != message.num * INDEX_BYTES:
        raise PeerError(f"a batch of {message.num} samples came with {body.nbytes} bytes of indices")
    return np.frombuffer(bytes(body), dtype=np.int64)

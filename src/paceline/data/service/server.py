"""Data server: one thread receives requests, one makes batches, and one for each worker sends them."""

from __future__ import annotations

import threading
import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from paceline.data.service.batch_builder import BatchBuilder
from paceline.data.service.buffer_pool import BatchBuffers, LendingLimit
from paceline.data.service.callers import Caller, accept_caller
from paceline.data.service.fair_queue import FairQueue, Indices, WorkerTurn
from paceline.data.service.messages import (
    INDEX_BYTES,
    MAX_RECIPE_BYTES,
    MAX_SAMPLES,
    BatchFailed,
    OpenSource,
    ReadBatches,
    SourceOpened,
    decode,
    encode,
)
from paceline.data.service.send_queue import ServiceAnswer
from paceline.data.service.source_cache import MAX_OPEN_BY_WORKER, CachedSource, OpenRecords, SourceCache
from paceline.data.sources.records import open_recipe
from paceline.errors import PeerError, ProtocolBug, UsageError
from paceline.observe.trace import Refusal, Trace
from paceline.server.acceptor import Acceptor, Expel, Incoming, Stop
from paceline.transport.base import Connection, Listener, Transport
from paceline.transport.deadline import Deadline
from paceline.wire.malformed import story

_MAX_CONNECTIONS: Final = 64  # of one worker
_SMALL_BYTES: Final = 64 << 10
_CLOSING_TIMEOUT_S: Final = 2.0  # for user code that is running; `stop` waits no longer


@dataclass(frozen=True, slots=True)
class _SourceSettled:
    """Event: a recipe has been opened, or could not be."""

    source: CachedSource


@dataclass(frozen=True, slots=True)
class _BuilderEnded:
    """Event: the thread that makes batches has ended."""


@dataclass(slots=True)
class FeedNode:
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
        max_batch_bytes: a larger batch is refused.
        checks_memory: overwrite buffers that become free, so that late reads of them show.
        num_workers: of the job: others are refused; None where that is not known.

    Raises:
        ProtocolBug: by `run`; the thread that makes batches has failed.
    """

    rank: int
    listener: Listener
    transport: Transport
    generation: int
    allowed_paths: AbstractSet[str] | None = None
    trace: Trace = field(default_factory=lambda: Trace(None))
    open_records: OpenRecords = open_recipe
    max_batch_bytes: int = 2 << 30
    checks_memory: bool = False
    num_workers: int | None = None
    _acceptor: Acceptor = field(init=False)
    _source_cache: SourceCache = field(init=False)
    _queue: FairQueue = field(default_factory=FairQueue)
    _builder: BatchBuilder = field(init=False)
    _callers: dict[int, Caller] = field(default_factory=dict[int, Caller])  # by the id of their connection
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
        self._acceptor.put(Expel(names))

    def _make(self) -> None:
        try:
            self._builder.run()
        finally:
            self._acceptor.put(_BuilderEnded())

    def _close(self, thread: threading.Thread) -> None:
        self._queue.close()
        for caller in self._callers.values():
            caller.close()
        self._callers.clear()
        self._acceptor.close()
        deadline = Deadline.after(_CLOSING_TIMEOUT_S)
        thread.join(deadline.remaining_s())
        self._source_cache.close(deadline)
        self.trace.record(self._builder.record(self.rank))
        self.trace.close()

    # -- taking in ---------------------------------------------------------------------------------------------------

    def _handle(self, item: Incoming) -> None:
        """Handle a frame; a worker that violates the protocol loses its connection, without effect on others."""
        connection = item.connection
        try:
            if item.frame is None:
                self._forget(connection)
                return
            caller = self._callers.get(id(connection)) or self._meet(connection)
            if caller is not None:
                self._dispatch(caller, decode(item.frame.header), item.frame.body)
        except PeerError as error:
            self.trace.record(Refusal(time.monotonic(), self.rank, -1, "", f"{connection.peer}: {error}"))
            self._forget(connection)

    def _meet(self, connection: Connection) -> Caller | None:
        """Register the worker of a new connection; None for a frame that came before the connection was ended here."""
        if all(known is not connection for known in self._acceptor.connections()):
            return None
        caller = accept_caller(
            connection,
            self.generation,
            self.num_workers,
            self._queue.wake,
            BatchBuffers(self.transport, self._limit, self.checks_memory),
        )
        self._callers[id(connection)] = caller
        rank = caller.hello.rank
        if sum(other.hello.rank == rank for other in self._callers.values()) > _MAX_CONNECTIONS:
            raise PeerError(f"worker {rank} makes more than {_MAX_CONNECTIONS} connections")
        return caller

    def _dispatch(self, caller: Caller, message: object, body: memoryview) -> None:
        if isinstance(message, ReadBatches):
            caller.count_request()
            self._on_read(caller, message, body)
        elif isinstance(message, OpenSource):
            caller.count_request()
            self._on_open(caller, message, body)
        else:
            raise PeerError(f"a worker may not say {type(message).__name__}")

    def _on_open(self, caller: Caller, message: OpenSource, body: memoryview) -> None:
        if message.number in caller.sources or len(caller.sources) >= MAX_OPEN_BY_WORKER:
            raise PeerError(f"a connection opens more than {MAX_OPEN_BY_WORKER} sources, or one under a number twice")
        if body.nbytes > MAX_RECIPE_BYTES:
            raise PeerError(f"a recipe has {body.nbytes} bytes, expected at most {MAX_RECIPE_BYTES}")
        answer = partial(_answer_open, caller, message.number)
        try:
            caller.sources[message.number] = self._source_cache.open(bytes(body), caller.hello.rank, answer)
        except UsageError as error:
            caller.outbox.put(ServiceAnswer(encode(BatchFailed.of(message.number, error, story(error)))))

    def _on_read(self, caller: Caller, message: ReadBatches, body: memoryview) -> None:
        for lent_buffer in message.returned:
            if not caller.batch_buffers.release(lent_buffer):
                raise PeerError(f"a worker returns loan {lent_buffer}, which it does not have")
        source = caller.sources.get(message.source)
        if source is None or not source.settled or source.problem is not None:
            raise PeerError(f"a worker reads source {message.source}, which it has not been told to be open")
        indices = _indices(message, body)
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < source.num_samples:
            text = f"a batch has an index that is none of the {source.num_samples} samples of the source"
            caller.outbox.put(ServiceAnswer(encode(BatchFailed.of(message.number, UsageError(text), text))))
            return
        self._queue.put(WorkerTurn(caller, message.number, source, message.epoch, indices), urgent=message.urgent)

    def _forget(self, connection: Connection) -> None:
        """Free everything that belongs to a connection."""
        caller = self._callers.pop(id(connection), None)
        self._acceptor.drop(connection)
        if caller is None:
            return
        self._queue.forget(caller)
        caller.close()
        for source in caller.sources.values():
            self._source_cache.leave(source, caller.hello.rank)

    def _expel(self, order: Expel) -> None:
        for connection in self._acceptor.expel(order.names):
            self._forget(connection)


def _answer_open(caller: Caller, number: int, source: CachedSource) -> None:
    if source.problem is None:
        answer = encode(SourceOpened(number, source.num_samples, source.fingerprint))
    else:
        answer = encode(BatchFailed.of(number, source.problem, story(source.problem)))
    caller.outbox.put(ServiceAnswer(answer))


def _place(header: bytes, size_bytes: int) -> None:
    """Leave bodies to the transport; raises PeerError for an invalid size, before memory is allocated."""
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
        raise PeerError(f"a batch of {message.num} samples is asked for by {body.nbytes} bytes of indices")
    return np.frombuffer(bytes(body), dtype=np.int64)

"""Thread of a data server that makes batches, and its fair queue, which serves workers in turn."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from paceline.data.service.buffer_pool import LentPiece
from paceline.data.service.messages import BatchAnswer, BatchFailed, encode
from paceline.data.service.reader_connection import ReaderConnection, ServiceAnswer
from paceline.data.service.source_cache import USER_CODE_ERRORS, CachedSource
from paceline.data.sources.batch import BatchRequest, require_served
from paceline.errors import DataError, PeerError, UsageError
from paceline.observe.trace import Fed
from paceline.transport.base import Limits
from paceline.wire.malformed import describe_error

MAX_WAITING: Final = 1 << 24  # samples in the waiting requests of one worker

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True, eq=False)
class QueuedRead:
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
            queued = next((queued for queued in queue if queued.reader.send_queue.has_room), None)
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
        queued.reader.send_queue.put(self._answer(queued))
        self.busy_s += self.now() - began_t
        return True

    def _answer(self, queued: QueuedRead) -> ServiceAnswer:
        batch_buffers = queued.reader.batch_buffers
        pieces: list[LentPiece] = []
        try:
            with queued.source.lock:
                answer = self._make(queued, pieces)
            header = encode(answer)
            if len(header) > _MAX_HEADER_BYTES:
                raise UsageError("a batch is of too many parts to be described in one message")
        except USER_CODE_ERRORS as error:
            for piece in pieces:
                batch_buffers.drop(piece)
            return ServiceAnswer(encode(BatchFailed.of(queued.number, error, describe_error(error))))
        self._count(answer, pieces[0])
        return ServiceAnswer(header, pieces[0].memory, partial(batch_buffers.on_sent, pieces[0]))

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

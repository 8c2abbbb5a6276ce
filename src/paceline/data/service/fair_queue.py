"""Fair queue of batch requests: workers are served in turn, however many requests each has."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from paceline.data.service.callers import Caller
from paceline.data.service.source_cache import CachedSource
from paceline.data.sources.batches import BatchRequest
from paceline.errors import PeerError

MAX_WAITING: Final = 1 << 24  # samples in the waiting requests of one worker

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True, eq=False)
class WorkerTurn:
    """A worker's request for a batch."""

    caller: Caller
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
    _waiting: dict[int, deque[WorkerTurn]] = field(default_factory=dict[int, deque[WorkerTurn]])
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def put(self, turn: WorkerTurn, *, urgent: bool) -> None:
        """Add a request; an urgent one goes before the others of its worker.

        Raises:
            PeerError: the worker has more requests waiting than the queue holds.
        """
        with self._changed:
            queue = self._waiting.setdefault(turn.caller.hello.rank, deque())
            if sum(other.indices.size for other in queue) > MAX_WAITING:
                raise PeerError(f"a worker waits for more than {MAX_WAITING} samples")
            queue.appendleft(turn) if urgent else queue.append(turn)
            self._changed.notify_all()

    def get(self) -> WorkerTurn | None:
        """Wait for the next request whose worker has room in its send queue; None once closed."""
        with self._changed:
            while not self._closed:
                turn = self._next()
                if turn is not None:
                    return turn
                self._changed.wait()
            return None

    def wake(self) -> None:
        """Wake `get`, because a send queue may have room."""
        with self._changed:
            self._changed.notify_all()

    def forget(self, caller: Caller) -> None:
        """Drop the requests of a connection that has ended."""
        with self._changed:
            rank = caller.hello.rank
            left = deque(turn for turn in self._waiting.pop(rank, ()) if turn.caller is not caller)
            if left:
                self._waiting[rank] = left

    def close(self) -> None:
        """Drop all requests and wake `get`."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _next(self) -> WorkerTurn | None:
        for rank, queue in self._waiting.items():
            turn = next((turn for turn in queue if turn.caller.outbox.has_room), None)
            if turn is not None:
                queue.remove(turn)
                del self._waiting[rank]
                if queue:
                    self._waiting[rank] = queue  # at the end, behind the other workers
                return turn
        return None

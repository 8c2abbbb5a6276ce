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

MAX_WAITING: Final = 1 << 24  # samples that one worker waits for

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True, eq=False)
class WorkerTurn:
    """A batch that a worker has asked for under this number."""

    caller: Caller
    number: int
    volume: CachedSource
    epoch: int
    indices: Indices

    def ask(self) -> BatchRequest:
        """Return what is wanted; it takes more memory than the indices, so this is asked when it is made."""
        return BatchRequest(self.epoch, tuple(self.indices.tolist()))


@dataclass(slots=True)
class FairQueue:
    """Batches that were asked for, by worker. Safe to use from several threads."""

    # By rank, who has waited longest first. Invariant: no queue is empty.
    _waiting: dict[int, deque[WorkerTurn]] = field(default_factory=dict[int, deque[WorkerTurn]])
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def put(self, turn: WorkerTurn, *, urgent: bool) -> None:
        """Add a batch; an urgent one goes before the others of its worker.

        Raises:
            PeerError: this worker waits for more than can be remembered.
        """
        with self._changed:
            queue = self._waiting.setdefault(turn.caller.hello.rank, deque())
            if sum(other.indices.size for other in queue) > MAX_WAITING:
                raise PeerError(f"a worker waits for more than {MAX_WAITING} samples")
            queue.appendleft(turn) if urgent else queue.append(turn)
            self._changed.notify_all()

    def take(self) -> WorkerTurn | None:
        """Wait for a batch that its worker has room for; None once closed."""
        with self._changed:
            while not self._closed:
                turn = self._next()
                if turn is not None:
                    return turn
                self._changed.wait()
            return None

    def look(self) -> None:
        """Have `take` look again whether there is room."""
        with self._changed:
            self._changed.notify_all()

    def forget(self, caller: Caller) -> None:
        """Drop what was asked over a connection that has ended."""
        with self._changed:
            rank = caller.hello.rank
            left = deque(turn for turn in self._waiting.pop(rank, ()) if turn.caller is not caller)
            if left:
                self._waiting[rank] = left

    def close(self) -> None:
        """Drop everything and wake who waits."""
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
                    self._waiting[rank] = queue  # at the end: now it is the turn of the others
                return turn
        return None

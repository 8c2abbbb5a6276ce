"""A queue of collective calls on one group, made in order by its own thread, so that callers need not block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace
from torch.distributed import ProcessGroup, Work

from paceline.collective.failures import ADVICE, names
from paceline.collective.group import Group, WorkerSet
from paceline.collective.signature import CallSignature
from paceline.errors import DeadlineExceeded, PacelineError, PeerError
from paceline.stopwatch import Stopwatch
from paceline.transport.deadline import patience_s, seconds

CALL_ERRORS: Final = (PacelineError, RuntimeError, ValueError, TypeError, MemoryError)  # what torch and we raise

T = TypeVar("T")

_CLOSE_TIMEOUT_S: Final = 5.0
_SLACK_S: Final = 5.0  # for a call at its deadline to find which worker failed


class QueuedCall(msgspec.Struct, frozen=True):
    """A call that all workers have agreed on: its group, the signature of every worker, and its deadline.

    `deadline_s` is in seconds that this worker has run.
    """

    group: Group
    call: CallSignature
    calls: Sequence[CallSignature]
    deadline_s: float

    def run(self, begin: Callable[[ProcessGroup, timedelta], Work | None]) -> None:
        """Run a collective of torch, started by `begin` with the process group and a timeout; blocks until done.

        Raises:
            PeerError: a worker has died, or is suspended; the group has failed.
        """
        self.group.run(begin, self.call, self.deadline_s)


@dataclass(slots=True)
class CallQueue:
    """Makes calls in the order of submission, which must be the same on all workers.

    The first call connects the group. A failure of the group fails all later calls too.
    """

    worker_set: WorkerSet
    name: str
    _pending: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue[Callable[[], None] | None])
    _num_calls: int = 0
    _thread: threading.Thread | None = None
    _group: Group | None = None
    _failure: str = ""
    _closing: bool = False

    def submit(self, call: CallSignature, act: Callable[[QueuedCall], T], timeout_s: float | None = None) -> Future[T]:
        """Queue a call: once earlier ones are done, agree on it with all workers, then `act`. Does not block.

        The future ends within `timeout_s` (by default the deadline of any wait) with the result of `act`, or with
        UsageError, PeerError or DeadlineExceeded.
        """
        limit_s = self.worker_set.timeout_s if timeout_s is None else patience_s(timeout_s)
        deadline_s = self.worker_set.node.waits.ran_s + limit_s
        self._num_calls += 1  # as all workers do: a call that is refused before is none
        numbered = replace(call, number=self._num_calls)
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def make() -> None:
            try:
                group = self._connected(numbered)
                calls = group.agree(numbered, deadline_s)
                future.set_result(act(QueuedCall(group, numbered, calls, deadline_s)))
            except CALL_ERRORS as error:
                future.set_exception(self._end_on(error, numbered))

        self._put(make)
        return future

    def follow_up(self, act: Callable[[], T]) -> Future[T]:
        """Queue `act`, a continuation of the last call, without a new agreement. Does not block."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def make() -> None:
            try:
                future.set_result(act())
            except CALL_ERRORS as error:
                future.set_exception(self._end_on(error, None))

        self._put(make)
        return future

    def wait(self, future: Future[T], what: str, timeout_s: float | None = None) -> T:
        """Return the result of a call; blocks for it, and raises what the call raises."""
        most_s = self.worker_set.timeout_s if timeout_s is None else patience_s(timeout_s)
        watch, limit_s = Stopwatch(), most_s
        while (left_s := limit_s - watch.elapsed_s()) > 0:
            try:
                return future.result(timeout=min(left_s, 1.0))
            except TimeoutError:
                if future.done():
                    raise
            limit_s = most_s + (_SLACK_S if self._group is not None else 0.0)
        absent = self.worker_set.absent(self.worker_set.store(self.name))
        awaited = f"{names(absent)}, which did not come" if absent else "earlier calls to be over"
        raise DeadlineExceeded(
            f"worker {self.worker_set.rank}, {what}: waited {seconds(most_s)} for {awaited}. {ADVICE}"
        )

    def close(self, *, politely: bool) -> None:
        """End the thread and the connections; if `politely`, after all queued calls."""
        thread, self._closing = self._thread, True
        if thread is None:
            return
        self._pending.put(None)
        if not politely:
            self._failure = self._failure or f"worker {self.worker_set.rank} is leaving the job"
            group = self._group
            if group is not None:
                group.leave(politely=False)
        thread.join(None if politely else _CLOSE_TIMEOUT_S)

    def _put(self, make: Callable[[], None]) -> None:
        if self._closing:
            raise PeerError(f"worker {self.worker_set.rank} has left the job: collective calls are over.")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"paceline-{self.name}", daemon=True)
            self._thread.start()
        self._pending.put(make)

    def _run(self) -> None:
        """Make calls until closed, then leave the group."""
        while (make := self._pending.get()) is not None:
            make()
            del make  # it holds a group, and the tensors of its call
        group, self._group = self._group, None
        if group is not None:
            group.leave(politely=True)

    def _connected(self, call: CallSignature) -> Group:
        if self._failure:
            raise PeerError(f"worker {self.worker_set.rank}, {call.where}: an earlier call has failed: {self._failure}")
        if self._group is None:
            self._group = Group.connect(self.worker_set, self.name)
        return self._group

    def _end_on(self, error: Exception, call: CallSignature | None) -> Exception:
        """Return an error for the caller; one that fails the group fails later calls too."""
        if isinstance(error, PeerError) and not self._failure:
            self._failure = str(error)
            group, self._group = self._group, None
            if group is not None:
                group.failure_reports.write(f"gave up ({call.where if call else self.name})")
                group.abort()
        return error

"""Calls of one worker on one group, made one after the other by a thread of their own, so that nobody has to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from queue import SimpleQueue
from typing import Final, TypeVar

from torch.distributed import ProcessGroup, Work

from paceline.collective.failures import ADVICE, names
from paceline.collective.group import Group, WorkerSet
from paceline.collective.signature import CallSignature
from paceline.errors import DeadlineExceeded, PacelineError, PeerError
from paceline.stopwatch import Stopwatch
from paceline.transport.deadline import seconds

T = TypeVar("T")

_ERRORS: Final = (PacelineError, RuntimeError, ValueError, TypeError, MemoryError)  # what torch and we raise
_CLOSE_TIMEOUT_S: Final = 5.0
_SLACK_S: Final = 5.0  # for a call that is at its deadline to say who is to blame


@dataclass(frozen=True, slots=True)
class QueuedCall:
    """A call whose turn it is: the group it goes over, what every worker said of it, and when it has to be over.

    `deadline_s` is in seconds that this worker has run.
    """

    group: Group
    call: CallSignature
    calls: Sequence[CallSignature]
    deadline_s: float

    def send(self, begin: Callable[[ProcessGroup, timedelta], Work | None]) -> None:
        """Have a collective of torch done, given the process group and the time that is left; blocks until it is.

        Raises:
            PeerError: a worker has died meanwhile, or is stopped; the group is over.
        """
        self.group.do(begin, self.call, self.deadline_s)


@dataclass(slots=True)
class CallQueue:
    """Makes calls in the order in which they were asked for, which must be the same on all workers.

    The group is met with the first call. What ends the group ends all later calls too.
    """

    worker_set: WorkerSet
    name: str
    _asked: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue[Callable[[], None] | None])
    _num_calls: int = 0
    _thread: threading.Thread | None = None
    _group: Group | None = None
    _failure: str = ""
    _closing: bool = False

    def ask(self, call: CallSignature, act: Callable[[QueuedCall], T], timeout_s: float | None = None) -> Future[T]:
        """Make a call as soon as those before are over: agree on it, then `act`. Does not block.

        The future ends within `timeout_s`, by default what any wait may take, with what `act` returned, or with
        UsageError, PeerError or DeadlineExceeded.
        """
        self._num_calls += 1
        patience_s = self.worker_set.patience_s if timeout_s is None else timeout_s
        numbered, deadline_s = replace(call, number=self._num_calls), self.worker_set.node.waits.ran_s + patience_s
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def make() -> None:
            try:
                group = self._met(numbered)
                calls = group.agree(numbered, deadline_s)
                future.set_result(act(QueuedCall(group, numbered, calls, deadline_s)))
            except _ERRORS as error:
                future.set_exception(self._explained(error, numbered))

        self._put(make)
        return future

    def follow_up(self, act: Callable[[], T]) -> Future[T]:
        """Have `act` called as soon as all that was asked for is over: more of the last call. Does not block."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def make() -> None:
            try:
                future.set_result(act())
            except _ERRORS as error:
                future.set_exception(self._explained(error, None))

        self._put(make)
        return future

    def wait(self, future: Future[T], what: str, timeout_s: float | None = None) -> T:
        """Return the result of a call; blocks until it is there. Raises what the call raises."""
        patience_s = self.worker_set.patience_s if timeout_s is None else timeout_s
        watch, limit_s = Stopwatch(), patience_s
        while (left_s := limit_s - watch.look()) > 0:
            try:
                return future.result(timeout=min(left_s, 1.0))
            except TimeoutError:
                if future.done():
                    raise
            limit_s = patience_s + (_SLACK_S if self._group is not None else 0.0)
        absent = self.worker_set.absent(self.worker_set.store(self.name))
        whom = f"{names(absent)}, which did not come" if absent else "earlier calls to be over"
        raise DeadlineExceeded(
            f"worker {self.worker_set.rank}, {what}: waited {seconds(patience_s)} for {whom}. {ADVICE}"
        )

    def close(self, *, politely: bool) -> None:
        """End the calls, the thread and the connections. Politely: after all calls that were asked for are over."""
        thread, self._closing = self._thread, True
        if thread is None:
            return
        self._asked.put(None)
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
            self._thread = threading.Thread(target=self._work, name=f"paceline-{self.name}", daemon=True)
            self._thread.start()
        self._asked.put(make)

    def _work(self) -> None:
        """Make calls until closed, then let go of the group."""
        while (make := self._asked.get()) is not None:
            make()
            del make  # it holds a group, and the tensors of its call
        group, self._group = self._group, None
        if group is not None:
            group.leave(politely=True)

    def _met(self, call: CallSignature) -> Group:
        if self._failure:
            raise PeerError(f"worker {self.worker_set.rank}, {call.where}: an earlier call has failed: {self._failure}")
        if self._group is None:
            self._group = Group.meet(self.worker_set, self.name)
        return self._group

    def _explained(self, error: Exception, call: CallSignature | None) -> Exception:
        """Return an error as it is told; one that ends the group ends it for later calls too."""
        if isinstance(error, PeerError) and not self._failure:
            self._failure = str(error)
            group, self._group = self._group, None
            if group is not None:
                group.failure_reports.give(f"gave up ({call.where if call else self.name})")
                group.abort()
        return error

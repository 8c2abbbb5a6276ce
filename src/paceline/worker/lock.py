"""The lock of a worker, and waiting under it: with a deadline, and ended by the failure of the worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Final, final

from paceline.core.settings import WAIT_TIMEOUT_S
from paceline.errors import DeadlineExceeded, PeerError, ServerLost
from paceline.stopwatch import Stopwatch
from paceline.transport.deadline import seconds
from paceline.wire.connection import ReadTurns
from paceline.wire.send_queue import SendHold
from paceline.wire.signals import interrupt_deferred
from paceline.worker.waits import PERIOD_S, About, OpenWait, Waits, print_lines

_LAST_ANSWER_S: Final = 1.0  # deadline of server 0 to explain a wait that has timed out
_SAVE_ADVICE: Final = (
    "Values that were pulled before can still be read: save them in the script's except or finally, and start again "
    "from there"
)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Timeouts and callbacks of a worker.

    Args:
        wait_timeout_s: the shortest deadline of a wait for other workers.
        reconnect_timeout_s: for how long it tries to restore a broken connection.
        checks_memory: overwrite memory of pushes when it is freed, and send checksums with pushes.
        how_ended: returns how a server of this rank has ended, "" if unknown; an ended one is not connected to again.
        joins_late: join with the first request or clock, so that other workers do not wait for what comes before.
        tell: prints lines about unusually long waits.
    """

    wait_timeout_s: float = WAIT_TIMEOUT_S
    reconnect_timeout_s: float = 5.0
    checks_memory: bool = False
    how_ended: Callable[[int], str] = lambda _: ""
    joins_late: bool = False
    tell: Callable[[list[str]], None] = print_lines


@final
class _Changed(threading.Condition):
    """A condition on which threads may wait by reading connections: a notification wakes these as well."""

    def __init__(self, turns: ReadTurns) -> None:
        super().__init__(threading.RLock())
        self._turns = turns

    def notify_all(self) -> None:
        """Wake all threads that wait."""
        super().notify_all()
        self._turns.wake()


@dataclass(slots=True)
class WorkerLock:
    """The lock of a worker, with its condition and its failure.

    Args:
        worker: its rank, for messages.
        waits: measures and reports waits.
        clock: returns the worker's clock, for messages.
        hold: gathers frames that are sent under the lock; a wait sends them first, as it may be for their answers.
    """

    worker: int
    waits: Waits
    clock: Callable[[], int]
    hold: SendHold = field(default_factory=SendHold)
    turns: ReadTurns = field(init=False)
    changed: threading.Condition = field(init=False)
    failure: str = ""
    failed_as: type[PeerError] = PeerError
    gave_up: bool = False  # a wait has timed out

    def __post_init__(self) -> None:
        """Make the lock."""
        self.turns = ReadTurns(self._notify)
        self.changed = _Changed(self.turns)

    @property
    def is_failing(self) -> bool:
        """Whether a call has raised, or the next one will, because a server is lost or has not answered in time."""
        return self.gave_up or (bool(self.failure) and self.failed_as is ServerLost)

    def wait(self, done: Callable[[], bool], what: str, about: About = About()) -> None:  # noqa: B008 - it is frozen
        """Wait under the lock until `done()`; raises DeadlineExceeded, or PeerError if the worker fails."""
        if done():
            return
        turns = self.turns
        turns.num_waiting += 1
        try:
            with self.waits.during(what, about) as wait, self.hold.suspended():
                watch = Stopwatch(PERIOD_S)
                while not done():
                    self.check()
                    waited_s, limit_s = watch.elapsed_s(), self.waits.limit_s
                    if waited_s >= limit_s:
                        raise self._too_late(wait, limit_s)
                    self._wait_for_news(min(limit_s - waited_s, PERIOD_S))
        finally:
            turns.num_waiting -= 1
            if turns.num_waiting:
                self.changed.notify_all()  # another thread may have to read in the place of this one

    def abandon(self, reason: str) -> None:
        """Fail in a forked child, where threads of the parent may hold the lock."""
        self.__post_init__()
        self.failure = reason

    def _wait_for_news(self, timeout_s: float) -> None:
        """Wait until something may have changed: read the connections, or wait for the threads that do."""
        with interrupt_deferred() as deferral:  # else a turn that was taken might never end, and no thread read
            if self.turns.take():
                self._read(timeout_s, deferral.lifted())
                return
        self.changed.wait(timeout_s)

    def _read(self, timeout_s: float, asleep: AbstractContextManager[None]) -> None:
        """Read the connections without the lock, and end the turn."""
        depth = self._release_wholly()
        try:
            self.turns.read(timeout_s, asleep)
        finally:
            for _ in range(depth):
                self.changed.acquire()
            self.turns.end()

    def _release_wholly(self) -> int:
        """Release the lock, which this thread may have taken several times; return how often."""
        depth = 0
        with suppress(RuntimeError):  # it is not held any more
            while True:
                self.changed.release()
                depth += 1
        return depth

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _too_late(self, wait: OpenWait, limit_s: float) -> DeadlineExceeded:
        """Return the error of a wait that has timed out, with the explanation of server 0."""
        self.gave_up = True
        self.waits.report(wait)
        answer, watch = wait.answer, Stopwatch()
        while answer is not None and not answer.done() and (left_s := _LAST_ANSWER_S - watch.elapsed_s()) > 0:
            self.changed.wait(left_s)
        if answer is not None and answer.done():
            self.waits.read_answer(wait)
        about = f": {wait.known}" if wait.known else ""
        about += wait.advice()
        return DeadlineExceeded(
            f"worker {self.worker} (clock {self.clock()}) waited {seconds(limit_s)} for {wait.what}{about}"
        )

    def check(self) -> None:
        """Raise PeerError if this worker has failed."""
        if self.failure:
            raise self.error()

    def error(self) -> PeerError:
        """Return the failure of this worker as an error."""
        advice = f". {_SAVE_ADVICE}" if self.failed_as is ServerLost else ""
        return self.failed_as(f"worker {self.worker} (clock {self.clock()}): {self.failure}{advice}")

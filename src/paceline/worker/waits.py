"""Waits of one worker: its lock, under which threads wait, with deadlines and reports of unusually long waits.

A wait ends by the failure of the worker or by Ctrl-C too. Server 0 knows which workers hold up which, so an unusual
wait is reported to it. It answers with a sentence on the job, and has one of the waiting workers print it.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from types import FrameType, TracebackType
from typing import Final, Self, cast, final

import msgspec

from paceline.core.settings import LEASE_S, WAIT_TIMEOUT_S
from paceline.errors import DeadlineExceeded, PacelineError, PeerError, ServerLost, UsageError
from paceline.notices import printable, tell
from paceline.stopwatch import Stopwatch
from paceline.transport.deadline import seconds
from paceline.wire.connection import ReadTurns
from paceline.wire.requests import ReportWait
from paceline.wire.send_queue import SendHold

PERIOD_S: Final = 0.5  # between two checks
_LONGEST_PERIOD_S: Final = 2.0  # a longer one shows that this process was suspended, and counts as this much
_BUSY_SHARE: Final = 0.1  # how much time counts in which this process computes
_FLOOR_S: Final = 5.0  # shorter waits are not reported
_FIRST_FLOOR_S: Final = 10.0  # before the first clock, when processes still start
_AHEAD_S: Final = 1.5  # server 0 knows of a wait so long before it may be told: others may have begun with it
_TIMES: Final = 3.0  # a wait is unusual, or too long, from this many times the longest observed
_HALF_LIFE_S: Final = 600.0  # of an observed wait, as a measure of what is usual
_ANSWER_S: Final = 2.0  # deadline of server 0 for the answer to a report
_MAX_ANSWER: Final = 2000  # characters

ADVICE: Final = "To allow longer waits: paceline run --timeout SECONDS, PACELINE_TIMEOUT_S, or init(timeout_s=...)"


class About(msgspec.Struct, frozen=True):
    """What a wait is for, from which server 0 finds the workers that hold it up.

    Args:
        kind: waits of one kind usually take equally long.
        table: the table whose values or pushes it waits for.
        needs: the wait ends once every worker has finished the clocks below this one; 0 if clocks do not matter.
        workers: the workers that it waits for.
        computes: the calling thread also computes: then time in which this process is busy counts little.
    """

    kind: str = ""
    table: str = ""
    needs: int = 0
    workers: tuple[int, ...] = ()
    computes: bool = False


@dataclass(slots=True, eq=False)
class OpenWait:
    """A wait in progress; `known` is the last answer of server 0."""

    what: str
    about: About
    began_s: float
    due_s: float  # reported when it has taken this long
    limit_s: float | None = None
    give_up: Callable[[], None] | None = None
    waited_s: float = 0.0
    num_reports: int = 0
    asked_s: float = 0.0
    is_early: bool = False  # the last report has come before it may be told
    answer: Future[memoryview] | None = None
    known: str = ""
    is_deadlock: bool = False  # by that answer

    def advice(self) -> str:
        """Return what the error of this wait says at its end: no time is long enough for a deadlock."""
        return "" if self.is_deadlock else f". {ADVICE}"


@dataclass(slots=True)
class Waits:
    """All waits of a worker. Any thread may use it; one thread calls `report_due` every `PERIOD_S`.

    Args:
        worker: its rank.
        timeout_s: the shortest deadline of a wait.
        send_report: sends a report to server 0; raises PeerError once this worker cannot go on.
        now: a monotonic clock.
        busy_s: the CPU time of this process.
    """

    worker: int
    timeout_s: float
    send_report: Callable[[Callable[[int], ReportWait]], Future[memoryview]]
    now: Callable[[], float] = time.monotonic
    busy_s: Callable[[], float] = time.process_time
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: list[OpenWait] = field(default_factory=list[OpenWait])
    # By kind: what the longest wait took, less what was forgotten since, and when that was.
    _usual: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    _longest_s: float = 0.0  # of all waits and clocks
    _ran_s: float = 0.0
    _clock_ran_s: float | None = None  # when the last clock was finished
    _looked_s: float = field(init=False)
    _was_busy_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the timers."""
        self._looked_s, self._was_busy_s = self.now(), self.busy_s()

    @property
    def limit_s(self) -> float:
        """The deadline of a wait in seconds: `timeout_s`, or longer if clocks or waits have taken long before."""
        return max(self.timeout_s, _TIMES * self._longest_s)

    @property
    def ran_s(self) -> float:
        """Seconds that this worker has run, without time in which its process was suspended."""
        with self._lock:
            return self._ran_s + min(self.now() - self._looked_s, _LONGEST_PERIOD_S)

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set the shortest deadline of waits, unless None; raises UsageError for a number that is not positive."""
        if timeout_s is None:
            return
        if not 0 < timeout_s < math.inf:
            raise UsageError(f"timeout_s is {timeout_s:g}, expected more than 0 seconds.")
        self.timeout_s = timeout_s

    def note_clock(self) -> None:
        """Note that this worker has finished a clock; the longest one raises the deadline."""
        with self._lock:
            before, self._clock_ran_s = self._clock_ran_s, self._ran_s
            if before is not None:
                self._longest_s = max(self._longest_s, self._ran_s - before)

    @contextmanager
    def during(
        self,
        what: str,
        about: About = About(),
        limit_s: float | None = None,
        give_up: Callable[[], None] | None = None,
    ) -> Generator[OpenWait]:
        """Count the time inside the context as a wait; reported if it takes unusually long.

        After `limit_s`, the thread that calls `report_due` calls `give_up` once.
        """
        wait = OpenWait(what, about, self.now(), self._due_s(about.kind or what), limit_s, give_up)
        with self._lock:
            self._open.append(wait)
        try:
            yield wait
            self._note(wait)
        finally:
            with self._lock:
                self._open.remove(wait)
            if wait.num_reports:
                with suppress(PacelineError):
                    self.send_report(lambda number: ReportWait(number, 0.0, ""))

    def report(self, wait: OpenWait, *, is_early: bool = False) -> None:
        """Ask server 0 what holds up a wait; `report_due` or `read_answer` handles the answer.

        With `is_early` server 0 only notes the wait, so that what others are told of this worker is right.
        """
        wait.num_reports += 1
        wait.asked_s, wait.is_early, about = wait.waited_s, is_early, wait.about
        told_s = 0.0 if is_early else wait.waited_s
        with suppress(PacelineError):
            wait.answer = self.send_report(
                lambda number: ReportWait(number, told_s, wait.what, about.table, about.needs, about.workers)
            )

    def read_answer(self, wait: OpenWait) -> str:
        """Store the answer of server 0, if there is one; return the line that this worker prints, "" for none."""
        answer, wait.answer = wait.answer, None
        if answer is None or answer.exception(timeout=0) is not None:
            return ""
        told = bytes(answer.result(timeout=0)[: 4 * _MAX_ANSWER])
        wait.known = printable(told[1:].decode(errors="replace"))[:_MAX_ANSWER]
        wait.is_deadlock = told[:1] in (b"2", b"3")
        return self._line(wait, wait.known) if told[:1] in (b"1", b"3") else ""

    def meeting(self) -> str:
        """Return what the call of this worker is that waits for workers by their numbers; "" outside of such calls."""
        with self._lock:
            return next((wait.about.kind or wait.what for wait in self._open if wait.about.workers), "")

    def report_due(self) -> list[str]:
        """Report the waits that are due and handle answers; return the lines to print."""
        with self._lock:
            self._count()
            waits = list(self._open)
        return [line for wait in waits if (line := self._check_wait(wait))]

    def _count(self) -> None:
        """Advance all waits, without time in which this process was suspended, as the others may have been."""
        now_s, busy_s = self.now(), self.busy_s()
        passed_s = min(now_s - self._looked_s, _LONGEST_PERIOD_S)
        is_idle = busy_s - self._was_busy_s < passed_s / 2
        self._looked_s, self._was_busy_s = now_s, busy_s
        self._ran_s += passed_s
        for wait in self._open:
            share = 1.0 if is_idle or not wait.about.computes else _BUSY_SHARE
            wait.waited_s += share * min(passed_s, now_s - wait.began_s)

    def _check_wait(self, wait: OpenWait) -> str:
        if wait.limit_s is not None and wait.give_up is not None and wait.waited_s >= wait.limit_s:
            act, wait.give_up = wait.give_up, None
            act()
        if wait.answer is not None and wait.answer.done():
            return self.read_answer(wait)
        if wait.answer is not None and wait.waited_s - wait.asked_s >= _ANSWER_S:
            wait.answer = None
            wait.known = "server 0 does not answer"
            seen = f"worker {self.worker} waits for {wait.what}; {wait.known}"
            return "" if wait.is_early else self._line(wait, seen)
        if wait.answer is None and wait.waited_s >= wait.due_s:
            wait.due_s = 2 * wait.waited_s
            self.report(wait)
        elif not wait.num_reports and wait.waited_s >= wait.due_s - _AHEAD_S:
            self.report(wait, is_early=True)
        return ""

    @staticmethod
    def _line(wait: OpenWait, text: str) -> str:
        return f"waiting for {wait.waited_s:.0f} s: {text}"

    def _due_s(self, kind: str) -> float:
        with self._lock:
            usual_s, since_s = self._usual.get(kind, (0.0, 0.0))
            usual_s *= 0.5 ** ((self._ran_s - since_s) / _HALF_LIFE_S)
            return max(_FIRST_FLOOR_S if self._clock_ran_s is None else _FLOOR_S, _TIMES * usual_s)

    def _note(self, wait: OpenWait) -> None:
        """Update what is usual from a wait that has ended well."""
        if wait.waited_s < PERIOD_S:
            return
        kind = wait.about.kind or wait.what
        with self._lock:
            usual_s, since_s = self._usual.get(kind, (0.0, 0.0))
            if wait.waited_s >= usual_s * 0.5 ** ((self._ran_s - since_s) / _HALF_LIFE_S):
                self._usual[kind] = wait.waited_s, self._ran_s
            self._longest_s = max(self._longest_s, wait.waited_s)


def tell_each(lines: list[str]) -> None:
    """Tell the user each line."""
    for line in lines:
        tell(line)


# The functions behind those of `signal`, which take ten times as long: they look for members of enumerations.
_SIGNAL: Final = import_module("_signal")
_SOON_S: Final = 0.01
_LAST_ANSWER_S: Final = 1.0  # deadline of server 0 to explain a wait that has timed out
_SAVE_ADVICE: Final = (
    "Values that were pulled before can still be read: save them in the script's except or finally, and start again "
    "from there"
)


class WorkerOptions(msgspec.Struct, frozen=True):
    """Timeouts and callbacks of a worker.

    Args:
        wait_timeout_s: the shortest deadline of a wait for other workers.
        reconnect_timeout_s: for how long it tries to restore a broken connection.
        checks_memory: overwrite memory of pushes when it is freed, and send checksums with pushes.
        how_ended: returns how a server of this rank has ended, "" if unknown; an ended one is not connected to again.
        where: returns where a server of this rank listens now; "" where it has been all the time.
        joins_late: join with the first request or clock, so that other workers do not wait for what comes before.
        tell: prints lines about unusually long waits.
    """

    wait_timeout_s: float = WAIT_TIMEOUT_S
    reconnect_timeout_s: float = LEASE_S
    checks_memory: bool = False
    how_ended: Callable[[int], str] = lambda _: ""
    where: Callable[[int], str] = lambda _: ""
    joins_late: bool = False
    tell: Callable[[list[str]], None] = tell_each


@final
class _Changed(threading.Condition):
    """A condition on which threads may wait by reading connections: a notification wakes these as well."""

    def __init__(self, turns: ReadTurns) -> None:
        super().__init__(threading.RLock())
        self._turns = turns

    def notify_all(self) -> None:
        """Wake all threads that wait."""
        super().notify_all()
        if self._turns.is_polling:
            self._turns.wake()


@final
class InterruptDeferral:
    """Has Ctrl-C (SIGINT) that comes while this is entered take effect when it is left.

    Python calls its handler in the main thread, between any two instructions, and it mostly raises KeyboardInterrupt.
    Other threads are not interrupted, so this changes nothing there.

    Example:
        >>> with InterruptDeferral():
        ...     pass  # Ctrl-C raises KeyboardInterrupt only after this
    """

    __slots__ = ("_came", "_handler", "_is_lifted")

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None  # that is deferred
        self._came = False
        self._is_lifted = False

    def __enter__(self) -> Self:
        """Defer Ctrl-C from now on."""
        if threading.get_ident() == threading.main_thread().ident:
            handler = _SIGNAL.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = cast("Callable[[int, FrameType | None], object]", handler)
                _SIGNAL.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Let Ctrl-C take effect, also one that has come meanwhile."""
        if self._handler is not None:
            _SIGNAL.signal(signal.SIGINT, self._handler)
            if self._came:
                signal.raise_signal(signal.SIGINT)

    @contextmanager
    def lifted(self) -> Generator[None]:
        """Have Ctrl-C take effect inside this block. Once it has raised an exception, it is deferred again."""
        self._is_lifted = True
        try:
            yield
        finally:
            self._is_lifted = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._is_lifted or self._handler is None:
            self._came = True
            return
        self._is_lifted = False
        self._handler(number, frame)
        self._is_lifted = True  # it has not raised


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

    def wait(self, done: Callable[[], bool], what: str, about: About = About()) -> None:
        """Wait under the lock until `done()`; raises DeadlineExceeded, or PeerError if the worker fails."""
        if done():
            return
        turns = self.turns
        turns.num_waiting += 1
        try:
            if turns.is_enabled and self._comes_soon(done):
                return
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

    def _comes_soon(self, done: Callable[[], bool]) -> bool:
        """Return whether `done()` soon, as is usual: a wait of some milliseconds is neither counted nor reported."""
        hold = self.hold
        depth = hold.suspend()
        try:
            left_s = min(_SOON_S, self.waits.limit_s)
            ends = time.monotonic() + left_s
            # Answers to what was sent before may come first.
            while not self.failure and left_s > 0:
                self._wait_for_news(left_s)
                if done():
                    return True
                left_s = ends - time.monotonic()
            return False
        finally:
            hold.resume(depth)

    def abandon(self, reason: str) -> None:
        """Fail in a forked child, where threads of the parent may hold the lock."""
        self.__post_init__()
        self.failure = reason

    def _wait_for_news(self, timeout_s: float) -> None:
        """Wait until something may have changed: read the connections, or wait for the threads that do."""
        with InterruptDeferral() as deferral:  # else a turn that was taken might never end, and no thread read
            if self.turns.take():
                self._read(timeout_s, deferral.lifted())
                return
        self.changed.wait(timeout_s)

    def _read(self, timeout_s: float, asleep: AbstractContextManager[None]) -> None:
        """Read the connections without the lock, and end the turn."""
        changed, depth = self.changed, 0  # how often this thread has taken the lock
        try:
            while True:
                changed.release()
                depth += 1
        except RuntimeError:  # it is not held any more
            pass
        try:
            self.turns.read(timeout_s, asleep)
        finally:
            for _ in range(depth):
                changed.acquire()
            self.turns.end()

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

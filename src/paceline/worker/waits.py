"""Waits of one worker: their deadlines, and reports of unusually long ones.

Server 0 knows which workers hold up which, so an unusual wait is reported to it. It answers with a sentence on the job,
and has one of the waiting workers print it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from paceline.errors import PacelineError, UsageError
from paceline.observe.notices import printable
from paceline.wire.requests import ReportWait

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


@dataclass(frozen=True, slots=True)
class About:
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


def print_lines(lines: list[str]) -> None:
    """Write lines to standard error, if there is one."""
    for line in lines:
        with suppress(OSError, ValueError, AttributeError):  # its reader is gone, or the script has closed it
            sys.stderr.write(f"paceline: {line}\n")
            sys.stderr.flush()

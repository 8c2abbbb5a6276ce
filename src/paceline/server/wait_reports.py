"""Reports of long waits: server 0 finds which workers hold up the others, and has one worker print a sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from paceline.core.server import ServerCore
from paceline.core.standstill import Waiter, describe, stuck
from paceline.core.work_queue import Life
from paceline.observe.notices import printable
from paceline.server.requests import RequestHandler
from paceline.wire.requests import ReportWait

_MAX_WHAT: Final = 300  # characters of a worker's description of its wait
_LEAST_PAUSE_S: Final = 4.0  # between two sentences
_MORE: Final = 1.8  # the same sentence is printed again after this many times as long a wait
_STUCK: Final = (
    "None of these can go on: have all workers make the same calls in the same order, and finish as many clocks before "
    "each barrier(), or let those that are done end"
)


@dataclass(slots=True)
class WaitReports:
    """The latest report of each worker that waits unusually long."""

    core: ServerCore
    request_handler: RequestHandler
    _reports: dict[Life, ReportWait] = field(default_factory=dict[Life, ReportWait])
    # The last sentence printed: the workers that hold up the others, and the length of the wait.
    _told: frozenset[int] | None = None
    _told_after_s: float = 0.0
    _told_at: float = 0.0

    def add(self, life: Life, report: ReportWait, now: float) -> bytes:
        """Store a report and return its answer: b"1" or b"0" (whether to print it), then the sentence."""
        current = self.core.lives.current(life[0])
        if not report.what or current is None or current.incarnation != life[1]:
            self.forget(life)
            return b"0"
        self._reports[life] = report
        waiters = self._waiters()
        text = describe(waiters, self.core.whereabouts)
        locked = stuck(waiters)
        if locked:
            text += f". {_STUCK}"
        blockers = {worker for waiter in waiters.values() for worker in waiter.blockers}
        tells = self._is_news(frozenset(blockers - set(waiters) | locked), report.waited_s, now)
        return f"{int(tells)}{text}".encode()

    def forget(self, life: Life) -> None:
        """Drop the report of a worker: it no longer waits."""
        self._reports.pop(life, None)
        if not self._reports:
            self._told = None

    def _is_news(self, roots: frozenset[int], waited_s: float, now: float) -> bool:
        """Return whether to print now: other workers hold up the job, or the wait has lasted much longer."""
        same, since_s = roots == self._told, now - self._told_at
        if self._told is not None and (waited_s < _MORE * self._told_after_s if same else since_s < _LEAST_PAUSE_S):
            return False
        self._told, self._told_after_s, self._told_at = roots, waited_s, now
        return True

    def _waiters(self) -> dict[int, Waiter]:
        """Return what each worker waits for, as reported and as seen by this server."""
        members = self.core.members
        found: dict[int, Waiter] = {}
        for place, present in self.request_handler.at_barriers().items():
            says = "is in barrier(), waiting for {}" if place == "barrier" else f"waits for {{}} to come to '{place}'"
            absent = tuple(worker for worker in members if worker not in present)
            found.update((worker, Waiter(says, absent)) for worker in present)
        for rank, work, holders in self.request_handler.work_host.waiting():
            others = tuple(worker for worker in holders if worker != rank)
            found[rank] = Waiter(f"waits for {work}, of which {{}} has some" if others else f"waits for {work}", others)
        for (rank, _), report in self._reports.items():
            if rank in members and rank not in found:
                found[rank] = self._reported(rank, report, members)
        for pull in self.core.waiting_pulls():
            rank = pull.sender.worker
            found.setdefault(rank, self._of_clock(rank, pull.table, pull.needs, f"values of table '{pull.table}'"))
        return found

    def _reported(self, rank: int, report: ReportWait, members: list[int]) -> Waiter:
        what = printable(report.what[:_MAX_WHAT]).replace("{}", "?")
        if report.needs > 0:
            return self._of_clock(rank, report.table[:_MAX_WHAT], report.needs, what)
        there = {worker for (worker, _), other in self._reports.items() if other.what == report.what}
        blockers = tuple(worker for worker in members if worker in set(report.workers) - there)
        return Waiter(f"waits for {{}} ({what})" if blockers else f"waits for {what}", blockers)

    def _of_clock(self, rank: int, table: str, needs: int, what: str) -> Waiter:
        blockers = tuple(worker for worker in self.core.behind(needs) if worker != rank)
        entry = self.core.tables.get(table)
        if not blockers or (entry is not None and entry.consistency.backups >= len(blockers)):
            return Waiter(f"waits for {what}")
        about = f" (table '{printable(table)}', {entry.consistency})" if entry is not None else f" ({what})"
        return Waiter(f"waits for clock {needs - 1} of {{}}{about}", blockers)

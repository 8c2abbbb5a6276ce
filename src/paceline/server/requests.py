"""Requests to a server beside the clock protocol: declarations, initial values, state, barriers, work claims.

And reports of long waits: server 0 finds which workers hold up the others, and has one worker print a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from msgspec.structs import replace

from paceline.core.events import Declared
from paceline.core.server import ServerCore
from paceline.core.standstill import Waiter, describe, stuck
from paceline.core.work_queue import Life
from paceline.errors import PacelineError
from paceline.notices import printable
from paceline.server.cuts import encode_tables
from paceline.server.tables import ServedTables
from paceline.server.work_queue import Send, WorkQueueHost
from paceline.transport.base import EMPTY
from paceline.wire.malformed import REQUEST_ERRORS, describe_error
from paceline.wire.requests import (
    NAMED,
    AwaitValues,
    Barrier,
    ClaimWork,
    Declare,
    DeclareRows,
    Describe,
    EndCut,
    Initialise,
    ListTables,
    LoadState,
    ReadCut,
    ReportWait,
    Request,
    RequestDone,
    RequestFailed,
    SaveState,
    require_short,
)

T = TypeVar("T")

# Pending requests of one kind by one worker, which waits for each answer; one with more is a misbehaving peer.
MAX_WAITING = 1024
_KEPT = Declare | DeclareRows | Barrier | ClaimWork
_MAX_REASON = 2000  # characters of the problem that a worker reports at a barrier


@dataclass(slots=True)
class RequestHandler:
    """Carries out requests at once where possible, and keeps those that wait for other workers.

    A worker repeats a request until it is answered, so each of these may come again, even after it was answered.
    """

    tables: ServedTables
    send: Send
    work_host: WorkQueueHost = field(init=False)
    # Table -> the workers that wait for its initial values, with their request numbers. Invariant: no entry is empty.
    _awaiting: dict[str, dict[Life, int]] = field(default_factory=dict[str, dict[Life, int]])
    # Row tables that have all rows of the snapshot from which the job goes on; and the workers that are loading them.
    _loaded: set[str] = field(default_factory=set[str])
    _loading: dict[str, Life] = field(default_factory=dict[str, Life])
    # Table -> the workers that wait for its declaration, with their request numbers. Invariant: no entry is empty.
    _describing: dict[str, dict[Life, int]] = field(default_factory=dict[str, dict[Life, int]])
    # Barrier -> the workers that have reached it, with their requests. Invariant: no entry is empty.
    _at_barriers: dict[str, dict[Life, Barrier]] = field(default_factory=dict[str, dict[Life, Barrier]])
    # How the last barrier of each life ended: a repeated request gets this answer, and does not enter another barrier.
    _passed: dict[Life, RequestDone | RequestFailed] = field(default_factory=dict[Life, RequestDone | RequestFailed])

    def __post_init__(self) -> None:
        """Create the work queues, which answer over the same connections."""
        self.work_host = WorkQueueHost(self.send)

    def handle(self, life: Life, request: Request, body: memoryview) -> Declared | None:
        """Answer a request; return the event for the core if it declares a table."""
        try:
            return self._carry_out(life, request, body)
        except REQUEST_ERRORS as error:
            self._answer(life, RequestFailed(request.number, describe_error(error)))
            return None

    def refuse(self, life: Life, request: Request, reason: str) -> None:
        """Answer a request of a life that may not act: it changes nothing, and counts nowhere."""
        self._answer(life, RequestFailed(request.number, reason))

    def keeps(self, request: Request) -> bool:
        """Return whether a request changes what is kept here, or which tables there are, beside their values."""
        if isinstance(request, Initialise | AwaitValues):  # which worker loads the rows of a snapshot, and that it has
            table = self.tables.get(request.table)
            return table is not None and table.keyed
        return isinstance(request, _KEPT)

    def release(self, members: Sequence[int]) -> None:
        """Answer the pending requests that can be answered now; `members` are the ranks that take part."""
        for place in [place for place, present in self._at_barriers.items() if _is_complete(present, members)]:
            present = self._at_barriers.pop(place)
            reason = _failure(present)
            for life, request in present.items():
                self._passed[life] = RequestFailed(request.number, reason) if reason else RequestDone(request.number)
                self._answer(life, self._passed[life])
        for table in [table for table in self._awaiting if self._has_values(table)]:
            for life, number in self._awaiting.pop(table).items():
                self._answer(life, RequestDone(number))
        for table in [table for table in self._describing if table in self.tables]:
            settings = memoryview(self.tables[table].encoded_spec())
            for life, number in self._describing.pop(table).items():
                self.send(*life, RequestDone(number), settings)
        if members:
            self._ask_for_values(min(members))
        self.work_host.release()

    def waiting_for_names(self) -> dict[str, list[int]]:
        """Return the ranks that wait for the first push to each named tensor."""
        return {
            table.removeprefix(NAMED): sorted({rank for rank, _ in waiting})
            for table, waiting in self._describing.items()
        }

    def at_barriers(self) -> dict[str, list[int]]:
        """Return the ranks that wait at each barrier."""
        return {place: sorted(rank for rank, _ in present) for place, present in self._at_barriers.items()}

    def forget(self, life: Life) -> None:
        """Drop the pending requests of a worker that has left."""
        self.work_host.remove_worker(life)
        self._passed.pop(life, None)
        self._awaiting = _without(self._awaiting, life)
        self._loading = {table: loader for table, loader in self._loading.items() if loader != life}
        self._describing = _without(self._describing, life)
        self._at_barriers = _without(self._at_barriers, life)

    def _has_values(self, table: str) -> bool:
        """Return whether a table is as a worker that opens it may find it."""
        found = self.tables[table]
        return table in self._loaded if found.keyed else found.has_values

    def _ask_for_values(self, first: int) -> None:
        """Refuse to let the lowest rank wait for initial values: it has to send them itself.

        Rows of a snapshot are loaded by one worker at a time: what a second one loads would come over pushes that are
        made once the first one is done.
        """
        asked = [(table, life) for table, waiting in self._awaiting.items() for life in waiting if life[0] == first]
        for table, life in asked:
            if self.tables[table].keyed and self._loading.setdefault(table, life) != life:
                continue
            number = self._awaiting[table].pop(life)
            reason = f"table '{table}' has no values yet, and worker {first} is the first that takes part"
            self._answer(life, RequestFailed(number, reason))
        self._awaiting = {table: waiting for table, waiting in self._awaiting.items() if waiting}

    def _carry_out(self, life: Life, request: Request, body: memoryview) -> Declared | None:
        match request:
            case Declare():
                declared = self.tables.declare(request.spec)
                self.tables[request.spec.name].add_reader(life, live=request.live)
                self._answer(life, RequestDone(request.number))
                return declared
            case DeclareRows():
                declared = self.tables.declare(request.spec)
                self._answer(life, RequestDone(request.number))
                return declared
            case Barrier():
                passed = self._passed.get(life, RequestDone(0))
                if request.number <= passed.number:
                    self._answer(life, passed if request.number == passed.number else RequestDone(request.number))
                else:
                    require_short("a meeting point", request.place)
                    told = replace(request, problem=request.problem[:_MAX_REASON])
                    self._wait(self._at_barriers, request.place, life, told)
            case ClaimWork():
                self.work_host.claim(life, request)
            case AwaitValues():
                self.tables.require(request.table)
                self._wait(self._awaiting, request.table, life, request.number)
            case Describe():
                require_short("a table", request.table)
                self._wait(self._describing, request.table, life, request.number)
            case Initialise():
                table = self.tables.require(request.table)
                if table.keyed:  # its rows came before, piece by piece
                    self._loaded.add(request.table)
                    self._loading.pop(request.table, None)
                else:
                    table.initialise(body)
                self._answer(life, RequestDone(request.number))
            case SaveState():
                state = self.tables.require(request.table).state()
                self.send(*life, RequestDone(request.number), memoryview(state))
            case LoadState():
                table = self.tables.require(request.table)
                if not (request.only_first and table.has_values):
                    table.load_state(body)
                self._answer(life, RequestDone(request.number))
            case ListTables():
                self.send(*life, RequestDone(request.number), memoryview(encode_tables(self.tables)))
            case ReadCut():
                self.send(*life, RequestDone(request.number), self.tables.cuts.read(life, request.table, request.index))
            case EndCut():
                self.tables.cuts.end(life, request.table)
                self._answer(life, RequestDone(request.number))
        return None

    def _wait(self, waiting: dict[str, dict[Life, T]], key: str, life: Life, entry: T) -> None:
        """Add a pending request of a worker; raises PacelineError if it has too many."""
        if life not in waiting.get(key, {}) and sum(life in present for present in waiting.values()) >= MAX_WAITING:
            raise PacelineError(f"worker {life[0]} waits for {MAX_WAITING} others of this kind already")
        waiting.setdefault(key, {})[life] = entry

    def _answer(self, life: Life, answer: RequestDone | RequestFailed) -> None:
        self.send(*life, answer, EMPTY)


def _is_complete(present: dict[Life, Barrier], members: Sequence[int]) -> bool:
    ranks = {rank for rank, _ in present}
    return ranks.issuperset(members)


def _failure(present: dict[Life, Barrier]) -> str:
    """Return why the workers at a barrier cannot go on, "" if they can."""
    told = sorted((rank, request.problem) for (rank, _), request in present.items() if request.problem)
    gone = {request.needs for request in present.values()} - {-1} - {rank for rank, _ in present}
    if told:
        return "; ".join(f"worker {rank}: {problem}" for rank, problem in told)[:_MAX_REASON]
    return f"worker {min(gone)} takes part no more, and what it had to give is not there" if gone else ""


def _without(waiting: dict[str, dict[Life, T]], life: Life) -> dict[str, dict[Life, T]]:
    """Return the pending requests of all other workers."""
    rest = {key: {other: one for other, one in present.items() if other != life} for key, present in waiting.items()}
    return {key: present for key, present in rest.items() if present}


_MAX_WHAT: Final = 300  # characters of a worker's description of its wait
_LEAST_PAUSE_S: Final = 4.0  # between two sentences
_MORE: Final = 1.8  # the same sentence is printed again after this many times as long a wait
_STUCK: Final = "None of these can go on"
_STUCK_ADVICE: Final = (
    "have all workers make the same calls in the same order, and finish as many clocks before each barrier(), or let "
    "those that are done end"
)
_MOST_NAMES: Final = 8
_MAX_NAME: Final = 60  # characters of the name of a tensor


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
        """Store a report and return its answer: a flag, then the sentence.

        The flag is b"1" if the sentence is to be printed, else b"0"; b"3" and b"2" if this is a deadlock. What to do
        about a deadlock is only in the first sentence on it: the errors of all workers follow.
        """
        current = self.core.lives.current(life[0])
        if not report.what or current is None or current.incarnation != life[1]:
            self.forget(life)
            return b"0"
        self._reports[life] = report
        waiters = self._waiters()
        text = describe(waiters, self.core.whereabouts)
        locked = stuck(waiters)
        blockers = {worker for waiter in waiters.values() for worker in waiter.blockers}
        roots = frozenset(blockers - set(waiters) | locked)
        advice = "" if roots == self._told else f": {_STUCK_ADVICE}"
        tells = report.waited_s > 0 and self._is_news(roots, report.waited_s, now)
        return (f"{2 + tells}{text}. {_STUCK}{advice}" if locked else f"{int(tells)}{text}").encode()

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
        for name, waiting in self.request_handler.waiting_for_names().items():
            found.update((worker, self._of_name(name, worker)) for worker in waiting)
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

    def _of_name(self, name: str, rank: int) -> Waiter:
        """Return the wait for a named tensor, which any other worker may push."""
        others = tuple(worker for worker in self.core.members if worker != rank)
        exist = [_shown(table.removeprefix(NAMED)) for table in sorted(self.core.tables) if table.startswith(NAMED)]
        more = f" and {len(exist) - _MOST_NAMES} more" if len(exist) > _MOST_NAMES else ""
        known = f"(names that exist: {', '.join(exist[:_MOST_NAMES]) or 'none'}{more})"
        by = " by {}" if others else ""
        return Waiter(f"waits for the first push to {_shown(name)}{by} {known}", others, any_of=True)

    def _of_clock(self, rank: int, table: str, needs: int, what: str) -> Waiter:
        blockers = tuple(worker for worker in self.core.behind(needs) if worker != rank)
        entry = self.core.tables.get(table)
        if not blockers or (entry is not None and entry.consistency.backups >= len(blockers)):
            return Waiter(f"waits for {what}")
        about = f" (table '{printable(table)}', {entry.consistency})" if entry is not None else f" ({what})"
        return Waiter(f"waits for clock {needs - 1} of {{}}{about}", blockers)


def _shown(name: str) -> str:
    """Return the name of a tensor for a sentence with a place for the names of workers."""
    return f"'{printable(name[:_MAX_NAME]).replace('{}', '?')}'"

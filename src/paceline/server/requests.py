"""Requests to a server beside the clock protocol: declarations, initial values, state, barriers, work claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from paceline.core.events import Declared
from paceline.core.work_queue import Life
from paceline.errors import PacelineError
from paceline.server.tables import ServedTables
from paceline.server.work_queue import Send, WorkQueueHost
from paceline.transport.base import EMPTY
from paceline.wire.bounds import require_short
from paceline.wire.malformed import REQUEST_ERRORS, describe_error
from paceline.wire.requests import (
    AwaitValues,
    Barrier,
    ClaimWork,
    Declare,
    DeclareRows,
    Describe,
    Initialise,
    LoadState,
    Request,
    RequestDone,
    RequestFailed,
    SaveState,
)

T = TypeVar("T")

# Pending requests of one kind by one worker, which waits for each answer; one with more is a misbehaving peer.
MAX_WAITING = 1024
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

    def release(self, members: Sequence[int]) -> None:
        """Answer the pending requests that can be answered now; `members` are the ranks that take part."""
        for place in [place for place, present in self._at_barriers.items() if _is_complete(present, members)]:
            present = self._at_barriers.pop(place)
            reason = _failure(present)
            for life, request in present.items():
                self._passed[life] = RequestFailed(request.number, reason) if reason else RequestDone(request.number)
                self._answer(life, self._passed[life])
        for table in [table for table in self._awaiting if self.tables[table].has_values]:
            for life, number in self._awaiting.pop(table).items():
                self._answer(life, RequestDone(number))
        for table in [table for table in self._describing if table in self.tables]:
            settings = memoryview(self.tables[table].encoded_spec())
            for life, number in self._describing.pop(table).items():
                self.send(*life, RequestDone(number), settings)
        if members:
            self._ask_for_values(min(members))
        self.work_host.release()

    def at_barriers(self) -> dict[str, list[int]]:
        """Return the ranks that wait at each barrier."""
        return {place: sorted(rank for rank, _ in present) for place, present in self._at_barriers.items()}

    def forget(self, life: Life) -> None:
        """Drop the pending requests of a worker that has left."""
        self.work_host.remove_worker(life)
        self._passed.pop(life, None)
        self._awaiting = _without(self._awaiting, life)
        self._describing = _without(self._describing, life)
        self._at_barriers = _without(self._at_barriers, life)

    def _ask_for_values(self, first: int) -> None:
        """Refuse to let the lowest rank wait for initial values: it has to send them itself."""
        asked = [(table, life) for table, waiting in self._awaiting.items() for life in waiting if life[0] == first]
        for table, life in asked:
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
                self.tables.require(request.table).initialise(body)
                self._answer(life, RequestDone(request.number))
            case SaveState():
                state = self.tables.require(request.table).state()
                self.send(*life, RequestDone(request.number), memoryview(state))
            case LoadState():
                self.tables.require(request.table).load_state(body)
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

"""Requests about whole tables, carried out exactly once and at their clock: functions, export and import of rows.

A worker repeats a request until it is answered, so copies arrive, early and late. Each request runs once: its answer is
kept until the worker confirms it, and copies get that answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.work_queue import Life
from paceline.errors import PeerError, UsageError
from paceline.server.memory_check import MAX_TABLES
from paceline.server.served_table import ServedTable
from paceline.server.tables import ServedTables
from paceline.server.versions import PublishedVersions
from paceline.server.work_queue import Send
from paceline.transport.base import EMPTY
from paceline.wire.malformed import REQUEST_ERRORS, describe_error
from paceline.wire.requests import (
    MAX_HEARD_BYTES,
    BeginCut,
    CallFunction,
    PublishTable,
    RequestDone,
    RequestFailed,
    WholeTable,
    WriteRows,
)

# Requests of one worker whose answers it is not known to have. For a snapshot, and for each version under way, it asks
# for all tables at once, before the first answer has come; one with more is a misbehaving peer.
MAX_OPEN = 4 * MAX_TABLES


def _note_nothing(_table: str, _what: str) -> None:
    """Stand for a server that keeps no journal."""


@dataclass(slots=True)
class _WorkerCalls:
    """The requests of one worker that it may still repeat."""

    # The worker has the answers to all numbers below; a copy of these that still arrives is ignored.
    settled: int = 0
    # By number; invariant: all are >= settled, none is in both.
    answers: dict[int, tuple[RequestDone | RequestFailed, memoryview]] = field(
        default_factory=dict[int, tuple[RequestDone | RequestFailed, memoryview]]
    )
    waiting: dict[int, tuple[WholeTable, memoryview]] = field(default_factory=dict[int, tuple[WholeTable, memoryview]])
    num_bytes: int = 0  # of answers that are kept and of requests that wait

    def settle(self, settled: int) -> None:
        if settled > self.settled:
            self.settled = settled
            self.answers = {number: answer for number, answer in self.answers.items() if number >= settled}
            self.waiting = {number: entry for number, entry in self.waiting.items() if number >= settled}
            self.num_bytes = sum(len(body) for _, body in (*self.answers.values(), *self.waiting.values()))

    def wait(self, number: int, request: WholeTable, body: memoryview) -> None:
        self.waiting[number] = request, body
        self.num_bytes += len(body)

    def stop_waiting(self, number: int) -> None:
        _, body = self.waiting.pop(number)
        self.num_bytes -= len(body)

    def keep(self, number: int, answer: tuple[RequestDone | RequestFailed, memoryview]) -> None:
        self.answers[number] = answer
        self.num_bytes += len(answer[1])


@dataclass(slots=True)
class TableRpc:
    """Carries out requests as their clocks come; those of one clock by rank, then by number.

    Args:
        tables: carry out requests.
        send: sends an answer to a worker.
        clock_of: returns the clock that a table has reached.
        note_began: called with a table and what is about to change it.
        versions: what is published goes there.
    """

    tables: ServedTables
    send: Send
    clock_of: Callable[[str], int]
    note_began: Callable[[str, str], None] = _note_nothing
    versions: PublishedVersions = field(default_factory=PublishedVersions)
    # By worker that takes part.
    _workers: dict[Life, _WorkerCalls] = field(default_factory=dict[Life, _WorkerCalls])
    has_waiting: bool = False  # some requests may wait for clocks

    def admit(self, life: Life) -> None:
        """Accept requests of a worker that has joined."""
        self._workers.setdefault(life, _WorkerCalls())

    def forget(self, life: Life) -> None:
        """Drop the pending requests of a worker that has left; what was carried out stays."""
        self._workers.pop(life, None)
        self.tables.cuts.forget(life)

    def handle(self, life: Life, request: WholeTable, body: memoryview) -> None:
        """Carry out a request, now or when its clock has come, unless it is a copy.

        Raises:
            PeerError: the worker has too many unanswered requests.
        """
        table_call, calls = request.table_call, self._workers.get(life)
        if calls is None:
            self.send(*life, RequestFailed(table_call.number, f"worker {life[0]} takes no part"), EMPTY)
            return
        calls.settle(table_call.settled)
        if table_call.number in calls.answers:
            self.send(*life, *calls.answers[table_call.number])
            return
        if table_call.number < calls.settled or table_call.number in calls.waiting:
            return
        if len(calls.answers) + len(calls.waiting) >= MAX_OPEN or calls.num_bytes + len(body) > MAX_HEARD_BYTES:
            raise PeerError(
                f"worker {life[0]} has more than {MAX_OPEN} requests about whole tables open, or more than "
                f"{MAX_HEARD_BYTES} bytes of them"
            )
        if table_call.table in self.tables and self.clock_of(table_call.table) < table_call.needs:
            calls.wait(table_call.number, request, body)
            self.has_waiting = True
        else:
            self._carry_out(life, calls, request, body)

    def advance_idle(self) -> None:
        """Carry out the requests that wait for clocks which tables without pushes have reached."""
        waiting = [request for calls in self._workers.values() for request, _ in calls.waiting.values()]
        self.has_waiting = bool(waiting)
        for table in {request.table_call.table for request in waiting}:
            self.advance(table, self.clock_of(table))

    def advance(self, table: str, clock: int) -> None:
        """Carry out the requests that waited for a table to reach this clock."""
        for life, calls in sorted(self._workers.items()):
            for number, (request, body) in sorted(calls.waiting.items()):
                if request.table_call.table == table and request.table_call.needs <= clock:
                    calls.stop_waiting(number)
                    self._carry_out(life, calls, request, body)

    def _carry_out(self, life: Life, calls: _WorkerCalls, request: WholeTable, body: memoryview) -> None:
        number, name = request.table_call.number, request.table_call.table
        answer: tuple[RequestDone | RequestFailed, memoryview]
        try:
            table = self.tables.require(name)
            if isinstance(request, CallFunction | WriteRows):
                self.note_began(name, f"a {type(request).__name__}")
            clock = self.clock_of(name)
            match request:
                case BeginCut():
                    body = self.tables.cuts.begin(life, request, table, clock)
                case PublishTable():
                    self._publish(request, table, clock)
                    body = EMPTY
                case _:
                    body = table.carry_out(request, body, clock)
            answer = RequestDone(number), body
        except REQUEST_ERRORS as error:
            answer = RequestFailed(number, describe_error(error)), EMPTY
        calls.keep(number, answer)
        self.send(*life, *answer)

    def _publish(self, request: PublishTable, table: ServedTable, clock: int) -> None:
        """Publish a table as it is; refuse if its values have gone on: all servers must have those of one clock."""
        call = request.table_call
        if table.consistency.visible == "on_clock" and clock != call.needs:
            raise UsageError(
                f"version {request.number} of '{request.name}' is not published: table '{call.table}' has reached "
                f"clock {clock} meanwhile"
            )
        self.versions.add(request, table.part_to_publish())

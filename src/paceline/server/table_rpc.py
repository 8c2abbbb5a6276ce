"""What a server does once for each time that it is asked, when the clock has come: functions, and rows as a whole.

A worker repeats a request until it is answered, so copies come, early and late. Here each is carried out once: the
answer is kept until the worker says that it has it, and copies are given that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import PeerError
from paceline.server.requests import Life, Send
from paceline.server.whole_tables import WholeTables
from paceline.transport.base import EMPTY
from paceline.wire.bounds import MAX_HEARD_BYTES
from paceline.wire.malformed import MISHAPS, story
from paceline.wire.requests import RequestDone, RequestFailed, WholeTable

# A worker waits for its answers, so one with more requests that it has no answer to is a misbehaving peer.
MAX_OPEN = 64


@dataclass(slots=True)
class _Book:
    """The errands of one life that it may still ask about."""

    # Its sender has the answers to all below; a copy that still arrives is late and needs nothing.
    settled: int = 0
    # By number; invariant: all are >= settled, none is in both.
    answers: dict[int, tuple[RequestDone | RequestFailed, memoryview]] = field(
        default_factory=dict[int, tuple[RequestDone | RequestFailed, memoryview]]
    )
    waiting: dict[int, tuple[WholeTable, memoryview]] = field(default_factory=dict[int, tuple[WholeTable, memoryview]])

    @property
    def num_bytes(self) -> int:
        """What is kept: of answers, and of what waits to be done."""
        return sum(len(body) for _, body in (*self.answers.values(), *self.waiting.values()))

    def settle(self, settled: int) -> None:
        if settled > self.settled:
            self.settled = settled
            self.answers = {number: answer for number, answer in self.answers.items() if number >= settled}
            self.waiting = {number: entry for number, entry in self.waiting.items() if number >= settled}


@dataclass(slots=True)
class TableRpc:
    """Carries out errands in the order in which they may be; those that wait for one clock by rank, then number.

    Args:
        tables: does the work.
        send: answers a life of a worker.
        clock_of: returns the clock that a table has reached.
    """

    tables: WholeTables
    send: Send
    clock_of: Callable[[str], int]
    # Of those who take part.
    _books: dict[Life, _Book] = field(default_factory=dict[Life, _Book])

    def admit(self, life: Life) -> None:
        """Take errands of a worker that takes part from now on."""
        self._books.setdefault(life, _Book())

    def forget(self, life: Life) -> None:
        """Drop what a worker that takes part no longer was waiting for; what is done stays done."""
        self._books.pop(life, None)

    def ask(self, life: Life, request: WholeTable, body: memoryview) -> None:
        """Carry out an errand, now or when its clock has come, unless this is a copy.

        Raises:
            PeerError: the worker asks for more than it can be waiting for.
        """
        table_call, book = request.table_call, self._books.get(life)
        if book is None:
            self.send(*life, RequestFailed(table_call.number, f"worker {life[0]} takes no part"), EMPTY)
            return
        book.settle(table_call.settled)
        if table_call.number in book.answers:
            self.send(*life, *book.answers[table_call.number])
            return
        if table_call.number < book.settled or table_call.number in book.waiting:
            return
        if len(book.answers) + len(book.waiting) >= MAX_OPEN or book.num_bytes + len(body) > MAX_HEARD_BYTES:
            raise PeerError(
                f"worker {life[0]} has more than {MAX_OPEN} requests about whole tables open, or more than "
                f"{MAX_HEARD_BYTES} bytes of them"
            )
        if table_call.table in self.tables and self.clock_of(table_call.table) < table_call.needs:
            book.waiting[table_call.number] = request, body
        else:
            self._carry_out(life, book, request, body)

    def advance(self, table: str, clock: int) -> None:
        """Carry out what waited for a table to reach this clock."""
        for life, book in sorted(self._books.items()):
            for number, (request, body) in sorted(book.waiting.items()):
                if request.table_call.table == table and request.table_call.needs <= clock:
                    del book.waiting[number]
                    self._carry_out(life, book, request, body)

    def _carry_out(self, life: Life, book: _Book, request: WholeTable, body: memoryview) -> None:
        number = request.table_call.number
        answer: tuple[RequestDone | RequestFailed, memoryview]
        try:
            answer = RequestDone(number), self.tables.carry_out(request, body, self.clock_of)
        except MISHAPS as error:
            answer = RequestFailed(number, story(error)), EMPTY
        book.answers[number] = answer
        self.send(*life, *answer)

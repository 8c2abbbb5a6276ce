"""A worker's reads of row tables: each of some rows, several at a time.

The driver finds which rows a read lacks; the core counts servers, not rows. A row is fresh if it was fetched at a clock
that the reader may use, or if the deliveries of its server have reached such a clock. Rules:
1. A read ends when every server that it waits for has answered it, or has delivered a clock that it may use.
2. A read that waits for a delivery pulls its rows itself if none comes: deliveries may be lost with a connection.
3. A delivery has the changes since the one before, so deliveries count only in an unbroken chain. When the chain
   breaks, all cached rows of this server are dropped.
4. Messages of a server count in the order in which it made them: an answer that was overtaken is pulled again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.consistency import Consistency
from paceline.core.effects import Fail, Forget, InstallRows, ReadDone, Send, WorkerEffect
from paceline.core.events import WantRows
from paceline.core.messages import Delivered, Fetched, Pull, Sender, Taken
from paceline.core.retransmit import Key, Retransmit


@dataclass(slots=True)
class _RowTable:
    consistency: Consistency
    # The clock that the deliveries of each server have reached. Invariant: all cached rows of that server contain every
    # update below.
    delivered: dict[int, int] = field(default_factory=dict[int, int])
    # The last delivery of each server, to recognise a copy of it.
    last: dict[int, Delivered] = field(default_factory=dict[int, Delivered])
    # (clock, version) of the newest rows that each server has sent. Invariant: both only grow.
    newest: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def overtook(self, server: int, message: Fetched | Delivered) -> bool:
        """Return whether newer rows arrived before these; if not, record these as the newest."""
        made = message.clock, message.version
        if made < self.newest.get(server, made):
            return True
        self.newest[server] = made
        return False


@dataclass(slots=True)
class _RowReading:
    table: str
    needs: int
    fetching: set[int]  # servers that have not answered this read yet
    delivering: set[int]  # servers whose deliveries have not reached `needs` yet
    oldest: int | None = None  # the oldest clock among the rows that have arrived
    source: str = "cache"

    def came(self, server: int, clock: int, source: str) -> None:
        self.fetching.discard(server)
        self.delivering.discard(server)
        self.oldest = clock if self.oldest is None else min(clock, self.oldest)
        self.source = source


@dataclass(slots=True)
class RowReads:
    """The row tables that a worker has opened, and its reads of them that are under way."""

    sender: Sender
    retransmit: Retransmit
    _tables: dict[str, _RowTable] = field(default_factory=dict[str, _RowTable])
    _open: dict[int, _RowReading] = field(default_factory=dict[int, _RowReading])

    def __contains__(self, table: str) -> bool:
        """Return whether this is an open row table."""
        return table in self._tables

    def open(self, table: str, consistency: Consistency) -> None:
        """Open a row table; opening it again changes nothing."""
        self._tables.setdefault(table, _RowTable(consistency))

    def consistency(self, table: str) -> Consistency:
        """Return the policy of a table."""
        return self._tables[table].consistency

    def delivered(self, table: str, server: int) -> int:
        """Return the clock that a server's deliveries have reached, -1 before the first."""
        return self._tables[table].delivered.get(server, -1)

    def awaited(self, table: str) -> set[int]:
        """Return the servers from which an answer to a read of this table may come."""
        return {s for r in self._open.values() if r.table == table for s in (*r.fetching, *r.delivering)}

    def asked(self, server: int, request: int) -> Pull | None:
        """Return the pull of a read that a server has not answered yet, or None."""
        message = self.retransmit.message(_key(server, request))
        return message if isinstance(message, Pull) else None

    def want(self, event: WantRows, request: int, clock: int, now: float, effects: list[WorkerEffect]) -> None:
        """Start a read."""
        needs = event.needs
        reading = _RowReading(event.table, needs, set(event.fetch), set(event.deliver))
        self._open[request] = reading
        for server in (*event.fetch, *event.deliver):
            pull = Pull(self.sender, request, event.table, clock, needs)
            self.retransmit.add(_key(server, request), pull, now)
            if server in reading.fetching:
                effects.append(Send(server, pull))
        self._finish(request, effects)

    def on_fetched(self, server: int, message: Fetched, effects: list[WorkerEffect]) -> None:
        """Process the answer to a read; a late answer changes nothing."""
        asked, reading = self.asked(server, message.request), self._open.get(message.request)
        if asked is None or reading is None:
            return
        if message.clock < asked.needs:
            effects.append(Fail(_broken(server, message, asked)))
            return
        if self._tables[message.table].overtook(server, message):
            effects.append(Send(server, asked))
            return
        self.retransmit.answered(_key(server, message.request))
        effects.append(
            InstallRows(server, message.table, message.request, message.clock, message.settled, message.includes)
        )
        reading.came(server, message.clock, "fetch")
        self._finish(message.request, effects)

    def on_delivered(self, server: int, message: Delivered, effects: list[WorkerEffect]) -> None:
        """Process rows that changed; only after that may reads rely on the clock of the delivery."""
        table, taken = self._tables[message.table], Taken(self.sender, message.table, message.clock)
        if table.last.get(server) == message:
            effects.append(Send(server, taken))  # the first confirmation may be lost
            return
        before = table.delivered.get(server, -1)
        if table.overtook(server, message) or message.since != before:
            effects.append(Forget(server, message.table))
        else:
            effects.append(InstallRows(server, message.table, -1, message.clock, message.settled, message.includes))
        effects.append(Send(server, taken))
        table.last[server], table.delivered[server] = message, max(message.clock, before)
        for request, reading in list(self._open.items()):
            if reading.table == message.table and server in reading.delivering and message.clock >= reading.needs:
                self.retransmit.answered(_key(server, request))
                reading.came(server, message.clock, "delivery")
                self._finish(request, effects)

    def on_connected(self, server: int) -> None:
        """Stop waiting for deliveries, which may be lost; the unanswered pulls are repeated anyway."""
        for reading in self._open.values():
            if server in reading.delivering:
                reading.delivering.discard(server)
                reading.fetching.add(server)

    def _finish(self, request: int, effects: list[WorkerEffect]) -> None:
        reading = self._open[request]
        if not reading.fetching and not reading.delivering:
            del self._open[request]
            clock = reading.needs if reading.oldest is None else reading.oldest
            effects.append(ReadDone(request, reading.table, clock, reading.source))


def _key(server: int, request: int) -> Key:
    return server, "rows", request


def _broken(server: int, message: Fetched, asked: Pull) -> str:
    return (
        f"server {server} answered a pull of rows of table '{message.table}' with values of clock {message.clock}, "
        f"but worker {asked.sender.worker} at clock {asked.clock} needs {asked.needs}; "
        "the server breaks the staleness bound"
    )

"""A worker's reads of one row table: each of some rows, several at a time.

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
from paceline.core.effects import Forget, Install, ReadDone, Send, WorkerEffect
from paceline.core.events import WantRead, WantRows
from paceline.core.messages import Delivered, Fetched, Pull, Sender, Taken
from paceline.core.retransmit import Key, Retransmit
from paceline.core.table_reads import broken_bound
from paceline.errors import ProtocolBug


@dataclass(slots=True)
class _RowReading:
    clock: int  # of the worker when it started the read
    needs: int
    fetching: set[int]  # servers that have not answered this read yet
    delivering: set[int]  # servers whose deliveries have not reached `needs` yet
    oldest: int | None = None  # the oldest clock among the rows that have arrived
    source: str = "cache"

    def note_arrived(self, server: int, clock: int, source: str) -> None:
        self.fetching.discard(server)
        self.delivering.discard(server)
        self.oldest = clock if self.oldest is None else min(clock, self.oldest)
        self.source = source


@dataclass(slots=True)
class RowReads:
    """The reads of one row table; see `TableReads`."""

    sender: Sender
    retransmit: Retransmit
    table: str
    consistency: Consistency
    servers: tuple[int, ...]
    # The clock that the deliveries of each server have reached. Invariant: all cached rows of that server contain every
    # update below.
    _delivered: dict[int, int] = field(default_factory=dict[int, int])
    # The last delivery of each server, to recognise a copy of it.
    _last: dict[int, Delivered] = field(default_factory=dict[int, Delivered])
    # (clock, version) of the newest rows that each server has sent. Invariant: both only grow.
    _newest: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    _under_way: dict[int, _RowReading] = field(default_factory=dict[int, _RowReading])  # by request

    def start(
        self, want: WantRead | WantRows, request: int, clock: int, now: float, effects: list[WorkerEffect]
    ) -> None:
        """Start a read; see `TableReads`."""
        if not isinstance(want, WantRows):
            raise ProtocolBug(f"table '{self.table}' has rows, and cannot process {want}")
        reading = _RowReading(clock, want.needs, set(want.fetch), set(want.deliver))
        self._under_way[request] = reading
        for server in (*want.fetch, *want.deliver):
            pull = Pull(self.sender, request, self.table, clock, want.needs)
            self.retransmit.add(_key(server, request), pull, now)
            if server in reading.fetching:
                effects.append(Send(server, pull))
        self._finish(request, effects)

    def on_values(self, server: int, message: Fetched | Delivered, effects: list[WorkerEffect]) -> None:
        """Process rows of a server; see `TableReads`."""
        if isinstance(message, Fetched):
            self._on_fetched(server, message, effects)
        else:
            self._on_delivered(server, message, effects)

    def on_connected(self, server: int) -> None:
        """Stop waiting for deliveries, which may be lost; the unanswered pulls are repeated anyway."""
        for reading in self._under_way.values():
            if server in reading.delivering:
                reading.delivering.discard(server)
                reading.fetching.add(server)

    def unanswered_pull(self, server: int, request: int) -> Pull | None:
        """Return the pull of a read that a server has not answered yet, or None."""
        message = self.retransmit.message(_key(server, request))
        return message if isinstance(message, Pull) else None

    def awaits(self, server: int, message: Fetched) -> bool:
        """Return whether a read waits for this answer; False for a late or repeated one."""
        return self.unanswered_pull(server, message.request) is not None

    def awaited(self) -> set[int]:
        """Return the servers from which an answer may come that a read waits for."""
        return {s for reading in self._under_way.values() for s in (*reading.fetching, *reading.delivering)}

    def reached(self, server: int) -> int:
        """Return the clock that a server's deliveries have reached, -1 before the first."""
        return self._delivered.get(server, -1)

    def needs(self) -> int:
        """Return the latest clock that a read under way needs; 0 without one."""
        return max((reading.needs for reading in self._under_way.values()), default=0)

    def _on_fetched(self, server: int, message: Fetched, effects: list[WorkerEffect]) -> None:
        """Process the answer to a read; a late answer changes nothing."""
        pull, reading = self.unanswered_pull(server, message.request), self._under_way.get(message.request)
        if pull is None or reading is None:
            return
        if message.clock < pull.needs:
            effects.append(broken_bound(server, message, pull, "rows of table"))
            return
        if self._overtook(server, message):
            effects.append(Send(server, pull))
            return
        self.retransmit.answered(_key(server, message.request))
        effects.append(Install(server, self.table, message.request, message.clock, message.settled, message.includes))
        reading.note_arrived(server, message.clock, "fetch")
        self._finish(message.request, effects)

    def _on_delivered(self, server: int, message: Delivered, effects: list[WorkerEffect]) -> None:
        """Process rows that changed; only after that may reads rely on the clock of the delivery."""
        taken = Taken(self.sender, self.table, message.clock)
        if self._last.get(server) == message:
            effects.append(Send(server, taken))  # the first confirmation may be lost
            return
        before = self.reached(server)
        if self._overtook(server, message) or message.since != before:
            effects.append(Forget(server, self.table))
        else:
            effects.append(Install(server, self.table, -1, message.clock, message.settled, message.includes))
        effects.append(Send(server, taken))
        self._last[server], self._delivered[server] = message, max(message.clock, before)
        for request, reading in list(self._under_way.items()):
            if server in reading.delivering and message.clock >= reading.needs:
                self.retransmit.answered(_key(server, request))
                reading.note_arrived(server, message.clock, "delivery")
                self._finish(request, effects)

    def _overtook(self, server: int, message: Fetched | Delivered) -> bool:
        """Return whether newer rows arrived before these; if not, record these as the newest."""
        made = message.clock, message.version
        if made < self._newest.get(server, made):
            return True
        self._newest[server] = made
        return False

    def _finish(self, request: int, effects: list[WorkerEffect]) -> None:
        reading = self._under_way[request]
        if not reading.fetching and not reading.delivering:
            del self._under_way[request]
            # A read ahead for which nothing has arrived does not show that its clock is complete.
            clock = min(reading.needs, reading.clock) if reading.oldest is None else reading.oldest
            effects.append(ReadDone(request, self.table, clock, reading.source))


def _key(server: int, request: int) -> Key:
    return server, "rows", request

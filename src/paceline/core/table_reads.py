"""A worker's reads of one table: what the worker's core asks of any table, and the reads of dense and of row tables.

A dense table is read as a whole, one read at a time. Rules:
1. The cached copy of each server's part only gets newer.
2. A read ends when the part of every server is fresh enough for it, and with `refresh` was sent for this read.
3. Every message has all values of its server's part, so none that is lost leaves a gap.

A row table is read by some rows, several reads at a time. The driver finds which rows a read lacks; the core counts
servers, not rows. A row is fresh if it was fetched at a clock that the reader may use, or if the deliveries of its
server have reached such a clock. Rules:
1. A read ends when every server that it waits for has answered it, or has delivered a clock that it may use.
2. A read that waits for a delivery pulls its rows itself if none comes: deliveries may be lost with a connection.
3. A delivery has the changes since the one before, so deliveries count only in an unbroken chain. When the chain
   breaks, all cached rows of this server are dropped.
4. Messages of a server count in the order in which it made them: an answer that was overtaken is pulled again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from paceline.core.consistency import Consistency
from paceline.core.effects import Fail, Forget, Install, ReadDone, Send, WorkerEffect
from paceline.core.events import Opened, WantRead, WantRows
from paceline.core.exactly_once import Key, Retransmit
from paceline.core.messages import Delivered, Fetched, Pull, Sender, Taken
from paceline.errors import ProtocolBug


class TableReads(Protocol):
    """The reads of one table: which are under way, and how new what is cached is.

    Two implementations: `DenseReads` for whole values, `RowReads` for rows; `reads_of` chooses.

    Attributes:
        join_steps: whether pulls of such a table may wait for others, to travel in one message with pushes, which their
            answers then answer as well.
    """

    join_steps: ClassVar[bool]

    def start(
        self, want: WantRead | WantRows, request: int, clock: int, now: float, effects: list[WorkerEffect]
    ) -> None:
        """Start a read of a worker at `clock`: add the pulls to `effects`, or `ReadDone` if nothing is lacking."""
        ...

    def on_values(self, server: int, message: Fetched | Delivered, effects: list[WorkerEffect]) -> None:
        """Process values of a server: add what to cache to `effects`, then the reads that this ends."""
        ...

    def on_connected(self, server: int) -> None:
        """Process a new connection to a server, whose deliveries may be lost. Unanswered pulls are repeated anyway."""
        ...

    def unanswered_pull(self, server: int, request: int) -> Pull | None:
        """Return the pull of a read that a server has not answered yet, or None."""
        ...

    def awaits(self, server: int, message: Fetched) -> bool:
        """Return whether a read waits for this answer; False for a late or repeated one."""
        ...

    def awaited(self) -> set[int]:
        """Return the servers from which an answer may come that a read waits for."""
        ...

    def reached(self, server: int) -> int:
        """Return a clock below which all that is cached from a server contains every update, -1 if there is none."""
        ...

    def needs(self) -> int:
        """Return the clock below which a read under way must see all updates; 0 without one."""
        ...


def broken_bound(server: int, message: Fetched, pull: Pull, what: str) -> Fail:
    """Return the failure of a worker whose pull was answered with values that are too old."""
    return Fail(
        f"server {server} answered a pull of {what} '{message.table}' with values of clock {message.clock}, "
        f"but worker {pull.sender.worker} at clock {pull.clock} needs {pull.needs}; the server breaks the staleness "
        "bound"
    )


@dataclass(slots=True)
class _Reading:
    request: int
    needs: int
    unasked: int  # what a part needs that is no answer to this read
    refresh: bool
    awaited: set[int]  # servers whose part is not fresh enough yet
    source: str = "fetch"


@dataclass(slots=True)
class DenseReads:
    """The reads of one dense table. A later read replaces an earlier one."""

    join_steps: ClassVar[bool] = True
    sender: Sender
    retransmit: Retransmit
    table: str
    consistency: Consistency
    servers: tuple[int, ...]
    # (clock, version) of the cached part of each server. Invariant: both only grow. Absent = never seen.
    have: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    reading: _Reading | None = None
    _keys: dict[int, Key] = field(init=False)  # of the pull to each server

    def __post_init__(self) -> None:
        """Make the keys of the pulls."""
        self._keys = {server: (server, "pull", self.table) for server in self.servers}

    def start(
        self, want: WantRead | WantRows, request: int, clock: int, now: float, effects: list[WorkerEffect]
    ) -> None:
        """Start a read; see `TableReads`."""
        if not isinstance(want, WantRead):
            raise ProtocolBug(f"table '{self.table}' is dense, and cannot process {want}")
        is_exact = want.exact or self.consistency.bound == 0
        needs = clock if is_exact else self.consistency.needs(clock)
        unasked = clock if is_exact else self.consistency.unasked(clock)
        awaited = set(self.servers if want.refresh else (s for s in self.servers if not self._is_fresh(s, unasked)))
        self.reading = _Reading(request, needs, unasked, want.refresh, awaited)
        if not awaited:
            self.reading.source = "delivery" if self.consistency.deliver == "on_clock" else "cache"
            self._finish(effects)
        for server in sorted(awaited):
            pull = Pull(self.sender, request, self.table, clock, needs)
            self.retransmit.add(self._keys[server], pull, now)
            effects.append(Send(server, pull))

    def on_values(self, server: int, message: Fetched | Delivered, effects: list[WorkerEffect]) -> None:
        """Process the part of a server; see `TableReads`."""
        request = message.request if isinstance(message, Fetched) else -1
        if (message.clock, message.version) >= self.have.get(server, (-1, -1)):
            self.have[server] = (message.clock, message.version)
            effects.append(Install(server, self.table, request, message.clock, message.settled, message.includes))
        if isinstance(message, Delivered):
            effects.append(Send(server, Taken(self.sender, self.table, message.clock)))
        else:
            self._note_answered(server, message, effects)
        reading = self.reading
        if reading and server in reading.awaited:
            is_answer = request == reading.request
            is_fresh = self._is_fresh(server, reading.needs if is_answer else reading.unasked)
            if is_fresh and (is_answer or not reading.refresh):
                reading.awaited.discard(server)
                if not is_answer:
                    reading.source = "delivery"
        if reading and not reading.awaited:
            self._finish(effects)

    def on_connected(self, server: int) -> None:
        """Change nothing: every message has all values of a part."""

    def unanswered_pull(self, server: int, request: int) -> Pull | None:
        """Return the pull of a read that a server has not answered yet, or None."""
        message = self.retransmit.message(self._keys.get(server, (server, "pull", self.table)))
        return message if isinstance(message, Pull) and message.request == request else None

    def awaits(self, server: int, message: Fetched) -> bool:
        """Return whether a read waits for this answer; False for a late or repeated one."""
        reading = self.reading
        return reading is not None and reading.request == message.request and server in reading.awaited

    def awaited(self) -> set[int]:
        """Return the servers from which an answer may come that a read waits for."""
        return set() if self.reading is None else set(self.reading.awaited)

    def reached(self, server: int) -> int:
        """Return the clock of the cached part of a server, -1 if there is none."""
        return self.have.get(server, (-1, -1))[0]

    def needs(self) -> int:
        """Return the clock below which the read under way must see all updates; 0 without such a read."""
        return 0 if self.reading is None else self.reading.needs

    def _is_fresh(self, server: int, needs: int) -> bool:
        return server in self.have and self.have[server][0] >= needs

    def _note_answered(self, server: int, message: Fetched, effects: list[WorkerEffect]) -> None:
        pull = self.unanswered_pull(server, message.request)
        if pull is not None:
            self.retransmit.answered(self._keys[server])
            if message.clock < pull.needs:
                effects.append(broken_bound(server, message, pull, "table"))

    def _finish(self, effects: list[WorkerEffect]) -> None:
        reading = self.reading
        if reading is None or reading.awaited:
            return
        self.reading = None
        for key in self._keys.values():
            self.retransmit.answered(key)
        oldest = min(self.have.values())[0]
        effects.append(ReadDone(reading.request, self.table, oldest, reading.source))


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

    join_steps: ClassVar[bool] = False
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


def reads_of(table: Opened, sender: Sender, retransmit: Retransmit) -> TableReads:
    """Return the reads of a table that is opened, by its kind."""
    kind = RowReads if table.keyed else DenseReads
    return kind(sender, retransmit, table.table, table.consistency, table.servers)

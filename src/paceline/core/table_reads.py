"""A worker's reads of one table: what the worker's core asks of any table, and the reads of dense tables.

A dense table is read as a whole, one read at a time. Rules:
1. The cached copy of each server's part only gets newer.
2. A read ends when the part of every server is fresh enough for it, and with `refresh` was sent for this read.
3. Every message has all values of its server's part, so none that is lost leaves a gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.consistency import Consistency
from paceline.core.effects import Fail, Install, ReadDone, Send, WorkerEffect
from paceline.core.events import WantRead, WantRows
from paceline.core.messages import Delivered, Fetched, Pull, Sender, Taken
from paceline.core.retransmit import Key, Retransmit
from paceline.errors import ProtocolBug


class TableReads(Protocol):
    """The reads of one table: which are under way, and how new what is cached is.

    Two implementations: `DenseReads` for whole values, `RowReads` for rows.
    """

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
    refresh: bool
    awaited: set[int]  # servers whose part is not fresh enough yet
    source: str = "fetch"


@dataclass(slots=True)
class DenseReads:
    """The reads of one dense table. A later read replaces an earlier one."""

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
        needs = clock if want.exact else self.consistency.needs(clock)
        awaited = {s for s in self.servers if want.refresh or not self._is_fresh(s, needs)}
        self.reading = _Reading(request, needs, want.refresh, awaited)
        if not awaited:
            self.reading.source = "delivery" if self.consistency.deliver == "on_clock" else "cache"
        for server in sorted(awaited):
            pull = Pull(self.sender, request, self.table, clock, needs)
            self.retransmit.add(self._keys[server], pull, now)
            effects.append(Send(server, pull))
        self._finish(effects)

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
        if reading and server in reading.awaited and self._is_fresh(server, reading.needs):
            if request == reading.request:
                reading.awaited.discard(server)
            elif not reading.refresh:
                reading.awaited.discard(server)
                reading.source = "delivery"
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
        oldest = min(clock for clock, _ in self.have.values())
        effects.append(ReadDone(reading.request, self.table, oldest, reading.source))

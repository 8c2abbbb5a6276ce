"""One simulated worker: joins, then reads, computes, pushes and finishes clocks, and leaves after the last."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from paceline.core.effects import (
    Drop,
    Fail,
    Forget,
    Install,
    JoinDone,
    LeaveDone,
    ReadDone,
    Release,
    Send,
    WorkerEffect,
)
from paceline.core.events import (
    Arrived,
    Connected,
    Opened,
    Timeout,
    WantClock,
    WantJoin,
    WantLeave,
    WantPush,
    WantRead,
    WantRows,
)
from paceline.core.messages import Delivered, Fetched, PushId, Sender
from paceline.core.settings import WorkerSettings
from paceline.core.worker import WorkerCore, WorkerEvent
from paceline.simulate.history import History, SeenPart, SeenRead, Violation

if TYPE_CHECKING:
    from paceline.simulate.world import World

_STEPS = 0.5  # probability that a push may travel with the end of its clock and the reads after it
_WAITS = 0.75  # the same, with the end of its clock at least
_TWICE = 0.5  # probability that a worker reads a table of rows twice at the same time


class _RowRead(msgspec.Struct, frozen=True):
    """A read of some rows of a table; `number` tells those apart that are under way at the same time."""

    table: str
    number: int
    rows: frozenset[int]
    needs: int = 0  # the clock below which they must contain every update


class Unsubscription(msgspec.Struct, frozen=True):
    """A worker has dropped these rows of a table; `request` is the number of its next read."""

    table: str
    rows: frozenset[int]
    request: int


@dataclass(slots=True)
class Subscribed:
    """Rows that one reader has requested, and those of them to send again."""

    rows: set[int] = field(default_factory=set[int])
    changed: set[int] = field(default_factory=set[int])
    last_request: int = -1  # of the answered reads

    def add(self, rows: frozenset[int], request: int) -> None:
        """Send these rows of a read when they change."""
        self.rows |= rows
        self.last_request = max(request, self.last_request)

    def remove(self, notice: Unsubscription) -> None:
        """Stop sending these rows, unless a later read, which may include them, was answered."""
        if notice.request > self.last_request:
            self.rows -= notice.rows

    def take(self) -> set[int]:
        """Return the rows to send now, and clear them."""
        changed, self.changed = self.changed & self.rows, set()
        return changed


@dataclass(slots=True)
class SimulatedWorker:
    """Training loop around a worker core, on virtual time."""

    world: World
    worker: int
    incarnation: int
    core: WorkerCore = field(init=False)
    alive: bool = True
    returns: bool = False  # killed, and to be restarted
    joined: bool = False
    leaving: bool = False
    left: bool = False
    failed: str = ""
    alarm: float | None = None
    paused_until: float = 0.0
    waited_s: float = 0.0
    finished_at: float = 0.0  # when its newest clock was finished
    # A generator of its own, so that two policies under the same seed meet the same stragglers.
    _pace: Random = field(init=False)
    _asked_at: float = 0.0
    asked_clock: int = 0
    _steps: Random = field(init=False)  # of its own as well: whether a push, its clock and a read travel in one message
    # Values in the message being handled: the number of updates in each place, and the clock of all.
    _arrived: tuple[dict[int, int], int] = field(default_factory=lambda: ({}, 0))
    # By open table, and server; of a row table by row: the cached values.
    _parts: dict[str, dict[int, SeenPart]] = field(default_factory=dict[str, dict[int, SeenPart]])
    _row_reads: dict[int, _RowRead] = field(default_factory=dict[int, _RowRead])  # by request
    # Own pushes of rows that show on arrival, and the servers whose rows may come without them; which it adds then.
    _own: dict[PushId, set[int]] = field(default_factory=dict[PushId, set[int]])
    _unanswered: dict[PushId, set[int]] = field(default_factory=dict[PushId, set[int]])
    _asked: dict[str, int] = field(default_factory=dict[str, int])  # the clock of the last read, by table
    _reading: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])  # reads whose values have yet to come

    def __post_init__(self) -> None:
        """Make the core."""
        scenario = self.world.scenario
        self._pace = Random(f"{scenario.seed}.{self.worker}.{self.incarnation}")
        self._steps = Random(f"steps {scenario.seed}.{self.worker}.{self.incarnation}")
        sender = Sender(generation=1, worker=self.worker, incarnation=self.incarnation)
        self.core = WorkerCore(WorkerSettings(sender, scenario.num_servers, retry_s=scenario.retry_s, max_attempts=60))

    @property
    def done(self) -> bool:
        """Return whether this worker has ended for good."""
        return self.left or bool(self.failed) or (not self.alive and not self.returns)

    def describe(self) -> str:
        """Return the state of this worker, for a message."""
        return f"incarnation {self.incarnation} at clock {self.core.clock}, joined {self.joined}, alive {self.alive}"

    def begin(self) -> None:
        """Open the declared tables and request to join."""
        self._open_tables()
        self._handle(WantJoin())

    def _open_tables(self) -> None:
        servers = tuple(range(self.world.scenario.num_servers))
        for table in self.world.declared:
            if table not in self._parts:
                self._parts[table] = {}
                history = self.world.histories[table]
                self._handle(Opened(table, history.consistency, servers, history.keyed))

    def receive(self, server: int, message: object, body: dict[int, int]) -> None:
        """Handle a server's message; a stopped process does so when it continues."""
        if self.paused_until > self.world.now:
            delay = self.paused_until - self.world.now
            self.world.at(delay, lambda: self.receive(server, message, body))
            return
        if isinstance(message, Fetched | Delivered):
            self._arrived = body, message.clock
        self._handle(Arrived(server, message))

    def reconnected(self, server: int) -> None:
        """Handle a restored connection to a server."""
        self._handle(Connected(server))

    def _handle(self, event: WorkerEvent) -> None:
        if not self.alive or self.left or self.failed:
            return
        effects = self.core.handle(event, self.world.now)
        self.world.record(f"worker {self.worker}.{self.incarnation}", event, effects)
        for effect in effects:
            self._perform(effect)
        self.world.set_alarm(self, self._ring)

    def _ring(self) -> None:
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until - self.world.now, self._ring)
            return
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.world.now:
            self._handle(Timeout())
        else:
            self.world.set_alarm(self, self._ring)

    def _perform(self, effect: WorkerEffect) -> None:
        match effect:
            case Send():
                self.world.to_server_from(self, effect.server, effect.message, bare=effect.bare)
            case Install():
                self._install(effect)
            case Forget():
                self._forget(effect.table, effect.server)
            case JoinDone():
                self.joined = True
                self.world.lives.replaced[self.worker] = self.incarnation
                self._read()
            case ReadDone():
                self._on_values(effect)
            case LeaveDone():
                self.left = True
            case Fail():
                self._fail(effect.reason)
            case Release():
                self._note_answer(effect)
            case Drop():
                pass  # simulated servers have no replicas

    def _install(self, effect: Install) -> None:
        """Store the values in a message; rows that were not requested only while they are cached."""
        own = frozenset(effect.includes) | frozenset(range(effect.settled))
        history, kept, (lengths, clock) = self.world.histories[effect.table], self._parts[effect.table], self._arrived
        for push_id in [p for p in self._own if history.keyed and p.seq in own and p in history.touched]:
            self._note_contained(push_id, {effect.server})
        for place, length in lengths.items():
            if not history.keyed or effect.request >= 0 or place in kept:
                kept[place] = SeenPart(length, clock, own, self._added(history, effect.server, place))

    def _note_contained(self, push_id: PushId, servers: set[int]) -> None:
        """Note that all rows that come from these servers contain an own push."""
        missing = self._own.get(push_id, set[int]())
        missing -= servers
        if not missing:
            self._own.pop(push_id, None)

    def _added(self, history: History, server: int, row: int) -> frozenset[int]:
        """Return the own pushes to add to an arriving row that may lack them."""
        if not history.keyed:
            return frozenset()
        lacking = (push_id for push_id, missing in self._own.items() if server in missing)
        return frozenset(push_id.seq for push_id in lacking if row in history.touched.get(push_id, ()))

    def _note_own(self, table: str, push_id: PushId, servers: list[int]) -> None:
        """Add an own push to cached rows at once, if servers show it on arrival."""
        history, kept = self.world.histories[table], self._parts[table]
        self._own[push_id], self._unanswered[push_id] = set(servers), set(servers)
        for row in history.touched[push_id] & kept.keys():
            kept[row] = replace(kept[row], added=kept[row].added | {push_id.seq})

    def _note_answer(self, effect: Release) -> None:
        """Forget an own push once all servers have answered, unless rows without it may arrive."""
        push_id, unanswered = effect.id, self._unanswered.get(effect.id)
        if unanswered is None:
            return
        unanswered.discard(effect.server)
        table = self.world.table_of(push_id)
        history, kept, reads = self.world.histories[table], self._parts[table], self.core.reads(table)
        if effect.refused:
            self._note_contained(push_id, {effect.server})
            for row in [row for row in kept if history.server_of(row) == effect.server]:
                kept[row] = replace(kept[row], added=kept[row].added - {push_id.seq})
        if not unanswered:
            delivering = {s for s in range(history.num_servers) if reads.reached(s) >= 0}
            self._note_contained(push_id, set(range(history.num_servers)) - reads.awaited() - delivering)
            del self._unanswered[push_id]

    def _forget(self, table: str, server: int) -> None:
        history = self.world.histories[table]
        self._parts[table] = {row: kept for row, kept in self._parts[table].items() if history.server_of(row) != server}

    def _fail(self, reason: str) -> None:
        """End this process with an error; only a worker that was evicted or replaced may fail."""
        self.failed = reason
        replaced = self.world.actors[self.worker] is not self
        if not replaced and (self.worker, self.incarnation) not in self.world.lives.gone:
            raise Violation(f"L1: worker {self.worker}.{self.incarnation} failed, but takes part: {reason}")
        self.world.hang_up(self)

    def _read(self) -> None:
        """Read every open table, all at once and all at this clock."""
        self._asked_at, self.asked_clock = self.world.now, self.core.clock
        self._open_tables()
        histories, rng = self.world.histories, self.world.rng
        again = {table for table in self._parts if histories[table].keyed and rng.random() < _TWICE}
        self._reading = {(table, number) for table in self._parts for number in range(2 if table in again else 1)}
        last = max(self._reading, default=None)
        for table, number in sorted(self._reading):
            self._asked[table] = self.core.clock  # later than `asked_clock` if an earlier read took this worker along
            refresh = self.world.rng.random() < self.world.scenario.refresh
            if self.world.histories[table].keyed:
                if number == 0:
                    self._evict(table)
                self._read_rows(_RowRead(table, number, self.world.draw_rows()), refresh=refresh)
            else:
                self._handle(
                    WantRead(table, refresh=refresh, more=(table, number) != last and self._steps.random() < _STEPS)
                )

    def _evict(self, table: str) -> None:
        """Drop some cached rows, and tell servers that would send them."""
        kept, history, world = self._parts[table], self.world.histories[table], self.world
        gone = frozenset(row for row in kept if world.rng.random() < world.scenario.evicted)
        self._parts[table] = {row: part for row, part in kept.items() if row not in gone}
        for server in range(history.num_servers) if history.consistency.deliver == "on_clock" else ():
            mine = frozenset(row for row in gone if history.server_of(row) == server)
            if mine:
                world.unsubscribe(self, server, Unsubscription(table, mine, self.core.next_request))

    def _read_rows(self, read: _RowRead, *, refresh: bool) -> None:
        """Request the rows that are not cached or not fresh enough, as the node does."""
        table = read.table
        history, kept, life = self.world.histories[table], self._kept(table), (self.worker, self.incarnation)
        # Servers know the bound in force, and a cached row has to do for any.
        consistency, asked = history.consistency, self._asked[table]
        needs = consistency.needs(asked) if refresh else consistency.unasked(asked)
        fetch: list[int] = []
        deliver: list[int] = []
        for server in range(history.num_servers):
            mine = [row for row in read.rows if history.server_of(row) == server]
            lacking = frozenset(row for row in mine if refresh or row not in kept or kept[row].clock < needs)
            if lacking:
                self.world.note_request(life, self.core.next_request, server, lacking)
                brought = not refresh and history.consistency.deliver == "on_clock" and lacking <= kept.keys()
                (deliver if brought else fetch).append(server)
        self._row_reads[self.core.next_request] = replace(read, needs=needs)
        self._handle(WantRows(table, needs, tuple(fetch), tuple(deliver)))

    def _kept(self, table: str) -> dict[int, SeenPart]:
        """Return the cached rows, each with its clock or that of its server's deliveries."""
        history = self.world.histories[table]
        return {
            row: replace(part, clock=max(part.clock, self.core.reads(table).reached(history.server_of(row))))
            for row, part in self._parts[table].items()
        }

    def _on_values(self, done: ReadDone) -> None:
        waited, history = self.world.now - self._asked_at, self.world.histories[done.table]
        life, asked, clock, parts = (self.worker, self.incarnation), self._asked[done.table], done.clock, {}
        number = 0
        if history.keyed:
            read = self._row_reads.pop(done.request)
            kept, needs, number = self._kept(done.table), read.needs, read.number
            if done.clock < needs:
                raise Violation(f"SSP2: worker {self.worker} reads rows of clock {needs} and is told {done.clock}")
            parts = {row: kept[row] for row in read.rows if row in kept and kept[row].clock >= needs}
            if len(parts) < len(read.rows):  # some went meanwhile
                self._read_rows(read, refresh=False)
                return
            clock = min(part.clock for part in parts.values())
        else:
            parts = dict(self._parts[done.table])
        seen = SeenRead(self.world.now, life, asked, clock, waited, done.source, parts, done.request)
        history.read(seen, self.world.members())
        self._reading.discard((done.table, number))
        if not self._reading:
            self.waited_s += waited
            self._compute()

    def _compute(self) -> None:
        scenario = self.world.scenario
        compute_s = self._pace.uniform(*scenario.compute_s) * scenario.stragglers.slowdown(self.worker, self._pace)
        self.world.at(compute_s, self._finish_clock)

    def _finish_clock(self) -> None:
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until - self.world.now, self._finish_clock)
            return
        self.finished_at = self.world.now
        for table in self._parts:
            for _ in range(self.world.num_pushes()):
                self._push(table)
        self._handle(WantClock())
        if self.core.clock >= self.world.scenario.num_clocks:
            self.leaving = True
            self._handle(WantLeave())
        else:
            self._read()

    def _push(self, table: str) -> None:
        if self.alive and not self.failed and self.core.may_push(table):
            push_id = PushId(1, self.worker, self.incarnation, self.core.next_seq)
            history = self.world.histories[table]
            rows = self.world.draw_rows() if history.keyed else frozenset[int]()
            self.world.pushed(table, push_id, self.core.clock, rows)
            servers = history.servers_of(push_id)
            if history.keyed and history.consistency.visible == "on_arrival":
                self._note_own(table, push_id, servers)
            chance = self._steps.random()
            self._handle(WantPush(table, tuple(servers), may_wait=chance < _WAITS, ends_clock=chance < _STEPS))

"""One simulated worker: joins, then reads, computes, pushes and ticks, and leaves after its clocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from paceline.core.effects import (
    Fail,
    Forget,
    Install,
    InstallRows,
    JoinDone,
    LeaveDone,
    ReadDone,
    Release,
    Send,
    WorkerEffect,
)
from paceline.core.events import Arrived, Connected, Opened, Timeout, WantClock, WantJoin, WantLeave, WantPush, WantRead
from paceline.core.messages import Delivered, Fetched, PushId, Sender
from paceline.core.settings import WorkerSettings
from paceline.core.worker import WorkerCore, WorkerEvent
from paceline.errors import ProtocolBug
from paceline.simulate.history import Part, Read
from paceline.simulate.lives import Violation

if TYPE_CHECKING:
    from paceline.simulate.world import World


@dataclass(slots=True)
class Actor:
    """The user's loop around a worker core, on virtual time."""

    world: World
    worker: int
    incarnation: int
    core: WorkerCore = field(init=False)
    alive: bool = True
    returns: bool = False  # killed, and to be started again
    joined: bool = False
    leaving: bool = False
    left: bool = False
    failed: str = ""
    paused_until: float = 0.0
    waited_s: float = 0.0
    finished_at: float = 0.0  # when its newest clock was finished
    # Its own, so that two policies under the same seed meet the same stragglers.
    _pace: Random = field(init=False)
    _asked_at: float = 0.0
    asked_clock: int = 0
    # Of the values that came with the message at hand: how many updates they contain, and their clock.
    _arrived: tuple[int, int] = (0, 0)
    _parts: dict[str, dict[int, Part]] = field(default_factory=dict[str, dict[int, Part]])  # by open table, and server
    _asked: dict[str, int] = field(default_factory=dict[str, int])  # the clock of the last read, by table
    _reading: set[str] = field(default_factory=set[str])  # tables whose values have yet to come
    _alarm: float | None = None

    def __post_init__(self) -> None:
        """Make the core of this life."""
        scenario = self.world.scenario
        self._pace = Random(f"{scenario.seed}.{self.worker}.{self.incarnation}")
        sender = Sender(generation=1, worker=self.worker, incarnation=self.incarnation)
        self.core = WorkerCore(WorkerSettings(sender, scenario.num_servers, retry_s=scenario.retry_s, max_attempts=60))

    @property
    def done(self) -> bool:
        """Say whether nothing more is to be expected of this worker."""
        return self.left or bool(self.failed) or (not self.alive and not self.returns)

    def describe(self) -> str:
        """Say where this worker stands."""
        return f"incarnation {self.incarnation} at clock {self.core.clock}, joined {self.joined}, alive {self.alive}"

    def begin(self) -> None:
        """Open the tables that there are and ask to take part."""
        self._open_tables()
        self._handle(WantJoin())

    def _open_tables(self) -> None:
        servers = tuple(range(self.world.scenario.num_servers))
        for table in self.world.declared:
            if table not in self._parts:
                self._parts[table] = {}
                self._handle(Opened(table, self.world.histories[table].consistency, servers))

    def receive(self, server: int, message: object, length: int) -> None:
        """Take in a server's message; a stopped process does so when it goes on."""
        if self.paused_until > self.world.now:
            delay = self.paused_until - self.world.now
            self.world.at(delay, lambda: self.receive(server, message, length))
            return
        if isinstance(message, Fetched | Delivered):
            self._arrived = length, message.clock
        self._handle(Arrived(server, message))

    def reconnected(self, server: int) -> None:
        """Find the connection to a server made again."""
        self._handle(Connected(server))

    def _handle(self, event: WorkerEvent) -> None:
        if not self.alive or self.left or self.failed:
            return
        effects = self.core.handle(event, self.world.now)
        self.world.record(f"worker {self.worker}.{self.incarnation}", event, effects)
        for effect in effects:
            self._perform(effect)
        self._set_alarm()

    def _set_alarm(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is None or (self._alarm is not None and self._alarm <= deadline):
            return
        self._alarm = alarm = max(self.world.now, deadline)

        def ring() -> None:
            if self._alarm == alarm:  # else an earlier one was set since
                self._alarm = None
                self._ring()

        self.world.at(alarm - self.world.now, ring)

    def _ring(self) -> None:
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until - self.world.now, self._ring)
            return
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.world.now:
            self._handle(Timeout())
        else:
            self._set_alarm()

    def _perform(self, effect: WorkerEffect) -> None:
        match effect:
            case Send():
                self.world.to_server_from(self, effect.server, effect.message, bare=effect.bare)
            case Install():
                own = frozenset(effect.includes) | frozenset(range(effect.settled))
                self._parts[effect.table][effect.server] = Part(*self._arrived, own)
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
                pass
            case InstallRows() | Forget():
                raise ProtocolBug(f"a rehearsal has no tables of rows, but its core asked for {effect}")

    def _fail(self, reason: str) -> None:
        """End this process with an error; only a worker that was given up or replaced may have to."""
        self.failed = reason
        replaced = self.world.actors[self.worker] is not self
        if not replaced and (self.worker, self.incarnation) not in self.world.lives.gone:
            raise Violation(f"L1: worker {self.worker}.{self.incarnation} failed, but takes part: {reason}")
        self.world.hang_up(self)

    def _read(self) -> None:
        """Read every open table, all at once and all at this clock."""
        self._asked_at, self.asked_clock = self.world.now, self.core.clock
        self._open_tables()
        self._reading = set(self._parts)
        for table in self._parts:
            self._asked[table] = self.core.clock  # later than `asked_clock` if an earlier read took this worker along
            refresh = self.world.rng.random() < self.world.scenario.refresh
            self._handle(WantRead(table, refresh=refresh))

    def _on_values(self, done: ReadDone) -> None:
        waited = self.world.now - self._asked_at
        life = (self.worker, self.incarnation)
        parts = dict(self._parts[done.table])
        read = Read(self.world.now, life, self._asked[done.table], done.clock, waited, done.source, parts)
        self.world.histories[done.table].read(read, self.world.members())
        self._reading.discard(done.table)
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
            self.world.pushed(table, push_id, self.core.clock)
            self._handle(WantPush(table))

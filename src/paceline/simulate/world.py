"""Simulated cluster on virtual time: real protocol cores, joined by a network with seeded delays and faults."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from paceline.core.consistency import Consistency
from paceline.core.effects import (
    Advanced,
    Apply,
    BoundMoved,
    Discard,
    Hold,
    Measure,
    MembershipChanged,
    Reply,
    Serve,
    ServerEffect,
    Tell,
)
from paceline.core.events import Declared, Died, Disconnected, InvalidPush, Timeout
from paceline.core.messages import (
    Applied,
    BetweenServers,
    Delivered,
    Fetched,
    FromWorker,
    Pull,
    Push,
    PushId,
    PushRefused,
    Repeated,
    WholeStep,
)
from paceline.core.server import ServerCore, ServerEvent
from paceline.core.settings import ServerSettings
from paceline.simulate.actor import SimulatedWorker, Subscribed, Unsubscription
from paceline.simulate.history import History, Life, Lives, Violation
from paceline.simulate.scenario import Scenario

TABLE, ROWS = "w", "r"  # table names are these and a number; the first dense table has no number
NUM_ROWS = 6
_JOIN_LEASES = 100  # number of leases after which a worker must have joined
_LIMIT_AT_ONCE = 100_000  # events at one moment of virtual time


@dataclass(slots=True)
class _Server:
    core: ServerCore
    busy_until: float = 0.0
    held: dict[PushId, int] = field(default_factory=dict[PushId, int])  # push -> its clock
    alarm: float | None = None
    inbox: deque[ServerEvent] = field(default_factory=deque[ServerEvent])  # events that arrived while it was busy
    wakes: bool = False  # whether it is scheduled to handle them
    subscribed: dict[tuple[str, Life], Subscribed] = field(default_factory=dict[tuple[str, Life], Subscribed])

    def note_changed(self, table: str, rows: frozenset[int]) -> None:
        """Note the rows to send to their readers again."""
        for (name, _), mine in self.subscribed.items():
            if name == table:
                mine.changed |= rows & mine.rows


@dataclass(slots=True)
class World:
    """One simulation. `run` returns its history, checked against the rules of the scenario's consistency.

    Raises:
        Violation: a broken rule, or a worker that waits for ever.
    """

    scenario: Scenario
    trace: list[str] | None = None
    now: float = 0.0
    num_events: int = 0
    lives: Lives = field(init=False)
    histories: dict[str, History] = field(default_factory=dict[str, History])  # by table
    declared: list[str] = field(default_factory=list[str])  # tables that every server has
    rng: Random = field(init=False)
    actors: dict[int, SimulatedWorker] = field(
        default_factory=dict[int, SimulatedWorker]
    )  # the newest life of each worker
    _lives: dict[tuple[int, int], SimulatedWorker] = field(default_factory=dict[tuple[int, int], SimulatedWorker])
    _servers: list[_Server] = field(default_factory=list[_Server])
    _heap: list[tuple[float, int, Callable[[], None]]] = field(
        default_factory=list[tuple[float, int, Callable[[], None]]]
    )
    # A worker without faults, which notices those of the others.
    _spared: int = 0
    _sent: int = 0
    _last_arrival: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    # Messages in flight on a connection that is cut are lost, and so are those sent before it is restored.
    _epoch: dict[tuple[int, int, int], int] = field(default_factory=dict[tuple[int, int, int], int])
    _down: set[tuple[int, int, int]] = field(default_factory=set[tuple[int, int, int]])
    _table_of: dict[PushId, str] = field(default_factory=dict[PushId, str])
    # The rows requested by a pull, by reader, request and server.
    _asked: dict[tuple[Life, int, int], frozenset[int]] = field(
        default_factory=dict[tuple[Life, int, int], frozenset[int]]
    )
    _calm: bool = False  # whether the network has stopped losing messages

    def __post_init__(self) -> None:
        """Set up servers and workers, and schedule their faults."""
        s = self.scenario
        self.rng = Random(s.seed)
        self._spared = self.rng.randrange(s.num_workers)
        self.lives = Lives(s.lease_s, _JOIN_LEASES * s.lease_s)
        for table, consistency in self._tables().items():
            keyed = table.startswith(ROWS)
            self.histories[table] = History(consistency, s.num_servers, s.network.keeps_order, self.lives, keyed)
        for server in range(s.num_servers):
            settings = ServerSettings(
                server,
                s.num_servers,
                workers=tuple(range(s.num_workers)),
                join_timeout_s=_JOIN_LEASES * s.lease_s,
                lease_s=s.lease_s,
                retry_s=s.retry_s,
            )
            self._servers.append(_Server(ServerCore(settings, started=0.0)))
        for table in (TABLE, *(name for name in self._tables() if name.startswith(ROWS) and self.rng.random() < 0.5)):
            for server in range(s.num_servers):
                self._to_server(server, self._declaration(table))
            self.declared.append(table)
        for worker in range(s.num_workers):
            self.start(worker, 0)
        self._draw_fates()
        self._draw_declarations()

    @property
    def history(self) -> History:
        """History of the table that exists from the start."""
        return self.histories[TABLE]

    def _tables(self) -> dict[str, Consistency]:
        others = {f"{TABLE}{index}": other for index, other in enumerate(self.scenario.others, start=1)}
        rows = {f"{ROWS}{index}": other for index, other in enumerate(self.scenario.rows, start=1)}
        return {TABLE: self.scenario.consistency, **others, **rows}

    def _declaration(self, table: str) -> Declared:
        history = self.histories[table]
        return Declared(table, history.consistency, history.keyed)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> History:
        """Process events until every worker has left."""
        moved = 0  # the number of events when virtual time last moved
        while self._heap and not self._all_done():
            due, _, action = heapq.heappop(self._heap)
            moved = self.num_events if due > self.now else moved
            if due > self.scenario.patience_s or self.num_events - moved > _LIMIT_AT_ONCE:
                break
            self.now = due
            self.num_events += 1
            action()
        if not self._all_done():
            waiting = {w: a.describe() for w, a in self.actors.items() if not a.done}
            raise Violation(f"L1: at {self.now:g} s these workers have not finished: {waiting}")
        self._let_servers_finish()
        settled = [(worker, actor.incarnation) for worker, actor in self.actors.items() if actor.left]
        for table in self.declared:
            self.histories[table].finish(settled, [entry.core.clock_of(table) for entry in self._servers])
        return self.history

    def _let_servers_finish(self) -> None:
        """Let the servers close the clocks that the lead has closed: the last one may be under way."""
        self._calm = True
        until = self.now + 100 * self.scenario.lease_s
        while self._heap and self._heap[0][0] <= until and not self._agree():
            self.now, _, action = heapq.heappop(self._heap)
            self.num_events += 1
            action()

    def _agree(self) -> bool:
        """Return whether every table is at the same clock on all servers, and the lead has none to close."""
        cores = [entry.core for entry in self._servers]
        agreed = all(len({core.clock_of(table) for core in cores}) == 1 for table in self.declared)
        return agreed and cores[0].next_deadline() != 0.0

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Schedule an action; actions for the same time run in the order of their scheduling."""
        self._at(self.now + delay_s, action)

    def _at(self, due: float, action: Callable[[], None]) -> None:
        self._sent += 1
        heapq.heappush(self._heap, (due, self._sent, action))

    def set_alarm(self, owner: SimulatedWorker | _Server, ring: Callable[[], None]) -> None:
        """Have `ring` called at the next deadline of the owner's core; an earlier deadline replaces a later one."""
        deadline = owner.core.next_deadline()
        if deadline is None or (owner.alarm is not None and owner.alarm <= deadline):
            return
        owner.alarm = alarm = max(self.now, deadline)

        def go_off() -> None:
            if owner.alarm == alarm:  # else an earlier one has replaced it
                owner.alarm = None
                ring()

        self.at(alarm - self.now, go_off)

    def record(self, name: str, event: object, effects: object) -> None:
        """Add a line to the trace, if one is kept."""
        if self.trace is not None:
            self.trace.append(f"{self.now:.6f} {name} {event} -> {effects}")

    def start(self, worker: int, incarnation: int) -> None:
        """Start one life of a worker."""
        actor = self.actors[worker] = self._lives[worker, incarnation] = SimulatedWorker(self, worker, incarnation)
        self.at(0.0, actor.begin)
        if worker != self._spared and self.rng.random() < self.scenario.fate.early:
            self.at(self.rng.uniform(0, 4 * self.scenario.network.latency_s[1]), lambda: self._kill(worker))

    def num_pushes(self) -> int:
        """Draw the number of a worker's pushes to a table in one clock."""
        return self.rng.randint(1, self.scenario.num_pushes) if self.scenario.num_pushes > 1 else 1

    def draw_rows(self) -> frozenset[int]:
        """Draw which rows a worker reads or pushes."""
        return frozenset(self.rng.sample(range(NUM_ROWS), self.rng.randint(1, 3)))

    def pushed(self, table: str, push_id: PushId, clock: int, rows: frozenset[int]) -> None:
        """Record a push that a worker is about to make, in a row table with its rows."""
        self._table_of[push_id] = table
        self.histories[table].pushed(push_id, clock, rows)

    def note_request(self, life: Life, request: int, server: int, rows: frozenset[int]) -> None:
        """Record the rows that a worker is about to request from a server."""
        self._asked[life, request, server] = rows

    def table_of(self, push_id: PushId) -> str:
        """Return the table of a push."""
        return self._table_of[push_id]

    def unsubscribe(self, actor: SimulatedWorker, server: int, notice: Unsubscription) -> None:
        """Tell a server which rows a worker has dropped; a lost message is not repeated."""
        life = actor.worker, actor.incarnation
        link = (*life, server)
        epoch, subscribed = self._epoch.get(link, 0), self._servers[server].subscribed

        def arrive() -> None:
            if self._epoch.get(link, 0) == epoch and (notice.table, life) in subscribed:
                subscribed[notice.table, life].remove(notice)

        if link not in self._down:
            self._carry(f"worker {life[0]}.{life[1]}", f"server {server}", arrive)

    def members(self) -> dict[tuple[int, int], int]:
        """Return the clock of every active worker, independently of the servers."""
        return {
            (worker, actor.incarnation): actor.core.clock
            for worker, actor in self.actors.items()
            if actor.alive and actor.joined and not actor.leaving
        }

    def _all_done(self) -> bool:
        return all(actor.done for actor in self.actors.values())

    # -- messages ----------------------------------------------------------------------------------------------------

    def to_server_from(self, actor: SimulatedWorker, server: int, message: FromWorker, *, bare: bool) -> None:
        """Carry a worker's message to a server."""
        if isinstance(message, Push) and bare and message.id not in self._servers[server].held:
            raise Violation(f"{message.id} is repeated without its tensor, but server {server} never had it")
        for push in _pushes_in(message):
            if push.id not in self._table_of:
                raise Violation(f"E3: {push.id} is sent to server {server}, but no worker made it")
        link = (actor.worker, actor.incarnation, server)
        if link in self._down:
            return
        if self.rng.random() < self.scenario.network.cut:
            self.cut(actor, server)
            return
        epoch = self._epoch.get(link, 0)

        def arrive() -> None:
            if self._epoch.get(link, 0) == epoch:
                for event in self._maybe_invalid(message):
                    self._to_server(server, event)

        self._carry(f"worker {actor.worker}.{actor.incarnation}", f"server {server}", arrive)

    def _maybe_invalid(self, message: FromWorker) -> list[ServerEvent]:
        """Return the events of a message; a step whose tensor is spoiled comes apart, as in the node."""
        spoiled = [push for push in _pushes_in(message) if self.rng.random() < self.scenario.network.spoil]
        for push in spoiled:
            self.histories[push.table].invalid.add(push.id)
        events: list[ServerEvent] = [InvalidPush(push, "spoiled by the scenario") for push in spoiled]
        if isinstance(message, WholeStep):
            rest = tuple(push for push in message.pushes if push not in spoiled)
            return [
                *events,
                *([replace(message, pushes=rest)] if rest or message.pulls else filter(None, [message.tick])),
            ]
        if isinstance(message, Repeated):  # for a server whose replica lags, and there are none here
            return []
        return events or [message]

    def hang_up(self, actor: SimulatedWorker) -> None:
        """End all connections of a worker whose process has ended."""
        for server in range(self.scenario.num_servers):
            self._lose(actor.worker, actor.incarnation, server, Disconnected(actor.worker, actor.incarnation))

    def cut(self, actor: SimulatedWorker, server: int) -> None:
        """Cut one connection: messages in flight are lost, and it is restored soon."""
        worker, incarnation = actor.worker, actor.incarnation
        self.lives.disturbed.add((worker, incarnation))
        self._lose(worker, incarnation, server, Disconnected(worker, incarnation))
        self._down.add((worker, incarnation, server))
        self.at(self.scenario.lease_s / 10, lambda: self._reconnect(actor, server))

    def _reconnect(self, actor: SimulatedWorker, server: int) -> None:
        """Restore a connection; a stopped process does so when it continues."""
        if actor.paused_until > self.now:
            self.at(actor.paused_until - self.now, lambda: self._reconnect(actor, server))
            return
        self._down.discard((actor.worker, actor.incarnation, server))
        actor.reconnected(server)

    def _lose(self, worker: int, incarnation: int, server: int, event: Disconnected | Died) -> None:
        """End a connection; the server handles all earlier messages first."""
        if isinstance(event, Disconnected):
            link = (worker, incarnation, server)
            self._epoch[link] = self._epoch.get(link, 0) + 1
        self._to_server(server, event)

    def _carry(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        network, rng = self.scenario.network, self.rng
        if not self._calm and rng.random() < network.drop:
            return
        due = self.now + rng.uniform(*network.latency_s)
        if rng.random() >= network.reorder:
            due = max(due, self._last_arrival.get((source, target), 0.0))
            self._last_arrival[source, target] = due
        self.at(due - self.now, arrive)
        if rng.random() < network.duplicate:
            self.at(due - self.now + rng.uniform(*network.latency_s), arrive)

    def _to_server(self, server: int, event: ServerEvent) -> None:
        entry = self._servers[server]
        entry.inbox.append(event)
        self._work(server, entry)

    def _work(self, server: int, entry: _Server) -> None:
        """Handle the events of a server's inbox in order, once it is free."""
        while entry.inbox and entry.busy_until <= self.now:
            self._take_in(server, entry, entry.inbox.popleft())
        if entry.inbox and not entry.wakes:
            entry.wakes = True

            def wake() -> None:
                entry.wakes = False
                self._work(server, entry)

            self._at(entry.busy_until, wake)

    def _take_in(self, server: int, entry: _Server, event: ServerEvent) -> None:
        for push in _pushes_in(event):
            entry.held[push.id] = push.clock
        self.lives.told(server, event, self.now)
        effects = entry.core.handle(event, self.now)
        self.record(f"server {server}", event, effects)
        self._note_bounds(server, event, effects)
        for effect in effects:
            self._perform(server, entry, effect)
        self.set_alarm(entry, lambda: self._ring(server, entry))

    def _note_bounds(self, server: int, event: ServerEvent, effects: list[ServerEffect]) -> None:
        """Record where bounds move, and then which pulls come: those of a step follow its tick."""
        for effect in effects:
            if isinstance(effect, BoundMoved):
                self.histories[effect.table].moved(server, effect.before, effect.bound)
        pulls = event.pulls if isinstance(event, WholeStep) else (event,) if isinstance(event, Pull) else ()
        for pull in pulls:
            self.histories[pull.table].admitted(server, pull)

    def _ring(self, server: int, entry: _Server) -> None:
        deadline = entry.core.next_deadline()
        if deadline is not None and deadline <= self.now:
            self._to_server(server, Timeout())
        else:
            self.set_alarm(entry, lambda: self._ring(server, entry))

    # -- effects of servers ------------------------------------------------------------------------------------------

    def _perform(self, server: int, entry: _Server, effect: ServerEffect) -> None:
        match effect:
            case Apply():
                clocks = [entry.held[push_id] for push_id in effect.ids]
                self.histories[effect.table].applied(server, effect.ids, clocks)
                for push_id in effect.ids:
                    entry.note_changed(effect.table, self.histories[effect.table].touched[push_id])
                entry.busy_until = self.now + self.scenario.apply_s
            case Reply():
                if isinstance(effect.message, Applied | PushRefused):
                    self._note_answered(server, effect.message.id, refused=isinstance(effect.message, PushRefused))
                self._to_worker(server, effect.worker, effect.incarnation, effect.message, {})
            case Serve():
                for seq in effect.message.includes if isinstance(effect.message, Fetched) else ():
                    self._note_answered(server, PushId(1, effect.worker, effect.incarnation, seq), refused=False)
                body = self._values(server, entry, (effect.worker, effect.incarnation), effect.message)
                self._to_worker(server, effect.worker, effect.incarnation, effect.message, body)
            case Tell():
                self._between(server, effect.server, effect.message)
            case MembershipChanged():
                self._on_membership(server, effect)
            case Hold() | Discard() | Advanced() | BoundMoved() | Measure():  # no simulated push is to be clipped
                pass

    def _note_answered(self, server: int, push_id: PushId, *, refused: bool) -> None:
        table = self._table_of[push_id]
        closed = self._servers[server].core.clock_of(table)
        self.histories[table].answered(server, push_id, refused=refused, closed=closed)

    def _values(self, server: int, entry: _Server, life: Life, message: Fetched | Delivered) -> dict[int, int]:
        """Return the values in a message: the number of updates in each place."""
        history = self.histories[message.table]
        if not history.keyed:
            return {server: len(history.shards[server].order)}
        if isinstance(message, Delivered):
            rows = entry.subscribed[message.table, life].take()
        else:
            rows = self._asked[life, message.request, server]
            if history.consistency.deliver == "on_clock":
                entry.subscribed.setdefault((message.table, life), Subscribed()).add(rows, message.request)
        return {row: len(history.shard_of(row).order) for row in sorted(rows)}

    def _on_membership(self, server: int, effect: MembershipChanged) -> None:
        life = (effect.worker, effect.incarnation)
        if effect.change == "died":
            self.lives.note_eviction(server, life, self.now)
        elif effect.change == "left":
            self.lives.gone.add(life)

    def _to_worker(self, server: int, worker: int, incarnation: int, message: object, body: dict[int, int]) -> None:
        link = (worker, incarnation, server)
        epoch = self._epoch.get(link, 0)
        if link in self._down:
            return

        def arrive() -> None:
            if self._epoch.get(link, 0) == epoch:
                self._lives[worker, incarnation].receive(server, message, body)

        self._carry(f"server {server}", f"worker {worker}.{incarnation}", arrive)

    def _between(self, source: int, target: int, message: BetweenServers) -> None:
        self._carry(f"server {source}", f"server {target}", lambda: self._to_server(target, message))

    # -- faults ------------------------------------------------------------------------------------------------------

    def _draw_fates(self) -> None:
        s = self.scenario
        span = s.num_clocks * s.compute_s[1]
        victims = [worker for worker in range(s.num_workers + s.fate.joins) if worker != self._spared]
        actions = [self._kill] * s.fate.deaths + [self._pause] * s.fate.pauses + [self._stop] * s.fate.stops
        for action in actions if victims else ():
            worker = self.rng.choice(victims)
            self.at(self.rng.uniform(0, span), lambda worker=worker, action=action: action(worker))
        for _ in range(s.fate.stalls):
            server = self.rng.randrange(s.num_servers)
            self.at(self.rng.uniform(0, span), lambda server=server: self._stall(server))
        for index in range(s.fate.joins):
            worker = s.num_workers + index
            self.at(self.rng.uniform(0, span), lambda worker=worker: self.start(worker, 0))

    def _victim(self, worker: int) -> SimulatedWorker | None:
        """Return the living process of this rank and record that a fault happens to it."""
        actor = self.actors.get(worker)
        if actor is None or not actor.alive or actor.done:
            return None
        self.lives.disturbed.add((worker, actor.incarnation))
        return actor

    def _kill(self, worker: int) -> None:
        actor = self._victim(worker)
        if actor is None:
            return
        actor.alive, actor.returns = False, self.scenario.fate.restart
        incarnation = actor.incarnation
        for server in range(self.scenario.num_servers):
            told = Died(worker, incarnation, "killed by the scenario")
            event = told if self.rng.random() < 0.5 else Disconnected(worker, incarnation)
            delay = self.rng.uniform(0, self.scenario.lease_s) * self.rng.choice((0, 1))
            self.at(delay, lambda server=server, event=event: self._lose(worker, incarnation, server, event))
        if actor.returns:
            delay = self.rng.uniform(0, 2 * self.scenario.lease_s) * self.rng.choice((0, 1))
            self.at(delay, lambda: self.start(worker, incarnation + 1))

    def _replace(self, actor: SimulatedWorker) -> None:
        if self.actors[actor.worker] is actor and actor.alive and not actor.done:
            self.start(actor.worker, actor.incarnation + 1)

    def _pause(self, worker: int) -> None:
        actor = self._victim(worker)
        if actor is None:
            return
        pause_s = self.rng.uniform(0.1, 4) * self.scenario.lease_s
        actor.paused_until = self.now + pause_s
        if self.scenario.fate.restart and self.rng.random() < 0.5:
            # Evicted and replaced: when it continues, two lives of one worker send at once.
            self.at(self.rng.uniform(0, pause_s), lambda: self._replace(actor))
        for server in range(self.scenario.num_servers):
            self._lose(worker, actor.incarnation, server, Disconnected(worker, actor.incarnation))
            self._down.add((worker, actor.incarnation, server))
            self._reconnect(actor, server)

    def _stop(self, worker: int) -> None:
        """Stop a process, maybe for longer than its lease; its connections stay, so no server is told."""
        actor = self.actors.get(worker)
        if actor is not None and actor.alive and not actor.done:
            pause_s = self.rng.uniform(0.1, 4) * self.scenario.lease_s
            actor.paused_until = max(actor.paused_until, self.now + pause_s)

    def _stall(self, server: int) -> None:
        """Stall a server, maybe for longer than the leases of workers that reconnect meanwhile."""
        entry = self._servers[server]
        entry.busy_until = max(entry.busy_until, self.now + self.rng.uniform(0.1, 4) * self.scenario.lease_s)

    def _draw_declarations(self) -> None:
        """Schedule the declaration of each further table on every server, at a random time."""
        s = self.scenario
        for table in [name for name in self._tables() if name not in self.declared]:
            delays = [self.rng.uniform(0, s.num_clocks * s.compute_s[1] / 2) for _ in range(s.num_servers)]
            for server, delay in enumerate(delays):
                declared = self._declaration(table)
                self.at(delay, lambda server=server, declared=declared: self._to_server(server, declared))
            self.at(max(delays) + 4 * s.lease_s, lambda table=table: self.declared.append(table))


def _pushes_in(message: object) -> tuple[Push, ...]:
    """Return the pushes in a message."""
    if isinstance(message, WholeStep):
        return message.pushes
    return (message,) if isinstance(message, Push) else ()

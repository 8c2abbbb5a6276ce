"""A job on virtual time: the real cores, with the speed of workers, servers and lines as the scenario has them.

It checks nothing, so that ten thousand workers take minutes; `World` has the same cores under faults and checkers.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from paceline.core.effects import (
    Advanced,
    Apply,
    BoundMoved,
    Discard,
    Fail,
    Install,
    JoinDone,
    LeaveDone,
    MembershipChanged,
    ReadDone,
    Release,
    Reply,
    Send,
    Serve,
    ServerEffect,
    Tell,
    WorkerEffect,
)
from paceline.core.events import (
    Arrived,
    Declared,
    Died,
    Disconnected,
    Opened,
    Timeout,
    WantClock,
    WantJoin,
    WantLeave,
    WantPush,
    WantRead,
)
from paceline.core.messages import BetweenServers, FromServer, Leave, Push, PushId, Sender, WholeStep
from paceline.core.server import ServerCore, ServerEvent
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.core.worker import WorkerCore, WorkerEvent
from paceline.errors import ProtocolBug, UsageError
from paceline.simulate.happenings import (
    ChangedMember,
    FinishedClock,
    Happening,
    MovedBound,
    ReachedClock,
    ReadValues,
    RefusedPush,
    Updated,
)
from paceline.simulate.lines import MESSAGE_BYTES, Line
from paceline.simulate.quadratic import Quadratic, descend
from paceline.simulate.scenario import Scenario

TABLE = "w"
_GENERATION = 1
# A push is at most as long as the first, to travel with its tick and a fetch; and as the second, to wait for its tick.
_STEP_BYTES, _WAITING_BYTES = 4 << 20, 16 << 10
# As nodes on other machines do: of how long a part travels in pieces, and how long and how many these are.
_LEAST_EARLY_BYTES, _LEAST_PIECE_BYTES, _MOST_PIECES = 256 << 10, 128 << 10, 32
_JOIN_TIMEOUT_S = 1e9  # expected workers join at once
_Body = list[float]  # the values of one server


@dataclass(slots=True, eq=False)
class RehearsedServer:
    """One server: its core, its line, and what waits for its thread."""

    rank: int
    core: ServerCore
    line: Line
    values: list[float]
    busy_until: float = 0.0
    busy_s: float = 0.0
    inbox: deque[ServerEvent] = field(default_factory=deque[ServerEvent])
    pushed: dict[PushId, list[float]] = field(default_factory=dict[PushId, list[float]])  # gradients, until applied
    pieces: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])  # of pushes, by clock and place
    num_early: Counter[int] = field(default_factory=Counter[int])  # pieces of values sent ahead, by worker


@dataclass(slots=True, eq=False)
class RehearsedWorker:
    """One life of a worker: its core, its line, where it is, and what it has waited for so far."""

    rank: int
    incarnation: int
    core: WorkerCore
    line: Line
    # A generator of its own, so that two policies under the same seed meet the same stragglers.
    pace: Random
    noise: Random  # of gradients
    started_at: float
    values: list[_Body]
    is_alive: bool = True
    is_leaving: bool = False
    has_left: bool = False
    failed: str = ""
    num_finished: int = 0
    num_refused: int = 0
    num_batches: int = 0
    finished_at: float = 0.0
    asked_at: float = 0.0
    read_at: float = 0.0
    has_values: bool = False
    pieces: int = 0  # of the computation of this clock, that are left; each begins with a read
    piece_s: float = 0.0
    read_loss: float | None = None
    waited_s: float = 0.0  # for values
    loaded_s: float = 0.0  # for batches
    before_s: tuple[float, float] = (0.0, 0.0)  # both of them, when the last clock was finished
    # By server, own gradients that its values lack, by sequence number: the worker adds them, as nodes do.
    own: list[dict[int, list[float]]] = field(default_factory=list[dict[int, list[float]]])

    @property
    def is_done(self) -> bool:
        """Whether this life has ended."""
        return self.has_left or not self.is_alive or bool(self.failed)


@dataclass(slots=True)
class Tally:
    """What a rehearsal counts.

    Args:
        differentials: reads by clock differential.
        freshest: the same, of reads of the newest complete values that the servers had.
        losses: (second, clock, loss) of each finished clock, if the scenario has a loss.
        num_deaths: workers that were killed.
        num_joined: lives that joined after the start.
        num_left: workers that left before their last clock.
    """

    differentials: Counter[int] = field(default_factory=Counter[int])
    freshest: Counter[int] = field(default_factory=Counter[int])
    losses: list[tuple[float, int, float]] = field(default_factory=list[tuple[float, int, float]])
    num_deaths: int = 0
    num_joined: int = 0
    num_left: int = 0


@dataclass(slots=True, eq=False)
class Rehearsal:
    """One job on virtual time. `run` plays it to its end; then `workers`, `servers` and `tally` say how it went.

    Args:
        scenario: what to play, of one dense table, on a network that loses nothing.
        happenings: gets what happens, in order, if it is a list.

    Raises:
        UsageError: the scenario has what only a world under checkers plays.
    """

    scenario: Scenario
    happenings: list[Happening] | None = None
    now: float = 0.0
    workers: list[RehearsedWorker] = field(default_factory=list[RehearsedWorker])  # all lives
    servers: list[RehearsedServer] = field(default_factory=list[RehearsedServer])
    data_lines: list[Line] = field(default_factory=list[Line])
    tally: Tally = field(default_factory=Tally)
    num_events: int = 0
    _newest: dict[int, RehearsedWorker] = field(default_factory=dict[int, RehearsedWorker])  # life of each rank
    _heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = field(
        default_factory=list[tuple[float, int, Callable[..., None], tuple[object, ...]]]
    )
    _number: count[int] = field(default_factory=count)
    _data_free: list[float] = field(default_factory=list[float])
    _rng: Random = field(init=False)
    _model: Quadratic = field(init=False)
    _push: WantPush = field(init=False)
    _push_bytes: float = field(init=False)
    _value_bytes: float = field(init=False)
    _num_pieces: int = field(init=False)  # of a push, and of the values that it makes
    _num_running: int = 0  # lives that have not ended, and those to come

    def __post_init__(self) -> None:
        """Make servers and workers, and schedule what happens to them."""
        s = self.scenario
        _check(s)
        self._rng = Random(f"network {s.seed}")
        self._model = Quadratic(s.num_servers)
        # As `paceline.distributed` does: a short push waits for the fetch that follows the end of its clock.
        size, is_held = s.lines.gradient_bytes, s.consistency.visible == "on_clock"
        self._num_pieces = _num_pieces(s)
        in_one = self._num_pieces == 1
        may_wait, ends_clock = is_held and size <= _WAITING_BYTES, s.refresh >= 1 and size <= _STEP_BYTES and in_one
        self._push = WantPush(TABLE, may_wait=may_wait, ends_clock=ends_clock)
        self._push_bytes = s.lines.gradient_bytes / s.num_servers
        self._value_bytes = s.lines.value_bytes / s.num_servers
        first = self._model.first()
        for rank in range(s.num_servers):
            settings = ServerSettings(
                rank,
                s.num_servers,
                workers=tuple(range(s.num_workers)),
                join_timeout_s=_JOIN_TIMEOUT_S,
                lease_s=s.lease_s,
                retry_s=s.retry_s,
            )
            core = ServerCore(settings, started=0.0)
            self.servers.append(RehearsedServer(rank, core, Line(s.lines.bytes_per_s), first[rank]))
        for server in self.servers:
            self._serve(server, Declared(TABLE, s.consistency))
        self.data_lines += [Line(s.lines.bytes_per_s) for _ in range(s.data.num_servers)]
        self._data_free += [0.0] * s.data.num_servers
        for rank in range(s.num_workers):
            self._num_running += 1
            self._at(s.starts[rank] if s.starts else 0.0, self._start, rank, 0)
        self._schedule_faults()

    def run(self) -> None:
        """Play until every worker has ended.

        Raises:
            ProtocolBug: workers wait for what never comes.
        """
        heap, pop = self._heap, heapq.heappop
        while self._num_running and heap:
            self.now, _, action, args = pop(heap)
            self.num_events += 1
            action(*args)
        if self._num_running:
            waiting = [f"{w.rank}.{w.incarnation} at clock {w.core.clock}" for w in self.workers if not w.is_done]
            raise ProtocolBug(f"at {self.now:g} s these workers of a rehearsal wait in vain: {waiting[:20]}")

    def _at(self, due: float, action: Callable[..., None], *args: object) -> None:
        """Schedule an action; those for the same time run in the order of their scheduling."""
        heapq.heappush(self._heap, (due, next(self._number), action, args))

    def _latency_s(self) -> float:
        low, high = self.scenario.network.latency_s
        return low + (high - low) * self._rng.random()

    # -- workers -----------------------------------------------------------------------------------------------------

    def _start(self, rank: int, incarnation: int) -> None:
        s = self.scenario
        sender = Sender(_GENERATION, rank, incarnation)
        worker = RehearsedWorker(
            rank=rank,
            incarnation=incarnation,
            core=WorkerCore(WorkerSettings(sender, s.num_servers, retry_s=s.retry_s)),
            line=self._line_of(rank),
            pace=Random(f"{s.seed}.{rank}.{incarnation}"),
            noise=Random(f"noise {s.seed}.{rank}.{incarnation}"),
            started_at=self.now,
            values=[[] for _ in range(s.num_servers)],
            own=[{} for _ in range(s.num_servers)],
        )
        self.workers.append(worker)
        self._newest[rank] = worker
        self.tally.num_joined += incarnation > 0 or rank >= s.num_workers
        for _ in range(1 + s.data.ahead if s.data.num_servers else 0):
            self._request_batch(worker)
        self._tell(worker, Opened(TABLE, s.consistency, tuple(range(s.num_servers))))
        self._tell(worker, WantJoin())

    def _line_of(self, rank: int) -> Line:
        """Return the line of a new life: that of the server beside it, or one of its own."""
        is_shared = self.scenario.lines.beside and rank < len(self.servers)
        return self.servers[rank].line if is_shared else Line(self.scenario.lines.bytes_per_s)

    def _tell(self, worker: RehearsedWorker, event: WorkerEvent) -> None:
        """Have a worker's core handle an event."""
        for effect in worker.core.handle(event, self.now):
            self._perform_of_worker(worker, effect)

    def _perform_of_worker(self, worker: RehearsedWorker, effect: WorkerEffect) -> None:
        match effect:
            case Send():
                self._send_up(worker, effect)
            case ReadDone():
                self._on_values(worker, effect)
            case Release():
                if effect.refused:
                    self._on_refused(worker, effect)
            case JoinDone():
                self._read(worker)
            case LeaveDone():
                worker.has_left = True
                self._num_running -= 1
            case Fail():
                worker.failed = effect.reason
                self._num_running -= 1
            case _:
                pass

    def _on_refused(self, worker: RehearsedWorker, effect: Release) -> None:
        self.servers[effect.server].pushed.pop(effect.id, None)
        worker.own[effect.server].pop(effect.id.seq, None)
        if effect.server == 0:  # all servers refuse what came too late
            worker.num_refused += 1
            if self.happenings is not None:
                self.happenings.append(RefusedPush(self.now, worker.rank, effect.refused))

    def _read(self, worker: RehearsedWorker) -> None:
        s = self.scenario
        worker.asked_at = self.now
        refresh = (s.refresh >= 1 or self._rng.random() < s.refresh) and not (s.fetches_once and worker.pieces)
        self._tell(worker, WantRead(TABLE, refresh=refresh))

    def _on_values(self, worker: RehearsedWorker, done: ReadDone) -> None:
        tally, waited_s, clock = self.tally, self.now - worker.asked_at, worker.core.clock
        # A late worker of a quorum may read values newer than its clock; it then goes on from there.
        differential = min(-1, done.clock - 1 - clock)
        tally.differentials[differential] += 1
        if done.clock >= min([server.core.clock_of(TABLE) for server in self.servers]):
            tally.freshest[differential] += 1
        worker.waited_s += waited_s
        worker.read_at, worker.has_values = self.now, True
        if self.happenings is not None:
            self.happenings.append(ReadValues(self.now, worker.rank, clock, done.clock, waited_s, done.source))
        self._compute_if_ready(worker)

    def _compute_if_ready(self, worker: RehearsedWorker) -> None:
        """Compute the next piece of a clock once there are values, and for the first piece a batch."""
        if not worker.has_values or (not worker.pieces and self.data_lines and not worker.num_batches):
            return
        worker.has_values = False
        if not worker.pieces:
            self._begin_clock(worker)
        worker.pieces -= 1
        self._at(self.now + worker.piece_s, self._end_piece, worker)

    def _begin_clock(self, worker: RehearsedWorker) -> None:
        worker.loaded_s += self.now - worker.read_at
        if self.data_lines:
            worker.num_batches -= 1
            self._request_batch(worker)
        worker.pieces = self.scenario.num_reads
        worker.piece_s = self._compute_s(worker) / worker.pieces

    def _compute_s(self, worker: RehearsedWorker) -> float:
        s = self.scenario
        if s.recorded:
            own = s.recorded[worker.rank % len(s.recorded)]
            return own[worker.num_finished % len(own)]
        return worker.pace.uniform(*s.compute_s) * s.stragglers.slowdown(worker.rank, worker.pace)

    def _end_piece(self, worker: RehearsedWorker) -> None:
        if worker.is_done:
            return
        if worker.pieces:
            self._read(worker)
        else:
            self._finish_clock(worker)

    def _finish_clock(self, worker: RehearsedWorker) -> None:
        if self.scenario.loss:
            self._make_gradient(worker)
        if self.happenings is not None:
            self._note_finished(worker)
        worker.finished_at = self.now
        worker.num_finished += 1
        self._tell(worker, self._push)
        self._tell(worker, WantClock())
        if worker.core.clock >= self.scenario.num_clocks or worker.is_leaving:
            self._tell(worker, WantLeave())
        else:
            self._read(worker)

    def _note_finished(self, worker: RehearsedWorker) -> None:
        assert self.happenings is not None
        waited_s, loaded_s = worker.waited_s - worker.before_s[0], worker.loaded_s - worker.before_s[1]
        worker.before_s = worker.waited_s, worker.loaded_s
        step_s, clock = self.now - (worker.finished_at or worker.started_at), worker.core.clock
        self.happenings.append(
            FinishedClock(self.now, worker.rank, clock, worker.read_loss, waited_s, step_s, loaded_s)
        )

    # -- the model ---------------------------------------------------------------------------------------------------

    @property
    def _rate(self) -> float:
        """The rate of an update: where each push is one of its own, it is smaller by the number of workers."""
        s = self.scenario
        return s.rate if s.consistency.visible == "on_clock" else s.rate / s.num_workers

    def _make_gradient(self, worker: RehearsedWorker) -> None:
        """Compute a gradient of the values that were read last, with own updates that they lack."""
        seq, clock, seen = worker.core.next_seq, worker.core.clock, [list(part) for part in worker.values]
        for values, own in zip(seen, worker.own, strict=True):
            for gradient in own.values():
                descend(values, [gradient], self._rate)
        worker.read_loss = self._model.loss(seen)
        self.tally.losses.append((self.now, clock, worker.read_loss))
        for server, part in zip(self.servers, self._model.gradients(seen, worker.noise), strict=True):
            server.pushed[PushId(_GENERATION, worker.rank, worker.incarnation, seq)] = part
            if self.scenario.consistency.visible == "on_arrival":
                worker.own[server.rank][seq] = part

    def _install(self, worker: RehearsedWorker, install: Install, body: _Body) -> None:
        worker.values[install.server] = body
        own = worker.own[install.server]
        for seq in [seq for seq in own if seq < install.settled or seq in install.includes]:
            del own[seq]

    # -- batches -----------------------------------------------------------------------------------------------------

    def _request_batch(self, worker: RehearsedWorker) -> None:
        server = worker.rank % len(self.data_lines)
        arrives = self.now + self._latency_s()
        made = self._data_free[server] = max(self._data_free[server], arrives) + self.scenario.data.batch_s
        self._at(made, self._send_batch, server, worker)

    def _send_batch(self, server: int, worker: RehearsedWorker) -> None:
        size = self.scenario.data.batch_bytes + MESSAGE_BYTES
        self._send(self.data_lines[server], worker.line, size, self._receive_batch, worker)

    def _receive_batch(self, worker: RehearsedWorker) -> None:
        if worker.is_alive:
            worker.num_batches += 1
            self._compute_if_ready(worker)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, source: Line, target: Line, size_bytes: float, arrive: Callable[..., None], *args: object) -> None:
        source.send(target, size_bytes, self.now, self._latency_s(), self._at, arrive, *args)

    def _send_up(self, worker: RehearsedWorker, send: Send) -> None:
        server, message = self.servers[send.server], send.message
        if self._num_pieces > 1 and type(message) is Push and not send.bare:
            self._send_pieces(worker, server, message)
            return
        num_pushes = len(message.pushes) if isinstance(message, WholeStep) else int(type(message) is Push)
        size = MESSAGE_BYTES + (0.0 if send.bare else num_pushes * self._push_bytes)
        self._send(worker.line, server.line, size, self._to_server, server, message)

    def _send_down(
        self, server: RehearsedServer, rank: int, incarnation: int, message: FromServer, body: _Body
    ) -> None:
        worker = self._newest.get(rank)
        if worker is None or worker.incarnation != incarnation or not worker.is_alive:
            return
        size = MESSAGE_BYTES
        if body is not _NOTHING:
            size += self._value_bytes * (1 - server.num_early.pop(rank, 0) / self._num_pieces)
        self._send(server.line, worker.line, size, self._receive, worker, server.rank, message, body)

    def _receive(self, worker: RehearsedWorker, server: int, message: FromServer, body: _Body) -> None:
        if worker.is_done:
            return
        for effect in worker.core.handle(Arrived(server, message), self.now):
            if type(effect) is Install:
                self._install(worker, effect, body)
            else:
                self._perform_of_worker(worker, effect)

    def _send_pieces(self, worker: RehearsedWorker, server: RehearsedServer, push: Push) -> None:
        """Send a push in pieces, which has arrived with the last one."""
        size, last = MESSAGE_BYTES + self._push_bytes / self._num_pieces, self._num_pieces - 1
        for place in range(last):
            self._send(worker.line, server.line, size, self._receive_piece, server, push.clock, place)
        self._send(worker.line, server.line, size, self._to_server, server, push)

    def _receive_piece(self, server: RehearsedServer, clock: int, place: int) -> None:
        """Note a piece of a push; with that of the last worker, the values that it makes leave."""
        server.pieces[clock, place] += 1
        members = server.core.members
        if server.pieces[clock, place] < len(members):
            return
        del server.pieces[clock, place]
        for rank in members:
            worker = self._newest[rank]
            if worker.is_alive and worker.line is not server.line:
                size = MESSAGE_BYTES + self._value_bytes / self._num_pieces
                self._send(server.line, worker.line, size, _keep_early)
                server.num_early[rank] += 1

    def _send_between(self, source: int, target: int, message: BetweenServers) -> None:
        other = self.servers[target]
        self._send(self.servers[source].line, other.line, MESSAGE_BYTES, self._to_server, other, message)

    # -- servers -----------------------------------------------------------------------------------------------------

    def _to_server(self, server: RehearsedServer, event: ServerEvent) -> None:
        """Handle an event once the server's thread is free, in the order of arrival."""
        if server.inbox or server.busy_until > self.now:
            server.inbox.append(event)
            if len(server.inbox) == 1:
                self._at(server.busy_until, self._work, server)
        else:
            self._serve(server, event)

    def _work(self, server: RehearsedServer) -> None:
        while server.inbox and server.busy_until <= self.now:
            self._serve(server, server.inbox.popleft())
        if server.inbox:
            self._at(server.busy_until, self._work, server)

    def _serve(self, server: RehearsedServer, event: ServerEvent) -> None:
        """Handle an event: updates take time, and what is sent after them leaves after them."""
        until = self.now + self.scenario.handle_s
        for effect in server.core.handle(event, self.now):
            if type(effect) is Apply:
                until += self.scenario.apply_s * len(effect.ids)
            self._perform_of_server(server, effect, until)
        server.busy_s += until - self.now
        server.busy_until = until
        if isinstance(event, _MAY_SET_ALARM):
            self._set_alarm(server)

    def _set_alarm(self, server: RehearsedServer) -> None:
        """Have the server look again when a lease ends, or at once if it has more clocks to close."""
        deadline = server.core.next_deadline()
        if deadline is not None and deadline < _JOIN_TIMEOUT_S:
            self._at(max(self.now, deadline), self._ring, server)

    def _ring(self, server: RehearsedServer) -> None:
        deadline = server.core.next_deadline()
        if deadline is not None and deadline <= self.now:
            self._to_server(server, Timeout())

    def _perform_of_server(self, server: RehearsedServer, effect: ServerEffect, at: float) -> None:
        match effect:
            case Serve():
                # A copy: the values change while it is under way.
                body = list(server.values) if self.scenario.loss else _VALUES
                self._leave_at(at, self._send_down, server, effect.worker, effect.incarnation, effect.message, body)
            case Reply():
                self._leave_at(at, self._send_down, server, effect.worker, effect.incarnation, effect.message, _NOTHING)
            case Apply():
                self._apply(server, effect.ids, at)
            case Tell():
                self._leave_at(at, self._send_between, server.rank, effect.server, effect.message)
            case Discard():
                server.pushed.pop(effect.id, None)
            case Advanced() if self.happenings is not None:
                self.happenings.append(ReachedClock(at, server.rank, effect.clock))
            case BoundMoved(_, before, bound, waiting, staleness) if self.happenings is not None:
                self.happenings.append(MovedBound(at, server.rank, before, bound, waiting, staleness))
            case MembershipChanged():
                self._on_membership(server, effect)
            case _:
                pass

    def _leave_at(self, at: float, send: Callable[..., None], *args: object) -> None:
        if at > self.now:
            self._at(at, send, *args)
        else:
            send(*args)

    def _apply(self, server: RehearsedServer, ids: Sequence[PushId], at: float) -> None:
        s = self.scenario
        if s.loss:
            descend(server.values, [server.pushed.pop(push_id) for push_id in ids], self._rate)
        if self.happenings is not None:
            ranks = tuple(push_id.worker for push_id in ids)
            clock = server.core.clock_of(TABLE) - 1 if s.consistency.visible == "on_clock" else 0
            self.happenings.append(Updated(at, server.rank, ranks, max(0, clock), s.apply_s * len(ids)))

    def _on_membership(self, server: RehearsedServer, effect: MembershipChanged) -> None:
        if self.happenings is not None:
            self.happenings.append(
                ChangedMember(self.now, server.rank, effect.worker, effect.incarnation, effect.change)
            )

    # -- faults ------------------------------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        """Draw who is killed, joins and leaves, and when; one worker is spared."""
        s, rng = self.scenario, Random(f"faults {self.scenario.seed}")
        span = s.num_clocks * (s.compute_s[0] + s.compute_s[1]) / 2
        if s.recorded:
            span = s.num_clocks * sum(map(sum, s.recorded)) / sum(map(len, s.recorded))
        spared = rng.randrange(s.num_workers)
        others = [rank for rank in range(s.num_workers) if rank != spared]
        for action, number in ((self._kill, s.fate.deaths), (self._have_leave, s.fate.leaves)):
            for _ in range(number if others else 0):
                self._at(rng.uniform(0, span), action, rng.choice(others))
        for index in range(s.fate.joins):
            self._num_running += 1
            self._at(rng.uniform(0, span), self._start, s.num_workers + index, 0)

    def _kill(self, rank: int) -> None:
        worker = self._newest[rank]
        if worker.is_done:
            return
        worker.is_alive = False
        self._num_running -= 1
        self.tally.num_deaths += 1
        for server in self.servers:
            gone = Disconnected(rank, worker.incarnation)
            self._send(worker.line, server.line, MESSAGE_BYTES, self._to_server, server, gone)
        if self.scenario.fate.restart:
            self._num_running += 1
            self._at(self.now + self.scenario.fate.restart_s, self._start, rank, worker.incarnation + 1)

    def _have_leave(self, rank: int) -> None:
        worker = self._newest[rank]
        self.tally.num_left += not worker.is_done and not worker.is_leaving
        worker.is_leaving = True


# Others neither start a lease nor complete many clocks at once.
_MAY_SET_ALARM = (Disconnected, Died, Leave, Timeout)
_NOTHING: _Body = []  # a message without values
_VALUES: _Body = []  # values that are not computed, as the scenario has no loss


def _keep_early() -> None:
    """Receive values that leave early: they count with the rest of them."""


def _num_pieces(scenario: Scenario) -> int:
    """Return the number of pieces in which a push travels, and the values that it makes: 1 where none leave early."""
    part_bytes = min(scenario.lines.gradient_bytes, scenario.lines.value_bytes) / scenario.num_servers
    is_early = scenario.lines.early and scenario.consistency.lockstep and scenario.refresh >= 1
    if not is_early or part_bytes < _LEAST_EARLY_BYTES:
        return 1
    return min(_MOST_PIECES, int(part_bytes // _LEAST_PIECE_BYTES))


def _check(scenario: Scenario) -> None:
    """Refuse what a rehearsal does not play."""
    network, fate = scenario.network, scenario.fate
    lossy = network.drop or network.duplicate or network.reorder or network.cut or network.spoil
    if (
        scenario.others
        or scenario.rows
        or scenario.num_pushes != 1
        or lossy
        or fate.pauses
        or fate.stops
        or fate.stalls
    ):
        raise UsageError(
            "a rehearsal has one dense table, one push a clock, and a network that loses nothing; its workers are "
            "killed, join and leave. Run a World for other faults, and for several tables."
        )

"""A parameter server: one thread that hands each message to the core and carries out the effects in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

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
from paceline.core.events import Changed, Declared, Died, Disconnected, NotFinite, Resumed, Timeout, Unapplied, Woke
from paceline.core.messages import (
    Applied,
    Clock,
    Closed,
    Fetched,
    Follow,
    Join,
    Leave,
    PullRefused,
    Push,
    PushId,
    PushRefused,
    Replicated,
    Sender,
    Taken,
    WorkerRefused,
)
from paceline.core.server import LEAD, ServerCore, ServerEvent
from paceline.core.settings import ServerSettings
from paceline.core.work_queue import Life
from paceline.errors import PeerError, UsageError
from paceline.observe.trace import Trace
from paceline.server.buffers import BodyLimits, ReceiveBuffers
from paceline.server.catch_up import CatchUp
from paceline.server.connections import Acceptor, Connections, Expel, Incoming, LoadMeter, Stop
from paceline.server.journal import Asked, Began, Journal, JournalFull, OtherFormat, Written
from paceline.server.preload import RulePreload
from paceline.server.readers import Published, ReaderService
from paceline.server.record_file import digests
from paceline.server.record_follower import RecordFollower
from paceline.server.recovery import CannotGoOn, Declarations, JournalReplay, Recovery, ServerParts
from paceline.server.repeated_pushes import RepeatedPushes
from paceline.server.replay import Replay
from paceline.server.replica import Follower
from paceline.server.replica_lag import may_lag
from paceline.server.replica_link import ReplicaLink
from paceline.server.requests import RequestHandler, WaitReports
from paceline.server.served_table import ACCEPTED, Acceptance, TableHost
from paceline.server.table_rpc import TableRpc
from paceline.server.tables import ServedTables, ServerCall, ServerState
from paceline.server.trace_records import ServerRecords
from paceline.stopwatch import Stopwatch
from paceline.transport.base import EMPTY, Connection, Frame, Listener, Transport
from paceline.transport.buffers import LentBody
from paceline.transport.lasting_memory import LastingMemory
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import TableSpec
from paceline.wire.messages import (
    FactoredPush,
    FetchedRest,
    Hello,
    PullFrame,
    PushFrame,
    PushPiece,
    RowPullFrame,
    RowPushFrame,
    RowsUsed,
    StepFrame,
    Unsubscribe,
    check_caller,
    check_sender,
    decode,
    encode,
)
from paceline.wire.requests import (
    Declare,
    DeclareRows,
    Initialise,
    LoadState,
    ReportWait,
    Request,
    RequestDone,
    WholeTable,
)

# A wait that ends this long after its deadline shows that the process was suspended, or its machine was.
_OVERSLEPT_S = 1.0
_NO_REQUEST = -1  # of a delivery, which answers no pull
_CLOSING_TIMEOUT_S = 10.0  # to wait for an import that is running


@dataclass(slots=True)
class ServerNode:
    """One server of a job. `run` blocks until `stop` is called from another thread.

    Args:
        settings: rank, number of servers and workers, timeouts.
        listener: accepts the connections of workers and of other servers.
        transport: makes connections to other servers.
        addresses: returns the addresses of all servers; called when another server is first needed.
        trace: records what happens.
        full_trace: also record every event and its effects, so that the run can be replayed.
        allowed_paths: the rules and functions that may be imported by path; None allows all.
        num_threads: returns how many threads an update may use, by the consistency of its table.
        checks_memory: overwrite memory of pushes and values when it is freed, so that a read after the free shows, and
            check that the memory of a push does not change while it waits.
        memory: outlives this process, so that another can go on in its place; without it, a killed server is lost.
        tell: called with what cannot be kept, and why.
        note_given_up: called with a worker that is waited for no longer while others go on, and why.
        without: what happens without memory that outlives it when it is killed; by default the run ends.
        replica: a process that is told all, and serves once this one is gone.
        follows: has this process be such a replica until then; or do what is recorded of another one, and end.
        published: what readers may read, if others serve them; by default it serves them itself.
    """

    settings: ServerSettings
    listener: Listener
    transport: Transport
    addresses: Callable[[], tuple[str, ...]]
    trace: Trace
    full_trace: bool = False
    allowed_paths: frozenset[str] | None = None
    num_threads: Callable[[Consistency], int] = lambda _: 1
    checks_memory: bool = False
    memory: LastingMemory | None = None
    tell: Callable[[str], None] = lambda _: None
    note_given_up: Callable[[int, str], None] = lambda _, __: None
    without: str = ""
    replica: ReplicaLink = field(default_factory=ReplicaLink)
    follows: Follower | RecordFollower | None = None
    published: Published | None = None
    _core: ServerCore = field(init=False)
    _acceptor: Acceptor = field(init=False)
    _readable: Published = field(init=False)
    _peers: Connections = field(init=False)
    _receive_buffers: ReceiveBuffers = field(init=False)
    _tables: ServedTables = field(init=False)
    _request_handler: RequestHandler = field(init=False)
    _table_rpc: TableRpc = field(init=False)
    _load_meter: LoadMeter = field(init=False)
    _records: ServerRecords = field(init=False)
    _preload: RulePreload = field(init=False)
    _wait_reports: WaitReports = field(init=False)
    _is_replicated: bool = field(init=False)  # it has or is a replica, now or later
    _deadline: float | None = None  # of the core, after the last item
    _journal: Journal | None = None
    _declarations: Declarations = field(default_factory=Declarations)
    _snapshot_due: bool = False  # what was done is not in the journal
    _callers: dict[Connection, Hello] = field(default_factory=dict[Connection, Hello])

    def __post_init__(self) -> None:
        """Connect the parts; nothing runs yet."""
        settings, transport = self.settings, self.transport
        self.without = self.without or f"the run ends if server {settings.server} is killed"
        self._is_replicated = self.follows is not None or self.replica.is_wanted
        self._core = ServerCore(settings, started=time.monotonic())
        if self.replica.lag is not None:
            self.replica.lag.tables = lambda: self._core.tables
        self._receive_buffers = ReceiveBuffers(self.checks_memory)
        self._tables = ServedTables(
            TableHost(
                settings,
                transport,
                self.allowed_paths,
                self.num_threads,
                self.checks_memory,
                lambda table: self._handle(Changed(table), self._tables.host.time),
                lasting=self.memory,
                replica=self.replica if self._is_replicated else None,
                follows=self.follows is not None,
                time=time.monotonic(),
            )
        )
        readers = ReaderService(self.published)
        self._readable = readers.published
        self._acceptor = Acceptor(self.listener, BodyLimits(self._tables.get, self._receive_buffers).place, readers)
        may_send = self._may_send if self._is_replicated else None
        self._peers = Connections(
            settings.server, settings.generation, transport, self.addresses, self._acceptor.drop, may_send
        )
        send, clock_of = self._peers.send_worker, self._core.clock_of
        self._request_handler = RequestHandler(self._tables, send)
        self._table_rpc = TableRpc(self._tables, send, clock_of, self._note_began, self._readable.versions)
        self._load_meter = LoadMeter(
            settings.server, self.trace, self._peers, self._acceptor, lambda: self.replica.num_behind
        )
        self._records = ServerRecords(self.trace, settings.server)
        self._wait_reports = WaitReports(self._core, self._request_handler)
        self._preload = RulePreload(lambda call: self.do(lambda _: call()))

    def run(self) -> None:
        """Serve until `stop`. Blocks; closes all connections, threads and shared memory before it returns.

        Raises:
            CannotGoOn: the process before this one was killed, and what it has left is not enough.
        """
        try:
            recovery = self._restore()
            if self.follows is not None:
                replay = Replay(self._parts(), self._tables, self._receive_buffers, self._handle, self._do_request)
                recovery = self.follows.follow(replay, self._acceptor.get)
                if recovery is None:
                    return
                self.follows = None
                self._tables.host.follows = False
            self._readable.feeds.attach(self.do, self._tables)
            self.replica.open(self._parts().dump())
            self._acceptor.open()
            self._deadline = self._core.next_deadline()
            if recovery is None or self._recover(recovery):
                while self._run_once():
                    pass
            self.replica.prove(lambda: digests(self._tables, self._core.clock_of))
            self.replica.end("it has ended as it was told to")
        except CannotGoOn as error:
            self._keep_no_more(str(error))
            raise
        finally:
            try:
                # Before connections close: it reads from them how many bytes they carried.
                self._load_meter.close()
            finally:
                self._close()

    def _run_once(self) -> bool:
        """Wait for the next item and handle it, then fire timers that are due; return False once `stop` was called.

        Items that had arrived when a timer became due are handled before it: a worker that has just reconnected is not
        evicted. Later ones are not: else a busy queue would delay timers for ever.
        """
        deadline, began = self._deadline, time.monotonic()
        patience_s = None if deadline is None else max(0.0, deadline - began)
        if self._is_replicated:
            patience_s = self.replica.patience_s(patience_s)
        item = self._load_meter.wait(partial(self._acceptor.get, patience_s))
        if deadline and time.monotonic() - (deadline if item is None else max(deadline, began)) > _OVERSLEPT_S:
            self._handle(Woke())
        if not self._handle_item(item):
            return False
        if self._is_due():
            if not all(self._handle_item(self._acceptor.get(0.0)) for _ in range(self._acceptor.num_waiting())):
                return False
            if self._is_due():
                self._handle(Timeout())
                self._deadline = self._core.next_deadline()
        if self._table_rpc.has_waiting:
            self.replica.note_idle()
            self._table_rpc.advance_idle()
        if self._readable.feeds.is_followed:
            self._readable.feeds.note_clocks(self._tables, self._core.clock_of)
        if self._journal is not None:
            self._keep_up(self._journal)
        if self._is_replicated:
            self.replica.look()
            self.replica.repair(self._parts(), self._tables)
            for life, seqs in self.replica.take_replicated().items():
                self._peers.send_worker(*life, Replicated(tuple(seqs)))
        return True

    def _is_due(self) -> bool:
        """Return whether a timer of the core is due now."""
        self._deadline = self._core.next_deadline()
        return self._deadline is not None and self._deadline <= time.monotonic()

    def _handle_item(self, item: object | None) -> bool:
        """Handle one item of the queue; return False once `stop` was called."""
        if isinstance(item, Incoming):
            with self._peers.hold:  # one frame may end a clock, with several answers to each worker
                self._on_incoming(item)
        elif isinstance(item, Died):
            self._handle(item)
        elif isinstance(item, Expel):
            self._expel(item)
        elif isinstance(item, ServerCall):
            item.call(ServerState(self._core, self._tables, self._keep, self._declare))
        if self._journal is not None:
            self._keep_up(self._journal)
        return not isinstance(item, Stop)

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._acceptor.put(Stop())

    def do(self, call: Callable[[ServerState], None]) -> None:
        """Have the serving thread call `call` with the core and the tables; from any thread, without waiting."""
        self._acceptor.put(ServerCall(call))

    def expel(self, names: frozenset[str]) -> None:
        """Close connections whose certificate has one of these holders or serial numbers; from any thread."""
        self._acceptor.expel(names)

    def report_death(self, worker: int, incarnation: int, reason: str) -> None:
        """Report that a worker's process has ended; from any thread."""
        self._acceptor.put(Died(worker, incarnation, reason))

    def _may_send(self, message: object) -> bool:
        if self.follows is not None:
            return False
        is_early = self.replica.lag is not None and may_lag(message)
        if self.replica.lag is None or self.replica.has_received(may_lag=is_early):
            return self.replica.wait_received(may_lag=is_early)
        with self._peers.hold.suspended():  # what may be ahead of the replica does not wait for it
            return self.replica.wait_received(may_lag=is_early)

    def _close(self) -> None:
        self.replica.close()
        self._peers.close()
        self._readable.feeds.detach(self._tables)
        self._acceptor.close()
        self._preload.close(_CLOSING_TIMEOUT_S)
        self._tables.close()
        self._receive_buffers.clear()
        self.trace.close()

    # -- incoming frames ---------------------------------------------------------------------------------------------

    def _on_incoming(self, item: Incoming) -> None:
        """Handle a frame; a peer that breaks the protocol loses its connection, and nothing else changes."""
        connection = item.connection
        hello: Hello | None = None
        try:
            hello = self._callers.get(connection) or check_caller(decode(connection.identity), connection)
            if item.frame is None:
                self._on_lost(hello, connection)
            else:
                self._callers[connection] = hello  # removed with the connection, whose end is its last item
                message = decode(item.frame.header)
                self._dispatch(hello, connection, message, item.frame)
        except PeerError as error:
            self._records.refused(f"{connection.peer}: {error}")
            self._on_lost(hello, connection)

    def _dispatch(self, hello: Hello, connection: Connection, message: object, frame: Frame) -> None:
        check_sender(hello, message, self.settings.num_servers)
        if hello.role == "worker" and hello.generation != self.settings.generation:
            frame.release()
            self._refuse_generation(hello, connection)
        if self.trace.is_kept:
            self._load_meter.note_message(hello.rank, message, frame.body)
        body, life = frame.body, (hello.rank, hello.incarnation)
        match message:
            case StepFrame():
                self._on_step(message, connection, frame)
            case PushFrame() | RowPushFrame():
                self._on_push(message, frame)
                self._send_early(message.push.table)
            case PushPiece():
                self._on_piece(message, connection, frame)
            case FactoredPush():
                self._on_push(message.push, self._tables.expand(message, frame))
                self._send_early(message.push.push.table)
            case PullFrame() | RowPullFrame():
                self._on_pull(message, connection, body)
            case Join():
                self._peers.register(hello, connection)
                self._handle(message)
            case Taken():
                table = self._tables.get(message.table)
                if table is not None:
                    table.note_taken(connection, message.clock)
                self._handle(message)
            case Clock() | Leave():
                self._handle(message)
            case Follow() | Closed():
                self._peers.note_heard(hello.rank, connection)
                self._handle(message)
            case RowsUsed() | Unsubscribe():
                table = self._tables.get(message.table)
                if table is not None and not self._core.lives.objection(message.sender):
                    table.note_read(life, message, body)
            case ReportWait():
                answer = self._wait_reports.add(life, message, time.monotonic())
                self._peers.send_worker(*life, RequestDone(message.number), memoryview(answer))
            case _ if not self._peers.is_current(hello, connection):
                pass  # the worker repeats its request over the newer connection
            case _ if isinstance(message, Request):
                self._on_request(life, message, body)
            case _ if isinstance(message, WholeTable):
                self.replica.note_request(life, message, body, self._tell_time())
                self._table_rpc.handle(life, message, body)
            case _:
                pass

    def _refuse_generation(self, hello: Hello, connection: Connection) -> NoReturn:
        """Tell a worker of another generation that it takes no part; raises PeerError, which ends its connection.

        Over that connection, as the worker of this rank and incarnation that takes part now must not hear it.
        """
        sender = Sender(hello.generation, hello.rank, hello.incarnation)
        reason = self._core.lives.objection(sender)
        connection.try_send([(encode(WorkerRefused(sender, reason)), EMPTY)], timeout_s=0.0)
        raise PeerError(reason)

    def _on_request(self, life: Life, message: Request, body: memoryview) -> None:
        again = partial(self._on_request, life, message, body)
        over = self._core.lives.objection(Sender(self.settings.generation, *life))
        if over:
            self._request_handler.refuse(life, message, over)
        elif not (isinstance(message, Declare) and self._preload.defer(life, message.spec.rule, again)):
            self._do_request(life, message, body)

    def _do_request(self, life: Life, message: Request, body: memoryview) -> None:
        now = self._tell_time()
        if self._request_handler.keeps(message):
            self._write_down(Asked(*life, encode(message)), now)
        elif isinstance(message, Initialise | LoadState) or self._tables.merges(message):
            self.replica.note_request(life, message, body, now)
        else:
            self.replica.check()
        if isinstance(message, LoadState):
            self._note_began(message.table, "the loading of a state")
        declared = self._request_handler.handle(life, message, body)
        if declared is not None:
            self._note_declared(life, message)
            self._handle(declared, now)
        if isinstance(message, Initialise) and message.table in self._tables and self._tables[message.table].cold:
            self._keep_no_more(self._tables[message.table].cold)
        self._request_handler.release(self._core.members)

    def _note_declared(self, life: Life, message: object) -> None:
        if isinstance(message, Declare | DeclareRows):
            self._declarations.note(life, message)
            cold = self._tables[message.spec.name].cold
            if cold:
                self._keep_no_more(cold, tells=self.settings.server == LEAD)

    def _on_step(self, message: StepFrame, connection: Connection, frame: Frame) -> None:
        step, tables = message.step, self._tables
        for part in (*step.pushes[: len(message.pushes)], *step.pulls):
            table = tables.get(part.table)
            if table is not None and table.keyed:
                frame.release()
                raise PeerError(f"step of row table '{part.table}'")
        arrived = self._keep_pushes(message, frame)
        special = {} if all(map(ACCEPTED.__eq__, arrived.values())) else arrived  # then each is an event of its own
        for push, accepted in special.items():
            if push.id not in self._handle(accepted.arrival(push)):
                self._tables[push.table].discard(push.id)
        for pull in message.pulls:
            table = self._tables.get(pull.pull.table)
            if table is not None:
                table.accept_pull(pull, connection, EMPTY)
        if special:
            step = replace(step, pushes=tuple(push for push in step.pushes if push not in special))
        if step.pushes or step.pulls:
            held = self._handle(step)
            for push in arrived:
                if push.id not in held and push not in special:
                    self._tables[push.table].discard(push.id)
        elif step.tick is not None:
            self._handle(step.tick)

    def _keep_pushes(self, message: StepFrame, frame: Frame) -> dict[Push, Acceptance]:
        """Store the gradients of a step, and return what became of each push; without copies, and unknown ones."""
        arrived: dict[Push, Acceptance] = {}
        is_one = len(message.sizes) == 1  # else the bodies share memory, which is in no pool
        for part, body in zip(message.all_pushes, message.bodies(frame.body), strict=True):
            push, table = part.push, self._tables.get(part.push.table)
            if table is None or table.has(push.id):  # unknown, or a copy of a push that is held: the core answers it
                if is_one:
                    frame.release()
                continue
            arrived[push] = table.accept(part, body, frame.buffer if is_one else None)
        return arrived

    def _on_push(self, message: PushFrame | RowPushFrame, frame: Frame) -> None:
        push = message.push
        table = self._tables.get(push.table)
        if table is None or table.has(push.id):  # unknown, or a copy of a push that is held: the core answers it
            frame.release()
            self._handle(push)
            return
        accepted = table.accept(message, frame.body, frame.buffer)
        if accepted.wanted is not None:
            self._peers.send_worker(push.id.worker, push.id.incarnation, accepted.wanted)
        elif push.id not in self._handle(accepted.arrival(push)):
            table.discard(push.id)

    def _on_piece(self, message: PushPiece, connection: Connection, frame: Frame) -> None:
        push = message.push.push
        table = self._tables.get(push.table)
        if table is None or self._core.lives.objection(push.id.sender):
            frame.release()
            if not message.at:
                self._handle(push)  # the core refuses it
            return
        try:
            whole = table.accept_piece(message, frame.body, connection)
        finally:
            frame.release()
        if whole is not None:
            self._on_push(message.push, whole)
        self._send_early(push.table)

    def _send_early(self, name: str) -> None:
        """Send what the values of a table will be ahead of the end of its clock, as far as that is known by now."""
        table = self._tables.get(name)
        if table is None or not table.has_early_readers:
            return
        early = table.early_values(self._core.members, self._core.clock_of(name))
        if early is not None:
            for life, connection in early.readers.items():
                if self._peers.connection_of(*life) is connection:
                    self._peers.send_worker(*life, early.message, early.body, LentBody(early.body))

    def _on_pull(self, message: PullFrame | RowPullFrame, connection: Connection, body: memoryview) -> None:
        pull = message.pull
        table = self._tables.get(pull.table)
        accepted = ACCEPTED if table is None else table.accept_pull(message, connection, body)
        if accepted.wanted is not None:
            self._peers.send_worker(pull.sender.worker, pull.sender.incarnation, accepted.wanted)
        elif accepted.problem:
            refusal = PullRefused(pull.request, pull.table, accepted.problem)
            self._peers.send_worker(pull.sender.worker, pull.sender.incarnation, refusal)
        else:
            self._handle(pull)

    def _on_lost(self, hello: Hello | None, connection: Connection) -> None:
        current = hello is not None and self._peers.is_current(hello, connection)
        self._callers.pop(connection, None)
        self._peers.forget(connection)
        for table in self._tables.values():
            table.forget_connection(connection)
        self._acceptor.drop(connection)
        if hello is not None and current:
            self._handle(Disconnected(hello.rank, hello.incarnation))

    def _expel(self, order: Expel) -> None:
        self._peers.expel(order.names)
        for connection in order.connections:
            self._on_revoked(connection)

    def _on_revoked(self, connection: Connection) -> None:
        self._acceptor.drop(connection)
        try:
            hello = check_caller(decode(connection.identity), connection)
        except PeerError:  # it never introduced itself, so there is nothing to undo
            return
        if hello.role == "worker":
            self._handle(Died(hello.rank, hello.incarnation, "its certificate was revoked"))
        self._on_lost(hello, connection)

    # -- effects of the core -----------------------------------------------------------------------------------------

    def _tell_time(self) -> float:
        """Return the time of what is handled now, which the tables take too; in a replay, the recorded one."""
        host = self._tables.host
        if not host.follows:
            host.time = time.monotonic()
        return host.time

    def _handle(self, event: ServerEvent, now: float | None = None) -> set[PushId]:
        """Pass an event to the core and carry out its effects; return the pushes that the core holds from now on."""
        self._tables.host.time = now = time.monotonic() if now is None else now
        if self._journal is not None or self._is_replicated:
            self._write_down(event, now)
        effects = self._core.handle(event, now)
        if self.full_trace:
            self._records.handled(event, effects)
        return self._perform(effects)

    def _perform(self, effects: list[ServerEffect]) -> set[PushId]:
        """Carry out effects of the core in order; return the pushes that it holds from now on."""
        unapplied: set[PushId] = set()  # pushes whose update failed
        held: set[PushId] = set()
        for effect in effects:
            match effect:
                case Apply():
                    unapplied.update(self._apply(effect))
                case Measure():
                    self._measure(effect)
                case Reply(message=Applied(id=push_id)) if push_id in unapplied:
                    pass  # its sender has already received a refusal
                case Hold():
                    held.add(effect.id)  # its tensor is stored already
                case Discard():
                    self._tables[effect.table].discard(effect.id)
                case Reply():
                    self._reply(effect)
                case Serve():
                    self._serve(effect.without(unapplied) if unapplied else effect)
                case Tell():
                    self._peers.send_server(effect.server, effect.message)
                case Advanced():
                    self._advance(effect)
                case MembershipChanged():
                    self._on_membership(effect)
                    if self.follows is None and effect.is_loss_to(self._core.members):
                        self.note_given_up(effect.worker, effect.reason)
                case BoundMoved():
                    self._records.moved(effect)
        return held

    def _apply(self, effect: Apply) -> tuple[PushId, ...]:
        """Update a table; return the pushes that are not in it, after their senders have received a refusal."""
        clock, table, host = self._core.clock_of(effect.table), self._tables[effect.table], self._tables.host
        self._require_pushes(effect, clock - 1)  # `clock` counts that of this update already
        began_t = time.monotonic()
        problem, refused = table.apply(effect.ids, clock, effect.norm), dict(table.not_finite)
        if refused:
            for push_id, reason in refused.items():
                self._handle(NotFinite(effect.table, push_id, reason), host.time)  # first: another process does, too
                table.discard(push_id)
            effect = effect.without(refused)
            problem = table.apply(effect.ids, clock, effect.norm)
        if table.cold:
            self._keep_no_more(table.cold)
        if problem:
            self._declarations.broken[effect.table] = problem
            self._handle(Unapplied(effect.table, effect.ids, problem), host.time)
            return (*refused, *effect.ids)
        self._declarations.num_applies[effect.table] += 1
        if self._request_handler.work_host.is_used:
            self._request_handler.work_host.settle(effect.ids)
        if self.trace.is_kept and effect.ids:
            self._records.applied(effect, clock, began_t)
        return tuple(refused)

    def _measure(self, effect: Measure) -> None:
        self._require_pushes(effect, effect.clock)
        self._handle(self._tables[effect.table].measure(effect), self._tables.host.time)

    def _require_pushes(self, effect: Apply | Measure, clock: int) -> None:
        if self._journal is not None and not all(map(self._tables[effect.table].has, effect.ids)):
            raise CannotGoOn(f"clock {clock} of table '{effect.table}' needs pushes of workers that did not come back")

    def _advance(self, effect: Advanced) -> None:
        if self.trace.is_kept:
            self._records.advanced(effect.table, effect.clock)
        self._tables[effect.table].advance(effect.clock)
        if self._table_rpc.has_waiting:
            self._table_rpc.advance(effect.table, effect.clock)

    def _reply(self, effect: Reply) -> None:
        message = effect.message
        if isinstance(message, PushRefused | WorkerRefused):
            self._records.refused(message.reason, effect.worker)
        if isinstance(message, WorkerRefused):
            self._forget_reader((effect.worker, effect.incarnation))
        self._peers.send_worker(effect.worker, effect.incarnation, message)

    def _serve(self, effect: Serve) -> None:
        life, message = (effect.worker, effect.incarnation), effect.message
        table, connection = self._tables[message.table], self._peers.connection_of(*life)
        if connection is None:
            table.miss_reader(life, message)
            return
        try:
            values = table.serve(life, connection, message)
        except UsageError as error:
            request = message.request if isinstance(message, Fetched) else _NO_REQUEST
            self._peers.send_worker(*life, PullRefused(request, message.table, str(error)))
            return
        if values is not None:
            early = values.num_early
            said = FetchedRest(message, early) if early and isinstance(message, Fetched) else message
            self._peers.send_worker(*life, said, values.body, values.lent)

    def _on_membership(self, effect: MembershipChanged) -> None:
        self._records.changed(effect)
        life = effect.worker, effect.incarnation
        if effect.change == "joined":
            self._table_rpc.admit(life)
        else:
            self._load_meter.sample()
            for each in (self._request_handler, self._wait_reports, self._table_rpc, self._declarations):
                each.forget(life)
            self._forget_reader(life)
        self._request_handler.release(self._core.members)

    def _forget_reader(self, life: Life) -> None:
        for table in self._tables.values():
            table.forget_worker(life)

    # -- in the place of a process that was killed -------------------------------------------------------------------

    def _write_down(self, written: Written, now: float) -> None:
        """Let another process know what is about to have an effect."""
        if self._journal is not None:
            try:
                self._journal.append(written, now)
            except JournalFull as error:
                self._keep_no_more(str(error))
        if self.follows is None:  # last: a process in the place of this one completes a record by the journal
            self.replica.note(written, now)

    def _note_began(self, table: str, what: str) -> None:
        self._write_down(Began(table, what), time.monotonic())
        self._snapshot_due = True

    def _keep_up(self, journal: Journal) -> None:
        """Write a snapshot if one is due; between two events, when all their effects are performed."""
        if self._snapshot_due or journal.wants_snapshot:
            self._write_snapshot(journal)

    def _write_snapshot(self, journal: Journal) -> None:
        self._snapshot_due = False
        cold = next((table.cold for table in self._tables.values() if table.cold), "")
        if cold:
            self._keep_no_more(cold)
            return
        try:
            journal.write_snapshot(self._parts().dump())
        except OSError as error:
            self._keep_no_more(f"there is no memory for it: {error.strerror}")

    def _keep_no_more(self, reason: str, *, tells: bool = True) -> None:
        """Be lost if this process is killed, as a server without memory that outlives it."""
        self.replica.dismiss(reason)
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close(reason)
            if tells:
                self.tell(f"{self.without}: {reason}")

    def _keep(self) -> bool:
        """Write down all that there is now; return whether another process can go on with it."""
        if self._journal is not None:
            self._write_snapshot(self._journal)
        return self._journal is not None

    def _declare(self, spec: TableSpec | RowTableSpec) -> Declared:
        """Declare a table that no worker has declared; raises UsageError."""
        declared = self._tables.declare(spec)
        declaration = DeclareRows(0, spec) if isinstance(spec, RowTableSpec) else Declare(0, spec)
        self._declarations.messages.setdefault(spec.name, encode(declaration))
        self._core.handle(declared, self._core.started)
        return declared

    def _parts(self) -> ServerParts:
        return ServerParts(self._core, self._request_handler, self._table_rpc, self._declarations)

    def _restore(self) -> Recovery | None:
        """Become the server whose process was killed, and return what is left to do; None if there was none."""
        if self.memory is None:
            return None
        try:
            self._journal = journal = Journal(self.memory)
        except OSError as error:
            why = f"memory that outlives it cannot be made ({error.strerror}; /dev/shm full, or `ulimit -f`?)"
            self.tell(f"{self.without}: {why}")
            return None
        if journal.is_new:
            self._write_snapshot(journal)
            return None
        try:
            state, entries = journal.read()
        except OtherFormat as error:
            raise CannotGoOn(str(error)) from error
        self.replica.complete_record(entries)
        replay = JournalReplay(self._parts(), self._tables, self._note_declared, self._on_membership)
        return replay.run(state, entries)

    def _recover(self, recovery: Recovery) -> bool:
        """Wait for what workers repeat, then go on where the process before ended; False if told to stop meanwhile."""
        self._handle(Resumed())
        watch, patience_s = Stopwatch(), self.settings.lease_s
        if recovery.lag:
            self._catch_up(recovery)
        num_servers, core, peers = self.settings.num_servers, self._core, self._peers
        pushes = RepeatedPushes(num_servers, core, self._tables, peers, recovery, self._on_incoming)
        if not pushes.wait(self._acceptor.get, lambda: watch.elapsed_s() >= patience_s):
            return False
        self._perform(recovery.unfinished)
        if self._journal is not None:
            self._journal.note_resumed()
        for push in recovery.repeated:
            self._handle(push)
        if self._is_due():
            self._handle(Timeout())
        return all(map(self._handle_item, [*recovery.deaths, *recovery.postponed]))

    def _catch_up(self, recovery: Recovery) -> None:
        """Wait until workers have said again what this process has not seen."""
        catch_up = CatchUp(recovery.served, self.settings.num_servers, self._core, recovery.lag, recovery.postponed)
        catch_up.run(self._acceptor.get, self._handle_item, self.settings.lease_s)
        losses = catch_up.losses()
        for text in losses:
            self.tell(text)
        for table in list(self._tables) * (recovery.lag * len(losses)):  # newer, as others have read values it lacks
            self._handle(Changed(table))
        for item in catch_up.completing:
            self._handle_item(item)

"""A parameter server: one thread that hands each message to the core and carries out the effects in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

import msgspec

from paceline.core.consistency import Consistency
from paceline.core.effects import Advanced, Apply, Discard, Hold, MembershipChanged, Reply, Serve, ServerEffect, Tell
from paceline.core.events import Changed, Died, Disconnected, InvalidPush, Timeout, Unapplied, Woke
from paceline.core.messages import (
    Applied,
    Clock,
    Closed,
    Delivered,
    Fetched,
    Follow,
    Join,
    Leave,
    Message,
    PullRefused,
    PushId,
    PushRefused,
    Sender,
    Taken,
    WorkerRefused,
)
from paceline.core.server import ServerCore, ServerEvent
from paceline.core.settings import ServerSettings
from paceline.errors import PeerError, UsageError
from paceline.observe import trace as records
from paceline.observe.trace import Trace
from paceline.server.acceptor import Acceptor, Incoming
from paceline.server.body_limits import BodyLimits
from paceline.server.buffers import ReceiveBuffers, SendBuffers
from paceline.server.commands import Expel, Holdings, ServerCall, Stop
from paceline.server.connections import Connections
from paceline.server.dense_tables import DenseTables
from paceline.server.load_meter import LoadMeter
from paceline.server.preload import RulePreload
from paceline.server.requests import RequestHandler
from paceline.server.row_tables import RowTables
from paceline.server.same_gradients import SameGradients
from paceline.server.snapshots import Snapshots
from paceline.server.table_rpc import TableRpc
from paceline.server.wait_reports import WaitReports
from paceline.server.whole_tables import WholeTables
from paceline.transport.base import Connection, Frame, Listener, Transport
from paceline.transport.buffers import fresh_buffer
from paceline.update.rows.ops import row_ops
from paceline.wire.messages import (
    Hello,
    KeysWanted,
    PullFrame,
    PushFrame,
    RowPullFrame,
    RowPushFrame,
    RowsUsed,
    Unsubscribe,
    decode,
)
from paceline.wire.permissions import check_caller, check_said
from paceline.wire.requests import Declare, ReportWait, Request, RequestDone, WholeTable

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
    _core: ServerCore = field(init=False)
    _acceptor: Acceptor = field(init=False)
    _peers: Connections = field(init=False)
    _send_buffers: SendBuffers = field(init=False)
    _receive_buffers: ReceiveBuffers = field(init=False)
    _snapshots: Snapshots = field(default_factory=Snapshots)
    _dense_tables: DenseTables = field(init=False)
    _row_tables: RowTables = field(init=False)
    _request_handler: RequestHandler = field(init=False)
    _table_rpc: TableRpc = field(init=False)
    _load_meter: LoadMeter = field(init=False)
    _preload: RulePreload = field(init=False)
    _wait_reports: WaitReports = field(init=False)
    # (worker, incarnation, table): tables whose values this worker maps instead of receiving copies.
    _live: set[tuple[int, int, str]] = field(default_factory=set[tuple[int, int, str]])

    def __post_init__(self) -> None:
        """Connect the parts; nothing runs yet."""
        self._core = ServerCore(self.settings, started=time.monotonic())
        self._send_buffers, self._receive_buffers = (
            SendBuffers(self.transport, self.checks_memory),
            ReceiveBuffers(self.checks_memory),
        )
        allocate = self.transport.allocate if self.transport.maps_memory else fresh_buffer
        same = SameGradients()
        self._dense_tables = DenseTables(
            self.settings,
            allocate,
            self.num_threads,
            self.allowed_paths,
            trusts_screening=self.transport.maps_memory,
            checks_memory=self.checks_memory,
            same=same,
        )
        self._row_tables = RowTables(self.settings.server, row_ops(), self.allowed_paths, same=same)
        self._acceptor = Acceptor(
            self.listener, BodyLimits(self._dense_tables, self._row_tables, self._receive_buffers).place
        )
        self._peers = Connections(
            self.settings.server, self.settings.generation, self.transport, self.addresses, self._acceptor.drop
        )
        self._request_handler = RequestHandler(self._dense_tables, self._row_tables, self._peers.send_worker)
        whole = WholeTables(self._dense_tables, self._row_tables, self._note_changed, self.allowed_paths)
        self._table_rpc = TableRpc(whole, self._peers.send_worker, self._core.clock_of)
        self._load_meter = LoadMeter(self.settings.server)
        self._wait_reports = WaitReports(self._core, self._request_handler)
        self._preload = RulePreload(lambda call: self.do(lambda _: call()))

    def run(self) -> None:
        """Serve until `stop`. Blocks; closes all connections, threads and shared memory before it returns."""
        self._acceptor.open()
        try:
            while self._run_once():
                pass
        finally:
            try:
                # Before connections close: it reads from them how many bytes they carried.
                self._load_meter.record(self.trace, self._peers.sent_bytes)
            finally:
                self._close()

    def _run_once(self) -> bool:
        """Wait for the next item and handle it, then fire timers that are due; return False once `stop` was called.

        Items that had arrived when a timer became due are handled before it: a worker that has just reconnected is not
        evicted. Later ones are not: else a busy queue would delay timers for ever.
        """
        deadline, began = self._core.next_deadline(), time.monotonic()
        patience_s = None if deadline is None else max(0.0, deadline - began)
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
        return True

    def _is_due(self) -> bool:
        deadline = self._core.next_deadline()
        return deadline is not None and deadline <= time.monotonic()

    def _handle_item(self, item: object | None) -> bool:
        """Handle one item of the queue; return False once `stop` was called."""
        if isinstance(item, Incoming):
            self._on_incoming(item)
        elif isinstance(item, Died):
            self._handle(item)
        elif isinstance(item, Expel):
            self._expel(item)
        elif isinstance(item, ServerCall):
            item.call(Holdings(self._core, self._dense_tables, self._row_tables))
        return not isinstance(item, Stop)

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._acceptor.put(Stop())

    def do(self, call: Callable[[Holdings], None]) -> None:
        """Have the serving thread call `call` with the core and the tables; from any thread, without waiting."""
        self._acceptor.put(ServerCall(call))

    def expel(self, names: frozenset[str]) -> None:
        """Close connections whose certificate has one of these holders or serial numbers; from any thread."""
        self._acceptor.put(Expel(names))

    def report_death(self, worker: int, incarnation: int, reason: str) -> None:
        """Report that a worker's process has ended; from any thread."""
        self._acceptor.put(Died(worker, incarnation, reason))

    def _close(self) -> None:
        self._peers.close()
        self._acceptor.close()
        self._preload.close(_CLOSING_TIMEOUT_S)
        for content in (self._send_buffers, self._dense_tables, self._row_tables, self._receive_buffers):
            content.clear()
        self.trace.close()

    # -- incoming frames ---------------------------------------------------------------------------------------------

    def _on_incoming(self, item: Incoming) -> None:
        """Handle a frame; a peer that breaks the protocol loses its connection, and nothing else changes."""
        connection = item.connection
        hello: Hello | None = None
        try:
            hello = check_caller(decode(connection.identity), connection)
            if item.frame is None:
                self._on_lost(hello, connection)
            else:
                self._dispatch(hello, connection, decode(item.frame.header), item.frame)
        except PeerError as error:
            rank = self.settings.server
            self.trace.record(records.Refusal(time.monotonic(), rank, -1, "", f"{connection.peer}: {error}"))
            self._on_lost(hello, connection)

    def _dispatch(self, hello: Hello, connection: Connection, message: object, frame: Frame) -> None:
        check_said(hello, message, self.settings.num_servers)
        body = frame.body
        if isinstance(message, Follow | Closed):
            self._handle(message)
        elif isinstance(message, PushFrame):
            self._on_push(message, frame)
        elif isinstance(message, PullFrame):
            if message.pull.table in self._row_tables:
                raise PeerError(f"dense pull of row table '{message.pull.table}'")
            self._send_buffers.take_back(connection, message.pull.table, "read", message.taken)
            self._handle(message.pull)
        elif isinstance(message, RowPushFrame):
            self._on_row_push(message, body)
        elif isinstance(message, RowPullFrame):
            self._on_row_pull(message, body)
        elif isinstance(message, Unsubscribe):
            self._row_tables.unsubscribe((hello.rank, hello.incarnation), message, body)
        elif isinstance(message, RowsUsed):
            if not self._core.lives.objection(message.sender):
                self._row_tables.use((hello.rank, hello.incarnation), message, body)
        elif isinstance(message, Join | Leave | Clock | Taken):
            self._on_core_message(hello, connection, message)
        elif isinstance(message, Request):
            if self._peers.is_current(hello, connection):  # else the worker repeats it over the newer connection
                self._on_request(hello, message, body)
        elif isinstance(message, ReportWait):
            life = hello.rank, hello.incarnation
            answer = self._wait_reports.add(life, message, time.monotonic())
            self._peers.send_worker(*life, RequestDone(message.number), memoryview(answer))
        elif isinstance(message, WholeTable) and self._peers.is_current(hello, connection):
            self._table_rpc.handle((hello.rank, hello.incarnation), message, body)

    def _on_core_message(self, hello: Hello, connection: Connection, message: Join | Leave | Clock | Taken) -> None:
        if isinstance(message, Join):
            self._peers.register(hello, connection)
        elif isinstance(message, Taken):
            self._send_buffers.take_back(connection, message.table, "delivery", message.clock)
        self._handle(message)

    def _on_request(self, hello: Hello, message: Request, body: memoryview) -> None:
        life = hello.rank, hello.incarnation
        if isinstance(message, Declare):
            if self._preload.defer(life, message.spec.rule, partial(self._on_request, hello, message, body)):
                return
            if message.live:
                self._live.add((*life, message.spec.name))
        declared = self._request_handler.handle(life, message, body)
        if declared is not None:
            self._handle(declared)
        self._request_handler.release(self._core.members)

    def _on_push(self, message: PushFrame, frame: Frame) -> None:
        push = message.push
        if self._dense_tables.has(push.id):  # a repeated push that is still held: the core answers it
            frame.release()
            self._handle(push)
        elif push.table in self._row_tables:
            frame.release()
            self._handle(InvalidPush(push, f"'{push.table}' is a table of rows"))
        else:
            problem = self._dense_tables.accept(message, frame.body, frame.buffer)  # takes over the buffer
            if not self._handle(InvalidPush(push, problem) if problem else push):
                self._dense_tables.discard(push.id)

    def _on_row_push(self, frame: RowPushFrame, body: memoryview) -> None:
        push = frame.push
        if self._row_tables.has(push.id):  # a repeated push that is still held: the core answers it
            self._handle(push)
            return
        problem = self._row_tables.accept(frame, body)
        if isinstance(problem, KeysWanted):
            self._request_ids(push.id.sender, problem)
        elif not self._handle(InvalidPush(push, problem) if problem else push):
            self._row_tables.discard(push.id)

    def _on_row_pull(self, frame: RowPullFrame, body: memoryview) -> None:
        pull = frame.pull
        try:
            wanted = self._row_tables.accept_pull(frame, body)
        except UsageError as error:
            refusal = PullRefused(pull.request, pull.table, str(error))
            self._peers.send_worker(pull.sender.worker, pull.sender.incarnation, refusal)
            return
        self._handle(pull) if wanted is None else self._request_ids(pull.sender, wanted)

    def _request_ids(self, sender: Sender, wanted: KeysWanted) -> None:
        self._peers.send_worker(sender.worker, sender.incarnation, wanted)

    def _on_lost(self, hello: Hello | None, connection: Connection) -> None:
        current = hello is not None and self._peers.is_current(hello, connection)
        self._peers.forget(connection)
        self._send_buffers.forget(connection)
        self._acceptor.drop(connection)
        if hello is not None and current:
            self._handle(Disconnected(hello.rank, hello.incarnation))

    def _expel(self, order: Expel) -> None:
        self._peers.expel(order.names)
        for connection in self._acceptor.expel(order.names):
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

    def _handle(self, event: ServerEvent) -> bool:
        """Pass an event to the core and carry out its effects; return whether the core holds the push."""
        effects = self._core.handle(event, time.monotonic())
        if self.full_trace:
            self._record_handled(event, effects)
        unapplied: set[PushId] = set()
        for effect in effects:
            self._perform(effect, unapplied)
        return any(isinstance(effect, Hold) for effect in effects)

    def _perform(self, effect: ServerEffect, unapplied: set[PushId]) -> None:
        """Carry out one effect; `unapplied` collects the pushes whose update failed."""
        match effect:
            case Apply():
                unapplied.update(self._apply(effect))
            case Reply(message=Applied(id=push_id)) if push_id in unapplied:
                pass  # its sender has already received a refusal
            case Hold():
                pass  # its tensor is stored already
            case Discard():
                self._discard(effect.id)
            case Reply():
                self._reply(effect)
            case Serve():
                self._serve(effect)
            case Tell():
                self._peers.send_server(effect.server, effect.message)
            case Advanced():
                self._advance(effect)
            case MembershipChanged():
                self._on_membership(effect)

    def _apply(self, effect: Apply) -> tuple[PushId, ...]:
        """Update a table; return the pushes whose update failed, after their senders have received a refusal."""
        if effect.table in self._row_tables:
            problem = self._row_tables.apply(effect.table, effect.ids, self._core.clock_of(effect.table))
        else:
            problem = self._dense_tables.apply(effect.table, effect.ids)
        if problem:
            self._handle(Unapplied(effect.table, effect.ids, problem))
            return effect.ids
        for push_id in effect.ids:
            self._request_handler.work_host.settle((push_id.worker, push_id.incarnation))
        self._record_applied(effect)
        return ()

    def _discard(self, push_id: PushId) -> None:
        self._dense_tables.discard(push_id)
        self._row_tables.discard(push_id)

    def _advance(self, effect: Advanced) -> None:
        self.trace.record(records.MinClock(time.monotonic(), self.settings.server, effect.table, effect.clock))
        if effect.table in self._row_tables:
            self._row_tables.advance(effect.table, effect.clock)
        self._table_rpc.advance(effect.table, effect.clock)

    def _note_changed(self, table: str) -> None:
        self._handle(Changed(table))

    def _reply(self, effect: Reply) -> None:
        message = effect.message
        if isinstance(message, PushRefused | WorkerRefused):
            now, rank = time.monotonic(), self.settings.server
            self.trace.record(records.Refusal(now, rank, effect.worker, "", message.reason))
        if isinstance(message, PushRefused):
            self._discard(message.id)
        if isinstance(message, WorkerRefused):
            self._row_tables.forget((effect.worker, effect.incarnation))
        self._peers.send_worker(effect.worker, effect.incarnation, message)

    def _serve(self, effect: Serve) -> None:
        connection = self._peers.connection_of(effect.worker, effect.incarnation)
        if connection is None:
            return
        message = effect.message
        request = message.request if isinstance(message, Fetched) else _NO_REQUEST
        keyed = message.table in self._row_tables
        life = effect.worker, effect.incarnation
        problem = (
            self._row_tables.check_read(life, message.table, request)
            if keyed
            else self._dense_tables.settle(message.table)
        )
        if problem:
            self._peers.send_worker(*life, PullRefused(request, message.table, problem))
            return
        if keyed:
            self._serve_rows(effect, message)
            return
        body = self._dense_tables.memories[message.table]
        live = (effect.worker, effect.incarnation, message.table) in self._live
        if self.transport.maps_memory and not live:  # else the worker maps the values, or the transport copies them
            body = self._shared_copy(connection, message)
        version = message.version, self._dense_tables.shards[message.table].version
        copy = partial(self._snapshots.of, message.table, version, body)
        self._peers.send_worker(effect.worker, effect.incarnation, message, body, copy)

    def _serve_rows(self, effect: Serve, message: Fetched | Delivered) -> None:
        life = effect.worker, effect.incarnation
        if isinstance(message, Delivered):
            body = self._row_tables.pack_delivery(life, message)
        else:
            body = self._row_tables.answer_pull(life, message)
        if body is not None:
            self._peers.send_worker(*life, message, body)

    def _shared_copy(self, connection: Connection, message: Fetched | Delivered) -> memoryview:
        """Return a copy of a table's values in memory shared with this worker."""
        size_bytes = self._dense_tables.size_bytes(message.table)
        if isinstance(message, Delivered):
            body = self._send_buffers.lend(connection, message.table, "delivery", message.clock, size_bytes)
        else:
            body = self._send_buffers.lend(connection, message.table, "read", message.request, size_bytes)
        self._dense_tables.values_into(message.table, body)
        return body

    def _on_membership(self, effect: MembershipChanged) -> None:
        now, rank = time.monotonic(), self.settings.server
        change = cast("Literal['joined', 'left', 'died']", effect.change)
        self.trace.record(records.MembershipRecord(now, rank, effect.worker, effect.incarnation, change))
        life = effect.worker, effect.incarnation
        if change == "joined":
            self._table_rpc.admit(life)
        else:
            self._load_meter.sample()
            self._request_handler.forget(life)
            self._wait_reports.forget(life)
            self._table_rpc.forget(life)
            self._row_tables.forget(life)
            self._live = {entry for entry in self._live if entry[:2] != life}
        self._request_handler.release(self._core.members)

    # -- the record --------------------------------------------------------------------------------------------------

    def _record_applied(self, effect: Apply) -> None:
        workers = tuple(push_id.worker for push_id in effect.ids)
        clock = self._core.clock_of(effect.table)
        self.trace.record(records.AppliedRecord(time.monotonic(), self.settings.server, effect.table, workers, clock))

    def _record_handled(self, event: ServerEvent, effects: list[ServerEffect]) -> None:
        who, done = f"server {self.settings.server}", [_as_data(effect) for effect in effects]
        self.trace.record(records.Handled(time.monotonic(), who, _as_data(event), done))


def _as_data(value: ServerEvent | ServerEffect | Message) -> dict[str, object]:
    return {"is": type(value).__name__, **cast("dict[str, object]", msgspec.to_builtins(value))}

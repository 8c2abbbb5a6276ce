"""A server: one thread that takes in what arrives, asks the core what to do, and does it in the order given."""

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

# A wait that ends so long after its time shows that this process has not run: it was stopped, or its machine was.
_OVERSLEPT_S = 1.0
_NO_REQUEST = -1  # of a delivery, which was not asked for
_CLOSING_TIMEOUT_S = 10.0  # for an import that is under way


@dataclass(slots=True)
class ServerNode:
    """One server of a job. `run` blocks until `stop` is called from another thread.

    Args:
        addresses: returns the addresses of all servers, called when another server is first needed.
        full_trace: also record every event and its effects, so that the run can be replayed.
        allowed_paths: limits which rules and functions may be imported by path; None allows all.
        checks_memory: overwrite memory of pushes and values that becomes free, so that a late look at it shows, and
            see that the memory of a push stays as it came.
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
    _rows: RowTables = field(init=False)
    _request_handler: RequestHandler = field(init=False)
    _table_rpc: TableRpc = field(init=False)
    _load_meter: LoadMeter = field(init=False)
    _warming: RulePreload = field(init=False)
    _wait_reports: WaitReports = field(init=False)
    # (worker, incarnation, table): who is sent the memory of a table's values itself.
    _live: set[tuple[int, int, str]] = field(default_factory=set[tuple[int, int, str]])

    def __post_init__(self) -> None:
        """Join the parts."""
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
        self._rows = RowTables(self.settings.server, row_ops(), self.allowed_paths, same=same)
        self._acceptor = Acceptor(
            self.listener, BodyLimits(self._dense_tables, self._rows, self._receive_buffers).place
        )
        self._peers = Connections(
            self.settings.server, self.settings.generation, self.transport, self.addresses, self._acceptor.drop
        )
        self._request_handler = RequestHandler(self._dense_tables, self._rows, self._peers.send_worker)
        whole = WholeTables(self._dense_tables, self._rows, self._note_changed, self.allowed_paths)
        self._table_rpc = TableRpc(whole, self._peers.send_worker, self._core.clock_of)
        self._load_meter = LoadMeter(self.settings.server)
        self._wait_reports = WaitReports(self._core, self._request_handler)
        self._warming = RulePreload(lambda call: self.do(lambda _: call()))

    def run(self) -> None:
        """Serve until `stop`; all connections, threads and shared memory are gone afterwards."""
        self._acceptor.open()
        try:
            while self._take_turn():
                pass
        finally:
            try:
                self._load_meter.record(
                    self.trace, self._peers.sent_bytes
                )  # first: connections tell it what they carried
            finally:
                self._close()

    def _take_turn(self) -> bool:
        """Wait for what comes next, then do what is due; False once `stop` was called.

        What had come when something became due goes first: a worker that is back is not given up. What comes later does
        not: else what is due would wait until nothing comes any more.
        """
        deadline, began = self._core.next_deadline(), time.monotonic()
        patience_s = None if deadline is None else max(0.0, deadline - began)
        item = self._load_meter.wait(partial(self._acceptor.get, patience_s))
        if deadline and time.monotonic() - (deadline if item is None else max(deadline, began)) > _OVERSLEPT_S:
            self._handle(Woke())
        if not self._take_item(item):
            return False
        if self._is_due():
            if not all(self._take_item(self._acceptor.get(0.0)) for _ in range(self._acceptor.num_waiting())):
                return False
            if self._is_due():
                self._handle(Timeout())
        return True

    def _is_due(self) -> bool:
        deadline = self._core.next_deadline()
        return deadline is not None and deadline <= time.monotonic()

    def _take_item(self, item: object | None) -> bool:
        """Take in what came; False once `stop` was called."""
        if isinstance(item, Incoming):
            self._take_in(item)
        elif isinstance(item, Died):
            self._handle(item)
        elif isinstance(item, Expel):
            self._expel(item)
        elif isinstance(item, ServerCall):
            item.call(Holdings(self._core, self._dense_tables, self._rows))
        return not isinstance(item, Stop)

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._acceptor.put(Stop())

    def do(self, call: Callable[[Holdings], None]) -> None:
        """Have `call` called by the thread that serves, with all that this server has; from any thread."""
        self._acceptor.put(ServerCall(call))

    def expel(self, names: frozenset[str]) -> None:
        """End the connections of those whose certificate has such a holder or serial number, from any thread."""
        self._acceptor.put(Expel(names))

    def report_death(self, worker: int, incarnation: int, reason: str) -> None:
        """Say that a worker's process is known to be dead, from any thread."""
        self._acceptor.put(Died(worker, incarnation, reason))

    def _close(self) -> None:
        self._peers.close()
        self._acceptor.close()
        self._warming.close(_CLOSING_TIMEOUT_S)
        for content in (self._send_buffers, self._dense_tables, self._rows, self._receive_buffers):
            content.clear()
        self.trace.close()

    # -- taking in ---------------------------------------------------------------------------------------------------

    def _take_in(self, item: Incoming) -> None:
        """Take in a frame; a peer that does not keep to the rules loses its connection, and nothing else changes."""
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
            if message.pull.table in self._rows:
                raise PeerError(f"a worker pulls '{message.pull.table}', a table of rows, as if it had a shape")
            self._send_buffers.give_back(connection, message.pull.table, "read", message.taken)
            self._handle(message.pull)
        elif isinstance(message, RowPushFrame):
            self._on_row_push(message, body)
        elif isinstance(message, RowPullFrame):
            self._on_row_pull(message, body)
        elif isinstance(message, Unsubscribe):
            self._rows.unsubscribe((hello.rank, hello.incarnation), message, body)
        elif isinstance(message, RowsUsed):
            if not self._core.lives.objection(message.sender):
                self._rows.use((hello.rank, hello.incarnation), message, body)
        elif isinstance(message, Join | Leave | Clock | Taken):
            self._on_said(hello, connection, message)
        elif isinstance(message, Request):
            if self._peers.is_current(hello, connection):  # else it is repeated over the newer connection
                self._on_request(hello, message, body)
        elif isinstance(message, ReportWait):
            life = hello.rank, hello.incarnation
            answer = self._wait_reports.take(life, message, time.monotonic())
            self._peers.send_worker(*life, RequestDone(message.number), memoryview(answer))
        elif isinstance(message, WholeTable) and self._peers.is_current(hello, connection):
            self._table_rpc.ask((hello.rank, hello.incarnation), message, body)

    def _on_said(self, hello: Hello, connection: Connection, message: Join | Leave | Clock | Taken) -> None:
        if isinstance(message, Join):
            self._peers.register(hello, connection)
        elif isinstance(message, Taken):
            self._send_buffers.give_back(connection, message.table, "delivery", message.clock)
        self._handle(message)

    def _on_request(self, hello: Hello, message: Request, body: memoryview) -> None:
        life = hello.rank, hello.incarnation
        if isinstance(message, Declare):
            if self._warming.holds(life, message.spec.rule, partial(self._on_request, hello, message, body)):
                return
            if message.live:
                self._live.add((*life, message.spec.name))
        declared = self._request_handler.handle(life, message, body)
        if declared is not None:
            self._handle(declared)
        self._request_handler.release(self._core.members)

    def _on_push(self, message: PushFrame, frame: Frame) -> None:
        push = message.push
        if self._dense_tables.has(push.id):  # a copy of a push that is held: the core knows what to say
            frame.release()
            self._handle(push)
        elif push.table in self._rows:
            frame.release()
            self._handle(InvalidPush(push, f"'{push.table}' is a table of rows"))
        else:
            problem = self._dense_tables.accept(message, frame.body, frame.buffer)  # whose memory it is from here on
            if not self._handle(InvalidPush(push, problem) if problem else push):
                self._dense_tables.discard(push.id)

    def _on_row_push(self, frame: RowPushFrame, body: memoryview) -> None:
        push = frame.push
        if self._rows.has(push.id):  # a copy of a push that is held: the core knows what to say
            self._handle(push)
            return
        problem = self._rows.accept(frame, body)
        if isinstance(problem, KeysWanted):
            self._want_keys(push.id.sender, problem)
        elif not self._handle(InvalidPush(push, problem) if problem else push):
            self._rows.discard(push.id)

    def _on_row_pull(self, frame: RowPullFrame, body: memoryview) -> None:
        pull = frame.pull
        try:
            wanted = self._rows.ask(frame, body)
        except UsageError as error:
            refusal = PullRefused(pull.request, pull.table, str(error))
            self._peers.send_worker(pull.sender.worker, pull.sender.incarnation, refusal)
            return
        self._handle(pull) if wanted is None else self._want_keys(pull.sender, wanted)

    def _want_keys(self, sender: Sender, wanted: KeysWanted) -> None:
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
        except PeerError:  # it has not been heard, and will not be
            return
        if hello.role == "worker":
            self._handle(Died(hello.rank, hello.incarnation, "its certificate was revoked"))
        self._on_lost(hello, connection)

    # -- asking the core and doing what it says ----------------------------------------------------------------------

    def _handle(self, event: ServerEvent) -> bool:
        """Do what the core says; return whether it holds a tensor from now on."""
        effects = self._core.handle(event, time.monotonic())
        if self.full_trace:
            self._record_handled(event, effects)
        unapplied: set[PushId] = set()
        for effect in effects:
            self._perform(effect, unapplied)
        return any(isinstance(effect, Hold) for effect in effects)

    def _perform(self, effect: ServerEffect, unapplied: set[PushId]) -> None:
        """Do one thing of several; `unapplied` collects the pushes of updates that failed among them."""
        match effect:
            case Apply():
                unapplied.update(self._apply(effect))
            case Reply(message=Applied(id=push_id)) if push_id in unapplied:
                pass  # its sender has been told that it is refused
            case Hold():
                pass  # its tensor is on the shelf already
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
        """Update a table; return the pushes of which that failed: their senders have been told."""
        if effect.table in self._rows:
            problem = self._rows.apply(effect.table, effect.ids, self._core.clock_of(effect.table))
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
        self._rows.discard(push_id)

    def _advance(self, effect: Advanced) -> None:
        self.trace.record(records.MinClock(time.monotonic(), self.settings.server, effect.table, effect.clock))
        if effect.table in self._rows:
            self._rows.advance(effect.table, effect.clock)
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
            self._rows.forget((effect.worker, effect.incarnation))
        self._peers.send_worker(effect.worker, effect.incarnation, message)

    def _serve(self, effect: Serve) -> None:
        connection = self._peers.connection_of(effect.worker, effect.incarnation)
        if connection is None:
            return
        message = effect.message
        request = message.request if isinstance(message, Fetched) else _NO_REQUEST
        keyed = message.table in self._rows
        life = effect.worker, effect.incarnation
        problem = (
            self._rows.objection(life, message.table, request) if keyed else self._dense_tables.settle(message.table)
        )
        if problem:
            self._peers.send_worker(*life, PullRefused(request, message.table, problem))
            return
        if keyed:
            self._serve_rows(effect, message)
            return
        body = self._dense_tables.memories[message.table]
        live = (effect.worker, effect.incarnation, message.table) in self._live
        if self.transport.maps_memory and not live:  # else the worker may see all that happens, or is sent a copy
            body = self._lend(connection, message)
        version = message.version, self._dense_tables.shards[message.table].version
        copy = partial(self._snapshots.of, message.table, version, body)
        self._peers.send_worker(effect.worker, effect.incarnation, message, body, copy)

    def _serve_rows(self, effect: Serve, message: Fetched | Delivered) -> None:
        life = effect.worker, effect.incarnation
        if isinstance(message, Delivered):
            body = self._rows.delivery(life, message)
        else:
            body = self._rows.answer(life, message)
        if body is not None:
            self._peers.send_worker(*life, message, body)

    def _lend(self, connection: Connection, message: Fetched | Delivered) -> memoryview:
        """Return a copy of a table's values in memory that is shared with a worker."""
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
            self._load_meter.look()
            self._request_handler.forget(life)
            self._wait_reports.forget(life)
            self._table_rpc.forget(life)
            self._rows.forget(life)
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

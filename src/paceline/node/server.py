"""A server: one thread that takes in what arrives, asks the core what to do, and does it in the order given."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

import msgspec

from paceline.core.consistency import Consistency
from paceline.core.effects import Advanced, Apply, Discard, Hold, Membership, Reply, Serve, ServerEffect, Tell
from paceline.core.events import Changed, Died, Disconnected, Spoiled, Timeout, Unapplied, Woke
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
from paceline.node.allowance import Allowance
from paceline.node.desk import Desk
from paceline.node.errands import Errands
from paceline.node.inbox import Inbox, Incoming
from paceline.node.landing import Landing
from paceline.node.loans import Loans
from paceline.node.orders import Expel, Holdings, Stop, Task
from paceline.node.peers import Peers
from paceline.node.requests import Declare, Done, ReportWait, Request, WholeTable
from paceline.node.roles import check_caller, check_said
from paceline.node.rows.shelf import RowShelf
from paceline.node.same_gradients import SameGradients
from paceline.node.shelf import Shelf
from paceline.node.snapshots import Snapshots
from paceline.node.toil import Toil
from paceline.node.wait_reports import WaitReports
from paceline.node.warming import Warming
from paceline.node.whole_tables import WholeTables
from paceline.node.wire import (
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
from paceline.observe import trace as records
from paceline.observe.trace import Trace
from paceline.tensors.rows.ops import row_ops
from paceline.transport.base import Connection, Frame, Listener, Transport
from paceline.transport.buffers import fresh_buffer

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
    _inbox: Inbox = field(init=False)
    _peers: Peers = field(init=False)
    _loans: Loans = field(init=False)
    _landing: Landing = field(init=False)
    _snapshots: Snapshots = field(default_factory=Snapshots)
    _shelf: Shelf = field(init=False)
    _rows: RowShelf = field(init=False)
    _desk: Desk = field(init=False)
    _errands: Errands = field(init=False)
    _toil: Toil = field(init=False)
    _warming: Warming = field(init=False)
    _wait_reports: WaitReports = field(init=False)
    # (worker, incarnation, table): who is sent the memory of a table's values itself.
    _live: set[tuple[int, int, str]] = field(default_factory=set[tuple[int, int, str]])

    def __post_init__(self) -> None:
        """Join the parts."""
        self._core = ServerCore(self.settings, started=time.monotonic())
        self._loans, self._landing = Loans(self.transport, self.checks_memory), Landing(self.checks_memory)
        allocate = self.transport.allocate if self.transport.maps_memory else fresh_buffer
        same = SameGradients()
        self._shelf = Shelf(
            self.settings,
            allocate,
            self.num_threads,
            self.allowed_paths,
            trusts_screening=self.transport.maps_memory,
            checks_memory=self.checks_memory,
            same=same,
        )
        self._rows = RowShelf(self.settings.server, row_ops(), self.allowed_paths, same=same)
        self._inbox = Inbox(self.listener, Allowance(self._shelf, self._rows, self._landing).place)
        self._peers = Peers(
            self.settings.server, self.settings.generation, self.transport, self.addresses, self._inbox.drop
        )
        self._desk = Desk(self._shelf, self._rows, self._peers.send_worker)
        whole = WholeTables(self._shelf, self._rows, self._note_changed, self.allowed_paths)
        self._errands = Errands(whole, self._peers.send_worker, self._core.clock_of)
        self._toil = Toil(self.settings.server)
        self._wait_reports = WaitReports(self._core, self._desk)
        self._warming = Warming(lambda call: self.do(lambda _: call()))

    def run(self) -> None:
        """Serve until `stop`; all connections, threads and shared memory are gone afterwards."""
        self._inbox.open()
        try:
            while self._take_turn():
                pass
        finally:
            try:
                self._toil.record(self.trace, self._peers.sent_bytes)  # first: connections tell it what they carried
            finally:
                self._close()

    def _take_turn(self) -> bool:
        """Wait for what comes next, then do what is due; False once `stop` was called.

        What had come when something became due goes first: a worker that is back is not given up. What comes later does
        not: else what is due would wait until nothing comes any more.
        """
        deadline, began = self._core.next_deadline(), time.monotonic()
        patience_s = None if deadline is None else max(0.0, deadline - began)
        item = self._toil.wait(partial(self._inbox.get, patience_s))
        if deadline and time.monotonic() - (deadline if item is None else max(deadline, began)) > _OVERSLEPT_S:
            self._handle(Woke())
        if not self._take_item(item):
            return False
        if self._is_due():
            if not all(self._take_item(self._inbox.get(0.0)) for _ in range(self._inbox.num_waiting())):
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
        elif isinstance(item, Task):
            item.call(Holdings(self._core, self._shelf, self._rows))
        return not isinstance(item, Stop)

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._inbox.put(Stop())

    def do(self, call: Callable[[Holdings], None]) -> None:
        """Have `call` called by the thread that serves, with all that this server has; from any thread."""
        self._inbox.put(Task(call))

    def expel(self, names: frozenset[str]) -> None:
        """End the connections of those whose certificate has such a holder or serial number, from any thread."""
        self._inbox.put(Expel(names))

    def report_death(self, worker: int, incarnation: int, reason: str) -> None:
        """Say that a worker's process is known to be dead, from any thread."""
        self._inbox.put(Died(worker, incarnation, reason))

    def _close(self) -> None:
        self._peers.close()
        self._inbox.close()
        self._warming.close(_CLOSING_TIMEOUT_S)
        for content in (self._loans, self._shelf, self._rows, self._landing):
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
            self._loans.give_back(connection, message.pull.table, "read", message.taken)
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
            self._peers.send_worker(*life, Done(message.number), memoryview(answer))
        elif isinstance(message, WholeTable) and self._peers.is_current(hello, connection):
            self._errands.ask((hello.rank, hello.incarnation), message, body)

    def _on_said(self, hello: Hello, connection: Connection, message: Join | Leave | Clock | Taken) -> None:
        if isinstance(message, Join):
            self._peers.register(hello, connection)
        elif isinstance(message, Taken):
            self._loans.give_back(connection, message.table, "delivery", message.clock)
        self._handle(message)

    def _on_request(self, hello: Hello, message: Request, body: memoryview) -> None:
        life = hello.rank, hello.incarnation
        if isinstance(message, Declare):
            if self._warming.holds(life, message.spec.rule, partial(self._on_request, hello, message, body)):
                return
            if message.live:
                self._live.add((*life, message.spec.name))
        declared = self._desk.handle(life, message, body)
        if declared is not None:
            self._handle(declared)
        self._desk.release(self._core.members)

    def _on_push(self, message: PushFrame, frame: Frame) -> None:
        push = message.push
        if self._shelf.has(push.id):  # a copy of a push that is held: the core knows what to say
            frame.release()
            self._handle(push)
        elif push.table in self._rows:
            frame.release()
            self._handle(Spoiled(push, f"'{push.table}' is a table of rows"))
        else:
            problem = self._shelf.accept(message, frame.body, frame.buffer)  # whose memory it is from here on
            if not self._handle(Spoiled(push, problem) if problem else push):
                self._shelf.discard(push.id)

    def _on_row_push(self, frame: RowPushFrame, body: memoryview) -> None:
        push = frame.push
        if self._rows.has(push.id):  # a copy of a push that is held: the core knows what to say
            self._handle(push)
            return
        problem = self._rows.accept(frame, body)
        if isinstance(problem, KeysWanted):
            self._want_keys(push.id.sender, problem)
        elif not self._handle(Spoiled(push, problem) if problem else push):
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
        self._loans.forget(connection)
        self._inbox.drop(connection)
        if hello is not None and current:
            self._handle(Disconnected(hello.rank, hello.incarnation))

    def _expel(self, order: Expel) -> None:
        self._peers.expel(order.names)
        for connection in self._inbox.expel(order.names):
            self._on_revoked(connection)

    def _on_revoked(self, connection: Connection) -> None:
        self._inbox.drop(connection)
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
            case Membership():
                self._on_membership(effect)

    def _apply(self, effect: Apply) -> tuple[PushId, ...]:
        """Update a table; return the pushes of which that failed: their senders have been told."""
        if effect.table in self._rows:
            problem = self._rows.apply(effect.table, effect.ids, self._core.clock_of(effect.table))
        else:
            problem = self._shelf.apply(effect.table, effect.ids)
        if problem:
            self._handle(Unapplied(effect.table, effect.ids, problem))
            return effect.ids
        for push_id in effect.ids:
            self._desk.dealer.settle((push_id.worker, push_id.incarnation))
        self._record_applied(effect)
        return ()

    def _discard(self, push_id: PushId) -> None:
        self._shelf.discard(push_id)
        self._rows.discard(push_id)

    def _advance(self, effect: Advanced) -> None:
        self.trace.record(records.MinClock(time.monotonic(), self.settings.server, effect.table, effect.clock))
        if effect.table in self._rows:
            self._rows.advance(effect.table, effect.clock)
        self._errands.advance(effect.table, effect.clock)

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
        problem = self._rows.objection(life, message.table, request) if keyed else self._shelf.settle(message.table)
        if problem:
            self._peers.send_worker(*life, PullRefused(request, message.table, problem))
            return
        if keyed:
            self._serve_rows(effect, message)
            return
        body = self._shelf.memories[message.table]
        live = (effect.worker, effect.incarnation, message.table) in self._live
        if self.transport.maps_memory and not live:  # else the worker may see all that happens, or is sent a copy
            body = self._lend(connection, message)
        version = message.version, self._shelf.shards[message.table].version
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
        size_bytes = self._shelf.size_bytes(message.table)
        if isinstance(message, Delivered):
            body = self._loans.lend(connection, message.table, "delivery", message.clock, size_bytes)
        else:
            body = self._loans.lend(connection, message.table, "read", message.request, size_bytes)
        self._shelf.values_into(message.table, body)
        return body

    def _on_membership(self, effect: Membership) -> None:
        now, rank = time.monotonic(), self.settings.server
        change = cast("Literal['joined', 'left', 'died']", effect.change)
        self.trace.record(records.Membership(now, rank, effect.worker, effect.incarnation, change))
        life = effect.worker, effect.incarnation
        if change == "joined":
            self._errands.admit(life)
        else:
            self._toil.look()
            self._desk.forget(life)
            self._wait_reports.forget(life)
            self._errands.forget(life)
            self._rows.forget(life)
            self._live = {entry for entry in self._live if entry[:2] != life}
        self._desk.release(self._core.members)

    # -- the record --------------------------------------------------------------------------------------------------

    def _record_applied(self, effect: Apply) -> None:
        workers = tuple(push_id.worker for push_id in effect.ids)
        clock = self._core.clock_of(effect.table)
        self.trace.record(records.Applied(time.monotonic(), self.settings.server, effect.table, workers, clock))

    def _record_handled(self, event: ServerEvent, effects: list[ServerEffect]) -> None:
        who, done = f"server {self.settings.server}", [_as_data(effect) for effect in effects]
        self.trace.record(records.Handled(time.monotonic(), who, _as_data(event), done))


def _as_data(value: ServerEvent | ServerEffect | Message) -> dict[str, object]:
    return {"is": type(value).__name__, **cast("dict[str, object]", msgspec.to_builtins(value))}

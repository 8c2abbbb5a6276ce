"""A worker: a core under one lock, driven by the user's calls and by the frames of servers."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from paceline.core.consistency import Consistency
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
from paceline.core.messages import Clock, Fetched, Pull, Push, Ticked
from paceline.core.settings import WorkerSettings
from paceline.core.worker import WorkerCore, WorkerEvent
from paceline.errors import PeerError, ProtocolBug, Refused, ServerLost, UsageError
from paceline.transport.base import EMPTY, Frame, Transport
from paceline.update.placement import spans
from paceline.update.rows.ops import row_ops
from paceline.update.rows.sharding import RowSharding
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import Hyper, TableSpec
from paceline.wire.connection import ReconnectingConnection
from paceline.wire.malformed import MISHAPS, story
from paceline.wire.messages import Hello, KeysWanted, PushFrame, RowsUsed, decode, encode
from paceline.wire.requests import Declare, DeclareRows, RequestDone, RequestFailed
from paceline.worker.cache import TableCache, can_replay
from paceline.worker.lock import WorkerLock, WorkerOptions
from paceline.worker.periodic import PeriodicThread
from paceline.worker.pushes import (
    NO_PUSH,
    PushBuffer,
    Pushes,
    PushOutcome,
    Slots,
    allocate,
    finished_push,
    objection,
    refuse_endless_clock,
)
from paceline.worker.reads import ReadOutcome, Reads
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.opened import CacheOptions, OpenedRows
from paceline.worker.rpc import Rpc
from paceline.worker.waits import PERIOD_S, About, Waits


def _refuse(reason: str) -> None:
    raise PeerError(reason)


@dataclass(frozen=True, slots=True)
class FrameHandler:
    """Handles the frames of one server, under the worker's lock.

    `fail` is called with the reason if a frame is invalid; by default that raises PeerError.
    """

    server: int
    lock: WorkerLock
    core: WorkerCore
    rpc: Rpc
    reads: Reads
    rows: RowClient
    caches: dict[str, TableCache]
    handle: Callable[[WorkerEvent, memoryview], None]
    fail: Callable[[str], None] = _refuse

    def on_frame(self, frame: Frame) -> None:
        """Handle a frame, and wake the waiting threads."""
        message = decode(frame.header)
        with self.lock.changed:
            try:
                self._take_in(message, frame)
            except MISHAPS as error:
                self.fail(
                    f"server {self.server} sent a {type(message).__name__} that makes no sense here ({story(error)}): "
                    f"{str(message)[:500]}"
                )
            self.lock.changed.notify_all()

    def _take_in(self, message: object, frame: Frame) -> None:
        if isinstance(message, RequestDone):
            self.rpc.finish_call(message.number, frame.body)
        elif isinstance(message, RequestFailed):
            self.rpc.fail_call(message.number, Refused(f"server {self.server} refused: {message.reason}"))
        elif isinstance(message, KeysWanted):
            self.rows.on_keys_wanted(self.server, message)
        elif not self.lock.failure:
            self.handle(Arrived(self.server, message), frame.body)
        if isinstance(message, Ticked):
            self.rows.on_ticked(self.server, message.clock)
        elif isinstance(message, Fetched):
            self.reads.note_taken(self.server, message)

    def place(self, header: bytes, size_bytes: int) -> memoryview | None:
        """Return memory for the body of a frame: values that a read waits for go straight into the table's cache.

        Without the lock: its holder may be waiting for this thread to leave the connection. The state that is read
        here changes only on this thread, except when a read starts, which then waits as well.
        """
        message = decode(header)
        if isinstance(message, Fetched) and self.core.awaits(self.server, message):
            return self.caches[message.table].receive_buffer(self.server, size_bytes)
        return None

    def on_reconnected(self, use: Callable[[], None]) -> None:
        """Switch to a new connection by calling `use`, and send again what may have been lost with the old one.

        All under the lock under which everything is sent: a new push may not overtake an older one (E7).
        """
        with self.lock.changed:
            use()
            self.rows.on_reconnected(self.server)
            self.handle(Connected(self.server), EMPTY)
            self.rpc.repeat(self.server)


_SLOTS = 2  # pushes of one table in flight
_CONNECT_TIMEOUT_S = 30.0


@dataclass(slots=True)
class WorkerNode:
    """One worker of a job: its connections, tables and clock.

    Every call that blocks raises `DeadlineExceeded` after `wait_timeout_s`, or three times the longest clock if that is
    longer, with what it waited for; and `PeerError` as soon as the worker has failed.
    """

    settings: WorkerSettings
    transport: Transport
    addresses: Sequence[str]
    options: WorkerOptions = field(default_factory=WorkerOptions)
    _core: WorkerCore = field(init=False)
    rpc: Rpc = field(init=False)
    _connections: list[ReconnectingConnection] = field(default_factory=list[ReconnectingConnection])
    waits: Waits = field(init=False)
    _lock: WorkerLock = field(init=False)
    # Guards everything below, and the core; used by the reader threads and the user's threads.
    _changed: threading.Condition = field(init=False)
    _caches: dict[str, TableCache] = field(default_factory=dict[str, TableCache])
    _pushes: Pushes = field(default_factory=Pushes)
    _reads: Reads = field(default_factory=Reads)
    rows: RowClient = field(init=False)
    _joined: bool = False
    _left: bool = False
    _periodic: PeriodicThread = field(init=False)

    def __post_init__(self) -> None:
        """Create the core; nothing is connected yet."""
        self._core = WorkerCore(self.settings)
        rank = self.settings.sender.worker
        self.waits = Waits(rank, self.options.wait_timeout_s, lambda make: self.rpc.start_call(0, make))
        self._lock = WorkerLock(rank, self.waits, lambda: self._core.clock)
        self._changed = self._lock.changed
        self.rpc = Rpc(self._send_request, self._lock, len(self.addresses), self.settings.retry_s)
        ops = row_ops()
        sharding = RowSharding(ops, len(self.addresses), self.settings.shares)
        self.rows = RowClient(self._core, self._lock, ops, sharding, self._send_request, self._handle, self._fail)
        # Retry intervals double, so a quarter of the first one is fine enough.
        self._periodic = PeriodicThread(min(self.settings.retry_s / 4, PERIOD_S), self._run_due)

    def __repr__(self) -> str:
        return f"WorkerNode(worker {self.settings.sender.worker}, {len(self.addresses)} server(s), clock {self.clock})"

    # -- the user's calls --------------------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """The number of clocks this worker has finished."""
        return self._core.clock

    @property
    def num_servers(self) -> int:
        """The number of servers of the job."""
        return len(self.addresses)

    @property
    def is_failing(self) -> bool:
        """Whether a call has raised, or the next one will, because a server is lost or has not answered in time."""
        return self._lock.is_failing

    def join(self) -> int:
        """Connect to all servers and join the job; return the clock to start at. Blocks until every server agrees."""
        sender = self.settings.sender
        hello = Hello("worker", sender.worker, sender.incarnation, sender.generation)
        for server, address in enumerate(self.addresses):
            arrivals = FrameHandler(
                server,
                self._lock,
                self._core,
                self.rpc,
                self._reads,
                self.rows,
                self._caches,
                self._handle,
                self._fail,
            )
            connection = ReconnectingConnection(
                server,
                address,
                hello,
                self.transport,
                self.options.reconnect_timeout_s,
                on_frame=arrivals.on_frame,
                place=arrivals.place,
                on_reconnected=arrivals.on_reconnected,
                on_lost=partial(self._fail, as_error=ServerLost),
                how_ended=partial(self.options.how_ended, server),
            )
            connection.open(_CONNECT_TIMEOUT_S)
            self._connections.append(connection)
        self._periodic.start()
        with self._changed:
            self._handle(WantJoin())
            self._lock.wait(lambda: self._joined, "all servers to let this worker take part")
            return self._core.clock

    def open_table(self, spec: TableSpec, *, reads_own_writes: bool = True, live: bool = False) -> TableCache:
        """Declare a dense table to all servers and open it; blocks until all have agreed.

        Args:
            spec: the declaration, the same on all workers.
            reads_own_writes: reads contain own pushes that servers have not applied yet, where the rule allows that.
            live: over a transport that maps memory, reads see the servers' own memory instead of a copy.

        Raises:
            Refused: the table exists with other settings; the message lists the first differences.
        """
        layout = spans(spec, self.settings)
        live = live and self.transport.maps_memory
        self.rpc.call_all(lambda number: Declare(number, spec, live), f"servers to agree on table '{spec.name}'")
        consistency = Consistency.parse(spec.consistency)
        with self._changed:
            cache = TableCache(spec, layout, not live and reads_own_writes and can_replay(spec, consistency), live)
            self._caches[spec.name] = cache
            held = consistency.visible == "on_clock"
            self._pushes.open(
                spec.name, Slots(_SLOTS, held, lambda: allocate(self.transport, spec), self.options.checks_memory)
            )
            self._handle(Opened(spec.name, consistency, cache.servers))
        return cache

    def open_rows(self, spec: RowTableSpec, options: CacheOptions) -> OpenedRows:
        """Declare a row table to all servers and open it; blocks and raises as `open_table` does."""
        self.rpc.call_all(lambda number: DeclareRows(number, spec), f"servers to agree on table '{spec.name}'")
        return self.rows.open_table(spec, options)

    def reserve(self, table: str) -> PushBuffer:
        """Return memory for the next push of a table, for `push_reserved` or `return_buffer`.

        Blocks while two earlier pushes of this table are in flight. Returned memory is reused first, so a caller that
        waits for each push gets the same buffer every time.

        Raises:
            UsageError: servers hold no more pushes of this table before this worker has finished its clock.
        """
        return self._reserve(table, shown=True)

    def _reserve(self, table: str, *, shown: bool) -> PushBuffer:
        self._cache(table)
        with self._changed:
            clock = self._core.clock
            self._lock.wait(
                lambda: self._may_push(table) and self._pushes.has_slot(table, clock),
                f"servers to apply earlier pushes of table '{table}'",
                About(f"push {table}", table, self._core.oldest_push(table) + 1),
            )
            return self._pushes.lend(table, shown=shown)

    def _may_push(self, table: str) -> bool:
        if self._core.may_push(table):
            return True
        refuse_endless_clock(self._core, table)
        return False

    def return_buffer(self, table: str, buffer: PushBuffer) -> None:
        """Return reserved memory without a push."""
        with self._changed:
            self._pushes.take_back(table, buffer)

    def parts(self, table: str, buffer: PushBuffer) -> list[memoryview]:
        """Return each server's part of reserved memory, by rank."""
        item = buffer.gradient.itemsize
        return [buffer.memory[span.start * item : span.stop * item] for span in self._cache(table).spans]

    def push(
        self,
        table: str,
        gradient: Tensor,
        *,
        count: float,
        absent: tuple[int, ...] = (),
        hyper: tuple[Hyper, ...] = (),
    ) -> Future[PushOutcome]:
        """Send an update; the future ends when every server has applied or refused its part.

        Blocks only while two earlier pushes of this table are in flight. `gradient` is (elements of the table,), and
        may be overwritten as soon as this returns. The future ends with `PeerError` if this worker fails first: then
        it is unknown whether the push was applied.
        """
        problem = self._objection(table, gradient)
        if problem:
            return finished_push(PushOutcome(applied=False, reason=problem))
        buffer = self._reserve(table, shown=False)
        buffer.gradient.copy_(gradient)
        return self._push(table, buffer, count, absent, hyper)

    def push_reserved(
        self,
        table: str,
        buffer: PushBuffer,
        *,
        count: float,
        absent: tuple[int, ...] = (),
        hyper: tuple[Hyper, ...] = (),
        expected: float = 0.0,
    ) -> Future[PushOutcome]:
        """Send an update as `push` does, from memory that `reserve` returned, which servers read from now on."""
        problem = self._objection(table, buffer.gradient)
        if problem:
            self.return_buffer(table, buffer)
            return finished_push(PushOutcome(applied=False, reason=problem))
        return self._push(table, buffer, count, absent, hyper, expected)

    def tick(self) -> None:
        """Finish the current clock.

        Blocks while rows that must be sent before wait for their budget, and while many reports of rows read from
        caches are unanswered.
        """
        with self._changed:
            self.rows.budgeted.send_due(self._core.clock)
            self.rows.end_clock(self._core.clock)
            self._lock.check()
            self._handle(WantClock())
            self.waits.note_clock()

    def start_read(self, table: str, *, refresh: bool = True, exact: bool = False) -> Future[ReadDone]:
        """Request values; the future ends when the cache of the table is fresh enough. Does not block."""
        self._cache(table)
        with self._changed:
            self._lock.check()
            future = self._reads.add(self._core.next_request, table)
            self._handle(WantRead(table, refresh, exact))
        return future

    def read(
        self, table: str, take: Callable[[TableCache], None], *, refresh: bool = True, exact: bool = False
    ) -> ReadOutcome:
        """Call `take` with the cache of a table, under the lock, once it is fresh enough; blocks until then."""
        clock = self._core.clock
        return self.finish_read(table, clock, self.start_read(table, refresh=refresh, exact=exact), take)

    def finish_read(
        self, table: str, clock: int, future: Future[ReadDone], take: Callable[[TableCache], None]
    ) -> ReadOutcome:
        """Finish a read that `start_read` started at `clock`; blocks as `read` does."""
        began = time.monotonic()
        with self._changed:
            cache = self._cache(table)
            self._lock.wait(
                future.done,
                f"values of table '{table}' at clock {clock} ({cache.spec.consistency})",
                About(f"pull {table}", table, self._core.needs(table)),
            )
            waited_s = time.monotonic() - began
            done = future.result(timeout=0)
            take(cache)
        return ReadOutcome(clock, done.clock, done.source, waited_s)

    def use_cache(self, table: str, call: Callable[[TableCache], None]) -> None:
        """Call `call` with the cache of a table as it is, under the lock. Does not wait for fresh values."""
        with self._changed:
            call(self._cache(table))

    def settle(self) -> None:
        """Block until every push made so far is applied or refused by every server.

        Raises:
            UsageError: a push is applied only when this worker finishes its clock.
        """
        with self._changed:
            self.rows.budgeted.send_all(self._core.clock)
            held = self.unfinished()
            if held:
                raise UsageError(
                    f"worker {self.settings.sender.worker} has pushed to table '{next(iter(held))}' during clock "
                    f"{self._core.clock}, which is applied when the clock is finished: call clock() first"
                )
            self._lock.wait(
                lambda: not self._pushes and not self.rows.num_under_way(),
                "servers to settle this worker's pushes",
                About("settle", needs=self._core.oldest_push() + 1),
            )

    def unfinished(self) -> dict[str, int]:
        """Return by table how many pushes wait for this worker to finish its clock."""
        with self._changed:
            clock = self._core.clock
            return {**self._pushes.held_at(clock), **self.rows.held_at(clock)}

    def leave(self) -> None:
        """Leave the job once all pushes are settled. Blocks until every server agrees."""
        with self._changed:
            self.rows.budgeted.send_all(self._core.clock)
            self._handle(WantLeave())
            self._lock.wait(
                lambda: self._left,
                "all servers to settle this worker's pushes and let it leave",
                About("leave", needs=self._core.oldest_push() + 1),
            )

    def close(self) -> None:
        """Close all connections and threads and release all memory, without waiting for pushes in flight."""
        self._periodic.stop()
        self._fail("this worker has closed its connections")
        for connection in self._connections:
            connection.close()
        self._periodic.join()
        self._caches.clear()
        self.rows.close()
        self._pushes = Pushes()

    def abandon(self, reason: str) -> None:
        """Refuse all further calls, in a forked child: connections and memory belong to the parent."""
        self._lock.changed = self._changed = threading.Condition()  # may be held by a thread of the parent
        self._lock.failure = reason

    def _fail(self, reason: str, as_error: type[PeerError] = PeerError) -> None:
        """Fail this worker, for the first reason given: every blocked or later call raises it."""
        with self._changed:
            if self._lock.failure:
                return
            self._lock.failed_as, self._lock.failure = as_error, reason
            error = self._lock.error()
            self._pushes.abandon(error)
            self._reads.abandon(error)
            self.rows.abandon(error)
            self.rpc.abandon(error)
            self._changed.notify_all()

    def _cache(self, table: str) -> TableCache:
        self._lock.check()
        cache = self._caches.get(table)
        if cache is None:
            names = ", ".join(sorted(self._caches)) or "none"
            raise UsageError(
                f"worker {self.settings.sender.worker} has not opened table '{table}'; it has opened: {names}"
            )
        return cache

    # -- pushes ------------------------------------------------------------------------------------------------------

    def _objection(self, table: str, gradient: Tensor) -> str:
        """Return why a gradient is not sent, "" if it is; raises UsageError under nonfinite="halt"."""
        spec = self._cache(table).spec
        problem = objection(spec, gradient)
        if problem and spec.nonfinite == "halt":
            raise UsageError(f"worker {self.settings.sender.worker}, clock {self.clock}: {problem}")
        return problem

    def _push(
        self,
        table: str,
        buffer: PushBuffer,
        count: float,
        absent: tuple[int, ...],
        hyper: tuple[Hyper, ...],
        expected: float = 0.0,
    ) -> Future[PushOutcome]:
        cache = self._cache(table)
        parts = self.parts(table, buffer)
        bodies = {server: parts[server] for server in cache.servers}
        with self._changed:
            self._lock.check()
            checksums = tuple(map(zlib.crc32, parts)) if self.options.checks_memory else ()
            frame = PushFrame(NO_PUSH, count, absent, hyper, screened=True, checksums=checksums, expected=expected)
            future = self._pushes.prepare(buffer, bodies, frame)
            cache.note_own(self._core.next_seq, buffer.gradient, absent, hyper)
            self._handle(WantPush(table))
        return future

    # -- timers and effects of the core ------------------------------------------------------------------------------

    def _run_due(self) -> bool:
        """Send repeats and report waits that are due; also after a failure, as collective calls go on."""
        self._repeat_due()
        lines = self.waits.report_due()
        if lines:
            self.options.tell(lines)
        return True

    def _repeat_due(self) -> None:
        with self._changed:
            if self._lock.failure:
                return
            deadline = self._core.next_deadline()
            if deadline is not None and deadline <= time.monotonic():
                self._handle(Timeout())
            self.rpc.repeat_due()

    def _handle(self, event: WorkerEvent, body: memoryview = EMPTY) -> None:
        for effect in self._core.handle(event, time.monotonic()):
            if not self.rows.perform(effect, body):
                self._perform(effect, body)
            self._changed.notify_all()

    def _perform(self, effect: WorkerEffect, body: memoryview) -> None:
        match effect:
            case Send():
                self._send(effect)
            case Install():
                self._caches[effect.table].install(effect.server, body, effect.settled, effect.includes)
            case Release():
                self._release(effect)
            case ReadDone():
                self._reads.finish(effect)
            case JoinDone():
                self._joined = True
            case LeaveDone():
                self._left = True
            case Fail():
                self._fail(effect.reason)
            case InstallRows() | Forget():
                raise ProtocolBug(f"no row table of worker {self.settings.sender.worker} expects {effect}")

    def _send(self, effect: Send) -> None:
        message = effect.message
        if not isinstance(message, Push):
            said = self._reads.frame(effect.server, message) if isinstance(message, Pull) else message
            # A tick that overtakes a read could let the read be answered with values of the next clock.
            urgent = isinstance(message, Clock) and not self.rows.awaits_fixed_rows()
            self._connections[effect.server].send(encode(said), urgent=urgent)
            return
        outgoing = self._pushes.outgoing(message)
        if outgoing is not None:
            body = EMPTY if effect.bare else outgoing.bodies[effect.server]
            self._connections[effect.server].send(encode(outgoing.frame), body)

    def _release(self, effect: Release) -> None:
        """Note the answer to one part of a push; end the push when all parts are answered."""
        outgoing = self._pushes.release(effect)
        if outgoing is None:
            return
        if outgoing.answers.refused:
            self._caches[outgoing.frame.push.table].forget_own(effect.id.seq)
        outgoing.future.set_result(outgoing.answers.outcome())

    def _send_request(self, server: int, request: object, body: memoryview) -> None:
        self._connections[server].send(
            encode(request), body, urgent=isinstance(request, RowsUsed)
        )  # like the tick that follows it

"""A worker: the user's calls and the servers' answers meet here, under one lock, around a worker core."""

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
    objection,
    refuse_endless_clock,
    settled,
)
from paceline.worker.reads import ReadOutcome, Reads
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.opened import CacheOptions, OpenedRows
from paceline.worker.rpc import Rpc
from paceline.worker.waits import TURN_S, About, Waits


def _refuse(reason: str) -> None:
    raise PeerError(reason)


@dataclass(frozen=True, slots=True)
class FrameHandler:
    """Takes in the frames of one server, under the lock of the worker whose parts these are.

    `fail` is told why the worker cannot go on, where a frame makes no sense; without it that is raised.
    """

    server: int
    waiting: WorkerLock
    core: WorkerCore
    calls: Rpc
    reads: Reads
    rows: RowClient
    caches: dict[str, TableCache]
    handle: Callable[[WorkerEvent, memoryview], None]
    fail: Callable[[str], None] = _refuse

    def on_frame(self, frame: Frame) -> None:
        """Take in a frame; whoever waits is told."""
        message = decode(frame.header)
        with self.waiting.changed:
            try:
                self._take_in(message, frame)
            except MISHAPS as error:
                self.fail(
                    f"server {self.server} sent a {type(message).__name__} that makes no sense here ({story(error)}): "
                    f"{str(message)[:500]}"
                )
            self.waiting.changed.notify_all()

    def _take_in(self, message: object, frame: Frame) -> None:
        if isinstance(message, RequestDone):
            self.calls.answered(message.number, frame.body)
        elif isinstance(message, RequestFailed):
            self.calls.failed(message.number, Refused(f"server {self.server} refused: {message.reason}"))
        elif isinstance(message, KeysWanted):
            self.rows.on_keys_wanted(self.server, message)
        elif not self.waiting.failure:
            self.handle(Arrived(self.server, message), frame.body)
        if isinstance(message, Ticked):
            self.rows.on_ticked(self.server, message.clock)
        elif isinstance(message, Fetched):
            self.reads.note_taken(self.server, message)

    def place(self, header: bytes, size_bytes: int) -> memoryview | None:
        """Return where the body of a frame goes: the values that a read waits for into the copy of their table.

        Without the lock: who holds it may be waiting for this thread to leave the connection. What is asked here
        about this server changes only on this thread, but for a read that begins, which then waits as well.
        """
        message = decode(header)
        if isinstance(message, Fetched) and self.core.awaits(self.server, message):
            return self.caches[message.table].receive_buffers(self.server, size_bytes)
        return None

    def on_reconnected(self, use: Callable[[], None]) -> None:
        """Say again, over the connection that `use` takes into use, what may have been lost with the one before.

        Under one lock, under which everything is sent: a new push may not go before an older one (E7).
        """
        with self.waiting.changed:
            use()
            self.rows.on_reconnected(self.server)
            self.handle(Connected(self.server), EMPTY)
            self.calls.repeat(self.server)


_SLOTS = 2  # pushes of one table under way
_CONNECT_TIMEOUT_S = 30.0


@dataclass(slots=True)
class WorkerNode:
    """One worker of a job.

    Every call that waits raises `DeadlineExceeded` after `wait_timeout_s`, or three times the longest clock where that
    is longer, naming what it waited for, and `PeerError` as soon as it is known that this will not come.
    """

    settings: WorkerSettings
    transport: Transport
    addresses: Sequence[str]
    options: WorkerOptions = field(default_factory=WorkerOptions)
    _core: WorkerCore = field(init=False)
    calls: Rpc = field(init=False)
    _links: list[ReconnectingConnection] = field(default_factory=list[ReconnectingConnection])
    waits: Waits = field(init=False)
    _waiting: WorkerLock = field(init=False)
    # Guards everything below, and the core. Reader threads and the user's thread take it in turn.
    _changed: threading.Condition = field(init=False)
    _caches: dict[str, TableCache] = field(default_factory=dict[str, TableCache])
    _pushes: Pushes = field(default_factory=Pushes)
    _reads: Reads = field(default_factory=Reads)
    rows: RowClient = field(init=False)
    _joined: bool = False
    _left: bool = False
    _timekeeper: PeriodicThread = field(init=False)

    def __post_init__(self) -> None:
        """Make the core; nothing is connected yet."""
        self._core = WorkerCore(self.settings)
        rank = self.settings.sender.worker
        self.waits = Waits(rank, self.options.wait_timeout_s, lambda make: self.calls.begin(0, make))
        self._waiting = WorkerLock(rank, self.waits, lambda: self._core.clock)
        self._changed = self._waiting.changed
        self.calls = Rpc(self._send_request, self._waiting, len(self.addresses), self.settings.retry_s)
        ops = row_ops()
        owners = RowSharding(ops, len(self.addresses), self.settings.shares)
        self.rows = RowClient(self._core, self._waiting, ops, owners, self._send_request, self._handle, self._fail)
        # A quarter of the first pause is fine enough for pauses that double.
        self._timekeeper = PeriodicThread(min(self.settings.retry_s / 4, TURN_S), self._take_turn)

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
        return self._waiting.is_failing

    def join(self) -> int:
        """Connect to all servers and take part; return the clock at which. Blocks until every server agrees."""
        sender = self.settings.sender
        hello = Hello("worker", sender.worker, sender.incarnation, sender.generation)
        for server, address in enumerate(self.addresses):
            arrivals = FrameHandler(
                server,
                self._waiting,
                self._core,
                self.calls,
                self._reads,
                self.rows,
                self._caches,
                self._handle,
                self._fail,
            )
            link = ReconnectingConnection(
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
            link.open(_CONNECT_TIMEOUT_S)
            self._links.append(link)
        self._timekeeper.start()
        with self._changed:
            self._handle(WantJoin())
            self._waiting.wait(lambda: self._joined, "all servers to let this worker take part")
            return self._core.clock

    def open_table(self, spec: TableSpec, *, reads_own_writes: bool = True, live: bool = False) -> TableCache:
        """Declare a table to all servers and work with it from now on.

        With `live`, and over a carrier that maps memory, reads see the servers' own memory instead of a copy.

        Raises:
            Refused: it exists with other settings; the message lists the first differences.
        """
        layout = spans(spec, self.settings)
        live = live and self.transport.maps_memory
        self.calls.ask_all(lambda number: Declare(number, spec, live), f"servers to agree on table '{spec.name}'")
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
        """Declare a row table to all servers and work with it from now on; raises as `open_table` does."""
        self.calls.ask_all(lambda number: DeclareRows(number, spec), f"servers to agree on table '{spec.name}'")
        return self.rows.open(spec, options)

    def reserve(self, table: str) -> PushBuffer:
        """Return memory for the next push of a table, to be given to `push_reserved`.

        Blocks while two earlier pushes of this table are under way. Memory that was used before comes back first, so
        who always waits for a push to be applied is given the same piece every time.

        Raises:
            UsageError: servers keep no more pushes of this table before this worker has finished its clock.
        """
        return self._reserve(table, shown=True)

    def _reserve(self, table: str, *, shown: bool) -> PushBuffer:
        self._cache(table)
        with self._changed:
            clock = self._core.clock
            self._waiting.wait(
                lambda: self._may_push(table) and self._pushes.has_slot(table, clock),
                f"servers to apply earlier pushes of table '{table}'",
                About(f"push {table}", table, self._core.oldest_push(table) + 1),
            )
            return self._pushes.take(table, shown=shown)

    def _may_push(self, table: str) -> bool:
        if self._core.may_push(table):
            return True
        refuse_endless_clock(self._core, table)
        return False

    def give_back(self, table: str, buffer: PushBuffer) -> None:
        """Give back reserved memory without a push."""
        with self._changed:
            self._pushes.give(table, buffer)

    def parts(self, table: str, buffer: PushBuffer) -> list[memoryview]:
        """Return what of reserved memory belongs to each server, by rank."""
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

        Blocks only while two earlier pushes of this table are still under way. `gradient` is (elements of the table,)
        and may be overwritten as soon as this returns. The future ends with `PeerError` when this worker fails first:
        then it is not known whether the push was applied.
        """
        problem = self._objection(table, gradient)
        if problem:
            return settled(PushOutcome(applied=False, reason=problem))
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
        """Send an update as `push` does, from memory that `reserve` gave: it is the servers' to read from now on."""
        problem = self._objection(table, buffer.gradient)
        if problem:
            self.give_back(table, buffer)
            return settled(PushOutcome(applied=False, reason=problem))
        return self._push(table, buffer, count, absent, hyper, expected)

    def tick(self) -> None:
        """Finish the current clock.

        Blocks while rows that have to go before wait for a budget, and while servers have to answer many ticks that
        said which rows were read from a cache.
        """
        with self._changed:
            self.rows.budgeted.send_due(self._core.clock)
            self.rows.end_clock(self._core.clock)
            self._waiting.check()
            self._handle(WantClock())
            self.waits.note_clock()

    def begin_read(self, table: str, *, refresh: bool = True, exact: bool = False) -> Future[ReadDone]:
        """Ask for values; the future ends when the copy of the table is fresh enough. Does not block."""
        self._cache(table)
        with self._changed:
            self._waiting.check()
            future = self._reads.begin(self._core.next_request, table)
            self._handle(WantRead(table, refresh, exact))
        return future

    def read(
        self, table: str, take: Callable[[TableCache], None], *, refresh: bool = True, exact: bool = False
    ) -> ReadOutcome:
        """Have `take` called with the copy of a table, under the lock; blocks until it is fresh enough."""
        clock = self._core.clock
        return self.finish_read(table, clock, self.begin_read(table, refresh=refresh, exact=exact), take)

    def finish_read(
        self, table: str, clock: int, future: Future[ReadDone], take: Callable[[TableCache], None]
    ) -> ReadOutcome:
        """Do what `read` does for a read that was begun at `clock`."""
        began = time.monotonic()
        with self._changed:
            cache = self._cache(table)
            self._waiting.wait(
                future.done,
                f"values of table '{table}' at clock {clock} ({cache.spec.consistency})",
                About(f"pull {table}", table, self._core.needs(table)),
            )
            waited_s = time.monotonic() - began
            done = future.result(timeout=0)
            take(cache)
        return ReadOutcome(clock, done.clock, done.source, waited_s)

    def look(self, table: str, call: Callable[[TableCache], None]) -> None:
        """Have `call` called with the copy of a table as it is, under the lock. Does not wait."""
        with self._changed:
            call(self._cache(table))

    def settle(self) -> None:
        """Block until every push made so far is applied or refused by every server.

        Raises:
            UsageError: a push waits for this worker's own `tick`.
        """
        with self._changed:
            self.rows.budgeted.send_all(self._core.clock)
            held = self.unfinished()
            if held:
                raise UsageError(
                    f"worker {self.settings.sender.worker} has pushed to table '{next(iter(held))}' during clock "
                    f"{self._core.clock}, which is applied when the clock is finished: call clock() first"
                )
            self._waiting.wait(
                lambda: not self._pushes and not self.rows.num_under_way(),
                "servers to settle this worker's pushes",
                About("settle", needs=self._core.oldest_push() + 1),
            )

    def unfinished(self) -> dict[str, int]:
        """Return how many pushes of each table wait for this worker to finish its clock."""
        with self._changed:
            clock = self._core.clock
            return {**self._pushes.held_at(clock), **self.rows.held_at(clock)}

    def leave(self) -> None:
        """Stop taking part, after everything pushed is settled. Blocks until every server agrees."""
        with self._changed:
            self.rows.budgeted.send_all(self._core.clock)
            self._handle(WantLeave())
            self._waiting.wait(
                lambda: self._left,
                "all servers to settle this worker's pushes and let it leave",
                About("leave", needs=self._core.oldest_push() + 1),
            )

    def close(self) -> None:
        """End all connections and threads and let go of all memory; what is not settled stays as it is."""
        self._timekeeper.stop()
        self._fail("this worker has closed its connections")
        for link in self._links:
            link.close()
        self._timekeeper.join()
        self._caches.clear()
        self.rows.close()
        self._pushes = Pushes()

    def abandon(self, reason: str) -> None:
        """Refuse every further call, in a process that was forked from the worker: all else belongs to that one."""
        self._waiting.changed = self._changed = threading.Condition()  # another thread may have held it at the fork
        self._waiting.failure = reason

    def _fail(self, reason: str, as_error: type[PeerError] = PeerError) -> None:
        """Give up, for the first reason: every call that waits for anything raises it."""
        with self._changed:
            if self._waiting.failure:
                return
            self._waiting.failed_as, self._waiting.failure = as_error, reason
            error = self._waiting.error()
            self._pushes.abandon(error)
            self._reads.abandon(error)
            self.rows.abandon(error)
            self.calls.abandon(error)
            self._changed.notify_all()

    def _cache(self, table: str) -> TableCache:
        self._waiting.check()
        cache = self._caches.get(table)
        if cache is None:
            names = ", ".join(sorted(self._caches)) or "none"
            raise UsageError(
                f"worker {self.settings.sender.worker} has not opened table '{table}'; it has opened: {names}"
            )
        return cache

    # -- pushes ------------------------------------------------------------------------------------------------------

    def _objection(self, table: str, gradient: Tensor) -> str:
        """Say why a gradient is not sent, or nothing; raises UsageError where the table is to halt then."""
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
            self._waiting.check()
            checksums = tuple(map(zlib.crc32, parts)) if self.options.checks_memory else ()
            frame = PushFrame(NO_PUSH, count, absent, hyper, screened=True, checksums=checksums, expected=expected)
            future = self._pushes.prepare(buffer, bodies, frame)
            cache.note_own(self._core.next_seq, buffer.gradient, absent, hyper)
            self._handle(WantPush(table))
        return future

    # -- what happens ------------------------------------------------------------------------------------------------

    def _take_turn(self) -> bool:
        """Repeat and tell what is due. Goes on after a failure: collective calls may still have to be given up."""
        self._repeat_due()
        lines = self.waits.turn()
        if lines:
            self.options.tell(lines)
        return True

    def _repeat_due(self) -> None:
        with self._changed:
            if self._waiting.failure:
                return
            deadline = self._core.next_deadline()
            if deadline is not None and deadline <= time.monotonic():
                self._handle(Timeout())
            self.calls.repeat_due()

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
                raise ProtocolBug(f"no row table of worker {self.settings.sender.worker} has a use for {effect}")

    def _send(self, effect: Send) -> None:
        message = effect.message
        if not isinstance(message, Push):
            said = self._reads.frame(effect.server, message) if isinstance(message, Pull) else message
            # A tick that overtakes a read could have it answered with values of the next clock.
            urgent = isinstance(message, Clock) and not self.rows.awaits_fixed_rows()
            self._links[effect.server].send(encode(said), urgent=urgent)
            return
        outgoing = self._pushes.outgoing(message)
        if outgoing is not None:
            body = EMPTY if effect.bare else outgoing.bodies[effect.server]
            self._links[effect.server].send(encode(outgoing.frame), body)

    def _release(self, effect: Release) -> None:
        """Reuse the memory of a part that is answered; end the push when all parts are."""
        outgoing = self._pushes.release(effect)
        if outgoing is None:
            return
        if outgoing.answers.refused:
            self._caches[outgoing.frame.push.table].forget_own(effect.id.seq)
        outgoing.future.set_result(outgoing.answers.outcome())

    def _send_request(self, server: int, request: object, body: memoryview) -> None:
        self._links[server].send(encode(request), body, urgent=isinstance(request, RowsUsed))  # as the tick after it

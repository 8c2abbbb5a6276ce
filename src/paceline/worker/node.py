"""A worker: a core under one lock, driven by the user's calls and by the frames of servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from paceline.core.consistency import Consistency
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
from paceline.core.events import Arrived, Connected, Timeout, WantClock, WantJoin, WantLeave
from paceline.core.messages import Clock, Delivered, Fetched, Pull, Push, Ticked, WholeStep
from paceline.core.settings import WorkerSettings
from paceline.core.worker import WorkerCore, WorkerEvent
from paceline.errors import PeerError, Refused, ServerLost, UsageError
from paceline.transport.base import EMPTY, Frame, LeavesMachine, Transport
from paceline.update.placement import RowSharding
from paceline.update.rows.ops import row_ops
from paceline.wire.connection import ReconnectingConnection
from paceline.wire.malformed import REQUEST_ERRORS, describe_error
from paceline.wire.messages import (
    EarlyValues,
    FetchedRest,
    Hello,
    KeysWanted,
    PushPart,
    StepFrame,
    decode,
    encode,
    joined,
    step_of,
)
from paceline.wire.requests import MAX_JOINED_BYTES, RequestDone, RequestFailed
from paceline.wire.send_queue import OrderedPiece, SendHold
from paceline.worker.periodic import PeriodicThread
from paceline.worker.rows.throttle import Throttle
from paceline.worker.rpc import Rpc
from paceline.worker.table_client import ClientContext, ClockedTable, TableClient
from paceline.worker.waits import PERIOD_S, About, Waits, WorkerLock, WorkerOptions

HAS_LEFT: Final = (
    "this worker has left the job, as its session is closed: use its tables and optimizers before close(), inside the "
    "`with` block"
)


def _refuse(reason: str) -> None:
    raise PeerError(reason)


@dataclass(slots=True)
class FrameHandler:
    """Handles the frames of one server, under the worker's lock.

    `fail` is called with the reason if a frame is invalid; by default that raises PeerError. `hold` gathers answers.
    `clocked` are those of the tables that keep accounts of clocks.
    """

    server: int
    lock: WorkerLock
    rpc: Rpc
    tables: Mapping[str, TableClient]
    handle: Callable[[Arrived | Connected, memoryview], None]
    clocked: Sequence[ClockedTable]
    fail: Callable[[str], None] = _refuse
    hold: SendHold = field(default_factory=SendHold)
    _placed: tuple[bytes, object] = (b"", None)  # the last header that `place` has decoded, and its message
    # Tables with values among the frames that have come and are not handled. What comes after these in the same call
    # may not lie in the cache yet: handling them copies older values there.
    _coming: set[str] = field(default_factory=set[str])

    def on_frames(self, frames: Sequence[Frame]) -> None:
        """Handle frames that have arrived together, and wake the waiting threads once."""
        with self.lock.changed, self.hold:
            self._coming.clear()
            placed, known = self._placed
            for frame in frames:
                message = known if frame.header is placed else decode(frame.header)
                try:
                    self._process(message, frame)
                except REQUEST_ERRORS as error:
                    self.fail(
                        f"server {self.server} sent a {type(message).__name__} that makes no sense here "
                        f"({describe_error(error)}): {str(message)[:500]}"
                    )
            self.lock.changed.notify_all()

    def _process(self, message: object, frame: Frame) -> None:
        body = frame.body
        if isinstance(message, Fetched):
            self._on_values(message, body)
            return
        if isinstance(message, EarlyValues):
            return  # they lie where `place` has said
        if isinstance(message, FetchedRest):
            whole = self.tables[message.fetched.table].early_body(self.server, message)
            if whole is None:
                return
            self._on_values(message.fetched, whole)
        elif isinstance(message, RequestDone):
            self.rpc.finish_call(message.number, frame.body)
        elif isinstance(message, RequestFailed):
            self.rpc.fail_call(message.number, Refused(f"server {self.server} refused: {message.reason}"))
        elif isinstance(message, KeysWanted):
            self.tables[message.table].on_keys_wanted(self.server, message)
        elif not self.lock.failure:
            self.handle(Arrived(self.server, message), body)
        if isinstance(message, Ticked):
            for table in self.clocked:
                table.note_ticked(self.server, message.clock)

    def _on_values(self, message: Fetched, body: memoryview) -> None:
        if not self.lock.failure:
            self.handle(Arrived(self.server, message), body)
        table = self.tables.get(message.table)
        if table is not None:
            table.note_received(self.server, message)
        for clocked in self.clocked:
            clocked.note_ticked(self.server, message.ticked)

    def place(self, header: bytes, size_bytes: int) -> memoryview | None:
        """Return memory for the body of a frame, without the lock: see `TableClient.receive_buffer`."""
        message = decode(header)
        self._placed = header, message
        if not isinstance(message, Fetched | FetchedRest | Delivered | EarlyValues):
            return None
        name = message.fetched.table if isinstance(message, FetchedRest) else message.table
        table, is_first = self.tables.get(name), name not in self._coming
        if table is None:
            return None
        if not isinstance(message, EarlyValues):
            self._coming.add(name)
        if isinstance(message, EarlyValues | FetchedRest):
            return table.place_early(self.server, message, size_bytes)
        if is_first and isinstance(message, Fetched):
            return table.receive_buffer(self.server, message, size_bytes)
        return None

    def on_reconnected(self, use: Callable[[], None]) -> None:
        """Switch to a new connection by calling `use`, and send again what may have been lost with the old one.

        All under the lock under which everything is sent: a new push may not overtake an older one (E7).
        """
        with self.lock.changed:
            use()
            for table in self.tables.values():
                table.on_reconnected(self.server)
            self.handle(Connected(self.server), EMPTY)
            self.rpc.repeat(self.server)
            self.lock.changed.notify_all()


_CONNECT_TIMEOUT_S = 30.0


def _fits(step: StepFrame) -> bool:
    """Return whether a step may travel as one frame: the bodies of several pushes are copied into one."""
    return len(step.sizes) < 2 or max(step.body_bytes, len(encode(step))) <= MAX_JOINED_BYTES


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
    _hold: SendHold = field(default_factory=SendHold)
    _tables: dict[str, TableClient] = field(default_factory=dict[str, TableClient])
    _clocked: list[ClockedTable] = field(default_factory=list[ClockedTable])  # those that keep accounts of clocks
    context: ClientContext = field(init=False)  # with which tables are opened
    _throttle: Throttle = field(init=False)
    _joined: bool = False
    _joining: threading.Lock = field(default_factory=threading.Lock)
    _left: bool = False
    _periodic: PeriodicThread = field(init=False)

    def __post_init__(self) -> None:
        """Create the core; nothing is connected yet."""
        self._core = WorkerCore(self.settings)
        rank = self.settings.sender.worker
        self.waits = Waits(rank, self.options.wait_timeout_s, lambda make: self.rpc.start_call(0, make))
        self._lock = WorkerLock(rank, self.waits, lambda: self._core.clock, self._hold)
        self._changed = self._lock.changed
        self.rpc = Rpc(self._send_frame, self._lock, len(self.addresses), self.settings.retry_s, self._join_first)
        self._throttle = Throttle(self._lock, self._fail)
        self.context = ClientContext(
            self._core,
            self._lock,
            self._send_frame,
            self._handle,
            self._add_table,
            self.rpc,
            self.transport,
            self.options,
            RowSharding(row_ops(), len(self.addresses), self.settings.shares),
            self._throttle,
            self._distant,
        )
        # Retry intervals double, so a quarter of the first one is fine enough.
        self._periodic = PeriodicThread(min(self.settings.retry_s / 4, PERIOD_S), self._run_due)

    def __repr__(self) -> str:
        return f"WorkerNode(worker {self.settings.sender.worker}, {len(self.addresses)} server(s), clock {self.clock})"

    # -- the user's calls --------------------------------------------------------------------------------------------

    @property
    def has_tables(self) -> bool:
        """Whether this worker has opened a table."""
        return bool(self._tables)

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
            handler = FrameHandler(
                server, self._lock, self.rpc, self._tables, self._handle_heard, self._clocked, self._fail, self._hold
            )
            connection = ReconnectingConnection(
                server,
                address,
                hello,
                self.transport,
                self.options.reconnect_timeout_s,
                on_frames=handler.on_frames,
                place=handler.place,
                on_reconnected=handler.on_reconnected,
                on_lost=partial(self._fail, as_error=ServerLost),
                how_ended=partial(self.options.how_ended, server),
                where=partial(self.options.where, server),
                hold=self._hold,
                turns=self._lock.turns,
            )
            connection.open(_CONNECT_TIMEOUT_S)
            self._connections.append(connection)
        self._periodic.start()
        with self._changed:
            self._handle(WantJoin())
            self._lock.wait(lambda: self._joined, "all servers to let this worker take part")
            return self._core.clock

    def _join_first(self) -> None:
        """Join, where that was left until the servers are needed; blocks as `join` does."""
        if self._joined or not self.options.joins_late:
            return
        with self._joining:
            if not self._connections:
                self.join()

    def _distant(self) -> frozenset[int]:
        """Return the servers on other machines."""
        transport = self.transport
        if not isinstance(transport, LeavesMachine):
            return frozenset()
        return frozenset(s for s, address in enumerate(self.addresses) if transport.leaves_machine(address))

    def _add_table(self, name: str, client: TableClient, consistency: Consistency) -> None:
        # Elsewhere, what comes while no thread waits may be what other workers wait for.
        self._lock.turns.is_enabled = consistency.lockstep and (self._lock.turns.is_enabled or not self._tables)
        self._tables[name] = client
        if isinstance(client, ClockedTable):
            self._clocked.append(client)

    def client(self, table: str) -> TableClient:
        """Return an open table.

        Raises:
            UsageError: this worker has not opened it.
            PeerError: this worker has failed.
        """
        self._lock.check()
        client = self._tables.get(table)
        if client is None:
            names = ", ".join(sorted(self._tables)) or "none"
            raise UsageError(
                f"worker {self.settings.sender.worker} has not opened table '{table}'; it has opened: {names}"
            )
        return client

    def tick(self) -> int:
        """Finish the current clock; return the number of finished clocks.

        Blocks while rows that must be sent before wait for their budget, and while many reports of rows read from
        caches are unanswered.
        """
        if self.options.joins_late:
            self._join_first()
        core, lock = self._core, self._lock
        with lock.changed:
            for table in list(self._clocked):
                table.prepare_tick(core.clock)
            for table in self._clocked:
                table.end_clock(core.clock)
            if lock.failure:
                lock.check()
            self._handle(WantClock())
            self.waits.note_clock()
            return core.clock

    @contextmanager
    def together(self) -> Generator[None]:
        """Send the small frames of the calls inside this block together, at its end; for calls that follow at once."""
        with self._changed, self._hold:
            yield

    def settle(self) -> None:
        """Block until every push made so far is applied or refused by every server.

        Raises:
            UsageError: a push is applied only when this worker finishes its clock.
        """
        with self._changed:
            self._flush_pushes()
            held = self.unfinished()
            if held:
                raise UsageError(
                    f"worker {self.settings.sender.worker} has pushed to table '{next(iter(held))}' during clock "
                    f"{self._core.clock}, which is applied when the clock is finished: call clock() first"
                )
            self._lock.wait(
                lambda: not any(table.num_under_way() for table in self._tables.values()),
                "servers to settle this worker's pushes",
                About("settle", needs=self._core.oldest_push() + 1),
            )

    def unfinished(self) -> dict[str, int]:
        """Return by table how many pushes wait for this worker to finish its clock."""
        with self._changed:
            nums = {name: table.num_held(self._core.clock) for name, table in self._tables.items()}
            return {name: num for name, num in nums.items() if num}

    def kept_back(self) -> dict[str, int]:
        """Return by table how many rows filters keep back, which no server has."""
        with self._changed:
            tables = self._tables.items()
            nums = {name: table.num_kept_back() for name, table in tables if isinstance(table, ClockedTable)}
            return {name: num for name, num in nums.items() if num}

    def leave(self) -> None:
        """Leave the job once all pushes are settled. Blocks until every server agrees."""
        if not self._connections:  # it has not joined
            return
        with self._changed:
            self._flush_pushes()
            self._handle(WantLeave())
            self._lock.wait(
                lambda: self._left,
                "all servers to settle this worker's pushes and let it leave",
                About("leave", needs=self._core.oldest_push() + 1),
            )

    def close(self) -> None:
        """Close all connections and threads and release all memory, without waiting for pushes in flight."""
        self._periodic.stop()
        self._fail(HAS_LEFT)
        for connection in self._connections:
            connection.close()
        self._lock.turns.close()
        self._periodic.join()
        self._throttle.close()
        with self._changed:  # a thread that has the lock may be reading one
            for table in list(self._tables.values()):
                table.close()

    def abandon(self, reason: str) -> None:
        """Refuse all further calls, in a forked child: connections and memory belong to the parent."""
        self._lock.abandon(reason)
        self._changed = self._lock.changed

    def _fail(self, reason: str, as_error: type[PeerError] = PeerError) -> None:
        """Fail this worker, for the first reason given: every blocked or later call raises it."""
        with self._changed:
            if self._lock.failure:
                return
            self._lock.failed_as, self._lock.failure = as_error, reason
            error = self._lock.error()
            self._throttle.stop()
            for table in self._tables.values():
                table.abandon(error)
            self.rpc.abandon(error)
            self._changed.notify_all()

    def _flush_pushes(self) -> None:
        for table in list(self._tables.values()):
            table.flush_pushes(self._core.clock)

    # -- timers and effects of the core ------------------------------------------------------------------------------

    def _run_due(self) -> bool:
        """Send repeats and report waits that are due; also after a failure, as collective calls go on."""
        try:
            self._repeat_due()
            for connection in self._connections:
                connection.follow()
            lines = self.waits.report_due()
            if lines:
                self.options.tell(lines)
        except BaseException:  # without repeats, a wait for what was lost on its way would not end
            self._fail("the thread that repeats what is not answered failed; the traceback is on stderr")
            raise
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
        """Have the core process an event, perform its effects, and wake the threads that may wait for them."""
        is_told = False
        for effect in self._core.handle(event, time.monotonic()):
            self._perform(effect, body)
            is_told = is_told or not isinstance(effect, Send)
        if is_told:
            self._changed.notify_all()

    def _handle_heard(self, event: Arrived | Connected, body: memoryview) -> None:
        """Do what `_handle` does, for a caller that wakes threads itself."""
        for effect in self._core.handle(event, time.monotonic()):
            self._perform(effect, body)

    def _perform(self, effect: WorkerEffect, body: memoryview) -> None:
        match effect:
            case Send(server, Push() as push, bare):
                self._tables[push.table].send_push(server, push, bare=bare)
            case Send(server, WholeStep() as step):
                self._send_step(server, step)
            case Send(server, Pull() as pull):
                self._tables[pull.table].send_pull(server, pull)
            case Send(server, Clock() as tick):
                self._send_tick(server, tick)
            case Send():
                self._send_frame(effect.server, effect.message)
            case Install():
                self._tables[effect.table].install(effect, body)
            case Forget():
                self._tables[effect.table].forget(effect)
            case Release():
                self._tables[effect.table].release(effect)
            case Drop():
                self._tables[effect.table].drop(effect)
            case ReadDone():
                self._tables[effect.table].finish_read(effect)
            case JoinDone():
                self._joined = True
            case LeaveDone():
                self._left = True
            case Fail():
                self._fail(effect.reason)

    def _send_step(self, server: int, step: WholeStep) -> None:
        """Send a step as one frame; or a large one in several, and its tick once the server has confirmed them."""
        found = [self._tables[push.table].push_part(server, push) for push in step.pushes]
        parts = [part for part in found if part is not None]
        pulls = tuple(self._tables[pull.table].pull_part(server, pull) for pull in step.pulls)
        ends = -1 if step.tick is None else step.tick.clock
        whole, bodies = step_of(parts, ends, pulls)
        if not _fits(whole):
            self._send_pushes(server, parts)
            for pull in step.pulls:
                self._perform(Send(server, pull), EMPTY)
            return
        for table in self._clocked if step.tick is not None else ():
            table.send_before_tick(server, ends)
        if parts or pulls:
            self._send_frame(server, whole, joined(bodies))

    def _send_pushes(self, server: int, parts: Sequence[PushPart]) -> None:
        """Send pushes in as few frames as they fit into, by halves."""
        whole, bodies = step_of(parts)
        if len(parts) == 1:
            self._send_frame(server, *parts[0])
        elif _fits(whole):
            self._send_frame(server, whole, joined(bodies))
        else:
            middle = len(parts) // 2
            self._send_pushes(server, parts[:middle])
            self._send_pushes(server, parts[middle:])

    def _send_tick(self, server: int, tick: Clock) -> None:
        is_urgent = True
        for table in self._clocked:
            table.send_before_tick(server, tick.clock)
            is_urgent = is_urgent and not table.holds_ticks()
        self._send_frame(server, tick, urgent=is_urgent)

    def _send_frame(
        self,
        server: int,
        message: object,
        body: memoryview = EMPTY,
        *,
        urgent: bool = False,
        last_of: object | None = None,
        piece: OrderedPiece | None = None,
    ) -> None:
        whole = b"" if last_of is None else encode(last_of)
        self._connections[server].send(encode(message), body, urgent=urgent, last_of=whole, piece=piece)

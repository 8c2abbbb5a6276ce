"""Throttled pushes of rows: they wait on the worker until a budget of bytes a second lets them go."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Final

import torch
from torch import Tensor

from paceline.core.consistency import Deferral
from paceline.errors import PacelineError
from paceline.update.filters.traffic import RowTraffic, WireBytes
from paceline.update.rows.pending import PendingRows, TakenRows, relative_magnitude
from paceline.worker.pushes import PushOutcome, finished_push, pending_future
from paceline.worker.rows.cache import RowCache
from paceline.worker.rows.managed import Managed
from paceline.worker.waits import WorkerLock


@dataclass(slots=True)
class _OpenPush:
    push: int
    future: Future[PushOutcome] = field(default_factory=lambda: pending_future(PushOutcome))
    last_chunk: int = -1  # the chunk with its last rows, once that is sent
    refused: str = ""

    def was_sent_before(self, chunk: int) -> bool:
        return 0 <= self.last_chunk < chunk


@dataclass(slots=True)
class PushFutures:
    """Futures of pushes whose rows are sent in chunks, together with rows of other pushes.

    Pushes and chunks are numbered from 0. A push is answered when all its rows are sent and every chunk up to then is
    answered; it is refused if one of these chunks, which may have contained some of its rows, was refused.
    """

    # Both in the order of pushes: those with unsent rows, and those that are sent and not answered.
    _waiting: deque[_OpenPush] = field(default_factory=deque[_OpenPush])
    _sent: deque[_OpenPush] = field(default_factory=deque[_OpenPush])
    _under_way: set[int] = field(default_factory=set[int])
    _num_chunks: int = 0

    def make(self, push: int) -> Future[PushOutcome]:
        """Add the newest push; return its future."""
        made = _OpenPush(push)
        self._waiting.append(made)
        return made.future

    def sent(self, answer: Future[PushOutcome], oldest_waiting: int, num_pushes: int) -> None:
        """Note that a chunk of rows of the pushes below `num_pushes` was sent; those below the oldest are complete."""
        chunk, self._num_chunks = self._num_chunks, self._num_chunks + 1
        self._under_way.add(chunk)
        while self._waiting and self._waiting[0].push < oldest_waiting:
            moved = self._waiting.popleft()
            moved.last_chunk = chunk
            self._sent.append(moved)
        answer.add_done_callback(lambda answered: self._answered(chunk, answered, num_pushes))

    def abandon(self, error: PacelineError) -> None:
        """End all futures with an error."""
        self._under_way.clear()
        for queue in (self._sent, self._waiting):
            while queue:
                queue.popleft().future.set_exception(error)

    def _answered(self, chunk: int, answer: Future[PushOutcome], num_pushes: int) -> None:
        if answer.exception() is not None:
            return  # the worker has failed, and `abandon` ends all futures
        self._under_way.discard(chunk)
        refused = answer.result().reason
        for made in (*self._sent, *self._waiting) if refused else ():
            if made.push < num_pushes and not made.was_sent_before(chunk):
                made.refused = refused
        oldest = min(self._under_way, default=math.inf)
        while self._sent and self._sent[0].last_chunk < oldest:
            ended = self._sent.popleft()
            ended.future.set_result(PushOutcome(applied=not ended.refused, reason=ended.refused))


_JOIN_TIMEOUT_S = 5.0


@dataclass(slots=True)
class SendingThread:
    """Calls `act` under the worker's lock when woken, and again after the pause that it returns.

    Ends with `stop`, or if `act` raises.

    Args:
        waiting: the lock.
        act: called with the time; returns the seconds until the next call, None to wait until woken.
        fail: called with the reason if `act` raises.
    """

    lock: WorkerLock
    act: Callable[[float], float | None]
    fail: Callable[[str], None]
    _awake: threading.Event = field(default_factory=threading.Event)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-sending", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Call `act` soon."""
        self._awake.set()

    def stop(self) -> None:
        """Make no more calls; does not wait for one that is running."""
        self._stopping.set()
        self._awake.set()

    def join(self) -> None:
        """Wait for the thread to end, if it was started."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        pause_s: float | None = None
        while not self._stopping.is_set():
            self._awake.wait(pause_s)
            self._awake.clear()
            with self.lock.changed:
                pause_s = self._act()

    def _act(self) -> float | None:
        """Call `act` unless stopped. An error ends the thread, and fails the worker before the lock is released."""
        if self._stopping.is_set():
            return None
        has_failed = True
        try:
            pause_s = self.act(time.monotonic())
            has_failed = False
        finally:
            if has_failed:
                self.fail("the thread that sends rows has failed; the traceback is on stderr")
        return pause_s


# Of one frame beside its body: the prefix, the longest header seen (it contains the table's name), and the TCP
# acknowledgement of the answer.
_FRAME_BYTES: Final = 64 + 150 + 66
# Of one segment: Ethernet 14, IP 20, TCP with time stamps 32; one of 1500 bytes carries 1448 of payload.
SEGMENT_BYTES: Final = 66
SEGMENT_BODY_BYTES: Final = 1448


@dataclass(slots=True)
class SendRate:
    """A rate limit: returns when the next bytes may be sent within a budget.

    Bytes are paid for after they are sent. Unused time earns at most `credit_s`, to make up for a thread that wakes
    late. So a window of W seconds carries at most what the budget allows in W + `credit_s`, and one burst.

    Args:
        bytes_per_s: the budget.
        credit_s: the most unused time that may be used later.

    Example:
        >>> rate = SendRate(bytes_per_s=1000.0, credit_s=0.0)
        >>> rate.pay(500, now=7.0)
        >>> rate.wait_s(now=7.0), rate.wait_s(now=8.0)
        (0.5, 0.0)
    """

    bytes_per_s: float
    credit_s: float
    _free_at: float = -inf

    def pay(self, size_bytes: int, now: float) -> None:
        """Note that bytes were sent just now."""
        if size_bytes:
            self._free_at = max(self._free_at, now - self.credit_s) + size_bytes / self.bytes_per_s

    def wait_s(self, now: float) -> float:
        """Return the seconds until more may be sent."""
        return max(0.0, self._free_at - now)


def sent_bytes(traffic: RowTraffic) -> int:
    """Return the bytes that a worker has sent for this traffic, headers included; an estimate, rather too high.

    Pushes with their ids, the ids of pulls, and acknowledgements of what came, one for two segments. Frames that are
    under way together share segments, which is not counted.

    Example:
        >>> sent_bytes(RowTraffic(pushed=WireBytes(frames=1, key_bytes=8000, value_bytes=64000)))
        75580
    """
    came = traffic.pulled.value_bytes + traffic.delivered.key_bytes + traffic.delivered.value_bytes
    ids = WireBytes(traffic.pulled.frames, traffic.pulled.key_bytes, traffic.pulled.digest_bytes)
    frames = _wire_bytes(traffic.pushed) + _wire_bytes(ids) + traffic.delivered.frames * _FRAME_BYTES
    return frames + SEGMENT_BYTES * ceil(came / (2 * SEGMENT_BODY_BYTES))


def _wire_bytes(sent: WireBytes) -> int:
    """Return the bytes of frames on the wire, as if each started a segment."""
    segments = sent.frames + sent.total_bytes // SEGMENT_BODY_BYTES
    return sent.total_bytes + sent.frames * _FRAME_BYTES + SEGMENT_BYTES * segments


_NOTHING: Final = -1  # a clock before all pushes


@dataclass(slots=True)
class BudgetedRows:
    """The pushes of one row table that wait on a worker. Used under the lock of the worker node.

    Args:
        table: its name.
        settings: what the user chose.
        deferral: how many clocks updates may wait.
        pending: the rows that wait.
        cache: the worker's rows, which contain own pushes if `replays`.
        change: returns what a push of rows adds to their values.
        row_bytes: bytes of a row and its id in a push.
        send: sends a push of distinct ids.
        has_room: returns whether one more push may be in flight.
        traffic: returns the traffic of the table so far.
        clock: returns the clock of this worker.
    """

    table: str
    settings: Managed
    deferral: Deferral
    pending: PendingRows
    cache: RowCache
    replays: bool
    change: Callable[[Tensor], Tensor]
    row_bytes: int
    send: Callable[[Tensor, Tensor], Future[PushOutcome]]
    has_room: Callable[[], bool]
    traffic: Callable[[], RowTraffic]
    clock: Callable[[], int]
    _rate: SendRate = field(init=False)
    _paid_bytes: int = 0
    _due: int = _NOTHING  # a thread waits until rows of this clock or before are sent
    _futures: PushFutures = field(default_factory=PushFutures)

    def __post_init__(self) -> None:
        """Start with an unused budget."""
        burst_s = self.settings.burst_bytes / self.settings.bytes_per_s
        self._rate = SendRate(self.settings.bytes_per_s, credit_s=burst_s)
        if self.replays:
            # Cached rows contain the pushes that wait; arriving ones do not.
            self.cache.unsent = self.change_of

    def push(self, ids: Tensor, rows: Tensor) -> Future[PushOutcome]:
        """Queue a push of distinct ids. The future ends when all its rows are sent and answered."""
        if not len(ids):
            return finished_push(PushOutcome(applied=True))
        change = self.change(rows)
        values, _ = self.cache.read(ids)
        self.pending.add(ids, rows, self.clock(), relative_magnitude(change, values[:, : rows.shape[1]]))
        if self.replays:
            self.cache.change(ids, change)
        return self._futures.make(self.pending.num_pushes - 1)

    def change_of(self, ids: Tensor) -> Tensor:
        """Return what unsent pushes add to the values of rows, (n, width)."""
        return self.change(self.pending.read(ids))

    def demand(self, clock: int) -> None:
        """Send rows of this clock or before first, until `relax`."""
        self._due = clock

    def relax(self) -> None:
        """Send by priority again: no thread waits for due rows."""
        self._due = _NOTHING

    def has_due(self, clock: int) -> bool:
        """Return whether rows of this clock or before still wait."""
        return self.pending.num_due(clock) > 0

    def pay(self, now: float) -> None:
        """Pay for the bytes sent since the last call."""
        size_bytes = sent_bytes(self.traffic())
        self._rate.pay(size_bytes - self._paid_bytes, now)
        self._paid_bytes = size_bytes

    def act(self, now: float) -> float | None:
        """Send what the budget allows now; return the seconds until more may go, None to wait for an event."""
        self.pay(now)
        while len(self.pending) and self.has_room():
            pause_s = self._rate.wait_s(now)
            if pause_s > 0:
                return pause_s
            taken = self._next_rows()
            sent = self.send(taken.ids, taken.rows)
            self._futures.sent(sent, self.pending.oldest_push, self.pending.num_pushes)
            self.pay(now)
        return None

    def _next_rows(self) -> TakenRows:
        """Remove and return a burst of rows: due ones while a thread waits for them, else half of them by priority.

        The other half is for rows that must go before the clock is finished. If these were left until then, the worker
        would wait for them; if they all went first, nothing might be left for the priority.
        """
        limit = self.rows_at_once
        if self._due != _NOTHING:
            return self.pending.pop(limit, self._due)
        due = self.pending.pop(limit // 2, self.deferral.due(self.clock()))
        first = self.pending.pop(limit - len(due.ids), _NOTHING)
        return TakenRows(torch.cat((due.ids, first.ids)), torch.cat((due.rows, first.rows)))

    @property
    def rows_at_once(self) -> int:
        """The number of rows in a burst."""
        on_the_wire = self.row_bytes * (1 + SEGMENT_BYTES / SEGMENT_BODY_BYTES)
        return max(1, int(self.settings.burst_bytes / on_the_wire))

    def abandon(self, error: PacelineError) -> None:
        """End all pushes with an error; rows that wait are not sent."""
        self._futures.abandon(error)

    def close(self) -> None:
        """Release all memory."""
        self.pending.close()


@dataclass(slots=True)
class Throttle:
    """The thread that sends the rows of all tables of a worker that have a budget. Used under the worker's lock."""

    lock: WorkerLock
    fail: Callable[[str], None]
    _tables: list[BudgetedRows] = field(default_factory=list[BudgetedRows])
    _thread: SendingThread = field(init=False)

    def __post_init__(self) -> None:
        """Start without tables, and without a thread."""
        self._thread = SendingThread(self.lock, self._act, self.fail)

    def add(self, table: BudgetedRows) -> None:
        """Add a table, and start the thread if needed."""
        self._tables.append(table)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread: there are more rows, or there is room for more pushes."""
        self._thread.wake()

    def wait_sent(self, table: BudgetedRows, clock: int) -> None:
        """Send rows of this clock or before first; blocks until they are sent."""
        if not table.has_due(clock):
            return
        table.demand(clock)
        self.wake()
        self.lock.wait(
            lambda: bool(self.lock.failure) or not table.has_due(clock),  # in this order: it may have been closed
            f"rows of table '{table.table}' that may wait no longer to be sent within {table.settings.budget_mbps:g} "
            "Mbit/s",
        )
        table.relax()
        self.lock.check()

    def stop(self) -> None:
        """Send no more; does not wait for the thread."""
        self._thread.stop()

    def close(self) -> None:
        """Stop and join the thread; not under the lock."""
        self._thread.stop()
        self._thread.join()
        self._tables.clear()

    def _act(self, now: float) -> float | None:
        pauses_s = [pause_s for table in self._tables if (pause_s := table.act(now)) is not None]
        return min(pauses_s, default=None)

"""Pushes of rows that wait on their worker for a budget: those of one table, and of all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from paceline.core.deferral import Deferral
from paceline.errors import PacelineError
from paceline.node.outgoing import PushOutcome, settled
from paceline.node.rows.cache import RowCache
from paceline.node.rows.managed import Managed
from paceline.node.rows.pace import SEGMENT_BODY_BYTES, SEGMENT_BYTES, Pace, sent_bytes
from paceline.node.rows.promises import Promises
from paceline.node.rows.sending import SendingThread
from paceline.node.waiting import Waiting
from paceline.tensors.filters.traffic import Traffic
from paceline.tensors.rows.pending import PendingRows, Taken, relative_magnitude

_NOTHING: Final = -1  # a clock at or before which nothing was made


@dataclass(slots=True)
class BudgetedRows:
    """The pushes of one row table that wait on a worker. Used under the lock of the worker node.

    Args:
        table: its name.
        settings: what the user chose.
        deferral: how long updates may wait.
        pending: those that do.
        cache: rows as this worker has read them; with own pushes on top if `replays`.
        change: what a push of some rows adds to their values.
        row_bytes: of a row and its id, in a push.
        send: makes a push of distinct ids.
        has_room: whether one more push may be under way.
        traffic: what this worker has sent for the table so far.
        clock: the clock of this worker.
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
    traffic: Callable[[], Traffic]
    clock: Callable[[], int]
    _pace: Pace = field(init=False)
    _paid_bytes: int = 0
    _due: int = _NOTHING  # somebody waits for what was made at this clock or before
    _promises: Promises = field(default_factory=Promises)

    def __post_init__(self) -> None:
        """Begin with a budget that is free."""
        burst_s = self.settings.burst_bytes / self.settings.bytes_per_s
        self._pace = Pace(self.settings.bytes_per_s, credit_s=burst_s)
        if self.replays:
            # The rows here contain what waits; those that come do not.
            self.cache.unsent = self.change_of

    def push(self, ids: Tensor, rows: Tensor) -> Future[PushOutcome]:
        """Take in a push of distinct ids. The future ends when all of it has been sent and answered."""
        if not len(ids):
            return settled(PushOutcome(applied=True))
        change = self.change(rows)
        values, _ = self.cache.read(ids)
        self.pending.add(ids, rows, self.clock(), relative_magnitude(change, values[:, : rows.shape[1]]))
        if self.replays:
            self.cache.change(ids, change)
        return self._promises.make(self.pending.num_pushes - 1)

    def change_of(self, ids: Tensor) -> Tensor:
        """Return what those pushes that were not sent yet add to the values of rows, (n, width)."""
        return self.change(self.pending.read(ids))

    def demand(self, clock: int) -> None:
        """Send first what was made at this clock or before, until `relax`."""
        self._due = clock

    def relax(self) -> None:
        """Send again by priority: nobody waits."""
        self._due = _NOTHING

    def has_due(self, clock: int) -> bool:
        """Say whether something still waits that was made at this clock or before."""
        return self.pending.num_due(clock) > 0

    def pay(self, now: float) -> None:
        """Note what was sent since the last call."""
        size_bytes = sent_bytes(self.traffic())
        self._pace.pay(size_bytes - self._paid_bytes, now)
        self._paid_bytes = size_bytes

    def act(self, now: float) -> float | None:
        """Send what may go now; return after how many seconds more may, None if not before something happens."""
        self.pay(now)
        while len(self.pending) and self.has_room():
            pause_s = self._pace.wait_s(now)
            if pause_s > 0:
                return pause_s
            taken = self._next_rows()
            sent = self.send(taken.ids, taken.rows)
            self._promises.sent(sent, self.pending.oldest_push, self.pending.num_pushes)
            self.pay(now)
        return None

    def _next_rows(self) -> Taken:
        """Take out a burst of rows: while somebody waits what that is for, else half of them by priority alone.

        The other half is for rows that have to go before the clock is finished. Were these left until then, the
        worker would have to wait for them there; did they all go first, nothing might be left for the priority.
        """
        limit = self.rows_at_once
        if self._due != _NOTHING:
            return self.pending.take(limit, self._due)
        due = self.pending.take(limit // 2, self.deferral.due(self.clock()))
        first = self.pending.take(limit - len(due.ids), _NOTHING)
        return Taken(torch.cat((due.ids, first.ids)), torch.cat((due.rows, first.rows)))

    @property
    def rows_at_once(self) -> int:
        """How many rows are sent at a time."""
        on_the_wire = self.row_bytes * (1 + SEGMENT_BYTES / SEGMENT_BODY_BYTES)
        return max(1, int(self.settings.burst_bytes / on_the_wire))

    def abandon(self, error: PacelineError) -> None:
        """End all pushes with an error: what waits will not be sent."""
        self._promises.abandon(error)

    def close(self) -> None:
        """Let go of all memory."""
        self.pending.close()


@dataclass(slots=True)
class BudgetedTables:
    """All tables of a worker whose pushes wait, and the thread that sends them. Used under the lock of the node."""

    waiting: Waiting
    fail: Callable[[str], None]
    _tables: list[BudgetedRows] = field(default_factory=list[BudgetedRows])
    _thread: SendingThread = field(init=False)

    def __post_init__(self) -> None:
        """Start without tables, and without a thread."""
        self._thread = SendingThread(self.waiting, self._act, self.fail)

    def open(self, table: BudgetedRows) -> None:
        """Send what waits of this table from now on."""
        self._tables.append(table)
        self._thread.start()

    def wake(self) -> None:
        """Look soon whether something may be sent: there is more, or room for more."""
        self._thread.wake()

    def send_due(self, clock: int) -> None:
        """Send what may wait no longer when this clock is finished; blocks while budgets hold it up."""
        for table in self._tables:
            self.send_made_by(table.deferral.due(clock), table)

    def send_all(self, clock: int) -> None:
        """Send everything made until this clock; blocks while budgets hold it up."""
        for table in self._tables:
            self.send_made_by(clock, table)

    def send_made_by(self, clock: int, table: BudgetedRows) -> None:
        """Send what was made at this clock or before; blocks while the budget holds it up."""
        if not table.has_due(clock):
            return
        table.demand(clock)
        self.wake()
        self.waiting.wait(
            lambda: not table.has_due(clock),
            f"rows of table '{table.table}' that may wait no longer to be sent within {table.settings.budget_mbps:g} "
            "Mbit/s",
        )
        table.relax()

    def abandon(self, error: PacelineError) -> None:
        """Send nothing any more, and end all pushes that wait with an error."""
        self._thread.stop()
        for table in self._tables:
            table.abandon(error)

    def close(self) -> None:
        """End the thread, not under the lock, and let go of all memory."""
        self._thread.stop()
        self._thread.join()
        for table in self._tables:
            table.close()
        self._tables.clear()

    def _act(self, now: float) -> float | None:
        pauses_s = [pause_s for table in self._tables if (pause_s := table.act(now)) is not None]
        return min(pauses_s, default=None)

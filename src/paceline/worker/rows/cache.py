"""A worker's cache of a row table: values with own pushes on top, the clock of each row, and reports of its use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.update.placement import RowSharding
from paceline.update.rows.column import RowColumn
from paceline.update.rows.index import RowIndex
from paceline.update.rows.ops import RowOps

_MOST_PIECES = 64  # tensors of ids, before they are merged into one


@dataclass(slots=True)
class CacheUses:
    """Rows read from the cache, clock by clock, until their servers have confirmed the reports.

    The report of a clock is sent with every repetition of the tick that ends it, and dropped when the server has
    answered that tick. Used under the lock of the worker node.
    """

    sharding: RowSharding
    _read: list[Tensor] = field(default_factory=list[Tensor])  # since the clock began
    # By server: the unconfirmed reports (clock, distinct ids), in ascending order of clocks.
    _reports: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict[int, list[tuple[int, Tensor]]])

    def note(self, ids: Tensor) -> None:
        """Note a read of these distinct rows from the cache."""
        if len(ids):
            self._read.append(ids)
        if len(self._read) > _MOST_PIECES:
            self._read = [self._distinct()]

    def end_clock(self, clock: int) -> None:
        """Make the reports of a clock; a row is in them once, however often it was read."""
        ids, self._read = self._distinct(), []
        for server, places in enumerate(self.sharding.split(ids)):
            if len(places):
                self._reports.setdefault(server, []).append((clock, ids[places]))

    def reports(self, server: int, clock: int) -> list[tuple[int, Tensor]]:
        """Return the reports for a server of the clocks below this one, oldest first."""
        return [report for report in self._reports.get(server, ()) if report[0] < clock]

    def confirmed(self, server: int, clock: int) -> None:
        """Drop the reports of a server for all clocks below this one."""
        if server in self._reports:
            self._reports[server] = [report for report in self._reports[server] if report[0] >= clock]

    @property
    def num_unconfirmed(self) -> int:
        """The largest number of unconfirmed reports of a server."""
        return max((len(reports) for reports in self._reports.values()), default=0)

    def _distinct(self) -> Tensor:
        if not self._read:
            return torch.empty(0, dtype=torch.int64)
        return self.sharding.ops.unique(torch.cat(self._read))[0]


UNKNOWN = -1  # the clock of a row that is not in the cache


@dataclass(slots=True)
class _OwnRows:
    """One own push: its ids in ascending order, and what it adds to each row."""

    ids: Tensor
    change: Tensor
    missing: set[int]  # servers whose next rows may not contain it

    def add_to(self, ids: Tensor, rows: Tensor) -> None:
        """Add the change to the rows that it changes."""
        if not len(self.ids):
            return
        at = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        changed = self.ids[at] == ids
        rows[changed, : self.change.shape[1]] += self.change[at[changed]]


@dataclass(slots=True)
class RowCache:
    """Rows by id. Used under the lock of the worker node.

    Own pushes that servers have not applied yet are added to every row (`note_own` adds them to cached rows, `install`
    to arriving ones), so a read contains them: read-my-writes.

    Args:
        width: numbers a row, echo included.
        max_rows: beyond this many, the least recently used rows are evicted when the next read starts; 0: no limit.
        echo_width: how many of the last numbers of a row are its echo.
    """

    ops: RowOps
    width: int
    dtype: torch.dtype
    max_rows: int = 0
    echo_width: int = 0
    _index: RowIndex = field(init=False)
    _rows: RowColumn = field(init=False)
    _clocks: RowColumn = field(init=False)  # of each row: it contains every update below
    _used: RowColumn = field(init=False)  # of each row: the number of the read that used it last
    _read_echoes: RowColumn | None = field(init=False)  # of each row: as last read, NaN if never read
    _num_reads: int = 0
    # By sequence number. Invariant: no push that all servers have answered and that all arriving rows contain.
    _own: dict[int, _OwnRows] = field(default_factory=dict[int, _OwnRows])
    # Returns what own pushes that are not sent yet add to rows (n, width); cached rows contain them already.
    unsent: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        """Start without rows."""
        self._start()

    def __len__(self) -> int:
        """Count the cached rows."""
        return len(self._index)

    def clocks(self, ids: Tensor) -> Tensor:
        """Return the clock of each row, UNKNOWN for those not cached."""
        clocks = torch.full((len(ids), 1), UNKNOWN, dtype=torch.int64)
        self.ops.gather(self._clocks.tensor, self._index.find(ids), clocks)
        return clocks.view(-1)

    def install(
        self, server: int, ids: Tensor, rows: Tensor, clock: int, settled: int, includes: tuple[int, ...]
    ) -> None:
        """Store rows that contain every update below `clock`, and own pushes below `settled` or in `includes`.

        Rows of a server arrive in the order in which it has read them.
        """
        rows = rows.clone()
        for seq, own in list(self._own.items()):
            if server in own.missing and (seq < settled or seq in includes):
                self._note_contained(seq, {server})
            elif server in own.missing:
                own.add_to(ids, rows)
        if self.unsent is not None:
            change = self.unsent(ids)
            rows[:, : change.shape[1]] += change
        slots, added = self._index.add(ids)
        for column in self._columns():
            column.grow(self._index.num_slots)
        if self._read_echoes is not None:
            unread = torch.full((len(added), self.echo_width), torch.nan, dtype=self.dtype)
            self.ops.scatter(self._read_echoes.tensor, slots[added], unread)
        self.ops.scatter(self._rows.tensor, slots, rows)
        self._mark(self._clocks, slots, clock)
        self._mark(self._used, slots, self._num_reads)

    def known(self, ids: Tensor) -> Tensor:
        """Return for each id whether its row is cached."""
        return self._index.find(ids) >= 0

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows, whether each is cached); rows that are not are zeros."""
        slots = self._index.find(ids)
        rows = torch.zeros((len(ids), self.width), dtype=self.dtype)
        self.ops.gather(self._rows.tensor, slots, rows)
        return rows, slots >= 0

    def note_read(self, ids: Tensor, rows: Tensor) -> None:
        """Store the echoes of rows that the user reads, as the next gradients are of these."""
        if self._read_echoes is not None:
            slots = self._index.find(ids)
            here = slots >= 0
            echoes = rows[here, self.width - self.echo_width :]
            self.ops.scatter(self._read_echoes.tensor, slots[here], echoes)

    def read_echoes(self, ids: Tensor) -> Tensor:
        """Return the echoes that the user read last, NaN for rows that were never read."""
        echoes = torch.full((len(ids), self.echo_width), torch.nan, dtype=self.dtype)
        if self._read_echoes is not None:
            self.ops.gather(self._read_echoes.tensor, self._index.find(ids), echoes)
        return echoes

    def use(self, ids: Tensor) -> Tensor:
        """Note that a read of these ids starts; return the ids of rows that it evicts."""
        self._num_reads += 1
        slots = self._index.find(ids)
        self._mark(self._used, slots[slots >= 0], self._num_reads)
        return self._evict() if self.max_rows and len(self) > self.max_rows else ids[:0]

    def note_own(self, seq: int, ids: Tensor, change: Tensor, servers: Iterable[int]) -> None:
        """Add an own push to cached rows, and to arriving ones that lack it. Ids are distinct."""
        self.note_sent(seq, ids, change, servers)
        self.change(ids, change)

    def note_sent(self, seq: int, ids: Tensor, change: Tensor, servers: Iterable[int]) -> None:
        """Add an own push, which cached rows contain already, to arriving ones that lack it. Ids are distinct."""
        order = torch.argsort(ids)
        self._own[seq] = _OwnRows(ids[order], change[order], set(servers))

    def change(self, ids: Tensor, change: Tensor) -> None:
        """Add a change to cached rows. Ids are distinct."""
        slots = self._index.find(ids)
        here = slots >= 0
        rows = torch.zeros((int(here.sum()), self.width), dtype=self.dtype)
        self.ops.gather(self._rows.tensor, slots[here], rows)
        rows[:, : change.shape[1]] += change[here]
        self.ops.scatter(self._rows.tensor, slots[here], rows)

    def applied_own(self, seq: int, awaited: Set[int]) -> None:
        """Note that all servers have applied an own push: only rows still `awaited` from these servers may lack it."""
        if seq in self._own:
            self._note_contained(seq, self._own[seq].missing - awaited)

    def refused_own(self, seq: int, ids: Tensor) -> None:
        """Note that an own push was refused, and drop the rows that contain it."""
        self._own.pop(seq, None)
        self.drop(ids)

    def drop(self, ids: Tensor) -> None:
        """Remove these rows."""
        slots = self._index.find(ids)
        self._index.remove(slots[slots >= 0])

    def clear(self) -> None:
        """Remove all rows; own pushes in flight are still added to arriving ones."""
        self.close()
        self._start()

    def close(self) -> None:
        """Release all memory."""
        self._index.close()
        for column in self._columns():
            column.close()

    def _start(self) -> None:
        self._index = RowIndex(self.ops, RowColumn(1, torch.int64))
        self._rows = RowColumn(self.width, self.dtype)
        self._clocks = RowColumn(1, torch.int64)
        self._used = RowColumn(1, torch.int64)
        self._read_echoes = RowColumn(self.echo_width, self.dtype) if self.echo_width else None

    def _columns(self) -> list[RowColumn]:
        always = [self._rows, self._clocks, self._used]
        return always if self._read_echoes is None else [*always, self._read_echoes]

    def _note_contained(self, seq: int, servers: Set[int]) -> None:
        own = self._own[seq]
        own.missing -= servers
        if not own.missing:
            del self._own[seq]

    def _mark(self, column: RowColumn, slots: Tensor, number: int) -> None:
        self.ops.scatter(column.tensor, slots, torch.full((len(slots), 1), number, dtype=torch.int64))

    def _evict(self) -> Tensor:
        live = self._index.live_slots()
        used = torch.empty((len(live), 1), dtype=torch.int64)
        self.ops.gather(self._used.tensor, live, used)
        used = used.view(-1)
        # Never rows of the current read, which may be more than fit.
        gone = live[torch.argsort(used, stable=True)[: len(self) - self.max_rows]]
        gone = gone[self._used.tensor.view(-1)[gone] < self._num_reads]
        ids = self._index.ids_of(gone)
        self._index.remove(gone)
        return ids

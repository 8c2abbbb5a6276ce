"""Tables in which a mark for each push shows how often it counted: on real nodes, by every carrier and policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from tests.nodes.cluster import RETRY_S, Cluster
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.observe import trace as records
from paceline.observe.trace import Trace
from paceline.update.filters import KeyCache
from paceline.update.named_rules import Add
from paceline.update.rows.spec import Lifecycle
from paceline.wire.requests import Barrier
from paceline.worker.declaration import Declaration
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.pushes import PushOutcome
from paceline.worker.rows.state import CacheOptions
from paceline.worker.rows.table import RowTable
from paceline.worker.table import Table
from paceline.worker.table_opener import TableOpener

NUM_WORKERS = 2
NUM_CLOCKS = 5
NUM_MARKS = NUM_WORKERS * NUM_CLOCKS
KINDS = ("dense", "views", "rows", "kept rows", "listed rows")
CARRIERS = ("memory", "shm", "tcp", "tls")
NAMED = ("bsp", "ssp:2", "essp:2", "asynchronous", "backup:1")
POLICIES = (
    *NAMED,
    "bound=2,visible=on_clock",
    "bound=1,visible=on_clock,deliver=on_clock",
    "bound=none,deliver=on_clock",
)
# Just below and just above what the code takes for small: a frame, a read ahead, a look at the header, memory that is
# mapped, a chunk of an update, a bucket, what a connection within one process holds.
EDGES = tuple(edge + more for edge in (16 << 10, 64 << 10, 256 << 10, 2 << 20, 4 << 20, 32 << 20) for more in (-4, 4))
SIZES = (1 << 10, *EDGES)


@dataclass(frozen=True)
class Cell:
    """One combination; `size_bytes` is what a server gets of a push."""

    carrier: str
    policy: str
    kind: str
    size_bytes: int
    num_servers: int
    num_tables: int

    @property
    def num_clocks(self) -> int:
        """How many pushes each worker makes to each table: fewer of large ones, for the time they take."""
        return NUM_CLOCKS if self.size_bytes < 1 << 20 else 2

    @property
    def retry_s(self) -> float:
        """After how long a worker repeats what was not answered: not while a large push is on its way."""
        return RETRY_S if self.size_bytes < 1 << 20 else 5.0


class Counting(Trace):
    """What a server says that it has applied: pushes by table."""

    def __init__(self) -> None:
        super().__init__(None)
        self.is_kept = True
        self.num_applied = Counter[str]()

    def record(self, record: records.TraceRecord) -> None:
        if isinstance(record, records.AppliedRecord):
            self.num_applied[record.table] += len(record.workers)


class Book(ABC):
    """One worker's end of a table."""

    def __init__(self, name: str, policy: Consistency) -> None:
        self.name = name
        self.policy = policy
        self.sees_own = policy.visible == "on_clock"

    @abstractmethod
    def push(self, mark: int) -> Future[PushOutcome]:
        """Add 1 to every place of this mark."""

    @abstractmethod
    def read(self, *, refresh: bool, exact: bool = False) -> Tensor:
        """Return what is there, (places, marks)."""


class DenseBook(Book):
    """Every NUM_MARKS elements have one of each mark: all memory that a push goes through is looked at."""

    def __init__(self, opening: TableOpener, cell: Cell, name: str) -> None:
        super().__init__(name, Consistency.parse(cell.policy))
        self.numel = cell.num_servers * cell.size_bytes // 4
        live = cell.kind == "views"
        self.sees_own = self.sees_own or not live
        spec = declaration(cell, name).dense((self.numel,))
        self.table: Table = opening.open_dense(spec, (self.numel,), Tensor.zero_, read_my_writes=True, live=live)

    def push(self, mark: int) -> Future[PushOutcome]:
        gradient = torch.zeros(self.numel)
        gradient[mark::NUM_MARKS] = 1.0
        return self.table.push(gradient)

    def read(self, *, refresh: bool, exact: bool = False) -> Tensor:
        return by_mark(self.table.pull(refresh=refresh, exact=exact))


class RowBook(Book):
    """Every row has a column for each mark."""

    def __init__(self, opening: TableOpener, cell: Cell, name: str) -> None:
        super().__init__(name, Consistency.parse(cell.policy))
        num_rows = max(cell.num_servers, cell.num_servers * cell.size_bytes // (8 + 4 * NUM_MARKS))
        self.ids = torch.arange(num_rows) * 7919 - 3 * num_rows
        kept = cell.kind == "kept rows"
        self.sees_own = self.sees_own or kept
        filters = (KeyCache(max_lists=2),) if cell.kind == "listed rows" else ()
        spec = declaration(cell, name).rows(NUM_MARKS, 0.0, Lifecycle(), filters)
        self.table: RowTable = opening.open_rows(spec, CacheOptions(True if kept else None))

    def push(self, mark: int) -> Future[PushOutcome]:
        rows = torch.zeros(len(self.ids), NUM_MARKS)
        rows[:, mark] = 1.0
        return self.table.push(self.ids, rows)

    def read(self, *, refresh: bool, exact: bool = False) -> Tensor:
        return self.table.pull(self.ids, refresh=refresh, exact=exact)


def declaration(cell: Cell, name: str) -> Declaration:
    return Declaration(name, "float32", Add(), cell.policy, "sum", "reject")


def by_mark(flat: Tensor) -> Tensor:
    """Lay the elements of a table under their marks; the last row is filled up with its first."""
    whole = len(flat) // NUM_MARKS * NUM_MARKS
    last = torch.cat([flat[whole:], flat[len(flat) - whole : NUM_MARKS]]) if whole < len(flat) else flat[:0]
    return torch.cat([flat[:whole], last]).view(-1, NUM_MARKS)


def open_book(opening: TableOpener, cell: Cell, name: str) -> Book:
    return (RowBook if "rows" in cell.kind else DenseBook)(opening, cell, name)


@dataclass
class Ledger:
    """What was acknowledged, and what is there."""

    cell: Cell
    outcomes: dict[tuple[str, int], Future[PushOutcome]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [f"book-{number}" for number in range(self.cell.num_tables)]

    def work(self, node: WorkerNode) -> None:
        """Push a mark into each table at every clock, look at every read, and at everything in the end."""
        rank = node.settings.sender.worker
        opening = TableOpener(rank, node, StepMetrics(Trace(None), rank))
        books = [open_book(opening, self.cell, name) for name in self.names]
        num_made = 0
        while node.clock < self.cell.num_clocks:  # by clocks: under a quorum a late worker goes on where the others are
            for book in books:
                mark = rank * NUM_CLOCKS + num_made
                self.outcomes[book.name, mark] = book.push(mark)
            num_made += 1
            node.tick()
            for book in books:
                look_at(book, rank, num_made, book.read(refresh=num_made % 2 == 0))
        node.settle()
        node.rpc.call(0, lambda number: Barrier(number, "end"), "the other workers")
        for book in books:
            assert_counts(book.read(refresh=True, exact=True), self.expected(book.name), f"worker {rank}")

    def expected(self, name: str) -> Tensor:
        """1 for each push of which a worker was told that it is applied."""
        marks = torch.zeros(NUM_MARKS)
        for (table, mark), outcome in self.outcomes.items():
            if table == name:
                marks[mark] = outcome.result(timeout=0).applied
        return marks

    def check(self, servers: Cluster, counting: list[Counting]) -> None:
        """Have both ends agree, push by push, and nothing be left over."""
        for name in self.names:
            expected = self.expected(name)
            if "backup" not in self.cell.policy:
                made = expected.view(NUM_WORKERS, NUM_CLOCKS)[:, : self.cell.num_clocks]
                assert made.all(), f"refused: {made}"
            if "rows" not in self.cell.kind:
                assert_counts(by_mark(servers.values(name)), expected, "on the servers")
            for trace in counting:
                assert trace.num_applied[name] == int(expected.sum()), name
        for server in servers.servers:
            assert not any(table.num_waiting for table in server._tables.values())
            assert server._receive_buffers.pool.num_lent == 0


def look_at(book: Book, rank: int, num_made: int, found: Tensor) -> None:
    """Have a read be whole, count nothing twice, and be as new as the policy says."""
    policy = book.policy
    assert ((found == 0) | (found == 1)).all(), f"{book.name}, worker {rank}: {found[(found != 0) & (found != 1)]}"
    if policy.backups:
        return
    marks = found.view(-1, NUM_WORKERS, NUM_CLOCKS)
    if book.sees_own:
        own = marks[:, rank] if policy.bound == 0 or policy.visible == "on_arrival" else marks[:, rank, :0]
        assert (own[:, :num_made] == 1).all(), f"{book.name}: worker {rank} misses its own push at {num_made}"
    if policy.bound is not None:
        assert (marks[:, :, : max(0, num_made - policy.bound)] == 1).all(), f"{book.name}: too old at {num_made}"


def assert_counts(found: Tensor, expected: Tensor, where: str) -> None:
    """Have every place of every mark count as often as was acknowledged."""
    lost = (found < expected).any(dim=0).nonzero().flatten().tolist()
    doubled = (found > expected).any(dim=0).nonzero().flatten().tolist()
    assert (found == expected).all(), f"{where}: lost {lost}, counted too often {doubled}; NaN: {found.isnan().any()}"

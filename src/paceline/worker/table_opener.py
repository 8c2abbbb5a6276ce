"""Opening of tables: all workers declare the same tables, and one of them sends the initial values."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from paceline.core.calls import listed
from paceline.core.partition import Range
from paceline.core.server import LEAD
from paceline.errors import Refused, UsageError
from paceline.transport.base import EMPTY
from paceline.update.dtypes import torch_dtype
from paceline.update.placement import spans
from paceline.update.rows.layout import RowPiece
from paceline.update.rows.spec import First, RowTableSpec, row_differences
from paceline.update.table import TableSpec, differences
from paceline.wire.requests import AwaitValues, Initialise, LoadState
from paceline.worker.cuts import list_tables
from paceline.worker.dense import DenseClient
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.state import CacheOptions
from paceline.worker.rows.table import RowTable
from paceline.worker.table import Table
from paceline.worker.table_calls import TableCalls
from paceline.worker.validation import as_values
from paceline.worker.waits import About


class _Opened(msgspec.Struct, frozen=True):
    """A table that a worker has opened, with its declaration."""

    spec: TableSpec | RowTableSpec
    options: str  # of this worker alone, as messages show them
    table: Table | RowTable


class SavedTables(Protocol):
    """Tables of a job that this one goes on with."""

    @property
    def names(self) -> Sequence[str]:
        """What these tables are called."""
        ...

    @property
    def folder(self) -> Path:
        """The snapshot that has them."""
        ...

    def trained_by(self, optimizer: str) -> Sequence[str]:
        """Return the names of the tables that hold what an optimizer of this name trained."""
        ...

    def parts_of(self, spec: TableSpec, spans: Sequence[Range]) -> Iterator[bytes] | None:
        """Return what each server loads of a dense table, by rank; None if it was not saved.

        Raises:
            UsageError: the table was another one.
        """
        ...

    def rows_of(self, spec: RowTableSpec) -> Iterator[RowPiece] | None:
        """Return the rows of a table; None if it was not saved. Raises as `parts_of`."""
        ...


@dataclass(slots=True)
class TableOpener:
    """Opens the tables of one worker, each once."""

    rank: int
    node: WorkerNode
    metrics: StepMetrics
    _opened: dict[str, _Opened] = field(default_factory=dict[str, _Opened])
    _claimed: set[str] = field(default_factory=set[str])  # prefixes of the names of tables
    saved: SavedTables | None = None

    def default_name(self, base: str) -> str:
        """Return a name that is still free: `base`, else `base`-2, and so on.

        All workers that make the same calls in the same order get the same names.
        """
        names = (base if number == 1 else f"{base}-{number}" for number in count(1))
        return next(name for name in names if name not in self._claimed and name not in self._opened)

    @contextmanager
    def claiming(self, name: str) -> Generator[None]:
        """Reserve a name while tables are opened inside the context; freed if that fails before one is opened.

        Raises:
            UsageError: the name is taken.
        """
        if name in self._claimed:
            raise UsageError(
                f"worker {self.rank} has distributed '{name}' already: give each optimizer a name of its own "
                "(name=...), or none: then each call gets tables of its own, also where a notebook runs a cell again."
            )
        num_opened = len(self._opened)
        self._claimed.add(name)
        try:
            yield
        except UsageError:
            if len(self._opened) == num_opened:
                self._claimed.discard(name)
            raise

    def find(self, spec: TableSpec | RowTableSpec, options: str) -> Table | RowTable | None:
        """Return the open table with the same declaration; None if no table of this name is open.

        Raises:
            UsageError: the open table of this name has other settings.
        """
        known = self._opened.get(spec.name)
        if known is None:
            return None
        if problems := _changed(spec, options, known):
            raise UsageError(
                f"worker {self.rank} has already opened table '{spec.name}', and this call (here) differs from that "
                f"one (there): {' '.join(problems)} Use the settings of the first call to get that table again, or "
                "another name; in a notebook, restart the kernel to begin anew."
            )
        return known.table

    def require_taken(self, optimizer: str) -> None:
        """Refuse an optimizer that goes on with nothing of what a snapshot has of it; called once it is distributed.

        Raises:
            UsageError: its strategy keeps the model in workers, or has tables of other names.
        """
        if self.saved is None:
            return
        trained = self.saved.trained_by(optimizer)
        if trained and self._opened.keys().isdisjoint(trained):
            raise UsageError(
                f"worker {self.rank}, '{optimizer}': the snapshot {self.saved.folder} that this job goes on from has "
                f"{_named(trained)}, and this strategy takes nothing of that: the model would begin anew. Resume with "
                "the strategy and options that it was made with; or write it to a file (paceline snapshot convert "
                f"{self.saved.folder} FILE --to torch), load that in the script, and give the optimizer another name "
                "(name=...) or leave out --resume (docs/snapshots.md)."
            )

    def tell_unopened(self) -> None:
        """Tell which tables of a snapshot no worker has opened; for one worker, which leaves; may block."""
        if self.saved is None or self._opened.keys() >= set(self.saved.names):
            return
        known = {table.name for table in list_tables(self.node)}
        if unopened := [name for name in self.saved.names if name not in known]:
            self.metrics.tell(
                f"worker {self.rank} leaves at clock {self.node.clock}, and no worker has opened {_named(unopened)} "
                f"of the snapshot {self.saved.folder} that this job goes on from: the servers loaded nothing of that"
            )

    def open_dense(
        self,
        spec: TableSpec,
        shape: tuple[int, ...],
        write_first: Callable[[Tensor], object],
        *,
        read_my_writes: bool,
        live: bool,
        first: int = 0,
    ) -> Table:
        """Declare a dense table, and wait for its initial values.

        Worker `first` sends them, or the lowest rank that still takes part: it calls `write_first` with a flat tensor.
        """
        self._require_new(spec.name)
        spec.validate()
        client = DenseClient.open(self.node.context, spec, reads_own_writes=read_my_writes, live=live)
        if self.rank == first:
            self._tell_if_new(spec.name)
            self._give_values(client, write_first)
        try:
            self._await_values(spec.name, first)
        except Refused:  # that worker is gone, and this one has the lowest rank of those that are left
            self._give_values(client, write_first)
            self._await_values(spec.name, first)
        self.metrics.start_training()
        table = Table(spec, shape, client, self.node, self.metrics)
        self._opened[spec.name] = _Opened(spec, dense_options(read_my_writes=read_my_writes, live=live), table)
        return table

    def open_shared(self, spec: TableSpec, shape: tuple[int, ...]) -> Table:
        """Declare a dense table of zeros, without waiting for other workers.

        May be repeated after a refusal.
        """
        spec.validate()
        client = DenseClient.open(self.node.context, spec)
        self._give_values(client, Tensor.zero_)  # servers ignore those of other workers, which are the same
        return Table(spec, shape, client, self.node, self.metrics)

    def open_rows(self, spec: RowTableSpec, options: CacheOptions) -> RowTable:
        """Declare a row table; the initial values of its rows follow from the declaration."""
        self._require_new(spec.name)
        spec.validate()
        client = RowClient.open(self.node.context, spec, options)
        if self.rank == 0:
            self._tell_if_new(spec.name)
        if self.saved is not None:
            self._load_rows(spec, self.saved)
        self.metrics.start_training()
        table = RowTable(spec, client, self.node, self.metrics)
        self._opened[spec.name] = _Opened(spec, row_options(options), table)
        return table

    def _require_new(self, name: str) -> None:
        if name in self._opened:
            raise UsageError(
                f"worker {self.rank} has already opened table '{name}': use what that call returned, or give this "
                "one a name of its own (name=...)."
            )

    def _tell_if_new(self, name: str) -> None:
        """Tell of a table that a job which goes on from a snapshot begins anew: a name may have changed unnoticed."""
        is_first_life = not self.node.settings.sender.incarnation
        if self.saved is not None and is_first_life and name not in self.saved.names:
            self.metrics.tell(
                f"table '{name}' is not in the snapshot that this job goes on from, and begins anew: that has "
                f"{', '.join(map(repr, self.saved.names))}"
            )

    def _give_values(self, client: DenseClient, write: Callable[[Tensor], object]) -> None:
        spec = client.cache.spec
        parts = None if self.saved is None else self.saved.parts_of(spec, spans(spec, self.node.settings))
        if parts is None:
            self._give_first(client, write)
            return
        for server, part in enumerate(parts):  # one at a time: each may be large
            bodies = [EMPTY] * server + [memoryview(part)]
            self.node.rpc.call_all(
                lambda number: LoadState(number, client.name, only_first=True),
                f"server {server} to load table '{client.name}' from a snapshot",
                bodies,
                [server],
            )

    def _load_rows(self, spec: RowTableSpec, saved: SavedTables) -> None:
        """Have the rows of a snapshot loaded before any worker pushes; blocks until they are.

        Server 0 has the worker with the lowest rank load them, whichever life that is in, and no other after it.
        """
        pieces = saved.rows_of(spec)
        if pieces is None:
            return
        try:
            self._await_values(spec.name, 0, servers=(LEAD,))
        except Refused:  # this worker has the lowest rank of those that take part
            for piece in pieces:
                TableCalls(self.node, spec.name).write(piece)
            what = f"server {LEAD} to note that the rows of '{spec.name}' are loaded"
            self.node.rpc.call(LEAD, lambda number: Initialise(number, spec.name), what)

    def _give_first(self, client: DenseClient, write: Callable[[Tensor], object]) -> None:
        buffer = client.reserve()  # memory of pushes, so that initial values need none of their own
        write(buffer.gradient)
        self.node.rpc.call_all(
            lambda number: Initialise(number, client.name),
            f"servers to take the first values of table '{client.name}'",
            client.parts(buffer),
        )
        client.return_buffer(buffer)

    def _await_values(self, table: str, first: int, servers: Sequence[int] | None = None) -> None:
        self.node.rpc.call_all(
            lambda number: AwaitValues(number, table),
            f"the first values of table '{table}'",
            servers=servers,
            about=About(workers=(first,)),
        )


def _named(tables: Sequence[str]) -> str:
    return f"table{'' if len(tables) == 1 else 's'} {listed(tables)}"


def _changed(spec: TableSpec | RowTableSpec, options: str, known: _Opened) -> Sequence[str]:
    """Return the differences between a declaration and that of the open table, a sentence each."""
    match spec, known.spec:
        case TableSpec() as ours, TableSpec() as theirs:
            problems = differences(ours, theirs)
        case RowTableSpec() as ours, RowTableSpec() as theirs:
            problems = row_differences(ours, theirs)
        case _:
            problems = ["One has a shape, the other rows."]
    if not problems and options != known.options:
        problems = [f"{options} here and {known.options} there."]
    return problems


def dense_options(*, read_my_writes: bool, live: bool) -> str:
    """Return the options of a dense table that each worker chooses for itself, as text."""
    return f"read_my_writes={read_my_writes}, view={live}"


def row_options(options: CacheOptions) -> str:
    """Return the options of a row table that each worker chooses for itself, as text."""
    return (
        f"cache={options.keep}, cache_rows={options.max_rows}, read_my_writes={options.reads_own_writes}, "
        f"communication={options.communication}"
    )


def first_values(init: object, spec: TableSpec, shape: tuple[int, ...]) -> Tensor:
    """Return the initial values of a dense table as a flat tensor.

    Raises:
        UsageError: `init` has another shape, or is for rows.
    """
    if isinstance(init, First):
        raise UsageError(f"table '{spec.name}': init is {init}, which is for rows; give a number or a tensor.")
    given = as_values(init, torch_dtype(spec.dtype), f"table '{spec.name}'", "init")
    try:
        return torch.empty(shape, dtype=torch_dtype(spec.dtype)).copy_(given).view(-1)
    except RuntimeError as error:
        raise UsageError(f"table '{spec.name}': init has shape {tuple(given.shape)}, expected {shape}.") from error

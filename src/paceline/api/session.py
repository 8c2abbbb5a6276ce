"""The session: a worker's connection to its job. It opens tables, finishes clocks, waits at barriers and leaves."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, get_args, overload
from weakref import WeakKeyDictionary, WeakSet

from msgspec.structs import replace
from torch import Tensor

from paceline.api.frameworks import ADAPTERS, missing_adapter
from paceline.collective.collectives import Collectives
from paceline.core.calls import checked_late
from paceline.core.consistency import Consistency, bsp
from paceline.data.partition import Sharding
from paceline.data.slicing import Slicing
from paceline.data.sources.reader import SessionReaders
from paceline.errors import PacelineError, UsageError
from paceline.launch.script_exit import ended_well
from paceline.launch.signals import PreemptionNotice
from paceline.model_parallel.arrangement import Arrangement
from paceline.notices import CLOCK_ADVICE, FAILURE, tell
from paceline.observe.trace import BARRIER
from paceline.snapshots.taking import SavedJob, SnapshotPlan, SnapshotTaker, Sources
from paceline.training.embedding_gradients import EmbeddingLookups
from paceline.training.flat import Weights
from paceline.training.hooks import refuse_own_steps
from paceline.training.publishing import ModelPublisher
from paceline.training.strategy import CountedSteps, Distributed, Settings, Strategy, distribute, optimizers_of_loop
from paceline.update.rows.spec import FilterSpec, First, Lifecycle
from paceline.update.rules import RuleSpec
from paceline.update.table import DType, NonFinite, Scale
from paceline.wire.requests import Barrier
from paceline.worker.declaration import Declaration
from paceline.worker.metrics import StepMetrics
from paceline.worker.named_tensors import NamedTensors
from paceline.worker.node import WorkerNode
from paceline.worker.parts import PartedTable, join_parts
from paceline.worker.publishing import Publisher
from paceline.worker.rows.managed import Managed
from paceline.worker.rows.state import CacheOptions
from paceline.worker.rows.table import RowTable
from paceline.worker.table import Table
from paceline.worker.table_opener import TableOpener, dense_options, first_values, row_options
from paceline.worker.validation import as_count, brief

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle


class Closable(Protocol):
    """What a session closes last: an embedded server, or this process's part in the rendezvous of its job."""

    def close(self, *, politely: bool) -> None:
        """Release it. Politely: block for as long as other workers need it."""
        ...


@dataclass(slots=True)
class Session:
    """A worker's connection to its job, from `connect` or `init`. A context manager: leaving it closes the session.

    Attributes:
        rank: number of this worker, from 0.
        size: number of workers that were started; where they come and go, the number of places for them.
        local_rank: number of this worker on its machine, from 0.
        num_samples: number of training samples that loaders from `shard` and `feed` have returned so far.

    Example:
        >>> import paceline
        >>> with paceline.connect() as ps:
        ...     w = ps.table("w", shape=(2,), update=paceline.update.SGD(lr=0.5))
        ...     _ = w.push([1.0, -2.0])
        ...     _ = ps.clock()
        ...     w.pull().tolist()
        [-0.5, 1.0]
    """

    rank: int
    size: int
    local_rank: int
    node: WorkerNode
    metrics: StepMetrics
    consistency: Consistency | None  # the launcher's; one that the script names takes precedence
    scale: Scale | None
    exchange: Collectives
    arrangement: Arrangement
    server: Closable | None = None  # what this process keeps running for the job until it leaves
    num_samples: int = 0
    # Weak references: dropping an optimizer also releases its parameters.
    _optimizers: WeakSet[Distributed] = field(default_factory=WeakSet)
    # What keeps optimizers that were given from stepping by themselves.
    _given: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = field(default_factory=WeakKeyDictionary)
    _has_distributed: bool = False  # an optimizer, at any time
    _has_overlap: bool = False  # an optimizer sends gradients while backward runs
    _weights: WeakSet[Weights] = field(default_factory=WeakSet)
    tables: TableOpener = field(init=False)
    models: ModelPublisher = field(init=False)
    named: NamedTensors = field(init=False)
    lookups: EmbeddingLookups = field(default_factory=EmbeddingLookups)
    counted_steps: dict[str, CountedSteps] = field(default_factory=dict[str, CountedSteps])  # by optimizer
    slicing: Slicing = field(init=False)
    readers: SessionReaders = field(default_factory=SessionReaders)
    divide_lr: bool = False  # among the pushes of a clock, where each is an update of its own
    is_elastic: bool = False  # workers come and go while the job runs
    publish_every: int = 0  # clocks, after which worker 0 publishes the models; 0 for never
    notice: PreemptionNotice = field(default_factory=PreemptionNotice)
    snapshot_plan: SnapshotPlan | None = None
    saved: SavedJob | None = None  # what this job goes on with
    snapshots: SnapshotTaker = field(init=False)
    sources: Sources = field(init=False)
    closed: bool = False

    def __post_init__(self) -> None:
        """Create the parts that need the node."""
        self.tables = TableOpener(self.rank, self.node, self.metrics)
        self.named = NamedTensors(self.tables)
        self.models = ModelPublisher(Publisher(self.node, self.metrics.tell), self._optimizers)
        self.tables.saved = self.saved
        self.sources = Sources(self.saved)
        plan = None if self.rank else self.snapshot_plan
        resumed = None if self.saved is None else self.saved.resumed.folder
        self.snapshots = SnapshotTaker(self.node, self.size, self.metrics.tell, plan, resumed)
        self.slicing = Slicing(
            self.size, self.node.rpc, self._optimizers, lambda: self.node.clock, is_elastic=self.is_elastic
        )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"clock {self.node.clock}, {self.num_samples} samples"
        return f"Session(worker {self.rank} of {self.size}, {state})"

    def __enter__(self) -> Self:
        """Return this session."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Leave the job; after an error without waiting for pushes or other workers."""
        self.close(politely=ended_well(error))

    # -- tables and clocks -------------------------------------------------------------------------------------------

    @overload
    def table(
        self,
        name: str,
        *,
        shape: Sequence[int],
        update: RuleSpec,
        consistency: Consistency | str | None = None,
        scale: Scale | None = None,
        init: float | Tensor = 0.0,
        dtype: DType = "float32",
        nonfinite: NonFinite = "reject",
        read_my_writes: bool = True,
        view: bool = False,
    ) -> Table: ...

    @overload
    def table(
        self,
        name: str,
        *,
        shape: Mapping[str, Sequence[int]],
        update: RuleSpec,
        consistency: Consistency | str | None = None,
        scale: Scale | None = None,
        init: float | Mapping[str, Tensor] = 0.0,
        dtype: DType = "float32",
        nonfinite: NonFinite = "reject",
        read_my_writes: bool = True,
    ) -> PartedTable: ...

    @overload
    def table(
        self,
        name: str,
        *,
        rows: int,
        update: RuleSpec,
        consistency: Consistency | str | None = None,
        scale: Scale | None = None,
        init: float | First = 0.0,
        dtype: DType = "float32",
        nonfinite: NonFinite = "reject",
        read_my_writes: bool = True,
        cache: bool | None = None,
        cache_rows: int = 0,
        life: Lifecycle = ...,
        filters: Sequence[FilterSpec] = (),
        communication: Managed | None = None,
    ) -> RowTable: ...

    @checked_late
    def table(
        self,
        name: str,
        *,
        shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        rows: int | None = None,
        update: RuleSpec,
        consistency: Consistency | str | None = None,
        scale: Scale | None = None,
        init: float | Tensor | Mapping[str, Tensor] | First = 0.0,
        dtype: DType = "float32",
        nonfinite: NonFinite = "reject",
        read_my_writes: bool = True,
        view: bool = False,
        cache: bool | None = None,
        cache_rows: int = 0,
        life: Lifecycle = Lifecycle(),  # noqa: B008 - it is frozen
        filters: Sequence[FilterSpec] = (),
        communication: Managed | None = None,
    ) -> Table | PartedTable | RowTable:
        """Open a table, and create it if it is new: dense, of a `shape`, or sparse, with `rows` under 64-bit ids.

        Every worker must call this with the same settings. Blocks until all servers have accepted the table and, for a
        shape, until worker 0 has written the first values. A second call with the same settings, as when a notebook
        runs a cell again, returns the same table with its current values.

        Args:
            name: name of the table, unique in the job.
            shape: shape of the values of a dense table; or a dict of shapes by name, for one of several parts, which
                move together at the cost of one table: a push then takes a dict, and `pull` returns one.
            rows: width of a row, for a table whose ids are not declared in advance; the first push creates a row.
            update: how pushes become values: `paceline.update.SGD(lr=0.1)`, for example.
            consistency: when reads wait and what they see. Default: the launcher's, else bsp.
            scale: how one update combines several pushes: their "sum", "mean", or the mean weighted by "samples"
                (the default). Where updates are visible on arrival each push is applied on its own, in full.
            init: first values: a number, a tensor of the shape (that of worker 0 counts), a dict of such tensors for
                parts, or for rows one of `paceline.first`, `paceline.first.normal(0.01)` for example.
            dtype: dtype of the values.
            nonfinite: what happens to pushes with NaN or infinity: "reject", "zero", "halt", or "ignore" them.
            read_my_writes: let cached reads contain this worker's own pushes, where the rule allows it.
            view: dense tables: also map the servers' memory, where that is on this machine (shm), so that `view` and
                `pull` read from it; cached reads then do not add own pushes that the servers have yet to apply.
            cache: row tables: keep pulled rows, and pull them again only when the consistency requires it. Default:
                only under essp, where servers send changes.
            cache_rows: row tables: maximum number of cached rows, least recently used evicted first; 0 for no limit.
            life: row tables: when rows are created and evicted, and where they are stored; see `paceline.Lifecycle`.
            filters: row tables: what is dropped or compressed in transit; see `paceline.filters`.
            communication: row tables: let this worker's pushes wait for a bandwidth budget; see `paceline.managed`.

        Raises:
            Refused: another worker declared the table differently; the message lists the first differences.
            UsageError: settings that are not valid, or differ from an earlier call of this worker.
        """
        declared = Declaration(name, dtype, update, str(self.policy(consistency)), self.scale_of(scale), nonfinite)
        for what, flag in (("read_my_writes", read_my_writes), ("view", view), ("cache", cache is not None and cache)):
            if not isinstance(flag, bool):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
                raise UsageError(f"table '{name}': {what} is {brief(flag)}, expected True or False.")
        if rows is not None and shape is None and not view:
            are_filters = isinstance(filters, list | tuple) and all(isinstance(each, FilterSpec) for each in filters)  # pyright: ignore[reportUnnecessaryIsInstance]
            if not are_filters:
                raise UsageError(f"table '{name}': filters is {brief(filters)}, expected a list of paceline.filters.")
            if not isinstance(communication, Managed | None):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(
                    f"table '{name}': communication is {brief(communication)}, expected paceline.managed(...)."
                )
            if not isinstance(cache_rows, int) or cache_rows < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"table '{name}': cache_rows is {brief(cache_rows)}, expected 0 (no limit) or more.")
            if not isinstance(life, Lifecycle):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
                raise UsageError(f"table '{name}': life is {brief(life)}, expected paceline.Lifecycle(...).")
            options = CacheOptions(cache, cache_rows, read_my_writes, communication)
            row_spec = declared.rows(rows, init, life, tuple(filters), communication)
            return self.tables.find(row_spec, row_options(options)) or self.tables.open_rows(row_spec, options)
        only_rows = (cache is not None, cache_rows, filters, life != Lifecycle(), communication is not None)
        if shape is None or rows is not None or any(only_rows):
            raise UsageError(
                f"table '{name}': give either shape=..., or rows=... (then without view, and with cache, cache_rows, "
                "life, filters and communication as you like)."
            )
        spec = declared.dense(shape)
        parted = isinstance(shape, Mapping)
        if parted and view:
            raise UsageError(f"table '{name}': view=True is for a table of one shape; pull() of parts returns copies.")
        flat_shape = (spec.numel,) if isinstance(shape, Mapping) else tuple(shape)
        if parted and isinstance(init, Mapping):
            first, _ = join_parts(spec, init, lambda: f"table '{name}'", "init")
        else:
            first = first_values(init, spec, flat_shape)
        table = self.tables.find(spec, dense_options(read_my_writes=read_my_writes, live=view))
        table = table or self.tables.open_dense(
            spec, flat_shape, lambda out: out.copy_(first), read_my_writes=read_my_writes, live=view
        )
        return PartedTable(table) if parted and isinstance(table, Table) else table

    @overload
    def pull(self, *tables: Table) -> list[Tensor]: ...

    @overload
    def pull(self, *tables: PartedTable) -> list[dict[str, Tensor]]: ...

    def pull(self, *tables: Table | PartedTable) -> Sequence[Tensor | dict[str, Tensor]]:
        """Return the values of dense tables, as `Table.pull` does for each; blocks until all are fresh enough.

        They are asked for in one message, and so arrive sooner than one after the other. Still sooner are the parts of
        one table: see `table`.

        Raises:
            DeadlineExceeded: some values did not become fresh enough in time.
            PeerError: a server is gone, or this worker was given up.

        Example:
            >>> import paceline
            >>> with paceline.connect() as ps:
            ...     a, b = (ps.table(name, shape=(2,), update=paceline.update.Add()) for name in ("a", "b"))
            ...     _ = a.push([1.0, 2.0])
            ...     _ = ps.clock()
            ...     ps.pull(a, b)
            [tensor([1., 2.]), tensor([0., 0.])]
        """
        for index, table in enumerate(tables):
            if not isinstance(table, Table | PartedTable):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
                raise UsageError(
                    f"pull: argument {index + 1} is {brief(table)}, expected a table with a shape, of ps.table()."
                )
        with self.metrics.communicating():
            last = len(tables) - 1
            started = [table.start_read(more=number < last) for number, table in enumerate(tables)]
            return [table.finish_pull(read) for table, read in zip(tables, started, strict=True)]

    def detach_at_close(self, weights: Weights) -> None:
        """Detach these weights from the servers' memory when this worker leaves."""
        self._weights.add(weights)

    @checked_late
    def clock(self, *, samples: float | None = None) -> int:
        """Finish the current clock of this worker, on all tables; return the number of finished clocks.

        Gradients of embeddings are pushed first, weighted by `samples`: by default the number that loaders have
        returned. Does not block: the next pull waits. Only rows under `paceline.managed` may wait for their budget.
        """
        here = f"worker {self.rank}, clock {self.node.clock}"
        return self.finish_clock(self.metrics.samples or None if samples is None else as_count(samples, here))

    def finish_clock(self, samples: float | None) -> int:
        """Do what `clock` does, for a number of samples that has been checked; None where it is not known."""
        node = self.node
        with self.metrics.communication:
            if self.lookups.are_used:
                self.lookups.push(samples)
            self.lookups.expected = 0.0
            self.metrics.finish_clock(node.clock)
            for optimizer in self._optimizers if self._has_overlap else ():
                optimizer.freeze_values()
            clock = node.tick()
        if self.publish_every and clock % self.publish_every == 0 and self.rank == 0:
            self.models.publish_all()
        if self.snapshots.plan is not None and self.snapshots.is_due:
            self.snapshots.take_planned(self.sources.positions())
        if self.notice.told_at_s is not None:
            self.exit_if_preempted()
        return clock

    def exit_if_preempted(self) -> None:
        """Close the session and raise SystemExit(143) if this process was preempted; called at the end of a step."""
        if self.notice.told_at_s is not None:
            self.notice.exit_if_preempted(self.close)

    def policy(self, given: Consistency | str | None) -> Consistency:
        """Return the consistency to use: the script's, else the launcher's, else bsp."""
        if not isinstance(given, Consistency | str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"consistency is {brief(given)}, expected 'ssp:3' or paceline.ssp(3), for example.")
        return (Consistency.parse(given) if isinstance(given, str) else given) or self.consistency or bsp()

    def scale_of(self, given: Scale | None) -> Scale:
        """Return how pushes are combined: as the script says, else the launcher, else by samples."""
        if not isinstance(given, str | None):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
            raise UsageError(f"scale is {brief(given)}, expected {', '.join(get_args(Scale))}.")
        return (self.scale or "samples") if given is None else given

    # -- barriers and leaving ----------------------------------------------------------------------------------------

    @checked_late
    def barrier(self) -> None:
        """Block until every live worker has called this, and all its pushes are settled."""
        self.metrics.call = BARRIER
        try:
            with self.metrics.communicating():
                self.node.settle()
                self.metrics.resources.sample()
                self.node.rpc.call(
                    0, lambda number: Barrier(number, "barrier"), "the other workers to come to the barrier"
                )
        finally:
            self.metrics.call = ""
        self.metrics.start_training()

    def barrier_at(self, place: str, problem: str = "", *, needs_first: bool = False, first: int = 0) -> None:
        """Block until every live worker has called this with the same place, and all its pushes are settled.

        Args:
            place: name of this barrier.
            problem: what has failed on this worker, if anything; the barrier then fails on all workers.
            needs_first: whether the barrier fails when worker `first` is gone.
            first: rank of the required worker.

        Raises:
            Refused: a worker has reported a problem, or the required worker is gone; raised on all workers.
        """
        needs = first if needs_first else -1
        with self.metrics.communicating():
            self.node.settle()
            self.node.rpc.call(
                0, lambda number: Barrier(number, place, problem, needs), f"the other workers to come to '{place}'"
            )

    @checked_late
    def close(self, *, politely: bool = True) -> None:
        """Leave the job and release everything. Politely: wait until all pushes are settled. Idempotent."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self.leave_at_exit)
        with ExitStack() as freeing:  # in reverse order, each even if another one fails
            if self.server is not None:
                freeing.callback(self.server.close, politely=politely)
            freeing.callback(self.notice.close)
            freeing.callback(self.metrics.trace.close)
            freeing.callback(self.metrics.stop_states)
            freeing.callback(self.exchange.close, politely=False)
            freeing.callback(self.node.close)
            freeing.callback(self.readers.close)
            self._settle_parameters(politely=politely)
            if politely:
                self._tell_unfinished()
                self._tell_kept_back()
                self._tell_apart()
                self.models.publisher.settle()
            self.metrics.note_end(self.node.clock)
            if politely:
                self.exchange.close(politely=True)
            self.snapshots.close(politely=politely)
            if politely:
                if self.rank == 0:
                    self.tables.tell_unopened()
                self.node.leave()

    def _tell_unfinished(self) -> None:
        """Warn of pushes and gradients in a clock that is not finished, and of steps that were not pushed."""
        leaves = f"worker {self.rank} leaves in the middle of clock {self.node.clock} with"
        held = [(f"table '{table}'", num) for table, num in self.node.unfinished().items()]
        if held:
            effect = "it takes effect only now" if _is_one(held) else "they take effect only now, all in one clock"
            seen = f"and no read of this worker has seen {'it' if _is_one(held) else 'them'}"
            self.metrics.tell(f"{leaves} {_listed(held, 'push', 'pushes')}: {effect}, {seen}. {CLOCK_ADVICE}")
        lost = [(f"embedding '{table}'", num) for table, num in self.lookups.unpushed()]
        if lost:
            how = "that was never pushed: it is lost" if _is_one(lost) else "that were never pushed: they are lost"
            self.metrics.tell(f"{leaves} {_listed(lost, 'gradient', 'gradients')} {how}. {CLOCK_ADVICE}")
        for name, counted in self.counted_steps.items():
            if counted.num_unpushed:
                self._tell_unpushed(name, counted)

    def _tell_unpushed(self, name: str, counted: CountedSteps) -> None:
        """Warn of steps of an optimizer that were not pushed, as a push is made of several."""
        is_one = counted.num_unpushed == 1
        of = f"step of '{name}' that was never pushed" if is_one else f"steps of '{name}' that were never pushed"
        num_missed = counted.num_without_batch
        if num_missed:
            clocks = "a clock" if num_missed == 1 else f"{num_missed} clocks"
            advice = (
                f"It had no batch in {clocks} of the others, so it has made {counted.num_made} steps, and it pushes "
                f"{counted.due}: have batches that divide by the workers (drop_last=True)."
            )
        else:
            advice = f"A push is made of {counted.every} steps: take a multiple of that, or fewer steps a push."
        self.metrics.tell(
            f"worker {self.rank} leaves at clock {self.node.clock} with {counted.num_unpushed} {of}: the servers and "
            f"the other workers do not have {'it' if is_one else 'them'}. {advice}"
        )

    def _tell_kept_back(self) -> None:
        """Warn of rows that filters keep back."""
        kept = [(f"table '{table}'", num) for table, num in self.node.kept_back().items()]
        if kept:
            self.metrics.tell(
                f"worker {self.rank} leaves at clock {self.node.clock} with {_listed(kept, 'row', 'rows')} that "
                f"filters keep back: the servers do not have {'it' if _is_one(kept) else 'them'}. Call table.flush() "
                "and clock() before the end."
            )

    def _tell_apart(self) -> None:
        """Warn, in worker 0, of workers that have had samples to train on and have trained each for itself."""
        grid = self.arrangement.grid
        if self.rank or not self.num_samples or grid.replicas == 1:
            return
        import torch.distributed as dist  # deferred: what gave the samples has imported it

        by_torch = dist.is_initialized() and not grid.is_split  # a process group of the script's
        if not (self._has_distributed or self.node.has_tables or self.exchange.is_used or by_torch):
            what = f"{grid.replicas} replicas" if grid.is_split else f"{self.size} workers"
            self.metrics.tell(
                f"the script has ended, and its {what} have shared nothing but samples: with no call of "
                "paceline.distributed, of a table or of several workers a model that they train is another one on each "
                "of them. Train with optimizer = paceline.distributed(optimizer, model=model)."
            )

    def leave_at_exit(self) -> None:
        """Leave the job as the process ends; tell in one line what fails then, unless it has ended the script."""
        try:
            self.close()
        except PacelineError as error:
            ended_by: object = getattr(sys, "last_value", None)  # where Python has shown what ended the script
            if str(ended_by) != str(error):
                tell(str(error), FAILURE)

    def abandon(self) -> None:
        """Disable the session in a process that was forked from this worker: calls are refused, nothing is sent."""
        self.closed = True
        atexit.unregister(self.leave_at_exit)
        self.node.abandon(
            "this process was forked from the worker and takes no part in its job: push, pull and clock in "
            "the worker itself, or start the process with subprocess or multiprocessing's spawn"
        )

    def _settle_parameters(self, *, politely: bool) -> None:
        """Give parameters the values still in flight, and memory of their own; backward sends nothing any more."""
        try:
            for optimizer in list(self._optimizers) if politely else ():
                optimizer.wait_for_values()
        finally:
            for optimizer in list(self._optimizers):
                optimizer.detach()
            for handle in list(self._given.values()):
                handle.remove()
            for weights in list(self._weights):
                weights.detach()

    # -- training ----------------------------------------------------------------------------------------------------

    def distributed(
        self, optimizer: torch.optim.Optimizer, *, model: nn.Module | None, settings: Settings, strategy: Strategy
    ) -> Distributed:
        """Distribute an optimizer by a strategy; see `paceline.distributed`."""
        self._tell_of_a_missing_adapter()
        settings = replace(settings, part=self.arrangement.part_of(model, settings.name))
        with self.tables.claiming(settings.name):
            former = [known for known in self._optimizers if known.shares_parameters(optimizer)]
            for known in former:
                known.wait_for_values()
            made = distribute(strategy, optimizer, model, settings, self)
            self.tables.require_taken(settings.name)
            for known in former:  # only one of two optimizers over the same parameters may step them
                known.retire(settings.name)
                self._optimizers.discard(known)
        self._has_distributed = True
        made.turns = self.node.clock, self.node.clock
        self._optimizers.add(made)
        if (earlier := self._given.pop(optimizer, None)) is not None:
            earlier.remove()
        self._given[optimizer] = refuse_own_steps(optimizer, made.stepping, settings.name)
        self._has_overlap = self._has_overlap or settings.overlap
        return made

    def _tell_of_a_missing_adapter(self) -> None:
        if self._optimizers or self.rank > 0 or self.size == 1 or (adapter := missing_adapter()) is None:
            return
        tell(
            f"{adapter} is in use without its adapter, so that its training loop takes each of the {self.size} workers "
            f"for the only one: all read all data, log and save. Import what it trains with from {ADAPTERS}.{adapter} "
            "(docs/frameworks.md)."
        )

    def sharding(self, seed: int) -> Sharding:
        """Return which shard of the data is this worker's."""
        replica, num_replicas = self.arrangement.share()
        return Sharding(
            replica,
            num_replicas,
            seed,
            on_samples=self._count_samples,
            on_missing=self._skip_batch,
            is_elastic=self.is_elastic,
            on_loaded=self.metrics.note_loaded,
            clock=lambda: self.node.clock,
            joins_batches=lambda: any(one.joins_batches for one in optimizers_of_loop(list(self._optimizers))),
        )

    def _count_samples(self, num_samples: int) -> None:
        self.num_samples += num_samples
        self.metrics.samples += num_samples

    def _skip_batch(self) -> None:
        """Finish the clocks of a step that only other workers take, one per optimizer, and take the optimizers' turns.

        Optimizers without a turn time come first, because their turn is collective. Only optimizers that were used
        with the last batch take part; a script may still hold earlier ones.
        """
        used = optimizers_of_loop(list(self._optimizers))
        with self.metrics.communicating():
            for optimizer in used:
                optimizer.send_without_batch()
                self.clock()
            if not used:
                self.clock()
            for optimizer in sorted(used, key=lambda one: (one.turn_s == 0.0, one.turn_s)):
                with optimizer.stepping:
                    optimizer.step_without_batch()


def _is_one(found: Sequence[tuple[str, int]]) -> bool:
    return sum(num for _, num in found) == 1


def _listed(found: Sequence[tuple[str, int]], one: str, several: str) -> str:
    """Return a list with counts as text.

    >>> _listed([("table 'a'", 3), ("table 'b'", 1)], "push", "pushes")
    "3 pushes of table 'a' and 1 push of table 'b'"
    """
    return " and ".join(f"{num} {one if num == 1 else several} of {of}" for of, num in found)

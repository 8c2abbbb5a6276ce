"""The user's handle of a dense table: pull, push, view, call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core.calls import checked_late, shortened
from paceline.core.consistency import Consistency
from paceline.core.effects import ReadDone
from paceline.core.partition import holders
from paceline.errors import PacelineError, UsageError
from paceline.update.dtypes import torch_dtype
from paceline.update.placement import spans
from paceline.update.rules import Number
from paceline.update.table import Hyper, TableSpec
from paceline.worker.cache import TableCache
from paceline.worker.dense import DenseClient, PendingRead
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.pushes import PendingPush, PushBuffer, PushOutcome, pending_future
from paceline.worker.table_calls import TableCalls
from paceline.worker.validation import as_count, as_hyper, as_indices, as_output, as_values

Array = Tensor | npt.NDArray[np.generic]


@dataclass(slots=True)
class Table:
    """A dense table of the parameter server: `pull` reads its values, `push` sends an update of them.

    Example:
        >>> import paceline
        >>> with paceline.connect() as ps:
        ...     w = ps.table("w", shape=(3,), update=paceline.update.SGD(lr=0.5))
        ...     _ = w.push([1.0, 0.0, 2.0])
        ...     _ = ps.clock()
        ...     w.pull()
        tensor([-0.5000,  0.0000, -1.0000])
    """

    spec: TableSpec
    shape: tuple[int, ...]
    client: DenseClient
    node: WorkerNode
    metrics: StepMetrics

    def __repr__(self) -> str:
        return f"Table({shortened(repr(self.name))}, {self.shape} of {self.spec.dtype}, {self.spec.consistency})"

    @property
    def name(self) -> str:
        """Name of the table, unique in the job."""
        return self.spec.name

    @property
    def consistency(self) -> Consistency:
        """When reads of this table wait, and what they see."""
        return Consistency.parse(self.spec.consistency)

    @checked_late
    def push(
        self,
        gradient: Array | Sequence[float],
        *,
        samples: float = 1.0,
        absent: tuple[int, ...] = (),
        hyper: tuple[Hyper, ...] = (),
    ) -> Future[PushOutcome]:
        """Send an update made during the current clock.

        Blocks only while earlier pushes of this table are still under way; the update is copied, so the caller may
        reuse its memory. Under bsp the future ends after all workers have finished the clock: do not wait for it
        before `clock()`.

        Args:
            gradient: a tensor, an array or a sequence of the table's shape; converted to its dtype.
            samples: how many samples it stands for, the weight under scale="samples".
            absent: indices of the parameters that have no gradient and are to be left alone.
            hyper: hyperparameters to use from now on, when they changed: one dict a group, with all of them.

        Returns:
            A future of whether the update was applied, or why it was refused.

        Raises:
            UsageError: wrong shape, or values that are not finite in a table with nonfinite="halt".
            PeerError: a server is gone.
        """
        with self.metrics.communicating():
            flat = self._flat(gradient)
            count = as_count(samples, self._here())
            absent, hyper = as_indices(absent, self._here(), "absent"), as_hyper(hyper, self._here())
            return self._watched(self.client.push(flat, count=count, absent=absent, hyper=hyper))

    @checked_late
    def pull(self, *, out: Array | None = None, refresh: bool = True, exact: bool = False) -> Tensor:
        """Return the values; blocks until they are as fresh as the table's consistency demands.

        Args:
            out: a tensor or array of the table's shape and dtype to fill instead of a new one.
            refresh: ask the servers even when the cached copy is fresh enough.
            exact: wait for every update of every earlier clock, whatever the bound. For evaluation and saving, so it
                is not counted among the reads of training.

        Raises:
            UsageError: `out` has another shape or dtype, or is not contiguous.
            DeadlineExceeded: the values did not become fresh enough in time.
            PeerError: a server is gone, or this worker was given up.
        """
        with self.metrics.communicating():
            values = self._new() if out is None else self._checked(out)
            self.read(_copying_to(values), refresh=refresh, exact=exact)
        return values

    @checked_late
    def view(self, *, refresh: bool = True) -> Tensor:
        """Return the values as the memory in which the server keeps them; blocks as `pull` does, and copies nothing.

        For tables opened with view=True. Under bsp the values stay until this worker has finished its clock; elsewhere
        updates of others show as they happen, also half done: values are never too old, but not of one moment. Treat
        it as read-only: what you write stays in this process, and is gone with the next `view` or `pull`. Once this
        worker has left, the values stay as they are.

        Raises:
            UsageError: the values are not mapped here (view=True was not given, or the carrier is not shm), or lie on
                several servers.
            DeadlineExceeded: the values did not become fresh enough in time.
            PeerError: a server is gone, or this worker was given up.
        """
        found: list[Tensor] = []

        def use(cache: TableCache) -> None:
            cache.forget_writes()
            values = cache.readable()
            if not cache.live or not values.lie_together(0, self.spec.numel):
                where = "on several servers" if cache.live else "not mapped in this process"
                raise UsageError(
                    f"table '{self.name}' has no view here: its values are {where}. Use pull(), or open it with "
                    "view=True in a job of one server over shm."
                )
            found.append(values.slice(0, self.spec.numel).view(self.shape))
            cache.lent = True

        self.read(use, refresh=refresh)
        return found[0]

    def read(self, use: Callable[[TableCache], None], *, refresh: bool = True, exact: bool = False) -> None:
        """Call `use` with this worker's cache of the table once it is fresh enough; blocks until then.

        For callers that read without a tensor of the whole table; otherwise as `pull`.
        """
        with self.metrics.communicating():
            outcome = self.client.read(use, refresh=refresh, exact=exact)
        if not exact:
            self.metrics.note_read(self.name, outcome)

    def start_read(self, *, refresh: bool = True, more: bool = False) -> PendingRead:
        """Start a read for `finish_read`; computing in between hides its latency. Does not block.

        `more`: see `DenseClient.start_read`.
        """
        with self.metrics.communicating():
            return self.client.start_read(refresh=refresh, more=more)

    def finish_read(self, started: PendingRead, use: Callable[[TableCache], None]) -> None:
        """Finish a read that `start_read` started; blocks as `read` does."""
        metrics = self.metrics
        with metrics.communication:
            outcome = self.client.wait_read(started, use)
        metrics.note_read(self.spec.name, outcome)

    def finish_pull(self, started: PendingRead) -> Tensor:
        """Finish a read that `start_read` started, and return the values; blocks as `pull` does."""
        values = self._new()
        self.finish_read(started, _copying_to(values))
        return values

    def push_reserved(
        self,
        buffer: PushBuffer,
        *,
        samples: float,
        absent: tuple[int, ...],
        hyper: tuple[Hyper, ...],
        expected: float = 0.0,
        ends_clock: bool = False,
    ) -> PendingPush:
        """Push from memory that `client.reserve` returned, without a copy; do not write to it any more."""
        spec, metrics = self.spec, self.metrics
        with metrics.communication:
            pushed = self.client.push_reserved(
                buffer, count=samples, absent=absent, hyper=hyper, expected=expected, ends_clock=ends_clock
            )
            pushed.when_refused(metrics.note_push(spec.name, spec.consistency, self.node.clock))
            return pushed

    @checked_late
    def pull_later(self, *, refresh: bool = True) -> Future[Tensor]:
        """Request the values without blocking; the future holds them. One such request a table at a time."""
        result = pending_future(Tensor)

        def finish(done: Future[ReadDone]) -> None:
            try:
                done.result()
                values = self._new()
                self.client.use_cache(lambda cache: cache.read_into(values.view(-1)))
            except (PacelineError, RuntimeError, MemoryError) as error:
                result.set_exception(error)  # of this worker, or of torch: else the future would never end
            else:
                result.set_result(values)

        self.client.start_read(refresh=refresh).future.add_done_callback(finish)
        return result

    @checked_late
    def call(
        self, function: str, *, exact: bool = True, **numbers: Number | tuple[Number, ...]
    ) -> list[dict[str, Tensor]]:
        """Run a function on every server that has a range of the values; return what each returned, by rank.

        Each server runs it once for this call, between two updates, as soon as it has every update of the clocks below
        this worker's (that of its own current clock may be missing); servers do not wait for each other. Under bsp the
        function sees exactly the clocks below. What it changes counts as an update of the current clock: the caller
        sees it from now on, others as soon as the consistency makes them wait for this clock, maybe earlier. Let one
        worker call functions that change values, with a `barrier` after it where others must see the change at once.

        Args:
            function: "summary", "top", "sample", "scale" or "soft_threshold", or the import path of one of your own,
                "package.module:function"; see `paceline.functions` for how it is called.
            exact: wait for the updates of earlier clocks; else it runs at once, on whatever is there.
            numbers: given to the function by name.

        Raises:
            Refused: it failed on a server, which goes on and keeps its values; another may have carried it out.
            UsageError: an argument is not a number.
            DeadlineExceeded: not all servers have answered in time.
            PeerError: a server is gone, or this worker was given up.

        Example:
            >>> import paceline
            >>> with paceline.connect() as ps:
            ...     w = ps.table("w", shape=(3,), update=paceline.update.Add(), init=2.0)
            ...     _ = w.call("scale", factor=0.5)
            ...     w.pull()
            tensor([1., 1., 1.])
        """
        with self.metrics.communicating():
            servers = holders(spans(self.spec, self.node.settings))
            called = TableCalls(self.node, self.name, servers).call(function, numbers, exact=exact)
            if called.num_changed:  # the cache here is older
                self.client.read(lambda _: None, refresh=True)
        return called.results

    def _watched(self, pushed: Future[PushOutcome]) -> Future[PushOutcome]:
        return self.metrics.watch_push(self.name, self.spec.consistency, self.node.clock, pushed)

    def _new(self) -> Tensor:
        return torch.empty(self.shape, dtype=torch_dtype(self.spec.dtype))

    def _checked(self, out: Array) -> Tensor:
        return as_output(out, self.shape, torch_dtype(self.spec.dtype), self._here())

    def _here(self) -> str:
        return f"table '{self.name}', worker {self.metrics.worker}, clock {self.node.clock}"

    def _flat(self, gradient: Array | Sequence[float]) -> Tensor:
        tensor = as_values(gradient, torch_dtype(self.spec.dtype), self._here(), "a push")
        if tuple(tensor.shape) != self.shape:
            raise UsageError(
                f"a push to table '{self.name}' has shape {tuple(tensor.shape)}, expected {self.shape}; "
                f"worker {self.metrics.worker}, clock {self.node.clock}"
            )
        return tensor.contiguous().view(-1)


def _copying_to(values: Tensor) -> Callable[[TableCache], None]:
    """Return a function that copies what is cached to `values`."""
    flat = values.view(-1)

    def use(cache: TableCache) -> None:
        cache.forget_writes()
        cache.read_into(flat)

    return use

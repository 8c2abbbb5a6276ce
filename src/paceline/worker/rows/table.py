"""The user's handle of a row table: pull and push rows by their ids, export, load, call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core.calls import checked_late, shortened
from paceline.core.consistency import Consistency
from paceline.errors import UsageError
from paceline.update.dtypes import torch_dtype
from paceline.update.filters.pipeline import FilterCounts
from paceline.update.filters.traffic import RowTraffic
from paceline.update.rows.layout import RowStatistics
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import Number
from paceline.update.summing import num_nonfinite
from paceline.update.table import Hyper
from paceline.wire.requests import MAX_PUSH_BYTES, most_rows
from paceline.wire.row_codec import ID_BYTES
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.pushes import NONFINITE_ADVICE, PushOutcome, finished_push
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.in_flight import RowReadInFlight
from paceline.worker.table_calls import RowFile, TableCalls
from paceline.worker.validation import MOST_SAMPLES, Ids, as_count, as_hyper, as_values, brief, row_ids

Rows = Tensor | npt.NDArray[np.generic] | Sequence[Sequence[float]]

_MOST_AHEAD = 1 << 32
_MOST_READS = 64  # into which one pull is split


@dataclass(slots=True)
class RowFuture:
    """Rows in flight; returned by `RowTable.pull_later`."""

    table: RowTable
    shape: tuple[int, ...]
    inverse: Tensor | None  # of each id, its place among the distinct ones; None where no id repeats
    reading: RowReadInFlight
    clock: int  # of the training step that uses them
    further: tuple[RowReadInFlight, ...] = ()  # of the ids beyond the limit of one read

    def __repr__(self) -> str:
        return f"RowFuture(ids {shortened(str(self.shape))} of {self.table!r}, clock {self.clock})"

    def result(self) -> Tensor:
        """Return the rows, `(*shape of the ids, width)`, in new memory each time.

        Blocks until they have arrived, and raises as `pull` does. Under bsp the rows are those of the clock for which
        they were requested, whenever this is called; elsewhere, if the table caches rows, they are the cached ones,
        with own pushes made since the request.
        """
        rows = self.table.finish(self)
        return rows.clone() if self.reading.holds(rows) else rows


@dataclass(slots=True)
class RowTable:
    """One row table of the parameter server: rows of `width` numbers under 64-bit ids that need not be listed.

    A row that was never pushed has the first values of the table, and reading it creates nothing.

    Example:
        >>> import paceline
        >>> with paceline.connect() as ps:
        ...     users = ps.table("users", rows=2, update=paceline.update.SGD(lr=0.5), consistency="ssp:2")
        ...     _ = users.push([7, -3, 7], [[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]])
        ...     _ = ps.clock()
        ...     users.pull([7, -3, 12345678901])
        tensor([[-1.0000, -1.0000],
                [ 0.0000, -0.5000],
                [ 0.0000,  0.0000]])
    """

    spec: RowTableSpec
    client: RowClient
    node: WorkerNode
    metrics: StepMetrics
    _most_a_read: int = field(init=False)

    def __post_init__(self) -> None:
        """Look up how many rows one read may have."""
        self._most_a_read = most_rows(self.client.state.down.full_width)

    def __repr__(self) -> str:
        spec = self.spec
        return f"RowTable({shortened(repr(self.name))}, rows of {spec.width} {spec.dtype}, {spec.consistency})"

    @property
    def name(self) -> str:
        """Name of the table, unique in the job."""
        return self.spec.name

    @property
    def width(self) -> int:
        """Numbers a row."""
        return self.spec.width

    @property
    def consistency(self) -> Consistency:
        """When reads of this table wait, and what they see."""
        return self.client.state.consistency

    @property
    def traffic(self) -> RowTraffic:
        """Bytes that this worker has sent and received for this table so far; repeats count."""
        return self.client.state.traffic

    @property
    def filtered(self) -> FilterCounts:
        """How many of the rows pushed so far filters have sent and kept back."""
        return self.client.state.pipeline.counts

    @checked_late
    def pull(self, ids: Ids, *, refresh: bool | None = None, exact: bool = False) -> Tensor:
        """Return the rows of these ids; blocks until they are as fresh as the table's consistency demands.

        Args:
            ids: integers, any shape; they may repeat, be negative, or never have been pushed.
            refresh: request even rows that are cached and fresh enough. The default, unless the table caches rows
                (cache=True, or essp, where servers deliver changes).
            exact: wait for every update of every earlier clock, whatever the bound. For evaluation and saving, so it
                is not counted among the reads of training. For a table under `paceline.managed` call `barrier` before:
                it makes every worker send what it holds back.

        Returns:
            `(*shape of ids, width)`, the table's dtype; memory of its own.

        Raises:
            UsageError: ids are not 64-bit integers.
            DeadlineExceeded: the rows did not become fresh enough in time.
            PeerError: a server is gone, or this worker was given up.
        """
        with torch.inference_mode(mode=False):  # see `pull_later`
            keys, most = self.keys(ids), _MOST_READS * self._most_a_read
            if keys.numel() <= most:
                return self.finish(self._start(keys, refresh=refresh, exact=exact, ahead=0))
            started = (self._start(part, refresh=refresh, exact=exact, ahead=0) for part in keys.view(-1).split(most))
            return torch.cat([self.finish(future) for future in started]).view(*keys.shape, self.width)

    @checked_late
    def pull_later(self, ids: Ids, *, refresh: bool | None = None, ahead: int = 0) -> RowFuture:
        """Request rows without blocking.

        Args:
            ids: as for `pull`.
            refresh: as for `pull`.
            ahead: request them for this many clocks from now: they will be as fresh as a read at that clock demands.
                With 1, request the rows of the next batch before this one is pushed; they contain own pushes of clocks
                in between where servers wait for those (bsp), and where this worker adds them itself (cache=True with
                addition or plain SGD).
        """
        self.require_ahead(ahead)
        # Other threads write to tensors made here, which torch forbids for those made in inference mode.
        with torch.inference_mode(mode=False):
            return self._start(self.keys(ids), refresh=refresh, exact=False, ahead=ahead)

    @checked_late
    def push(
        self, ids: Ids, rows: Rows, *, samples: float = 1.0, hyper: tuple[Hyper, ...] = (), expected: float = 0.0
    ) -> Future[PushOutcome]:
        """Send an update of some rows, made during the current clock.

        Blocks only while many earlier pushes of this table are in flight. Under bsp the future ends after all workers
        have finished the clock: do not wait for it before `clock()`.

        Args:
            ids: integers, any shape; the rows of an id that repeats are summed, in the order given.
            rows: `(*shape of ids, width)`; converted to the table's dtype.
            samples: how many samples they stand for, the weight under scale="samples".
            hyper: one dict of all hyperparameters, to use from now on, when they changed.
            expected: how many samples all pushes of the clock together are to stand for, where that is known: those
                that are missing count as zeros under scale="samples".

        Returns:
            A future of whether the update was applied, or why it was refused. What filters keep back of it is with this
            worker until a later push or `flush` sends it.

        Raises:
            UsageError: wrong ids or shape, values that are not finite in a table with nonfinite="halt", or a push that
                follows `flush` in the same clock, whose update is a mean.
            PeerError: a server is gone.
        """
        with self.metrics.communicating():
            keys = self.keys(ids)
            values = self._values(rows, keys)
            if self.spec.nonfinite == "zero":
                values = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            distinct, places = self.client.distinct.among(keys.view(-1))
            num_rows = distinct.numel()
            if places is not None:
                values = self.client.ops.sum_rows(values, places, num_rows)
            # Of sums: there are fewer, and none of NaN or infinity is finite.
            problem = self._objection(distinct, values)
            if problem:
                return self._watched(finished_push(PushOutcome(applied=False, reason=problem)))
            self._require_bounded(num_rows)
            if places is None:
                values = values.clone()  # the caller's memory may have other numbers when it is sent again
            is_usual = type(samples) is float and 0 <= samples < MOST_SAMPLES  # for which no place has to be told
            count = samples if is_usual else as_count(samples, self._here())
            hyper = as_hyper(hyper, self._here()) if hyper != () else ()
            expected = as_count(expected, self._here()) if expected != 0.0 else 0.0
            return self._watched(self.client.push(distinct, values, count=count, hyper=hyper, expected=expected))

    @checked_late
    def flush(self) -> Future[PushOutcome]:
        """Send all that filters have kept back, as an update of the current clock.

        Blocks only while many earlier pushes of this table are in flight, and for a budget. Under bsp and backup it
        takes a clock of its own, unless the table has scale="sum": finish the clock of the last push, have all workers
        call this, and finish that clock, too. It then counts as the last push of this worker: with as many samples, and
        also where nothing was kept back, as the mean is over all workers.

        Returns:
            A future as that of `push`.

        Raises:
            UsageError: this worker has pushed in the same clock, whose update is a mean.
            DeadlineExceeded: a budget has not let the rows go in time.
            PeerError: a server is gone, or this worker was given up.

        Example:
            >>> import paceline
            >>> with paceline.connect() as ps:
            ...     users = ps.table(
            ...         "users", rows=1, update=paceline.update.Add(), filters=(paceline.filters.TopK(0.5),)
            ...     )
            ...     _ = users.push([7, 8], [[1.0], [2.0]])
            ...     _ = ps.clock()
            ...     before = users.pull([7, 8]).tolist()
            ...     _ = users.flush()
            ...     _ = ps.clock()
            ...     before, users.pull([7, 8]).tolist()
            ([[0.0], [2.0]], [[1.0], [2.0]])
        """
        with self.metrics.communicating():
            return self.client.flush()

    # -- the table as a whole ----------------------------------------------------------------------------------------

    @checked_late
    def call(
        self, function: str, *, exact: bool = True, **numbers: Number | tuple[Number, ...]
    ) -> list[dict[str, Tensor]]:
        """Run a function on every server over its rows; return what each returned, by rank of server.

        When it runs, and which reads see what it changes: as for `Table.call`. Servers that deliver (essp) send the
        rows that it changed when this worker's clock has come. A function that fails half way has changed the rows
        that it had put back until then; the message says how many.

        Args:
            function: "summary", "top", "sample", "scale" or "soft_threshold", or the import path of one of your own,
                "package.module:function"; see `paceline.functions` for how it is called.
            exact: wait for the updates of earlier clocks; else it runs at once, on whatever is there.
            numbers: given to the function by name.

        Raises:
            Refused: it failed on a server, which goes on; another may have carried it out.
            UsageError: an argument is not a number.
            DeadlineExceeded: not all servers have answered in time.
            PeerError: a server is gone, or this worker was given up.

        Example:
            >>> import paceline
            >>> with paceline.connect() as ps:
            ...     users = ps.table("users", rows=2, update=paceline.update.Add())
            ...     _ = users.push([7, -3], [[3.0, 4.0], [0.0, 1.0]])
            ...     _ = ps.clock()
            ...     paceline.functions.merge(users.call("top", k=1), k=1)["ids"]
            tensor([7])
        """
        num_changed = 1  # as far as is known, if it fails
        try:
            with self.metrics.communicating():
                called = self._whole.call(function, numbers, exact=exact)
            num_changed = called.num_changed
        finally:
            if num_changed:
                self._forget()
        return called.results

    @checked_late
    def statistics(self, *, exact: bool = True) -> RowStatistics:
        """Return the statistics of all servers together; blocks for updates as `call` does."""
        return sum(self.server_statistics(exact=exact), RowStatistics())

    @checked_late
    def server_statistics(self, *, exact: bool = True) -> list[RowStatistics]:
        """Return the statistics of each server, by rank."""
        with self.metrics.communicating():
            return self._whole.statistics(exact=exact)

    def items(self, *, exact: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Return all rows as (ids (n,), values (n, width)), some thousands at a time, in no particular order.

        No more than one piece is held at a time. Under bsp the rows are those of this worker's clock, if it does not
        finish it meanwhile. Elsewhere others go on pushing: each row is of some moment between, and one that goes and
        comes back may be there twice or not at all. Meet at a `barrier` before and after to keep them from it.

        Args:
            exact: wait for the updates of all clocks before this worker's.
        """
        for piece in self._whole.pieces(values_only=True, exact=exact):
            yield piece.ids, piece.values

    @checked_late
    def export(self, path: str | Path) -> None:
        """Write all rows, with the state of the update rule and how they were used, to one file; blocks until it is.

        Called by one worker, whose updates of earlier clocks, and those of all others, are in it. Under bsp the file is
        the table at that clock; elsewhere meet at a `barrier` before and after, so that no worker pushes meanwhile. The
        file appears when it is complete. No process holds more than a few megabytes of it.

        Raises:
            UsageError: it cannot be written, or rows came or went meanwhile.
            DeadlineExceeded: a server has not answered in time.
            PeerError: a server is gone, or this worker was given up.

        Example:
            >>> import paceline, pathlib, tempfile
            >>> with paceline.connect() as ps, tempfile.TemporaryDirectory() as folder:
            ...     users = ps.table("users", rows=2, update=paceline.update.Add())
            ...     _ = users.push([7], [[1.0, 2.0]])
            ...     _ = ps.clock()
            ...     users.export(pathlib.Path(folder, "users.safetensors"))
            ...     _ = users.call("scale", factor=0.0)
            ...     users.load(pathlib.Path(folder, "users.safetensors"))
            ...     users.pull([7])
            tensor([[1., 2.]])
        """
        with self.metrics.communicating():
            RowFile(Path(path), self.spec, self._whole).save()

    @checked_late
    def load(self, path: str | Path) -> None:
        """Write the rows of a file that `export` made over those that are there; blocks until all servers have them.

        Called by one worker, of a table of the same name, width, dtype and rule, on any number of servers. The whole
        file is checked before anything changes. Rows that are not in it stay. It counts as an update of the current
        clock, as what `call` changes does. A table that is not read, as an update of it failed, is read again once all
        rows are loaded that the update may have changed.

        Raises:
            UsageError: there is no such file, it is damaged, or of another table.
            Refused: a server has no room for its rows; those before are loaded.
            DeadlineExceeded: a server has not answered in time.
            PeerError: a server is gone, or this worker was given up.
        """
        try:
            with self.metrics.communicating():
                RowFile(Path(path), self.spec, self._whole).load()
        finally:
            self._forget()

    @property
    def _whole(self) -> TableCalls:
        return TableCalls(self.node, self.name)

    def _forget(self) -> None:
        """Clear the cache: rows have changed otherwise than by a push."""
        self.client.clear_cache()

    def _watched(self, pushed: Future[PushOutcome]) -> Future[PushOutcome]:
        return self.metrics.watch_push(self.name, self.spec.consistency, self.node.clock, pushed)

    # -- reads and pushes --------------------------------------------------------------------------------------------

    def finish(self, future: RowFuture) -> Tensor:
        """Return the rows of a read that was started; they may share the memory of the read."""
        began = time.monotonic()
        with self.metrics.communicating():
            found = [self.client.wait_read(reading) for reading in (future.reading, *future.further)]
        rows, clocks = found[0] if len(found) == 1 else tuple(torch.cat(parts) for parts in zip(*found, strict=True))
        waited_s = time.monotonic() - began
        if future.clock >= 0:
            self.metrics.note_row_read(self.name, future.clock, self._contained(clocks), waited_s)
        values = rows if rows.shape[1] == self.width else rows[:, : self.width].contiguous()
        if future.inverse is not None:
            distinct, values = values, values.new_empty((future.inverse.numel(), self.width))
            self.client.ops.gather(distinct, future.inverse, values)
        return values if len(future.shape) == 1 else values.view(*future.shape, self.width)

    def _contained(self, clocks: Tensor) -> dict[int, int]:
        """Count rows by the clock below which they contain every update."""
        if not clocks.numel():
            return {}
        contained = self.client.state.deferral.contained
        lowest, highest = map(int, clocks.aminmax())
        reached = contained(lowest)
        if contained(highest) == reached:  # mostly, and found out faster than by counting
            return {reached: clocks.numel()}
        nums: dict[int, int] = {}
        for more, num in enumerate((clocks - lowest).bincount().tolist()):
            if num:
                nums[contained(lowest + more)] = nums.get(contained(lowest + more), 0) + num
        return nums

    def _start(self, keys: Tensor, *, refresh: bool | None, exact: bool, ahead: int) -> RowFuture:
        with self.metrics.communicating():
            distinct, places = self.client.distinct.among(keys.view(-1))
            num, most = distinct.numel(), self._most_a_read
            clock = self.node.clock + ahead
            # Pushes that other workers held back until a barrier are of clocks that cached rows need not contain.
            late = exact and self.client.has_budget
            asks = (late or not self.client.state.is_lazy) if refresh is None else refresh
            deferral = self.client.state.deferral
            needs = clock if exact else deferral.needs(clock) if asks else deferral.unasked(clock)
            if num > _MOST_READS * most:
                raise UsageError(
                    f"{self._here()}: {num} rows are asked for at once, expected at most {_MOST_READS * most}: "
                    "ask for some at a time."
                )
            parts = distinct.split(most) if num > most else (distinct,)
            reading, *further = [self.client.start_read(part, needs, refresh=asks) for part in parts]
        return RowFuture(self, tuple(keys.shape), places, reading, -1 if exact else clock, tuple(further))

    def require_ahead(self, ahead: object) -> None:
        """Raise UsageError unless rows can be requested for so many clocks from now."""
        if not isinstance(ahead, int) or not 0 <= ahead <= _MOST_AHEAD:
            raise UsageError(f"{self._here()}: ahead is {brief(ahead)}, expected a number of clocks, 0 or more.")

    def keys(self, ids: Ids) -> Tensor:
        """Return ids as a contiguous tensor of int64 in main memory; raises UsageError for invalid ids."""
        if (
            type(ids) is Tensor
            and ids.dtype is torch.int64
            and ids.is_cpu
            and ids.layout is torch.strided
            and not ids.is_nested
        ):
            return ids.contiguous()
        return row_ids(ids, self._here())

    def _values(self, rows: Rows, keys: Tensor) -> Tensor:
        """Return rows as a flat tensor of the table's dtype, one row an id."""
        dtype = torch_dtype(self.spec.dtype)
        if type(rows) is Tensor and rows.dtype is dtype and rows.is_cpu and rows.layout is torch.strided:
            values = rows.detach()
        else:
            values = as_values(rows, dtype, self._here(), "a push of rows")
        expected = (*keys.shape, self.width)
        if values.shape != expected and (keys.numel() or values.numel()):
            raise UsageError(
                f"{self._here()}: rows have shape {tuple(values.shape)}, expected {expected}, which is that of the ids "
                f"and {self.width} numbers a row."
            )
        return values.reshape(-1, self.width).contiguous()

    def _require_bounded(self, num_rows: int) -> None:
        most = MAX_PUSH_BYTES // (self.client.state.up.row_bytes + ID_BYTES)
        if num_rows > most:
            raise UsageError(
                f"{self._here()}: a push has {num_rows} rows, expected at most {most}: push some at a time."
            )

    def _here(self) -> str:
        return f"table '{self.name}', worker {self.metrics.worker}, clock {self.node.clock}"

    def _objection(self, ids: Tensor, rows: Tensor) -> str:
        """Return why rows are not sent, "" if they are; raises UsageError under nonfinite="halt"."""
        if self.spec.nonfinite in ("zero", "ignore"):
            return ""
        num_bad = num_nonfinite(rows.view(-1))
        if not num_bad:
            return ""
        problem = (
            f"{num_bad} of {rows.numel()} elements of a push to table '{self.name}' are NaN or infinite, first in the "
            f"row of id {int(ids[int((~rows.isfinite()).any(1).nonzero()[0])])}; it was not sent. {NONFINITE_ADVICE}"
        )
        if self.spec.nonfinite == "halt":
            raise UsageError(f"worker {self.metrics.worker}, clock {self.node.clock}: {problem}")
        return problem

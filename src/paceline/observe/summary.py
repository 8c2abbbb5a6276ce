"""Summary numbers of a run, as pure functions of its records."""

from __future__ import annotations

from collections import Counter
from heapq import merge
from operator import attrgetter
from statistics import fmean, median
from typing import TYPE_CHECKING

import msgspec

from paceline.observe.averages import mean
from paceline.observe.trace import NO_SERVER, MembershipRecord, MinClock, ReadRecord, RowRead, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.observe.runs import Run

CURVE_POINTS = 36
# A worker is slow if the slowest fifth of its clocks takes this many times the computation of the median worker.
SLOW_RATIO = 1.5


class WorkerSummary(msgspec.Struct, frozen=True):
    """Finished clocks, samples and time of one worker; `wait_s` is its time of waiting for others.

    `comm_s` is the time of its training loop in push, clock and pull, with the waiting.
    """

    worker: int
    num_clocks: int
    num_samples: int
    wait_s: float
    comm_s: float
    busy_s: float  # without the waiting
    slow_busy_s: float  # least computation in a clock of its slowest fifth

    @property
    def wait_share(self) -> float:
        """Return the share of its time that the worker waited for others."""
        return self.wait_s / ((self.wait_s + self.busy_s) or 1.0)

    @property
    def comm_share(self) -> float:
        """Return the share of its time that the worker's training loop spent on communication, waiting included."""
        return self.comm_s / ((self.wait_s + self.busy_s) or 1.0)


class CurvePoint(msgspec.Struct, frozen=True):
    """The mean loss of some consecutive steps, at their mean time (since the first step began) or clock."""

    at: float
    loss: float


class RunSummary(msgspec.Struct, frozen=True):
    """Summary of a run; None where the run has no such record, as a single process reads no tables."""

    seconds: float
    workers: tuple[WorkerSummary, ...]
    # Clock differential of reads (clock of values - clock of reader; -1 is the freshest) -> number of reads. Every row
    # of a read of rows counts.
    differentials: Mapping[int, int]
    # The same for reads of the newest complete values of the servers; None without reads.
    freshest: Mapping[int, int] | None
    # Pushes and steps that were not applied, counted by the workers.
    num_refused: int
    # Samples of data servers that were read again after the death of a worker, and samples that could not be decoded;
    # None if no worker has reported an epoch.
    num_again: int | None
    num_skipped: int | None
    # Largest difference between the clocks of two workers that were computing at the same time.
    max_lead: int | None
    test_loss: float | None
    test_accuracy: float | None
    loss_by_time: tuple[CurvePoint, ...]
    loss_by_clock: tuple[CurvePoint, ...]
    # A sentence for each process that failed or was killed.
    deaths: tuple[str, ...] = ()

    @property
    def num_reads(self) -> int:
        """Return the number of recorded reads."""
        return sum(self.differentials.values())

    @property
    def samples_per_s(self) -> float:
        """Return the samples of all workers per second of the run."""
        return sum(worker.num_samples for worker in self.workers) / self.seconds if self.seconds else 0.0

    @property
    def num_clocks(self) -> int:
        """Return the number of finished clocks of the furthest worker."""
        return max((worker.num_clocks for worker in self.workers), default=0)

    @property
    def comm_share_mean(self) -> float:
        """Return the mean of the workers' shares of communication."""
        return fmean(worker.comm_share for worker in self.workers) if self.workers else 0.0

    @property
    def wait_share_mean(self) -> float:
        """Return the mean of the workers' wait shares."""
        return fmean(worker.wait_share for worker in self.workers) if self.workers else 0.0

    @property
    def wait_share_max(self) -> float:
        """Return the wait share of the worker that waited most."""
        return max((worker.wait_share for worker in self.workers), default=0.0)

    @property
    def max_staleness(self) -> int | None:
        """Return the largest lag of a read behind its reader, in clocks; at most s under ssp(s)."""
        return -1 - min(self.differentials) if self.differentials else None

    @property
    def current_share(self) -> float | None:
        """Return the share of reads at differential -1: with every update of all earlier clocks."""
        return self.differentials.get(-1, 0) / self.num_reads if self.num_reads else None

    @property
    def freshest_share(self) -> float | None:
        """Return the share of reads of the newest complete values of the servers."""
        return sum(self.freshest.values()) / self.num_reads if self.freshest is not None and self.num_reads else None

    @property
    def slow_worker(self) -> int | None:
        """Return the worker that is clearly slower than the others, always or at times; None for none."""
        if len(self.workers) < 2:
            return None
        slowest = max(self.workers, key=attrgetter("slow_busy_s"))
        typical_s = median(worker.slow_busy_s for worker in self.workers)
        return slowest.worker if slowest.slow_busy_s >= SLOW_RATIO * typical_s else None


def summarize(run: Run) -> RunSummary:
    """Summarize a run; an empty run gives zeros and None."""
    start_t = min((step.t - step.step_s for step in run.steps), default=0.0)
    last = run.evaluations[-1] if run.evaluations else None
    return RunSummary(
        seconds=run.steps[-1].t - start_t if run.steps else 0.0,
        workers=_workers(run.steps),
        differentials=_differentials(run),
        freshest=_freshest(run),
        num_refused=sum(refusal.server == NO_SERVER for refusal in run.refusals),
        num_again=sum(epoch.again for epoch in run.epochs) if run.epochs else None,
        num_skipped=sum(epoch.skipped for epoch in run.epochs) if run.epochs else None,
        max_lead=_max_lead(run),
        test_loss=last.loss if last else None,
        test_accuracy=last.accuracy if last else None,
        loss_by_time=curve([(step.t - start_t, step.loss) for step in run.steps if step.loss is not None]),
        loss_by_clock=curve(_mean_by_clock(run.steps)),
        deaths=tuple(
            f"After {max(0.0, end.t - start_t):.1f} s {end.name} {end.happened}; {end.then}." for end in run.exits
        ),
    )


def _workers(steps: Sequence[Step]) -> tuple[WorkerSummary, ...]:
    by_worker: dict[int, list[Step]] = {}
    for step in steps:
        by_worker.setdefault(step.worker, []).append(step)
    return tuple(
        WorkerSummary(
            worker=worker,
            num_clocks=len({step.clock for step in own}),
            num_samples=sum(step.samples for step in own),
            wait_s=sum(step.wait_s for step in own),
            comm_s=sum(step.comm_s for step in own),
            busy_s=sum(step.step_s - step.wait_s for step in own),
            slow_busy_s=_slow_busy_s(own),
        )
        for worker, own in sorted(by_worker.items())
    )


def _slow_busy_s(steps: Sequence[Step]) -> float:
    busy_s = sorted(step.step_s - step.wait_s for step in steps)
    return busy_s[len(busy_s) * 4 // 5]


def _differentials(run: Run) -> dict[int, int]:
    """Count the reads, and the rows of reads of rows, by clock differential."""
    counts = Counter(read.differential for read in run.reads)
    for record in run.row_reads:
        counts.update(record.differentials)
    return dict(sorted(counts.items()))


def _freshest(run: Run) -> dict[int, int] | None:
    """Compare every read with the slowest clock that all servers of its table had reached by then."""
    if not run.reads and not run.row_reads:
        return None
    reached = {(record.table, record.server): 0 for record in run.min_clocks}
    freshest: Counter[int] = Counter()
    for record in merge(run.min_clocks, run.reads, run.row_reads, key=attrgetter("t")):
        if isinstance(record, MinClock):
            reached[record.table, record.server] = record.clock
            continue
        newest = min((clock for (table, _), clock in reached.items() if table == record.table), default=0)
        if isinstance(record, ReadRecord):
            freshest[record.differential] += record.value_clock >= newest
        else:
            for value_clock, num_rows in record.num_rows.items():
                freshest[value_clock - 1 - record.clock] += num_rows * (value_clock >= newest)
    return dict(sorted(freshest.items()))


def _max_lead(run: Run) -> int | None:
    """Follow which worker computes at which clock: from a worker's first read at a clock to its step, or its end."""
    computing: dict[int, int] = {}
    leads: list[int] = []
    gone = (record for record in run.memberships if record.event != "joined")
    for record in merge(run.steps, gone, run.reads, run.row_reads, key=attrgetter("t")):
        if isinstance(record, ReadRecord | RowRead):
            computing[record.worker] = record.clock
            leads.append(max(computing.values()) - min(computing.values()))
        elif isinstance(record, MembershipRecord) or computing.get(record.worker, -1) <= record.clock:
            computing.pop(record.worker, None)
    return max(leads, default=None)


def _mean_by_clock(steps: Iterable[Step]) -> list[tuple[float, float]]:
    """Average the loss over the workers that finished a clock; the first clock is drawn at 1."""
    losses: dict[int, list[float]] = {}
    for step in steps:
        if step.loss is not None:
            losses.setdefault(step.clock + 1, []).append(step.loss)
    return [(clock, mean(of_clock)) for clock, of_clock in sorted(losses.items())]


def curve(points: Sequence[tuple[float, float]]) -> tuple[CurvePoint, ...]:
    """Average consecutive points in at most CURVE_POINTS groups of equal size; single steps are too noisy to read."""
    size = max(1, -(-len(points) // CURVE_POINTS))
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return tuple(CurvePoint(mean(at for at, _ in group), mean(loss for _, loss in group)) for group in groups)

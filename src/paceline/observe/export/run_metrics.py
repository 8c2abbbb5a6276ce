"""The table of metrics of a run, and their values from its records, for whatever collects metrics.

Names, units and kinds follow the conventions of Prometheus. A label has few values: ranks, tables, and names that a
script reports under; each metric has at most `MOST_SERIES` series, and what goes beyond counts under `other`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from paceline.observe.trace import (
    NO_SERVER,
    AppliedRecord,
    Evaluated,
    Exit,
    MembershipRecord,
    MinClock,
    ReadRecord,
    Refusal,
    Reported,
    ReportedValues,
    RowRead,
    Sampled,
    Serving,
    Step,
)

if TYPE_CHECKING:
    from paceline.observe.trace import TraceRecord

MOST_SERIES: Final = 1024
OTHER: Final = "other"


class Metric(msgspec.Struct, frozen=True):
    """One metric.

    Args:
        name: with its unit; a counter's ends in `_total`.
        kind: what its values are.
        help: one line on it.
        labels: by which there are several series.
        buckets: upper bounds of a histogram's buckets, the last of which, infinity, is left out.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, told: str, *labels: str) -> Metric:
    return Metric(f"paceline_{name}_total", "counter", told, labels)


def _gauge(name: str, told: str, *labels: str) -> Metric:
    return Metric(f"paceline_{name}", "gauge", told, labels)


WORKER_STEPS: Final = _counter("worker_steps", "Clocks that a worker has finished.", "worker")
WORKER_CLOCK: Final = _gauge("worker_clock", "The clock that a worker is at.", "worker")
WORKER_SAMPLES: Final = _counter("worker_samples", "Samples that a worker has trained on.", "worker")
WORKER_STEP: Final = _counter("worker_step_seconds", "Time of finished clocks.", "worker")
WORKER_COMPUTE: Final = _counter("worker_compute_seconds", "Time of clocks in which the script computed.", "worker")
WORKER_DATA: Final = _counter("worker_data_seconds", "Time of clocks in which the loop waited for batches.", "worker")
WORKER_WAIT: Final = _counter("worker_wait_seconds", "Time of clocks in which values were waited for.", "worker")
WORKER_REFUSED: Final = _counter("worker_refused", "Pushes and steps that were not applied.", "worker")
STALENESS: Final = Metric(
    "paceline_read_staleness_clocks",
    "histogram",
    "How many clocks old values were when they were read.",
    ("table",),
    (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64),
)
REPORTED: Final = _gauge("reported_value", "The last value that a worker reported under a name.", "worker", "name")
SERVER_CLOCK: Final = _gauge("server_clock", "All clocks below are finished by all workers.", "server", "table")
SERVER_UPDATES: Final = _counter("server_updates", "Updates of a table.", "server", "table")
SERVER_UPDATE: Final = _counter("server_update_seconds", "Time that updates of a table took.", "server", "table")
SERVER_BUSY: Final = _counter("server_busy_seconds", "Time in which the serving thread worked.", "server")
SERVER_RECEIVED: Final = _counter("server_received_bytes", "Bytes that came to a server.", "server")
SERVER_SENT: Final = _counter("server_sent_bytes", "Bytes that a server sent.", "server")
SERVER_QUEUE: Final = _gauge("server_queue_frames", "Frames that wait for the serving thread.", "server")
SERVER_REPLICA_LAG: Final = _gauge("server_replica_lag_clocks", "Clocks by which a server's replica lags.", "server")
PROCESS_CPU: Final = _counter("process_cpu_seconds", "Processor time of all threads.", "role", "rank")
PROCESS_DELAYED: Final = _counter("process_delayed_seconds", "Time without a core, of its main thread.", "role", "rank")
PROCESS_GC: Final = _counter("process_gc_seconds", "Time in which the garbage collector stopped it.", "role", "rank")
PROCESS_FAULTS: Final = _counter("process_page_faults", "Pages that were read from a disk.", "role", "rank")
PROCESS_RESENT: Final = _counter("process_resent_segments", "Segments that TCP has sent again.", "role", "rank")
MEMBERSHIP: Final = _counter("membership_changes", "Workers that joined, left or died, as server 0 saw.", "event")
EXITS: Final = _counter("process_exits", "Processes that ended before they were to.", "role")

METRICS: Final = (
    *(WORKER_STEPS, WORKER_CLOCK, WORKER_SAMPLES, WORKER_STEP, WORKER_COMPUTE, WORKER_DATA, WORKER_WAIT),
    *(WORKER_REFUSED, STALENESS, REPORTED),
    *(SERVER_CLOCK, SERVER_UPDATES, SERVER_UPDATE, SERVER_BUSY, SERVER_RECEIVED, SERVER_SENT, SERVER_QUEUE),
    SERVER_REPLICA_LAG,
    *(PROCESS_CPU, PROCESS_DELAYED, PROCESS_GC, PROCESS_FAULTS, PROCESS_RESENT, MEMBERSHIP, EXITS),
)


@dataclass(slots=True)
class BucketCounts:
    """Counts of observed values by bucket, each without those below it, and their sum."""

    counts: list[int]
    total: float = 0.0


Series = dict[tuple[str, ...], float]


@dataclass(slots=True)
class RunMetrics:
    """The values of all metrics of a run. Any thread may add, and any other one collect."""

    _values: dict[str, Series] = field(default_factory=lambda: {metric.name: {} for metric in METRICS})
    _staleness: dict[tuple[str, ...], BucketCounts] = field(default_factory=dict[tuple[str, ...], BucketCounts])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, record: TraceRecord) -> None:
        """Take in a record; kinds without a metric are left out."""
        with self._lock:
            self._add(record)

    def collect(self) -> list[tuple[Metric, Series]]:
        """Return all metrics but histograms, with their series by values of labels."""
        with self._lock:
            return [(metric, dict(self._values[metric.name])) for metric in METRICS if metric.kind != "histogram"]

    def collect_staleness(self) -> dict[tuple[str, ...], BucketCounts]:
        """Return the series of `STALENESS`."""
        with self._lock:
            return {labels: BucketCounts(list(seen.counts), seen.total) for labels, seen in self._staleness.items()}

    def _add(self, record: TraceRecord) -> None:
        match record:
            case Step():
                self._add_step(record)
            case ReadRecord():
                self._observe(record.table, record.staleness, 1)
            case RowRead():
                for value_clock, num in record.num_rows.items():
                    self._observe(record.table, record.clock - value_clock, num)
            case Reported(_, worker, _, loss):
                self._set(REPORTED, float("nan" if loss is None else loss), worker, "loss")
            case ReportedValues(_, worker, _, values):
                for name, value in values.items():
                    self._set(REPORTED, float(value), worker, name)
            case Evaluated(_, worker, _, loss, accuracy):
                self._set(REPORTED, float("nan" if loss is None else loss), worker, "evaluation/loss")
                self._set(REPORTED, float("nan" if accuracy is None else accuracy), worker, "evaluation/accuracy")
            case Refusal(server=server, worker=worker) if server == NO_SERVER:
                self._increase(WORKER_REFUSED, 1, worker)
            case MinClock(_, server, table, clock):
                self._set(SERVER_CLOCK, clock, server, table)
            case AppliedRecord(_, server, table):
                self._increase(SERVER_UPDATES, 1, server, table)
                self._increase(SERVER_UPDATE, record.took_s, server, table)
            case Serving():
                self._set(SERVER_BUSY, record.busy_s, record.server)
                self._set(SERVER_RECEIVED, record.received_bytes, record.server)
                self._set(SERVER_SENT, record.sent_bytes, record.server)
                self._set(SERVER_QUEUE, record.num_waiting, record.server)
                if record.num_behind is not None:
                    self._set(SERVER_REPLICA_LAG, record.num_behind, record.server)
            case Sampled():
                self._add_sample(record)
            case MembershipRecord(server=0):
                self._increase(MEMBERSHIP, 1, record.event)
            case Exit():
                self._increase(EXITS, 1, record.role)
            case _:
                pass

    def _add_step(self, step: Step) -> None:
        self._increase(WORKER_STEPS, 1, step.worker)
        self._set(WORKER_CLOCK, step.clock + 1, step.worker)
        self._increase(WORKER_SAMPLES, step.samples, step.worker)
        self._increase(WORKER_STEP, step.step_s, step.worker)
        self._increase(WORKER_COMPUTE, step.own_s, step.worker)
        self._increase(WORKER_DATA, step.load_s, step.worker)
        self._increase(WORKER_WAIT, step.wait_s, step.worker)
        if step.loss is not None:
            self._set(REPORTED, step.loss, step.worker, "loss")

    def _add_sample(self, sample: Sampled) -> None:
        self._set(PROCESS_CPU, sample.cpu_s, sample.role, sample.rank)
        self._set(PROCESS_DELAYED, sample.delayed_s, sample.role, sample.rank)
        self._set(PROCESS_GC, sample.gc_s, sample.role, sample.rank)
        self._set(PROCESS_FAULTS, sample.num_faults, sample.role, sample.rank)
        self._set(PROCESS_RESENT, sample.num_resent, sample.role, sample.rank)

    def _set(self, metric: Metric, value: float, *labels: str | int) -> None:
        series = self._values[metric.name]
        series[_bounded(series.keys(), labels)] = value

    def _increase(self, metric: Metric, by: float, *labels: str | int) -> None:
        series = self._values[metric.name]
        key = _bounded(series.keys(), labels)
        series[key] = series.get(key, 0.0) + by

    def _observe(self, table: str, staleness: int, num: int) -> None:
        key = _bounded(self._staleness.keys(), (table,))
        seen = self._staleness.setdefault(key, BucketCounts([0] * (len(STALENESS.buckets) + 1)))
        bounds = STALENESS.buckets
        seen.counts[next((at for at, most in enumerate(bounds) if staleness <= most), len(bounds))] += num
        seen.total += staleness * num


def _bounded(known: Collection[tuple[str, ...]], labels: Sequence[str | int]) -> tuple[str, ...]:
    """Return labels as texts, or `other` for each where there are too many series already."""
    key = tuple(map(str, labels))
    return key if key in known or len(known) < MOST_SERIES else (OTHER,) * len(key)

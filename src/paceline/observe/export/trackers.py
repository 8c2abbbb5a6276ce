"""Trackers of experiments: what each is called, what it needs, and how points get there.

The libraries are those of others. Each is imported when it is used, in a process that does nothing else, and may fail
or hang there: see `feed.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.observe.export.points import Point
    from paceline.observe.export.run_metrics import Metric, RunMetrics

_CLOCK: Final = "clock"
_URL: Final = "URL"
_SCHEMES: Final = ("http://", "https://")
_METRICS_A_BATCH: Final = 1000  # that MLflow takes
_MOST_QUEUED: Final = 1000  # events for the thread that writes TensorBoard's file


class ExportedRun(msgspec.Struct, frozen=True):
    """What trackers are told of a run.

    Args:
        name: of the run.
        settings: such as the number of workers, by name.
        unix_offset_s: what is added to the times of records to have seconds since 1970.
        metrics: of the run, which go on changing.
    """

    name: str
    settings: Mapping[str, str]
    unix_offset_s: float
    metrics: RunMetrics


class Tracker(Protocol):
    """Takes points. Any call may block, and raise anything."""

    def write(self, points: Sequence[Point]) -> None:
        """Take points, in the order in which they were made."""
        ...

    def close(self) -> None:
        """Have all that was taken where it belongs."""
        ...


class TrackerKind(msgspec.Struct, frozen=True):
    """A kind of tracker.

    Args:
        module: that it needs.
        extra: of this package, which installs it.
        target: what is named after the colon.
        open: returns one for a target, which is empty where none is named.
    """

    module: str
    extra: str
    target: str
    open: Callable[[str, ExportedRun], Tracker]


class TrackerChoice(msgspec.Struct, frozen=True):
    """A tracker that was asked for: the name of its kind, and a target or an empty text."""

    kind: str
    target: str = ""

    def open(self, run: ExportedRun) -> Tracker:
        """Return the tracker; raises whatever its library does."""
        return TRACKERS[self.kind].open(self.target, run)


def parse_trackers(text: str) -> tuple[TrackerChoice, ...]:
    """Read a list of trackers, and check that their libraries are here; imports none.

    Raises UsageError for others, one that is named twice, a URL that is none, and one whose library is missing.

    >>> parse_trackers("tensorboard:curves, tensorboard")
    Traceback (most recent call last):
    paceline.errors.UsageError: --log names tensorboard twice: name it once
    """
    choices: list[TrackerChoice] = []
    for part in text.split(","):
        kind, _, target = part.strip().partition(":")
        known = TRACKERS.get(kind)
        if known is None:
            takes = ", ".join(f"{name}[:{each.target}]" for name, each in TRACKERS.items())
            raise UsageError(f"--log names {kind[:40]!r}, expected one or several of {takes}, joined by commas")
        if kind in {choice.kind for choice in choices}:
            raise UsageError(f"--log names {kind} twice: name it once")
        if known.target == _URL and target and not target.startswith(_SCHEMES):
            raise UsageError(
                f"--log {kind} names {target[:80]!r}, expected the URL of a collector, such as "
                "http://localhost:4318/v1/metrics"
            )
        if not is_there(known.module):
            raise UsageError(
                f"--log {kind} needs {known.module}, which is not installed here: pip install 'paceline[{known.extra}]'"
            )
        choices.append(TrackerChoice(kind, target))
    return tuple(choices)


def is_there(module: str) -> bool:
    """Return whether a module is installed; imports no more than the packages that it is in."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it is in
        return False


class TensorBoard:
    """Writes a file of events into a folder, with the writer that torch's own `SummaryWriter` uses.

    All values of a clock are one event, which takes a tenth of the processor time of an event for each.
    """

    def __init__(self, folder: str, run: ExportedRun) -> None:
        writing = _library("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = writing.EventFileWriter(folder or f"runs/{run.name}", max_queue_size=_MOST_QUEUED)
        self._event: Any = _library("tensorboard.compat.proto.event_pb2").Event
        self._offset_s = run.unix_offset_s

    def write(self, points: Sequence[Point]) -> None:
        """See `Tracker.write`."""
        for clock, at_clock in groupby(points, attrgetter(_CLOCK)):
            event = self._event(step=clock)
            for point in at_clock:
                event.wall_time = point.t + self._offset_s
                event.summary.value.add(tag=point.name, simple_value=point.value)
            self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to a run of Weights & Biases; `WANDB_MODE=offline` and its other variables hold."""

    def __init__(self, project: str, run: ExportedRun) -> None:
        wandb = _library("wandb")
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        self._run: Any = wandb.init(
            project=project or None, name=run.name, config=dict(run.settings), settings=settings
        )
        # Points of several workers do not come in the order of clocks, as its own steps would have to.
        self._run.define_metric(_CLOCK)
        self._run.define_metric("*", step_metric=_CLOCK)

    def write(self, points: Sequence[Point]) -> None:
        """See `Tracker.write`."""
        for clock, values in _by_clock(points):
            self._run.log({_CLOCK: clock, **values})

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()


class MLflow:
    """Logs to a run of MLflow; `MLFLOW_TRACKING_URI` says where, as for its other clients."""

    def __init__(self, experiment: str, run: ExportedRun) -> None:
        entities = _library("mlflow.entities")
        self._client: Any = _library("mlflow").MlflowClient()
        self._make: Any = entities.Metric
        self._offset_s = run.unix_offset_s
        name = experiment or "paceline"
        found = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if found is None else found.experiment_id
        self._id: str = self._client.create_run(number, run_name=run.name).info.run_id
        settings = [entities.Param(key, value) for key, value in run.settings.items()]
        self._client.log_batch(self._id, params=settings)

    def write(self, points: Sequence[Point]) -> None:
        """See `Tracker.write`."""
        for begin in range(0, len(points), _METRICS_A_BATCH):
            batch = [
                self._make(point.name, point.value, int(1000 * (point.t + self._offset_s)), point.clock)
                for point in points[begin : begin + _METRICS_A_BATCH]
            ]
            self._client.log_batch(self._id, metrics=batch)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._client.set_terminated(self._id)


class Trackio:
    """Logs to a project of Trackio, on this machine; `TRACKIO_DIR` says where."""

    def __init__(self, project: str, run: ExportedRun) -> None:
        self._run: Any = _library("trackio").init(
            project=project or "paceline", name=run.name, config=dict(run.settings), auto_log_cpu=False
        )

    def write(self, points: Sequence[Point]) -> None:
        """See `Tracker.write`."""
        for clock, values in _by_clock(points):
            self._run.log(values, step=clock)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()


class OpenTelemetry:
    """Sends the metrics that Prometheus would scrape to a collector, every ten seconds, by OTLP over HTTP.

    `OTEL_EXPORTER_OTLP_ENDPOINT` and its other variables hold; a target is the URL of the collector's metrics.
    """

    _INTERVAL_S: Final = 10.0

    def __init__(self, endpoint: str, run: ExportedRun) -> None:
        otlp = _library("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        sdk, resources = _library("opentelemetry.sdk.metrics"), _library("opentelemetry.sdk.resources")
        sender = otlp.OTLPMetricExporter(endpoint=endpoint or None)
        reader = sdk.export.PeriodicExportingMetricReader(sender, export_interval_millis=1000 * self._INTERVAL_S)
        settings = {f"paceline.{key}": value for key, value in run.settings.items()}
        about = resources.Resource.create({"service.name": "paceline", "service.instance.id": run.name, **settings})
        self._provider: Any = sdk.MeterProvider([reader], about)
        meter, self._metrics = self._provider.get_meter("paceline"), run.metrics
        self._observation = _library("opentelemetry.metrics").Observation
        for metric, _ in run.metrics.collect():
            name = metric.name.removesuffix("_total").replace("_", ".", 1)
            make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
            make(name, [partial(self._observe, metric)], description=metric.help)

    def _observe(self, metric: Metric, _options: object) -> list[Any]:
        return [
            self._observation(value, dict(zip(metric.labels, labels, strict=True)))
            for labels, value in dict(self._metrics.collect())[metric].items()
        ]

    def write(self, points: Sequence[Point]) -> None:
        """Do nothing: it reads the metrics by itself."""

    def close(self) -> None:
        """See `Tracker.close`."""
        self._provider.shutdown()


def _library(name: str) -> Any:  # noqa: ANN401 - of others, which may be missing
    return import_module(name)


def _by_clock(points: Iterable[Point]) -> Iterable[tuple[int, dict[str, float]]]:
    """Return the values of each clock by name; of two of one name, the later one in a call of its own."""
    for clock, at_clock in groupby(points, attrgetter(_CLOCK)):
        values: dict[str, float] = {}
        for point in at_clock:
            if point.name in values:
                yield clock, values
                values = {}
            values[point.name] = point.value
        yield clock, values


TRACKERS: Final[Mapping[str, TrackerKind]] = {
    "tensorboard": TrackerKind("tensorboard", "tensorboard", "DIR", TensorBoard),
    "wandb": TrackerKind("wandb", "wandb", "PROJECT", WeightsAndBiases),
    "mlflow": TrackerKind("mlflow", "mlflow", "EXPERIMENT", MLflow),
    "trackio": TrackerKind("trackio", "trackio", "PROJECT", Trackio),
    "otlp": TrackerKind("opentelemetry.exporter.otlp.proto.http", "otlp", _URL, OpenTelemetry),
}


def unix_offset_s() -> float:
    """Return what is added to monotonic times of this machine to have seconds since 1970."""
    return time.time() - time.monotonic()

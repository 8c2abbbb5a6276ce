"""A tracker that fails, hangs or is slow is told of once, and neither the others nor the run notice it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.observe.export import feed, trackers
from paceline.observe.export.feed import RunExport, TrackerFeed
from paceline.observe.export.points import Point
from paceline.observe.export.run_metrics import RunMetrics
from paceline.observe.export.trackers import ExportedRun, TrackerChoice, TrackerKind, parse_trackers
from paceline.observe.trace import Step, Trace, trace_path

PATIENCE_S = 60.0
POINT = Point("loss", 3, 10.0, 0.5)


@dataclass
class FakeTracker:
    """What the contract of a tracker allows: to block, and to raise anything."""

    before: Callable[[], object] = lambda: None
    written: list[Point] = field(default_factory=list)
    is_closed: bool = False

    def open(self, _target: str, _run: ExportedRun) -> FakeTracker:
        return self

    def write(self, points: Sequence[Point]) -> None:
        self.before()
        self.written += points

    def close(self) -> None:
        self.is_closed = True


def fed(
    fake: FakeTracker, monkeypatch: pytest.MonkeyPatch, told: list[str], name: str = "fake", *, waits: bool = False
) -> TrackerFeed:
    monkeypatch.setitem(trackers.TRACKERS, name, TrackerKind("json", "fake", "NAME", fake.open))  # type: ignore[arg-type]
    run = ExportedRun("run", {}, 0.0, RunMetrics())
    return TrackerFeed(TrackerChoice(name), run, told.append, waits=waits)


def test_what_is_given_is_written_and_then_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    fake = FakeTracker()
    one = fed(fake, monkeypatch, told)
    one.give([POINT] * 10_000)  # of several batches
    one.end()
    one.wait_closed(PATIENCE_S)
    assert (len(fake.written), fake.is_closed, told) == (10_000, True, [])


def test_a_tracker_that_fails_is_told_of_once_and_gets_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def fail() -> None:
        raise KeyError("no\nnetwork")

    one = fed(FakeTracker(fail), monkeypatch, told)
    one.give([POINT])
    one.wait_closed(PATIENCE_S)  # its thread has ended by itself
    for _ in range(100):
        one.give([POINT])
    one.end()
    one.wait_closed(PATIENCE_S)
    assert told == ["fake has failed and gets nothing more; the run goes on: KeyError: 'no\\nnetwork'"]


def test_a_tracker_that_hangs_misses_points_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    hangs, released = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        released.wait(PATIENCE_S)

    fake = FakeTracker(hang)
    one = fed(fake, monkeypatch, told)
    one.give([POINT])
    assert hangs.wait(PATIENCE_S)
    for _ in range(100):  # returns at once, be the queue full
        one.give([POINT])
    one.end()
    one.wait_closed(0.0)
    assert told == [
        "fake is slower than the run and misses points",
        "fake did not end within 60 s: what the run reported last is missing there",
    ]
    released.set()
    one.wait_closed(PATIENCE_S)
    assert fake.is_closed
    assert "misses" in told[-1]


def test_a_slow_tracker_is_waited_for_once_a_run_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_MOST_POINTS", 1)
    told, released = list[str](), threading.Event()
    fake = FakeTracker(lambda: released.wait(PATIENCE_S))
    one = fed(fake, monkeypatch, told, waits=True)
    giving = threading.Thread(target=one.give, args=([POINT] * 200,), daemon=True)  # more batches than may wait
    giving.start()
    giving.join(0.2)
    assert giving.is_alive()
    released.set()
    giving.join(PATIENCE_S)
    one.end()
    one.wait_closed(PATIENCE_S)
    assert (len(fake.written), told, one.has_all) == (200, [], True)


def test_a_tracker_that_fails_is_not_waited_for_and_lacks_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_MOST_POINTS", 1)

    def fail() -> None:
        raise OSError("full")

    told = list[str]()
    one = fed(FakeTracker(fail), monkeypatch, told, waits=True)
    one.give([POINT] * 200)
    one.end()
    one.wait_closed(PATIENCE_S)
    assert (told, one.has_all) == (["fake has failed and gets nothing more: OSError: full"], False)


def test_a_run_is_given_to_each_tracker_whatever_the_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    good = FakeTracker()
    released = threading.Event()
    monkeypatch.setattr(feed, "CLOSE_TIMEOUT_S", 0.5)
    hung = fed(FakeTracker(lambda: released.wait(PATIENCE_S)), monkeypatch, told, "hung")
    export = RunExport(tmp_path / "trace", RunMetrics(), [hung, fed(good, monkeypatch, told, "good")])
    with Trace(trace_path(tmp_path, "worker", 0)) as trace:
        for clock in range(3):
            trace.record(Step(1.0 + clock, 0, clock, 8, 0.5, 0.0, 1.0))
    export.feeds.reverse()  # the good one is waited for first
    export.close()
    released.set()
    assert [(point.name, point.clock) for point in good.written if point.name == "loss"] == [
        ("loss", clock) for clock in range(3)
    ]
    assert told == ["hung did not end within 0.5 s: what the run reported last is missing there"]
    hung.wait_closed(PATIENCE_S)


def test_choices_are_checked_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--log names 'nothing', expected one or several of tensorboard\[:DIR\]"):
        parse_trackers("nothing")
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"--log wandb needs wandb, .*: pip install 'paceline\[wandb\]'"):
        parse_trackers("wandb:project")
    with pytest.raises(UsageError, match="--log otlp names 'ftp://x', expected the URL of a collector"):
        parse_trackers("otlp:ftp://x")
    monkeypatch.setattr(trackers, "find_spec", lambda _: object())
    url = "http://localhost:4318/v1/metrics"
    assert parse_trackers(f"tensorboard, otlp:{url}") == (TrackerChoice("tensorboard"), TrackerChoice("otlp", url))

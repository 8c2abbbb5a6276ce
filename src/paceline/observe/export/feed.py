"""Gives a run's points to trackers, each in a thread of its own, and its metrics to whatever scrapes them.

It reads what the processes of the run write down anyway. A tracker that fails is left out from then on, one that is too
slow misses points, one that hangs is not waited for; each is told once, and the others and the run go on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from paceline.notices import tell
from paceline.observe.export.points import PointMaker
from paceline.observe.runs import ALL_TRACES, TraceFollower

if TYPE_CHECKING:
    from paceline.observe.export.points import Point
    from paceline.observe.export.run_metrics import RunMetrics
    from paceline.observe.export.trackers import ExportedRun, Tracker, TrackerChoice

_MOST_POINTS: Final = 4096  # of a batch
_MOST_BATCHES: Final = 64  # that wait for a tracker
_LOOK_S: Final = 0.05
CLOSE_TIMEOUT_S: Final = 60.0  # for all trackers together


@final
class TrackerFeed:
    """One tracker and its thread."""

    def __init__(
        self, choice: TrackerChoice, run: ExportedRun, tell: Callable[[str], None] = tell, *, waits: bool = False
    ) -> None:
        """Open it in its thread. With `waits`, what gives it points waits for it, as of a run that is over."""
        self._choice = choice
        self._run = run
        self._tell = tell
        self._waits = waits
        self._batches: queue.Queue[list[Point] | None] = queue.Queue(_MOST_BATCHES)
        self._num_missed = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name=f"paceline-{choice.kind}", daemon=True)
        self._thread.start()

    @property
    def has_all(self) -> bool:
        """Whether it has closed, with all that it was given."""
        return not (self._has_failed or self._num_missed or self._thread.is_alive())

    def give(self, points: Sequence[Point]) -> None:
        """Have points written; leaves out what the tracker is too slow for. Does not block, unless it waits for it."""
        for begin in range(0, len(points), _MOST_POINTS):
            batch = list(points[begin : begin + _MOST_POINTS])
            self._wait_room()
            try:
                self._batches.put_nowait(batch)
            except queue.Full:
                if not self._num_missed and not self._has_failed:
                    self._tell(f"{self._choice.kind} is slower than the run and misses points")
                self._num_missed += len(batch)

    def end(self) -> None:
        """Have it closed once it has written what it was given; does not block, unless it waits for it."""
        self._wait_room()
        try:
            self._batches.put_nowait(None)
        except queue.Full:
            self._batches.get_nowait()
            self._num_missed += _MOST_POINTS
            self._batches.put_nowait(None)

    def wait_closed(self, timeout_s: float) -> None:
        """Block until it has closed, at most so long, and tell what is missing then.

        What waits for it goes on to while it takes something; `has_all` says afterwards whether anything is missing.
        """
        self._thread.join(timeout_s)
        num_left = _MOST_BATCHES + 1
        while self._waits and self._thread.is_alive() and self._batches.qsize() < num_left:
            num_left = self._batches.qsize()
            self._thread.join(CLOSE_TIMEOUT_S)
        name = self._choice.kind
        if self._thread.is_alive():
            self._tell(f"{name} did not end within {CLOSE_TIMEOUT_S:g} s: what the run reported last is missing there")
        elif self._num_missed and not self._has_failed:
            self._tell(f"{name} misses {self._num_missed} points, which came faster than it takes them")

    def _wait_room(self) -> None:
        """Block until there is room for a batch, where it waits for the tracker, unless this has failed or hangs."""
        give_up_s = time.monotonic() + CLOSE_TIMEOUT_S
        while self._waits and self._batches.full() and self._thread.is_alive() and time.monotonic() < give_up_s:
            self._thread.join(_LOOK_S)

    def _work(self) -> None:
        tracker: Tracker | None = None
        try:
            tracker = self._choice.open(self._run)
            while (batch := self._batches.get()) is not None:
                tracker.write(batch)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - a library of others may raise anything
            self._has_failed = True
            reason = " ".join(str(error).split())[:300]
            problem = f"{type(error).__name__}: {reason}"
            goes_on = "" if self._waits else "; the run goes on"
            self._tell(f"{self._choice.kind} has failed and gets nothing more{goes_on}: {problem}")


@dataclass(slots=True)
class RunExport:
    """Follows the records of a run, and feeds metrics and trackers; `poll` it now and then, then `close`.

    export = RunExport(run_folder / "trace", metrics)
    export.feeds.append(TrackerFeed(choice, run))
    while is_running():
        export.poll()
    export.close()
    """

    trace_folder: Path
    metrics: RunMetrics
    feeds: list[TrackerFeed] = field(default_factory=list[TrackerFeed])
    _points: PointMaker = field(default_factory=PointMaker)
    _follower: TraceFollower = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the first record that is there."""
        self._follower = TraceFollower(self.trace_folder, ALL_TRACES)

    def poll(self, *, is_over: bool = False) -> None:
        """Take in new records; the last ones, if the run `is_over`. Raises OSError, and UsageError for no records."""
        points: list[Point] = []
        for record in sorted(self._follower.poll(), key=lambda record: record.t):
            self.metrics.add(record)
            points += self._points.add(record)
        points += self._points.pop_merged(is_over=is_over)
        if points:
            for feed in self.feeds:
                feed.give(points)

    def close(self) -> bool:
        """Take in what is left, and let trackers end; return whether they have all.

        Blocks for at most `CLOSE_TIMEOUT_S`, unless trackers are waited for.
        """
        self.poll(is_over=True)
        for feed in self.feeds:
            feed.end()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for feed in self.feeds:
            feed.wait_closed(max(0.0, deadline - time.monotonic()))
        return all(feed.has_all for feed in self.feeds)

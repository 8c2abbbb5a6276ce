"""What one clock of a worker cost: samples, loss, time, and the share of it spent waiting."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paceline.node.worker import ReadOutcome
from paceline.observe import trace as records
from paceline.observe.trace import Trace


@dataclass(slots=True)
class Meter:
    """Collects what happens during a clock and records it when the clock is finished."""

    trace: Trace
    worker: int
    samples: int = 0
    loss: float | None = None
    wait_s: float = 0.0
    _since: float = field(default_factory=time.monotonic)
    _has_finished: bool = False

    def begin(self) -> None:
        """Let the first clock begin now: opening tables and meeting before it are no part of the training."""
        if not self._has_finished:
            self.wait_s, self._since = 0.0, time.monotonic()

    def note_read(self, table: str, outcome: ReadOutcome) -> None:
        """Record a read, and count what it waited."""
        self.wait_s += outcome.waited_s
        source = outcome.source
        if source != "cache" and source != "delivery":
            source = "fetch"
        read = records.Read(
            time.monotonic(), self.worker, table, outcome.clock, outcome.value_clock, outcome.waited_s, source
        )
        self.trace.record(read)

    def finish_clock(self, clock: int) -> None:
        """Record the clock that ends now, before anybody is told of it, and start the next."""
        now = time.monotonic()
        step = records.Step(now, self.worker, clock, self.samples, self.loss, self.wait_s, now - self._since)
        self.trace.record(step)
        self.samples, self.loss, self.wait_s, self._since = 0, None, 0.0, now
        self._has_finished = True

    def note_evaluation(self, clock: int, loss: float, accuracy: float) -> None:
        """Record a measurement on held-out data."""
        self.trace.record(records.Evaluated(time.monotonic(), self.worker, clock, loss, accuracy))
        self.trace.flush()

"""Metrics of a worker, clock by clock: samples, loss, time, and the shares of communication and waiting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType
from typing import Final, Literal, final

from paceline.core.consistency import Consistency
from paceline.core.tables import is_late
from paceline.notices import CLOCK_ADVICE, is_told, tell
from paceline.observe import trace as records
from paceline.observe.resources import ProcessSamples, ResourceUsage
from paceline.observe.trace import Trace
from paceline.worker.dense import ReadOutcome
from paceline.worker.periodic import PeriodicThread
from paceline.worker.pushes import PushOutcome

MANY_PUSHES: Final = 1000  # of one table in one clock; servers take some thousands
STATE_INTERVAL_S: Final = 2.0


@dataclass(slots=True)
class OpenClocks:
    """Counts the work of a worker on each table in its current clock; reports a clock without end once a table."""

    worker: int
    tell: Callable[[str], None]
    _made: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # clock and count
    _told: set[str] = field(default_factory=set[str])

    def note_push(self, table: str, clock: int) -> int:
        """Count a push; return the number of pushes in this clock."""
        at, num = self._made.get(table, (clock, 0))
        num = num + 1 if at == clock else 1
        self._made[table] = clock, num
        return num

    def tell_of(self, table: str, clock: int, done: str) -> None:
        """Report once a table what was `done` in a clock without end."""
        if table not in self._told:
            self._told.add(table)
            self.tell(
                f"worker {self.worker} has {done} in clock {clock} and has not finished that clock: until then no read "
                f"sees them, and they take memory. {CLOCK_ADVICE}"
            )


@dataclass(slots=True)
class _Count:
    """Numbers of attempts and refusals, and the clocks of the refusals."""

    num_made: int = 0
    num_refused: int = 0
    first: int = 0
    last: int = 0


@dataclass(slots=True)
class Refusals:
    """The pushes and steps of one worker that were not applied, by table.

    Reports the 1st, 10th, 100th and so on of each table at once, and the total when the worker leaves. Safe to use from
    several threads.
    """

    worker: int
    tell: Callable[[str], None]
    _counts: dict[tuple[str, str], _Count] = field(default_factory=dict[tuple[str, str], _Count])
    _lock: Lock = field(default_factory=Lock)

    def note_push(self, table: str) -> None:
        """Count a push, refused or not."""
        with self._lock:
            count = self._counts.get(("push", table))
            if count is None:
                count = self._counts["push", table] = _Count()
            count.num_made += 1

    def note_refused(self, kind: Literal["push", "step"], table: str, clock: int, reason: str) -> None:
        """Count a refused one, and report it if due."""
        with self._lock:
            count = self._counts.setdefault((kind, table), _Count())
            count.first = count.first if count.num_refused else clock
            count.num_refused, count.last = count.num_refused + 1, clock
            num = count.num_refused
        if num == 1:
            self.tell(f"worker {self.worker}, clock {clock}: a {kind} of '{table}' was refused: {reason}")
        elif is_told(num):
            self.tell(f"worker {self.worker}, clock {clock}: {_share(count, kind)} of '{table}' were refused by now")

    def tell_all(self) -> None:
        """Report the totals of tables with more than one; call it once, at the end."""
        for (kind, table), count in self._counts.items():
            if count.num_refused > 1:
                self.tell(
                    f"worker {self.worker}: {_share(count, kind)} of '{table}' were refused and had no effect, from "
                    f"clock {count.first} to clock {count.last}"
                )


def _share(count: _Count, kind: str) -> str:
    of_all = f" of {count.num_made}" if count.num_made else ""
    plural = {"push": "pushes", "step": "steps"}[kind]
    return f"{count.num_refused}{of_all} {plural}"


@final
class Communication:
    """The time in which a worker communicates, as a context that may be entered again inside."""

    def __init__(self, metrics: StepMetrics) -> None:
        self._metrics = metrics
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._metrics.communicating_since = self._metrics.now()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth:
            return
        metrics = self._metrics
        now = metrics.computing_since = metrics.now()
        since, metrics.communicating_since = metrics.communicating_since, None
        if since is not None:
            metrics.comm_s += now - since


@dataclass(slots=True)
class StepMetrics:
    """Collects the metrics of a clock, and records them in the trace when the clock is finished.

    Attributes:
        resources: of the process; read before the first worker can leave, as connections end then.
    """

    trace: Trace
    worker: int
    now: Callable[[], float] = time.monotonic
    samples: int = 0
    loss: float | None = None
    resources: ResourceUsage = field(default_factory=ResourceUsage)
    tell: Callable[[str], None] = tell
    refusals: Refusals = field(init=False)
    open_clocks: OpenClocks = field(init=False)
    # All are of the current clock. Invariant at its end: wait_s <= comm_s <= its duration.
    wait_s: float = 0.0
    comm_s: float = 0.0
    load_s: float = 0.0
    _since: float = field(init=False)
    call: str = ""  # that this worker is in: "barrier()"
    meeting: Callable[[], str] = str  # returns such a call of a collective kind, or an empty text
    communicating_since: float | None = None  # up to where communication is counted; None outside of it
    _has_finished: bool = False
    _clock: int = 0  # that is under way
    _not_finite: set[str] = field(default_factory=set[str])  # names of reported values of which that was told
    computing_since: float = field(init=False)
    _states: PeriodicThread = field(init=False)
    communication: Communication = field(init=False)
    samples_of_process: ProcessSamples = field(init=False)

    def __post_init__(self) -> None:
        """Start the first clock."""
        self._since = self.computing_since = self.now()
        self.refusals = Refusals(self.worker, self.tell)
        self.open_clocks = OpenClocks(self.worker, self.tell)
        self._states = PeriodicThread(STATE_INTERVAL_S, self.record_state)
        self.communication = Communication(self)
        self.samples_of_process = ProcessSamples(self.trace, "worker", self.worker, self.resources)

    def start_training(self) -> None:
        """Start the first clock again: opening tables and barriers before it do not count."""
        if not self._has_finished:
            now = self.now()
            self.wait_s, self.comm_s, self.load_s, self._since = 0.0, 0.0, 0.0, now
            if self.communicating_since is not None:
                self.communicating_since = now

    def communicating(self) -> AbstractContextManager[None]:
        """Count the time inside the context as communication, waiting included; nested contexts count once.

        For one thread at a time: the one that trains, or one of autograd while that waits for it.
        """
        return self.communication

    def note_read(self, table: str, outcome: ReadOutcome) -> None:
        """Record a read, and count what it waited."""
        self.wait_s += outcome.waited_s
        if not self.trace.is_kept:
            return
        source = outcome.source
        if source != "cache" and source != "delivery":
            source = "fetch"
        read = records.ReadRecord(
            self.now(), self.worker, table, outcome.clock, outcome.value_clock, outcome.waited_s, source
        )
        self.trace.record(read)

    def note_row_read(self, table: str, clock: int, num_rows: dict[int, int], waited_s: float) -> None:
        """Record a read of rows, counted by the clock below which they contain every update; count what it waited."""
        self.wait_s += waited_s
        self.trace.record(records.RowRead(self.now(), self.worker, table, clock, num_rows, waited_s))

    def note_loaded(self, waited_s: float) -> None:
        """Count what the training loop waited for a batch."""
        self.load_s += waited_s

    def finish_clock(self, clock: int) -> None:
        """Record the clock that ends now, before its tick is sent, and start the next.

        A step pushes, calls this, and then pulls for the next clock. So communication in progress is divided here: time
        until now counts for the clock that ends, the rest, with its waits, for the next.
        """
        now, communicating_since = self.now(), self.communicating_since
        if communicating_since is not None:
            self.comm_s += now - communicating_since
            self.communicating_since = now
        if self.trace.is_kept:
            step_s = now - self._since
            step = records.Step(
                now, self.worker, clock, self.samples, self.loss, self.wait_s, step_s, self.comm_s, self.load_s
            )
            self.trace.record(step)
            self.samples_of_process.sample(now)
        self.samples, self.loss, self._has_finished, self._clock = 0, None, True, clock + 1
        self.wait_s, self.comm_s, self.load_s, self._since = 0.0, 0.0, 0.0, now

    def note_loss(self, clock: int, loss: float | None) -> None:
        """Set the loss of the current clock; an earlier one of the same clock is recorded by itself."""
        self._record_loss(clock)
        self.loss = _finite(loss)
        if loss is not None and self.loss is None:
            self.trace.record(records.Reported(self.now(), self.worker, clock, None, _as_text(loss)))
            self._tell_not_finite("loss", loss, clock)

    def note_values(self, clock: int, values: Mapping[str, float]) -> None:
        """Record values under names of the script's; report the first of each name that is not finite."""
        recorded: dict[str, float | records.NonFiniteText] = {
            name: value if math.isfinite(value) else _as_text(value) for name, value in values.items()
        }
        self.trace.record(records.ReportedValues(self.now(), self.worker, clock, recorded))
        for name, value in values.items():
            if not math.isfinite(value):
                self._tell_not_finite(name, value, clock)

    def _tell_not_finite(self, name: str, value: float, clock: int) -> None:
        if name not in self._not_finite:
            self._not_finite.add(name)
            self.tell(f"worker {self.worker}, clock {clock}: the script reports {name}={value}; told once of each name")

    def watch_push(self, table: str, consistency: str, clock: int, pushed: Future[PushOutcome]) -> Future[PushOutcome]:
        """Do what `note_push` does, for a push whose outcome is a future; return the push."""
        note = self.note_push(table, consistency, clock)

        def note_end(done: Future[PushOutcome]) -> None:
            if done.exception() is None and not done.result().applied:  # else the worker has failed
                note(done.result())

        pushed.add_done_callback(note_end)
        return pushed

    def note_push(self, table: str, consistency: str, clock: int) -> Callable[[PushOutcome], None]:
        """Count a push, and warn of a clock with very many pushes, which wait for its end.

        Returns what is to be called with a refusal: it records and prints that. Late pushes under a quorum are usual,
        and left out.
        """

        def note_refusal(outcome: PushOutcome) -> None:
            if not (is_late(outcome.reason) and Consistency.parse(consistency).backups):
                self.note_refused("push", table, clock, outcome.reason)

        self.refusals.note_push(table)
        num = self.open_clocks.note_push(table, clock)
        if num == MANY_PUSHES and Consistency.parse(consistency).visible == "on_clock":
            self.open_clocks.tell_of(table, clock, f"made {num} pushes of table '{table}'")
        return note_refusal

    def note_refused(
        self, kind: Literal["push", "step"], table: str, clock: int, reason: str, *, is_told: bool = True
    ) -> None:
        """Record a push or a step that was not applied, and print that if `is_told`."""
        self.trace.record(records.Refusal(self.now(), records.NO_SERVER, self.worker, table, reason))
        if is_told:
            self.refusals.note_refused(kind, table, clock, reason)

    def note_evaluation(self, clock: int, loss: float, accuracy: float) -> None:
        """Record a measurement on held-out data; report the first of each kind that is not finite."""
        self.trace.record(records.Evaluated(self.now(), self.worker, clock, _finite(loss), _finite(accuracy)))
        for name, value in (("loss", loss), ("accuracy", accuracy)):
            if not math.isfinite(value):
                self._tell_not_finite(name, value, clock)
        self.trace.flush()

    def note_end(self, clock: int) -> None:
        """Record a loss that belongs to no clock, and the resources used; print how much was refused in all."""
        self._record_loss(clock)
        self.refusals.tell_all()
        used = self.resources.usage()
        if used is not None:
            self.trace.record(
                records.Resources(self.now(), self.worker, used.peak_bytes, used.sent_bytes, used.received_bytes)
            )

    def start_states(self) -> None:
        """Start to record the state of this worker whenever it has not changed for a while."""
        self._states.start()

    def stop_states(self) -> None:
        """Stop recording states, before the trace is closed."""
        self._states.stop()
        self._states.join()
        self.samples_of_process.close()

    def record_state(self) -> bool:
        """Record the state of this worker if it has not changed for a while, and flush the trace; return True."""
        now, communicating_since = self.now(), self.communicating_since
        since = self.computing_since if communicating_since is None else communicating_since
        if now - max(since, self._since) >= STATE_INTERVAL_S:
            doing = "computing" if communicating_since is None else "communicating"
            for_s, call = now - max(since, self._since), self.call or self.meeting()
            self.trace.record(records.State(now, self.worker, self._clock, doing, for_s, call))
        self.trace.flush()
        return True

    def _record_loss(self, clock: int) -> None:
        if self.loss is not None:
            self.trace.record(records.Reported(self.now(), self.worker, clock, self.loss))
            self.loss = None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _as_text(value: float) -> records.NonFiniteText:
    """Return a number that is not finite as records have it."""
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"

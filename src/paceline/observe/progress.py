"""Live progress of a run, read from its traces: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from msgspec.structs import replace

from paceline.errors import EXIT_PREEMPTED, UsageError
from paceline.notices import tell
from paceline.observe.disk import look_at_disk
from paceline.observe.loss_trend import LossTrend
from paceline.observe.resources import look_at
from paceline.observe.runs import ALL_TRACES, TraceFollower
from paceline.observe.screen import WorkerRow, event_line, picture, screen_lines
from paceline.observe.trace import (
    BARRIER,
    NO_SERVER,
    Exit,
    MembershipRecord,
    ReadRecord,
    Refusal,
    Reported,
    Resources,
    RowRead,
    State,
    Step,
)
from paceline.observe.trace import (
    ENDED as TRACES_ENDED,
)
from paceline.observe.verdict import SILENT_S, Surroundings, judge
from paceline.observe.window import Window, staleness_of, worker_times

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from paceline.observe.disk import DiskUse
    from paceline.observe.screen import RunPicture
    from paceline.observe.trace import TraceRecord
    from paceline.observe.verdict import ProcessState, RunVerdict

# A worker that finishes no clock reports every 2 s. After this time without a report it counts as hung.
HUNG_S = SILENT_S
# Seconds between two looks at a disk that is full.
DISK_INTERVAL_S = 5.0
# Seconds in one state before a line reports it.
NOTABLE_S = 5.0


@dataclass(slots=True)
class Life:
    """State of one worker's process, as far as known; times are seconds on the display's monotonic clock.

    Attributes:
        clock: number of finished clocks.
        end: why it has ended, from its launcher; empty while it runs.
        heard_s: time of its last record; None before the first.
        waits: whether it has been in a waiting call for long enough to report.
        since_s: time when the current state began.
        leaves: whether it has left the job while its process runs.
        call: that it waits in, where that is for workers of any clock: `BARRIER`, or a collective call.
    """

    clock: int = 0
    end: str = ""
    heard_s: float | None = None
    waits: bool = False
    since_s: float = 0.0
    leaves: bool = False
    call: str = ""

    def update(self, record: TraceRecord, now: float) -> None:
        """Update the state from a record of its trace."""
        self.call = record.call if isinstance(record, State) else ""
        if isinstance(record, Step):
            self.clock, self.waits, self.since_s, self.leaves = record.clock + 1, False, now, False
        elif isinstance(record, State):
            self.waits, self.since_s, self.leaves = record.doing == "communicating", now - record.for_s, False
        elif isinstance(record, Resources):
            self.waits, self.leaves = False, True
        self.heard_s = now

    def note(self, end: str, now: float) -> None:
        """Record that its process has ended, or with an empty `end`, that it was started."""
        self.end = end
        if not end:
            self.heard_s, self.waits, self.since_s, self.leaves = None, False, now, False

    def hung_s(self, now: float) -> float:
        """Return for how long the records of a process are overdue; 0 for usual intervals."""
        if self.end or self.leaves or self.heard_s is None or now - self.heard_s < HUNG_S:
            return 0.0
        return now - self.heard_s


def describe(lives: Mapping[int, Life], now: float) -> dict[int, str]:
    """Return a few words on the state of each worker that does not compute."""
    return {worker: _describe(worker, lives, now) for worker in lives}


def _describe(worker: int, lives: Mapping[int, Life], now: float) -> str:
    life = lives[worker]
    if life.end:
        return life.end
    if life.heard_s is None:
        return "starting"
    if hung_s := life.hung_s(now):
        return f"hung for {hung_s:.0f} s"
    if life.leaves:
        return LEAVING
    for_s = now - life.since_s
    if life.waits:
        where = f"in {life.call}, " if life.call == BARRIER else ""
        return f"{where}waiting for {_awaited(worker, lives)} for {for_s:.0f} s"
    return f"computing for {for_s:.0f} s" if for_s >= NOTABLE_S else ""


def _awaited(worker: int, lives: Mapping[int, Life]) -> str:
    """Return what a worker waits for: those that have not come to its call, or are behind, else a computation."""
    own, call = lives[worker].clock, lives[worker].call
    others = {rank: life for rank, life in lives.items() if rank != worker and not life.end}
    slowest = min((life.clock for life in others.values()), default=own)
    awaited = [rank for rank, life in others.items() if life.clock == slowest and (slowest < own or not life.waits)]
    if call == BARRIER or (call and not awaited):
        awaited = [rank for rank, life in others.items() if life.call != call]
    if (slowest > own and not call) or not awaited:
        return "the others" if call not in ("", BARRIER) else "the server"
    ranks = ", ".join(map(str, sorted(awaited)[:3])) + (", ..." if len(awaited) > 3 else "")
    return f"worker{'s' if len(awaited) > 1 else ''} {ranks}"


PLAIN_INTERVAL_S = 2.0
# Rates and shares are taken over the latest steps, so that a change shows soon and noise does not.
WINDOW_S = 5.0
# A step is late after this time and after the time of the steps before it, as traces are written in pieces.
LATE_S = 1.0
# Beginning of the state of a worker whose process failed or was killed.
DEAD = "dead"
ENDED = "ended"
LEFT = "left"
LEAVING = "leaving"  # the job, while its process runs
# A plain line lists each worker up to this number, and beyond it their range.
MAX_LISTED_WORKERS = 8
NUM_EVENTS = 20  # that are kept
# Between what is known of two workers that run: traces are written every 20 ms, and read in a fraction of a second. A
# worker whose last step is older has not finished another one.
MOST_APART_S = 0.4


@dataclass(slots=True)
class _Pace:
    """The latest steps of one worker, and the state of its process."""

    # Invariant: in order of time; they span at most WINDOW_S, unless there is one.
    steps: deque[Step] = field(default_factory=deque[Step])
    # Reported losses of the same span that are not finite, which no step has.
    bad_losses: deque[Reported] = field(default_factory=deque[Reported])
    num_refused: int = 0
    life: Life = field(default_factory=Life)
    stepped_s: float = 0.0  # time of the last step, on the clock of the display

    def add(self, step: Step, now: float) -> None:
        self.stepped_s = now
        self.steps.append(step)
        while self.steps[0].t < step.t - WINDOW_S:
            self.steps.popleft()
        self.forget_losses(step.t)

    def has_stepped_since(self, t: float) -> bool:
        """Return whether a step that was read is later."""
        return bool(self.steps) and self.steps[-1].t > t

    def add_bad_loss(self, told: Reported) -> None:
        self.bad_losses.append(told)
        self.forget_losses(told.t)

    def forget_losses(self, t: float) -> None:
        while self.bad_losses and self.bad_losses[0].t < t - WINDOW_S:
            self.bad_losses.popleft()

    def clock(self, at_t: float) -> int:
        """Return the number of clocks that were finished at a time on the clock of the records."""
        return next((step.clock + 1 for step in reversed(self.steps) if step.t <= at_t), self._clock_before())

    def _clock_before(self) -> int:
        return self.steps[0].clock if self.steps else 0

    def row(self, worker: int, clock: int, lead: int | None, state: str, now: float) -> WorkerRow:
        losses = [step.loss for step in self.steps if step.loss is not None]
        losses += [float(told.text or "nan") for told in self.bad_losses]
        busy_s = sum(step.step_s for step in self.steps) or 1.0
        return WorkerRow(
            worker=worker,
            clock=clock,
            loss=_mean(losses),
            samples_per_s=self.samples_per_s(now),
            lead=lead,
            comm_share=sum(step.comm_s for step in self.steps) / busy_s,
            wait_share=sum(step.wait_s for step in self.steps) / busy_s,
            num_refused=self.num_refused,
            state=state,
            counts_samples=any(step.samples for step in self.steps),
        )

    def samples_per_s(self, now: float) -> float:
        """Return the rate over the latest steps; it falls to 0 while the next step is late."""
        if self.life.end.startswith(DEAD) or not self.steps:
            return 0.0
        busy_s = sum(step.step_s for step in self.steps)
        usual_s, idle_s = busy_s / len(self.steps), now - self.stepped_s
        if idle_s > max(WINDOW_S, 3 * usual_s):
            return 0.0
        late_s = max(0.0, idle_s - max(usual_s, LATE_S))
        return sum(step.samples for step in self.steps) / ((busy_s or 1.0) + late_s)


def _mean(losses: Sequence[float]) -> float | None:
    """Return the mean, NaN or infinite if one value is; None of none."""
    return sum(losses) / len(losses) if losses else None


def _tell_failure(error: Exception) -> None:
    """Tell that records cannot be read; a failed display does not end the run."""
    tell(f"the live display stands still from here on: {str(error).rstrip('.')}. The run goes on")


class TraceDisplay:
    """Shows the progress of every worker, from the trace files in `trace_folder`.

    Call `refresh` about four times a second and `close` at the end. Neither blocks, and there is no thread. A terminal
    gets lines that are redrawn in place, below all that `sys.stdout` and `sys.stderr` print. Other streams get a line
    for all workers every 2 s, and a last one on close.

        display = TraceDisplay(run_folder / "trace", num_workers=4)
        while running():
            display.refresh(time.monotonic())
        display.close()
    """

    def __init__(
        self,
        trace_folder: Path,
        num_workers: int,
        stream: TextIO | None = None,
        *,
        last_bytes: int = 0,
        on_failure: Callable[[Exception], object] = _tell_failure,
    ) -> None:
        """Show nothing yet. `last_bytes`: leave out what is further from the end of each trace, unless it is 0.

        `on_failure`: see `RunView`.
        """
        self.view = RunView(trace_folder, num_workers, last_bytes, on_failure=on_failure)
        self._display = _open_display(sys.stderr if stream is None else stream)

    def note(self, worker: int, state: str) -> None:
        """Record why a worker has ended, or with an empty state, that it was started."""
        self.view.note(worker, state)

    def refresh(self, now: float) -> None:
        """Read new records and show them; `now` is in seconds on the caller's steady clock."""
        self.view.refresh(now)
        self._display.show(self.view)

    def close(self) -> None:
        """Show the final state and release the terminal; call it once, also after a failed run."""
        self.view.refresh()
        self._display.close(self.view)

    def rows(self) -> list[WorkerRow]:
        """Return the displayed rows, by rank."""
        return self.view.rows()


class RunView:
    """A run, from the records in `trace_folder`: its workers and servers, and the verdict on it.

    view = RunView(run_folder / "trace")
    view.refresh(time.monotonic())
    view.picture().verdict.text
    """

    def __init__(
        self,
        trace_folder: Path,
        num_workers: int = 0,
        last_bytes: int = 0,
        *,
        piece_bytes: int = 0,
        on_failure: Callable[[Exception], object] = _tell_failure,
    ) -> None:
        """Know nothing yet; see `TraceDisplay`, and `TraceFollower` for `piece_bytes`.

        `on_failure` gets the error when records cannot be read, and may raise; after that nothing more is read.
        """
        self._on_failure = on_failure
        # None: cannot be read
        self._tail: TraceFollower | None = TraceFollower(trace_folder, ALL_TRACES, last_bytes, piece_bytes)
        self._paces = {worker: _Pace() for worker in range(num_workers)}
        self._folder = trace_folder
        self._window = Window()
        self._events: deque[str] = deque(maxlen=NUM_EVENTS)
        self._start_t: float | None = None
        self._now = 0.0
        self._began_t = self._latest_t = 0.0  # of the records
        self._latest_now = 0.0  # on the caller's clock, when the latest record was read
        self._loss = LossTrend()
        self._disk: DiskUse | None = None  # looked at where records end
        self._disk_due_s = 0.0
        self.elapsed_s = 0.0

    @property
    def is_behind(self) -> bool:
        """Whether there are records that wait for the next refresh."""
        return self._tail is not None and self._tail.is_behind

    @property
    def read_share(self) -> float:
        """The share of the records that has been read, 0 to 1."""
        return 1.0 if self._tail is None else self._tail.read_share

    @property
    def recorded_s(self) -> float:
        """The time from the first record to the last, in seconds."""
        return self._latest_t - self._began_t

    @property
    def records_t(self) -> float:
        """The time now, on the clock of the records."""
        here_t = time.monotonic()
        if any(samples[-1].host == os.uname().nodename for samples in self._window.sampled.values() if samples):
            return max(here_t, self._latest_t)
        return self._latest_t + self._now - self._latest_now

    def note(self, worker: int, state: str) -> None:
        """Record why a worker has ended, or with an empty state, that it was started."""
        self._paces.setdefault(worker, _Pace()).life.note(state, self._now)

    def refresh(self, now: float | None = None) -> list[TraceRecord]:
        """Read new records, and return them; `now` is in seconds on the caller's steady clock, by default as before."""
        if now is not None:
            self._start_t = now if self._start_t is None else self._start_t
            self.elapsed_s, self._now = now - self._start_t, now
        return self._take_in()

    def picture(self) -> RunPicture:
        """Return what the run does now."""
        processes = self._processes()
        around = self._look_around(processes)
        times = worker_times(self._window)
        verdict = judge(self._window, around, times)
        elapsed_s = max(self.elapsed_s, self.recorded_s)
        loss = self._loss.verdict(staleness_of(*self._window.staleness.values()))
        rows = self.rows()
        if around.has_ended:
            rows = [replace(row, state="") if row.state == LEAVING else row for row in rows]
        return picture(elapsed_s, verdict, rows, self._window, processes, list(self._events), times, loss)

    def verdict(self) -> RunVerdict:
        """Return what holds up the run now; of one that has ended, what held up its last steps."""
        return judge(self._window, self._look_around(self._processes()))

    def has_ended(self) -> bool:
        """Return whether no worker of the run is left on this machine, or its folder; False where that is not known.

        Of a run whose workers ended before their first step, it is told by its servers.
        """
        if not self._folder.exists():
            return True
        return _has_ended(self._processes())

    def pids(self) -> dict[tuple[str, int], int]:
        """Return the numbers of its processes, by role and rank."""
        return {key: samples[-1].pid for key, samples in self._window.sampled.items() if samples}

    def _processes(self) -> dict[tuple[str, int], ProcessState]:
        here = os.uname().nodename
        return {
            key: look_at(samples[-1].pid, samples[-1].t)
            for key, samples in self._window.sampled.items()
            if samples and samples[-1].host == here
        }

    def _look_around(self, processes: dict[tuple[str, int], ProcessState]) -> Surroundings:
        is_over = _has_ended(processes)
        if is_over:
            self._window.gone.clear()  # the last steps are those of workers that have left by now, too
        records_end = (self._folder / TRACES_ENDED).exists()
        if records_end and self._now >= self._disk_due_s:
            self._disk, self._disk_due_s = look_at_disk(self._folder.parent), self._now + DISK_INTERVAL_S
        return Surroundings(
            now=0.0 if is_over else self.records_t,
            ends={worker: pace.life.end for worker, pace in self._paces.items()},
            processes={key: state for key, state in processes.items() if state.state} if is_over else processes,
            records_end=records_end,
            disk=self._disk,
            has_ended=is_over,
        )

    def rows(self) -> list[WorkerRow]:
        """Return the displayed rows, by rank."""
        lives = {worker: pace.life for worker, pace in sorted(self._paces.items())}
        paced = [worker for worker, life in lives.items() if not life.end] or [
            worker for worker, life in lives.items() if life.end == ENDED
        ]
        at_t = self._reached_t()
        clocks = {worker: pace.clock(at_t) for worker, pace in self._paces.items()}
        slowest = min((clocks[worker] for worker in paced), default=0)
        leads = {worker: clocks[worker] - slowest for worker in paced}
        return [
            self._paces[worker].row(worker, clocks[worker], leads.get(worker), state, self._now)
            for worker, state in describe(lives, self._now).items()
        ]

    def _reached_t(self) -> float:
        """Return the latest time up to which the steps of all running workers are known.

        Traces are written in pieces and read one after another, so that the last steps of one worker may be here, and
        those that another one has finished at the same time not yet.
        """
        lasts = [
            pace.steps[-1].t for pace in self._paces.values() if pace.steps and not (pace.life.end or pace.life.leaves)
        ]
        newest_t = max(lasts, default=math.inf)
        return min((t for t in lasts if t > newest_t - MOST_APART_S), default=newest_t)

    def _take_in(self) -> list[TraceRecord]:
        if self._tail is None:
            return []
        try:
            records = self._tail.poll()
        except (OSError, UsageError) as error:
            self._tail = None
            self._on_failure(error)
            return []
        if records:
            self._latest_now = self._now
        for record in records:
            self._add(record)
        return records

    def _add(self, record: TraceRecord) -> None:
        self._began_t = min(self._began_t, record.t) if self._began_t else record.t
        self._latest_t = max(self._latest_t, record.t)
        self._window.add(record)
        if line := event_line(record, self._began_t):
            self._events.append(line)
        self._loss.take_in(record)
        if isinstance(record, Reported) and record.loss is None:
            self._paces.setdefault(record.worker, _Pace()).add_bad_loss(record)
        elif isinstance(record, Refusal) and record.server == NO_SERVER:
            self._paces.setdefault(record.worker, _Pace()).num_refused += 1
        elif isinstance(record, Exit) and record.role == "worker":
            ended = time.strftime("%H:%M:%S", time.localtime(record.unix_s))
            end = LEFT if record.exit_code == EXIT_PREEMPTED else f"{DEAD} since {ended}"
            pace = self._paces.setdefault(record.rank, _Pace())
            if not pace.has_stepped_since(record.t):  # else another life is in its place, of which more was read
                pace.life.note(end, self._now)
        elif isinstance(record, MembershipRecord) and record.event == "joined" and record.incarnation:
            pace = self._paces.setdefault(record.worker, _Pace())
            if pace.life.end or not pace.has_stepped_since(record.t):
                pace.life.note("", self._now)
        if isinstance(record, Step | State | Resources | ReadRecord | RowRead):
            pace = self._paces.setdefault(record.worker, _Pace())
            pace.life.update(record, self._now)
            if isinstance(record, Step):
                pace.add(record, self._now)


def _has_ended(processes: Mapping[tuple[str, int], ProcessState]) -> bool:
    """Return whether no worker is left, or no server where no worker has told its number."""
    states = [state for (role, _), state in processes.items() if role == "worker"] or list(processes.values())
    return bool(states) and not any(state.state for state in states)


def _open_display(stream: TextIO) -> _Lines | _Screen:
    if not stream.isatty():
        return _Lines(stream)
    from rich.console import Console

    console = Console(file=stream)
    return _Lines(stream) if console.is_dumb_terminal else _Screen(console)


class _Lines:
    """Plain lines, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_s = 0.0
        self._shown: Sequence[WorkerRow] = ()

    def show(self, view: RunView) -> None:
        if view.elapsed_s - self._shown_s >= PLAIN_INTERVAL_S:
            self._print(view, view.rows())

    def close(self, view: RunView) -> None:
        rows = view.rows()
        # As text, because NaN does not equal itself.
        if [f"{row.clock} {row.loss} {row.state} {row.num_refused}" for row in rows] != [
            f"{row.clock} {row.loss} {row.state} {row.num_refused}" for row in self._shown
        ]:
            self._print(view, rows)

    def _print(self, view: RunView, rows: Sequence[WorkerRow]) -> None:
        self._shown_s, self._shown = view.elapsed_s, rows
        if any(row.clock for row in rows):
            verdict = view.verdict()
            line = plain_line(rows, view.elapsed_s)
            shown = line if verdict.is_healthy else f"{line}  |  {verdict.text}"
            print(shown, file=self._stream, flush=True)


class _Screen:
    """Lines that are redrawn in place, for terminals; see `screen_lines`."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        # Only output to a terminal is moved above the lines; files and pipes keep theirs.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
        self._live.start()

    def show(self, view: RunView) -> None:
        from rich.text import Text

        shown = view.picture()
        size = self._console.size
        first, *rest = screen_lines(shown, size.width, size.height - 1)
        text = Text(first, style="bold" if shown.verdict.is_healthy else "bold red", no_wrap=True, end="")
        text.append("\n" + "\n".join(rest), style="not bold default")
        self._live.update(text, refresh=True)

    def close(self, view: RunView) -> None:
        self.show(view)
        self._live.stop()


def plain_line(rows: Sequence[WorkerRow], elapsed_s: float) -> str:
    """Return one line with the progress of all workers, and the state of those that do not compute."""
    loss = _mean([row.loss for row in rows if row.loss is not None and not row.state.startswith(DEAD)])
    samples_per_s = sum(row.samples_per_s for row in rows)
    refused = [row.num_refused for row in rows]
    parts = [
        f"{elapsed_s:.0f} s",
        "clock " + _listed([f"{row.clock}" for row in rows], [row.clock for row in rows]),
        "lead " + _listed(["-" if row.lead is None else f"+{row.lead}" for row in rows], [row.lead for row in rows]),
        *([] if loss is None else [f"loss {loss:.4f}"]),  # without what the script does not report
        *(["refused " + _listed([f"{num}" for num in refused], refused)] if any(refused) else []),
        *([f"{samples_per_s:,.0f} samples/s"] if any(row.counts_samples for row in rows) else []),
        "communication " + _shares([row.comm_share for row in rows]),
        "waiting " + _shares([row.wait_share for row in rows]),
        *_states(rows),
    ]
    return "  |  ".join(parts)


def _states(rows: Sequence[WorkerRow]) -> list[str]:
    """Return the states of workers; empty if all compute or have ended."""
    told = [f"worker {row.worker} {row.state}" for row in rows if row.state]
    if all(row.state in ("", ENDED) for row in rows):
        return []
    more = len(told) - MAX_LISTED_WORKERS
    return [", ".join(told[:MAX_LISTED_WORKERS]) + (f" and {more} more" if more > 0 else "")]


def _shares(shares: Sequence[float]) -> str:
    return _listed([f"{share:.0%}" for share in shares], shares)


def _listed(texts: Sequence[str], values: Sequence[float | None]) -> str:
    if len(texts) <= MAX_LISTED_WORKERS:
        return " ".join(texts)
    known = [value for value in values if value is not None]
    return f"{texts[values.index(min(known))]} .. {texts[values.index(max(known))]}" if known else "-"

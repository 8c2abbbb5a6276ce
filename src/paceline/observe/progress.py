"""Live progress of a run, read from its traces: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, TextIO

from paceline.errors import UsageError
from paceline.observe.runs import Tail
from paceline.observe.trace import Step
from paceline.observe.trace_file import tell_on_stderr

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

PLAIN_INTERVAL_S = 2.0
# Rates and shares are taken over the latest steps, so that a change shows soon and noise does not.
WINDOW_S = 5.0
# A plain line lists each worker up to this many, and only the range beyond.
MAX_LISTED_WORKERS = 8


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """What the board shows of one worker; `clock` counts the finished clocks, `lead` is over the slowest worker."""

    worker: int
    clock: int
    loss: float | None
    samples_per_s: float
    lead: int
    comm_share: float  # contains the waiting
    wait_share: float


@dataclass(slots=True)
class _Pace:
    """The latest steps of one worker."""

    # Invariant: in order of time, spanning at most WINDOW_S unless it holds a single step.
    steps: deque[Step] = field(default_factory=deque[Step])

    def add(self, step: Step) -> None:
        self.steps.append(step)
        while self.steps[0].t < step.t - WINDOW_S:
            self.steps.popleft()

    def clock(self) -> int:
        return self.steps[-1].clock + 1 if self.steps else 0

    def row(self, worker: int, slowest: int) -> WorkerRow:
        losses = [step.loss for step in self.steps if step.loss is not None]
        busy_s = sum(step.step_s for step in self.steps) or 1.0
        return WorkerRow(
            worker=worker,
            clock=self.clock(),
            loss=fmean(losses) if losses else None,
            samples_per_s=sum(step.samples for step in self.steps) / busy_s,
            lead=self.clock() - slowest,
            comm_share=sum(step.comm_s for step in self.steps) / busy_s,
            wait_share=sum(step.wait_s for step in self.steps) / busy_s,
        )


class Board:
    """Shows how far every worker is, from the trace files in `trace_folder`.

    Call `refresh` about four times a second and `close` at the end; neither blocks, and there is no thread. On a
    terminal a table is redrawn in place, and what is printed through `sys.stdout` and `sys.stderr` appears above
    it; elsewhere one line for all workers is written every 2 s, and a last one on close.

        board = Board(run_folder / "trace", num_workers=4)
        while running():
            board.refresh(time.monotonic())
        board.close()
    """

    def __init__(self, trace_folder: Path, num_workers: int, stream: TextIO | None = None) -> None:
        self._tail: Tail | None = Tail(trace_folder)  # None when the traces cannot be read
        self._paces = {worker: _Pace() for worker in range(num_workers)}
        self._display = _open_display(sys.stderr if stream is None else stream)
        self._start_t: float | None = None
        self._elapsed_s = 0.0

    def refresh(self, now: float) -> None:
        """Take in what the workers wrote and show it; `now` is in seconds on the caller's steady clock."""
        if self._start_t is None:
            self._start_t = now
        self._elapsed_s = now - self._start_t
        self._take_in()
        self._display.show(self.rows(), self._elapsed_s)

    def close(self) -> None:
        """Show the final state and give the terminal back; call it once, also when the run failed."""
        self._take_in()
        self._display.close(self.rows(), self._elapsed_s)

    def rows(self) -> list[WorkerRow]:
        """Return what is shown, by rank."""
        slowest = min((pace.clock() for pace in self._paces.values()), default=0)
        return [pace.row(worker, slowest) for worker, pace in sorted(self._paces.items())]

    def _take_in(self) -> None:
        if self._tail is None:
            return
        try:
            records = self._tail.poll()
        except (OSError, UsageError) as error:  # what is shown is no reason to end what it shows
            self._tail = None
            tell_on_stderr(f"the live display stands still from here on: {error}. The run goes on")
            return
        for record in records:
            if isinstance(record, Step):
                self._paces.setdefault(record.worker, _Pace()).add(record)


def _open_display(stream: TextIO) -> _Lines | _Table:
    if not stream.isatty():
        return _Lines(stream)
    from rich.console import Console

    console = Console(file=stream)
    return _Lines(stream) if console.is_dumb_terminal else _Table(console)


class _Lines:
    """Plain lines, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_s = 0.0
        self._shown: Sequence[WorkerRow] = ()

    def show(self, rows: Sequence[WorkerRow], elapsed_s: float) -> None:
        if elapsed_s - self._shown_s >= PLAIN_INTERVAL_S:
            self._print(rows, elapsed_s)

    def close(self, rows: Sequence[WorkerRow], elapsed_s: float) -> None:
        if list(rows) != list(self._shown):
            self._print(rows, elapsed_s)

    def _print(self, rows: Sequence[WorkerRow], elapsed_s: float) -> None:
        self._shown_s, self._shown = elapsed_s, rows
        if any(row.clock for row in rows):
            print(plain_line(rows, elapsed_s), file=self._stream, flush=True)


class _Table:
    """A table that is redrawn in place, for terminals."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        # Output that goes to a file or a pipe must keep going there, so only a terminal's is moved above the table.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
        self._live.start()

    def show(self, rows: Sequence[WorkerRow], elapsed_s: float) -> None:
        self._live.update(_table(rows, elapsed_s), refresh=True)

    def close(self, rows: Sequence[WorkerRow], elapsed_s: float) -> None:
        self.show(rows, elapsed_s)
        self._live.stop()


def plain_line(rows: Sequence[WorkerRow], elapsed_s: float) -> str:
    """Say in one line how far all workers are; beyond 8 workers as ranges."""
    losses = [row.loss for row in rows if row.loss is not None]
    samples_per_s = sum(row.samples_per_s for row in rows)
    parts = [
        f"{elapsed_s:.0f} s",
        "clock " + _listed([f"{row.clock}" for row in rows], [row.clock for row in rows]),
        "lead " + _listed([f"+{row.lead}" for row in rows], [row.lead for row in rows]),
        *([f"loss {fmean(losses):.4f}"] if losses else []),  # what the script does not tell is left out
        *([f"{samples_per_s:,.0f} samples/s"] if samples_per_s else []),
        "communication " + _shares([row.comm_share for row in rows]),
        "waiting " + _shares([row.wait_share for row in rows]),
    ]
    return "  |  ".join(parts)


def _shares(shares: Sequence[float]) -> str:
    return _listed([f"{share:.0%}" for share in shares], shares)


def _listed(texts: Sequence[str], values: Sequence[float]) -> str:
    if len(texts) <= MAX_LISTED_WORKERS:
        return " ".join(texts)
    return f"{texts[values.index(min(values))]} .. {texts[values.index(max(values))]}"


def _table(rows: Sequence[WorkerRow], elapsed_s: float) -> Table:
    from rich.table import Table

    # Two columns apart, so that the table fits into a terminal of 80.
    table = Table(title=f"{elapsed_s:.0f} s", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("worker", "clock", "lead", "loss", "samples/s", "communication", "waiting"):
        table.add_column(heading, justify="right", header_style="dim")
    table.add_column("")
    for row in rows:
        table.add_row(
            f"{row.worker}",
            f"{row.clock}",
            f"+{row.lead}" if row.lead else "slowest",
            "-" if row.loss is None else f"{row.loss:.4f}",
            f"{row.samples_per_s:,.0f}" if row.samples_per_s else "-",
            f"{row.comm_share:.0%}",
            f"{row.wait_share:.0%}",
            _bar(row.wait_share),
        )
    return table


def _bar(share: float, width: int = 10) -> str:
    filled = round(min(share, 1.0) * width)
    return "█" * filled + "░" * (width - filled)

"""Live display of a search: a table on a terminal, elsewhere a line for each trial that has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TextIO, final

from paceline.launch.config import as_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from paceline.launch.config import Choice
    from paceline.tools.tune.driver import Display, TrialProcess
    from paceline.tools.tune.search_space import Metric, Search
    from paceline.tools.tune.study import State, Study, Trial

REFRESH_INTERVAL_S: Final = 0.25
# Lines of a terminal that are not for trials: heading, title, and the cursor's.
_OTHER_LINES: Final = 5
_STYLES: Final[Mapping[State, str]] = {"running": "cyan", "pruned": "dim", "failed": "red", "interrupted": "dim"}


def open_display(search: Search, stream: TextIO) -> Display:
    """Return a live table for a terminal, else plain lines."""
    if not stream.isatty():
        return _Lines(search, stream)
    from rich.console import Console

    console = Console(file=stream)
    return _Lines(search, stream) if console.is_dumb_terminal else _Live(search, console)


@final
class NullDisplay:
    """Shows nothing."""

    def show(self, study: Study, running: Sequence[TrialProcess]) -> None:
        """Show nothing."""

    def ended(self, study: Study, run: TrialProcess) -> None:
        """Show nothing."""

    def close(self, study: Study) -> None:
        """Show nothing."""


@final
class _Lines:
    """Plain lines, for logs and pipes."""

    def __init__(self, search: Search, stream: TextIO) -> None:
        self._search = search
        self._stream = stream

    def show(self, study: Study, running: Sequence[TrialProcess]) -> None:
        """Show nothing while trials run."""

    def ended(self, study: Study, run: TrialProcess) -> None:
        trial = study.trials()[run.trial.number]
        best = study.best()
        is_best = best is not None and best.number == trial.number
        done = f"[{num_ended(study)}/{self._search.num_trials}]"
        line = plain_line(trial, self._search.metric, run.elapsed_s, is_best=is_best)
        print(f"{done} {line}", file=self._stream, flush=True)

    def close(self, study: Study) -> None:
        """Leave the lines as they are."""


def num_ended(study: Study) -> int:
    """Return the number of trials that have ended, without interrupted ones, which run again."""
    return sum(trial.state not in ("running", "interrupted") for trial in study.trials())


def plain_line(trial: Trial, metric: Metric, elapsed_s: float, *, is_best: bool) -> str:
    """Return the result of a trial in one line.

    >>> from paceline.tools.tune.study import Trial
    >>> plain_line(Trial(3, {"lr": 0.1}, "finished", 0.25), "loss", 4.2, is_best=True)
    'trial 3  |  lr 0.1  |  loss 0.25, the best so far  |  4 s'
    """
    if trial.value is not None:
        outcome = f"{metric} {trial.value:.4g}{', the best so far' if is_best else ''}"
    else:
        outcome = f"{trial.state}: {trial.reason}"
    parts = (f"trial {trial.number}", describe(trial.parameters), outcome, f"{elapsed_s:.0f} s")
    return "  |  ".join(parts)


def describe(parameters: Mapping[str, Choice]) -> str:
    """Return parameters in one line.

    >>> describe({"lr": 0.012345678, "batch": 32})
    'lr 0.01235, batch 32'
    """
    return ", ".join(f"{name} {_short(value)}" for name, value in parameters.items())


def _short(value: Choice) -> str:
    return f"{value:.4g}" if isinstance(value, float) else as_text(value)


@final
class _Live:
    """A table that is redrawn in place, for terminals: the best trial, running ones, and the latest that ended."""

    def __init__(self, search: Search, console: Console) -> None:
        from rich.live import Live

        self._search = search
        self._console = console
        self._began_s = time.monotonic()
        self._shown_s = 0.0
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, study: Study, running: Sequence[TrialProcess]) -> None:
        now = time.monotonic()
        if now - self._shown_s >= REFRESH_INTERVAL_S:
            self._shown_s = now
            self._update(study, running)

    def ended(self, study: Study, run: TrialProcess) -> None:
        """Leave it to the next redraw."""

    def close(self, study: Study) -> None:
        self._update(study, ())
        self._live.stop()

    def _update(self, study: Study, running: Sequence[TrialProcess]) -> None:
        room = max(3, self._console.height - _OTHER_LINES)
        elapsed_s = time.monotonic() - self._began_s
        self._live.update(search_table(study, self._search, running, room, elapsed_s), refresh=True)


def search_table(study: Study, search: Search, running: Sequence[TrialProcess], room: int, elapsed_s: float) -> Table:
    """Return a table of `room` trials by number: the latest ones, with the best."""
    from rich.table import Table

    trials, best = study.trials(), study.best()
    title = f"{num_ended(study)} of {search.num_trials} trials, {elapsed_s:.0f} s"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("trial", *search.parameters, "report", search.metric):
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    latest = trials[-room + 1 :]
    chosen = latest if best is None or best.number in {trial.number for trial in latest} else [best, *latest]
    now = {run.trial.number: run for run in running}
    for trial in chosen:
        run = now.get(trial.number)
        reports = list(run.values.so_far(measured=study.measured or run.values.has_measured)) if run else trial.reports
        value = trial.value if trial.value is not None else reports[-1] if reports else None
        is_best = best is not None and trial.number == best.number
        table.add_row(
            str(trial.number),
            *(_short(trial.parameters[name]) if name in trial.parameters else "-" for name in search.parameters),
            str(len(reports)) if reports else "-",
            "-" if value is None else f"{value:.4g}",
            _remark(trial, run, is_best=is_best),
            style="bold green" if is_best else _STYLES.get(trial.state, ""),
        )
    return table


def _remark(trial: Trial, run: TrialProcess | None, *, is_best: bool) -> str:
    if run is not None:
        return f"{run.elapsed_s:.0f} s{', stopping' if run.was_told else ''}"
    if trial.reason:
        return f"{trial.state}: {trial.reason}"
    return "best" if is_best else trial.state

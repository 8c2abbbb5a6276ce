"""Display of a search: live as a table or as lines, and at the end as a figure."""

from __future__ import annotations

import math
import time
from textwrap import wrap
from typing import TYPE_CHECKING, Final, TextIO, final

from paceline.launch.config import as_text
from paceline.observe.plots import (
    BASELINE_COLOUR,
    DPI,
    FAINT,
    INK,
    MAX_LABEL,
    POLICY_COLOURS,
    entitle,
    new_figure,
    plain,
    quiet,
    scale_by_ratio,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
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
WIDTH_IN: Final = 13.0
HEIGHT_IN: Final = 8.5
_MARGIN: Final = 0.12  # share of an axis that is left free at both ends


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


FINISHED, PRUNED, BEST = POLICY_COLOURS[0], FAINT, POLICY_COLOURS[1]
# Share of the values that the axis covers: a trial that diverged would flatten all others.
_FAR: Final = 0.9
# Ratio between the worst and the best value from which the scale is logarithmic.
_WIDE: Final = 5.0
_LINE_LENGTH: Final = 150


def draw_search(
    search: Search, trials: Sequence[Trial], best: Trial | None, importances: Mapping[str, float], path: Path, name: str
) -> None:
    """Draw all trials into one picture and write it as PNG.

    Raises:
        UsageError: matplotlib is not installed.
    """
    figure = new_figure(WIDTH_IN, HEIGHT_IN)
    top, bottom = figure.subfigures(2, 1, squeeze=False)[:, 0]
    _draw_trials(top.subplots(), search, trials)
    curves, bars = bottom.subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(curves, search, trials, best)
    _draw_importances(bars, importances)
    found = "none finished" if best is None else f"best {search.metric} {best.value:.4g}"
    num_trials = sum(trial.state != "interrupted" for trial in trials)
    title = f"{name}: {num_trials} trials, {found}"
    figure.suptitle(plain(title, 80), x=0.012, ha="left", fontsize=16, weight="bold", color=INK)
    if best is not None:
        told = wrap(f"best: trial {best.number}, {describe(best.parameters)}", _LINE_LENGTH)
        figure.supxlabel("\n".join(map(plain, told)), x=0.012, ha="left", fontsize=10, color=FAINT)
    figure.savefig(path, format="png", dpi=DPI, facecolor="white")


def _label(axes: Axes, counted: str, metric: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(counted, color=INK)
    axes.set_ylabel(plain(metric, MAX_LABEL), color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_trials(axes: Axes, search: Search, trials: Sequence[Trial]) -> None:
    """Draw the value of every trial, the last one of pruned trials, and the best so far."""
    entitle(axes, "Result of each trial")
    quiet(axes, grid="y")
    finished = [(trial.number, trial.value) for trial in trials if trial.value is not None]
    stopped = [(t.number, t.reports[-1]) for t in trials if t.state == "pruned" and t.reports]
    stopped = [(number, value) for number, value in stopped if math.isfinite(value)]
    failed = [trial.number for trial in trials if trial.state == "failed"]
    axes.plot(*_columns(stopped), "o", mfc="white", color=PRUNED, markersize=7, label=f"pruned ({len(stopped)})")
    axes.plot(*_columns(finished), "o", color=FINISHED, markersize=8, label=f"finished ({len(finished)})")
    if failed:
        axes.plot(
            failed, [0.02] * len(failed), "x", color=INK, transform=axes.get_xaxis_transform(),
            label=f"failed ({len(failed)})",
        )  # fmt: skip
    choose = min if search.minimizes else max
    records = [
        (number, choose(value for _, value in finished[: place + 1])) for place, (number, _) in enumerate(finished)
    ]
    if records:
        axes.step(
            *_columns([*records, (len(trials) - 1, records[-1][1])]),
            where="post",
            color=BEST,
            lw=2,
            label="best so far",
        )
    _label(axes, "trial", search.metric)
    _leave_out_what_is_far(axes, search, [value for _, value in finished + stopped])
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)


def _draw_curves(axes: Axes, search: Search, trials: Sequence[Trial], best: Trial | None) -> None:
    """Draw the reports of every trial: the best in front, pruned ones pale."""
    entitle(axes, "Reports of each trial; a dot: pruned there")
    quiet(axes, grid="y")
    for trial in sorted(
        trials, key=lambda one: (best is not None and one.number == best.number, one.value is not None)
    ):
        reports = [value for value in trial.reports if math.isfinite(value)]
        if not reports or trial.state not in ("finished", "pruned"):
            continue
        steps = range(1, len(reports) + 1)
        is_best = best is not None and trial.number == best.number
        colour = BEST if is_best else PRUNED if trial.state == "pruned" else FINISHED
        axes.plot(steps, reports, color=colour, lw=2.5 if is_best else 1, alpha=1.0 if is_best else 0.55)
        if trial.state == "pruned" or len(reports) == 1:
            axes.plot(steps[-1:], reports[-1:], "o", color=colour, markersize=4, alpha=0.8)
    _label(axes, "report", search.metric)
    _leave_out_what_is_far(axes, search, [value for trial in trials for value in trial.reports if math.isfinite(value)])


def _draw_importances(axes: Axes, importances: Mapping[str, float]) -> None:
    """Draw the share of the difference between good and average trials that each parameter explains."""
    entitle(axes, "Importance of parameters")
    quiet(axes, grid="x")
    if not importances:
        axes.text(
            0.5,
            0.5,
            "too few trials to tell,\nor none beyond chance",
            ha="center",
            color=FAINT,
            transform=axes.transAxes,
        )
        axes.set_axis_off()
        return
    names = sorted(importances, key=lambda name: importances[name])
    axes.barh(range(len(names)), [importances[name] for name in names], height=0.6, color=BASELINE_COLOUR)
    axes.set_yticks(range(len(names)), [plain(name, MAX_LABEL) for name in names])
    for place, name in enumerate(names):
        axes.annotate(
            f"{importances[name]:.0%}", (importances[name], place), xytext=(5, 0), textcoords="offset points",
            va="center", color=INK, fontsize=9,
        )  # fmt: skip
    axes.set_xlim(0, 1.15 * max(importances.values()) or 1)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("importance (PED-ANOVA), of those beyond chance", color=INK)


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [number for number, _ in points], [value for _, value in points]


def _leave_out_what_is_far(axes: Axes, search: Search, values: Sequence[float]) -> None:
    """Cut the axis behind most values, on the side of the worse ones."""
    if len(values) < 2 or min(values) == max(values):
        return
    ordered = sorted(values, reverse=not search.minimizes)
    good, most = ordered[0], ordered[math.ceil(_FAR * (len(ordered) - 1))]
    low, high = sorted((good, most))
    if low > 0 and high / low > _WIDE:
        scale_by_ratio(axes)
        margin = (high / low) ** _MARGIN
        axes.set_ylim(low / margin, high * margin)
    elif low < high:
        margin = _MARGIN * (high - low)
        axes.set_ylim(low - margin, high + margin)

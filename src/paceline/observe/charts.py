"""Charts of a report: their titles, the runs each one shows, and their layout on one sheet."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from textwrap import wrap
from typing import TYPE_CHECKING

from paceline.observe.plots import (
    DPI,
    FAINT,
    INK,
    Subject,
    draw_accuracy,
    draw_loss_by_clock,
    draw_loss_by_time,
    draw_staleness,
    draw_waiting,
    new_figure,
    plain,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

WIDTH_IN = 14.0
ROW_HEIGHT_IN = 4.4
TITLE_HEIGHT_IN = 0.7
LINE_HEIGHT_IN = 0.22
LINE_LENGTH = 180
MAX_LINES = 12
MAX_TITLE = 80  # characters


@dataclass(frozen=True, slots=True)
class Chart:
    """One idea: its name, a sentence for newcomers, the runs it can show, and how to draw them.

    `draw` gets one pair of axes, or one for every run when `small_multiples` is set.
    """

    title: str
    caption: str
    can_show: Callable[[Subject], bool]
    draw: Callable[[Sequence[Axes], Sequence[Subject]], None]
    small_multiples: bool = False


LOSS_BY_TIME = Chart(
    "Loss against time",
    "A curve further left is faster. The numbers say when a run was done, even off the chart.",
    lambda subject: bool(subject.summary.loss_by_time),
    lambda row, subjects: draw_loss_by_time(row[0], subjects),
)
LOSS_BY_CLOCK = Chart(
    "Loss against clock",
    "What stale values cost: after equally many steps, lower is better; the numbers say the last loss.",
    lambda subject: bool(subject.summary.loss_by_clock),
    lambda row, subjects: draw_loss_by_clock(row[0], subjects),
)
STALENESS = Chart(
    "How old the values were that workers read",
    "At -1 a read has all updates of all earlier clocks; each bar further left is one clock older. Dark: the newest "
    "values there were, since some worker was late. Pale: newer ones lay on the servers.",
    lambda subject: bool(subject.summary.differentials) and not subject.is_baseline,
    draw_staleness,
    small_multiples=True,
)
WAITING = Chart(
    "Who waited, and for how much of the time",
    "A waiting worker computes nothing. Hatched: the worker that is slow, always or at times.",
    lambda subject: len(subject.summary.workers) > 1,
    lambda row, subjects: draw_waiting(row[0], subjects),
)
ACCURACY = Chart(
    "Final test accuracy",
    "The share of examples never trained on that the model gets right; the axis does not start at zero.",
    lambda subject: subject.summary.test_accuracy is not None,
    lambda row, subjects: draw_accuracy(row[0], subjects),
)
SHEET = ((LOSS_BY_TIME, LOSS_BY_CLOCK), (STALENESS,), (WAITING, ACCURACY))


def charts_of(subjects: Sequence[Subject]) -> list[Chart]:
    """Return the charts that have something to show, in reading order."""
    return [chart for row in SHEET for chart in row if any(map(chart.can_show, subjects))]


def draw_alone(chart: Chart, subjects: Sequence[Subject]) -> bytes:
    """Return one chart as PNG, without its title and caption."""
    figure = new_figure(WIDTH_IN * 0.8, ROW_HEIGHT_IN * (0.8 if chart.small_multiples else 1))
    _fill(figure, chart, subjects)
    return _png(figure)


def draw_sheet(subjects: Sequence[Subject], *, title: str, subtitle: str) -> bytes:
    """Return all charts on one sheet as PNG."""
    rows = [[chart for chart in row if any(map(chart.can_show, subjects))] for row in SHEET]
    rows = [row for row in rows if row]
    lines = wrap(subtitle, LINE_LENGTH)[:MAX_LINES]
    header_in = TITLE_HEIGHT_IN + LINE_HEIGHT_IN * len(lines)
    figure = new_figure(WIDTH_IN, header_in + ROW_HEIGHT_IN * len(rows))
    heights = [header_in] + [ROW_HEIGHT_IN] * len(rows)
    header, *bands = figure.subfigures(1 + len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    header.text(0.01, 0.92, plain(title, MAX_TITLE), fontsize=20, weight="bold", color=INK, va="top")
    header.text(0.01, 0.04, "\n".join(map(plain, lines)), fontsize=10.5, color=FAINT, va="bottom", linespacing=1.4)
    for band, row in zip(bands, rows, strict=True):
        cells = band.subfigures(1, len(row), squeeze=False, wspace=0.04)[0]
        for cell, chart in zip(cells, row, strict=True):
            _entitle(cell, chart, WIDTH_IN / len(row))
            _fill(cell, chart, subjects)
    return _png(figure)


def _entitle(cell: SubFigure, chart: Chart, width_in: float) -> None:
    left = 0.14 / width_in
    # The empty second line keeps room for the caption, which has a size of its own.
    cell.suptitle(f"{chart.title}\n", x=left, ha="left", fontsize=14, weight="bold", color=INK)
    cell.text(left, 1 - 0.36 / ROW_HEIGHT_IN, chart.caption, fontsize=9.5, color=FAINT, va="top")


def _fill(figure: Figure | SubFigure, chart: Chart, subjects: Sequence[Subject]) -> None:
    shown = [subject for subject in subjects if chart.can_show(subject)]
    columns = len(shown) if chart.small_multiples else 1
    chart.draw(list(figure.subplots(1, columns, squeeze=False, sharey=True)[0]), shown)


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white")
    return buffer.getvalue()

"""Plots of runs by matplotlib, the charts of a report, and their layout on one sheet."""

from __future__ import annotations

from io import BytesIO
from textwrap import wrap
from typing import TYPE_CHECKING

import msgspec

from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from paceline.observe.summary import CurvePoint, RunSummary

# Okabe and Ito's colours, distinct for every kind of colour vision, without the two that are too pale on white; and two
# more.
POLICY_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A4FA3", "#7A6A2B")
BASELINE_COLOUR = "#555555"
INK = "#222222"
FAINT = "#8a8a8a"
GRID = "#e6e6e6"
DPI = 150
MAX_LABEL = 40  # characters
# Older reads share the leftmost bar, so that one straggler does not flatten every histogram.
MAX_BARS = 8
PALENESS = 0.35
# A baseline longer than this many times the slowest other run is cut off, so that the others stay apart.
BASELINE_ROOM = 1.6


class Subject(msgspec.Struct, frozen=True):
    """A run to draw: its numbers, its label, and its colour, the same in every picture."""

    label: str  # for texts; `drawn` for pictures
    summary: RunSummary
    colour: str

    @property
    def drawn(self) -> str:
        """The label as pictures show it."""
        return plain(self.label, MAX_LABEL)

    @property
    def is_baseline(self) -> bool:
        """Return whether a single process did all the work, without reads or waits."""
        return len(self.summary.workers) == 1


def plain(text: str, length: int = 1000) -> str:
    r"""Return a text for a picture: without formulas, on one line, and of bounded length.

    >>> print(plain(r"$\frac{", 20), plain("ab\n" * 30, 9))
    \$\frac{ ab ab ...
    """
    shown = "".join(character if character.isprintable() else " " for character in text)
    return (shown if len(shown) <= length else f"{shown[: length - 3]}...").replace("$", r"\$")


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty white figure; raises UsageError when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "Drawing the report needs matplotlib, which is not installed: pip install 'paceline[demo]'."
        ) from error
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    return figure


def colours(are_baselines: Sequence[bool]) -> list[str]:
    """Give every run its colour: policies in a fixed order, baselines in grey."""
    policies = iter(POLICY_COLOURS * (len(are_baselines) // len(POLICY_COLOURS) + 1))
    return [BASELINE_COLOUR if is_baseline else next(policies) for is_baseline in are_baselines]


def draw_loss_by_time(axes: Axes, subjects: Sequence[Subject]) -> None:
    """Draw the training loss of every run against seconds, and label its duration."""
    draw_curves(axes, [(subject, subject.summary.loss_by_time) for subject in subjects])
    name_ends(axes, [(subject, f"{subject.summary.seconds:.1f} s") for subject in subjects])
    axes.set_xlabel("seconds since the first step began", color=INK)
    parallel_s = [subject.summary.seconds for subject in subjects if not subject.is_baseline]
    if parallel_s:
        axes.set_xlim(right=min(axes.get_xlim()[1], BASELINE_ROOM * max(parallel_s)))


def draw_loss_by_clock(axes: Axes, subjects: Sequence[Subject]) -> None:
    """Draw the training loss of every run against clocks, and label its last loss."""
    draw_curves(axes, [(subject, subject.summary.loss_by_clock) for subject in subjects])
    name_ends(axes, [(subject, f"{subject.summary.loss_by_clock[-1].loss:.3f}") for subject in subjects])
    axes.set_xlabel("clock", color=INK)


def draw_staleness(row: Sequence[Axes], subjects: Sequence[Subject]) -> None:
    """Draw one histogram of clock differentials for each subject, all on the same scales."""
    seen = [differential for subject in subjects for differential in subject.summary.differentials]
    newest = max(seen, default=-1)
    oldest = max(min(seen, default=-1), newest - MAX_BARS + 1)
    for axes, subject in zip(row, subjects, strict=True):
        _draw_histogram(axes, subject, oldest, newest)
        axes.set_ylim(0, 1.3)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    row[0].set_ylabel("share of reads", color=INK)


def draw_waiting(axes: Axes, subjects: Sequence[Subject]) -> None:
    """Draw every worker's wait share, grouped by run, with the slow worker of each run hatched."""
    left = 0.0
    ticks: list[float] = []
    tick_labels: list[str] = []
    for subject in subjects:
        workers = subject.summary.workers
        for place, worker in enumerate(workers):
            is_slow = worker.worker == subject.summary.slow_worker
            _draw_wait_bar(axes, left + place, worker.wait_share, subject.colour, is_slow=is_slow)
            ticks.append(left + place)
            tick_labels.append(f"{worker.worker}\nslow" if is_slow else f"{worker.worker}")
        axes.annotate(
            subject.drawn, (left + (len(workers) - 1) / 2, 0), xycoords=axes.get_xaxis_transform(),
            xytext=(0, -36), textcoords="offset points", ha="center", va="top",
            color=subject.colour, weight="bold", annotation_clip=False,
        )  # fmt: skip
        left += len(workers) + 1
    axes.set_xticks(ticks, tick_labels)
    _percent_axis(axes)
    quiet(axes, grid="y")
    axes.set_ylim(0, min(1.0, 1.25 * axes.dataLim.y1) or 1.0)
    axes.set_ylabel("share of time spent waiting", color=INK)


def draw_accuracy(axes: Axes, subjects: Sequence[Subject]) -> None:
    """Draw the final test accuracy of every run as a point, and that of the baseline as a line."""
    known = [
        (subject, subject.summary.test_accuracy) for subject in subjects if subject.summary.test_accuracy is not None
    ]
    quiet(axes, grid="x")
    for place, (subject, accuracy) in enumerate(known):
        if subject.is_baseline:
            axes.axvline(accuracy, color=subject.colour, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.plot([accuracy], [place], "o", color=subject.colour, markersize=11, zorder=3)
        axes.annotate(
            f"{accuracy:.2%}", (accuracy, place), xytext=(11, 0), textcoords="offset points", va="center",
            color=subject.colour, weight="bold", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    axes.set_yticks(range(len(known)), [subject.drawn for subject, _ in known])
    for text, (subject, _) in zip(axes.get_yticklabels(), known, strict=True):
        text.set(color=subject.colour, weight="bold")
    axes.set_ylim(len(known) - 0.5, -0.5)
    _widen(axes, [accuracy for _, accuracy in known])
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.1%}")
    axes.set_xlabel("test accuracy", color=INK)


def draw_curves(axes: Axes, drawn: Sequence[tuple[Subject, Sequence[CurvePoint]]]) -> None:
    """Draw a loss curve of each run, dashed for a baseline."""
    quiet(axes, grid="y")
    for subject, curve in drawn:
        xs, ys = [point.at for point in curve], [point.loss for point in curve]
        style = (0, (5, 2)) if subject.is_baseline else "-"
        axes.plot(xs, ys, color=subject.colour, linewidth=2, linestyle=style, alpha=0.9)
        axes.plot(xs[-1:], ys[-1:], "o", color=subject.colour, markersize=6)
    axes.set_ylabel("training loss", color=INK)
    axes.set_xlim(left=0)
    if all(point.loss > 0 for _, curve in drawn for point in curve):
        scale_by_ratio(axes)
        axes.set_ylabel("training loss (log scale)", color=INK)


def scale_by_ratio(axes: Axes) -> None:
    """Use a logarithmic scale with plain numbers, so that late differences stay visible."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def entitle(axes: Axes, title: str) -> None:
    """Write a title at the top left of a plot."""
    axes.set_title(title, loc="left", fontsize=12, weight="bold", color=INK)


def name_ends(axes: Axes, ends: Sequence[tuple[Subject, str]]) -> None:
    """Label every curve and its end, top right, where falling curves leave room."""
    for line, (subject, end) in enumerate(ends):
        for x, side, text, weight in ((0.78, "right", subject.drawn, "bold"), (0.80, "left", end, "normal")):
            axes.text(
                x, 0.97 - 0.075 * line, text, transform=axes.transAxes, ha=side, va="top", weight=weight,
                color=subject.colour, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip


def _draw_histogram(axes: Axes, subject: Subject, oldest: int, newest: int) -> None:
    summary = subject.summary
    shares = _folded(summary.differentials, oldest, newest, summary.num_reads)
    freshest = _folded(summary.freshest or {}, oldest, newest, summary.num_reads)
    axes.bar(list(shares), list(shares.values()), width=0.82, color=_pale(subject.colour))
    axes.bar(list(freshest), list(freshest.values()), width=0.82, color=subject.colour)
    for differential, share in shares.items():
        if share >= 0.01:
            axes.text(differential, share + 0.015, f"{share:.0%}", ha="center", color=INK, fontsize=8)
    has_older = min(summary.differentials, default=oldest) < oldest
    axes.set_xticks(list(shares), [f"≤{tick}" if has_older and tick == oldest else f"{tick}" for tick in shares])
    axes.set_xlim(oldest - 0.6, newest + 0.6)
    axes.set_title(subject.drawn, color=subject.colour, weight="bold", fontsize=11)
    axes.text(
        0.5, 0.985, f"newest there was: {summary.freshest_share:.0%}\noldest: {summary.max_staleness} clocks behind",
        transform=axes.transAxes, ha="center", va="top", color=FAINT, fontsize=9,
    )  # fmt: skip
    axes.set_xlabel("clock differential", color=INK)
    _percent_axis(axes)
    quiet(axes, grid="y")


def _folded(counts: Mapping[int, int], oldest: int, newest: int, num_reads: int) -> dict[int, float]:
    """Return the share of reads at each differential; the oldest one includes all older reads."""
    shares = dict.fromkeys(range(oldest, newest + 1), 0.0)
    for differential, count in counts.items():
        shares[max(differential, oldest)] += count / num_reads
    return shares


def _pale(colour: str) -> tuple[float, float, float]:
    """Return the colour mixed with white: unlike transparency, it prints the same everywhere."""
    red, green, blue = (1 - PALENESS * (1 - int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return red, green, blue


def _draw_wait_bar(axes: Axes, place: float, share: float, colour: str, *, is_slow: bool) -> None:
    face, hatch = ("white", "////") if is_slow else (colour, None)
    axes.bar([place], [share], width=0.84, color=face, edgecolor=colour, hatch=hatch, linewidth=1)
    axes.annotate(
        f"{share:.0%}", (place, share), xytext=(0, 2), textcoords="offset points",
        ha="center", va="bottom", color=INK, fontsize=8,
    )  # fmt: skip


def _widen(axes: Axes, values: Sequence[float]) -> None:
    """Leave room left and right, and do not magnify small differences."""
    if values:
        margin = max(0.01, 0.35 * (max(values) - min(values)))
        axes.set_xlim(max(0.0, min(values) - margin), min(1.0 + margin / 4, max(values) + margin))


def _percent_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")


def quiet(axes: Axes, grid: str) -> None:
    """Reduce the axes to what helps to read values along `grid`, x or y."""
    axes.grid(visible=True, axis="x" if grid == "x" else "y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(which="both", color=FAINT, labelcolor=INK)


WIDTH_IN = 14.0
ROW_HEIGHT_IN = 4.4
TITLE_HEIGHT_IN = 0.7
LINE_HEIGHT_IN = 0.22
LINE_LENGTH = 180
MAX_LINES = 12
MAX_TITLE = 80  # characters


class Chart(msgspec.Struct, frozen=True):
    """One idea: its name, a sentence for newcomers, the runs that have it, and how to draw them.

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
    lambda subject: bool(subject.summary.num_reads) and not subject.is_baseline,
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
    """Return the charts with data, in reading order."""
    return [chart for row in SHEET for chart in row if any(map(chart.can_show, subjects))]


def draw_alone(chart: Chart, subjects: Sequence[Subject]) -> bytes:
    """Return one chart as PNG, without its title and caption."""
    figure = new_figure(WIDTH_IN * 0.8, ROW_HEIGHT_IN * (0.8 if chart.small_multiples else 1))
    _fill(figure, chart, subjects)
    return _png(figure)


def draw_sheet(
    subjects: Sequence[Subject], *, title: str, subtitle: str, sheet: Sequence[Sequence[Chart]] = SHEET
) -> bytes:
    """Return the charts of a sheet as PNG, row by row, without those that no subject has data for."""
    rows = [[chart for chart in row if any(map(chart.can_show, subjects))] for row in sheet]
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
    # The empty second line keeps room for the caption, which has another size.
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

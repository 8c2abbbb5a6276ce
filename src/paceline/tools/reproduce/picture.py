"""The picture of a claim: plots, the numbers beside the anchor, the verdict, and the command that draws it anew."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Final

from paceline.observe.plots import FAINT, INK, POLICY_COLOURS, new_figure, plain, quiet

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

    from paceline.tools.reproduce.claim import Check, Claim, Curve, Finding, Plot

_WIDTH_IN: Final = 11.0
_DPI: Final = 100  # a page has all of them
_PANELS_IN: Final = 3.7
_LINE_IN: Final = 0.2
_HEAD_IN: Final = 0.95
_GAP_IN: Final = 0.2
_LETTERS_A_LINE: Final = 142
_ROOM_FOR_LEGEND: Final = 1.35  # of the height of bars
_LETTERS_AN_INCH: Final = 9
_REFERENCE: Final = "#777777"
_HOLDS, _FAILS = "#00704f", "#b34700"
# Where the columns of the table of checks begin.
_COLUMNS: Final = (0.012, 0.40, 0.70, 0.925)


def draw_claim(claim: Claim, finding: Finding, commands: tuple[str, ...], path: Path) -> None:
    """Draw what a run found and write it as PNG.

    Raises:
        UsageError: matplotlib is not installed.
    """
    rows = [_cells(check) for check in finding.checks]
    notes = [*wrap(finding.note, _LETTERS_A_LINE), *(f"$ {command}" for command in commands)]
    num_lines = 1 + sum(max(map(len, row)) for row in rows)
    table_in = _LINE_IN * num_lines + 2 * _GAP_IN
    foot_in = _LINE_IN * len(notes) + _GAP_IN
    figure = new_figure(_WIDTH_IN, _HEAD_IN + _PANELS_IN + table_in + foot_in)
    head, middle, table, foot = figure.subfigures(
        4, 1, squeeze=False, height_ratios=[_HEAD_IN, _PANELS_IN, table_in, foot_in]
    )[:, 0]
    _write_head(head, claim, finding)
    axes = middle.subplots(1, len(finding.plots), squeeze=False)[0]
    for place, plot in zip(axes, finding.plots, strict=True):
        _draw_plot(place, plot)
    _write_table(table, rows, finding.checks, table_in)
    for place, line in enumerate(notes):
        height = 1 - (_GAP_IN / 2 + place * _LINE_IN) / foot_in
        is_command = line.startswith("$ ")
        foot.text(
            0.012, height, plain(line), fontsize=8.5, va="top", color=INK if is_command else FAINT,
            family="monospace" if is_command else None,
        )  # fmt: skip
    figure.savefig(path, format="png", dpi=_DPI, facecolor="white")


def _write_head(part: SubFigure, claim: Claim, finding: Finding) -> None:
    says = f"{claim.paper}: {claim.number}" if claim.number else claim.paper
    part.text(0.012, 0.92, plain(f"{claim.name}. {claim.title}", 96), fontsize=15, weight="bold", color=INK, va="top")
    here = "counted" if claim.time == "counted" else f"{claim.time} time"
    part.text(0.012, 0.42, plain(f"{says}. Here: {here}", 150), fontsize=10, color=FAINT, va="top")
    verdict, colour = ("shown", _HOLDS) if finding.holds else ("not shown", _FAILS)
    part.text(0.988, 0.42, verdict, fontsize=13, weight="bold", color=colour, va="top", ha="right")


def _cells(check: Check) -> tuple[list[str], ...]:
    """Return the texts of one row, each wrapped to its column."""
    letters = (58, 42, 32, 12)
    verdict = "holds" if check.holds else "does not"
    texts = (check.what, check.expected, check.ours, verdict)
    return tuple(wrap(text, width) or [""] for text, width in zip(texts, letters, strict=True))


def _write_table(
    part: SubFigure, rows: list[tuple[list[str], ...]], checks: tuple[Check, ...], height_in: float
) -> None:
    def write(line: int, column: int, text: str, colour: str, weight: str = "normal") -> None:
        height = 1 - (_GAP_IN + line * _LINE_IN) / height_in
        part.text(_COLUMNS[column], height, plain(text), fontsize=9.5, color=colour, va="top", weight=weight)

    for column, heading in enumerate(("measured", "anchor", "ours", "")):
        write(0, column, heading, FAINT)
    line = 1
    for row, check in zip(rows, checks, strict=True):
        for column, texts in enumerate(row):
            colour = INK if column < 3 else _HOLDS if check.holds else _FAILS
            for offset, text in enumerate(texts):
                write(line + offset, column, text, colour, "bold" if column == 3 else "normal")
        line += max(map(len, row))


def _draw_plot(axes: Axes, plot: Plot) -> None:
    quiet(axes, grid="y")
    if plot.is_log_x:
        _scale_by_doubling(axes, [float(place) for curve in plot.curves for place in curve.x])
    if plot.is_log_y:
        axes.set_yscale("log")
    palette = iter(POLICY_COLOURS)
    colours = [_REFERENCE if curve.is_reference else next(palette) for curve in plot.curves]
    if plot.kind == "bars":
        _draw_bars(axes, plot, colours)
    else:
        for curve, colour in zip(plot.curves, colours, strict=True):
            _draw_line(axes, curve, colour)
    axes.set_title(plain(plot.title, 80), loc="left", fontsize=11, weight="bold", color=INK)
    axes.set_xlabel(plain(plot.x_label, 90), color=INK)
    axes.set_ylabel(plain(plot.y_label, 60), color=INK)
    axes.set_ylim(*plot.y_range)
    if len(plot.curves) > 1:
        if plot.kind == "bars" and plot.y_range[1] is None:  # else bars would lie under the legend
            axes.set_ylim(top=axes.get_ylim()[1] * _ROOM_FOR_LEGEND)
        axes.legend(fontsize=8.5, frameon=False, labelcolor=INK)


def _scale_by_doubling(axes: Axes, places: list[float]) -> None:
    """Give each doubling the same room, and 0 as much as the step to 1."""
    if min(places) <= 0:
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xticks(sorted(set(places)))
    else:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _draw_line(axes: Axes, curve: Curve, colour: str) -> None:
    marker = "o" if len(curve.x) <= 20 and not curve.is_reference else None
    style = "--" if curve.is_reference else "-"
    axes.plot(curve.x, curve.y, style, color=colour, label=plain(curve.label, 40), marker=marker, ms=4, lw=1.6)


def _draw_bars(axes: Axes, plot: Plot, colours: list[str]) -> None:
    names = [str(name) for name in dict.fromkeys(name for curve in plot.curves for name in curve.x)]
    width = 0.8 / len(plot.curves)
    for place, (curve, colour) in enumerate(zip(plot.curves, colours, strict=True)):
        lefts = [names.index(str(name)) - 0.4 + (place + 0.5) * width for name in curve.x]
        bars = axes.bar(lefts, curve.y, width * 0.9, color=colour, label=plain(curve.label, 40))
        if len(names) * len(plot.curves) <= 14:
            axes.bar_label(bars, fmt=lambda value: f"{value:.3g}", fontsize=8, color=INK, padding=1)
    width_in = axes.get_position().width * _WIDTH_IN
    is_tight = sum(len(name) + 1 for name in names) > _LETTERS_AN_INCH * width_in
    axes.set_xticks(range(len(names)), names, rotation=25 if is_tight else 0)
    axes.margins(y=0.12)

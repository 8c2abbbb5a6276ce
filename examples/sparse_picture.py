"""The picture of `sparse_logistic.py`: how the model becomes good and sparse, and what the filters save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pictures import COLOURS, FAINT, GRID, INK, make_quiet, mixed_with_white, new_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Runs that a filter does not change lie on top of each other: the first is drawn wide and pale, the last fine.
WIDTHS, SHADES = (7.0, 3.5, 1.4), (0.3, 0.65, 1.0)
PARTS = {"numbers": 1.0, "ids": 0.6, "digests": 0.35}  # of what is sent, and how strong their colour is
CLOSE = 1e-4  # what the filters may change of the objective
NAME_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}


class Point(NamedTuple):
    """How good the weights of a run were at a clock, and what the filters of worker 0 had done by then."""

    clock: int
    objective: float
    auc: float
    num_weights: int
    num_filtered: int
    num_pushed: int


class Curve(NamedTuple):
    """A run as it is drawn: its points, and the bytes of all workers by what they were."""

    name: str
    points: Sequence[Point]
    sent_bytes: Mapping[str, float]


def draw(path: Path, title: str, facts: str, curves: Sequence[Curve]) -> None:
    """Write the picture."""
    figure = new_picture(17.0, 9.0)
    figure.suptitle(f"{title}\n\n", x=0.012, ha="left", fontsize=18, weight="bold", color=INK)
    figure.text(0.0125, 0.945, facts, fontsize=10.5, color=FAINT, va="top", linespacing=1.4)
    (objective, difference, auc), (weights, filtered, sent) = figure.subplots(2, 3)
    draw_curves(objective, curves, [[point.objective for point in curve.points] for curve in curves], "{:.6f}")
    entitle(objective, "Objective", "Mean log loss of all samples to train with, plus the penalty.")
    draw_difference(difference, curves)
    entitle(difference, "What the filters change of it", "Beside no filters, at the same clock; grey: within 0.0001.")
    draw_curves(auc, curves, [[point.auc for point in curve.points] for curve in curves], "{:.4f}", rises=True)
    entitle(auc, "Area under the ROC curve", "On samples that were not trained with; higher is better.")
    draw_curves(weights, curves, [[point.num_weights for point in curve.points] for curve in curves], "{:,}")
    entitle(
        weights,
        "Weights that are not 0",
        "Some come and go, as workers have different samples.",
    )
    if curves[-1].points[-1].num_filtered:
        draw_filtered(filtered, curves[-1], COLOURS[len(curves) - 1])
        told = "Their weights are 0 and would stay so; every tenth clock all are sent."
        entitle(filtered, "Rows that are not pushed", told)
    else:
        filtered.axis("off")
    draw_bytes(sent, curves)
    entitle(sent, "Bytes of all workers", "Pushed and pulled, beside the run without filters.")
    figure.savefig(path)
    print(f"picture: {path}")


def entitle(axes: Axes, title: str, caption: str) -> None:
    """Say above the axes what they show."""
    axes.set_title(f"{title}\n", loc="left", fontsize=13, weight="bold", color=INK)
    below = axes.annotate(
        caption, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", fontsize=9.5, color=FAINT
    )
    below.set_in_layout(False)  # the room for it is the empty line of the title, and no column gets narrower


def draw_curves(
    axes: Axes, curves: Sequence[Curve], values: Sequence[Sequence[float]], form: str, *, rises: bool = False
) -> None:
    """Draw a value of each run against the clock without its start, and say where it ended."""
    make_quiet(axes)
    for line, (curve, ys, colour) in enumerate(zip(curves, values, COLOURS, strict=False)):
        xs = [point.clock for point in curve.points]
        axes.plot(xs[1:], ys[1:], color=colour, linewidth=WIDTHS[line], alpha=SHADES[line], solid_capstyle="round")
        height = (0.30 if rises else 0.96) - 0.085 * line
        for x, side, text in ((0.76, "right", curve.name), (0.79, "left", form.format(ys[-1]))):
            axes.text(
                x, height, text, transform=axes.transAxes, ha=side, va="top", color=colour, weight="bold", bbox=NAME_BOX
            )
    axes.set_xlim(left=0)
    axes.set_xlabel("clock", color=INK)


def draw_difference(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw by how much the objective of each run with filters is above that of the first, in millionths."""
    make_quiet(axes)
    axes.axhspan(-CLOSE * 1e6, CLOSE * 1e6, color=GRID, alpha=0.55, linewidth=0)
    first = {point.clock: point.objective for point in curves[0].points}
    for line, (curve, colour) in enumerate(zip(curves[1:], COLOURS[1:], strict=False)):
        points = [point for point in curve.points if point.clock in first]
        above = [(point.objective - first[point.clock]) * 1e6 for point in points]
        axes.plot([point.clock for point in points], above, color=colour, linewidth=1.8)
        for x, side, text in ((0.70, "right", curve.name), (0.73, "left", f"{above[-1] / 1e6:+.1e}")):
            axes.text(
                x, 0.96 - 0.085 * line, text, transform=axes.transAxes, ha=side, va="top", color=colour, weight="bold"
            )
    axes.set_yscale("symlog", linthresh=CLOSE * 1e6)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+,.0f}" if value else "0")
    axes.set_ylim(-3e4, 3e4)
    axes.set_ylabel("millionths", color=INK)
    axes.set_xlim(left=0)
    axes.set_xlabel("clock", color=INK)


def draw_filtered(axes: Axes, curve: Curve, colour: str) -> None:
    """Draw the share of rows that worker 0 left out between one look and the next."""
    make_quiet(axes)
    steps = [(a, b) for a, b in pairwise(curve.points) if b.num_pushed > a.num_pushed]
    shares = [(b.num_filtered - a.num_filtered) / (b.num_pushed - a.num_pushed) for a, b in steps]
    axes.plot([b.clock for _, b in steps], shares, color=colour, linewidth=1.8)
    last = curve.points[-1]
    told = f"{curve.name}    {last.num_filtered / last.num_pushed:.1%} of all"
    axes.text(0.97, 0.06, told, transform=axes.transAxes, ha="right", color=colour, weight="bold")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.set_xlabel("clock", color=INK)


def draw_bytes(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw a bar for each run, made of what was sent."""
    make_quiet(axes)
    most = sum(curves[0].sent_bytes.values())
    for place, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        bottom = 0.0
        for part, strength in PARTS.items():
            height = curve.sent_bytes[part] / 1e6
            axes.bar([place], [height], bottom=bottom, width=0.6, color=mixed_with_white(colour, strength))
            if height > 0.05 * most / 1e6:
                axes.text(place, bottom + height / 2, part, ha="center", va="center", color="white", weight="bold")
            bottom += height
        share = f"{bottom * 1e6 / most:.1%}".replace("100.0%", "100%")
        axes.text(place, bottom + 0.015 * most / 1e6, share, ha="center", color=colour, weight="bold")
    axes.set_ylim(0, 1.1 * most / 1e6)
    axes.set_xticks(range(len(curves)), [curve.name.replace(" and ", "\nand ") for curve in curves])
    axes.set_ylabel("MB", color=INK)

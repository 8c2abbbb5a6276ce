"""The picture of `factorization_machine.py`: how much better a model is that knows about pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pictures import COLOURS, FAINT, INK, make_quiet, new_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Point(NamedTuple):
    """How good a model was at a clock, on samples that it was not trained with."""

    clock: int
    loss: float
    auc: float


class Curve(NamedTuple):
    """A kind of model."""

    name: str
    points: Sequence[Point]


def draw(path: Path, facts: str, curves: Sequence[Curve]) -> None:
    """Write the picture."""
    figure = new_picture(13.5, 5.4)
    figure.suptitle("Factorization machine\n", x=0.012, ha="left", fontsize=18, weight="bold", color=INK)
    figure.text(0.013, 0.905, facts, fontsize=10, color=FAINT, va="top")
    left, right = figure.subplots(1, 2)
    draw_curves(left, curves, [[point.loss for point in curve.points] for curve in curves], top=0.96)
    left.set_title("Log loss of test samples: lower is better", loc="left", color=INK, weight="bold")
    draw_curves(right, curves, [[point.auc for point in curve.points] for curve in curves], top=0.28)
    right.set_title("Area under their ROC curve: higher is better", loc="left", color=INK, weight="bold")
    figure.savefig(path)
    print(f"picture: {path}")


def draw_curves(axes: Axes, curves: Sequence[Curve], values: Sequence[Sequence[float]], *, top: float) -> None:
    """Draw a value of each model against the clock without its start, and say where it ended."""
    make_quiet(axes)
    for line, (curve, ys, colour) in enumerate(zip(curves, values, COLOURS, strict=False)):
        axes.plot([point.clock for point in curve.points[1:]], ys[1:], color=colour, linewidth=2.2)
        axes.plot(curve.points[-1].clock, ys[-1], "o", color=colour, markersize=6)
        for x, side, text in ((0.82, "right", curve.name), (0.85, "left", f"{ys[-1]:.4f}")):
            axes.text(
                x, top - 0.075 * line, text, transform=axes.transAxes, ha=side, va="top", color=colour, weight="bold"
            )
    axes.set_xlim(left=0)
    axes.set_xlabel("clock", color=INK)

"""The picture of `matrix_factorization_figure.py`: the loss by clock and by time, and how old the rows were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from pictures import FAINT, INK, make_quiet, new_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Warm and darker with the bound for ssp, green and blue for essp: the figure is about these two families.
COLOURS = {
    "bsp": "#222222",
    "ssp:0": "#F6C877",
    "ssp:2": "#EFA43A",
    "ssp:3": "#E07B1A",
    "ssp:5": "#C4500C",
    "ssp:10": "#8C1D04",
    "essp:0": "#009E73",
    "essp:10": "#0072B2",
}
OTHER = "#7A4FA3"


class Outcome(Protocol):
    """What is drawn of one run."""

    policy: str
    curve: Sequence[tuple[int, float, float]]
    reads: Mapping[int, int]

    @property
    def loss(self) -> float:
        """The last loss, infinite where it diverged."""
        ...


def draw(path: Path, outcomes: Sequence[Outcome], caption: str) -> None:
    """Write the picture."""
    by_policy: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_policy.setdefault(outcome.policy, []).append(outcome)
    figure = new_picture(14, 9)
    header, curves, ages = figure.subfigures(3, 1, height_ratios=(1.0, 4.9, 3.0))
    header.text(
        0.01, 0.90, "What staleness costs: matrix factorization", fontsize=20, weight="bold", color=INK, va="top"
    )
    header.text(0.01, 0.02, caption, fontsize=10.5, color=FAINT, va="bottom", linespacing=1.4)
    left, right = curves.subplots(1, 2, sharey=True)
    _draw_curves(left, by_policy, column=0)
    _draw_curves(right, by_policy, column=1)
    left.set_title("Square loss over all ratings, against clock", loc="left", color=INK, weight="bold", fontsize=14)
    right.set_title("Against seconds", loc="left", color=INK, weight="bold", fontsize=14)
    left.set_xlabel("clock", color=INK)
    right.set_xlabel("seconds", color=INK)
    _name(right, by_policy)
    _draw_ages(ages.subplots(1, len(by_policy), sharey=True, squeeze=False)[0], by_policy)
    ages.suptitle("How old the rows were that workers read: clock differential, -1 is the freshest",
                  x=0.01, ha="left", color=INK, weight="bold", fontsize=14)  # fmt: skip
    figure.savefig(path)


def _draw_curves(axes: Axes, by_policy: Mapping[str, Sequence[Outcome]], column: int) -> None:
    make_quiet(axes)
    first = max(run.curve[0][2] for runs in by_policy.values() for run in runs)
    least = min(loss for runs in by_policy.values() for run in runs for _, _, loss in run.curve if loss > 0)
    for order, (policy, runs) in enumerate(by_policy.items()):
        curves = np.array([run.curve for run in runs])  # (seeds, snapshots, 3)
        losses = np.nan_to_num(curves[:, :, 2], nan=np.inf, posinf=np.inf).clip(max=100 * first)
        at, colour = np.median(curves[:, :, column], axis=0), COLOURS.get(policy, OTHER)
        style = (0, (5, 2)) if policy == "bsp" else "-"
        axes.fill_between(at, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axes.plot(at, np.median(losses, axis=0), color=colour, linestyle=style, linewidth=2.2, zorder=3 + (order == 0))
    axes.set_yscale("log")
    axes.set_ylim(0.9 * least, 1.15 * first)
    axes.set_xlim(left=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _plain_numbers(axes, (1, 1.5, 2, 3, 5, 7) if first > 4 * least else (1, 1.2, 1.5, 2, 3, 4, 5, 6, 7, 8))


def _plain_numbers(axes: Axes, digits: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.yaxis.set_major_locator(LogLocator(subs=digits))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda loss, _: f"{loss / 1000:,.0f} k")


def _name(axes: Axes, by_policy: Mapping[str, Sequence[Outcome]]) -> None:
    """Name every curve, and say how its last loss compares with that of bsp."""
    bsp = float(np.median([run.loss for run in by_policy["bsp"]]))
    for line, (policy, runs) in enumerate(by_policy.items()):
        ratio = float(np.median([run.loss for run in runs])) / bsp
        end = f"{ratio:.2f} of bsp's loss" if np.isfinite(ratio) else "diverges"
        for x, side, text, weight in ((1.10, "right", policy, "bold"), (1.12, "left", end, "normal")):
            axes.text(
                x, 0.97 - 0.085 * line, text, transform=axes.transAxes, ha=side, va="top", weight=weight,
                color=COLOURS.get(policy, OTHER), fontsize=11,
            )  # fmt: skip


def _draw_ages(row: Sequence[Axes], by_policy: Mapping[str, Sequence[Outcome]]) -> None:
    oldest = min(differential for runs in by_policy.values() for run in runs for differential in run.reads)
    for axes, (policy, runs) in zip(row, by_policy.items(), strict=True):
        make_quiet(axes)
        places = np.arange(oldest, 0)
        counts = np.array([sum(run.reads.get(int(place), 0) for run in runs) for place in places])
        shares = counts / counts.sum()
        mean = float(places @ shares)
        axes.bar(places, shares, width=0.85, color=COLOURS.get(policy, OTHER))
        axes.set_title(policy, color=COLOURS.get(policy, OTHER), weight="bold", fontsize=11)
        axes.text(0.04, 0.93, f"mean {mean:.2f}\nvariance {float((places - mean) ** 2 @ shares):.2f}",
                  transform=axes.transAxes, va="top", color=FAINT, fontsize=9)  # fmt: skip
        axes.set_xticks(range(-1, oldest - 1, -5))
        axes.set_xlim(oldest - 0.7, -0.3)
        axes.set_ylim(0, 1.05)
    row[0].yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    row[0].set_ylabel("share of rows", color=INK)

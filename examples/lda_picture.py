"""The picture of `lda.py`: how perplexity falls, and what the topics are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pictures import COLOURS, FAINT, INK, make_quiet, new_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Topic(NamedTuple):
    """A topic, by its share of all tokens and the words that say most about it."""

    share: float
    words: Sequence[str]


def draw(path: Path, curves: Mapping[str, Sequence[float]], topics: Sequence[Topic]) -> None:
    """Write the picture."""
    figure = new_picture(13.5, max(4.5, 0.31 * len(topics) + 1))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.35))
    _draw_curves(left, curves)
    _draw_topics(right, topics)
    figure.savefig(path)
    print(f"picture: {path}")


def _draw_curves(axes: Axes, curves: Mapping[str, Sequence[float]]) -> None:
    make_quiet(axes)
    styles = ("-", (0, (4, 2)), (0, (1, 1.5)))
    for line, ((name, curve), colour, style) in enumerate(zip(curves.items(), COLOURS, styles, strict=False)):
        axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=2.2, linestyle=style)
        for x, side, text in ((0.80, "right", name), (0.83, "left", f"{curve[-1]:.0f}")):
            axes.text(
                x, 0.96 - 0.06 * line, text, transform=axes.transAxes, ha=side, va="top", color=colour, weight="bold"
            )
    axes.set_xlim(left=0)
    axes.set_xlabel("sweep over all tokens", color=INK)
    axes.set_title("held-out perplexity", loc="left", color=INK, weight="bold")


def _draw_topics(axes: Axes, topics: Sequence[Topic]) -> None:
    axes.axis("off")
    axes.set_title("topics: share of all tokens, and the words that say most", loc="left", color=INK, weight="bold")
    largest = max(topic.share for topic in topics)
    for place, topic in enumerate(topics):
        colour = COLOURS[place % len(COLOURS)]
        axes.barh([place], [0.16 * topic.share / largest], height=0.62, left=0.07, color=colour, alpha=0.85)
        axes.text(0.06, place, f"{topic.share:.1%}", ha="right", va="center", color=FAINT, fontsize=9)
        axes.text(0.25, place, "  ".join(topic.words), ha="left", va="center", color=INK, fontsize=9.5)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(topics) - 0.4, -0.6)

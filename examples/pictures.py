"""How the pictures of the examples look."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours without the palest, told apart with every kind of colour vision; then two more.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A4FA3", "#7A6A2B")
INK, FAINT, GRID = "#222222", "#8a8a8a", "#e6e6e6"


def check_matplotlib() -> None:
    """End with a clear word where pictures cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise SystemExit(
            "This example draws a picture with matplotlib, not installed here: pip install 'paceline[plots]'."
        )


def new_picture(width_in: float, height_in: float) -> Figure:
    """Return an empty white figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=150, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    return figure


def make_quiet(axes: Axes) -> None:
    """Leave of the axes only what helps to read values."""
    axes.grid(visible=True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(which="both", color=FAINT, labelcolor=INK)


def mixed_with_white(colour: str, strength: float) -> tuple[float, float, float]:
    """Return a paler colour that hides what is behind it."""
    red, green, blue = (1 - strength * (1 - int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return red, green, blue

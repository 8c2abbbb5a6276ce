"""The picture of `word_embeddings.py`: some words with their neighbours on a plane, and how near these are."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from pictures import COLOURS, FAINT, INK, new_picture
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHARACTER, LINE = 0.0112, 0.031  # of a label, in parts of the map's width and height
LARGER = 1.5  # labels of the words that were asked for
NUM_PUSHES = 400


class Neighbourhood(NamedTuple):
    """A word, its neighbours from the nearest on, and the cosines between it and them."""

    word: str
    others: Sequence[str]
    cosines: Sequence[float]

    def members(self) -> list[str]:
        """Return the word and its neighbours."""
        return [self.word, *self.others]


def draw(path: Path, neighbourhoods: Sequence[Neighbourhood], words: Sequence[str], vectors: Tensor) -> None:
    """Write the picture; `vectors` (words, width) are those of `words`, which are distinct."""
    figure = new_picture(13, 7)
    left, right = figure.subplots(1, 2, width_ratios=(1.9, 1))
    _draw_map(left, neighbourhoods, words, _plane(vectors))
    _draw_list(right, neighbourhoods)
    figure.savefig(path)
    print(f"picture: {path}")


def _plane(vectors: Tensor) -> np.ndarray:
    """Return where each vector lies along the two directions in which they differ most, in 0..1."""
    torch.manual_seed(0)  # the method draws
    centred = vectors - vectors.mean(0)
    _, _, directions = torch.pca_lowrank(centred, q=min(6, *centred.shape))
    flat = (centred @ directions[:, :2]).numpy()
    return (flat - flat.min(0)) / np.ptp(flat, axis=0)


def _draw_map(axes: Axes, neighbourhoods: Sequence[Neighbourhood], words: Sequence[str], points: np.ndarray) -> None:
    colour = dict.fromkeys(words, FAINT)
    for neighbourhood, shade in zip(neighbourhoods[::-1], _shades(len(neighbourhoods))[::-1], strict=True):
        colour.update(dict.fromkeys(neighbourhood.members(), shade))
    asked = {neighbourhood.word for neighbourhood in neighbourhoods}
    for word, label in zip(words, _apart(points, words, asked), strict=True):
        size, weight = (9.5 * LARGER, "bold") if word in asked else (9.5, "normal")
        axes.text(*label, word, ha="center", va="center", color=colour[word], fontsize=size, weight=weight)
    axes.set_title(
        "words on the plane in which they differ most (labels make room for each other)",
        loc="left",
        color=INK,
        weight="bold",
    )
    axes.set_xlim(-0.06, 1.06)
    axes.set_ylim(-0.06, 1.06)
    axes.axis("off")


def _draw_list(axes: Axes, neighbourhoods: Sequence[Neighbourhood]) -> None:
    axes.axis("off")
    axes.set_title("nearest neighbours, by cosine", loc="left", color=INK, weight="bold")
    step = 1 / len(neighbourhoods)
    for place, (neighbourhood, shade) in enumerate(zip(neighbourhoods, _shades(len(neighbourhoods)), strict=True)):
        top = 1 - place * step
        axes.text(0, top, neighbourhood.word, color=shade, weight="bold", fontsize=12, va="top")
        pairs = zip(neighbourhood.others, neighbourhood.cosines, strict=True)
        near = [f"{other} {cosine:.2f}" for other, cosine in pairs]
        for line, first in enumerate(range(0, len(near), 4)):
            text, height = "    ".join(near[first : first + 4]), top - step * (0.26 + 0.21 * line)
            axes.text(0.02, height, text, color=INK, fontsize=9.5, va="top")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.01)


def _shades(number: int) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(number)]


def _apart(points: np.ndarray, words: Sequence[str], large: Set[str]) -> np.ndarray:
    """Return a place near each point for its label, (words, 2): labels push each other away until none overlap."""
    sizes = np.array([(CHARACTER * (len(word) + 1), LINE) for word in words])
    sizes *= np.where(np.isin(words, list(large)), LARGER, 1)[:, None]
    needed = (sizes[:, None] + sizes[None]) / 2
    places = points
    for _ in range(NUM_PUSHES):
        between = places[:, None] - places[None]
        overlap = needed - np.abs(between)
        overlap[np.arange(len(words)), np.arange(len(words))] = -1
        clash = (overlap > 0).all(2)
        if not clash.any():
            break
        # Along the direction where less is needed, half of it each; equal places part by their order.
        upward = overlap[..., 1] <= overlap[..., 0]
        order = np.sign(np.arange(len(words))[:, None] - np.arange(len(words))[None])
        sign = np.where(between == 0, order[..., None], np.sign(between))
        push = np.where(np.stack([~upward, upward], 2) & clash[..., None], sign * overlap / 2, 0)
        places = places + 0.5 * push.sum(1)
    return places

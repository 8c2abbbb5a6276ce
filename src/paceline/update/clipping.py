"""Clipping of an update by the norm of its combined gradient, as `clip_grad_norm_` does after torch's DDP.

The limit travels with the hyperparameters of a push. The update is made smaller by a contribution without gradients,
which raises what the sum is divided by, so that no pass over the gradients is needed beside that for the norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from paceline.update.rules import Hyper
from paceline.update.summing import CHUNK, Combining, Contribution, ThreadPool, combine_stretch, runs, stretches
from paceline.update.table import SegmentPiece

if TYPE_CHECKING:
    from torch import Tensor

CLIP_NORM: Final = "clip_norm"  # among the hyperparameters of the first group of a push
_EPSILON: Final = 1e-6  # added to the norm, as torch does


def with_clip(hyper: tuple[Hyper, ...], max_norm: float) -> tuple[Hyper, ...]:
    """Return hyperparameters of a push whose update is to be clipped."""
    return ({**hyper[0], CLIP_NORM: max_norm}, *hyper[1:])


def without_clip(hyper: tuple[Hyper, ...]) -> tuple[tuple[Hyper, ...], float | None]:
    """Return the hyperparameters of the rule, and the greatest norm of the update, if there is one.

    >>> without_clip(with_clip(({"lr": 0.1}, {"lr": 0.2}), 1.0))
    (({'lr': 0.1}, {'lr': 0.2}), 1.0)
    >>> without_clip(({"lr": 0.1},))
    (({'lr': 0.1},), None)
    """
    if not hyper or CLIP_NORM not in hyper[0]:
        return hyper, None
    given = hyper[0][CLIP_NORM]
    own: Mapping[str, object] = {key: value for key, value in hyper[0].items() if key != CLIP_NORM}
    max_norm = float(given) if isinstance(given, int | float) else math.nan
    return (own, *hyper[1:]), max_norm  # pyright: ignore[reportReturnType]


def combined_norm(
    contributions: Sequence[Contribution],
    pieces: Sequence[SegmentPiece],
    combining: Combining,
    threads: ThreadPool,
) -> float:
    """Return the norm of the mean of all samples over a range; not finite if a gradient is not.

    Args:
        contributions: all of the update, at least one.
        pieces: of the range.
        combining: how contributions become one gradient; its scale is "samples".
        threads: pool that adds the gradients.
    """
    having = [tuple(i for i, each in enumerate(contributions) if piece.segment not in each.absent) for piece in pieces]
    jobs = [
        (number, (first + start, first + stop), there)
        for number, (first, start, stop, there) in enumerate(
            (first, start, stop, there)
            for first, length, there in runs(pieces, having)
            for start, stop in stretches(length, CHUNK)
        )
    ]
    gradient = contributions[0].gradient
    scratch = gradient.new_empty((threads.num_threads, min(CHUNK, gradient.numel())))
    norms = [0.0] * len(jobs)  # added in their order, whichever thread ends first

    def measure(job: tuple[int, tuple[int, int], tuple[int, ...]], thread: int) -> int:
        number, span, there = job
        out = scratch[thread, : span[1] - span[0]]
        combine_stretch(out, span, there, contributions, combining, divide=True)
        norms[number] = _norm(out)
        return 0

    threads.total(jobs, measure)
    return math.hypot(*norms)


def clipping(
    contributions: Sequence[Contribution], pieces: Sequence[SegmentPiece], norm: float, max_norm: float
) -> Contribution:
    """Return a contribution without gradients, with which a mean over samples has at most the norm `max_norm`.

    Args:
        contributions: all of the update, at least one.
        pieces: of the range.
        norm: of the mean, over the whole table; if it is not finite, nothing is clipped.
        max_norm: more than 0.
    """
    num_samples = sum(each.count for each in contributions)
    excess = (norm + _EPSILON) / max_norm - 1.0
    count = num_samples * excess if math.isfinite(excess) and excess > 0 else 0.0
    return Contribution(contributions[0].gradient, count, absent=frozenset(piece.segment for piece in pieces))


def _norm(tensor: Tensor) -> float:
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(tensor, dtype=dtype).item()
    # Squares of finite elements may overflow in float32, and an update whose norm is not known is not clipped.
    return norm if math.isfinite(norm) else torch.linalg.vector_norm(tensor, dtype=torch.float64).item()

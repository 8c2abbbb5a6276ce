"""What one push brings to a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.tensors.rules import Hyper
from paceline.tensors.table import Scale

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one push brings to a shard.

    Args:
        gradient: (elements of the range,), dtype of the table. The worker's memory: only ever read. What it holds for
            absent segments is not looked at.
        count: samples behind the gradient, 0 or more.
        absent: indices of the segments that have no gradient (frozen, or unused in this step).
        hyper: hyperparameters of each group as of this push; empty to leave them as they are.
        worker: who pushed it.
        expected: samples behind all contributions to the update if none is missing; 0 where that is not known. See
            `num_missing`.
    """

    gradient: Tensor
    count: float = 1.0
    absent: frozenset[int] = frozenset()
    hyper: tuple[Hyper, ...] = ()
    worker: int = 0
    expected: float = 0.0


def num_missing(counts: Sequence[float], expected: Sequence[float], scale: Scale) -> float:
    """Return how many samples an update lacks of those that it was expected to stand for, below 0 for too many.

    A mean over samples divides by those that were expected. So a sample weighs as much in a clock that lacks those of a
    worker that has died, and in the one in which they are made up for, as in any other.

    >>> num_missing([6.0, 6.0], [18.0, 18.0], "samples"), num_missing([6.0, 12.0, 6.0], [18.0] * 3, "samples")
    (6.0, -6.0)
    >>> num_missing([6.0, 6.0], [0.0, 0.0], "samples"), num_missing([6.0, 6.0], [18.0, 18.0], "mean")
    (0.0, 0.0)
    """
    total = max(expected)
    return total - sum(counts) if total and scale == "samples" else 0.0

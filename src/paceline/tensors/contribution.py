"""What one push brings to a shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.tensors.rules import Hyper

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
    """

    gradient: Tensor
    count: float = 1.0
    absent: frozenset[int] = frozenset()
    hyper: tuple[Hyper, ...] = ()
    worker: int = 0

"""What each filter leaves of the rows of a push: functions of the rows, and nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.tensors.filters.check import named, number
from paceline.tensors.rows.spec import FilterSpec


@dataclass(frozen=True, slots=True)
class Stationary:
    """The optimality condition of an L1 penalty: a zero with a gradient below the penalty stays zero."""

    l1: float
    margin: float
    reset_every: int

    def resets(self, clock: int) -> bool:
        """Whether everything is sent at this clock."""
        return clock % self.reset_every == 0

    def holds(self, values: Tensor, gradient: Tensor) -> Tensor:
        """Return which rows would stay zero, bool [n]; values of NaN are unknown and never do."""
        zero = (values == 0).all(dim=1)
        return zero & (gradient.abs() < self.l1 - self.margin).all(dim=1)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows are worth sending now.

    Args:
        threshold: a number of the row must be greater in magnitude; None lets all through.
        share: how many of these go, those of greatest Euclidean norm; 1 is all of them.
        max_age: clocks after which a row goes whatever it is; 0 is never.
    """

    threshold: float | None = None
    share: float = 1.0
    max_age: int = 0

    @property
    def takes_all(self) -> bool:
        """Whether no row is ever kept back."""
        return self.threshold is None and self.share == 1.0

    def mask(self, rows: Tensor) -> Tensor:
        """Return which of the rows [n, width] go, bool [n]."""
        chosen = torch.ones(len(rows), dtype=torch.bool)
        if self.threshold is not None:
            chosen = rows.abs().amax(dim=1) > self.threshold
        if self.share < 1.0:
            chosen = _largest(rows, chosen, self.share)
        return chosen


@final
class Skip:
    """Draws rows with probability `keep`; the draws go on where a checkpoint left them."""

    def __init__(self, keep: float, seed: int, worker: int) -> None:
        self.keep = keep
        # Torch looks at 32 bits of a seed: they must depend on all of both numbers.
        mixed = random.Random(f"{seed}:{worker}").getrandbits(32)
        self._random = torch.Generator().manual_seed(mixed)

    def draw(self, num_rows: int) -> Tensor:
        """Return which rows are sent, bool [num_rows]."""
        return torch.rand(num_rows, generator=self._random, dtype=torch.float64) < self.keep

    def state(self) -> Tensor:
        """Return where the draws are, uint8."""
        return self._random.get_state()

    def load_state(self, state: Tensor) -> None:
        """Go on with the draws where `state` was called."""
        self._random.set_state(state)


def stationary_of(filters: Sequence[FilterSpec]) -> Stationary | None:
    """Return the KKT condition that a table declares, if it does."""
    spec = named(filters, "kkt")
    if spec is None:
        return None
    return Stationary(number(spec, "l1"), number(spec, "margin"), int(number(spec, "reset_every")))


def selection_of(filters: Sequence[FilterSpec]) -> Selection:
    """Return what a table declares about significant and largest rows; the stricter age of the two counts."""
    significant, largest = named(filters, "significant"), named(filters, "top_k")
    ages = [int(number(spec, "max_age")) for spec in (significant, largest) if spec is not None]
    return Selection(
        threshold=number(significant, "threshold") if significant else None,
        share=number(largest, "share") if largest else 1.0,
        max_age=min((age for age in ages if age), default=0),
    )


def skip_of(filters: Sequence[FilterSpec], worker: int) -> Skip | None:
    """Return the draws of one worker, if the table declares that rows are skipped."""
    spec = named(filters, "random_skip")
    return None if spec is None else Skip(number(spec, "keep"), int(number(spec, "seed")), worker)


def _largest(rows: Tensor, among: Tensor, share: float) -> Tensor:
    """Return which rows are the largest share of those `among` the candidates, bool [n]."""
    places = among.nonzero().squeeze(1)
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    norms = torch.linalg.vector_norm(rows[places], dim=1, dtype=wide)
    # A share of 0.07 of 100 rows is 7 of them, though the product of the floats is a little more.
    wanted = max(1, math.ceil(share * len(places) - 1e-6))
    best = norms.topk(min(wanted, len(places))).indices
    chosen = torch.zeros(len(rows), dtype=torch.bool)
    chosen[places[best]] = True
    return chosen

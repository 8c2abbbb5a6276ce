"""The model of a rehearsal: a quadratic loss with noisy gradients, on the values that workers really read."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

NUM_VALUES = 16
_CONDITION = 20.0  # the steepest direction beside the flattest
_NOISE = 0.3  # standard deviation of each gradient


@dataclass(frozen=True, slots=True)
class Quadratic:
    """Half the mean of curvature * value ** 2; training begins at values of 1, and ends near 0.

    Stale gradients cost what they cost any model near an optimum: at a rate that is too high for their age, training
    along the steep directions swings and diverges.

    Example:
        >>> model = Quadratic(num_servers=2)
        >>> [len(part) for part in model.first()]
        [8, 8]
        >>> round(model.loss(model.first()), 3)
        0.166
    """

    num_servers: int
    curvatures: tuple[tuple[float, ...], ...] = field(init=False)  # by server

    def __post_init__(self) -> None:
        """Share the curvatures out to servers in turns, so that every part has steep and flat ones."""
        all_ = [_CONDITION ** (-index / (NUM_VALUES - 1)) for index in range(NUM_VALUES)]
        parts = tuple(tuple(all_[server :: self.num_servers]) for server in range(self.num_servers))
        object.__setattr__(self, "curvatures", parts)

    def first(self) -> list[list[float]]:
        """Return the values that training begins with, by server."""
        return [[1.0] * len(part) for part in self.curvatures]

    def loss(self, values: list[list[float]]) -> float:
        """Return the loss of values, without noise."""
        pairs = zip(self.curvatures, values, strict=True)
        return sum(c * v * v for part, own in pairs for c, v in zip(part, own, strict=True)) / (2 * NUM_VALUES)

    def gradients(self, values: list[list[float]], rng: Random) -> list[list[float]]:
        """Return one noisy gradient at these values, by server."""
        return [
            [c * v + rng.gauss(0.0, _NOISE) for c, v in zip(part, own, strict=True)]
            for part, own in zip(self.curvatures, values, strict=True)
        ]


def descend(values: list[float], gradients: list[list[float]], rate: float) -> None:
    """Subtract the mean of gradients times the rate from values, in place."""
    share = rate / len(gradients)
    for gradient in gradients:
        for index, slope in enumerate(gradient):
            values[index] -= share * slope

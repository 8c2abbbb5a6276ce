"""Simulated compute time of the demo's workers: they sleep, so that two cores show the pace of four machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

SLOW_WORKER: Final = 1
SLOW_SHARE: Final = 0.25
SLOW_FACTOR: Final = 3.0
QUICK_FACTOR: Final = 0.5


@dataclass(frozen=True, slots=True)
class ComputePace:
    """The pace of one worker.

    A steady worker computes for `compute_s` in every clock. A fitful one has a faster machine that somebody else
    uses too: it takes half of that in most clocks, and three times as long in a quarter of them, drawn by seed. On
    average it is hardly slower than the others, which is what makes it a transient straggler: a worker that is slow
    all the time slows down every model with a bound alike.
    """

    compute_s: float
    fitful: bool
    seed: int

    def clocks(self) -> Iterator[float]:
        """Yield for how many seconds to compute in each clock, without end.

        >>> next(ComputePace(0.02, fitful=False, seed=0).clocks())
        0.02
        """
        random = Random(self.seed)
        while True:
            yield self.compute_s * (self._factor(random) if self.fitful else 1.0)

    def _factor(self, random: Random) -> float:
        return SLOW_FACTOR if random.random() < SLOW_SHARE else QUICK_FACTOR


def describe(compute_s: float) -> str:
    """Say in a sentence how slow the slow worker is."""
    return (
        f"worker {SLOW_WORKER} needs {compute_s * SLOW_FACTOR * 1000:.0f} ms in {SLOW_SHARE:.0%} of its clocks "
        f"(drawn by seed) and {compute_s * QUICK_FACTOR * 1000:.0f} ms in the others"
    )

"""The work that Paceline and its peers are given: random values and gradients, and the numbers of momentum SGD.

The same on every side, made from seeds with numpy alone, so that the results can be compared.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

LR: Final = 0.05
MOMENTUM: Final = 0.9
NUM_GRADIENTS: Final = 2  # of each worker, used in turn

Vector = npt.NDArray[np.float32]


def first_values(num_parameters: int) -> Vector:
    """Return the values before the first step: (num_parameters,) float32."""
    return np.random.default_rng(0).standard_normal(num_parameters, dtype=np.float32)


def gradients(rank: int, num_parameters: int) -> list[Vector]:
    """Return the gradients of one worker, each (num_parameters,) float32."""
    seeds = [1 + rank * NUM_GRADIENTS + index for index in range(NUM_GRADIENTS)]
    return [np.random.default_rng(seed).standard_normal(num_parameters, dtype=np.float32) for seed in seeds]


def steps_of(prepare: Callable[[int], None], step: Callable[[None], object]) -> Callable[[int], float]:
    """Return a function that takes a number of steps in a row and returns the seconds in `step` alone."""

    def steps(count: int) -> float:
        seconds = 0.0
        for number in range(count):
            prepare(number % NUM_GRADIENTS)
            start = time.perf_counter()
            step(None)
            seconds += time.perf_counter() - start
        return seconds

    return steps


def write(values: Vector, path: str) -> None:
    """Write values as raw bytes."""
    values.tofile(path)


def read(path: Path) -> Vector:
    """Return values that `write` wrote."""
    return np.fromfile(path, dtype=np.float32)

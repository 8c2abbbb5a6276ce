"""What the systems that `kills_beside.py` kills have in common: the work of a step, and what they write down.

The gradient of a worker at a clock follows from the values, its rank and the clock alone, so a system that repeats
steps after a kill, or goes on with what it had, ends with the bytes of a run without kills.
"""

import hashlib
import os
import time
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

WIDTH: Final = 1 << 20  # float32 parameters of the model
NUM_WORKERS: Final = 2
LR: Final = 0.01
MOMENTUM: Final = 0.9
DECAY: Final = 0.1  # of the values, in the gradient
COMPUTE_S: Final = 0.05  # of each worker in a step, by sleeping
SAVE_EVERY: Final = 10  # clocks, where a system saves its state; each clock where it is tuned
TUNED: Final = "tuned"
TARGETS: Final = "targets"

Vector = npt.NDArray[np.float32]


def noise(rank: int, clock: int) -> float:
    """Compute for a while; return what a worker's gradient has at a clock beside the values' decay, in all places."""
    time.sleep(COMPUTE_S)
    return float(np.random.default_rng((rank, clock)).standard_normal())


class Log:
    """What one process of a system writes: its steps, each with the time, and the digest of the values at the end.

    Args:
        folder: of the run.
        rank: of the worker.
        is_target: whether this process is to be killed: the one that holds the state.
    """

    def __init__(self, folder: str, rank: int, *, is_target: bool) -> None:
        self._folder, self._rank = Path(folder), rank
        self._steps = (self._folder / f"steps.{rank}").open("a")
        if is_target:
            add_target(folder)

    def step(self, clock: int) -> None:
        """Note that a step is over; clocks count from 0."""
        self._steps.write(f"{clock} {time.monotonic()}\n")
        self._steps.flush()

    def end(self, values: Vector) -> None:
        """Note the values at the end."""
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        unfinished = self._folder / f".digest.{self._rank}"
        unfinished.write_text(digest)
        unfinished.rename(self._folder / f"digest.{self._rank}")


def add_target(folder: str) -> None:
    """Note that this process is to be killed."""
    with (Path(folder) / TARGETS).open("a") as targets:
        targets.write(f"{os.getpid()}\n")

"""Faults of frames for tests: a plan with probabilities, seeded draws, and counts of what happened."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from paceline.errors import UsageError

_FAULTS: Final = ("cut", "drop", "duplicate", "reorder", "delay")
_MIN_BLOCK: Final = 10  # frames; so that a run of frames without a fault stays possible
_MAX_BLOCK: Final = 20  # of a fault that is rarer, one in as many frames as it takes


def every_frame(header: bytes) -> bool:
    """Return True."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The probability of each fault for a sent frame, and the frames (by header) that may have faults.

    `delay_s` is the range of delays; its upper end also bounds how long a frame is held back to be overtaken.
    A delayed frame delays those behind it, as on a stream.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    cut: float = 0.0
    delay_s: tuple[float, float] = (0.001, 0.01)
    only: Callable[[bytes], bool] = every_frame

    def __post_init__(self) -> None:
        for probability in (self.drop, self.duplicate, self.delay, self.reorder, self.cut):
            if not 0 <= probability <= 1:
                raise UsageError(f"the probability of a fault is {probability}, expected 0 to 1")
        if not 0 <= self.delay_s[0] <= self.delay_s[1]:
            raise UsageError(f"delay_s is {self.delay_s}, expected (shortest, longest) in seconds")


@dataclass(frozen=True, slots=True)
class FaultCounts:
    """The number of frames with each fault. A frame with several is counted for each that took effect."""

    dropped: int = 0
    duplicated: int = 0
    delayed: int = 0
    reordered: int = 0
    cut: int = 0


@dataclass(frozen=True, slots=True)
class FrameFate:
    """The faults of one frame. A cut overrides a drop, and a drop overrides all others."""

    cut: bool = False
    drop: bool = False
    duplicate: bool = False
    reorder: bool = False
    delay_s: float = 0.0


UNHARMED: Final = FrameFate()


@final
class Draws:
    """Draws one kind of fault: a fixed number in every block of frames, at random places.

    A block has as many faults as the probability demands (one of ten frames at 0.1), at places that depend on the seed.
    So a test that counts faults does not depend on luck.

    >>> draws = Draws(0.2, "seed")
    >>> [sum(draws.draw() for _ in range(10)) for _ in range(3)]
    [2, 2, 2]
    """

    def __init__(self, probability: float, seed: str) -> None:
        self._random = random.Random(seed)
        is_rare = 0 < probability < 1 / _MAX_BLOCK
        sizes = (round(1 / probability),) if is_rare else range(_MIN_BLOCK, _MAX_BLOCK + 1)
        self._size = min(sizes, key=lambda size: (abs(round(size * probability) / size - probability), size))
        self._num_hits = round(self._size * probability)
        self._block: list[bool] = []

    def draw(self) -> bool:
        """Return whether the next frame is hit."""
        if not self._block:
            self._block = [place < self._num_hits for place in range(self._size)]
            self._random.shuffle(self._block)
        return self._block.pop()


@final
class Dice:
    """Decides the fates of one connection's frames in the order in which they are sent; one seed, one sequence."""

    def __init__(self, plan: FaultPlan, seed: str) -> None:
        self._plan = plan
        self._random = random.Random(seed)
        # Each with a seed of its own: one fault does not shift the others.
        self._draws = {name: Draws(getattr(plan, name), f"{seed} {name}") for name in _FAULTS}

    def throw(self, header: bytes) -> FrameFate:
        """Decide the next frame's fate."""
        if not self._plan.only(header):
            return UNHARMED
        hits = {name: draws.draw() for name, draws in self._draws.items()}
        delay_s = self._random.uniform(*self._plan.delay_s)
        return FrameFate(
            cut=hits["cut"],
            drop=hits["drop"],
            duplicate=hits["duplicate"],
            reorder=hits["reorder"],
            delay_s=delay_s if hits["delay"] else 0.0,
        )


@final
class FaultTally:
    """Counts faults as they happen, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()

    def add(self, fate: FrameFate) -> None:
        """Count what happens to a frame of this fate."""
        with self._lock:
            if fate.cut or fate.drop:
                self._counter["cut" if fate.cut else "dropped"] += 1
                return
            self._counter["duplicated"] += fate.duplicate
            self._counter["reordered"] += fate.reorder
            self._counter["delayed"] += fate.delay_s > 0

    def counts(self) -> FaultCounts:
        """Return the counts so far."""
        with self._lock:
            return FaultCounts(**self._counter)

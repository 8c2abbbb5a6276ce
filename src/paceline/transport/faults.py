"""Which faults befall which frame: a plan, dice with a seed, and a count of what really happened."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from paceline.errors import UsageError


def every_frame(header: bytes) -> bool:
    """Return True."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """How likely each fault is for each frame sent, and for which frames (by header) at all.

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
    """How many frames met each fault. A frame that meets several is counted for each that changed its way."""

    dropped: int = 0
    duplicated: int = 0
    delayed: int = 0
    reordered: int = 0
    cut: int = 0


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to one frame. Cut comes before drop, and drop before all others."""

    cut: bool = False
    drop: bool = False
    duplicate: bool = False
    reorder: bool = False
    delay_s: float = 0.0


UNHARMED: Final = Fate()


@final
class Dice:
    """Decides the fates of one connection's frames in the order in which they are sent; one seed, one sequence."""

    def __init__(self, plan: FaultPlan, seed: str) -> None:
        self._plan = plan
        self._random = random.Random(seed)

    def throw(self, header: bytes) -> Fate:
        """Decide the next frame's fate."""
        plan = self._plan
        # Each frame takes the same number of throws, whatever they show: one fault does not shift the others.
        cut, drop, duplicate, reorder, delay = (self._random.random() for _ in range(5))
        delay_s = self._random.uniform(*plan.delay_s)
        if not plan.only(header):
            return UNHARMED
        return Fate(
            cut=cut < plan.cut,
            drop=drop < plan.drop,
            duplicate=duplicate < plan.duplicate,
            reorder=reorder < plan.reorder,
            delay_s=delay_s if delay < plan.delay else 0.0,
        )


@final
class Tally:
    """Counts faults as they happen, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()

    def add(self, fate: Fate) -> None:
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

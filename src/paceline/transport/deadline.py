"""When a wait ends: at a point in time, or after so many seconds in which this process has run."""

import math
import time
from collections.abc import Callable
from typing import Final, NamedTuple, final

_SHORT_S: Final = 0.1


def seconds(duration_s: float) -> str:
    """Return a duration as messages tell it: what was left of a deadline has a dozen digits that say nothing.

    >>> seconds(0.4999790000080821), seconds(600.0), seconds(0.00123)
    ('0.5 s', '600 s', '0.001 s')
    """
    return f"{round(duration_s, 2 if duration_s >= _SHORT_S else 3):g} s"


class Deadline(NamedTuple):
    """A point on the monotonic clock; several waits may share one.

    A tuple, as these are made faster, and there is one for every frame.

    >>> Deadline.after(0).remaining_s()
    0.0
    """

    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        """Return the point `timeout_s` seconds from now."""
        return cls(time.monotonic() + timeout_s)

    def remaining_s(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self.at_s - time.monotonic())

    def remaining_ms(self) -> int:
        """Return the milliseconds left, rounded up so that a wait does not end early."""
        return math.ceil(self.remaining_s() * 1000)


@final
class Stopwatch:
    """Counts the seconds in which this process has run; look at it at least every `turn_s` seconds.

    A process that was stopped (SIGSTOP, a frozen container) finds the monotonic clock far ahead when it goes on, and
    what it waits for was mostly stopped with it. So a pause between two looks counts for twice `turn_s` at most.

    >>> times = iter([0.0, 1.0, 3601.0])
    >>> watch = Stopwatch(turn_s=1.0, now=times.__next__)
    >>> watch.look(), watch.look()
    (1.0, 3.0)
    """

    def __init__(self, turn_s: float = 1.0, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._longest_s = 2 * turn_s
        self._looked_s = now()
        self._counted_s = 0.0

    def look(self) -> float:
        """Return the seconds that count since this was made."""
        now_s = self._now()
        self._counted_s += min(now_s - self._looked_s, self._longest_s)
        self._looked_s = now_s
        return self._counted_s

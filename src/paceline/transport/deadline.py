"""A point in time by which a wait ends."""

import math
import time
from typing import NamedTuple


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

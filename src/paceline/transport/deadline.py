"""Deadlines of waits, and durations in messages."""

import math
import time
from typing import Final, NamedTuple

from paceline.errors import UsageError

_SHORT_S: Final = 0.1
_LONGEST_S: Final = 2e6  # poll takes 2**31 ms at most


def seconds(duration_s: float) -> str:
    """Return a duration for messages, rounded: the rest of a deadline has a dozen meaningless digits.

    >>> seconds(0.4999790000080821), seconds(600.0), seconds(0.00123)
    ('0.5 s', '600 s', '0.001 s')
    """
    return f"{round(duration_s, 2 if duration_s >= _SHORT_S else 3):g} s"


def patience_s(timeout_s: float) -> float:
    """Return how long a caller is willing to wait, at most so long as every kind of wait can: 23 days.

    Raises:
        UsageError: it is NaN, with which a wait would not end.

    >>> patience_s(0.5), patience_s(math.inf)
    (0.5, 2000000.0)
    """
    if timeout_s != timeout_s:  # is NaN; math.isnan does not take every whole number
        raise UsageError("timeout_s is nan, expected a number of seconds.")
    return float(min(timeout_s, _LONGEST_S))  # of whatever kind it is


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

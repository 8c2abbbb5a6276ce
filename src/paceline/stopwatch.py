"""Measures how long a process has run: time in which it was stopped does not count."""

import time
from collections.abc import Callable
from typing import final


@final
class Stopwatch:
    """Counts the seconds in which this process has run; call `elapsed_s` at least every `turn_s` seconds.

    A process that was stopped (SIGSTOP, a frozen container) finds the monotonic clock far ahead when it resumes, and
    its peers were mostly stopped with it. So a pause between two calls counts for at most twice `turn_s`.

    >>> times = iter([0.0, 1.0, 3601.0])
    >>> watch = Stopwatch(turn_s=1.0, now=times.__next__)
    >>> watch.elapsed_s(), watch.elapsed_s()
    (1.0, 3.0)
    """

    def __init__(self, turn_s: float = 1.0, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._longest_s = 2 * turn_s
        self._asked_s = now()
        self._counted_s = 0.0

    def elapsed_s(self) -> float:
        """Return the counted seconds since this was made."""
        now_s = self._now()
        self._counted_s += min(now_s - self._asked_s, self._longest_s)
        self._asked_s = now_s
        return self._counted_s

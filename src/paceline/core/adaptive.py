"""An adaptive staleness bound: where it stands between its lowest and its highest value, by what reads cost.

A server sees two costs of the reads of a table: the time that workers wait in them, and how many clocks the answers
lack. Their sum is weighed by CLOCK_COSTS, and the bound goes where it is smallest. Rules:
1. The bound moves only at the end of a window of clocks. Every move is a trial, which the next window judges.
2. A higher bound stays if the cost has fallen by LEAST_GAIN; a lower one unless the cost has risen by as much.
3. After a trial that failed, the next one in its direction comes later, each time twice as late as before; at once
   when the cost has changed by CHANGED since, as then something else has.
4. A read keeps the bound that was in force when its pull came, however long it waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec.structs import replace

from paceline.core.messages import Pull

CLOCK_COSTS: Final = 0.01  # a clock of mean staleness costs as much as waiting for this share of the time
LEAST_GAIN: Final = 0.01
WORTH: Final = 0.03  # the share of waiting from which a higher bound is tried
CHANGED: Final = 0.08
WINDOW: Final = 16  # clocks
_MOST_PAUSE: Final = 32  # windows
_SLACK: Final = 2  # clocks after a move in which workers still use up, or lose, what it gave them
_PAUSE_AFTER_RISE: Final = 4


class Costs(msgspec.Struct, frozen=True):
    """What reads of a table cost in a window: the share of their time in which workers waited, and mean staleness."""

    waiting: float
    staleness: float

    @property
    def total(self) -> float:
        """Both as a share of the time."""
        return self.waiting + CLOCK_COSTS * self.staleness


@dataclass(slots=True)
class _Pause:
    """Windows until the next trial in one direction."""

    left: int = 0
    length: int = 0  # of the next one

    def lengthen(self) -> None:
        """Pause, longer than last time."""
        self.left = self.length = min(_MOST_PAUSE, 2 * max(1, self.length))

    def reset(self) -> None:
        """End the pause; the next one is short."""
        self.left = self.length = 0


@dataclass(slots=True)
class AdaptiveBound:
    """The bound in force of one table on one server. It begins at its lowest value.

    Args:
        lowest: it never is below.
        highest: nor above, which is what readers are promised in any case.
    """

    lowest: int
    highest: int
    bound: int = field(init=False)
    seen: Costs = field(default_factory=lambda: Costs(0.0, 0.0))  # in the last whole window
    _now: float | None = None  # of the last event
    _clock: int = 0  # that the table has reached
    _settling: int = _SLACK  # clocks that do not count: after a move, until workers are as far apart as it allows
    # Since the window began: seconds of workers that took part, and that waited; clocks; answers, and what they lack.
    _worker_s: float = 0.0
    _waiting_s: float = 0.0
    _num_clocks: int = 0
    _num_answers: int = 0
    _num_lacking: int = 0
    _origin: int | None = None  # where the bound was before the trial under way
    _level: float = 0.0  # the cost there, or at the last decision
    _up: _Pause = field(default_factory=_Pause)
    _down: _Pause = field(default_factory=_Pause)

    def __post_init__(self) -> None:
        """Start at the lowest value."""
        self.bound = self.lowest

    def admit(self, pull: Pull) -> Pull:
        """Return a pull that has come, waiting for what the bound in force demands."""
        return replace(pull, needs=max(pull.needs, pull.clock - self.bound))

    def pass_time(self, now: float, num_waiting: int, num_workers: int) -> None:
        """Count the time since the last event, in which so many of the workers that take part waited for values."""
        passed_s = 0.0 if self._now is None else max(0.0, now - self._now)
        self._worker_s += passed_s * num_workers
        self._waiting_s += passed_s * num_waiting
        self._now = now

    def note_answer(self, num_lacking: int) -> None:
        """Count an answer that lacks so many clocks; what a reader says of its clock counts up to the bound."""
        self._num_answers += 1
        self._num_lacking += min(max(0, num_lacking), self.highest)

    def start_over(self, now: float) -> None:
        """Begin a new window: the time since the last event was none in which workers could be heard."""
        self._now = now
        self._begin()

    def reach(self, clock: int) -> int | None:
        """Note that the table has reached a clock; return where the bound was if it moves."""
        passed, self._clock = clock - self._clock, max(clock, self._clock)
        if passed <= 0:
            return None
        if self._settling > 0:
            self._settling -= passed
            if self._settling <= 0:
                self._begin()
            return None
        self._num_clocks += passed
        if self._num_clocks < WINDOW or not self._num_answers or self._worker_s <= 0.0:
            return None
        self.seen = Costs(self._waiting_s / self._worker_s, self._num_lacking / self._num_answers)
        before, self.bound = self.bound, self._decide()
        self._begin()
        self._settling = 0 if self.bound == before else abs(self.bound - before) + _SLACK
        return before if self.bound != before else None

    def _begin(self) -> None:
        self._worker_s = self._waiting_s = 0.0
        self._num_clocks = self._num_answers = self._num_lacking = 0

    def _decide(self) -> int:
        """Judge the trial under way, or take note of a change; then return the bound of the next window."""
        cost, origin = self.seen.total, self._origin
        if origin is not None:
            self._origin = None
            has_risen = self.bound > origin
            if cost > self._level + (-LEAST_GAIN if has_risen else LEAST_GAIN):
                (self._up if has_risen else self._down).lengthen()
                return origin
            (self._up if has_risen else self._down).reset()
            if has_risen:
                self._down.left = max(self._down.left, _PAUSE_AFTER_RISE)
        elif abs(cost - self._level) > CHANGED:
            self._up.reset()
            self._down.reset()
        self._level = cost
        return self._next()

    def _next(self) -> int:
        """Return the bound to try, or the one in force."""
        may_rise = self.bound < self.highest and self.seen.waiting >= WORTH
        may_fall = self.bound > self.lowest
        self._origin = self.bound
        if may_rise and not self._up.left:
            return min(self.highest, max(self.bound + 1, 2 * self.bound))
        if may_fall and not self._down.left:
            return max(self.lowest, self.bound // 2)
        self._origin = None
        self._up.left -= self._up.left > 0
        self._down.left -= self._down.left > 0
        return self.bound

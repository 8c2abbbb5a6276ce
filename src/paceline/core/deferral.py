"""Updates that are sent later than they were made, and what reads need so that the staleness bound holds all the same.

An update made at clock t may wait on its worker for up to h clocks: the push that brings it is tagged with a clock in
[t, t + h], since a worker tells the servers that a clock c is finished only after it has sent what was made at c - h
or before. So values of clock m, which contain every push tagged below m, contain every update made below m - h (one
made at t <= m - h - 1 travels in a push tagged at most t + h <= m - 1). A read at clock c promises every update made
below c - s; it has them once m - h >= c - s, which is what a read under the tighter bound s - h waits for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.core.consistency import Consistency


@dataclass(frozen=True, slots=True)
class Deferral:
    """How long updates of a table may wait on the worker that made them.

    Args:
        consistency: of the table. Where updates may wait its bound is 1 or more, and they show on arrival.
        hold: for how many clocks; 0 to bound.

    Example:
        >>> from paceline.core.consistency import ssp
        >>> deferral = Deferral(ssp(3), hold=1)
        >>> deferral.needs(7)  # values of clock 5 contain what was made below 4 = 7 - 3
        5
        >>> deferral.contained(5)
        4
        >>> deferral.due(7)  # before clock 7 is finished, what was made at 6 or before has to go
        6
    """

    consistency: Consistency
    hold: int = 0

    def needs(self, clock: int) -> int:
        """Return the value clock that a read at `clock` must at least have."""
        return self._tighter.needs(clock)

    def contained(self, value_clock: int) -> int:
        """Return the clock below which values of this clock contain every update that was made."""
        return max(0, value_clock - self.hold)

    def due(self, clock: int) -> int:
        """Return the latest clock whose updates have to be sent before `clock` is finished."""
        return clock - self.hold

    @property
    def _tighter(self) -> Consistency:
        bound = self.consistency.bound
        return self.consistency if bound is None else replace(self.consistency, bound=bound - self.hold)

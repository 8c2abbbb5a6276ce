"""The vector clock of a server: which worker has finished which clock.

Clocks start at 0; a tick with the value c + 1 finishes clock c.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Clocks:
    """The vector clock of the workers that take part.

    `slowest = m` means that every member has finished the clocks 0 .. m - 1.
    """

    # Invariant: every value is >= slowest, and one equals it unless there is no member.
    _of: dict[int, int] = field(default_factory=dict[int, int])
    # Invariant: never decreases, not even when the last member leaves.
    slowest: int = 0
    # Invariant: the number of values that equal `slowest`; only the last tick of a clock has to look at all members.
    _num_slowest: int = 0

    def __contains__(self, worker: int) -> bool:
        """Return whether the worker takes part."""
        return worker in self._of

    def __len__(self) -> int:
        """Count the members."""
        return len(self._of)

    def of(self, worker: int) -> int:
        """Return the number of clocks that this member has finished."""
        return self._of[worker]

    def add(self, worker: int) -> int:
        """Add a worker at the slowest clock and return that; a later start would hide its updates from the bound."""
        self.remove(worker)
        self._of[worker] = self.slowest
        self._num_slowest += 1
        return self.slowest

    def remove(self, worker: int) -> None:
        """Remove a worker; the slowest clock may jump by more than one."""
        clock = self._of.pop(worker, None)
        if clock is not None:
            self._left(clock)

    def advance(self, worker: int, clock: int) -> int:
        """Record that a member has finished all clocks below `clock`; an older tick changes nothing.

        Return the number of clocks that it has finished.
        """
        before = self._of[worker]
        if clock <= before:
            return before
        self._of[worker] = clock
        self._left(before)
        return clock

    def past(self, clock: int) -> list[int]:
        """Return the members that have finished `clock`, in ascending rank."""
        return sorted(worker for worker, own in self._of.items() if own > clock)

    def _left(self, clock: int) -> None:
        """Note that a member has moved on from this clock."""
        self._num_slowest -= clock == self.slowest
        if self._of and not self._num_slowest:
            self.slowest = min(self._of.values())
            self._num_slowest = list(self._of.values()).count(self.slowest)

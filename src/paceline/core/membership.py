"""Membership on one server: the lives of workers, their leases, which lives have ended, and the clocks of the members.

Clocks start at 0; a tick with the value c + 1 finishes clock c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.exactly_once import DedupWindow
from paceline.core.messages import Sender


@dataclass(slots=True)
class Incarnation:
    """One incarnation of one worker, while it takes part or is expected to."""

    incarnation: int
    joined_at: int | None = None  # the clock in the answer to its join; None while it is only expected
    lease_until: float | None = None  # evicted at this time unless it connects; None while connected
    dedup: DedupWindow = field(default_factory=DedupWindow)


@dataclass(slots=True)
class WorkerLives:
    """The lives of all workers, by rank. An incarnation that has ended never comes back."""

    generation: int
    _lives: dict[int, Incarnation] = field(default_factory=dict[int, Incarnation])
    # Invariant: every incarnation up to this one is over; the flag is True if it left by itself.
    _ended: dict[int, tuple[int, bool]] = field(default_factory=dict[int, tuple[int, bool]])

    def expect(self, worker: int, until: float) -> None:
        """Add a worker that has not joined yet, until its lease ends."""
        self._lives[worker] = Incarnation(incarnation=0, lease_until=until)

    def start_life(self, sender: Sender, clock: int) -> None:
        """Start a life that has joined at this clock."""
        self._lives[sender.worker] = Incarnation(sender.incarnation, joined_at=clock)

    def end_life(self, worker: int, *, left: bool) -> None:
        """End the current life of a worker."""
        ended = (self._lives.pop(worker).incarnation, left)
        self._ended[worker] = max(ended, self._ended.get(worker, ended))

    def mark_dead(self, worker: int, incarnation: int) -> None:
        """Note the end of a life that never began here, so that a join still under way is refused."""
        if incarnation > self._ended.get(worker, (-1, False))[0]:
            self._ended[worker] = (incarnation, False)

    def current(self, worker: int) -> Incarnation | None:
        """Return the life of this worker that takes part or is expected, or None."""
        return self._lives.get(worker)

    def incarnations(self, workers: Sequence[int]) -> list[tuple[int, int]]:
        """Return (worker, incarnation) of workers that take part or are expected."""
        return [(worker, self._lives[worker].incarnation) for worker in workers]

    def has_ended(self, sender: Sender) -> bool:
        """Return whether this incarnation is over."""
        return sender.incarnation <= self._ended.get(sender.worker, (-1, False))[0]

    def has_left(self, sender: Sender) -> bool:
        """Return whether this incarnation left by itself: messages that still arrive from it are late copies."""
        return sender.generation == self.generation and self._ended.get(sender.worker) == (sender.incarnation, True)

    def objection(self, sender: Sender) -> str:
        """Return why this sender may not act, or an empty text."""
        found = self.acting(sender)
        return found if isinstance(found, str) else ""

    def acting(self, sender: Sender) -> Incarnation | str:
        """Return the life of this sender, if it may act, else why not."""
        if sender.generation != self.generation:
            return f"it belongs to generation {sender.generation} of the job, this is generation {self.generation}"
        life = self._lives.get(sender.worker)
        if life and life.joined_at is not None and life.incarnation == sender.incarnation:
            return life
        if self.has_ended(sender) or (life and life.incarnation > sender.incarnation):
            return (
                f"worker {sender.worker} has ended since it joined (incarnation {sender.incarnation} is over): it was "
                "out of reach for longer than its lease, or was started again"
            )
        return f"incarnation {sender.incarnation} of worker {sender.worker} has not joined"

    def next_deadline(self) -> float | None:
        """Return when the first lease ends, or None."""
        return min((life.lease_until for life in self._lives.values() if life.lease_until is not None), default=None)

    def overdue(self, now: float) -> list[tuple[int, Incarnation]]:
        """Return the workers whose lease has ended."""
        return [
            (worker, life)
            for worker, life in sorted(self._lives.items())
            if life.lease_until is not None and life.lease_until <= now
        ]


@dataclass(slots=True)
class Clocks:
    """The vector clock of the workers that take part.

    `slowest = m` means that every member has finished the clocks 0 .. m - 1.
    """

    # Invariant: every value is >= slowest, and one equals it unless there is no member.
    _of: dict[int, int] = field(default_factory=dict[int, int])
    # Invariant: never decreases, not even when the last member leaves.
    slowest: int = 0
    # Invariant: the number of members at each value, none of them 0. Values are few, however many members there are.
    _num_at: dict[int, int] = field(default_factory=dict[int, int])

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
        self._num_at[self.slowest] = self._num_at.get(self.slowest, 0) + 1
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
        self._num_at[clock] = self._num_at.get(clock, 0) + 1
        self._left(before)
        return clock

    def past(self, clock: int) -> list[int]:
        """Return the members that have finished `clock`, in ascending rank."""
        return sorted(worker for worker, own in self._of.items() if own > clock)

    def num_past(self, clock: int) -> int:
        """Count the members that have finished `clock`."""
        return sum(number for own, number in self._num_at.items() if own > clock)

    def _left(self, clock: int) -> None:
        """Note that a member is no longer at this clock."""
        self._num_at[clock] -= 1
        if not self._num_at[clock]:
            del self._num_at[clock]
            if clock == self.slowest and self._num_at:
                self.slowest = min(self._num_at)

"""Current state of each worker, from its trace and its launcher, for the live display."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.observe.trace import Resources, State, Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.observe.trace import Record

# A worker that finishes no clock reports every 2 s that it runs; after so long without a report it is taken as hung.
HUNG_S = 10.0
# Seconds in one state until it is worth a line.
NOTABLE_S = 5.0


@dataclass(slots=True)
class Life:
    """State of one worker's process, as far as known; times are seconds on the display's monotonic clock.

    Attributes:
        clock: number of finished clocks.
        end: why it has ended, as its launcher says; empty while it runs.
        heard_s: time of its last record; None before the first.
        waits: whether it is in a call that waits for others, long enough for a report.
        since_s: time when the current state began.
        leaves: whether it has left the job, and continues alone.
    """

    clock: int = 0
    end: str = ""
    heard_s: float | None = None
    waits: bool = False
    since_s: float = 0.0
    leaves: bool = False

    def update(self, record: Record, now: float) -> None:
        """Update the state from a record of its trace."""
        if isinstance(record, Step):
            self.clock, self.waits, self.since_s, self.leaves = record.clock + 1, False, now, False
        elif isinstance(record, State):
            self.waits, self.since_s, self.leaves = record.doing == "communicating", now - record.for_s, False
        elif isinstance(record, Resources):
            self.waits, self.leaves = False, True
        self.heard_s = now

    def note(self, end: str, now: float) -> None:
        """Record that its process has ended, or where `end` is empty, that it has been started."""
        self.end = end
        if not end:
            self.heard_s, self.waits, self.since_s, self.leaves = None, False, now, False

    def hung_s(self, now: float) -> float:
        """Return for how long a process has sent no record although it should; 0 for usual intervals."""
        if self.end or self.leaves or self.heard_s is None or now - self.heard_s < HUNG_S:
            return 0.0
        return now - self.heard_s


def describe(lives: Mapping[int, Life], now: float) -> dict[int, str]:
    """Return a few words on the state of each worker, except those that compute as usual."""
    return {worker: _describe(worker, lives, now) for worker in lives}


def _describe(worker: int, lives: Mapping[int, Life], now: float) -> str:
    life = lives[worker]
    if life.end:
        return life.end
    if life.heard_s is None:
        return "starting"
    if hung_s := life.hung_s(now):
        return f"hung for {hung_s:.0f} s"
    if life.leaves:
        return "leaving"
    for_s = now - life.since_s
    if life.waits:
        return f"waiting for {_awaited(worker, lives)} for {for_s:.0f} s"
    return f"computing for {for_s:.0f} s" if for_s >= NOTABLE_S else ""


def _awaited(worker: int, lives: Mapping[int, Life]) -> str:
    """Return what a worker waits for: the slowest workers if they are behind, else for computation at its end."""
    own = lives[worker].clock
    others = {rank: life for rank, life in lives.items() if rank != worker and not life.end}
    slowest = min((life.clock for life in others.values()), default=own)
    awaited = [rank for rank, life in others.items() if life.clock == slowest and (slowest < own or not life.waits)]
    if slowest > own or not awaited:
        return "the server"
    ranks = ", ".join(map(str, sorted(awaited)[:3])) + (", ..." if len(awaited) > 3 else "")
    return f"worker{'s' if len(awaited) > 1 else ''} {ranks}"

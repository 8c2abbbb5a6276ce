"""Current state of each worker, from its trace and its launcher, for the live display."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.observe.trace import Resources, State, Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.observe.trace import Record

# A worker that finishes no clock says every 2 s that it runs. One that has not for so long does not run.
HUNG_S = 10.0
# How long a worker has to do one thing until it is worth a word.
NOTABLE_S = 5.0


@dataclass(slots=True)
class Life:
    """What is known of the process of one worker; times are seconds on the steady clock of the display.

    Attributes:
        clock: how many clocks it has finished.
        end: why it does not run any more, as its launcher says; empty while it runs.
        heard_s: when something last came from it; None before anything has.
        waits: whether it is in a call that waits for others, for so long that it has said so.
        since_s: since when it has been doing what it does.
        leaves: whether it has left the job, and goes on by itself.
    """

    clock: int = 0
    end: str = ""
    heard_s: float | None = None
    waits: bool = False
    since_s: float = 0.0
    leaves: bool = False

    def take(self, record: Record, now: float) -> None:
        """Take in what it has written down."""
        if isinstance(record, Step):
            self.clock, self.waits, self.since_s, self.leaves = record.clock + 1, False, now, False
        elif isinstance(record, State):
            self.waits, self.since_s, self.leaves = record.doing == "communicating", now - record.for_s, False
        elif isinstance(record, Resources):
            self.waits, self.leaves = False, True
        self.heard_s = now

    def note(self, end: str, now: float) -> None:
        """Take it that its process has ended; that one has been started, where `end` is empty."""
        self.end = end
        if not end:
            self.heard_s, self.waits, self.since_s, self.leaves = None, False, now, False

    def hung_s(self, now: float) -> float:
        """Return for how long nothing has come from a process that should say something; 0 for what is usual."""
        if self.end or self.leaves or self.heard_s is None or now - self.heard_s < HUNG_S:
            return 0.0
        return now - self.heard_s


def describe(lives: Mapping[int, Life], now: float) -> dict[int, str]:
    """Say of every worker what it does, in a few words; nothing of one that computes as usual."""
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
    """Say for what a worker waits: for the slowest, if these are behind it, or compute where it has come to an end."""
    own = lives[worker].clock
    others = {rank: life for rank, life in lives.items() if rank != worker and not life.end}
    slowest = min((life.clock for life in others.values()), default=own)
    awaited = [rank for rank, life in others.items() if life.clock == slowest and (slowest < own or not life.waits)]
    if slowest > own or not awaited:
        return "the server"
    ranks = ", ".join(map(str, sorted(awaited)[:3])) + (", ..." if len(awaited) > 3 else "")
    return f"worker{'s' if len(awaited) > 1 else ''} {ranks}"

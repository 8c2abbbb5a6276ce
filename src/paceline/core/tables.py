"""The protocol state of one table on one server: its consistency, its readers and its current clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.clocks import Clocks
from paceline.core.commit import ClockCommit
from paceline.core.consistency import Consistency
from paceline.core.dedup import DedupWindow
from paceline.core.messages import Delivered, Fetched, Pull
from paceline.core.read_queue import DenseReadQueue, ReadQueue, RowReadQueue


@dataclass(slots=True)
class TableCore:
    """The protocol of one table on one server."""

    name: str
    consistency: Consistency
    commit: ClockCommit
    keyed: bool = False  # a table of rows
    readers: ReadQueue = field(init=False)
    closes_clocks: bool = field(init=False)  # updates become visible clock by clock
    # Number of updates applied here; a reader orders values by it.
    version: int = 0
    ask_lead_at: float = 0.0
    reached: int = 0  # the last clock that `Advanced` has said

    def __post_init__(self) -> None:
        """Create the read queue, which has subscribers if the consistency delivers on clock."""
        self.closes_clocks = self.consistency.visible == "on_clock"
        subscribing = self.consistency.deliver == "on_clock"
        self.readers = RowReadQueue(subscribing) if self.keyed else DenseReadQueue(subscribing)

    @property
    def is_idle(self) -> bool:
        """Whether the end of a clock changes nothing here; row tables have accounts of clocks."""
        return not self.keyed and self.readers.is_idle and self.commit.is_idle

    def is_complete(self, clocks: Clocks) -> bool:
        """Return whether enough workers have finished its current clock, and no follower is too far behind."""
        clock, backups = self.commit.clock, self.consistency.backups
        if self.commit.is_far_ahead:
            return False
        if not backups:
            return len(clocks) > 0 and clocks.slowest > clock
        return len(clocks.past(clock)) >= max(1, len(clocks) - backups)

    def fetched(self, pull: Pull, clock: int, ticked: int, dedup: DedupWindow) -> Fetched:
        """Return the answer to a pull, to be sent with the current values."""
        settled, includes = dedup.settled_in(self.name), dedup.applied_in(self.name)
        return Fetched(pull.request, self.name, clock, self.version, settled, includes, ticked)

    def delivered(self, worker: int, clock: int, dedup: DedupWindow) -> Delivered:
        """Return a delivery to a subscriber, to be sent with the current values."""
        includes, since = dedup.applied_in(self.name), self.readers.clock_before(worker)
        return Delivered(self.name, clock, self.version, dedup.settled_in(self.name), includes, since)

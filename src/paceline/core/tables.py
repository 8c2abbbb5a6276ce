"""What a server core keeps for each table: its policy, its readers, the clock it has closed."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.clocks import Clocks
from paceline.core.commit import ClockCommit
from paceline.core.consistency import Consistency
from paceline.core.dedup import DedupWindow
from paceline.core.messages import Delivered, Fetched, Pull
from paceline.core.read_queue import ReadQueue


@dataclass(slots=True)
class ServedTable:
    """One table on one server."""

    name: str
    consistency: Consistency
    commit: ClockCommit
    keyed: bool = False  # a table of rows
    readers: ReadQueue = field(init=False)
    # Counts the updates applied here; a reader uses it to tell a newer value from an older one.
    version: int = 0
    ask_lead_at: float = 0.0

    def __post_init__(self) -> None:
        """Send new values to readers where the policy says so."""
        self.readers = ReadQueue(self.consistency.deliver == "on_clock", self.keyed)

    @property
    def closes_clocks(self) -> bool:
        """Say whether updates become visible clock by clock."""
        return self.consistency.visible == "on_clock"

    def is_complete(self, clocks: Clocks) -> bool:
        """Say whether enough workers have finished its current clock, and no server is too far behind to close it."""
        clock, backups = self.commit.clock, self.consistency.backups
        if self.commit.is_far_ahead:
            return False
        if not backups:
            return len(clocks) > 0 and clocks.slowest > clock
        return len(clocks.past(clock)) >= max(1, len(clocks) - backups)

    def fetched(self, pull: Pull, clock: int, dedup: DedupWindow) -> Fetched:
        """Return the answer to a pull, to go with the values as they are now."""
        includes = dedup.applied_in(self.name)
        return Fetched(pull.request, self.name, clock, self.version, dedup.settled_in(self.name), includes)

    def delivered(self, worker: int, clock: int, dedup: DedupWindow) -> Delivered:
        """Return the notice of new values to a subscriber, to go with the values as they are now."""
        includes, since = dedup.applied_in(self.name), self.readers.before(worker)
        return Delivered(self.name, clock, self.version, dedup.settled_in(self.name), includes, since)

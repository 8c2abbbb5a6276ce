"""Which rows a simulated server sends to a reader when they change, as the node of a server keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Unsubscription:
    """A worker keeps these rows of a table no longer; `request` is the number of its next read."""

    table: str
    rows: frozenset[int]
    request: int


@dataclass(slots=True)
class Subscribed:
    """The rows that one reader has asked for, and which of them it has yet to be sent again."""

    rows: set[int] = field(default_factory=set[int])
    changed: set[int] = field(default_factory=set[int])
    last_request: int = -1  # of the reads that were answered

    def add(self, rows: frozenset[int], request: int) -> None:
        """Send these rows, for which a read asked, when they change."""
        self.rows |= rows
        self.last_request = max(request, self.last_request)

    def remove(self, notice: Unsubscription) -> None:
        """Send these rows no longer, unless a read was answered that is not older: it may be of them."""
        if notice.request > self.last_request:
            self.rows -= notice.rows

    def take(self) -> set[int]:
        """Return the rows to be sent now, and begin anew."""
        changed, self.changed = self.changed & self.rows, set()
        return changed

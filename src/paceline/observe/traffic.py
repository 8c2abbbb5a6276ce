"""How many bytes go over the link to each worker, and belong to each table: the totals of one server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from paceline.observe.trace import Carried

MAX_TABLES: Final = 16  # by name; the rest is counted as one
MAX_NAME: Final = 200  # characters; a longer name is counted with the rest
_REST: Final = ""


@dataclass(slots=True)
class Traffic:
    """Totals since the server began; one thread counts."""

    _links: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # received and sent
    _tables: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def note_received(self, worker: int, num_bytes: int) -> None:
        """Count the body of a frame that has come from a worker."""
        self._link(worker)[0] += num_bytes

    def note_pushed(self, table: str, num_bytes: int) -> None:
        """Count what of such a body belongs to a table."""
        self._table(table)[0] += num_bytes

    def note_sent(self, worker: int, table: str, num_bytes: int) -> None:
        """Count the body of a frame for a worker, which belongs to a table, or with an empty name to none."""
        self._link(worker)[1] += num_bytes
        if table:
            self._table(table)[1] += num_bytes

    def carried(self, t: float, server: int) -> Carried:
        """Return the totals as a record."""
        links = tuple([(worker, received, sent) for worker, (received, sent) in self._links.items()])
        tables = tuple([(table, received, sent) for table, (received, sent) in self._tables.items()])
        return Carried(t, server, links, tables)

    def _link(self, worker: int) -> list[int]:
        counts = self._links.get(worker)
        if counts is None:
            counts = self._links[worker] = [0, 0]
        return counts

    def _table(self, table: str) -> list[int]:
        counts = self._tables.get(table)
        if counts is None:
            named = table if len(self._tables) < MAX_TABLES and len(table) <= MAX_NAME else _REST
            counts = self._tables.setdefault(named, [0, 0])
        return counts

"""How many bytes go over the link to each worker, and belong to each table: the totals of one server."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.observe.trace import Carried

MAX_TABLES: Final = 16  # by name; the rest is counted as one
MAX_NAME: Final = 200  # characters; a longer name is counted with the rest
_REST: Final = ""


def _counts() -> defaultdict[Any, int]:
    return defaultdict(int)


@dataclass(slots=True)
class Traffic:
    """Totals since the server began; one thread counts.

    Attributes:
        sent_to: bytes of bodies sent to each worker; the sender adds them itself, once a step.
        sent_of: those that belong to a table; an empty name has the rest.
    """

    sent_to: defaultdict[int, int] = field(default_factory=_counts)
    sent_of: defaultdict[str, int] = field(default_factory=_counts)
    _received_from: defaultdict[int, int] = field(default_factory=_counts)
    _received_of: defaultdict[str, int] = field(default_factory=_counts)

    def note_received(self, worker: int, num_bytes: int) -> None:
        """Count the body of a frame that has come from a worker."""
        self._received_from[worker] += num_bytes

    def note_pushed(self, table: str, num_bytes: int) -> None:
        """Count what of such a body belongs to a table, which need not exist."""
        is_known = table in self._received_of or (len(self._received_of) < MAX_TABLES and len(table) <= MAX_NAME)
        self._received_of[table if is_known else _REST] += num_bytes

    def carried(self, t: float, server: int) -> Carried:
        """Return the totals as a record."""
        workers = dict.fromkeys((*self._received_from, *self.sent_to))
        links = tuple([(worker, self._received_from.get(worker, 0), self.sent_to.get(worker, 0)) for worker in workers])
        tables: dict[str, tuple[int, int]] = {}
        for table in dict.fromkeys((*self._received_of, *self.sent_of)):
            if table or table in self._received_of:
                name = table if len(tables) < MAX_TABLES and len(table) <= MAX_NAME else _REST
                received, sent = tables.get(name, (0, 0))
                more = self.sent_of.get(table, 0) if table else 0
                tables[name] = (received + self._received_of.get(table, 0), sent + more)
        return Carried(t, server, links, tuple([(table, *counts) for table, counts in tables.items()]))

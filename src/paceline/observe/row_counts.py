"""Which rows are pushed most: by a bounded sample of the ids in pushes of rows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

_INTERVAL_S: Final = 0.03  # between two pushes of one table that are looked at
_NUM_PUSHES: Final = 6  # of a table: the latest that were looked at
_MAX_IDS: Final = 2048  # of a push; of a larger one those that it begins with
_MAX_TABLES: Final = 16
_NUM_HOTTEST: Final = 3
_ID_BYTES: Final = 8


@dataclass(slots=True)
class _Seen:
    """The latest pushes of one table that were looked at, as their distinct ids."""

    due_t: float = 0.0
    pushes: deque[np.ndarray[tuple[int], np.dtype[np.int64]]] = field(
        default_factory=lambda: deque[np.ndarray[tuple[int], np.dtype[np.int64]]](maxlen=_NUM_PUSHES)
    )


@dataclass(slots=True)
class RowCounts:
    """Looks at the ids of some pushes; it takes a fraction of a millisecond a few times a second."""

    _tables: dict[str, _Seen] = field(default_factory=dict[str, _Seen])

    def note(self, table: str, body: memoryview, num: int, now: float) -> None:
        """Look at the `num` ids that a push begins with, if its table is due; too short a body is left out."""
        seen = self._tables.get(table)
        if seen is None:
            if len(self._tables) >= _MAX_TABLES:
                return
            seen = self._tables[table] = _Seen()
        num = min(num, _MAX_IDS)
        if now >= seen.due_t and 0 < num * _ID_BYTES <= len(body):
            seen.due_t = now + _INTERVAL_S
            seen.pushes.append(np.unique(np.frombuffer(bytes(body[: num * _ID_BYTES]), np.int64)))

    def hottest(self) -> tuple[tuple[str, int, float], ...]:
        """Return the rows that are in most of the latest pushes, as (table, id, share of them), the most first."""
        found: list[tuple[str, int, float]] = []
        for name, seen in self._tables.items():
            if len(seen.pushes) == _NUM_PUSHES:
                ids, counts = np.unique(np.concatenate(seen.pushes), return_counts=True)
                most = np.argsort(-counts, kind="stable")[:_NUM_HOTTEST].tolist()
                found += [(name, int(ids[place]), int(counts[place]) / _NUM_PUSHES) for place in most]
        return tuple(sorted(found, key=lambda each: -each[2])[:_NUM_HOTTEST])

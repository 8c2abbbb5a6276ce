"""Snapshots that have only those rows which have changed since the one before.

1. Each server marks the rows that change from a cut on. The next cut names these marks, and has only marked rows.
2. Marks that a server does not have, as it was replaced or the snapshot before failed, make a cut of all rows.
3. A snapshot names the one that it is based on, with its digest; so a chain of them ends with one that has all rows.
4. Every eighth has all rows, and so has the next one where the chain has half as many bytes as all rows had: what is
   read to resume is at most that much more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from paceline.snapshots.folder import Snapshot
from paceline.wire.requests import CutHead

WHOLE_EVERY: Final = 8
MOST_CHANGED: Final = 0.5  # bytes of a chain, in those of all rows

Marks = tuple[str, ...]  # by server, the name of its marks; empty for none


@final
@dataclass(slots=True)
class Increments:
    """What the next snapshot of a folder may be based on. For one writer, which writes one after the other."""

    _base: Snapshot | None = None
    _marks: Mapping[str, Marks] = field(default_factory=dict[str, Marks])
    _num: int = 0  # since the last one with all rows
    _whole_bytes: int = 0  # of the rows in that one
    _changed_bytes: int = 0  # of the rows in those after it

    def since(self, table: str, num_servers: int) -> Marks:
        """Return the marks that a cut of a table is to name, by server; empty where it is to have all rows."""
        return self._marks.get(table, ("",) * num_servers) if self._can_go_on() else ("",) * num_servers

    def note(self, written: Snapshot, marks: Mapping[str, Marks]) -> None:
        """Note a snapshot that is on disk, and the marks that its cuts have begun."""
        row_bytes = sum(entry.size_bytes for entry in written.manifest.files if entry.name.startswith("rows-"))
        if written.manifest.base:
            self._num, self._changed_bytes = self._num + 1, self._changed_bytes + row_bytes
        else:
            self._num, self._changed_bytes, self._whole_bytes = 0, 0, row_bytes
        self._base, self._marks = written, marks

    def begin(self) -> Snapshot | None:
        """Return what a snapshot is based on whose tables are cut now; until it is on disk, the next has all rows."""
        base, self._base, self._marks = self._base, None, {}
        return base

    def _can_go_on(self) -> bool:
        is_short = self._num + 1 < WHOLE_EVERY and self._changed_bytes <= MOST_CHANGED * self._whole_bytes
        return self._base is not None and is_short and self._base.folder.exists()


def marks_of(heads: Mapping[str, Sequence[CutHead]]) -> dict[str, Marks]:
    """Return the marks that the cuts of tables have begun, without tables whose rows are not marked."""
    found = {name: tuple(head.marks for head in parts) for name, parts in heads.items()}
    return {name: marks for name, marks in found.items() if all(marks)}

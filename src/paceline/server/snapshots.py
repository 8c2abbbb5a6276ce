"""Copies of values that wait for slow connections while the table changes: one copy for all readers of a version."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import ReferenceType, ref

from paceline.transport.buffers import fresh_buffer


@dataclass(slots=True)
class Snapshots:
    """The newest copy of each table's values, while it is referenced elsewhere. Used by one thread at a time."""

    _newest: dict[str, tuple[object, ReferenceType[memoryview]]] = field(
        default_factory=dict[str, tuple[object, ReferenceType[memoryview]]]
    )

    def of(self, table: str, version: object, values: memoryview) -> memoryview:
        """Return a copy of these values: the existing one if it has the same version and is still referenced.

        >>> snapshots, values = Snapshots(), memoryview(bytearray(b"ab"))
        >>> first, second = snapshots.of("w", 7, values), snapshots.of("w", 7, values)
        >>> values[0] = 99
        >>> first is second, bytes(first), bytes(snapshots.of("w", 8, values))
        (True, b'ab', b'cb')
        """
        known, copy = self._newest.get(table, (None, _nothing))
        found = copy() if known == version else None
        if found is None:
            found = fresh_buffer(values.nbytes)
            found[:] = values
            self._newest[table] = version, ref(found)
        return found


def _nothing() -> None:
    """Stand for a missing copy."""

"""Statistics of a row table on one server: plain numbers that add up over the servers."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Rows of one table on one server, or on several when added.

    Args:
        num_rows: there are now.
        num_candidates: ids that were pushed, but not often enough yet to become rows.
        num_admitted: rows that came into being by a push, over all time.
        num_dropped: pushed rows that were lost because their id was not admitted yet: each a gradient that never
            counted.
        num_expired: rows removed because they were unused for too long.
        num_evicted: rows removed because there were more than allowed.
        num_zeroed: non-finite numbers of gradients that counted as 0.
        index_bytes: main memory of the index and of the candidates.
        column_bytes: main memory of ids, values, state and use; of a table that spills, what is mapped at most.
        spilled_bytes: of ids, values, state and use that lie in a file.

    Example:
        >>> (RowStatistics(num_rows=2, index_bytes=64) + RowStatistics(num_rows=3, index_bytes=64)).num_rows
        5
    """

    num_rows: int = 0
    num_candidates: int = 0
    num_admitted: int = 0
    num_dropped: int = 0
    num_expired: int = 0
    num_evicted: int = 0
    num_zeroed: int = 0
    index_bytes: int = 0
    column_bytes: int = 0
    spilled_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Main memory in all."""
        return self.index_bytes + self.column_bytes

    def __add__(self, other: RowStatistics) -> RowStatistics:
        """Return the numbers of both together."""
        names = [field.name for field in fields(RowStatistics)]
        return RowStatistics(**{name: getattr(self, name) + getattr(other, name) for name in names})

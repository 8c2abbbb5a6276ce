"""Layout of rows: their columns, the formulas for their memory, and the pieces in which they travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from msgspec.structs import astuple

from paceline.errors import ProtocolBug
from paceline.update.dtypes import torch_dtype
from paceline.update.rows.column import most_mapped_bytes
from paceline.update.rows.native_ops import num_entries

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rows.rules import RowRule
    from paceline.update.rows.spec import Lifecycle, RowTableSpec

IDS: Final = "ids"
VALUES: Final = "values"
LAST_USED: Final = "last_used"
NUM_USES: Final = "num_uses"
LEAST_PIECE_ROWS: Final = 16
_LEAST_ENTRIES: Final = 1 << 10


class RowLayout(msgspec.Struct, frozen=True):
    """What a row has in one column: how many numbers of which type."""

    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes a row."""
        return self.width * self.dtype.itemsize


def layouts(spec: RowTableSpec, rule: RowRule) -> dict[str, RowLayout]:
    """Return all columns of a table: "ids", "values", "state.<name>" of the rule, and those of the lifecycle."""
    dtype = torch_dtype(spec.dtype)
    state = {state_name(c.name): RowLayout(c.elements(spec.width), dtype) for c in rule.columns}
    use = {name: RowLayout(1, torch.int32) for name in use_columns(spec.life)}
    return {IDS: RowLayout(1, torch.int64), VALUES: RowLayout(spec.width, dtype), **state, **use}


def use_columns(life: Lifecycle) -> tuple[str, ...]:
    """Return the names of the columns that a lifecycle needs, one int32 a row each."""
    by_clock = life.expire_after or (life.max_rows and life.evict == "lru")
    by_count = life.max_rows and life.evict == "lfu"
    return (LAST_USED,) * bool(by_clock) + (NUM_USES,) * bool(by_count)


def state_name(name: str) -> str:
    """Return the name of the column that keeps a state of the rule."""
    return f"state.{name}"


def row_bytes(spec: RowTableSpec, rule: RowRule) -> int:
    """Return the bytes of a row without its part of the index: the memory formula of row tables.

    A row has 8 bytes of id, its values, the state of its rule, 4 bytes where rows expire or are capped ("lru" and
    expiry share them, "lfu" has its own). The index adds `index_bytes`, 10.7 to 21.3 bytes a row.

    Example:
        >>> from paceline.update.rows.rules import row_rule
        >>> from paceline.update.rows.spec import RowTableSpec
        >>> from paceline.update.named_rules import Add
        >>> spec = RowTableSpec("users", 16, "float32", Add(), "bsp", "sum", "reject")
        >>> row_bytes(spec, row_rule(spec.rule, allowed=None))
        72
    """
    return sum(layout.row_bytes for layout in layouts(spec, rule).values())


def index_bytes(num_rows: int) -> int:
    """Return the bytes of the index of so many rows, which doubles where 3/4 of it would be in use.

    >>> index_bytes(2_000_000) / 2_000_000
    16.777216
    """
    return 8 * max(_LEAST_ENTRIES, num_entries(num_rows))


def piece_bytes(spec: RowTableSpec, rule: RowRule) -> int:
    """Return what one row of a table in files maps to main memory at most."""
    return sum(most_mapped_bytes(layout.row_bytes) for layout in layouts(spec, rule).values())


def least_bytes(spec: RowTableSpec, rule: RowRule) -> int:
    """Return the least memory in which a table in files can work at all."""
    return index_bytes(0) + 2 * LEAST_PIECE_ROWS * piece_bytes(spec, rule)


class RowPiece(msgspec.Struct, frozen=True):
    """Rows and all their columns; see `layouts` for what there is.

    Args:
        ids: (n,), int64, distinct.
        columns: (n, width of the column) each: "values", "state.<name>" for each state of the rule, and "last_used"
            and "num_uses" where the lifecycle of the table keeps them.
        next_slot: where the next piece starts; None after the last one.
    """

    ids: Tensor
    columns: Mapping[str, Tensor]
    next_slot: int | None = None

    @property
    def values(self) -> Tensor:
        """The values, (n, width)."""
        return self.columns[VALUES]

    def require(self, layouts: Mapping[str, RowLayout], optional: tuple[str, ...]) -> None:
        """Raise ProtocolBug when it does not fit a table with these columns, of which some may be missing."""
        for name, layout in layouts.items():
            if name in optional and name not in self.columns:
                continue
            column = self.ids.view(-1, 1) if name == IDS else self.columns.get(name)
            shape = (len(self.ids), layout.width)
            if column is None or column.shape != shape or column.dtype != layout.dtype:
                got = "none" if column is None else f"{tuple(column.shape)} and {column.dtype}"
                raise ProtocolBug(f"rows have {got} as {name}, expected {shape} and {layout.dtype}")
        if len(self.ids.unique()) < len(self.ids):
            raise ProtocolBug(f"{len(self.ids) - len(self.ids.unique())} of {len(self.ids)} ids of rows repeat")


class RowStatistics(msgspec.Struct, frozen=True):
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
        return RowStatistics(*map(sum, zip(astuple(self), astuple(other), strict=True)))

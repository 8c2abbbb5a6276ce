"""Layout of rows: their columns, and the formulas for their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from paceline.update.rows.lifecycle import use_columns
from paceline.update.rows.native_ops import num_entries
from paceline.update.rows.spill import most_mapped_bytes

if TYPE_CHECKING:
    from paceline.update.rows.rule import RowRule
    from paceline.update.rows.spec import RowTableSpec

IDS: Final = "ids"
VALUES: Final = "values"
LEAST_PIECE_ROWS: Final = 16
_LEAST_ENTRIES: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What a row has in one column: how many numbers of which type."""

    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes a row."""
        return self.width * self.dtype.itemsize


def layouts(spec: RowTableSpec, rule: RowRule) -> dict[str, RowLayout]:
    """Return all columns of a table: "ids", "values", "state.<name>" of the rule, and those of the lifecycle."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    state = {state_name(c.name): RowLayout(c.elements(spec.width), dtype) for c in rule.columns}
    use = {name: RowLayout(1, torch.int32) for name in use_columns(spec.life)}
    return {IDS: RowLayout(1, torch.int64), VALUES: RowLayout(spec.width, dtype), **state, **use}


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

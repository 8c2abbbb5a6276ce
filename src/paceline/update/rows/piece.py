"""A piece of a row table: some rows with all their columns, as servers send and load them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ProtocolBug
from paceline.update.rows.layout import IDS, VALUES, RowLayout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowPiece:
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

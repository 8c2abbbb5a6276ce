"""Who is sent which rows when they change: the readers of a table whose servers deliver."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.tensors.rows.column import Column
from paceline.tensors.rows.index import RowIndex
from paceline.tensors.rows.ops import RowOps

_MOST_PIECES = 64  # of changed ids, before they are made one


@dataclass(slots=True)
class Subscription:
    """The rows that one reader has asked for, and which of them have changed since it was last sent some."""

    ops: RowOps
    _rows: RowIndex = field(init=False)
    _changed: list[Tensor] = field(default_factory=list[Tensor])
    _last_request: int = -1  # of the reads that were answered

    def __post_init__(self) -> None:
        """Start with no row."""
        self._rows = RowIndex(self.ops, Column(1, torch.int64))

    def __len__(self) -> int:
        """Count the rows."""
        return len(self._rows)

    def add(self, ids: Tensor, request: int) -> None:
        """Send these rows, for which a read asked, when they change; called before anything else changes them."""
        self._rows.add(ids)
        self._last_request = max(request, self._last_request)

    def remove(self, ids: Tensor, request: int) -> None:
        """Send these rows no longer, unless a read was answered that is not older than this one: it may be of them."""
        if request <= self._last_request:
            return
        slots = self._rows.find(ids).unique()
        self._rows.remove(slots[slots >= 0])

    def note(self, ids: Tensor) -> None:
        """Note that rows have changed; each id is there once."""
        mine = ids[self._rows.find(ids) >= 0]
        if len(mine):
            self._changed.append(mine)
        if len(self._changed) > _MOST_PIECES:
            self._changed = [self._distinct()]

    def take(self) -> Tensor:
        """Return the ids of the rows to be sent now, each once, and begin anew."""
        ids, self._changed = self._distinct(), []
        return ids[self._rows.find(ids) >= 0]

    def close(self) -> None:
        """Let go of all memory."""
        self._rows.close()

    def _distinct(self) -> Tensor:
        if not self._changed:
            return torch.empty(0, dtype=torch.int64)
        return self.ops.unique(torch.cat(self._changed))[0]

"""Which rows of a table have changed since a cut, for another cut that has only these."""

from __future__ import annotations

import secrets
from typing import Final, final

import torch
from torch import Tensor

_MOST_PARTS: Final = 64  # tensors of removed ids, before they are merged into one


@final
class RowMarks:
    """Which slots of a store have changed since one moment, a byte each, and the ids of rows that are gone since.

    For one thread at a time.

    Example:
        >>> marks = RowMarks(2)
        >>> marks.note(torch.tensor([1, 4]))
        >>> marks.changed(6)
        tensor([False,  True, False, False,  True, False])
    """

    def __init__(self, num_slots: int) -> None:
        self.name: Final = secrets.token_hex(8)  # tells them from those of another moment, or of another server
        self._changed = torch.zeros(num_slots, dtype=torch.bool)
        self._removed: list[Tensor] = []

    def note(self, slots: Tensor) -> None:
        """Note that these rows change, or are new."""
        if slots.numel():
            self._grow(int(slots.max()) + 1)
            self._changed[slots] = True

    def note_all(self, num_slots: int) -> None:
        """Note that all rows change."""
        self._changed = torch.ones(max(num_slots, len(self._changed)), dtype=torch.bool)

    def note_removed(self, ids: Tensor) -> None:
        """Note that these rows are gone; they may come again."""
        self._removed.append(ids)
        if len(self._removed) > _MOST_PARTS:
            self._removed = [self.removed]

    @property
    def removed(self) -> Tensor:
        """Ids of rows that were removed, sorted; some of them may be there again."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *self._removed]).unique()

    def changed(self, num_slots: int) -> Tensor:
        """Return for each of so many slots whether its row has changed, or is new."""
        self._grow(num_slots)
        return self._changed[:num_slots]

    def _grow(self, num_slots: int) -> None:
        if num_slots > len(self._changed):
            grown = torch.zeros(max(num_slots, 2 * len(self._changed)), dtype=torch.bool)
            grown[: len(self._changed)] = self._changed
            self._changed = grown

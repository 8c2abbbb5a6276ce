"""A growing hash index from row ids to slots; free slots are reused."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final, TypeAlias, final

import torch

from paceline.errors import ProtocolBug, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rows.column import RowColumn
    from paceline.update.rows.ops import RowOps

Seed: TypeAlias = tuple[int, int]  # two unsigned numbers of 64 bits

NO_SEED: Final[Seed] = (0, 0)
_SEED: Final = struct.Struct("=QQ")


def fresh_seed() -> Seed:
    """Return a seed that cannot be guessed."""
    first, second = _SEED.unpack(os.urandom(_SEED.size))
    return first, second


MAX_ROWS: Final = (1 << 32) - 2  # slot + 1 has 32 bits in an entry, and 0 is empty
_MIN_ENTRIES: Final = 1 << 10


@final
class RowIndex:
    """Maps every id to a slot of its own, from 0 up. For one thread at a time.

    Entries, of 8 bytes, are a power of two, so many that at most 3/4 of them are taken; they double when more would be.
    Beside each slot lies its id, of 8 bytes. So with N ids, of N + F slots ever used (F is free now), an index takes

        8 E + 8 (N + F) + 8 F bytes, E = entries, 4/3 N <= E < 8/3 N as long as rows only come:

    18.7 to 29.3 bytes a row while none is free. `ids` may lie in a file, which is read from start to end as E doubles.

    Args:
        ops: what does the work.
        ids: an empty column of one int64 a row, which belongs to the index from now on.
        seed: decides where entries lie, and nothing else; drawn anew if none is given.

    Example:
        >>> from paceline.update.rows.column import RowColumn
        >>> from paceline.update.rows.ops import row_ops
        >>> index = RowIndex(row_ops(), RowColumn(1, torch.int64))
        >>> index.add(torch.tensor([70, -1, 70]))
        (tensor([0, 1, 0]), tensor([0, 1]))
        >>> index.find(torch.tensor([-1, 5]))
        tensor([ 1, -1])
        >>> index.close()
    """

    def __init__(self, ops: RowOps, ids: RowColumn, seed: Seed | None = None) -> None:
        self._ops = ops
        self._seed = fresh_seed() if seed is None else seed
        self._ids = ids
        self._entries = torch.zeros(_MIN_ENTRIES, dtype=torch.int64)
        self._free = torch.empty(0, dtype=torch.int64)  # the first _num_free of them, the last of these goes first
        self._num_free = 0
        self._num_slots = 0  # invariant: slots below are in the index or free, none is both

    def __len__(self) -> int:
        """Return the number of ids."""
        return self._num_slots - self._num_free

    @property
    def num_slots(self) -> int:
        """The number of slots ever used; all slots are below it."""
        return self._num_slots

    @property
    def memory_bytes(self) -> int:
        """The bytes of the index, with the ids of its slots, in memory or in their file."""
        return 8 * (self._entries.numel() + self._num_slots + self._free.numel())

    def find(self, keys: Tensor) -> Tensor:
        """Return the slots of ids, (n,) int64; -1 for those without a row."""
        return self._ops.find(self._entries, self._ids_of_slots(), keys, self._seed)

    def add(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots of ids, (n,) int64, and the positions in keys where new ids appear first, ascending.

        Ids may repeat. New ones get free slots first. Raises UsageError when there is no room for more rows; the index
        is as it was then.
        """
        if len(self) + keys.numel() > self._max_load():
            self._make_room(keys)
        num_fresh = max(0, keys.numel() - self._num_free)
        self._ids.grow(min(self._num_slots + num_fresh, MAX_ROWS))
        slots, added = self._ops.insert(
            self._entries, self._ids_of_slots(), keys, self._num_slots, self._free[: self._num_free], self._seed
        )
        num_reused = min(added.numel(), self._num_free)
        self._num_free -= num_reused
        self._num_slots += added.numel() - num_reused
        return slots, added

    def remove(self, slots: Tensor) -> None:
        """Remove the ids of distinct slots, which are then free; raises ProtocolBug for a slot without an id."""
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < self._num_slots:
            raise ProtocolBug(f"rows are taken out of an index of {self._num_slots} slots that it never had")
        self._ops.erase(self._entries, self._ids_of_slots(), slots, self._seed)
        num_free = self._num_free + slots.numel()
        if num_free > self._free.numel():
            longer = torch.empty(max(num_free, 2 * self._num_free), dtype=torch.int64)
            longer[: self._num_free] = self._free[: self._num_free]
            self._free = longer
        self._free[self._num_free : num_free] = slots
        self._num_free = num_free

    def ids_of(self, slots: Tensor) -> Tensor:
        """Return the ids of slots in use, (n,) int64."""
        return self._ids_of_slots().index_select(0, slots)

    def live_slots(self) -> Tensor:
        """Return the slots in use, ascending."""
        live = self._live()
        return torch.arange(self._num_slots) if live is None else live.nonzero().view(-1)

    def take_over(self, num_slots: int) -> None:
        """Fill an empty index with the ids that its column holds already, in slots from 0 up."""
        self._num_slots = num_slots
        self._entries = torch.zeros(max(_MIN_ENTRIES, num_entries(num_slots)), dtype=torch.int64)
        self._ops.rebuild(self._entries, self._ids_of_slots(), None, num_slots, self._seed)

    def close(self) -> None:
        """Release all memory; the index must not be used afterwards."""
        self._entries = self._free = torch.empty(0, dtype=torch.int64)
        self._ids.close()

    def _ids_of_slots(self) -> Tensor:
        return self._ids.tensor.view(-1)

    def _max_load(self) -> int:
        return self._entries.numel() // 4 * 3

    def _make_room(self, keys: Tensor) -> None:
        """Double the entries until the ids that are not in the index fit."""
        missing = keys[self.find(keys) < 0]
        needed = len(self) + self._ops.unique(missing)[0].numel()
        if needed > MAX_ROWS:
            raise UsageError(f"A server would have {needed} rows of one table, it can have {MAX_ROWS}. Add servers.")
        wanted, num_before = num_entries(needed), self._entries.numel()
        if wanted > num_before:
            try:
                self._build(wanted)
            except RuntimeError as error:  # of torch, where an allocation fails
                self._build(num_before)
                raise UsageError(
                    f"A row table needs {8 * wanted} bytes of memory for its index, which are not available. Give it "
                    "more, use more servers, or remove rows: expire_after, max_rows."
                ) from error

    def _build(self, num: int) -> None:
        """Lay out so many entries."""
        self._entries = torch.empty(0)  # free the old entries before the new ones are allocated
        self._entries = torch.zeros(num, dtype=torch.int64)
        self._ops.rebuild(self._entries, self._ids_of_slots(), self._live(), self._num_slots, self._seed)

    def _live(self) -> Tensor | None:
        """Return which slots are in use, (num_slots,) bool, or None when all are."""
        if self._num_free == 0:
            return None
        live = torch.ones(self._num_slots, dtype=torch.bool)
        live[self._free[: self._num_free]] = False
        return live


def num_entries(num_ids: int) -> int:
    """Return how many entries an index of so many ids has: the least power of two that they fill to 3/4 at most.

    >>> [num_entries(num_ids) for num_ids in (0, 3, 4, 6, 7)]
    [4, 4, 8, 8, 16]
    """
    return max(4, 1 << ((4 * num_ids + 2) // 3 - 1).bit_length())

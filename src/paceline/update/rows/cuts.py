"""Cuts of row tables: the rows of one server as they were at one moment, read piece by piece; see `update.cuts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import torch
from safetensors.torch import save

from paceline.errors import UsageError
from paceline.update.cuts import NO_ROOM

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rows.marks import RowMarks

Columns = dict[str, "Tensor"]  # by name, ids among them, with one row each
PIECE_BYTES: Final = 1 << 22
REMOVED: Final = "removed"  # in `fixed`: ids of rows that are gone since the marks of `base`
CUT_SLOT_BYTES: Final = 5  # of a cut for each slot, at once


@final
class RowsCut:
    """The rows of one server as they were between two updates; see `TableCut`. For one thread at a time.

    Rows are kept one by one as updates change them, so a cut takes as much memory as rows are changed before its reader
    comes to them, and 5 bytes a row.

    Args:
        num_slots: slots ever used, at the cut.
        row_bytes: bytes of a row.
        live: returns those slots between two that have a row now.
        copies: returns copies of all columns of rows.
        has_room: returns whether so many bytes may be kept in all.
        marks: those that begin with the cut, if any.
        since: marks of the rows that it has; None for all.
    """

    def __init__(
        self,
        num_slots: int,
        row_bytes: int,
        live: Callable[[int, int], Tensor],
        copies: Callable[[Tensor], Columns],
        has_room: Callable[[int], bool] = lambda _: True,
        *,
        marks: RowMarks | None = None,
        since: RowMarks | None = None,
    ) -> None:
        self.layout: Final = None
        self.fixed: Final[dict[str, Tensor]] = {} if since is None else {REMOVED: since.removed}
        self.base: Final = "" if since is None else since.name
        self.marks: Final = "" if marks is None else marks.name
        self._num_slots, self._row_bytes = num_slots, row_bytes
        self._live, self._copies, self._has_room = live, copies, has_room
        self._step = max(1, PIECE_BYTES // row_bytes)  # slots of a piece
        self.num_pieces: Final = -(-num_slots // self._step)
        self._left = set(range(self.num_pieces))
        # Read, kept, without a row at the cut, or with one that is not wanted.
        self._settled = torch.zeros(num_slots, dtype=torch.bool) if since is None else ~since.changed(num_slots)
        self._place = torch.full((num_slots,), -1, dtype=torch.int32)  # of a kept row, counted over all parts
        self._parts: list[Columns] = []
        self._starts = [0]  # of the parts, and where the next one begins
        self.problem = ""  # why the cut was given up
        self.most_kept_bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether updates need to keep nothing more for it."""
        return not self._left

    def keep(self, slots: Tensor) -> None:
        """Keep rows as they are; called before they change. Slots may repeat, and each has a row."""
        mine = self._unsettled(slots)
        if not mine.numel() or self.is_over:
            return
        mine = mine.unique()
        kept_bytes = (self._starts[-1] + mine.numel()) * self._row_bytes
        if not self._has_room(kept_bytes):
            self._give_up(NO_ROOM)
            return
        self._parts.append(self._copies(mine))
        start = self._starts[-1]
        self._place[mine] = torch.arange(start, start + len(mine), dtype=torch.int32)
        self._starts.append(start + len(mine))
        self._settled[mine] = True
        self.most_kept_bytes = max(self.most_kept_bytes, kept_bytes)

    def keep_all(self) -> None:
        """Keep all rows that are left; called before any of them may change."""
        for index in sorted(self._left):
            start = index * self._step
            self.keep(self._live(start, min(start + self._step, self._num_slots)))

    def skip(self, slots: Tensor) -> None:
        """Note that rows have come to these slots, which had none."""
        self._settled[self._unsettled(slots)] = True

    def read(self, index: int) -> memoryview:
        """Return the rows of one piece as safetensors, once; see `TableCut.read`."""
        return memoryview(save(self.read_columns(index)))

    def read_columns(self, index: int) -> Columns:
        """Return the rows of one piece, once; raises as `read` does."""
        if self.problem:
            raise UsageError(f"a cut was given up: {self.problem}")
        if index not in self._left:
            raise UsageError(f"a cut has no piece {index} that was not read before, of {self.num_pieces}")
        start, stop = index * self._step, min((index + 1) * self._step, self._num_slots)
        slots = self._live(start, stop)
        parts = [self._copies(slots[~self._settled[slots]]), *self._kept_between(start, stop)]
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self._left.discard(index)  # not before: a piece that memory was short for is not read
        self._settled[start:stop] = True
        if self.is_over:
            self._parts.clear()
        return found

    def close(self) -> None:
        """See `TableCut.close`."""
        self._give_up("it was closed")

    def _kept_between(self, start: int, stop: int) -> list[Columns]:
        places = self._place[start:stop]
        places = places[places >= 0].long().sort().values
        if not places.numel():
            return []
        starts = torch.tensor(self._starts)
        numbers = torch.searchsorted(starts, places, right=True) - 1
        found: list[Columns] = []
        for number in numbers.unique().tolist():
            at = places[numbers == number] - starts[number]
            found.append({name: column[at] for name, column in self._parts[number].items()})
        return found

    def _unsettled(self, slots: Tensor) -> Tensor:
        mine = slots[slots < self._num_slots]
        return mine[~self._settled[mine]]

    def _give_up(self, why: str) -> None:
        self.problem = self.problem or why
        self._left.clear()
        self._parts.clear()

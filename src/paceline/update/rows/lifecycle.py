"""Lifecycle of rows: expiry of those unused for too long, and eviction of the least used when there are too many.

Both are decided from what each row was used for, which is kept in a column only where the lifecycle asks for it: the
clock of the last push or pull (expiry, and a cap with "lru"), or the number of pushes and pulls (a cap with "lfu").
Counts fade: all are halved as soon as there were `HALVE_AFTER` uses a row since the last time, so what was popular
once makes room for what is popular now. Among equals the row goes whose slot is lower, mostly the older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rows.columns import RowColumns
    from paceline.update.rows.spec import Lifecycle

LAST_USED: Final = "last_used"
NUM_USES: Final = "num_uses"
HALVE_AFTER: Final = 8  # uses a row, on average
_NEVER: Final = torch.iinfo(torch.int32).max  # marks slots without a row: they are used last and most, and never chosen
_LAST_CLOCK: Final = _NEVER - 1  # later ones, which only a peer that breaks the rules names, count as this one
_SPAN: Final = 1 << 18  # slots that are looked at together


def use_columns(life: Lifecycle) -> tuple[str, ...]:
    """Return the names of the columns that a lifecycle needs, one int32 a row each."""
    by_clock = life.expire_after or (life.max_rows and life.evict == "lru")
    by_count = life.max_rows and life.evict == "lfu"
    return (LAST_USED,) * bool(by_clock) + (NUM_USES,) * bool(by_count)


@final
class RowUsage:
    """Keeps how rows were used, and chooses those that go.

    Args:
        life: of the table.
        columns: with those that `use_columns` names.
    """

    def __init__(self, life: Lifecycle, columns: RowColumns) -> None:
        self._life = life
        self._columns = columns
        names = use_columns(life)
        self._by_clock, self._by_count = LAST_USED in names, NUM_USES in names
        self._oldest = 0  # no row was used before this clock
        self._num_uses = 0  # since counts were halved

    def begin(self, slots: Tensor, clock: int) -> None:
        """Note that rows came into being at a clock, and were not used before."""
        clock = min(clock, _LAST_CLOCK)
        if self._by_clock:
            self._keys(LAST_USED)[slots] = clock
            self._oldest = min(self._oldest, clock)
        if self._by_count:
            self._keys(NUM_USES)[slots] = 0

    def touch(self, slots: Tensor, clock: int) -> None:
        """Note one use of each of some rows, which may repeat, at a clock."""
        if self._by_clock:
            column = self._keys(LAST_USED)
            column[slots] = column[slots].clamp_(min=min(clock, _LAST_CLOCK))
        if self._by_count:
            column = self._keys(NUM_USES)
            column[slots] = column[slots].add_(1)
            self._num_uses += len(slots)

    def end(self, slots: Tensor) -> None:
        """Note that rows are gone."""
        for name in use_columns(self._life):
            self._keys(name)[slots] = _NEVER

    def forget_bounds(self) -> None:
        """Note that rows were written with the use they had elsewhere, at any clock."""
        self._oldest = 0

    def expired(self, clock: int, num_rows: int, num_slots: int) -> Tensor:
        """Return the slots of rows that were last used more than `expire_after` clocks before this one.

        Where fewer than `floor` would be left, those that were used most recently stay.
        """
        below = clock - self._life.expire_after
        spare = num_rows - self._life.floor
        if not self._life.expire_after or spare <= 0 or self._oldest >= below:
            return torch.empty(0, dtype=torch.int64)
        slots = self._least(LAST_USED, spare, below, num_slots)
        if len(slots) < spare or not self._life.floor:
            self._oldest = below
        return slots

    def surplus(self, num_rows: int, num_slots: int) -> Tensor:
        """Return the slots of the least used rows, as many as there are above `max_rows`."""
        num = num_rows - self._life.max_rows
        if not self._life.max_rows or num <= 0:
            return torch.empty(0, dtype=torch.int64)
        return self._least(NUM_USES if self._by_count else LAST_USED, num, _NEVER, num_slots)

    def fade(self, num_rows: int, num_slots: int) -> None:
        """Halve all counts if it is time to."""
        if self._num_uses < HALVE_AFTER * max(1, num_rows):
            return
        for _, keys in self._spans(NUM_USES, num_slots):
            keys[keys != _NEVER] >>= 1
        self._num_uses = 0

    def _least(self, name: str, num: int, below: int, num_slots: int) -> Tensor:
        """Return the slots of at most `num` rows whose keys are lowest, and below `below`."""
        cut, num_at_cut = self._cut(name, num, below, num_slots)
        chosen: list[Tensor] = []
        for start, keys in self._spans(name, num_slots):
            at_cut = (keys == cut).nonzero().view(-1)[:num_at_cut]
            num_at_cut -= len(at_cut)
            chosen.append(start + torch.cat(((keys < cut).nonzero().view(-1), at_cut)))
        return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)

    def _cut(self, name: str, num: int, below: int, num_slots: int) -> tuple[int, int]:
        """Return the key below which all rows are chosen, and how many of those at it, to choose `num` in all."""
        counts: dict[int, int] = {}
        for _, keys in self._spans(name, num_slots):
            found, number = keys[keys < below].unique(return_counts=True)
            for key, count in zip(found.tolist(), number.tolist(), strict=True):
                counts[key] = counts.get(key, 0) + count
        for key in sorted(counts):
            if num <= counts[key]:
                return key, num
            num -= counts[key]
        return below, 0

    def _spans(self, name: str, num_slots: int) -> Iterator[tuple[int, Tensor]]:
        """Go through a column: where each part of it starts, and its keys."""
        for start in range(0, num_slots, _SPAN):
            stop = min(start + _SPAN, num_slots)
            self._columns.visit_span(name, start, stop)
            yield start, self._keys(name)[start:stop]

    def _keys(self, name: str) -> Tensor:
        return self._columns[name].view(-1)

"""Lifecycle of rows: admission after some pushes, expiry of unused rows, and eviction of the least used ones.

Ids that were pushed too seldom to be rows are candidates, counted in bounded memory: in two generations, each of a
limited number of ids. When the young generation is full it becomes the old one, and the counts of the old one are
forgotten. An id that is pushed again moves to the young one with its count. So an id is never counted too often or
admitted too early; a forgotten one is admitted late.

Expiry and eviction are decided from the uses of each row, kept in a column only if the lifecycle needs it: the clock of
the last push or pull (expiry, and a cap with "lru"), or the number of pushes and pulls (a cap with "lfu"). Counts fade:
all are halved after every `HALVE_AFTER` uses a row, so that rows that were popular once make room for those that are
popular now. Among equals the row with the lower slot is evicted, mostly the older one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, final

import msgspec
import torch

from paceline.update.rows.column import RowColumn
from paceline.update.rows.index import RowIndex
from paceline.update.rows.layout import LAST_USED, NUM_USES, index_bytes, use_columns

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rows.contribution import RowContribution
    from paceline.update.rows.memory import RowColumns
    from paceline.update.rows.ops import RowOps
    from paceline.update.rows.spec import Lifecycle

_MOST_CANDIDATES: Final = 1 << 20  # of a generation
_BUDGET_BYTES: Final = 1024  # of a memory budget for each candidate of a generation: a tenth of it at most


def most_candidates(life: Lifecycle) -> int:
    """Return the most ids that a generation holds; 0 if every id becomes a row at once."""
    if life.admit_after == 1:
        return 0
    return min(_MOST_CANDIDATES, life.memory_bytes // _BUDGET_BYTES) if life.memory_bytes else _MOST_CANDIDATES


def most_candidate_bytes(life: Lifecycle) -> int:
    """Return the most main memory that candidates take: index, ids, counts and a list of gaps, of both generations."""
    limit = most_candidates(life)
    return 2 * (index_bytes(limit) + (8 + 4 + 16) * limit) if limit else 0


class AdmittedIds(msgspec.Struct, frozen=True):
    """An update without the rows that are not admitted yet. Candidates are counted only by `Candidates.count`.

    Args:
        contributions: with the rows to apply.
        num_dropped: number of rows of pushes that are dropped.
        ripe: ids that become rows.
        unripe: ids that stay candidates.
        counts: number of pushes of each unripe id.
    """

    contributions: Sequence[RowContribution]
    num_dropped: int
    ripe: Tensor
    unripe: Tensor
    counts: Tensor


class _Generation(msgspec.Struct, frozen=True):
    index: RowIndex
    ids: RowColumn
    counts: Tensor  # (most candidates,), int32, by slot


@final
class Candidates:
    """Counts pushes of ids that have no row.

    Args:
        ops: finds ids.
        life: when ids are admitted, and the memory budget of candidates.
    """

    def __init__(self, ops: RowOps, life: Lifecycle) -> None:
        self._ops = ops
        self._admit_after = life.admit_after
        self._limit = most_candidates(life)
        self._young, self._old = self._generation(), self._generation()

    def __len__(self) -> int:
        return len(self._young.index) + len(self._old.index)

    @property
    def memory_bytes(self) -> int:
        """Main memory of ids, counts and their indexes."""
        return sum(g.index.memory_bytes + 4 * g.index.num_slots for g in (self._young, self._old))

    def admit(self, contributions: Sequence[RowContribution], find: Callable[[Tensor], Tensor]) -> AdmittedIds:
        """Admit the ids of an update push by push: an id is admitted by its n-th push.

        Gradients of earlier pushes are dropped. An id that repeats within a push counts once.

        Args:
            contributions: of the update, in order.
            find: returns the slots of ids, -1 for those without a row.
        """
        ids, inverse = self._ops.unique(torch.cat([contribution.ids for contribution in contributions]))
        absent = find(ids) < 0
        counts = torch.full((len(ids),), self._admit_after, dtype=torch.int32)
        counts[absent] = self._counts(ids[absent])
        left: list[RowContribution] = []
        for contribution, pushed in zip(contributions, inverse.split([len(c.ids) for c in contributions]), strict=True):
            counts[pushed] = (counts[pushed] + 1).clamp_(max=self._admit_after)
            left.append(contribution.only(counts[pushed] >= self._admit_after))
        num_dropped = len(inverse) - sum(len(contribution.ids) for contribution in left)
        ripe = counts >= self._admit_after
        return AdmittedIds(left, num_dropped, ids[absent & ripe], ids[~ripe], counts[~ripe])

    def count(self, admitted: AdmittedIds) -> None:
        """Count the pushes that `admit` has seen; ids that became rows are no longer candidates."""
        self._forget(admitted.ripe)
        self._remember(admitted.unripe, admitted.counts)

    def close(self) -> None:
        """Release the memory."""
        for generation in (self._young, self._old):
            generation.index.close()

    def _remember(self, ids: Tensor, counts: Tensor) -> None:
        """Store the counts of distinct ids."""
        self._forget(ids)
        for start in range(0, len(ids), self._limit):
            part = slice(start, start + self._limit)
            if len(self._young.index) + len(ids[part]) > self._limit:
                self._turn()
            slots, _ = self._young.index.add(ids[part])
            self._young.counts[slots] = counts[part]

    def _forget(self, ids: Tensor) -> None:
        """Drop the counts of distinct ids."""
        for generation in (self._young, self._old):
            slots = generation.index.find(ids)
            generation.index.remove(slots[slots >= 0])

    def _counts(self, ids: Tensor) -> Tensor:
        """Return the number of pushes of distinct ids, (n,) int32."""
        counts = torch.zeros(len(ids), dtype=torch.int32)
        for generation in (self._young, self._old):
            slots = generation.index.find(ids)
            counts[slots >= 0] = generation.counts[slots[slots >= 0]]
        return counts

    def _turn(self) -> None:
        self._old.index.close()
        self._old, self._young = self._young, self._generation()

    def _generation(self) -> _Generation:
        ids = RowColumn(1, torch.int64)
        return _Generation(RowIndex(self._ops, ids), ids, torch.zeros(self._limit, dtype=torch.int32))


HALVE_AFTER: Final = 8  # uses a row, on average
_NEVER: Final = torch.iinfo(torch.int32).max  # marks slots without a row: they are used last and most, and never chosen
_LAST_CLOCK: Final = _NEVER - 1  # later ones, which only a peer that breaks the rules names, count as this one
_SPAN: Final = 1 << 18  # slots that are looked at together


@final
class RowUsage:
    """Records the uses of rows, and chooses the rows to expire or evict.

    Args:
        life: of the table.
        columns: include those that `use_columns` names.
    """

    def __init__(self, life: Lifecycle, columns: RowColumns) -> None:
        self._life = life
        self._columns = columns
        names = use_columns(life)
        self._by_clock, self._by_count = LAST_USED in names, NUM_USES in names
        self.limits = bool(names)  # whether rows are ever to go
        self._oldest = 0  # invariant: no row was last used before this clock
        self._num_uses = 0  # since counts were halved

    def note_new(self, slots: Tensor, clock: int) -> None:
        """Record new rows, created at a clock and not used before."""
        clock = min(clock, _LAST_CLOCK)
        if self._by_clock:
            self._keys(LAST_USED)[slots] = clock
            self._oldest = min(self._oldest, clock)
        if self._by_count:
            self._keys(NUM_USES)[slots] = 0

    def note_use(self, slots: Tensor, clock: int) -> None:
        """Record one use of each row at a clock; slots may repeat."""
        if self._by_clock:
            column = self._keys(LAST_USED)
            column[slots] = column[slots].clamp_(min=min(clock, _LAST_CLOCK))
        if self._by_count:
            column = self._keys(NUM_USES)
            column[slots] = column[slots].add_(1)
            self._num_uses += len(slots)

    def note_removed(self, slots: Tensor) -> None:
        """Record that rows were removed."""
        for name in use_columns(self._life):
            self._keys(name)[slots] = _NEVER

    def forget_bounds(self) -> None:
        """Record that rows were loaded with uses at any clock."""
        self._oldest = 0

    def expired(self, clock: int, num_rows: int, num_slots: int) -> Tensor:
        """Return the slots of rows that were last used more than `expire_after` clocks before this one.

        At least `floor` rows are left: the most recently used ones.
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
        """Return the slots of the least used rows in excess of `max_rows`."""
        num = num_rows - self._life.max_rows
        if not self._life.max_rows or num <= 0:
            return torch.empty(0, dtype=torch.int64)
        return self._least(NUM_USES if self._by_count else LAST_USED, num, _NEVER, num_slots)

    def fades(self, num_rows: int) -> bool:
        """Return whether `fade` is about to halve all counts."""
        return self._num_uses >= HALVE_AFTER * max(1, num_rows)

    def fade(self, num_rows: int, num_slots: int) -> None:
        """Halve all counts if they are due."""
        if not self.fades(num_rows):
            return
        for _, keys in self._spans(NUM_USES, num_slots):
            keys[keys != _NEVER] >>= 1
        self._num_uses = 0

    def _least(self, name: str, num: int, below: int, num_slots: int) -> Tensor:
        """Return the slots of at most `num` rows with the lowest keys below `below`."""
        cut, num_at_cut = self._cut(name, num, below, num_slots)
        chosen: list[Tensor] = []
        for start, keys in self._spans(name, num_slots):
            at_cut = (keys == cut).nonzero().view(-1)[:num_at_cut]
            num_at_cut -= len(at_cut)
            chosen.append(start + torch.cat(((keys < cut).nonzero().view(-1), at_cut)))
        return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)

    def _cut(self, name: str, num: int, below: int, num_slots: int) -> tuple[int, int]:
        """Return the key below which all rows are chosen, and the number of rows to choose at that key."""
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
        """Yield the start and the keys of each part of a column."""
        for start in range(0, num_slots, _SPAN):
            stop = min(start + _SPAN, num_slots)
            self._columns.visit_span(name, start, stop)
            yield start, self._keys(name)[start:stop]

    def _keys(self, name: str) -> Tensor:
        return self._columns[name].view(-1)

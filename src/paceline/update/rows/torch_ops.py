"""The operations on rows in torch alone, for machines without a compiler: as `native.c`, but slower.

All keys are probed at once: each round looks at one place of every key that is not found yet.
"""

from __future__ import annotations

from typing import ClassVar, Final, final

import torch
from torch import Tensor

from paceline.errors import ProtocolBug
from paceline.update.rows.index import NO_SEED, Seed

_UPPER: Final = -1 << 32
_LOWER: Final = (1 << 32) - 1
_HALF: Final = (torch.float16, torch.bfloat16)


@final
class TorchOps:
    """`RowOps` without the library: the same slots, orders and sums, bit for bit."""

    name: ClassVar[str] = "torch"

    def find(self, entries: Tensor, ids: Tensor, keys: Tensor, seed: Seed = NO_SEED) -> Tensor:
        """See `RowOps.find`."""
        mask = entries.numel() - 1
        slots = torch.full_like(keys, -1)
        todo, hashes = torch.arange(keys.numel()), seeded_hash(keys, seed)
        places = hashes & mask
        while todo.numel():
            found = entries[places]
            same = ((found != 0) & ((found ^ hashes) & _UPPER == 0)).nonzero().view(-1)
            same = same[ids[_slot_of(found[same])] == keys[todo[same]]]
            slots[todo[same]] = _slot_of(found[same])
            found[same] = 0
            further = found != 0
            todo, hashes, places = todo[further], hashes[further], (places[further] + 1) & mask
        return slots

    def insert(
        self, entries: Tensor, ids: Tensor, keys: Tensor, next_slot: int, free: Tensor, seed: Seed = NO_SEED
    ) -> tuple[Tensor, Tensor]:
        """See `RowOps.insert`."""
        slots = self.find(entries, ids, keys, seed)
        missing = (slots < 0).nonzero().view(-1)
        distinct, inverse, first = _distinct(keys[missing])
        reused = free.flip(0)[: distinct.numel()]
        fresh = torch.arange(next_slot, next_slot + distinct.numel() - reused.numel())
        added = torch.cat((reused, fresh))
        ids[added] = distinct
        _place(entries, added, seeded_hash(distinct, seed))
        slots[missing] = added[inverse]
        return slots, missing[first]

    def erase(self, entries: Tensor, ids: Tensor, slots: Tensor, seed: Seed = NO_SEED) -> None:
        """See `RowOps.erase`."""
        mask = entries.numel() - 1
        places = _places_of(entries, slots, seeded_hash(ids[slots], seed))
        entries[places] = 0
        # Entries after a gap, up to the next empty place, may have passed it: they are placed again.
        # Places differ in the first round, and so in every round; a search that reaches the gap of another ends there.
        moved = [entries.new_empty(0)]
        while places.numel():
            places = (places + 1) & mask
            places = places[entries[places] != 0]
            moved.append(entries[places])
            entries[places] = 0
        behind = _slot_of(torch.cat(moved))
        _place(entries, behind, seeded_hash(ids[behind], seed))

    def rebuild(self, entries: Tensor, ids: Tensor, live: Tensor | None, num_slots: int, seed: Seed = NO_SEED) -> None:
        """See `RowOps.rebuild`."""
        slots = torch.arange(num_slots) if live is None else live[:num_slots].nonzero().view(-1)
        _place(entries, slots, seeded_hash(ids[slots], seed))

    def gather(self, column: Tensor, slots: Tensor, out: Tensor) -> None:
        """See `RowOps.gather`."""
        present = slots != -1
        if present.all():
            out.copy_(column.index_select(0, slots))
        else:
            out[present] = column.index_select(0, slots[present])

    def scatter(self, column: Tensor, slots: Tensor, rows: Tensor) -> None:
        """See `RowOps.scatter`."""
        column.index_copy_(0, slots, rows)

    def unique(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowOps.unique`."""
        distinct, inverse, _ = _distinct(keys)
        return distinct, inverse

    def sum_rows(self, rows: Tensor, inverse: Tensor, num: int) -> Tensor:
        """See `RowOps.sum_rows`."""
        exact = rows.float() if rows.dtype in _HALF else rows
        return exact.new_zeros((num, rows.shape[1])).index_add_(0, inverse, exact).to(rows.dtype)

    def split(self, keys: Tensor, num_servers: int) -> tuple[Tensor, list[int]]:
        """See `RowOps.split`."""
        owners = ((hash_of(keys) >> 32 & _LOWER) * num_servers) >> 32
        counts: list[int] = torch.bincount(owners, minlength=num_servers).tolist()
        return owners.argsort(stable=True), counts


def hash_of(ids: Tensor) -> Tensor:
    """Return the splitmix64 finalizer of int64 ids, as int64: a bijection of 64 bits that leaves no pattern.

    >>> hash_of(torch.tensor([0, 1, -1])).tolist()
    [0, 6238072747940578789, -5417735806833148549]
    """
    mixed = (ids ^ _shifted(ids, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    mixed = (mixed ^ _shifted(mixed, 27)) * (0x94D049BB133111EB - (1 << 64))
    return mixed ^ _shifted(mixed, 31)


def seeded_hash(ids: Tensor, seed: Seed) -> Tensor:
    """Return the hash of int64 ids by which an index finds them, as int64; without the seed it cannot be predicted."""
    first, second = (number - (1 << 64) if number >> 63 else number for number in seed)
    return hash_of(hash_of(ids ^ first) ^ second)


def _shifted(bits: Tensor, count: int) -> Tensor:
    # Torch shifts int64 with its sign; the bits shifted in from the left must be zeros.
    return bits >> count & (1 << 64 - count) - 1


def _slot_of(entries: Tensor) -> Tensor:
    return (entries & _LOWER) - 1


def _distinct(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct keys in order of appearance, the index of each key among them, and their first positions."""
    values, inverse = keys.unique(return_inverse=True)
    first = torch.full_like(values, keys.numel())
    first.scatter_reduce_(0, inverse, torch.arange(keys.numel()), "amin")
    first, order = first.sort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel())
    return values[order], rank[inverse], first


def _place(entries: Tensor, slots: Tensor, hashes: Tensor) -> None:
    """Write an entry for each of some distinct slots without one."""
    mask = entries.numel() - 1
    written = hashes & _UPPER | (slots + 1)
    places = hashes & mask
    while written.numel():
        empty = entries[places] == 0
        entries[places[empty]] = written[empty]
        # Of several entries for the same empty place, one is there now; the others go on as if it had been full.
        further = entries[places] != written
        written, places = written[further], (places[further] + 1) & mask


def _places_of(entries: Tensor, slots: Tensor, hashes: Tensor) -> Tensor:
    """Return the places of the entries of distinct slots; raises ProtocolBug if one has none."""
    mask = entries.numel() - 1
    places = hashes & mask
    todo = torch.arange(slots.numel())
    if slots.unique().numel() != slots.numel():
        raise ProtocolBug("rows are taken out of an index more than once")
    while todo.numel():
        found = entries[places[todo]]
        if (found == 0).any():
            raise ProtocolBug("rows are taken out of an index which are not in it")
        todo = todo[_slot_of(found) != slots[todo]]
        places[todo] = (places[todo] + 1) & mask
    return places

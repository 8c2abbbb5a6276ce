"""What the tests of the index share: both kinds of operations, and ids that collide."""

from __future__ import annotations

import pytest
import torch

from paceline.update.rows.index import RowIndex
from paceline.update.rows.native_ops import load_library
from paceline.update.rows.torch_ops import seeded_hash

_LIBRARY = load_library()
_IS_MISSING = isinstance(_LIBRARY, str)
AVAILABLE = ("torch",) if _IS_MISSING else ("native", "torch")
BOTH = (pytest.param("native", marks=pytest.mark.skipif(_IS_MISSING, reason=str(_LIBRARY))), "torch")

EXTREMES = (-(1 << 63), (1 << 63) - 1, -1, 0, 1)
_BITS = (1 << 64) - 1


def hashed(key: int) -> int:
    """The hash of an id, an unsigned number of 64 bits: what is written down, in plain integers."""
    z = key & _BITS
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _BITS
    return z ^ z >> 31


def with_hash(wanted: int) -> int:
    """The one id that has this hash."""
    z = _unshifted(wanted, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & _BITS
    z = _unshifted(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & _BITS
    z = _unshifted(z, 30)
    return z - (1 << 64) if z >> 63 else z


def placed_at(wanted: int) -> int:
    """The one id that an index without a seed places by this hash."""
    return with_hash(with_hash(wanted) & _BITS)


def longest_way(index: RowIndex) -> int:
    """The most entries that a lookup of an id of an index has to pass."""
    entries, ids = index._entries, index.ids_of(index.live_slots())
    mask, slots = entries.numel() - 1, index.find(ids)
    taken = entries.nonzero().view(-1)
    places = torch.empty(index.num_slots, dtype=torch.int64)
    places[(entries[taken] & (1 << 32) - 1) - 1] = taken
    return int(((places[slots] - (seeded_hash(ids, index._seed) & mask)) & mask).max())


def _unshifted(z: int, shift: int) -> int:
    result = z
    for _ in range(64 // shift + 1):
        result = z ^ result >> shift
    return result


def keys(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same to the last bit, -0.0 and 0.0 being different."""
    bits = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)

"""First values of rows, before their first update: a function of seed, id and column, equal in every process.

Random numbers come from integers alone, by exact operations, so no library's logarithm or order of work shows in them.

Example:
    >>> import paceline
    >>> paceline.first.normal(0.01, seed=1).kind
    'normal'
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paceline.core.calls import checked
from paceline.update.rows.spec import First

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1 << 15  # numbers at once, so that all steps of the hash find them in the cache
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
# A number of 64 fair bits has 32 of them set, with variance 64 / 4; two uniform numbers in [0, 1) add 2 / 12.
_DEVIATION = math.sqrt(64 / 4 + 2 / 12)


@checked
def constant(value: float) -> First:
    """Return first values that are `value` everywhere.

    Example:
        >>> constant(0.5)
        First(kind='constant', scale=0.5, seed=0)
    """
    return First("constant", value)


@checked
def uniform(bound: float, *, seed: int = 0) -> First:
    """Return first values that are drawn evenly from [-bound, bound).

    Example:
        >>> uniform(0.05, seed=3)
        First(kind='uniform', scale=0.05, seed=3)
    """
    return First("uniform", bound, seed)


@checked
def normal(deviation: float, *, seed: int = 0) -> First:
    """Return first values that are drawn from a normal distribution around 0.

    Example:
        >>> normal(0.01)
        First(kind='normal', scale=0.01, seed=0)
    """
    return First("normal", deviation, seed)


def first_rows(first: First, ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the first values of some rows: a function of seed, id and column alone.

    Args:
        first: which values.
        ids: [n] int64, any values in any order.
        width: numbers a row; a shorter row is the beginning of a longer one.
        dtype: to which the numbers, which are drawn in float64, are rounded.

    Returns:
        [n, width], new memory.

    Example:
        >>> from paceline.update.rows.spec import First
        >>> first_rows(First("uniform", 0.5, seed=1), torch.tensor([7, -7]), 2, torch.float32).shape
        torch.Size([2, 2])
    """
    rows = torch.full((len(ids), width), first.scale, dtype=dtype)
    if first.kind == "constant":
        return rows
    draw = _uniform if first.kind == "uniform" else _normal
    columns = torch.arange(1, width + 1)
    seed = _mixed(torch.tensor([_signed(first.seed)]) + _ODD)
    size = max(1, _BLOCK // width)
    for start in range(0, len(ids), size):
        keys = _mixed(ids[start : start + size] ^ seed)
        hashes = _mixed(keys[:, None] + columns * _ODD)
        rows[start : start + size] = draw(hashes).mul_(first.scale)
    return rows


def _signed(number: int) -> int:
    """Return the number modulo 2**64, as int64 writes it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _mixed(numbers: Tensor) -> Tensor:
    """Return a hash of each int64: the finalizer of splitmix64 (Steele, Lea & Flood 2014), whose products wrap."""
    numbers = (numbers ^ _shifted(numbers, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    numbers = numbers.bitwise_xor_(_shifted(numbers, 27)).mul_(_signed(0x94D049BB133111EB))
    return numbers.bitwise_xor_(_shifted(numbers, 31))


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Return int64 shifted to the right as if they had no sign."""
    return (numbers >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _uniform(hashes: Tensor) -> Tensor:
    """Return numbers in [-1, 1), from 53 bits of each hash."""
    return _shifted(hashes, 11).double().mul_(2.0**-52).sub_(1)


def _normal(hashes: Tensor) -> Tensor:
    """Return numbers with mean 0 and deviation 1, normal but for 0.03 of excess kurtosis and nothing beyond 8.

    They are how many bits of a hash are set, smoothed by two uniform numbers from another.
    """
    more = _mixed(hashes + _ODD)
    smooth = _shifted(more, 32) + (more & 0xFFFFFFFF) + 1 - (1 << 32)  # symmetric around 0
    steps = (_num_set(hashes) - 32) * (1 << 32) + smooth
    return steps.double().mul_(2.0**-32 / _DEVIATION)


def _num_set(numbers: Tensor) -> Tensor:
    """Return how many bits of each int64 are set: in pairs, in fours, in bytes, then all bytes by one product."""
    pairs = numbers - (_shifted(numbers, 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + (_shifted(pairs, 2) & 0x3333333333333333)
    octets = (fours + _shifted(fours, 4)).bitwise_and_(0x0F0F0F0F0F0F0F0F)
    return _shifted(octets * 0x0101010101010101, 56)

"""Partition of the data among workers: a function of the number of workers, the seed and stable hashes of keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, cast, get_args

from paceline.data.order import MAX_SEED, shuffle
from paceline.errors import UsageError

Key = int | str | bytes | tuple["Key", ...]

_NUM_BYTES = 8


def fixed_hash(key: Key) -> int:
    """Return 64 bits that follow from a key alone; keys of different types have different ones.

    Raises:
        UsageError: this is no key.

    >>> hex(fixed_hash("a name"))
    '0xda5fcfabe6d6add2'
    """
    return int.from_bytes(blake2b(_encoded(key), digest_size=_NUM_BYTES).digest(), "big")


def _encoded(key: object) -> bytes:
    """Write a key so that no two are written alike: the type, the length, and what it holds."""
    match key:
        case int():
            text = b"%d" % key
            return b"i%d:%b" % (len(text), text)
        case str():
            text = key.encode("utf-8", "surrogatepass")
            return b"s%d:%b" % (len(text), text)
        case bytes():
            return b"b%d:%b" % (len(key), key)
        case tuple():
            return b"t%d:%b" % (len(key), b"".join(map(_encoded, key)))
        case _:
            raise UsageError(
                f"the key of a sample is a {type(key).__name__}, expected an int, a str, bytes or a tuple of these."
            )


Partition = Literal["strided", "contiguous", "hashed"]


def tell(text: str) -> None:
    """Say something to the user."""
    sys.stderr.write(f"paceline: {text}\n")


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which part of the data is this worker's.

    Args:
        rank: number of this worker.
        size: number of workers.
        seed: of the shuffle; the same on all workers, so that the global order does not depend on their number.
        on_samples: called with the number of samples of each batch that is handed out for training.
        on_missing: called when an epoch of training ends for which others have one more batch than this worker.
        tell: says something to the user.

    Raises:
        UsageError: a seed that is no whole number, or a very large one.
    """

    rank: int
    size: int
    seed: int
    on_samples: Callable[[int], None]
    on_missing: Callable[[], None]
    tell: Callable[[str], None] = tell

    def __post_init__(self) -> None:
        """Refuse seeds that generators have no use for."""
        if not isinstance(self.seed, int) or abs(self.seed) > MAX_SEED:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"seed is {self.seed!r}, expected a whole number from {-MAX_SEED} to {MAX_SEED}.")

    def note_size(self, num: int, of: str) -> None:
        """Say it, once for all workers, if there is not one for each of them."""
        if self.rank == 0 and num < self.size:
            self.tell(f"{self.size - num} of {self.size} workers get nothing: there are {num} {of}.")


@dataclass(frozen=True, slots=True)
class DataCut:
    """How data are cut into the parts of workers.

    Args:
        partition: which part is whose; by default by size for files, else strided.
        shuffled: by the seed, before they are cut.
        key: of a sample, for a hashed partition; by default its place.

    Raises:
        UsageError: no such partition, or a key that nothing is hashed by.
    """

    partition: Partition | None = None
    shuffled: bool = False
    key: Callable[[Any], Key] | None = None

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.partition is not None and self.partition not in get_args(Partition):
            raise UsageError(f"partition is {self.partition!r}, expected one of {', '.join(get_args(Partition))}.")
        if self.key is not None and self.partition != "hashed":
            raise UsageError('samples are dealt out by key in partition="hashed" alone: say that, or leave out key.')

    def order(self, num: int, seed: int) -> Sequence[int]:
        """Return the indices of so many things in the order in which they are cut."""
        return cast("list[int]", shuffle(num, seed, 0).tolist()) if self.shuffled else range(num)

    def own(self, num: int, sharding: Sharding, key_at: Callable[[int], Key]) -> slice | list[int]:
        """Return which of so many things are this worker's, in order.

        Args:
            num: of all workers together.
            sharding: whose part.
            key_at: returns the key of the one at an index.
        """
        if self.partition == "hashed":
            return [index for index in self.order(num, sharding.seed) if is_hashed_to(key_at(index), sharding)]
        part = run(num, sharding) if self.partition == "contiguous" else slice(sharding.rank, None, sharding.size)
        return cast("list[int]", shuffle(num, sharding.seed, 0)[part].tolist()) if self.shuffled else part


def run(num: int, sharding: Sharding) -> slice:
    """Return this worker's part of so many things in a row; those of the first workers may be longer by one."""
    each, num_longer = divmod(num, sharding.size)
    start = each * sharding.rank + min(sharding.rank, num_longer)
    return slice(start, start + each + (sharding.rank < num_longer))


def is_hashed_to(key: Key, sharding: Sharding) -> bool:
    """Return whether the sample with this key is this worker's."""
    return fixed_hash(key) % sharding.size == sharding.rank

"""Partition of the data among workers: a function of the number of workers, the seed and stable hashes of keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Literal, TypeVar, cast, get_args

import msgspec
from msgspec.structs import replace

from paceline.core.calls import shown
from paceline.data.order import MAX_SEED, shuffle
from paceline.errors import UsageError
from paceline.notices import tell

Key = int | str | bytes | tuple["Key", ...]

_NUM_BYTES = 8
_Batch = TypeVar("_Batch")


def fixed_hash(key: Key) -> int:
    """Return a 64-bit hash of a key; keys of different types have different hashes.

    Raises:
        UsageError: the type of the key is not supported.

    >>> hex(fixed_hash("a name"))
    '0xda5fcfabe6d6add2'
    """
    return int.from_bytes(blake2b(_encoded(key), digest_size=_NUM_BYTES).digest(), "big")


def _encoded(key: object) -> bytes:
    """Encode a key uniquely: its type, its length and its content."""
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


def _report_nothing(*_: object) -> None:
    """Do nothing, in a process that has no session."""


class Sharding(msgspec.Struct, frozen=True):
    """The share of one worker in the data, and what reading it calls.

    Sent to another process, such as one of a `DataLoader` that is no copy of this one, it is the share alone.

    Args:
        rank: number of this worker.
        size: number of workers.
        seed: of the shuffle; the same on all workers, so that the global order does not depend on their number.
        on_samples: called with the number of samples of each batch that the training loop gets.
        on_missing: called at the end of an epoch of training in which other workers have one more batch, and this
            worker takes part in it or in the step behind it.
        tell: writes a line for the user.
        is_elastic: whether workers come and go, so that a part may have no worker.
        on_loaded: called with the seconds that the training loop has waited for each batch.
        clock: returns the current clock of this worker, which its steps finish; None where there is no clock.
        joins_batches: returns whether all workers take part in each batch of any, as under fsdp, be it without a step.

    Raises:
        UsageError: the seed is not a whole number, or too large.
    """

    rank: int
    size: int
    seed: int
    on_samples: Callable[[int], None]
    on_missing: Callable[[], None]
    tell: Callable[[str], None] = tell
    is_elastic: bool = False
    on_loaded: Callable[[float], None] = _report_nothing
    clock: Callable[[], int] | None = None
    joins_batches: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        """Validate the seed."""
        if not isinstance(self.seed, int) or abs(self.seed) > MAX_SEED:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"seed is {self.seed!r}, expected a whole number from {-MAX_SEED} to {MAX_SEED}.")

    def __reduce__(self) -> tuple[object, ...]:
        """Return what another process makes it from."""
        return Sharding, (self.rank, self.size, self.seed, _report_nothing, _report_nothing, tell, self.is_elastic)

    def evaluation(self) -> Sharding:
        """Return the share of this worker in an evaluation: everything, where a part may have no worker."""
        return replace(self, rank=0, size=1) if self.is_elastic else self

    def timed(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield batches, and tell how long each took to come."""
        coming = iter(batches)
        while True:
            began_s = time.monotonic()
            try:
                batch = next(coming)
            except StopIteration:
                return
            self.on_loaded(time.monotonic() - began_s)
            yield batch

    def note_size(self, num: int, of: str) -> None:
        """Warn, on worker 0 alone, if there are fewer things than workers."""
        if self.rank == 0 and num < self.size:
            self.tell(f"{self.size - num} of {self.size} workers get nothing: there are {num} {of}.")


class DataCut(msgspec.Struct, frozen=True):
    """How data are cut into the shards of workers.

    Args:
        partition: the kind of partition; by default by size for files, else strided.
        shuffled: whether data are shuffled by the seed before they are cut.
        key: returns the key of a sample, for a hashed partition; by default its index.

    Raises:
        UsageError: the partition is not valid, or a key is given for one that is not hashed.
    """

    partition: Partition | None = None
    shuffled: bool = False
    key: Callable[[Any], Key] | None = None

    def __post_init__(self) -> None:
        """Validate the options."""
        if self.partition is not None and self.partition not in get_args(Partition):
            raise UsageError(f"partition is {self.partition!r}, expected one of {', '.join(get_args(Partition))}.")
        if self.key is not None and not callable(self.key):  # pyright: ignore[reportUnnecessaryComparison]
            raise UsageError(f"key is {shown(self.key)}, expected a function that returns what is hashed of a sample.")
        if self.key is not None and self.partition != "hashed":
            raise UsageError('samples are dealt out by key in partition="hashed" alone: say that, or leave out key.')

    def order(self, num: int, seed: int) -> Sequence[int]:
        """Return the indices of `num` items in the order in which they are cut."""
        return cast("list[int]", shuffle(num, seed, 0).tolist()) if self.shuffled else range(num)

    def own(self, num: int, sharding: Sharding, key_at: Callable[[int], Key]) -> slice | list[int]:
        """Return the indices of this worker's items, in order.

        Args:
            num: number of items of all workers together.
            sharding: the share of this worker.
            key_at: returns the key of the item at an index.
        """
        if self.partition == "hashed":
            return [index for index in self.order(num, sharding.seed) if is_hashed_to(key_at(index), sharding)]
        part = run(num, sharding) if self.partition == "contiguous" else slice(sharding.rank, None, sharding.size)
        return cast("list[int]", shuffle(num, sharding.seed, 0)[part].tolist()) if self.shuffled else part


def run(num: int, sharding: Sharding) -> slice:
    """Return this worker's contiguous run of `num` items; the runs of the first workers may be longer by one."""
    each, num_longer = divmod(num, sharding.size)
    start = each * sharding.rank + min(sharding.rank, num_longer)
    return slice(start, start + each + (sharding.rank < num_longer))


def is_hashed_to(key: Key, sharding: Sharding) -> bool:
    """Return whether the sample with this key is this worker's."""
    return fixed_hash(key) % sharding.size == sharding.rank

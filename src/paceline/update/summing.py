"""Summing of the gradients of one update, in the order given, then scaling: bit-identical on every run.

On the threads of a shard. Python threads suffice: torch releases the interpreter lock while it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import isfinite
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from paceline.update.rules import Hyper
from paceline.update.table import NonFinite, Scale, SegmentPiece

if TYPE_CHECKING:
    from torch import Tensor
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar, final

T = TypeVar("T")


@final
class ThreadPool:
    """Runs pieces of work on several threads, the caller's among them; used by one thread at a time.

    Args:
        num_threads: how many threads work; with 1, the caller works alone. Each of several makes torch run its own
            operations on one thread meanwhile, a setting that also holds for every thread that the process starts then.

    Example:
        >>> pool = ThreadPool(2)
        >>> pool.total([1, 2, 3], lambda number, thread: number * 10)
        60
        >>> pool.close()
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._others: ThreadPoolExecutor | None = None
        if num_threads > 1:
            self._others = ThreadPoolExecutor(num_threads - 1, "paceline-update", torch.set_num_threads, (1,))

    def total(self, items: Sequence[T], work: Callable[[T, int], int]) -> int:
        """Return the sum of `work(item, index of the thread)` over all items; a free thread takes the next one.

        Blocks until all items are done; raises what `work` raises.
        """
        if self._others is None:
            return sum(work(item, 0) for item in items)
        waiting = iter(items)

        def take(thread: int) -> int:
            return sum(work(item, thread) for item in waiting)

        num_others = min(self.num_threads, len(items)) - 1  # the caller begins at once, while these wake up
        others = [self._others.submit(take, thread) for thread in range(1, num_others + 1)]
        num_before = torch.get_num_threads()
        torch.set_num_threads(1)  # else torch would split every small operation
        try:
            own = take(0)
        finally:
            torch.set_num_threads(num_before)
            wait(others)
        return own + sum(each.result() for each in others)

    def close(self) -> None:
        """End the threads; there is no work afterwards."""
        if self._others is not None:
            self._others.shutdown()


def stretches(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Return the (start, stop) of neighbouring stretches of `size`, the last one shorter."""
    return ((start, min(start + size, length)) for start in range(0, length, size))


class Contribution(msgspec.Struct, frozen=True):
    """The part of one push that a shard gets.

    Args:
        gradient: (elements of the range,), dtype of the table. It is the worker's memory, so only read it. The elements
            of absent segments are ignored.
        count: samples behind the gradient, 0 or more.
        absent: indices of the segments that have no gradient (frozen, or unused in this step).
        hyper: hyperparameters of each group as of this push; empty to leave them as they are.
        worker: the rank that pushed it.
        expected: samples behind all contributions to the update if none is missing; 0 where that is not known. See
            `num_missing`.
        unchecked: whether the update is to look for NaN and infinity in it, and to leave it out if there are any.
    """

    gradient: Tensor
    count: float = 1.0
    absent: frozenset[int] = frozenset()
    hyper: tuple[Hyper, ...] = ()
    worker: int = 0
    expected: float = 0.0
    unchecked: bool = False


def num_missing(counts: Sequence[float], expected: Sequence[float], scale: Scale) -> float:
    """Return how many samples an update lacks of those expected, below 0 for too many.

    A mean over samples divides by the expected number. So a sample has the same weight in every clock, also in one that
    lacks those of a dead worker, and in the one that makes up for them.

    >>> num_missing([6.0, 6.0], [18.0, 18.0], "samples"), num_missing([6.0, 12.0, 6.0], [18.0] * 3, "samples")
    (6.0, -6.0)
    >>> num_missing([6.0, 6.0], [0.0, 0.0], "samples"), num_missing([6.0, 6.0], [18.0, 18.0], "mean")
    (0.0, 0.0)
    """
    total = max(expected)
    return total - sum(counts) if total and scale == "samples" else 0.0


# Elements that are worked on together: 2 MiB of float32, which stay in the cache between one operation and the next,
# and keep torch busy for so long that the interpreter between them does not show.
CHUNK: Final = 512 * 1024


def divisor_of(all_samples: Sequence[float], scale: Scale) -> float:
    """Return what the sum of an update's contributions is divided by, given the samples behind each of them."""
    if _is_weighted(all_samples, scale):
        return float(sum(all_samples))
    return 1.0 if scale == "sum" else float(len(all_samples))


def weights_of(all_samples: Sequence[float], scale: Scale) -> tuple[float, ...]:
    """Return what each contribution of an update counts, given the samples behind it; empty if all count once."""
    return tuple(all_samples) if _is_weighted(all_samples, scale) else ()


def _is_weighted(all_samples: Sequence[float], scale: Scale) -> bool:
    return scale == "samples" and len(set(all_samples)) > 1


def combine(
    out: Tensor,
    gradients: Sequence[Tensor],
    counts: Sequence[float],
    all_samples: Sequence[float],
    scale: Scale,
    *,
    divide: bool = True,
) -> None:
    """Write the combined gradient to `out`; the gradients are only read.

    Args:
        out: (n,), overwritten; at most a chunk of elements for speed.
        gradients: (n,) each, at least one; added as ((g1 + g2) + g3) + ...
        counts: samples behind each of the gradients.
        all_samples: samples of every contribution to the update; those without these elements count as zeros.
        scale: see `TableSpec`.
        divide: whether to divide by `divisor_of` these, or leave that to the caller.
    """
    if _is_weighted(all_samples, scale):
        gradients = [gradient * count for gradient, count in zip(gradients, counts, strict=True)]
    add_up(out, gradients)
    divisor = divisor_of(all_samples, scale)
    if divide and divisor != 1.0:
        out.div_(divisor)


def add_up(out: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Write ((g1 + g2) + g3) + ... to `out`, and return it."""
    if len(gradients) == 1:
        out.copy_(gradients[0])
    else:
        torch.add(gradients[0], gradients[1], out=out)
    for gradient in gradients[2:]:
        out.add_(gradient)
    return out


class Combining(msgspec.Struct, frozen=True):
    """How the contributions of an update become one gradient; see `TableSpec` for both."""

    scale: Scale
    nonfinite: NonFinite


def combine_stretch(
    out: Tensor,
    span: tuple[int, int],
    having: Sequence[int],
    contributions: Sequence[Contribution],
    combining: Combining,
    *,
    divide: bool,
) -> int:
    """Write the combined gradient of elements `span` of the range to `out`; return how many elements were zeroed.

    Args:
        out: (stop - start,), overwritten.
        span: (start, stop).
        having: indices of the contributions that have a gradient there, at least one.
        contributions: all of the update.
        combining: how, but for the division.
        divide: see `combine`.
    """
    parts = [contributions[index].gradient[slice(*span)] for index in having]
    num_zeroed = 0
    if combining.nonfinite == "zero":
        found = [num_nonfinite(part) for part in parts]
        num_zeroed = sum(found)
        parts = [zeroed(part) if bad else part for part, bad in zip(parts, found, strict=True)]
    counts = [contributions[index].count for index in having]
    combine(out, parts, counts, [contribution.count for contribution in contributions], combining.scale, divide=divide)
    return num_zeroed


def zeroed(tensor: Tensor) -> Tensor:
    """Return a copy with zeros in the place of NaN and infinity."""
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)


def num_nonfinite(tensor: Tensor, threads: ThreadPool | None = None) -> int:
    """Return how many elements, of (n,) with `threads`, are NaN or infinite; reads memory once if there are none."""
    if threads is None or threads.num_threads == 1:
        return _num_nonfinite(tensor)
    size = max(CHUNK, tensor.numel() // (4 * threads.num_threads))  # not so long that one thread ends far behind
    spans = list(stretches(tensor.numel(), size))
    return threads.total(spans, lambda span, _: _num_nonfinite(tensor[slice(*span)]))


def _num_nonfinite(tensor: Tensor) -> int:
    # NaN and infinity survive every sum, so a finite sum proves all elements finite; the converse may overflow.
    if isfinite(tensor.sum().item()):
        return 0
    return tensor.numel() - int(tensor.isfinite().sum())


def runs(pieces: Sequence[SegmentPiece], having: Sequence[tuple[int, ...]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (start, length, contributions) for each run of pieces with gradients from the same contributions."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for there, group in groupby(zip(pieces, having, strict=True), key=lambda pair: pair[1]):
        members = [piece for piece, _ in group]
        if there:
            found.append((members[0].offset, sum(piece.numel for piece in members), there))
    return found

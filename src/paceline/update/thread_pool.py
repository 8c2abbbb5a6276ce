"""The threads of a shard. Python threads suffice: torch releases the interpreter lock while it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, final

import torch

T = TypeVar("T")


@final
class ThreadPool:
    """Runs pieces of work on several threads; used by one thread at a time.

    Args:
        num_threads: how many threads work; with 1, the caller works alone. Each of several makes torch run its own
            operations on one thread, a setting that also holds for every thread that the process starts later.

    Example:
        >>> pool = ThreadPool(2)
        >>> pool.total([1, 2, 3], lambda number, thread: number * 10)
        60
        >>> pool.close()
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._threads: ThreadPoolExecutor | None = None
        if num_threads > 1:
            self._threads = ThreadPoolExecutor(num_threads, "paceline-update", torch.set_num_threads, (1,))

    def total(self, items: Sequence[T], work: Callable[[T, int], int]) -> int:
        """Return the sum of `work(item, index of the thread)` over all items; a free thread takes the next one.

        Blocks until all items are done; raises what `work` raises.
        """
        alone = len(items) < 2 and torch.get_num_threads() == 1  # else torch would split every small operation
        if self._threads is None or alone:
            return sum(work(item, 0) for item in items)
        waiting = iter(items)

        def take(thread: int) -> int:
            return sum(work(item, thread) for item in waiting)

        return sum(self._threads.map(take, range(self.num_threads)))

    def close(self) -> None:
        """End the threads; there is no work afterwards."""
        if self._threads is not None:
            self._threads.shutdown()


def stretches(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Return the (start, stop) of neighbouring stretches of `size`, the last one shorter."""
    return ((start, min(start + size, length)) for start in range(0, length, size))

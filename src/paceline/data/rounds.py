"""Rounds of an epoch: the batches that all workers process in one clock, each split into slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.data.order import Batches


@dataclass(frozen=True, slots=True)
class EpochRounds:
    """The rounds of an epoch, or of the rest of one, of which nothing is made before it is asked for.

    Args:
        batches: of the whole epoch.
        num_workers: whose shares a round has, a batch each; in the last one some may be empty.
        slices: of a share.
        start: batches before the first round, which were handed out earlier.
    """

    batches: Batches
    num_workers: int
    slices: int
    start: int = 0

    def __len__(self) -> int:
        return -(-(len(self.batches) - self.start) // self.num_workers)

    def sizes(self, number: int) -> tuple[int, ...]:
        """Return how many slices the share of each worker has in a round; nothing behind the last one."""
        first = self.num_before(number)
        own = [num_slices(self.batches[at : at + 1], self.slices) for at in range(first, first + self.num_workers)]
        return tuple(own) if any(own) else ()

    def num_samples(self, number: int) -> int:
        """Return how many samples a round has; behind the last one as many as that, which is made up for there."""
        first = self.num_before(min(number, len(self) - 1))
        return sum(self.batches.size(at) for at in range(first, min(first + self.num_workers, len(self.batches))))

    def slice(self, number: int, home: int, index: int) -> list[int]:
        """Return the indices of the samples of one slice of a worker's share of a round."""
        return part(self.batches[self.num_before(number) + home], self.slices, index)

    def slices_of(self, home: int, number: int, index: int = 0) -> Iterator[list[int]]:
        """Yield the slices of one worker's shares, from one of a round on to the end of the epoch."""
        for batch in self.batches[self.start + number * self.num_workers + home :: self.num_workers]:
            yield from (part(batch, self.slices, at) for at in range(index, min(self.slices, len(batch))))
            index = 0

    def starting(self, start: int) -> EpochRounds:
        """Return the rounds of the same epoch after so many batches."""
        return replace(self, start=start)

    def num_before(self, number: int) -> int:
        """Count the batches of the epoch that come before a round."""
        return min(self.start + number * self.num_workers, len(self.batches))


def part(batch: list[int], slices: int, index: int) -> list[int]:
    """Return one of the parts of a batch, as even as can be; there are fewer than asked for where one would be empty.

    >>> [part([5, 6, 7, 8, 9], slices=3, index=index) for index in range(3)]
    [[5], [6, 7], [8, 9]]
    """
    num, parts = len(batch), min(slices, len(batch))
    return batch[num * index // parts : num * (index + 1) // parts]


def num_slices(batches: Batches, slices: int) -> int:
    """Count the slices of some batches of an epoch, in ascending order: the last one may be smaller than the others.

    >>> from paceline.data.order import EpochOrder
    >>> num_slices(EpochOrder(num_samples=8, batch_size=6, drop_last=False, shuffled=False).unshuffled(), slices=3)
    5
    """
    return (len(batches) - 1) * slices + min(slices, batches.size(-1)) if batches else 0

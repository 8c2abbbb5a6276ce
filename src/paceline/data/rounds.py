"""The batches of an epoch as rounds: what all workers have for one clock, each share of it in slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

from paceline.data.order import Batches


@dataclass(frozen=True, slots=True)
class Share:
    """The batch of one worker in a round: (samples of the batch) indices, cut in parts as even as can be."""

    indices: list[int]
    slices: int

    def __len__(self) -> int:
        """Return the number of slices; none is empty."""
        return min(self.slices, len(self.indices))

    def slice(self, index: int) -> list[int]:
        """Return one of them.

        >>> [Share([5, 6, 7, 8, 9], slices=3).slice(index) for index in range(3)]
        [[5], [6, 7], [8, 9]]
        """
        num, parts = len(self.indices), len(self)
        return self.indices[num * index // parts : num * (index + 1) // parts]


def num_slices(batches: Batches, slices: int) -> int:
    """Count the slices of some batches in a row of an epoch, of which the last may be smaller than the others.

    >>> from paceline.data.order import Order
    >>> num_slices(Order(num_samples=8, batch_size=6, drop_last=False, shuffled=False).unshuffled(), slices=3)
    5
    """
    return (len(batches) - 1) * slices + len(Share(batches[-1], slices)) if batches else 0


@dataclass(frozen=True, slots=True)
class Rounds(Sequence[list[Share]]):
    """The rounds of an epoch, or of the rest of one, each made when it is asked for.

    Args:
        batches: of the whole epoch.
        num_workers: whose shares a round has; in the last one some may be empty.
        slices: of a share.
        start: batches before the first round, which were handed out earlier.
    """

    batches: Batches
    num_workers: int
    slices: int
    start: int = 0

    def __len__(self) -> int:
        return -(-(len(self.batches) - self.start) // self.num_workers)

    @overload
    def __getitem__(self, index: int) -> list[Share]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[Share]]: ...

    def __getitem__(self, index: int | slice) -> list[Share] | list[list[Share]]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        first = self.num_before(range(len(self))[index])
        own = [Share(batch, self.slices) for batch in self.batches[first : first + self.num_workers]]
        return own + [Share([], self.slices)] * (self.num_workers - len(own))

    def slices_of(self, home: int, number: int, index: int = 0) -> Iterator[list[int]]:
        """Yield the slices of one worker's shares, from one of a round on to the end of the epoch."""
        for batch in self.batches[self.start + number * self.num_workers + home :: self.num_workers]:
            share = Share(batch, self.slices)
            yield from (share.slice(at) for at in range(index, len(share)))
            index = 0

    def starting(self, start: int) -> Rounds:
        """Return the rounds of the same epoch after so many batches."""
        return replace(self, start=start)

    def num_before(self, number: int) -> int:
        """Count the batches of the epoch that come before a round."""
        return min(self.start + number * self.num_workers, len(self.batches))

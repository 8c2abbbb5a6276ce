"""Global sequence of the batches of an epoch, independent of the number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast, overload

import torch
from torch import Tensor

_EPOCHS_OF_A_SEED = 1_000_003  # before they would be those of the next seed
MAX_SEED = 1 << 42  # so that the seeds of its epochs have 63 bits


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """What the global sequences of batches of all epochs follow from, together with the seed.

    Clock c of W workers has the batches c*W to c*W + W - 1 of it, and worker r's own is c*W + r.

    Args:
        num_samples: of an epoch.
        batch_size: samples of a batch.
        drop_last: leave out a last batch that would be smaller.
        shuffled: by seed and epoch; else ascending.
    """

    num_samples: int
    batch_size: int
    drop_last: bool
    shuffled: bool

    @property
    def num_batches(self) -> int:
        """Count the batches of an epoch."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def batches(self, seed: int, epoch: int) -> Batches:
        """Return the batches of an epoch. Eight bytes a sample are kept where it is shuffled, else none."""
        shuffled = shuffle(self.num_samples, seed, epoch) if self.shuffled else None
        return replace(self.unshuffled(), shuffled=shuffled)

    def unshuffled(self) -> Batches:
        """Return the batches of an epoch in ascending order: as many, and as large, as those of every epoch."""
        return Batches(self.num_samples, self.batch_size, range(self.num_batches), None)


def shuffle(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the indices of all samples, (samples) int64, as this seed shuffles them in this epoch."""
    generator = torch.Generator().manual_seed(seed * _EPOCHS_OF_A_SEED + epoch)
    return torch.randperm(num_samples, generator=generator)


@dataclass(frozen=True, slots=True)
class Batches(Sequence[list[int]]):
    """Batches as lists of the indices of their samples, which are made when they are asked for.

    Args:
        num_samples: of the epoch.
        batch_size: samples of a batch; the last one of the epoch may have fewer.
        numbers: which batches of the epoch these are.
        shuffled: (samples) in their order; None where that is ascending.

    Example:
        >>> batches = EpochOrder(num_samples=5, batch_size=2, drop_last=False, shuffled=False).batches(seed=0, epoch=0)
        >>> batches[0], list(batches[1:])
        ([0, 1], [[2, 3], [4]])
    """

    num_samples: int
    batch_size: int
    numbers: range
    shuffled: Tensor | None

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> Batches: ...

    def __getitem__(self, index: int | slice) -> list[int] | Batches:
        if isinstance(index, slice):
            return Batches(self.num_samples, self.batch_size, self.numbers[index], self.shuffled)
        indices = self._places(index)
        if self.shuffled is None:
            return list(indices)
        return cast("list[int]", self.shuffled[indices.start : indices.stop].tolist())

    def size(self, index: int) -> int:
        """Return the number of samples of one of them."""
        return len(self._places(index))

    def _places(self, index: int) -> range:
        first = self.numbers[index] * self.batch_size
        return range(first, min(first + self.batch_size, self.num_samples))

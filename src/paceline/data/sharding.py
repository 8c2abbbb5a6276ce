"""A worker's part of the data, cut so that all workers together see every sample once an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, Subset

from paceline.data.order import Batches, Order
from paceline.errors import UsageError

_Source = TypeVar("_Source")


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which part of the data is this worker's.

    Args:
        rank: number of this worker.
        size: number of workers.
        seed: of the shuffle; the same on all workers, so that the global order does not depend on their number.
        on_samples: called with the number of samples of each batch that is handed out for training.
        on_missing: called when an epoch of training ends for which others have one more batch than this worker.
    """

    rank: int
    size: int
    seed: int
    on_samples: Callable[[int], None]
    on_missing: Callable[[], None]


def shard_source(source: _Source, sharding: Sharding) -> _Source:
    """Return this worker's part of `source`, used in its place.

    - A `DataLoader` is cut by batches: of the global sequence of batches worker r takes r, r + size, and so on. A
      loader that shuffles is shuffled by `seed` and epoch, the same way on every worker. When the number of batches
      does not divide evenly, the workers without a last batch finish that clock empty-handed, so that all stay in
      step; the mean weighted by samples is then still that of the samples there were. Batches that are read while
      gradients are off (`torch.no_grad()`, `optimizer.snapshot()`) are for evaluation: they count as no samples and
      finish no clock.
    - A sequence or a map-style dataset gives the samples r, r + size, ...
    - Any other iterable is read by everyone, and worker r keeps every size-th item: an iterable dataset, for a
      `DataLoader` to read, where it can be read again and again, else an iterator.

    Raises:
        UsageError: a loader with a custom sampler, or one over an iterable dataset: shard the dataset instead.
    """
    if isinstance(source, DataLoader):
        return cast("_Source", ShardedLoader(cast("DataLoader[Any]", source), sharding))
    if isinstance(source, torch.Tensor):
        return cast("_Source", source[sharding.rank :: sharding.size])
    if isinstance(source, Sequence) and not isinstance(source, str):
        return cast("_Source", source[sharding.rank :: sharding.size])
    if isinstance(source, Dataset) and isinstance(source, Sized):
        indices = range(sharding.rank, len(source), sharding.size)
        return cast("_Source", Subset(cast("Dataset[Any]", source), indices))
    if isinstance(source, Iterator):
        return cast("_Source", islice(cast("Iterator[Any]", source), sharding.rank, None, sharding.size))
    if isinstance(source, Iterable) and not isinstance(source, str | bytes | Mapping):
        return cast("_Source", ShardedStream(cast("Iterable[Any]", source), sharding.rank, sharding.size))
    raise UsageError(
        f"cannot shard a {type(source).__name__}: expected a DataLoader, a dataset with a length, a sequence, "
        "a tensor or an iterable."
    )


class ShardedStream(IterableDataset[Any]):
    """Every size-th item of an iterable, from `rank` on, each time it is read."""

    def __init__(self, source: Iterable[Any], rank: int, size: int) -> None:
        self._source = source
        self._rank = rank
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        """Read the whole iterable, and yield this worker's items."""
        return islice(self._source, self._rank, None, self._size)


class ShardedLoader:
    """Every size-th batch of a loader, as this worker's loader. Iterating it is one epoch.

    Attributes:
        epoch: that comes next.
    """

    def __init__(self, loader: DataLoader[Any], sharding: Sharding) -> None:
        _check(loader)
        self._loader = loader
        self._sharding = sharding
        self.epoch = 0
        self._order = Order(
            num_samples=_size(loader),
            batch_size=cast("int", loader.batch_size),
            drop_last=loader.drop_last,
            shuffled=isinstance(loader.sampler, RandomSampler),
        )

    @property
    def dataset(self) -> Dataset[Any]:
        """The whole dataset, of all workers."""
        return self._loader.dataset

    @property
    def batch_size(self) -> int:
        """Number of samples of a batch; the last one of an epoch may be smaller."""
        return self._order.batch_size

    def __len__(self) -> int:
        """Return the number of batches that this worker gets in one epoch."""
        return len(range(self._sharding.rank, self._order.num_batches, self._sharding.size))

    def set_epoch(self, epoch: int) -> None:
        """Continue with this epoch's shuffle, after a restart for example. Counted by iterating otherwise."""
        self.epoch = epoch

    def batches(self) -> Batches:
        """Return the batches of all workers in the epoch that comes next, in their global order."""
        return self._order.batches(self._sharding.seed, self.epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches of one epoch."""
        return self.through(lambda batches: batches)

    def through(self, stage: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of one epoch after a stage that may read ahead; a batch counts when it is handed out."""
        sharding, order = self._sharding, self._order
        batches = self.batches()
        self.epoch += 1
        own = batches[sharding.rank :: sharding.size]
        for indices, batch in zip(own, stage(self.load(own)), strict=True):
            if torch.is_grad_enabled():
                sharding.on_samples(len(indices))
            yield batch
        others_have_more = len(range(0, order.num_batches, sharding.size)) > len(self)
        if others_have_more and torch.is_grad_enabled():
            sharding.on_missing()

    def load(self, batches: Iterable[list[int]]) -> Iterator[Any]:
        """Yield these batches, of the indices of samples, as the loader makes them."""
        loader = self._loader
        return iter(
            DataLoader(
                loader.dataset,
                batch_sampler=batches,
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
                generator=loader.generator,
                prefetch_factor=loader.prefetch_factor,
            )
        )


def _check(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError("cannot shard a DataLoader over an iterable dataset: shard the dataset, then make the loader.")
    sampler = loader.sampler
    if not isinstance(sampler, RandomSampler | SequentialSampler) or loader.batch_size is None:
        raise UsageError(
            f"cannot shard a DataLoader with {type(sampler).__name__} and batch size {loader.batch_size}: "
            "use shuffle=True or False with a batch size, or shard the dataset and sample from that."
        )
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != _size(loader)):
        raise UsageError(
            "cannot shard a DataLoader that draws with replacement or not every sample once: "
            "use shuffle=True, or shard the dataset and sample from that."
        )


def _size(loader: DataLoader[Any]) -> int:
    return len(cast("Sized", loader.dataset))

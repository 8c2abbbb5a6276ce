"""A worker's part of the data, cut so that all workers together see every sample once an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from paceline.data.files import Files, shard_files
from paceline.data.hashing import Key
from paceline.data.loader import ShardedLoader
from paceline.data.partition import Cut, Sharding
from paceline.data.streams import ShardedStream
from paceline.errors import UsageError

_Source = TypeVar("_Source")


@runtime_checkable
class _MapStyle(Protocol):
    """What has a length, and a sample under each index below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def shard_source(source: _Source, sharding: Sharding, cut: Cut | None = None) -> _Source:
    """Return this worker's part of `source`, used in its place.

    - A `DataLoader` is cut by batches: of the global sequence of batches worker r takes r, r + size, and so on, or a
      run of it. A loader that shuffles is shuffled by `seed` and epoch, the same way on every worker. When the number
      of batches does not divide evenly, the workers without a last batch finish that clock empty-handed, so that all
      stay in step; the mean weighted by samples is then still that of the samples there were. Batches that are read
      while gradients are off (`torch.no_grad()`, `optimizer.snapshot()`) are for evaluation: they count as no samples
      and finish no clock.
    - A sequence, tensor, array or map-style dataset gives the samples r, r + size, ..., a run, or those hashed to it.
    - Files are given whole.
    - Any other iterable is read by everyone, and each worker keeps its own items: an iterable dataset, for a
      `DataLoader` to read, where it can be read again and again, else an iterator.

    Raises:
        UsageError: a loader with a custom sampler, or one over an iterable dataset: shard the dataset instead. Or what
            is empty, or cannot be cut so.
    """
    return cast("_Source", _shard(source, sharding, cut or Cut()))


def _shard(source: object, sharding: Sharding, cut: Cut) -> object:
    match source:
        case DataLoader():
            return ShardedLoader(cast("DataLoader[Any]", source), sharding, cut)
        case Files():
            return shard_files(source, sharding, cut)
        case IterableDataset():
            return ShardedStream(cast("IterableDataset[Any]", source), sharding, cut)
        case str() | Mapping():
            pass
        case _MapStyle():
            return _pick(source, _own_of(source, sharding, cut))
        case Iterator():
            return iter(ShardedStream(cast("Iterator[Any]", source), sharding, cut))
        case Iterable():
            return ShardedStream(cast("Iterable[Any]", source), sharding, cut)
        case _:
            pass
    raise UsageError(
        f"cannot shard a {type(source).__name__}: expected a DataLoader, a dataset with a length, a sequence, "
        "a tensor, files or an iterable."
    )


def _own_of(source: _MapStyle, sharding: Sharding, cut: Cut) -> slice | list[int]:
    num_samples = len(source)
    if not num_samples:
        raise UsageError(f"there is nothing to shard: the {type(source).__name__} is empty.")
    sharding.note_size(num_samples, f"samples of a {type(source).__name__}")
    return cut.own(num_samples, sharding, _key_at(source, cut))


def _key_at(source: _MapStyle, cut: Cut) -> Callable[[int], Key]:
    key = cut.key
    return int if key is None else lambda index: key(source[index])


def _pick(source: _MapStyle, own: slice | list[int]) -> object:
    """Return these samples of a source as another one of its kind, as far as that is possible."""
    match source:
        case torch.Tensor():
            return source[own] if isinstance(own, slice) else source[torch.tensor(own, dtype=torch.int64)]
        case np.ndarray():
            return source[own] if isinstance(own, slice) else source[np.array(own, dtype=np.int64)]
        case list() | tuple() if not isinstance(own, slice):
            chosen = [source[index] for index in own]
            return chosen if isinstance(source, list) else tuple(chosen)
        case Sequence() if isinstance(own, slice):
            return source[own]
        case _:
            indices = range(len(source))[own] if isinstance(own, slice) else own
            return Subset(cast("Dataset[Any]", source), indices)

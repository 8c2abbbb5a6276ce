"""A worker's shard of a data source, cut so that all workers together see every sample once an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from paceline.data.files import Files, shard_files
from paceline.data.hashing import Key
from paceline.data.loader import ShardedLoader
from paceline.data.partition import DataCut, Sharding, is_hashed_to
from paceline.data.position import Bookmark
from paceline.errors import UsageError


class ShardedStream(IterableDataset[Any]):
    """This worker's items of an iterable, which every worker reads as a whole.

    In the processes of a `DataLoader` with `num_workers`, each process takes its share of them; a source that is an
    `IterableDataset` has to do that itself, as in plain PyTorch.
    """

    def __init__(self, source: Iterable[Any], sharding: Sharding, cut: DataCut | None = None) -> None:
        self._cut = cut or DataCut()
        _check(self._cut)
        self._source = source
        self._sharding = sharding
        by_hash = {"worker": sharding.rank, "num_workers": sharding.size}
        self._bookmark = Bookmark(by_hash if self._cut.partition == "hashed" else {})
        self._has_noted_size = False

    def __repr__(self) -> str:
        return f"ShardedStream({type(self._source).__name__}, worker {self._sharding.rank} of {self._sharding.size})"

    def __iter__(self) -> Iterator[Any]:
        """Read the iterable from the current position, and yield this worker's items."""
        start = self._bookmark.start_pass().num_done
        place, num_places = _place_among_readers(self._source)
        num_own, number = 0, -1
        for number, item in enumerate(self._source):
            if number >= start and self._is_own(number - start, number, item):
                if num_own % num_places == place:
                    self._bookmark.reach(self._num_done(start, number))
                    yield item
                num_own += 1
        self._check_size(number + 1)
        self._bookmark.end()

    def state_dict(self) -> dict[str, int]:
        """Return the position: all items up to the last one that this worker was given.

        Items that a `DataLoader` reads in processes of its own are not known here, and items read ahead count as given.
        """
        return self._bookmark.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position with the next iteration; items before it are read and skipped.

        Raises:
            UsageError: the state is not of such a source.
        """
        self._bookmark.load_state_dict(state)

    def _is_own(self, place: int, number: int, item: object) -> bool:
        """Return whether an item is this worker's: by hash, or by its place since the position of the start."""
        if self._cut.partition != "hashed":
            return place % self._sharding.size == self._sharding.rank
        key = number if self._cut.key is None else self._cut.key(item)
        return is_hashed_to(key, self._sharding)

    def _num_done(self, start: int, number: int) -> int:
        """Return how many items the workers have been given together when this one is given item `number`.

        Strided items count up to the end of their turn, in which each worker gets one. With hashed items each worker
        keeps its own count.
        """
        if self._cut.partition == "hashed":
            return number + 1
        return number + self._sharding.size - (number - start) % self._sharding.size

    def _check_size(self, num_items: int) -> None:
        if not num_items:
            raise UsageError(f"the {type(self._source).__name__} that is read by workers has no items at all.")
        if not self._has_noted_size:
            self._has_noted_size = True
            self._sharding.note_size(num_items, f"items of a {type(self._source).__name__}")


def _check(cut: DataCut) -> None:
    if cut.partition == "contiguous" or cut.shuffled:
        what = "shuffled" if cut.shuffled else 'cut by partition="contiguous"'
        raise UsageError(
            f"an iterable cannot be {what}, as nobody knows how long it is: leave that out, or give a sequence."
        )


def _place_among_readers(source: Iterable[Any]) -> tuple[int, int]:
    """Return the index of this process among those of a `DataLoader`, and their number."""
    info = get_worker_info()
    return (0, 1) if info is None or isinstance(source, IterableDataset) else (info.id, info.num_workers)


_Source = TypeVar("_Source")


@runtime_checkable
class _MapStyle(Protocol):
    """Object with a length, and a sample at each index below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def shard_source(source: _Source, sharding: Sharding, cut: DataCut | None = None) -> _Source:
    """Return this worker's shard of `source`, used in its place.

    - A `DataLoader` is cut by batches: of the global sequence of batches worker r gets r, r + size, and so on, or a
      contiguous run. A loader that shuffles is shuffled by `seed` and epoch, the same way on every worker. When the
      number of batches does not divide evenly, the workers without a last batch finish that clock without a gradient,
      so that all stay in step; the mean weighted by samples is then still that of all samples. Batches that are read
      while gradients are off (`torch.no_grad()`, `optimizer.snapshot()`) are for evaluation: they add no samples and
      finish no clock.
    - A sequence, tensor, array or map-style dataset gives the samples r, r + size, ..., a run, or those hashed to it.
    - Files are sharded as whole files.
    - Any other iterable is read by every worker, which keeps its own items: the result is an iterable dataset, for a
      `DataLoader` to read, where the source can be read repeatedly, else an iterator.

    Raises:
        UsageError: a loader with a custom sampler, or one over an iterable dataset: shard the dataset instead. Or the
            source is empty, or does not support this partition.
    """
    return cast("_Source", _shard(source, sharding, cut or DataCut()))


def _shard(source: object, sharding: Sharding, cut: DataCut) -> object:
    match source:
        case DataLoader():
            return ShardedLoader(cast("DataLoader[Any]", source), sharding, cut)
        case Files():
            return shard_files(source, sharding, cut)
        case IterableDataset():
            return ShardedStream(cast("IterableDataset[Any]", source), sharding, cut)
        case str() | Mapping() | type():
            pass
        case _MapStyle():
            return _pick(source, _own_of(source, sharding, cut))
        case Iterator():
            return iter(ShardedStream(cast("Iterator[Any]", source), sharding, cut))
        case Iterable():
            return ShardedStream(cast("Iterable[Any]", source), sharding, cut)
        case _:
            pass
    what = f"the class {source.__name__}" if isinstance(source, type) else f"a {type(source).__name__}"
    raise UsageError(
        f"cannot shard {what}: expected a DataLoader, a dataset with a length, a sequence, "
        "a tensor, files or an iterable."
    )


def _own_of(source: _MapStyle, sharding: Sharding, cut: DataCut) -> slice | list[int]:
    num_samples = len(source)
    if not num_samples:
        raise UsageError(f"there is nothing to shard: the {type(source).__name__} is empty.")
    sharding.note_size(num_samples, f"samples of a {type(source).__name__}")
    return cut.own(num_samples, sharding, _key_at(source, cut))


def _key_at(source: _MapStyle, cut: DataCut) -> Callable[[int], Key]:
    key = cut.key
    return int if key is None else lambda index: key(source[index])


def _pick(source: _MapStyle, own: slice | list[int]) -> object:
    """Return these samples of a source, in the type of the source where possible."""
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

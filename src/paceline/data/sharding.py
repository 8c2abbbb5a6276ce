"""A worker's shard of a data source, cut so that all workers together see every sample once an epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    get_worker_info,
)

from paceline.core.calls import shown
from paceline.data.files import Files, shard_files
from paceline.data.order import Batches, EpochOrder, PositionTracker, terms_of
from paceline.data.partition import DataCut, Key, Sharding, is_hashed_to, run
from paceline.data.steps_of_pass import StepsOfPass
from paceline.errors import UsageError

_Sample = TypeVar("_Sample", covariant=True)


class WorkerSampler(DistributedSampler[int]):
    """Indices of this worker's samples in the next pass of a loader, or in the rest of one that is under way.

    Its class tells frameworks that the data are shared out already, and how they set the epoch.
    """

    def __init__(
        self, dataset: Dataset[Any], order: EpochOrder, sharding: Sharding, tracker: PositionTracker, *, strided: bool
    ) -> None:
        super().__init__(dataset, sharding.size, sharding.rank, shuffle=order.shuffled, seed=sharding.seed)
        self._order, self._sharding, self._tracker, self._is_strided = order, sharding, tracker, strided

    def __len__(self) -> int:
        """Return the number of these samples."""
        own = self.own(self._order.unshuffled(), self._tracker.next.num_done, self._sharding)
        return sum(own.size(index) for index in range(len(own)))

    def __iter__(self) -> Iterator[int]:
        """Yield the indices; the position stays as it is."""
        batches, place = self._order.batches(self._sharding.seed, self._tracker.next.epoch), self._tracker.next
        for batch in self.own(batches, place.num_done, self._sharding):
            yield from batch

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by this epoch from the next pass on; see `PositionedLoader.set_epoch`."""
        super().set_epoch(epoch)
        self._tracker.set_epoch(epoch)

    def own(self, batches: Batches, num_done: int, sharding: Sharding) -> Batches:
        """Return the batches of a share of an epoch, after the workers together have been given `num_done`."""
        if self._is_strided:
            return batches[num_done + sharding.rank :: sharding.size]
        return batches[run(len(batches), sharding)][-(-num_done // sharding.size) :]


class PositionedLoader(DataLoader[_Sample], ABC):
    """A `DataLoader` over one worker's share, which knows how far all workers are; `paceline.shard` returns one.

    It has the dataset and the settings of the loader that was sharded; `sampler` and `batch_sampler` give this worker's
    samples of the next pass. A framework that is given it leaves it as it is, and may set its epoch by the sampler.
    """

    def __init__(self, loader: DataLoader[_Sample], sampler: WorkerSampler) -> None:
        super().__init__(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Epoch of the next pass."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Shuffle by this epoch from the next pass on, from its start unless it is under way. Default: count passes."""

    @abstractmethod
    def state_dict(self) -> dict[str, int]:
        """Return the position of all workers, as plain numbers; another number of workers may continue there."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position with the next pass; all workers need the same state.

        Raises:
            UsageError: the state is of another source, seed or partition; the message names the values.
        """


class ShardedLoader(PositionedLoader[_Sample]):
    """This worker's batches of a loader, used in its place. Iterating it reads one epoch, or the rest of one.

    A pass while gradients are off is for evaluation: it always reads a whole epoch and leaves the position unchanged.
    Where the partition is strided, worker r gets the batches r, r + size, ... of the rest of the global sequence, and
    another number of workers may continue it; where it is contiguous, a run of the whole, and the number is fixed.
    """

    def __init__(self, loader: DataLoader[_Sample], sharding: Sharding, cut: DataCut | None = None) -> None:
        _require_shardable(loader, cut or DataCut())
        is_strided = cut is None or cut.partition != "contiguous"
        self._sharding = sharding
        self._order = EpochOrder(
            num_samples=_size(loader),
            batch_size=cast("int", loader.batch_size),
            drop_last=loader.drop_last,
            shuffled=isinstance(loader.sampler, RandomSampler),
        )
        sharding.note_size(self._order.num_batches, f"batches of a DataLoader over {self._order.num_samples} samples")
        terms = terms_of(self._order, sharding.seed)
        self.tracker = PositionTracker(
            terms if is_strided else {**terms, "num_workers_of_runs": sharding.size}, self._order.num_batches
        )
        self.own_sampler = WorkerSampler(loader.dataset, self._order, sharding, self.tracker, strided=is_strided)
        super().__init__(loader, self.own_sampler)

    def __repr__(self) -> str:
        here, order = self._sharding, self._order
        return f"ShardedLoader({order.num_batches} batches of {order.batch_size}, worker {here.rank} of {here.size})"

    @property
    def epoch(self) -> int:
        """Epoch of the next pass."""
        return self.tracker.next.epoch

    @property
    def order(self) -> EpochOrder:
        """Parameters that, together with the seed, determine the global sequences of batches."""
        return self._order

    def __len__(self) -> int:
        """Return the number of this worker's batches in the next pass."""
        return len(self.own_sampler.own(self._order.unshuffled(), self.tracker.next.num_done, self._sharding))

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by this epoch from the next pass on, from its start unless it is under way. Default: count passes."""
        self.own_sampler.set_epoch(epoch)

    def batches(self) -> Batches:
        """Return the batches of all workers in the whole next epoch, in their global order."""
        return self._order.batches(self._sharding.seed, self.epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position, as plain numbers; inside a loop it includes the current batch of every worker.

        It is the same on all workers that have taken part in the same number of clocks. Another number of workers may
        continue there, unless the partition is contiguous.
        """
        return self.tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position with the next pass; all workers need the same state.

        Raises:
            UsageError: the state is of another source, seed or partition; the message names the values.
        """
        self.tracker.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch names its class
        """Yield this worker's batches of one epoch, or of the rest of one."""
        return self.through(lambda batches: batches)

    def through(self, stage: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of one epoch through a stage that may read ahead; a batch counts when it is yielded."""
        sharding, batches, is_training = self._sharding, self.batches(), torch.is_grad_enabled()
        start = self.tracker.start_pass().num_done if is_training else 0
        own = self.own_sampler.own(batches, start, sharding if is_training else sharding.evaluation())
        steps = StepsOfPass(sharding.clock)
        for number, (indices, batch) in enumerate(sharding.timed(zip(own, stage(self.load(own)), strict=True)), 1):
            if is_training:
                self.tracker.reach(start + number * sharding.size)
                sharding.on_samples(len(indices))
            steps.begin_batch()
            yield batch
            steps.end_batch()
        if is_training:
            others_have_more = -(-(len(batches) - start) // sharding.size) > len(own)
            if others_have_more and (steps.others_step_again or sharding.joins_batches()):
                sharding.on_missing()
            self.tracker.end()

    def load(self, batches: Iterable[list[int]]) -> Iterator[Any]:
        """Yield the batches with these sample indices, as the loader makes them."""
        return iter(
            DataLoader(
                self.dataset,
                batch_sampler=batches,
                num_workers=self.num_workers,
                collate_fn=self.collate_fn,
                pin_memory=self.pin_memory,
                timeout=self.timeout,
                worker_init_fn=self.worker_init_fn,
                multiprocessing_context=self.multiprocessing_context,
                generator=self.generator,
                prefetch_factor=self.prefetch_factor,
            )
        )


def _require_shardable(loader: DataLoader[Any], cut: DataCut) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError("cannot shard a DataLoader over an iterable dataset: shard the dataset, then make the loader.")
    sampler = loader.sampler
    if isinstance(sampler, WorkerSampler):
        raise UsageError(f"this loader is sharded already: {loader!r}. Shard the one that it was made from.")
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
    if not _size(loader):
        raise UsageError(f"there is nothing to shard: the {type(loader.dataset).__name__} of the DataLoader is empty.")
    if cut.partition == "hashed":
        raise UsageError(
            "a DataLoader is cut by batches, whose samples would be of different workers if they were hashed: "
            "shard the dataset, then make the loader."
        )
    if cut.shuffled:
        raise UsageError("a DataLoader says itself whether it is shuffled: make that with shuffle=True instead.")


def _size(loader: DataLoader[Any]) -> int:
    return len(cast("Sized", loader.dataset))


class ShardedStream(IterableDataset[Any]):
    """This worker's items of an iterable, which every worker reads as a whole.

    In the processes of a `DataLoader` with `num_workers`, each process takes its share of them; a source that is an
    `IterableDataset` has to do that itself, as in plain PyTorch.
    """

    def __init__(self, source: Iterable[Any], sharding: Sharding, cut: DataCut | None = None) -> None:
        self._cut = cut or DataCut()
        _require_streamable(self._cut)
        self._source = source
        self._sharding = sharding
        by_hash = {"worker": sharding.rank, "num_workers": sharding.size}
        self._tracker = PositionTracker(by_hash if self._cut.partition == "hashed" else {})
        self._has_noted_size = False

    def __repr__(self) -> str:
        return f"ShardedStream({type(self._source).__name__}, worker {self._sharding.rank} of {self._sharding.size})"

    def __iter__(self) -> Iterator[Any]:
        """Read the iterable from the current position, and yield this worker's items."""
        start = self._tracker.start_pass().num_done
        place, num_places = _place_among_readers(self._source)
        num_own, number = 0, -1
        for number, item in enumerate(self._source):
            if number >= start and self._is_own(number - start, number, item):
                if num_own % num_places == place:
                    self._tracker.reach(self._num_done(start, number))
                    yield item
                num_own += 1
        self._check_size(number + 1)
        self._tracker.end()

    def state_dict(self) -> dict[str, int]:
        """Return the position: all items up to the last one that this worker was given.

        Items that a `DataLoader` reads in processes of its own are not known here, and items read ahead count as given.
        """
        return self._tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position with the next iteration; items before it are read and skipped.

        Raises:
            UsageError: the state is not of such a source.
        """
        self._tracker.load_state_dict(state)

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


def _require_streamable(cut: DataCut) -> None:
    if cut.partition == "contiguous" or cut.shuffled:
        what = "shuffled" if cut.shuffled else 'cut by partition="contiguous"'
        raise UsageError(
            f"an iterable cannot be {what}, as its length is not known: leave that out, or give a sequence."
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
        case torch.Tensor() | np.ndarray() if not _has_samples(source):
            raise UsageError(
                f"cannot shard {shown(source)}: expected one whose first dimension counts the samples, with values in "
                "memory, neither sparse nor nested."
            )
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


def _has_samples(source: object) -> bool:
    """Return whether a tensor or an array can be cut along its first dimension."""
    if isinstance(source, torch.Tensor):
        is_dense = source.layout == torch.strided and not source.is_nested and source.device.type != "meta"
        return is_dense and source.dim() > 0
    return isinstance(source, np.ndarray) and source.ndim > 0


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

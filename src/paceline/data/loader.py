"""A worker's shard of a `DataLoader`, cut by batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from paceline.data.order import Batches, EpochOrder
from paceline.data.partition import DataCut, Sharding, run
from paceline.data.position import Bookmark, terms_of
from paceline.errors import UsageError


class ShardedLoader:
    """This worker's batches of a loader, used in its place. Iterating it reads one epoch, or the rest of one.

    A pass while gradients are off is for evaluation: it always reads a whole epoch and leaves the position unchanged.
    Where the partition is strided, worker r gets the batches r, r + size, ... of the rest of the global sequence, and
    another number of workers may continue it; where it is contiguous, a run of the whole, and the number is fixed.
    """

    def __init__(self, loader: DataLoader[Any], sharding: Sharding, cut: DataCut | None = None) -> None:
        _check(loader, cut or DataCut())
        self._loader = loader
        self._sharding = sharding
        self._is_strided = cut is None or cut.partition != "contiguous"
        self._order = EpochOrder(
            num_samples=_size(loader),
            batch_size=cast("int", loader.batch_size),
            drop_last=loader.drop_last,
            shuffled=isinstance(loader.sampler, RandomSampler),
        )
        sharding.note_size(self._order.num_batches, f"batches of a DataLoader over {self._order.num_samples} samples")
        terms = terms_of(self._order, sharding.seed)
        self.bookmark = Bookmark(
            terms if self._is_strided else {**terms, "num_workers_of_runs": sharding.size}, self._order.num_batches
        )

    def __repr__(self) -> str:
        here, order = self._sharding, self._order
        return f"ShardedLoader({order.num_batches} batches of {order.batch_size}, worker {here.rank} of {here.size})"

    @property
    def dataset(self) -> Dataset[Any]:
        """The whole dataset, of all workers."""
        return self._loader.dataset

    @property
    def batch_size(self) -> int:
        """Number of samples of a batch; the last one of an epoch may be smaller."""
        return self._order.batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next pass."""
        return self.bookmark.next.epoch

    @property
    def order(self) -> EpochOrder:
        """Parameters that, together with the seed, determine the global sequences of batches."""
        return self._order

    def __len__(self) -> int:
        """Return the number of this worker's batches in the next pass."""
        return len(self._own(self._order.unshuffled(), self.bookmark.next.num_done))

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by this epoch from the next pass on, from its start unless it is under way. Default: count passes."""
        self.bookmark.set_epoch(epoch)

    def batches(self) -> Batches:
        """Return the batches of all workers in the whole next epoch, in their global order."""
        return self._order.batches(self._sharding.seed, self.epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position, as plain numbers; inside a loop it includes the current batch of every worker.

        It is the same on all workers that have taken part in the same number of clocks. Another number of workers may
        continue there, unless the partition is contiguous.
        """
        return self.bookmark.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position with the next pass; all workers need the same state.

        Raises:
            UsageError: the state is of another source, seed or partition; the message names the values.
        """
        self.bookmark.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches of one epoch, or of the rest of one."""
        return self.through(lambda batches: batches)

    def through(self, stage: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of one epoch through a stage that may read ahead; a batch counts when it is yielded."""
        sharding, batches, is_training = self._sharding, self.batches(), torch.is_grad_enabled()
        start = self.bookmark.start_pass().num_done if is_training else 0
        own = self._own(batches, start)
        for number, (indices, batch) in enumerate(zip(own, stage(self.load(own)), strict=True), 1):
            if is_training:
                self.bookmark.reach(start + number * sharding.size)
                sharding.on_samples(len(indices))
            yield batch
        if is_training:
            if -(-(len(batches) - start) // sharding.size) > len(own):  # others have one more
                sharding.on_missing()
            self.bookmark.end()

    def load(self, batches: Iterable[list[int]]) -> Iterator[Any]:
        """Yield the batches with these sample indices, as the loader makes them."""
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

    def _own(self, batches: Batches, num_done: int) -> Batches:
        """Return this worker's batches of an epoch, after the workers together have been given `num_done`."""
        size = self._sharding.size
        if self._is_strided:
            return batches[num_done + self._sharding.rank :: size]
        return batches[run(len(batches), self._sharding)][-(-num_done // size) :]


def _check(loader: DataLoader[Any], cut: DataCut) -> None:
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

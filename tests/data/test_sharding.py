"""All workers together see every sample once an epoch, in an order that does not depend on how many they are."""

from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.data.partition import Sharding
from paceline.data.sharding import ShardedLoader, shard_source
from paceline.errors import UsageError

sizes = st.integers(1, 6)
lengths = st.integers(1, 60)


class Recorder:
    """What a session would be told."""

    def __init__(self, rank: int, size: int, seed: int = 0) -> None:
        self.samples: list[int] = []
        self.num_skipped = 0
        self.told: list[str] = []
        self.sharding = Sharding(rank, size, seed, self.samples.append, self._skip, self.told.append)

    def _skip(self) -> None:
        self.num_skipped += 1


def loader_of(num_samples: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size, **options)


def epochs(loader: DataLoader[Any], recorder: Recorder, num_epochs: int) -> list[list[list[int]]]:
    """The batches of one worker, epoch by epoch."""
    mine = shard_source(loader, recorder.sharding)
    return [[batch.tolist() for (batch,) in mine] for _ in range(num_epochs)]


def in_global_order(parts: list[list[list[int]]]) -> list[list[int]]:
    """The batches of one epoch, round by round in the order of the workers."""
    rounds = zip_longest(*parts)
    return [batch for batch in chain.from_iterable(rounds) if batch is not None]


@given(num_samples=lengths, batch_size=st.integers(1, 9), size=sizes, shuffle=st.booleans(), drop_last=st.booleans())
def test_every_epoch_is_shared_out_and_its_order_is_the_same_for_any_number_of_workers(
    num_samples: int, batch_size: int, size: int, shuffle: bool, drop_last: bool
) -> None:
    loader = loader_of(num_samples, batch_size, shuffle=shuffle, drop_last=drop_last)
    alone = epochs(loader, Recorder(0, 1, seed=5), 3)
    parts = [epochs(loader, Recorder(rank, size, seed=5), 3) for rank in range(size)]
    for epoch, whole in enumerate(alone):
        assert in_global_order([part[epoch] for part in parts]) == whole
        seen = sorted(chain.from_iterable(whole))
        if drop_last:
            assert len(seen) == len(set(seen)) == num_samples // batch_size * batch_size
        else:
            assert seen == list(range(num_samples))
    if not shuffle:
        assert alone[0] == [batch.tolist() for (batch,) in loader]


@given(num_samples=lengths, batch_size=st.integers(1, 9), size=sizes, num_epochs=st.integers(1, 3))
def test_workers_without_a_last_batch_skip_it_so_that_all_count_the_same_rounds(
    num_samples: int, batch_size: int, size: int, num_epochs: int
) -> None:
    loader = loader_of(num_samples, batch_size)
    recorders = [Recorder(rank, size) for rank in range(size)]
    parts = [epochs(loader, recorder, num_epochs) for recorder in recorders]
    num_rounds = -(-len(loader) // size)
    for recorder, part in zip(recorders, parts, strict=True):
        assert len(recorder.samples) + recorder.num_skipped == num_rounds * num_epochs
        assert recorder.samples == [len(batch) for epoch in part for batch in epoch]
        assert len(shard_source(loader, recorder.sharding)) == len(part[0])
    assert sum(sum(recorder.samples) for recorder in recorders) == num_samples * num_epochs


@given(items=st.lists(st.integers(-100, 100), min_size=1), size=sizes)
def test_sequences_tensors_datasets_and_iterables_are_dealt_out(items: list[int], size: int) -> None:
    def parts(source: Any) -> list[list[int]]:
        return [[int(item) for item in shard_source(source, Recorder(rank, size).sharding)] for rank in range(size)]

    dealt = [items[rank::size] for rank in range(size)]
    assert parts(tuple(items)) == dealt
    assert parts(items) == dealt
    assert parts(torch.tensor(items, dtype=torch.int64)) == dealt
    assert parts(set(items)) == [list(set(items))[rank::size] for rank in range(size)]
    assert [list(shard_source(iter(items), Recorder(rank, size).sharding)) for rank in range(size)] == dealt
    mapped = [shard_source(MapStyle(items), Recorder(rank, size).sharding) for rank in range(size)]
    assert [[part[index] for index in range(len(part))] for part in mapped] == dealt


class MapStyle(Dataset[int]):
    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return self.items[index]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_an_iterable_dataset_can_be_sharded_and_then_loaded_again_and_again() -> None:
    part = shard_source(Stream(), Recorder(1, 3).sharding)
    loader = DataLoader(part, batch_size=2)
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == [[[1, 4], [7]]] * 2


def test_another_seed_is_another_order_and_each_epoch_has_its_own() -> None:
    loader = loader_of(30, 30, shuffle=True)
    first, second = epochs(loader, Recorder(0, 1, seed=0), 2)
    (other,) = epochs(loader, Recorder(0, 1, seed=1), 1)
    assert first != second
    assert first != other


@given(num_samples=lengths, batch_size=st.integers(1, 9), size=sizes, shuffle=st.booleans())
def test_its_samplers_give_the_batches_of_the_next_pass(
    num_samples: int, batch_size: int, size: int, shuffle: bool
) -> None:
    loader = loader_of(num_samples, batch_size, shuffle=shuffle)
    for rank in range(size):
        mine = shard_source(loader, Recorder(rank, size).sharding)
        assert isinstance(mine, DataLoader)
        assert isinstance(mine.sampler, DistributedSampler)
        for epoch in range(2):
            mine.sampler.set_epoch(epoch)
            announced, num_samples_announced = list(mine.batch_sampler or ()), len(mine.sampler)
            assert [batch.tolist() for (batch,) in mine] == announced
            assert sum(map(len, announced)) == num_samples_announced


def test_it_keeps_the_settings_of_the_loader_and_is_not_sharded_twice() -> None:
    loader = loader_of(9, 2, drop_last=True, num_workers=1, timeout=5.0, persistent_workers=True)
    mine = shard_source(loader, Recorder(1, 2).sharding)
    for name in ("dataset", "batch_size", "num_workers", "timeout", "collate_fn", "prefetch_factor", "drop_last"):
        assert getattr(mine, name) == getattr(loader, name), name
    with pytest.raises(UsageError, match=r"sharded already: ShardedLoader\(4 batches of 2, worker 1 of 2\)"):
        shard_source(mine, Recorder(1, 2).sharding)


def test_a_restarted_worker_can_continue_with_a_later_epoch() -> None:
    loader = loader_of(30, 4, shuffle=True)
    _, _, third = epochs(loader, Recorder(1, 2), 3)
    restarted = shard_source(loader, Recorder(1, 2).sharding)
    assert isinstance(restarted, ShardedLoader)
    restarted.set_epoch(2)
    assert [batch.tolist() for (batch,) in restarted] == third


def test_evaluation_is_not_counted() -> None:
    recorder = Recorder(1, 2)
    with torch.no_grad():
        assert epochs(loader_of(9, 3), recorder, 1) == [[[3, 4, 5]]]
    assert (recorder.samples, recorder.num_skipped) == ([], 0)


def test_an_epoch_that_is_broken_off_skips_nothing() -> None:
    recorder = Recorder(1, 2)
    for _ in shard_source(loader_of(9, 3), recorder.sharding):
        break
    assert (recorder.samples, recorder.num_skipped) == ([3], 0)


def test_a_sharded_loader_has_what_loops_ask_of_a_loader() -> None:
    loader = loader_of(9, 4, collate_fn=lambda rows: torch.stack([row for (row,) in rows]) * 10)
    mine = shard_source(loader, Recorder(0, 2).sharding)
    assert len(mine.dataset) == 9
    assert mine.batch_size == 4
    assert len(mine) == 2
    assert [batch.tolist() for batch in mine] == [[0, 10, 20, 30], [80]]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "there is nothing to shard: the list is empty"),
        (torch.empty(0, 3), "the Tensor is empty"),
        (MapStyle([]), "the MapStyle is empty"),
        (DataLoader(MapStyle([]), batch_size=2), "the MapStyle of the DataLoader is empty"),
        (DataLoader(Stream()), "over an iterable dataset: shard the dataset, then make the loader"),
        (DataLoader(MapStyle([1, 2]), batch_size=None), "batch size None"),
        (DataLoader(MapStyle([1, 2]), sampler=WeightedRandomSampler([0.5, 0.5], 2)), "WeightedRandomSampler"),
        (DataLoader(MapStyle([1, 2]), sampler=RandomSampler(range(2), replacement=True)), "with replacement"),
        (DataLoader(MapStyle([1, 2]), sampler=RandomSampler(range(2), num_samples=1)), "not every sample once"),
        (
            DataLoader(MapStyle([1, 2]), batch_sampler=BatchSampler(SequentialSampler(range(2)), 2, drop_last=False)),
            "batch size None",
        ),
        ("text", "cannot shard a str"),
        ({"a": 1}, "cannot shard a dict"),
        (7, "cannot shard a int: expected a DataLoader, a dataset with a length, a sequence"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(source: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shard_source(source, Recorder(0, 2).sharding)

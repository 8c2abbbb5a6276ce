"""However data are cut, all workers together have each sample once; and each cut is what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.test_sharding import MapStyle, Recorder, loader_of
from tests.jobs import run_job
from torch.utils.data import Subset, TensorDataset

import paceline
from paceline.api.session import Session
from paceline.data.partition import DataCut, Key, Partition, fixed_hash
from paceline.data.sharding import shard_source
from paceline.errors import UsageError

partitions = st.sampled_from(get_args(Partition))
KINDS = {"list": list, "tuple": tuple, "tensor": torch.tensor, "array": np.array, "dataset": MapStyle}


def parts_of(source: Any, size: int, cut: DataCut, seed: int = 0) -> list[list[int]]:
    """What each worker gets, in order."""
    owned = [shard_source(source, Recorder(rank, size, seed).sharding, cut) for rank in range(size)]
    return [[int(part[index]) for index in range(len(part))] for part in owned]


def in_order(parts: list[list[int]], partition: Partition) -> list[int]:
    """The samples of all workers in the order in which they were cut."""
    if partition == "contiguous":
        return list(chain.from_iterable(parts))
    longest = max(map(len, parts))
    return [part[turn] for turn in range(longest) for part in parts if turn < len(part)]


@given(num=st.integers(1, 40), size=st.integers(1, 9), seed=st.integers(0, 3), kind=st.sampled_from(sorted(KINDS)))
@pytest.mark.parametrize("partition", get_args(Partition))
@pytest.mark.parametrize("shuffled", [False, True])
def test_each_sample_is_one_workers(
    partition: Partition, shuffled: bool, num: int, size: int, seed: int, kind: str
) -> None:
    source, cut = KINDS[kind](list(range(100, 100 + num))), DataCut(partition, shuffled)
    parts = parts_of(source, size, cut, seed)
    assert sorted(chain.from_iterable(parts)) == list(range(100, 100 + num))
    if partition == "hashed":
        whole = parts_of(source, 1, cut, seed)[0]
        assert parts == [[x for x in whole if fixed_hash(x - 100) % size == rank] for rank in range(size)]
        return
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert in_order(parts, partition) == parts_of(source, 1, cut, seed)[0], "the order depends on the workers"


def test_each_kind_of_source_stays_what_it_is() -> None:
    for cut in (DataCut(), DataCut("contiguous"), DataCut("hashed"), DataCut(shuffled=True)):
        kinds = [type(shard_source(make(list(range(9))), Recorder(1, 2).sharding, cut)) for make in KINDS.values()]
        assert kinds == [list, tuple, torch.Tensor, np.ndarray, Subset]
    assert shard_source(range(9), Recorder(1, 2).sharding) == range(1, 9, 2)
    assert isinstance(shard_source(range(9), Recorder(1, 2).sharding, DataCut("hashed")), Subset)


def test_a_worker_without_samples_has_an_empty_part_of_the_same_kind() -> None:
    for cut in (DataCut(), DataCut(shuffled=True), DataCut("hashed")):
        parts = [shard_source(torch.ones(1, 3), Recorder(rank, 9).sharding, cut) for rank in range(9)]
        assert sorted(len(part) for part in parts) == [0] * 8 + [1]
        assert {part.shape[1:] for part in parts} == {(3,)}


def test_a_seed_gives_an_order_and_another_gives_another() -> None:
    source = list(range(50))
    orders = [tuple(parts_of(source, 1, DataCut(shuffled=True), seed)[0]) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != tuple(source)


# -- hashes ----------------------------------------------------------------------------------------------------------

GOLDEN: dict[Key, int] = {
    0: 0xAAA9A94BA7FB8484,
    1: 0xB4C0BA02C6AD1752,
    -1: 0xAA03ED1FE4CA07D6,
    2**70: 0xD245228667B06EFC,
    "": 0x250A665CA99DB8F4,
    "a": 0xF90444487DD54289,
    "é": 0xFD0CAA2124543EFC,
    "\ud800": 0x6C31BCBAB9ABB4F2,
    b"": 0x25534D3C7625F5BB,
    b"a": 0x9EEAB43162EBA6AB,
    (): 0xFCE039767759F806,
    ("a", 1): 0x6FE42E60B20D5CCE,
    (("a",), 1): 0x95C88D432C4DB708,
}


def test_hashes_are_what_they_have_always_been() -> None:
    assert {key: fixed_hash(key) for key in GOLDEN} == GOLDEN


keys = st.recursive(
    st.integers() | st.text(max_size=3) | st.binary(max_size=3), lambda key: st.lists(key, max_size=3).map(tuple)
)


@given(keys, keys)
def test_different_keys_have_different_hashes(one: Key, other: Key) -> None:
    same = one == other and repr(one) == repr(other)
    assert (fixed_hash(one) == fixed_hash(other)) == same


def test_hashes_fall_to_all_workers_alike() -> None:
    counts = Counter(fixed_hash(index) % 8 for index in range(8000))
    assert all(900 < counts[rank] < 1100 for rank in range(8)), counts


def test_samples_of_one_key_are_of_one_worker_and_stay_there_when_others_come() -> None:
    cut = DataCut("hashed", key=lambda sample: sample // 10)
    few, many = (parts_of(list(range(num)), 3, cut) for num in (60, 90))
    assert all(len({sample // 10 for sample in part}) * 10 == len(part) for part in few)
    assert [[sample for sample in part if sample < 60] for part in many] == few


@pytest.mark.parametrize("key", [1.5, None, ["a"], ("a", 2.0), torch.tensor(3), np.int64(3)])
def test_what_is_no_key_is_refused(key: Any) -> None:
    with pytest.raises(UsageError, match=r"the key of a sample is a \w+, expected an int, a str, bytes or a tuple"):
        parts_of([1, 2], 2, DataCut("hashed", key=lambda sample: key))


# -- batches in runs -------------------------------------------------------------------------------------------------


@given(num=st.integers(1, 60), batch_size=st.integers(1, 9), size=st.integers(1, 6), drop_last=st.booleans())
def test_runs_of_batches_are_as_long_as_those_of_others(num: int, batch_size: int, size: int, drop_last: bool) -> None:
    loader = loader_of(num, batch_size, drop_last=drop_last)
    recorders = [Recorder(rank, size) for rank in range(size)]
    owned = [shard_source(loader, recorder.sharding, DataCut("contiguous")) for recorder in recorders]
    lengths = [len(own) for own in owned]
    parts = [[batch.tolist() for (batch,) in own] for own in owned]
    assert list(chain.from_iterable(parts)) == [batch.tolist() for (batch,) in loader]
    assert lengths == [len(part) for part in parts]
    rounds = -(-len(loader) // size)
    assert [len(recorder.samples) + recorder.num_skipped for recorder in recorders] == [rounds] * size


# -- the call --------------------------------------------------------------------------------------------------------


def test_a_script_says_how_data_are_cut(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[list[int], ...]:
        source = list(range(30))
        return (
            paceline.shard(source, partition="contiguous"),
            paceline.shard(source, partition="hashed", key=lambda sample: sample % 10),
            paceline.shard(source, shuffle=True, seed=3),
        )

    first, second = run_job(tmp_path, work, workers=2)
    assert (first[0], second[0]) == (list(range(15)), list(range(15, 30)))
    hashed = parts_of(list(range(30)), 2, DataCut("hashed", key=lambda sample: sample % 10))
    assert [first[1], second[1]] == hashed
    assert [first[2], second[2]] == parts_of(list(range(30)), 2, DataCut(shuffled=True), seed=3)


# -- what is said and refused ----------------------------------------------------------------------------------------


def stream() -> Iterator[int]:
    return iter(range(2))


@pytest.mark.parametrize("source", [[1, 2], TensorDataset(torch.ones(2)), loader_of(4, 2), {1, 2}, stream])
def test_one_line_is_said_where_there_is_not_something_for_each_worker(source: Any) -> None:
    lines = {1: 0, 2: 0, 3: 1}
    for size, num_lines in lines.items():
        recorders = [Recorder(rank, size) for rank in range(size)]
        for recorder in recorders:
            owned = shard_source(source() if callable(source) else source, recorder.sharding)
            assert len(list(owned)) <= -(-2 // size)
        told = [recorder.told for recorder in recorders]
        assert ([len(lines) for lines in told], told[1:]) == ([num_lines] + [0] * (size - 1), [[]] * (size - 1))
    assert told[0][0].startswith("1 of 3 workers get nothing: there are 2 ")


@pytest.mark.parametrize(
    ("source", "cut", "message"),
    [
        (
            loader_of(4, 2),
            DataCut("hashed"),
            "a DataLoader is cut by batches, whose samples would be of different workers",
        ),
        (loader_of(4, 2), DataCut(shuffled=True), "a DataLoader says itself whether it is shuffled"),
        (
            {1, 2},
            DataCut("contiguous"),
            'an iterable cannot be cut by partition="contiguous", as its length is not known',
        ),
        (stream(), DataCut(shuffled=True), "an iterable cannot be shuffled, as its length is not known"),
    ],
)
def test_what_cannot_be_cut_so_is_refused(source: Any, cut: DataCut, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shard_source(source, Recorder(0, 2).sharding, cut)


def test_cuts_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="partition is 'random', expected one of strided, contiguous, hashed"):
        DataCut("random")  # pyright: ignore[reportArgumentType]
    for partition in (None, "strided", "contiguous"):
        with pytest.raises(UsageError, match="or leave out key"):
            DataCut(partition, key=int)

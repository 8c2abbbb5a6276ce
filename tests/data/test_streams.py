"""Iterables are read by every worker, each item is one worker's, and reading goes on where it was left."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.data.test_sharding import Recorder
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.data.partition import DataCut
from paceline.data.sharding import ShardedStream, shard_source
from paceline.errors import UsageError
from paceline.notices import tell


class Numbers:
    """Can be read again and again."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))


class OwnPart(IterableDataset[int]):
    """Sees to it itself that the processes of a loader read different items."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(12) if info is None else range(info.id, 12, info.num_workers))


def streams_of(source: Any, size: int, cut: DataCut | None = None) -> list[ShardedStream]:
    owned = [shard_source(source, Recorder(rank, size).sharding, cut or DataCut()) for rank in range(size)]
    assert all(isinstance(own, ShardedStream) for own in owned)
    return owned


@given(num=st.integers(1, 40), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), turns=st.integers(0, 4))
def test_items_by_turns_go_on_for_any_number_of_workers(num: int, sizes: list[int], turns: int) -> None:
    """Left again and again; then all of the rest, and the epoch behind it."""
    seen, state = list[int](), {"epoch": 0, "num_done": 0}
    for size in sizes:
        streams = streams_of(Numbers(num), size)
        for stream in streams:
            stream.load_state_dict(state)
        turns = min(turns, -(-(num - len(seen)) // size))  # reading is left before it ends
        seen += chain(*(list(islice(stream, turns)) for stream in streams))
        assert sorted(seen) == list(range(len(seen)))
        state = streams[0].state_dict()
    streams = streams_of(Numbers(num), sizes[0])
    for stream in streams:
        stream.load_state_dict(state)
    assert sorted(chain(seen, *(list(stream) for stream in streams))) == list(range(num))
    assert sorted(chain(*(list(stream) for stream in streams))) == list(range(num))


@given(num=st.integers(1, 40), size=st.integers(1, 5), turns=st.integers(1, 9), by_key=st.booleans())
def test_hashed_items_go_on_for_each_worker_alone(num: int, size: int, turns: int, by_key: bool) -> None:
    cut = DataCut("hashed", key=(lambda item: item // 3) if by_key else None)
    first, again = streams_of(Numbers(num), size, cut), streams_of(Numbers(num), size, cut)
    seen = [list(islice(stream, turns)) for stream in first]
    for old, new in zip(first, again, strict=True):
        new.load_state_dict(old.state_dict())
    rest = [list(stream) for stream in again]
    whole = [list(stream) for stream in streams_of(Numbers(num), size, cut)]
    assert sorted(chain(*whole)) == list(range(num))
    ended = [len(own) < turns for own in whole]  # then the next epoch is all that is left
    assert [one + other for one, other, end in zip(seen, rest, ended, strict=True) if not end] == [
        own for own, end in zip(whole, ended, strict=True) if not end
    ]
    if by_key:
        assert all(len({item // 3 for item in own}) == len(set(range(0, num, 3)) & set(own)) for own in whole)


def test_the_state_of_hashed_items_is_one_workers() -> None:
    cut = DataCut("hashed")
    one, other = streams_of(Numbers(9), 2, cut)
    with pytest.raises(UsageError, match=r"worker 0, not 1"):
        other.load_state_dict(one.state_dict())
    with pytest.raises(UsageError, match=r"num_workers 2, not 3"):
        streams_of(Numbers(9), 3, cut)[0].load_state_dict(one.state_dict())
    with pytest.raises(UsageError, match="a state with epoch, num_done is not of this source"):
        one.load_state_dict(streams_of(Numbers(9), 2)[0].state_dict())


def test_a_loader_over_a_stream_goes_on_behind_the_batches_that_it_gave() -> None:
    (stream,) = streams_of(Numbers(10), 1)
    batches = iter(DataLoader(stream, batch_size=3))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    (again,) = streams_of(Numbers(10), 1)
    again.load_state_dict(stream.state_dict())
    assert [batch.tolist() for batch in DataLoader(again, batch_size=3)] == [[6, 7, 8], [9]]


@pytest.mark.parametrize("source", [Numbers(12), OwnPart()], ids=["iterable", "dataset"])
def test_processes_of_a_loader_read_each_item_once(source: Any) -> None:
    loaders = [DataLoader(stream, batch_size=2, num_workers=2) for stream in streams_of(source, 2)]
    parts = [sorted(chain(*(batch.tolist() for batch in loader))) for loader in loaders]
    assert sorted(chain(*parts)) == list(range(12))
    if not isinstance(source, OwnPart):
        assert parts[0] == list(range(0, 12, 2))


def test_a_stream_goes_to_a_process_that_is_no_copy_of_this_one() -> None:
    sharding = Recorder(1, 2).sharding
    bound = replace(sharding, on_samples=lambda _: pytest.fail("called"), on_missing=threading.Lock().release)
    stream = shard_source(Numbers(5), bound)
    sent = pickle.loads(pickle.dumps(stream))  # noqa: S301 - our own
    assert [batch.tolist() for batch in DataLoader(sent, batch_size=2)] == [[1, 3]]
    assert sent.state_dict() == {"epoch": 1, "num_done": 0}
    assert sent._sharding.tell is tell


@pytest.mark.parametrize("source", [Numbers(0), iter(())])
def test_what_has_no_items_is_refused_when_that_is_known(source: Any) -> None:
    owned = shard_source(source, Recorder(0, 2).sharding)
    with pytest.raises(UsageError, match=r"the \w+ that is read by workers has no items at all"):
        list(owned)

"""Reading goes on at the sample where it was left, by any number of workers, in the order that it would have had."""

from __future__ import annotations

import json
from itertools import chain, count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.test_sharding import Recorder, in_global_order, loader_of
from torch.utils.data import DataLoader

from paceline.data.order import EpochOrder, Position, PositionTracker, terms_of
from paceline.data.partition import DataCut
from paceline.data.prefetching import prefetch
from paceline.data.sharding import ShardedLoader
from paceline.errors import UsageError

sizes = st.integers(1, 5)


def sharded(
    loader: DataLoader[Any], size: int, cut: DataCut | None = None
) -> tuple[list[ShardedLoader], list[Recorder]]:
    recorders = [Recorder(rank, size, seed=5) for rank in range(size)]
    return [ShardedLoader(loader, recorder.sharding, cut) for recorder in recorders], recorders


def take(batches: Any, most: int | None = None) -> list[list[int]]:
    """The numbers of the samples of the next batches; the loop is left in the body of the last one."""
    taken: list[list[int]] = []
    for (batch,), _ in zip(batches, count() if most is None else range(most), strict=False):
        taken.append(batch.tolist())
        if len(taken) == most:
            break
    return taken


@given(
    num=st.integers(1, 50),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    before=sizes,
    after=sizes,
    rounds=st.integers(0, 12),
    more=st.integers(0, 3),
)
def test_the_rest_of_an_epoch_is_the_same_for_any_number_of_workers(
    num: int, batch_size: int, shuffle: bool, drop_last: bool, before: int, after: int, rounds: int, more: int
) -> None:
    """Left twice, by different numbers of workers, in any round; then all of it, and the epoch behind it."""
    loader = loader_of(num, batch_size, shuffle=shuffle, drop_last=drop_last)
    alone, _ = sharded(loader, 1)
    first, second = take(alone[0]), take(alone[0])
    seen, state = list[list[int]](), alone[0].state_dict() | {"epoch": 0}
    for size, most in ((before, rounds), (after, more)):
        parts, _ = sharded(loader, size)
        for part in parts:
            part.load_state_dict(json.loads(json.dumps(state)))
        turns = min(most, len(parts[0]))  # the loop is left before it ends
        owned = [take(part, turns) if turns else [] for part in parts]
        seen += in_global_order(owned)
        state = parts[0].state_dict()
        last = [part.state_dict() for part, own in zip(parts, owned, strict=True) if len(own) == turns]
        assert last == [state] * len(last), "workers in the same turn say the same"
        assert (state["epoch"], state["num_done"]) == (0, len(seen))
    assert seen == first[: len(seen)]
    parts, recorders = sharded(loader, after)
    for part in parts:
        part.load_state_dict(state)
    lengths = [len(part) for part in parts]
    rest = [take(part) for part in parts]
    assert seen + in_global_order(rest) == first
    assert lengths == [len(part) for part in rest]
    num_rounds = -(-(len(first) - len(seen)) // after)
    assert [len(one.samples) + one.num_skipped for one in recorders] == [num_rounds] * after
    assert {part.state_dict()["num_done"] for part in parts} == {0}
    assert [part.epoch for part in parts] == [1] * after
    assert in_global_order([take(part) for part in parts]) == second


@given(num=st.integers(1, 50), size=sizes, rounds=st.integers(1, 12))
def test_runs_go_on_where_they_were_left(num: int, size: int, rounds: int) -> None:
    loader, cut = loader_of(num, 3, shuffle=True), DataCut("contiguous")
    parts, _ = sharded(loader, size, cut)
    rounds = min(rounds, len(parts[0]))
    seen = [take(part, rounds) for part in parts]
    again, recorders = sharded(loader, size, cut)
    for part in again:
        part.load_state_dict(parts[0].state_dict())
    runs = [one + take(part) for one, part in zip(seen, again, strict=True)]
    assert list(chain.from_iterable(runs)) == take(sharded(loader, 1)[0][0])
    num_rounds = -(-len(loader) // size) - rounds
    assert [len(one.samples) + one.num_skipped for one in recorders] == [num_rounds] * size
    other, _ = sharded(loader, size + 1, cut)
    with pytest.raises(UsageError, match=rf"num_workers_of_runs {size}, not {size + 1}"):
        other[0].load_state_dict(parts[0].state_dict())


def test_a_batch_counts_when_it_is_handed_out_whatever_was_read_ahead() -> None:
    asked: list[list[int]] = []

    class Rows:
        def prefetch(self, ids: torch.Tensor, *, ahead: int = 1) -> None:
            asked.append(ids.tolist())

    (loader,), _ = sharded(loader_of(9, 3, num_workers=1), 1)
    states: list[int] = []
    for _ in prefetch(loader, {Rows(): lambda batch: batch[0]}):
        states.append(loader.state_dict()["num_done"])
    assert (states, asked) == ([1, 2, 3], [[3, 4, 5], [6, 7, 8]])
    assert loader.state_dict() | {"epoch": 1, "num_done": 0} == loader.state_dict()


def test_the_last_batch_is_of_its_epoch_and_behind_the_loop_is_the_next() -> None:
    (loader,), _ = sharded(loader_of(6, 3), 1)
    states = [loader.state_dict() for _ in loader]
    assert [(state["epoch"], state["num_done"]) for state in states] == [(0, 1), (0, 2)]
    loader.load_state_dict(states[-1])
    assert (loader.epoch, list(loader), loader.epoch, len(loader)) == (0, [], 1, 2)


def test_an_epoch_that_was_left_is_where_it_was_left_until_the_next_begins() -> None:
    (loader,), _ = sharded(loader_of(9, 3), 1)
    take(loader, 1)
    assert (loader.state_dict()["epoch"], loader.state_dict()["num_done"], loader.epoch) == (0, 1, 1)
    take(loader, 2)
    assert (loader.state_dict()["epoch"], loader.state_dict()["num_done"]) == (1, 2)


def test_to_say_the_epoch_that_is_continued_changes_nothing_and_another_begins_it() -> None:
    (loader,), _ = sharded(loader_of(9, 3), 1)
    state = loader.state_dict() | {"epoch": 4, "num_done": 2}
    loader.load_state_dict(state)
    loader.set_epoch(4)
    assert (loader.state_dict(), len(loader)) == (state, 1)
    loader.set_epoch(5)
    assert (loader.state_dict(), len(loader)) == (state | {"epoch": 5, "num_done": 0}, 3)


def test_evaluation_has_the_whole_epoch_and_leaves_no_trace() -> None:
    parts, recorders = sharded(loader_of(12, 3), 3)
    state = parts[0].state_dict() | {"num_done": 3}
    for part in parts:
        part.load_state_dict(state)
        with torch.no_grad():
            take(part)
            take(part, 1)
        assert part.state_dict() == state
    assert in_global_order([take(part) for part in parts]) == [[9, 10, 11]]
    assert [one.samples for one in recorders] == [[3], [], []]
    assert [one.num_skipped for one in recorders] == [0, 1, 1]


def test_a_state_is_of_plain_numbers() -> None:
    (loader,), _ = sharded(loader_of(7, 3, shuffle=True), 1)
    assert loader.state_dict() == {
        "epoch": 0,
        "num_done": 0,
        "num_samples": 7,
        "batch_size": 3,
        "drop_last": False,
        "shuffled": True,
        "seed": 5,
    }
    assert {type(value) for value in loader.state_dict().values()} == {int, bool}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 6}, "another source, or of this one read otherwise: seed 6, not 5"),
        ({"num_samples": 8, "batch_size": 4}, "num_samples 8, not 7; batch_size 4, not 3"),
        ({"shuffled": True}, "shuffled True, not False"),
        ({"num_done": 4}, "in epoch 0 after 4 of 3, which is not a position in it"),
        ({"num_done": -1}, "in epoch 0 after -1 of 3"),
        ({"epoch": -1}, "in epoch -1 after 0 of 3"),
        ({"epoch": "0"}, "epoch='0', expected whole numbers"),
        ({"num_done": 1.0}, "num_done=1.0, expected whole numbers"),
        ({"more": 1}, "a state with .*more.* is not of this source, whose has batch_size, drop_last, epoch, num_done"),
    ],
)
def test_the_state_of_something_else_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    (loader,), _ = sharded(loader_of(7, 3), 1)
    state = loader.state_dict()
    with pytest.raises(UsageError, match=message):
        loader.load_state_dict(state | change)
    with pytest.raises(UsageError, match="a state with nothing is not of this source"):
        loader.load_state_dict({})
    with pytest.raises(UsageError, match="a state of a source is None, expected a mapping"):
        loader.load_state_dict(None)  # pyright: ignore[reportArgumentType]
    for epoch in (-1, 1.0, None):
        with pytest.raises(UsageError, match=rf"is to be {epoch}, expected a whole number, from 0 on"):
            loader.set_epoch(epoch)  # pyright: ignore[reportArgumentType]
    assert loader.state_dict() == state


def test_a_bookmark_does_not_pass_the_end() -> None:
    order = EpochOrder(num_samples=10, batch_size=4, drop_last=False, shuffled=False)
    tracker = PositionTracker(terms_of(order, seed=1), order.num_batches)
    assert tracker.start_pass() == Position(0, 0)
    tracker.reach(7)
    assert (tracker.reached, tracker.next) == (Position(0, 3), Position(1, 0))
    tracker.end()
    assert tracker.reached == tracker.next == Position(1, 0)

"""A replica may lag by so much and no more, and each push is told of once it has it."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.consistency import Consistency
from paceline.core.events import ClippedPush, Died, InvalidPush, Timeout
from paceline.core.messages import (
    Applied,
    Clock,
    Closed,
    Fetched,
    Follow,
    Held,
    Join,
    Joined,
    Leave,
    Left,
    Push,
    PushId,
    PushRefused,
    Replicated,
    Sender,
    Ticked,
    WholeStep,
    WorkerRefused,
)
from paceline.core.tables import ClockCommit, TableCore
from paceline.server.journal import Asked
from paceline.server.replica_lag import ReplicaLag, may_lag
from paceline.wire.requests import RequestDone


def sender(worker: int = 0) -> Sender:
    return Sender(1, worker, 0)


def push(seq: int, worker: int = 0) -> Push:
    return Push(PushId(1, worker, 0, seq), "w", 0, 0)


def lag_of(clocks: int, consistency: str) -> ReplicaLag:
    table = TableCore("w", Consistency.parse(consistency), ClockCommit(0))
    return ReplicaLag(clocks, lambda: {"w": table})


def tell(lag: ReplicaLag, *events: Any) -> list[int]:
    """Tell of events, each with a frame of its own; return how many frames are needed after each."""
    needed: list[int] = []
    for number, event in enumerate(events, 1):
        lag.note_told(event, number)
        needed.append(lag.num_needed)
    return needed


def test_no_worker_is_more_than_so_many_clocks_ahead_of_the_replica() -> None:
    clocks = [Clock(sender(worker), clock) for clock in range(1, 5) for worker in range(2)]
    assert tell(lag_of(2, "bsp"), *clocks) == [0, 0, 0, 0, 1, 2, 3, 4]


def test_a_tick_in_a_step_counts_as_one_by_itself() -> None:
    steps = [WholeStep((push(clock),), Clock(sender(), clock + 1), ()) for clock in range(4)]
    assert tell(lag_of(1, "bsp"), *steps) == [0, 1, 2, 3]


def test_of_pushes_that_show_on_arrival_as_many_may_be_ahead_though_no_clock_ends() -> None:
    assert tell(lag_of(2, "asynchronous"), *map(push, range(5))) == [0, 0, 1, 2, 3]
    assert tell(lag_of(2, "bsp"), *map(push, range(5))) == [0] * 5, "they are not acknowledged before their clock ends"


@pytest.mark.parametrize(
    "event",
    [
        Join(sender()),
        Leave(sender()),
        Died(0, 0, "killed"),
        Timeout(),
        InvalidPush(push(0), "NaN"),
        Asked(0, 0, b"a request"),
        Clock(sender(), 1, (("w", 0, 7),)),
        Follow(1, 1, "w", 0, norm=2.0),
        Closed(1, "w", 0, ((0, 0),), clips=True, norm=2.0),
    ],
)
def test_what_is_not_said_again_is_never_ahead_of_the_replica(event: Any) -> None:
    assert tell(lag_of(3, "bsp"), push(0), event, push(1)) == [0, 2, 2]


def test_contributors_that_depend_on_the_first_to_come_are_not_decided_ahead() -> None:
    assert tell(lag_of(3, "backup:1"), push(0), Clock(sender(), 1)) == [1, 2]


def test_each_push_is_told_of_once_when_the_replica_has_it() -> None:
    lag = lag_of(3, "bsp")
    tell(lag, push(0), push(0, worker=1), WholeStep((push(1), push(2)), None, ()), push(3))
    assert lag.take_received(0) == {}
    assert lag.take_received(2) == {(0, 0): [0], (1, 0): [0]}
    assert lag.take_received(3) == {(0, 0): [1, 2]}
    assert lag.take_received(3) == {}
    assert lag.take_received(None) == {(0, 0): [3]}, "there is no replica: none has to be waited for"
    tell(lag, ClippedPush(push(4)))
    assert lag.take_received(1) == {(0, 0): [4]}


def test_another_replica_has_all_that_was_told_before() -> None:
    lag = lag_of(1, "bsp")
    assert tell(lag, push(0), Clock(sender(), 1), Leave(sender(1)))[-1] == 3
    lag.restart()
    assert lag.num_needed == 0, "its frames are counted anew"
    assert tell(lag, push(1), Clock(sender(), 2), Clock(sender(), 3)) == [0, 0, 2]
    assert lag.take_received(1) == {(0, 0): [0, 1]}


@pytest.mark.parametrize(
    ("message", "may"),
    [
        (Held(push(0).id), True),
        (Applied(push(0).id), True),
        (Ticked(1), True),
        (Fetched(1, "w", 0, 0, 0, ()), True),
        (Replicated((1,)), True),
        (Closed(1, "w", 0, ()), True),
        (PushRefused(push(0).id, "NaN"), False),
        (Joined(0), False),
        (Left(), False),
        (WorkerRefused(sender(), "it has ended"), False),
        (Follow(1, 1, "w", 0), False),
        (RequestDone(1), False),
    ],
)
def test_which_messages_may_be_ahead(message: Any, may: bool) -> None:
    assert may_lag(message) is may

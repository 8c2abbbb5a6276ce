"""Every piece of work is done once, whichever worker dies, waits or begins anew."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.work_queue import Life, WorkAnswer, WorkPiece, WorkQueue, WorkRound

FIRST, SECOND = WorkRound(0, 0), WorkRound(0, 1)


def taken(work_queue: WorkQueue, rank: int, place: WorkRound, sizes: tuple[int, ...]) -> tuple[int, int] | str:
    """What a first life of a worker gets, as (home, index) or a word."""
    answer = work_queue.claim((rank, 0), place, sizes)
    assert answer is not None
    return (answer.home, answer.index) if answer.word == "piece" else answer.word


def test_a_worker_takes_its_own_pieces_and_then_those_of_the_slowest_from_behind() -> None:
    work_queue, sizes = WorkQueue(), (2, 3, 4)
    assert [taken(work_queue, 0, FIRST, sizes) for _ in range(6)] == [(0, 0), (0, 1), (2, 3), (1, 2), (2, 2), (1, 1)]
    work_queue.settle((0, 0))  # it is through
    assert [taken(work_queue, 2, FIRST, sizes) for _ in range(3)] == [(2, 0), (2, 1), (1, 0)]
    assert [taken(work_queue, rank, FIRST, sizes) for rank in range(3)] == ["rest"] * 3


def test_a_round_is_not_opened_again_for_late_workers() -> None:
    work_queue = WorkQueue()
    assert [taken(work_queue, 0, FIRST, (1, 1)) for _ in range(3)] == [(0, 0), (1, 0), "rest"]
    assert taken(work_queue, 0, SECOND, (1, 1)) == (0, 0)
    assert taken(work_queue, 1, FIRST, (1, 1)) == "rest"
    assert taken(work_queue, 1, SECOND, (1, 1)) == (1, 0)


def test_what_a_dead_worker_holds_comes_first_and_its_later_shares_are_for_the_others() -> None:
    work_queue = WorkQueue()
    assert [taken(work_queue, 1, FIRST, (1, 2)) for _ in range(2)] == [(1, 0), (1, 1)]
    assert [taken(work_queue, 0, FIRST, (1, 2)) for _ in range(2)] == [(0, 0), "rest"]
    assert work_queue.end_life((1, 0)) == [WorkPiece(FIRST, 1, 0), WorkPiece(FIRST, 1, 1)]
    got = [work_queue.claim((0, 0), SECOND, (1, 1)) for _ in range(5)]
    expected = [(FIRST, 1, 1, 3, True), (FIRST, 1, 0, 2, True), (SECOND, 0, 0, 1), (SECOND, 1, 0, 0)]
    assert got == [*(WorkAnswer("piece", *one) for one in expected), WorkAnswer("rest", SECOND)]


def test_what_is_settled_does_not_come_back() -> None:
    work_queue = WorkQueue()
    assert [taken(work_queue, 0, FIRST, (2,)) for _ in range(2)] == [(0, 0), (0, 1)]
    work_queue.settle((0, 0))
    assert work_queue.end_life((0, 0)) == []
    assert taken(work_queue, 1, FIRST, (2,)) == "rest"


def test_to_go_on_settles_the_rounds_before_and_not_the_one_that_is_gone_on_to() -> None:
    work_queue = WorkQueue()
    assert [taken(work_queue, 0, FIRST, (1,)), taken(work_queue, 0, SECOND, (1,))] == [(0, 0), (0, 0)]
    assert work_queue.end_life((0, 0)) == [WorkPiece(SECOND, 0, 0)]


def test_a_worker_that_leaves_an_epoch_before_its_end_has_ended_it_for_all() -> None:
    work_queue, sizes, later = WorkQueue(), (2, 2), WorkRound(1, 0)
    assert [taken(work_queue, rank, FIRST, sizes) for rank in (0, 1)] == [(0, 0), (1, 0)]
    assert taken(work_queue, 0, later, sizes) == (0, 0)
    assert work_queue.end_life((1, 0)) == []
    got = [work_queue.claim((0, 0), later, sizes) for _ in range(4)]
    assert [answer and answer.round for answer in got] == [later] * 4
    assert [answer and answer.word for answer in got] == ["piece"] * 3 + ["rest"]


def test_an_epoch_ends_when_all_is_settled_and_has_a_round_more_for_what_comes_back() -> None:
    work_queue = WorkQueue()
    assert [taken(work_queue, rank, FIRST, (1, 1, 1)) for rank in range(3)] == [(0, 0), (1, 0), (2, 0)]
    assert work_queue.claim((0, 0), SECOND, ()) is None, "two pieces are still worked on"
    work_queue.settle((1, 0))
    assert work_queue.claim((0, 0), SECOND, ()) is None
    work_queue.end_life((2, 0))
    assert work_queue.claim((0, 0), SECOND, ()) == WorkAnswer("piece", FIRST, 2, 0, again=True)
    assert [work_queue.claim((rank, 0), SECOND, ()) for rank in (0, 1)] == [WorkAnswer("rest", SECOND)] * 2, (
        "the same for all"
    )
    last = WorkRound(0, 2)
    assert work_queue.claim((1, 0), last, ()) is None, "the piece that came back is still worked on"
    assert [work_queue.claim((rank, 0), last, ()) for rank in (0, 1)] == [WorkAnswer("over", last)] * 2
    assert work_queue.claim((0, 0), WorkRound(1, 0), (1, 0, 0)) == WorkAnswer("piece", WorkRound(1, 0), 0, 0)


def test_a_worker_that_was_started_again_begins_where_the_hindmost_is() -> None:
    work_queue = WorkQueue()
    for place in (FIRST, SECOND):
        assert [taken(work_queue, rank, place, (1, 1)) for rank in range(2)] == [(0, 0), (1, 0)]
    work_queue.claim((0, 0), WorkRound(0, 2), (1, 1))
    work_queue.end_life((1, 0))
    work_queue.claim((2, 0), SECOND, (1, 1))
    assert work_queue.claim((1, 1), FIRST, (1, 1)) == WorkAnswer("elsewhere", SECOND)
    assert work_queue.claim((1, 1), SECOND, (1, 1)) == WorkAnswer("rest", SECOND)


def test_a_worker_that_was_started_again_begins_in_the_round_of_the_clock_at_which_it_joins() -> None:
    """Where all have finished the clock of a round, and none has come to the next, it is the first there."""
    for clock, round_ in ((7, FIRST), (8, SECOND)):
        work_queue = WorkQueue()
        for rank in range(2):
            assert work_queue.claim((rank, 0), FIRST, (1, 1, 0), clock=7) is not None
        work_queue.end_life((1, 0))
        assert work_queue.claim((1, 1), WorkRound(0, 0), (1, 1, 0), clock) == (
            WorkAnswer("elsewhere", SECOND) if round_ == SECOND else WorkAnswer("piece", FIRST, 1, 0, again=True)
        )


# -- time, in slices of a fast worker --------------------------------------------------------------------------------


def seconds(slices: int, num_rounds: int, speeds: tuple[float, ...], *, barrier: bool) -> float:
    """How long workers of such speeds take; with a barrier a round begins when all have finished the one before."""
    work_queue, sizes = WorkQueue(), (slices,) * len(speeds)
    waking = [(0.0, rank, 0) for rank in range(len(speeds))]  # when, which worker, in which round
    waiting: list[tuple[float, int, int]] = []
    ends: list[float] = []
    while waking:
        now, rank, number = heappop(waking)
        ends.append(now)
        answer = work_queue.claim((rank, 0), WorkRound(0, number), sizes) if number < num_rounds else None
        if answer is not None and answer.word == "piece":
            heappush(waking, (now + 1 / speeds[rank], rank, number))
        elif answer is not None:
            (waiting if barrier else waking).append((now, rank, number + 1))
            heapify(waking)
        if len(waiting) == len(speeds):
            waking = [(max(when for when, _, _ in waiting), rank, number) for _, rank, number in waiting]
            waiting = []
    return max(ends)


@pytest.mark.parametrize("slices", [5, 6, 8, 12, 24])
@pytest.mark.parametrize("speeds", [(1, 0.5, 1, 1), (1, 1, 0.25), (0.5, 0.5, 1, 1)], ids=str)
def test_a_clock_takes_as_long_as_all_speeds_together_allow(slices: int, speeds: tuple[float, ...]) -> None:
    ideal = slices * len(speeds) / sum(speeds)
    assert seconds(slices, 1, speeds, barrier=True) <= ideal + 1 / max(speeds), "the last slices go to the fast"
    many = 40 * ideal
    assert seconds(slices, 40, speeds, barrier=False) <= 1.02 * many + 1 / min(speeds), "no worker waits between clocks"


def test_a_slow_worker_leaves_the_last_piece_to_a_faster_one_that_is_still_at_work() -> None:
    work_queue, sizes = WorkQueue(), (4, 4)
    order = [1, 0, 0, 1, 0, 0, 0]  # worker 0 is twice as fast: it has taken five when worker 1 is through with two
    assert "rest" not in [taken(work_queue, rank, FIRST, sizes) for rank in order]
    assert taken(work_queue, 1, FIRST, sizes) == "rest"
    assert work_queue.claim((1, 0), SECOND, ()) is None, "nor does it take the piece from the next round"
    assert taken(work_queue, 0, FIRST, sizes) == (1, 2)


# -- whatever happens ------------------------------------------------------------------------------------------------


@dataclass
class Walker:
    """A worker that goes through the rounds of some epochs: `carried` is what its next update stands for."""

    life: Life
    place: WorkRound = FIRST
    clock: int = 0  # that it has begun
    has_come: bool = False
    carried: list[WorkPiece] = field(default_factory=list)
    has_finished: bool = False
    num_rounds: list[int] = field(default_factory=list)  # by epoch


def walk(
    walker: Walker, work_queue: WorkQueue, rounds: list[tuple[int, ...]], num_epochs: int, done: Counter[WorkPiece]
) -> None:
    """Take one more piece, or deliver those of this round and go on."""
    sizes = rounds[walker.place.number] if walker.place.number < len(rounds) else ()
    answer = work_queue.claim(walker.life, walker.place, sizes, walker.clock)
    if answer is None:
        return
    if answer.word == "elsewhere":
        walker.place = answer.round
        return
    if answer.word == "piece":
        assert answer.round <= walker.place
        walker.carried.append(WorkPiece(answer.round, answer.home, answer.index))
        return
    done.update(walker.carried)
    walker.carried = []
    work_queue.settle(walker.life)
    if answer.word == "over":
        walker.num_rounds.append(walker.place.number)
        walker.place = WorkRound(walker.place.epoch + 1, 0)
        walker.has_finished = walker.place.epoch == num_epochs
    else:
        walker.place, walker.clock = WorkRound(walker.place.epoch, walker.place.number + 1), walker.clock + 1


@given(st.data())
def test_whatever_happens_every_piece_is_done_exactly_once(data: st.DataObject) -> None:
    num_workers, num_epochs = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    shares = st.lists(st.integers(0, 3), min_size=num_workers, max_size=num_workers).map(tuple)
    rounds = data.draw(st.lists(shares, min_size=1, max_size=3))
    work_queue, done = WorkQueue(), Counter[WorkPiece]()
    clocks = dict[WorkRound, int]()  # that the workers of a round have begun
    walkers = [Walker((rank, 0)) for rank in range(num_workers)]
    deaths = data.draw(st.lists(st.integers(0, 40), max_size=num_workers - 1))
    for step in range(1000):
        if all(walker.has_finished for walker in walkers):
            break
        working = [walker for walker in walkers if not walker.has_finished]
        chosen = data.draw(st.sampled_from(working)) if step < 60 else working[step % len(working)]
        if step in deaths and len(walkers) > 1:
            walkers.remove(chosen)
            assert sorted(work_queue.end_life(chosen.life), key=str) == sorted(chosen.carried, key=str)
            rank, incarnation = chosen.life
            if data.draw(st.booleans()):
                walkers.append(Walker((rank, incarnation + 1)))
            continue
        if not chosen.has_come and chosen.life[1] > 0:  # it joins, at the slowest clock
            chosen.clock = min((other.clock for other in walkers if other.has_come), default=0)
        chosen.has_come = True
        walk(chosen, work_queue, rounds, num_epochs, done)
        if not chosen.has_finished:
            assert clocks.setdefault(chosen.place, chosen.clock) == chosen.clock, "all workers of a round are in step"
    else:
        pytest.fail(f"no worker comes to the end: {walkers}, {work_queue}")
    assert deaths or all(walker.num_rounds == [len(rounds)] * num_epochs for walker in walkers), "a clock more"
    everything = {
        WorkPiece(WorkRound(epoch, number), home, index)
        for epoch in range(num_epochs)
        for number, sizes in enumerate(rounds)
        for home, size in enumerate(sizes)
        for index in range(size)
    }
    assert done == Counter(dict.fromkeys(everything, 1))

"""Rounds are made when they are asked for, and are those of what is left of the epoch."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import EpochOrder, EpochRounds, num_slices


@given(
    num=st.integers(1, 40),
    workers=st.integers(1, 5),
    slices=st.integers(1, 4),
    start=st.integers(0, 20),
    drop_last=st.booleans(),
)
def test_rounds_are_the_batches_behind_the_start_in_turns(
    num: int, workers: int, slices: int, start: int, drop_last: bool
) -> None:
    batches = EpochOrder(num, 4, drop_last, shuffled=True).batches(0, 0)
    start = min(start, len(batches))
    rounds = EpochRounds(batches, workers, slices).starting(start)
    places = [
        (number, home, index)
        for number in range(len(rounds))
        for home, size in enumerate(rounds.sizes(number))
        for index in range(size)
    ]
    parts = [rounds.slice(*place) for place in places]
    assert all(parts), "none is empty"
    assert list(chain(*parts)) == list(chain(*batches[start:]))
    assert {len(rounds.sizes(number)) for number in range(len(rounds))} <= {workers}
    assert (len(rounds), rounds.sizes(len(rounds))) == (-(-(len(batches) - start) // workers), ())
    before = [rounds.num_before(number) for number in range(len(rounds) + 3)]
    assert before[: len(rounds)] == list(range(start, len(batches), workers))
    assert before[len(rounds) :] == [len(batches)] * 3
    for rank in range(workers):
        own = [part for part, (_, home, _) in zip(parts, places, strict=True) if home == rank]
        assert list(rounds.slices_of(rank, 0)) == own
        assert list(rounds.slices_of(rank, 0, 1)) == own[1:]
        assert num_slices(batches[start + rank :: workers], slices) == len(own)


def test_a_share_that_is_smaller_than_the_others_has_slices_of_about_their_size_or_none() -> None:
    rounds = EpochRounds(EpochOrder(9, 4, drop_last=False, shuffled=False).batches(0, 0), num_workers=2, slices=2)
    assert [rounds.sizes(number) for number in range(3)] == [(2, 2), (1, 0), ()]

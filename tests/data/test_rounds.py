"""Rounds are made when they are asked for, and are those of what is left of the epoch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import Order
from paceline.data.rounds import Rounds


@given(num=st.integers(1, 40), workers=st.integers(1, 5), slices=st.integers(1, 4), start=st.integers(0, 20))
def test_rounds_are_the_batches_behind_the_start_in_turns(num: int, workers: int, slices: int, start: int) -> None:
    batches = Order(num, 4, drop_last=False, shuffled=True).batches(0, 0)
    start = min(start, len(batches))
    rounds = Rounds(batches, workers, slices).starting(start)
    shares = [[share.indices for share in shares] for shares in rounds]
    assert [indices for shares in shares for indices in shares if indices] == list(batches[start:])
    assert [len(shares) for shares in shares] == [workers] * len(rounds)
    assert len(rounds) == -(-(len(batches) - start) // workers), "none is empty"
    before = [rounds.num_before(number) for number in range(len(rounds) + 3)]
    assert before[: len(rounds)] == list(range(start, len(batches), workers))
    assert before[len(rounds) :] == [len(batches)] * 3
    for share in rounds[0] if len(rounds) else []:
        assert [index for part in range(len(share)) for index in share.slice(part)] == share.indices


def test_there_is_no_round_behind_the_last() -> None:
    rounds = Rounds(Order(10, 4, drop_last=False, shuffled=False).batches(0, 0), num_workers=2, slices=1)
    assert [share.indices for share in rounds[-1]] == [[8, 9], []]
    assert [len(share) for share in rounds[1:][0]] == [1, 0]
    with pytest.raises(IndexError):
        rounds[2]

"""The recorded order of pieces: what comes next is known once it has repeated, and anew after it has changed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.update.rows.access_order import AccessOrder

ENOUGH = 1 << 20


def noted(pieces: Sequence[int], order: AccessOrder | None = None, max_bytes: int = ENOUGH) -> AccessOrder:
    order = order or AccessOrder(max_bytes)
    for piece in pieces:
        order.note(bytes([piece]))
    return order


def expected(order: AccessOrder, num: int) -> list[int | None]:
    found = [order.ahead(steps) for steps in range(num)]
    return [None if each is None else each[0] for each in found]


@st.composite
def cycles(draw: st.DrawFn) -> list[int]:
    """Pieces of an iteration; no two neighbours are equal, over its end, too."""
    pieces = draw(st.lists(st.integers(0, 4), min_size=2, max_size=12))
    kept = [piece for piece, before in zip(pieces, [None, *pieces], strict=False) if piece != before]
    return kept if len(kept) > 1 and kept[0] != kept[-1] else [*kept, 5]


def test_nothing_is_known_in_the_first_iteration() -> None:
    order = AccessOrder(ENOUGH)
    assert expected(order, 2) == [None, None]
    assert expected(noted([1, 2, 3], order), 2) == [None, None]


def test_the_second_iteration_is_known_from_its_first_piece_on() -> None:
    assert expected(noted([1, 2, 3, 1]), 4) == [2, 3, 1, 2]


def test_a_piece_that_occurs_twice_is_followed_by_both() -> None:
    forward_and_back = [1, 2, 3, 2]
    order = noted(forward_and_back * 2)
    for place, piece in enumerate(forward_and_back):
        assert expected(order, 1) == [piece], place
        noted([piece], order)


def test_a_piece_that_is_used_again_at_once_counts_once() -> None:
    assert expected(noted([1, 1, 2, 2, 2, 3, 1, 1, 1]), 3) == [2, 3, 1]


@given(cycle=cycles(), more=st.integers(0, 12))
def test_an_order_that_repeats_is_known_wherever_it_stands(cycle: list[int], more: int) -> None:
    order = noted(cycle * 2 + (cycle * 12)[:more])
    assert expected(order, 2 * len(cycle)) == [cycle[(more + step) % len(cycle)] for step in range(2 * len(cycle))]


@given(first=cycles(), second=cycles(), stop=st.integers(0, 12))
def test_an_order_that_changes_is_recorded_anew(first: list[int], second: list[int], stop: int) -> None:
    order = noted(first * 2 + first[:stop])
    noted([9] + second * 2, order)  # 9 is in neither, and in the way only until the new order has repeated
    noted(second * 2, order)
    assert expected(order, len(second)) == second


@given(cycle=cycles(), odd=st.integers(6, 9), place=st.integers(0, 12))
def test_a_piece_out_of_order_is_soon_made_up_for(cycle: list[int], odd: int, place: int) -> None:
    turned = [cycle[(place + step) % len(cycle)] for step in range(len(cycle))]
    order = noted([*cycle * 3, *(cycle * 12)[:place], odd, *turned * 2])
    assert expected(order, len(cycle)) == turned


def test_a_part_that_repeats_within_an_iteration_does_not_hide_the_rest() -> None:
    twice_forward_and_then_once_back = [1, 2, 3, 1, 2, 3, 2, 1, 2, 4]
    order = noted(twice_forward_and_then_once_back * 2)
    for place, piece in enumerate(twice_forward_and_then_once_back * 2):
        assert expected(order, 1) == [piece], place
        noted([piece], order)


@given(pieces=st.lists(st.binary(max_size=40), max_size=60), max_bytes=st.integers(0, 6000))
def test_a_record_stays_within_its_limit(pieces: list[bytes], max_bytes: int) -> None:
    order = AccessOrder(max_bytes)
    for piece in pieces:
        order.note(piece)
        assert sum(map(len, order._pieces)) + 288 * len(order._pieces) == order.size_bytes <= max_bytes


@pytest.mark.parametrize("num_fitting", [8, 9, 13, 50])
def test_an_order_that_repeats_stays_known_as_its_record_is_cut(num_fitting: int) -> None:
    order = AccessOrder(num_fitting * 289)
    noted([1, 2, 3, 4] * 2, order)
    for place, piece in enumerate([1, 2, 3, 4] * 20):
        assert expected(order, 4) == [(piece + step - 1) % 4 + 1 for step in range(4)], place
        noted([piece], order)


def test_an_order_too_long_for_its_limit_is_never_known() -> None:
    order = AccessOrder(3 * 289)
    for piece in [1, 2, 3, 4] * 5:
        noted([piece], order)
        assert expected(order, 1) == [None]


def test_with_no_room_nothing_is_known() -> None:
    order = noted([1, 2, 3] * 2)
    order.limit(0)
    assert expected(order, 1) == [None]
    assert order.size_bytes == 0
    order.limit(ENOUGH)
    assert expected(noted([4, 5, 4], order), 2) == [5, 4]

"""What waits to be sent: nothing is lost or sent twice, what is due goes first, then what the priority says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.update.rows.trials import AVAILABLE, BOTH, EXTREMES

from paceline.update.rows.ops import row_ops
from paceline.update.rows.pending import PendingRows, Priority, relative_magnitude

PRIORITIES: tuple[Priority, ...] = ("relative_magnitude", "random", "fifo")
IDS = st.lists(st.sampled_from(EXTREMES) | st.integers(0, 12), unique=True, max_size=8)
PUSHES = st.tuples(IDS, st.integers(-3, 3))
TAKES = st.tuples(st.integers(1, 6), st.integers(-1, 20))


def pending(priority: Priority = "relative_magnitude", ops: str = "", seed: int = 0) -> PendingRows:
    return PendingRows(2, torch.float64, row_ops(ops), priority, seed)


def add(rows: PendingRows, ids: list[int], clock: int, weights: list[float], value: float = 1.0) -> None:
    given_rows = torch.full((len(ids), 2), value, dtype=torch.float64)
    rows.add(torch.tensor(ids, dtype=torch.int64), given_rows, clock, torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("ops", AVAILABLE)
@settings(max_examples=20)
@given(steps=st.lists(PUSHES | TAKES, max_size=30))
def test_what_was_taken_and_what_waits_are_what_was_added(
    ops: str, priority: Priority, steps: list[tuple[object, int]]
) -> None:
    rows, waits, since, taken_sum, added_sum = pending(priority, ops), dict[int, float](), dict[int, int](), 0.0, 0.0
    for clock, (what, number) in enumerate(steps):
        if isinstance(what, list):
            add(rows, what, clock, [1.0] * len(what), float(number))
            for key in what:
                waits[key] = waits.get(key, 0.0) + number
                since.setdefault(key, clock)
            added_sum += number * len(what)
        else:
            assert isinstance(what, int)
            late = {key for key in waits if since[key] <= number}
            taken = rows.pop(what, number)
            ids = taken.ids.tolist()
            assert len(set(ids)) == len(ids) == min(what, len(waits))
            assert late <= set(ids) or set(ids) <= late  # what is due goes first
            assert [row[0] for row in taken.rows.tolist()] == [waits[key] for key in ids]
            for key in ids:
                taken_sum += waits.pop(key)
                del since[key]
        assert len(rows) == len(waits)
        assert rows.num_due(clock) == len(waits)
        assert rows.num_due(clock - 3) == sum(began <= clock - 3 for began in since.values())
        keys = torch.tensor([*EXTREMES, *range(13)])
        assert rows.read(keys)[:, 1].tolist() == [waits.get(key, 0.0) for key in keys.tolist()]
    rest = rows.pop(len(rows), 0)
    assert taken_sum + float(rest.rows[:, 0].sum()) == added_sum
    rows.close()


def test_the_rows_that_have_changed_most_since_they_were_sent_go_first() -> None:
    rows = pending()
    add(rows, [1, 2, 3], 0, [1.0, 5.0, 3.0])
    add(rows, [1, 3], 0, [3.0, 3.0])  # now 4, 5 and 6
    assert rows.pop(1, -1).ids.tolist() == [3]
    add(rows, [3], 0, [4.5])  # its weight began anew
    assert rows.pop(2, -1).ids.tolist() == [2, 3]
    assert rows.pop(9, -1).ids.tolist() == [1]


def test_first_in_first_out_goes_by_the_oldest_part_of_a_row() -> None:
    rows = pending("fifo")
    for key in (5, 6, 7, 5):
        add(rows, [key], 0, [float(key)])
    assert [rows.pop(1, -1).ids.tolist() for _ in range(3)] == [[5], [6], [7]]


def test_random_draws_give_every_row_its_chance_and_follow_the_seed() -> None:
    def draws(seed: int) -> list[int]:
        rows, drawn = pending("random", seed=seed), list[int]()
        for _ in range(400):
            add(rows, [1, 2, 3, 4], 0, [1e9, 1.0, 1.0, 1.0])
            drawn += rows.pop(1, -1).ids.tolist()
            rows.pop(9, -1)
        return drawn

    drawn = draws(3)
    assert all(70 < drawn.count(key) < 130 for key in (1, 2, 3, 4))
    assert drawn == draws(3) != draws(4)


@pytest.mark.parametrize("ops", BOTH)
def test_the_oldest_push_of_which_something_waits_is_known(ops: str) -> None:
    rows = pending("fifo", ops)
    assert rows.oldest_push == rows.num_pushes == 0
    add(rows, [1, 2], 0, [1.0, 1.0])
    add(rows, [2, 3], 1, [1.0, 1.0])
    assert (rows.oldest_push, rows.num_pushes) == (0, 2)
    rows.pop(2, -1)
    assert rows.oldest_push == 1
    rows.pop(1, -1)
    assert rows.oldest_push == 2


def test_relative_magnitude_takes_the_change_itself_where_the_value_is_zero_or_unknown() -> None:
    change = torch.tensor([[0.5, -0.5], [2.0, -3.0], [2.0, 1.0]])
    values = torch.tensor([[1.0, -0.25], [0.0, 0.0], [torch.nan, -4.0]])
    assert relative_magnitude(change, values).tolist() == [2.5, 5.0, 2.25]

"""The vector clock: m means that every member has finished the clocks 0 .. m - 1."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.membership import Clocks


def clocks(*values: int) -> Clocks:
    made = Clocks()
    for worker in range(len(values)):
        made.add(worker)
    for worker, value in enumerate(values):
        made.advance(worker, value)
    return made


def test_t1_slowest_counts_finished_clocks() -> None:
    assert clocks(0, 0).slowest == 0
    assert clocks(1, 0).slowest == 0
    assert clocks(1, 1).slowest == 1
    assert clocks(7, 3, 5).slowest == 3


def test_an_older_tick_changes_nothing() -> None:
    both = clocks(3, 2)
    both.advance(0, 1)
    assert (both.of(0), both.slowest) == (3, 2)


def test_t6_a_removed_worker_no_longer_holds_the_clock_which_may_jump() -> None:
    three = clocks(5, 0, 7)
    three.remove(1)
    assert three.slowest == 5
    three.remove(1)  # once more changes nothing
    assert three.slowest == 5
    assert 1 not in three


def test_t6_a_joiner_starts_at_the_slowest_clock() -> None:
    both = clocks(4, 9)
    assert both.add(2) == 4
    assert (both.of(2), both.slowest, len(both)) == (4, 4, 3)


def test_the_clock_stays_when_the_last_member_leaves() -> None:
    one = clocks(6)
    one.remove(0)
    assert one.slowest == 6
    assert one.add(1) == 6


def test_past_lists_the_workers_past_a_clock_in_rank_order() -> None:
    three = clocks(2, 1, 3)
    assert three.past(0) == [0, 1, 2]
    assert three.past(1) == [0, 2]
    assert three.past(3) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "advance"]), st.integers(0, 4), st.integers(0, 20)), max_size=60
    )
)
def test_it_equals_a_dictionary_and_never_goes_back(steps: list[tuple[str, int, int]]) -> None:
    real, model, floor = Clocks(), dict[int, int](), 0
    for what, worker, clock in steps:
        if what == "add" and worker not in model:
            real.add(worker)
            model[worker] = floor
        elif what == "remove":
            real.remove(worker)
            model.pop(worker, None)
        elif worker in model:
            real.advance(worker, clock)
            model[worker] = max(model[worker], clock)
        floor = max(floor, min(model.values(), default=floor))
        assert real.slowest == floor
        assert {worker: real.of(worker) for worker in model} == model
        assert real.num_past(clock) == len(real.past(clock)) == sum(own > clock for own in model.values())

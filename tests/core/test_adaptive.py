"""An adaptive bound: where it goes by what reads cost, and what it promises to each pull."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.cores import make_server, make_worker, of, pull, said, tick

from paceline.core.adaptive import WINDOW, AdaptiveBound
from paceline.core.consistency import Consistency, adaptive
from paceline.core.effects import BoundMoved, ReadDone, Serve
from paceline.core.events import Arrived, Died, WantClock, WantRead, Woke
from paceline.core.messages import Fetched, Pull
from paceline.core.server import ServerCore

NUM_WORKERS = 4


def play(
    bound: AdaptiveBound, num_windows: int, waiting: Callable[[int], float], lacking: Callable[[int], int]
) -> list[int]:
    """Have clocks of a second pass, with these costs at each bound; return where the bound was in each."""
    seen: list[int] = []
    start = bound._clock
    for clock in range(start + 1, start + num_windows * WINDOW + 1):
        share = waiting(bound.bound)
        bound.pass_time(clock - 1.0, 0, NUM_WORKERS)
        bound.pass_time(clock - 1.0 + share, NUM_WORKERS, NUM_WORKERS)
        bound.pass_time(float(clock), 0, NUM_WORKERS)
        bound.note_answer(lacking(bound.bound))
        bound.reach(clock)
        seen.append(bound.bound)
    return seen


def moves(seen: list[int]) -> int:
    return sum(before != after for before, after in pairwise(seen))


def mostly(seen: list[int]) -> int:
    return max(set(seen), key=seen.count)


def half(bound: int) -> int:
    return bound // 2


def same(bound: int) -> int:
    return bound


def test_it_rises_while_that_saves_more_time_than_it_costs_staleness() -> None:
    bound = AdaptiveBound(0, 8)
    seen = play(bound, 60, lambda at: 0.4 / (1 + at) ** 2, half)
    assert seen[0] == 0
    late = seen[len(seen) // 2 :]
    assert sum(at in (2, 4) for at in late) > 0.8 * len(late), "4 waits for 1.6 % of the time, and 2 for 4.4 %"
    assert moves(late) <= 12


def test_under_a_worker_that_is_always_slow_it_stays_at_its_lowest_and_tries_ever_more_rarely() -> None:
    seen = play(AdaptiveBound(1, 8), 200, lambda _: 0.4, half)
    assert set(seen) == {1, 2}
    assert sum(at == 1 for at in seen) > 0.9 * len(seen)
    assert 8 <= moves(seen) <= 26


def test_a_lower_bound_that_costs_more_is_tried_ever_more_rarely() -> None:
    seen = play(AdaptiveBound(0, 8), 200, lambda at: max(0.0, 0.4 - 0.2 * at), same)
    assert sum(at == 2 for at in seen) > 0.9 * len(seen)
    assert 8 <= moves(seen) <= 30


def test_where_no_worker_waits_it_never_moves() -> None:
    assert set(play(AdaptiveBound(0, 8), 40, lambda _: 0.0, half)) == {0}


def test_it_comes_down_when_the_straggler_has_gone_and_rises_when_one_comes() -> None:
    bound = AdaptiveBound(0, 8)
    assert mostly(play(bound, 40, lambda at: 0.5 / (1 + at), same)[-20 * WINDOW :]) == 4
    assert play(bound, 12, lambda _: 0.0, same)[-1] == 0
    assert mostly(play(bound, 20, lambda at: 0.5 / (1 + at), same)[-10 * WINDOW :]) == 4


def test_it_starts_at_its_lowest_and_reaches_its_highest_and_no_further() -> None:
    bound = AdaptiveBound(3, 7)
    assert bound.bound == 3
    seen = play(bound, 12, lambda at: 0.9 - at / 10, lambda _: 0)
    assert mostly(seen[-6 * WINDOW :]) == 7
    assert max(seen) == 7


@given(
    st.lists(
        st.tuples(
            st.floats(-1, 10), st.integers(0, 9), st.integers(1, 9), st.integers(-5, 1 << 60), st.integers(-2, 9)
        ),
        max_size=400,
    ),
    st.integers(0, 5),
    st.integers(1, 9),
)
def test_ssp6_nothing_that_is_observed_takes_it_out_of_its_range(
    events: list[tuple[float, int, int, int, int]], lowest: int, width: int
) -> None:
    bound, now, clock = AdaptiveBound(lowest, lowest + width), 0.0, 0
    for passed_s, num_waiting, num_workers, lacking, ticks in events:
        now, clock = now + passed_s, clock + ticks
        bound.pass_time(now, num_waiting, num_workers)
        bound.note_answer(lacking)
        before = bound.bound
        was = bound.reach(clock)
        assert lowest <= bound.bound <= lowest + width
        assert was == (before if bound.bound != before else None)
        assert 0.0 <= bound.seen.staleness <= lowest + width


# -- in a server ---------------------------------------------------------------------------------------------------


def step(core: ServerCore, clock: int, now: float, late_s: float) -> list[object]:
    """Have worker 0 finish a clock and read, and worker 1 do so later."""
    effects = [*core.handle(tick(0, clock), now), *core.handle(pull(0, clock, clock, max(0, clock - 8)), now)]
    now += late_s
    return [*effects, *core.handle(tick(1, clock), now), *core.handle(pull(1, clock, clock, max(0, clock - 8)), now)]


def risen() -> tuple[ServerCore, int]:
    """Return a server whose bound has moved from 0 to 1, and the clock that both workers have finished."""
    core = make_server(adaptive(0, 8))
    for clock in range(1, 4 * WINDOW):
        if of(step(core, clock, float(clock), 0.5), BoundMoved):
            return core, clock
    raise AssertionError("the bound has not moved although a worker waits half of the time")


def test_ssp6_a_pull_waits_for_the_bound_in_force_and_not_for_the_highest() -> None:
    core = make_server(adaptive(0, 8))
    core.handle(tick(0, 1), 0.0)
    assert said(core.handle(pull(0, 1, 1, 0), 0.0), Fetched) == []
    (answer,) = said(core.handle(tick(1, 1), 0.1), Fetched)
    assert answer.clock == 1


def test_a_move_is_told_with_what_was_seen() -> None:
    core = make_server(adaptive(0, 8))
    effects = [effect for clock in range(1, 2 * WINDOW) for effect in step(core, clock, float(clock), 0.5)]
    moved = of(effects, BoundMoved)[0]
    assert (moved.table, moved.before, moved.bound) == ("w", 0, 1)
    assert moved.waiting == pytest.approx(0.25, abs=0.01)
    assert moved.staleness == 0.0


def test_ssp6_a_pull_that_waits_keeps_the_bound_of_its_arrival_and_so_does_its_copy() -> None:
    core, clock = risen()
    core.tables["w"].adaptive.bound = 0  # type: ignore[union-attr]
    core.handle(tick(0, clock + 1), 100.0)
    assert said(core.handle(pull(0, 900, clock + 1, 0), 100.0), Fetched) == []
    core.tables["w"].adaptive.bound = 1  # type: ignore[union-attr]
    assert said(core.handle(pull(0, 900, clock + 1, 0), 100.1), Fetched) == [], "a copy is let in under a later bound"
    assert said(core.handle(pull(0, 901, clock + 1, 0), 100.2), Fetched) != [], "a pull of its own is not"


def test_a_read_that_asks_for_more_than_the_bound_gets_it() -> None:
    core, clock = risen()
    core.handle(tick(0, clock + 1), 100.0)
    assert said(core.handle(pull(0, 900, clock + 1, clock + 1), 100.0), Fetched) == []


def test_only_reads_that_wait_for_others_count_and_each_worker_once() -> None:
    core = make_server(adaptive(0, 8))
    bound = core.tables["w"].adaptive
    assert bound is not None
    core.handle(tick(0, 1), 0.0)
    core.handle(pull(0, 1, 1, 0), 1.0)
    core.handle(tick(1, 1), 3.0)
    core.handle(tick(1, 2), 5.0)
    assert (bound._waiting_s, bound._worker_s) == (2.0, 10.0)


def test_the_time_in_which_a_server_was_stopped_does_not_count() -> None:
    core = make_server(adaptive(0, 8))
    bound = core.tables["w"].adaptive
    assert bound is not None
    core.handle(tick(0, 1), 0.0)
    core.handle(pull(0, 1, 1, 0), 1.0)
    core.handle(Woke(), 500.0)
    core.handle(tick(1, 1), 501.0)
    assert (bound._waiting_s, bound._worker_s) == (1.0, 2.0)


def test_workers_that_are_gone_wait_no_more() -> None:
    core = make_server(adaptive(0, 8), workers=(0, 1, 2))
    core.handle(tick(0, 1), 0.0)
    core.handle(pull(0, 1, 1, 0), 0.0)
    core.handle(Died(0, 0, "killed"), 1.0)
    core.handle(tick(1, 1), 11.0)
    bound = core.tables["w"].adaptive
    assert bound is not None
    assert (bound._waiting_s, bound._worker_s) == (1.0, 3.0 + 20.0)


# -- in a worker ---------------------------------------------------------------------------------------------------


def test_ssp6_a_cached_read_keeps_the_lowest_bound_as_a_worker_does_not_know_the_one_in_force() -> None:
    core = make_worker(adaptive(1, 8))
    core.handle(WantRead("w"), 0.0)
    core.handle(Arrived(0, Fetched(1, "w", 0, 0, 0, ())), 0.0)
    core.handle(WantClock(), 0.0)
    assert of(core.handle(WantRead("w", refresh=False), 0.0), ReadDone)[0].source == "cache"
    core.handle(WantClock(), 0.0)
    asked = said(core.handle(WantRead("w", refresh=False), 0.0), Pull)
    assert [(each.clock, each.needs) for each in asked] == [(2, 0)]
    (done,) = of(core.handle(Arrived(0, Fetched(3, "w", 0, 0, 0, ())), 0.0), ReadDone)
    assert (done.clock, done.source) == (0, "fetch")


def test_an_exact_read_is_exact() -> None:
    core = make_worker(adaptive(0, 8))
    core.handle(WantClock(), 0.0)
    (asked,) = said(core.handle(WantRead("w", exact=True), 0.0), Pull)
    assert asked.needs == 1


@pytest.mark.parametrize("policy", [adaptive(0, 4), Consistency(4, "on_clock", lowest=0)])
def test_both_kinds_of_tables_have_it(policy: Consistency) -> None:
    core = make_server(policy)
    core.handle(tick(0, 1), 0.0)
    assert of(core.handle(pull(0, 1, 1, 0), 0.0), Serve) == []
    assert of(core.handle(tick(1, 1), 0.1), Serve) != []

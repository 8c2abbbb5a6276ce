"""What the simulator cannot see, asked of the cores directly; each check raises AssertionError."""

from __future__ import annotations

from collections.abc import Callable

from tests.core import test_adaptive as adaptive_bounds
from tests.core.cores import make_server, make_worker, of, pull, push, push_id, said, sender, tick

from paceline.core.consistency import Consistency, asynchronous, backup, bsp, essp, ssp
from paceline.core.effects import Apply, Fail, Serve
from paceline.core.events import (
    Arrived,
    ClippedPush,
    Connected,
    Declared,
    Died,
    Disconnected,
    Measured,
    Timeout,
    WantClock,
    WantJoin,
    WantPush,
    WantRead,
)
from paceline.core.exactly_once import WINDOW
from paceline.core.messages import (
    Clock,
    Closed,
    Delivered,
    Fetched,
    Follow,
    Held,
    Join,
    Joined,
    PushRefused,
    Taken,
    Ticked,
)


def generations() -> None:
    assert of(make_server(ssp(1)).handle(push(0, 0, 0, generation=2), 0.0), Apply) == []


def attempts() -> None:
    core = make_worker(max_attempts=3)
    core.handle(WantPush("w"), 0.0)
    effects = [effect for _ in range(5) for effect in core.handle(Timeout(), core.next_deadline() or 0.0)]
    assert of(effects, Fail)


def ledger_size() -> None:
    core = make_server(asynchronous(), workers=(0,))
    for seq in range(2000):
        assert of(core.handle(push(0, seq, seq, settled=seq), 0.0), Apply)
    (values,) = of(core.handle(pull(0, 1, 0, 0), 0.0), Serve)
    assert len(values.message.includes) == 1


def late_copies() -> None:
    core = make_server(asynchronous(), workers=(0,))
    core.handle(push(0, 0, 0), 0.0)
    core.handle(push(0, 1, 0, settled=1), 0.0)
    assert core.handle(push(0, 0, 0), 0.0) == []


def work_queue() -> None:
    core = make_server(ssp(1))
    core.handle(Disconnected(0, 0), 0.0)
    core.handle(Join(sender(0)), 1.0)
    assert core.handle(Timeout(), 100.0) == []


def late_joins() -> None:
    core = make_server(ssp(1))
    core.handle(Died(2, 0, "killed"), 0.0)
    assert said(core.handle(Join(sender(2)), 0.0), Joined) == []


def joins_again() -> None:
    core = make_worker(num_servers=2, joined=False)
    core.handle(WantJoin(), 0.0)
    core.handle(Arrived(0, Joined(0)), 0.0)
    assert said(core.handle(Connected(0), 0.0), Join)


def first_clocks() -> None:
    core = make_worker(num_servers=2, joined=False)
    core.handle(WantJoin(), 0.0)
    core.handle(Arrived(0, Joined(3)), 0.0)
    core.handle(Arrived(1, Joined(5)), 0.0)
    assert core.clock == 5


def deliveries() -> None:
    core = make_server(essp(0), workers=(0,))
    core.handle(pull(0, 1, 0, needs=0), 0.0)
    assert len(said(core.handle(tick(0, 1), 0.0), Delivered)) == 1
    assert said(core.handle(tick(0, 2), 0.0), Delivered) == []
    assert [m.clock for m in said(core.handle(Taken(sender(0), "w", 1), 0.0), Delivered)] == [2]
    assert said(core.handle(tick(0, 3), 0.0), Delivered) == []
    assert said(core.handle(Taken(sender(0), "w", 1), 0.0), Delivered) == []


def older_values() -> None:
    core = make_worker(asynchronous())
    core.handle(WantRead("w"), 0.0)
    core.handle(Arrived(0, Fetched(1, "w", 2, 9, 0, ())), 0.0)
    assert core.handle(Arrived(0, Fetched(1, "w", 2, 8, 0, ())), 0.0) == []


def versions() -> None:
    core = make_server(ssp(1))
    for seq in (0, 1):
        core.handle(push(0, seq, 0), 0.0)
    assert [m.version for m in said(core.handle(pull(0, 1, 0, 0), 0.0), Fetched)] == [2]


def closed_clocks() -> None:
    core = make_server(backup(1), workers=(0, 1, 2))
    for worker in (0, 1):
        core.handle(tick(worker, 3), 0.0)
    assert said(core.handle(Join(sender(3)), 0.0), Joined) == [Joined(3)]


def torn_clocks() -> None:
    follower = make_server(bsp(), server=1, num_servers=2)
    for worker in (0, 1):
        follower.handle(push(worker, 0, 0), 0.0)
    follower.handle(Died(1, 0, "killed"), 0.0)
    effects = follower.handle(Closed(1, "w", 0, ((0, 0), (1, 0))), 0.0)
    assert [len(effect.ids) for effect in of(effects, Apply)] == [2]


def one_norm() -> None:
    lead = make_server(bsp(), num_servers=3)
    for worker in (0, 1):
        lead.handle(ClippedPush(push(worker, 0, 0)), 0.0)
        lead.handle(tick(worker, 1), 0.0)
    lead.handle(Died(1, 0, "killed"), 0.0)
    lead.handle(Measured("w", 0, 2.0), 0.0)
    assert of(lead.handle(Follow(1, 1, "w", 0, 3.0), 0.0), Apply) == []
    effects = lead.handle(Follow(1, 2, "w", 0, 6.0), 0.0)
    assert of(effects, Apply) == [Apply("w", (push_id(0, 0), push_id(1, 0)), 7.0)]


def ticks() -> None:
    core = make_worker()
    for _ in range(2):
        core.handle(WantClock(), 0.0)
    core.handle(Arrived(0, Ticked(1)), 0.0)
    assert said(core.handle(Timeout(), 1.0), Clock) == [tick(0, 2)]


def jumps() -> None:
    core = make_worker(backup(1))
    core.handle(WantRead("w"), 0.0)
    core.handle(Arrived(0, Fetched(1, "w", 4, 0, 0, ())), 0.0)
    assert core.clock == 4


def withdrawals() -> None:
    core = make_worker(Consistency(bound=None, visible="on_clock"), num_servers=2)
    core.handle(WantPush("w"), 0.0)
    core.handle(WantClock(), 0.0)
    core.handle(Arrived(0, Held(push_id(0, 0))), 0.0)
    core.handle(Arrived(1, PushRefused(push_id(0, 0), "nan")), 0.0)
    core.handle(Arrived(1, Ticked(1)), 0.0)
    assert said(core.handle(WantClock(), 0.0), Clock)[0].withdrawn


def joiners() -> None:
    core = make_server(backup(1), workers=(0, 1, 2))
    core.handle(Declared("s", ssp(0)), 0.0)
    for worker in (0, 1):
        core.handle(tick(worker, 3), 0.0)
    core.handle(Join(sender(3)), 0.0)
    core.handle(pull(0, 1, 3, needs=3, table="s"), 0.0)
    assert said(core.handle(Died(2, 0, "killed"), 0.0), Fetched)


def windows() -> None:
    core = make_worker(asynchronous())
    for _ in range(WINDOW):
        assert core.may_push("w")
        core.handle(WantPush("w"), 0.0)
    assert not core.may_push("w")


def patience() -> None:
    core = make_worker(ssp(0), max_attempts=3)
    core.handle(WantRead("w"), 0.0)
    assert not of([e for _ in range(9) for e in core.handle(Timeout(), core.next_deadline() or 0.0)], Fail)


CHECKS: tuple[Callable[[], None], ...] = (
    generations,
    attempts,
    ledger_size,
    late_copies,
    work_queue,
    late_joins,
    joins_again,
    first_clocks,
    deliveries,
    older_values,
    versions,
    closed_clocks,
    torn_clocks,
    one_norm,
    ticks,
    jumps,
    withdrawals,
    joiners,
    windows,
    patience,
    adaptive_bounds.test_it_rises_while_that_saves_more_time_than_it_costs_staleness,
    adaptive_bounds.test_under_a_worker_that_is_always_slow_it_stays_at_its_lowest_and_tries_ever_more_rarely,
    adaptive_bounds.test_a_lower_bound_that_costs_more_is_tried_ever_more_rarely,
    adaptive_bounds.test_where_no_worker_waits_it_never_moves,
    adaptive_bounds.test_it_comes_down_when_the_straggler_has_gone_and_rises_when_one_comes,
    adaptive_bounds.test_it_starts_at_its_lowest_and_reaches_its_highest_and_no_further,
    adaptive_bounds.test_ssp6_a_pull_waits_for_the_bound_in_force_and_not_for_the_highest,
    adaptive_bounds.test_ssp6_a_pull_that_waits_keeps_the_bound_of_its_arrival_and_so_does_its_copy,
    adaptive_bounds.test_a_read_that_asks_for_more_than_the_bound_gets_it,
    adaptive_bounds.test_only_reads_that_wait_for_others_count_and_each_worker_once,
    adaptive_bounds.test_the_time_in_which_a_server_was_stopped_does_not_count,
    adaptive_bounds.test_ssp6_a_cached_read_keeps_the_lowest_bound_as_a_worker_does_not_know_the_one_in_force,
)

"""A server core and reads: answered once the clock allows it, never before, and none is forgotten."""

import pytest
from tests.core.cores import make_server, of, pull, push, push_id, said, sender, tick

from paceline.core.consistency import Consistency, asynchronous, backup, bsp, essp, ssp
from paceline.core.effects import Advanced, Apply, Serve, ServerEffect
from paceline.core.events import Declared, Died
from paceline.core.messages import Applied, Delivered, Fetched, Leave, PullRefused, Taken, Ticked, WorkerRefused


def test_t1_a_read_waits_for_exactly_the_clocks_below_c_minus_s() -> None:
    core = make_server(ssp(1))
    core.handle(tick(0, 1), 0.0)
    core.handle(tick(0, 2), 0.0)
    assert core.handle(pull(0, 1, 2, needs=1), 0.0) == []
    assert [type(m) for m in said(core.handle(tick(1, 1), 0.0), Fetched)] == [Fetched]


def test_t2_the_need_is_the_readers_own_not_the_slowest_clock() -> None:
    core = make_server(ssp(1))
    assert said(core.handle(pull(0, 1, 0, needs=0), 0.0), Fetched)[0].clock == 0
    assert core.handle(pull(1, 1, 3, needs=2), 0.0) == []


def tables_advanced(effects: list[ServerEffect]) -> list[str]:
    return [effect.table for effect in of(effects, Advanced)]


def test_clocks_pass_a_table_by_that_is_not_used() -> None:
    core = make_server(bsp(), workers=(0,))
    core.handle(Declared("v", bsp()), 0.0)
    core.handle(push(0, 0, 0), 0.0)
    assert tables_advanced(core.handle(tick(0, 1), 0.0)) == ["w", "v"]
    core.handle(push(0, 1, 1), 0.0)
    assert tables_advanced(core.handle(tick(0, 2), 0.0)) == ["w"]
    assert core.clock_of("v") == 2
    effects = core.handle(pull(0, 1, 2, needs=2, table="v"), 0.0)
    assert effects[0] == Advanced("v", 2)
    assert said(effects, Fetched)[0].clock == 2


@pytest.mark.parametrize("policy", [bsp(), ssp(1)], ids=str)
def test_a_reader_or_a_push_of_an_unused_table_finds_it_at_the_clock_of_the_others(policy: Consistency) -> None:
    core = make_server(policy)
    for clock in (1, 2, 3):
        for worker in (0, 1):
            core.handle(tick(worker, clock), 0.0)
    core.handle(push(0, 0, 3), 0.0)
    core.handle(tick(0, 4), 0.0)
    assert not of(core.handle(pull(0, 1, 5, needs=4), 0.0), Serve)
    effects = core.handle(tick(1, 4), 0.0)
    assert [found.clock for found in said(effects, Fetched)] == [4]
    assert Advanced("w", 4) in effects


@pytest.mark.parametrize(
    ("policy", "num_servers"), [(backup(1), 1), (bsp(), 2)], ids=["a quorum closes clocks", "another server follows"]
)
def test_clocks_that_not_all_close_together_pass_no_table_by(policy: Consistency, num_servers: int) -> None:
    core = make_server(policy, workers=(0,), num_servers=num_servers)
    for clock in (1, 2, 3):
        assert Advanced("w", clock) in core.handle(tick(0, clock), 0.0)


def test_t3_a_server_without_pushes_advances_by_ticks_alone() -> None:
    core = make_server(bsp())
    core.handle(tick(0, 1), 0.0)
    effects = core.handle(tick(1, 1), 0.0)
    assert Advanced("w", 1) in effects
    assert of(effects, Apply) == []


def test_t4_a_jump_of_the_slowest_clock_releases_every_waiter_it_passes() -> None:
    core = make_server(ssp(1), workers=(0, 1, 2))
    for worker, clock in ((1, 2), (2, 3)):
        core.handle(tick(worker, clock), 0.0)
        assert core.handle(pull(worker, 1, clock, needs=clock - 1), 0.0) == []
    effects = core.handle(Died(0, 0, "killed"), 0.0)  # from 0 to 2 at once
    assert [(effect.worker, effect.message.clock) for effect in of(effects, Serve)] == [(1, 2), (2, 2)]


def test_t4_a_multi_clock_tick_releases_waiters_of_the_skipped_clocks() -> None:
    core = make_server(ssp(0), workers=(0, 1, 2))
    core.handle(tick(1, 1), 0.0)
    core.handle(pull(1, 1, 1, needs=1), 0.0)
    core.handle(tick(2, 2), 0.0)
    core.handle(pull(2, 1, 2, needs=2), 0.0)
    core.handle(tick(1, 4), 0.0)
    effects = core.handle(tick(0, 4), 0.0)  # from 0 to 2 at once
    assert [effect.worker for effect in of(effects, Serve)] == [1, 2]


def test_t6_the_leave_of_the_slowest_releases_its_waiting_readers() -> None:
    core = make_server(ssp(0))
    core.handle(tick(0, 1), 0.0)
    core.handle(pull(0, 1, 1, needs=1), 0.0)
    assert [effect.worker for effect in of(core.handle(Leave(sender(1)), 0.0), Serve)] == [0]


def test_an_asynchronous_read_never_waits() -> None:
    core = make_server(asynchronous())
    assert said(core.handle(pull(0, 1, 99, needs=asynchronous().needs(99)), 0.0), Fetched)


def test_bsp2_the_values_of_a_closed_clock_are_served_before_the_next_one_starts() -> None:
    core = make_server(bsp())
    core.handle(push(0, 0, 0), 0.0)
    core.handle(push(1, 0, 0), 0.0)
    core.handle(tick(0, 1), 0.0)
    core.handle(pull(0, 1, 1, needs=1), 0.0)
    effects = core.handle(tick(1, 1), 0.0)
    kinds = [type(getattr(effect, "message", effect)) for effect in effects]
    assert kinds == [Ticked, Apply, Applied, Advanced, Fetched]  # the values of worker 0 say that its push is applied


def test_t21_bsp_does_not_show_an_early_update_of_the_next_clock_and_ssp_0_does() -> None:
    for consistency, version in ((bsp(), 0), (ssp(0), 1)):
        core = make_server(consistency)
        core.handle(push(1, 0, 0), 0.0)
        assert said(core.handle(pull(0, 1, 0, needs=0), 0.0), Fetched)[0].version == version


def test_t9_a_reply_says_which_of_the_readers_own_pushes_are_in() -> None:
    core = make_server(ssp(1))
    core.handle(push(0, 0, 0), 0.0)
    core.handle(push(0, 2, 0, settled=1), 0.0)  # number 1 is still on its way
    (fetched,) = said(core.handle(pull(0, 1, 0, needs=0), 0.0), Fetched)
    assert (fetched.settled, fetched.includes) == (1, (2,))


def test_t10_values_are_applied_before_the_clock_and_both_before_the_delivery() -> None:
    core = make_server(essp(1))
    for worker in (0, 1):
        core.handle(pull(worker, 1, 0, needs=0), 0.0)
        core.handle(push(worker, 0, 0), 0.0)
    core.handle(tick(0, 1), 0.0)
    effects = core.handle(tick(1, 1), 0.0)
    assert [type(effect) for effect in effects[1:]] == [Advanced, Serve, Serve]
    assert [(m.clock, m.version) for m in said(effects, Delivered)] == [(1, 2), (1, 2)]


def test_t10_an_update_between_the_reply_and_the_next_clock_is_not_lost() -> None:
    core = make_server(essp(0))
    core.handle(pull(0, 1, 0, needs=0), 0.0)
    core.handle(push(1, 0, 0), 0.0)
    core.handle(tick(1, 1), 0.0)
    effects = core.handle(tick(0, 1), 0.0)
    assert [(m.clock, m.version) for m in said(effects, Delivered)] == [(1, 1)]


def test_t10_a_reader_that_waited_is_a_subscriber_from_its_reply_on() -> None:
    core = make_server(essp(0))
    core.handle(tick(0, 1), 0.0)
    core.handle(pull(0, 1, 1, needs=1), 0.0)
    assert said(core.handle(tick(1, 1), 0.0), Delivered) == []  # it gets its reply, not that and a delivery
    core.handle(tick(0, 2), 0.0)
    assert [effect.worker for effect in of(core.handle(tick(1, 2), 0.0), Serve)] == [0]


def test_essp_sends_a_busy_subscriber_only_the_newest_values() -> None:
    core = make_server(essp(0), workers=(0,))
    core.handle(pull(0, 1, 0, needs=0), 0.0)
    assert [m.clock for m in said(core.handle(tick(0, 1), 0.0), Delivered)] == [1]
    for clock in (2, 3, 4):
        assert said(core.handle(tick(0, clock), 0.0), Delivered) == []
    assert [m.clock for m in said(core.handle(Taken(sender(0), "w", 1), 0.0), Delivered)] == [4]
    assert said(core.handle(Taken(sender(0), "w", 4), 0.0), Delivered) == []


def test_bsp_values_can_be_delivered_too() -> None:
    core = make_server(Consistency(0, "on_clock", deliver="on_clock"))
    core.handle(pull(0, 1, 0, needs=0), 0.0)
    for worker in (0, 1):
        core.handle(push(worker, 0, 0), 0.0)
        effects = core.handle(tick(worker, 1), 0.0)
    assert [(m.clock, m.includes) for m in said(effects, Delivered)] == [(1, (0,))]


def test_a_pull_of_an_unknown_table_is_refused() -> None:
    (refused,) = said(make_server().handle(pull(0, 4, 0, 0, table="x"), 0.0), PullRefused)
    assert (refused.request, refused.reason) == (4, "there is no table 'x' on server 0; tables: w")


def test_a_stranger_is_served_nothing() -> None:
    core = make_server()
    for event in (pull(7, 1, 0, 0), tick(7, 1), Taken(sender(7), "w", 1)):
        assert [m.sender for m in said(core.handle(event, 0.0), WorkerRefused)] == [sender(7)]
    assert core.clock_of("w") == 0


def test_the_number_of_a_push_does_not_depend_on_other_workers() -> None:
    core = make_server(ssp(1))
    core.handle(push(0, 0, 0), 0.0)
    assert said(core.handle(push(1, 0, 0), 0.0), Applied) == [Applied(push_id(1, 0))]

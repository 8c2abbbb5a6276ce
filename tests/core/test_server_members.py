"""A server core and its members, which come, go, die and come back, and what that does to the others."""

from tests.core.cores import make_server, of, pull, push, push_id, said, sender, tick

from paceline.core.consistency import asynchronous, backup, bsp, ssp
from paceline.core.effects import Apply, Discard, MembershipChanged, Reply, Serve
from paceline.core.events import Declared, Died, Disconnected, Timeout, Woke
from paceline.core.messages import (
    Applied,
    Fetched,
    Held,
    Join,
    Joined,
    Leave,
    Left,
    PushRefused,
    Ticked,
    WorkerRefused,
)
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings


def test_t6_expected_workers_hold_the_clock_until_they_are_overdue() -> None:
    core = make_server(ssp(0), joined=False)
    core.handle(Join(sender(0)), 0.0)
    core.handle(tick(0, 1), 0.0)
    assert core.handle(pull(0, 1, 1, needs=1), 0.0) == []
    assert core.next_deadline() == 60.0
    effects = core.handle(Timeout(), 60.0)
    assert of(effects, MembershipChanged) == [MembershipChanged(1, 0, "died", "it did not join within 60 s")]
    assert len(of(effects, Serve)) == 1
    assert core.next_deadline() is None


def test_a_join_is_answered_again_with_the_same_clock() -> None:
    core = make_server(ssp(1), workers=(0,))
    core.handle(tick(0, 5), 0.0)
    assert core.handle(Join(sender(0)), 0.0) == [Reply(0, 0, Joined(0))]


def test_t6_a_joiner_starts_at_the_slowest_clock_and_holds_the_others_from_there() -> None:
    core = make_server(ssp(0))
    for worker in (0, 1):
        core.handle(tick(worker, 4 + worker), 0.0)
    effects = core.handle(Join(sender(2)), 0.0)
    assert effects == [MembershipChanged(2, 0, "joined"), Reply(2, 0, Joined(4))]
    core.handle(tick(0, 5), 0.0)
    assert core.handle(pull(0, 1, 5, needs=5), 0.0) == []


def test_a_job_that_goes_on_begins_where_it_ended() -> None:
    core = ServerCore(ServerSettings(0, 1, workers=(0,), clock=7), started=0.0)
    core.handle(Declared("w", bsp()), 0.0)
    assert [reply.message for reply in of(core.handle(Join(sender(0)), 0.0), Reply)] == [Joined(7)]
    assert [reply.message for reply in of(core.handle(Join(sender(5)), 0.0), Reply)] == [Joined(7)]
    assert core.clock_of("w") == 7
    core.handle(tick(0, 8), 0.0)
    core.handle(tick(5, 8), 0.0)
    assert core.clock_of("w") == 8


def test_t6_a_joiner_does_not_start_in_a_clock_that_a_quorum_has_closed() -> None:
    core = make_server(backup(1), workers=(0, 1, 2))
    for worker in (0, 1):
        core.handle(tick(worker, 3), 0.0)
    assert said(core.handle(Join(sender(3)), 0.0), Joined) == [Joined(3)]


def test_t6_the_only_worker_starts_where_a_quorum_is_and_reads_all_tables_there() -> None:
    core = make_server(backup(1), workers=(0, 1, 2))
    core.handle(Declared("b", bsp()), 0.0)
    for worker in (0, 1):
        core.handle(tick(worker, 6), 0.0)
    core.handle(tick(2, 4), 0.0)
    for worker in (0, 1, 2):  # the last one leaves "b" two clocks behind "w"
        core.handle(Leave(sender(worker)), 0.0)
    assert (core.clock_of("w"), core.clock_of("b")) == (6, 4)
    assert said(core.handle(Join(sender(3)), 0.0), Joined) == [Joined(6)]
    assert core.clock_of("b") == 6
    assert len(of(core.handle(pull(3, 1, 6, needs=6, table="b"), 0.0), Serve)) == 1


def test_t6_the_lease_of_a_lost_connection_ends_in_a_release() -> None:
    core = make_server(ssp(0))
    core.handle(tick(0, 1), 0.0)
    core.handle(pull(0, 1, 1, needs=1), 0.0)
    assert core.handle(Disconnected(1, 0), 10.0) == []
    assert core.next_deadline() == 15.0
    assert core.handle(Timeout(), 14.9) == []
    effects = core.handle(Timeout(), 15.0)
    assert of(effects, MembershipChanged) == [MembershipChanged(1, 0, "died", "it did not come back within 5 s")]
    assert [type(m) for m in said(effects, Fetched)] == [Fetched]


def test_a_worker_that_comes_back_within_its_lease_stays() -> None:
    core = make_server(ssp(0))
    core.handle(push(1, 0, 0), 0.0)
    core.handle(Disconnected(1, 0), 0.0)
    assert core.handle(Join(sender(1)), 4.0) == [Reply(1, 0, Joined(0))]
    assert core.next_deadline() is None
    assert core.handle(push(1, 0, 0), 5.0) == [Reply(1, 0, Applied(push_id(1, 0)))]


def test_a_lost_connection_of_a_former_life_or_of_a_stranger_changes_nothing() -> None:
    core = make_server(ssp(0))
    core.handle(Join(sender(1, 1)), 0.0)
    core.handle(Disconnected(1, 0), 0.0)
    core.handle(Disconnected(9, 0), 0.0)
    assert core.next_deadline() is None


def test_m2_a_zombie_is_fenced_after_its_lease() -> None:
    core = make_server(ssp(0))
    core.handle(Disconnected(1, 0), 0.0)
    core.handle(Timeout(), 5.0)
    for event in (push(1, 0, 0), tick(1, 1), pull(1, 1, 0, 0), Join(sender(1))):
        effects = core.handle(event, 6.0)
        assert of(effects, Apply) == []
        assert "worker 1 has ended since it joined (incarnation 0 is over)" in said(effects, WorkerRefused)[0].reason


def test_m2_a_restart_replaces_a_life_that_seems_alive_and_fences_it() -> None:
    core = make_server(ssp(0))
    core.handle(push(1, 0, 0), 0.0)
    effects = core.handle(Join(sender(1, 1)), 0.0)
    assert [(m.incarnation, m.change) for m in of(effects, MembershipChanged)] == [(0, "died"), (1, "joined")]
    assert of(core.handle(push(1, 1, 0), 0.0), Apply) == []
    assert of(core.handle(push(1, 0, 0, incarnation=1), 0.0), Apply) == [Apply("w", (push_id(1, 0, 1),))]
    (refused,) = said(core.handle(Join(sender(1, 0)), 0.0), WorkerRefused)
    assert "is over" in refused.reason


def test_a_restart_of_an_expected_worker_takes_its_place() -> None:
    core = make_server(ssp(0), joined=False)
    assert said(core.handle(Join(sender(1, 1)), 0.0), Joined) == [Joined(0)]
    assert "is over" in said(core.handle(Join(sender(1, 0)), 0.0), WorkerRefused)[0].reason


def test_m4_the_death_of_a_worker_drops_what_it_pushed_for_open_clocks() -> None:
    core = make_server(bsp())
    for worker in (0, 1):
        core.handle(push(worker, 0, 0), 0.0)
    core.handle(tick(0, 1), 0.0)
    effects = core.handle(Died(1, 0, "killed by signal 9"), 0.0)
    assert Discard("w", push_id(1, 0)) in effects
    assert of(effects, Apply) == [Apply("w", (push_id(0, 0),))]
    assert MembershipChanged(1, 0, "died", "killed by signal 9") in effects


def test_a_second_notice_of_a_death_or_one_of_a_former_life_changes_nothing() -> None:
    core = make_server(ssp(0))
    core.handle(Join(sender(1, 1)), 0.0)
    assert core.handle(Died(1, 0, "killed"), 0.0) == []
    assert core.handle(push(1, 0, 0, incarnation=1), 0.0) != []
    core.handle(Died(1, 1, "killed"), 0.0)
    assert core.handle(Died(1, 1, "killed"), 0.0) == []


def test_m2_a_join_that_arrives_after_the_notice_of_death_is_refused() -> None:
    core = make_server(ssp(0))
    assert core.handle(Died(2, 0, "killed"), 0.0) == []
    assert "is over" in said(core.handle(Join(sender(2, 0)), 0.0), WorkerRefused)[0].reason
    assert said(core.handle(Join(sender(2, 1)), 0.0), Joined) == [Joined(0)]


def test_a_worker_that_left_is_answered_once_more_and_its_late_copies_are_ignored() -> None:
    core = make_server(ssp(0))
    effects = core.handle(Leave(sender(1)), 0.0)
    assert of(effects, MembershipChanged) == [MembershipChanged(1, 0, "left")]
    assert said(effects, Left) == [Left()]
    assert core.handle(Leave(sender(1)), 0.0) == [Reply(1, 0, Left())]
    assert core.handle(tick(1, 9), 0.0) == []
    assert core.members == [0]


def test_the_last_to_leave_leaves_the_clock_where_it_was() -> None:
    core = make_server(bsp(), workers=(0,))
    core.handle(tick(0, 3), 0.0)
    core.handle(Leave(sender(0)), 0.0)
    assert core.clock_of("w") == 3
    assert said(core.handle(Join(sender(1)), 0.0), Joined) == [Joined(3)]


def test_k5_another_generation_cannot_join() -> None:
    effects = make_server(asynchronous()).handle(Join(sender(0, 1, generation=2)), 0.0)
    assert "belongs to generation 2" in said(effects, WorkerRefused)[0].reason


def test_a_tick_is_answered_with_what_is_known() -> None:
    core = make_server(ssp(0))
    assert said(core.handle(tick(0, 3), 0.0), Ticked) == [Ticked(3)]
    assert said(core.handle(tick(0, 2), 0.0), Ticked) == [Ticked(3)]


def test_held_pushes_of_the_dead_stay_with_a_follower_which_is_told_by_the_lead() -> None:
    core = make_server(bsp(), server=1, num_servers=2)
    assert said(core.handle(push(1, 0, 0), 0.0), Held)
    assert of(core.handle(Died(1, 0, "killed"), 0.0), Discard) == []


def test_a_push_refused_at_a_close_goes_to_the_life_that_made_it() -> None:
    core = make_server(backup(1), workers=(0, 1, 2))
    core.handle(push(2, 0, 0), 0.0)
    core.handle(tick(0, 1), 0.0)
    effects = core.handle(tick(1, 1), 0.0)
    assert [(e.worker, e.incarnation) for e in of(effects, Reply) if isinstance(e.message, PushRefused)] == [(2, 0)]


def test_l6_a_server_that_has_not_run_for_a_while_gives_those_it_could_not_hear_their_lease_anew() -> None:
    core = make_server(ssp(1))
    core.handle(Disconnected(0, 0), 0.0)
    assert core.handle(Woke(), 20.0) == []
    assert core.handle(Timeout(), 24.9) == []
    core.handle(Join(sender(0)), 24.9)
    assert core.handle(Timeout(), 100.0) == []
    assert core.members == [0, 1]

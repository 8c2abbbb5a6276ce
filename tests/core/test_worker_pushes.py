"""A worker core, its pushes and its clocks: what is sent when, what is repeated, when a tick may go."""

import pytest
from tests.core.cores import make_worker, of, push, push_id, said, sender, tick

from paceline.core.consistency import Consistency, asynchronous, bsp, ssp
from paceline.core.effects import Drop, Fail, LeaveDone, Release, Send
from paceline.core.events import Arrived, Connected, Opened, Timeout, WantClock, WantJoin, WantLeave, WantPush
from paceline.core.exactly_once import WINDOW
from paceline.core.messages import (
    Applied,
    Clock,
    Held,
    Join,
    Joined,
    Leave,
    Left,
    Push,
    PushRefused,
    Repeated,
    Replicated,
    Ticked,
    WorkerRefused,
)
from paceline.core.worker import WorkerCore
from paceline.errors import ProtocolBug


def test_a_push_goes_to_every_server_that_holds_a_part_under_one_identity() -> None:
    core = make_worker(ssp(1), num_servers=3)
    effects = core.handle(WantPush("w"), 0.0)
    assert effects == [Send(server, push(0, 0, 0)) for server in range(3)]
    assert said(core.handle(WantPush("w"), 0.0), Push)[0].id == push_id(0, 1)


def test_t3_a_table_on_one_server_still_ticks_on_all() -> None:
    core = make_worker(num_servers=2)
    core.handle(Opened("small", ssp(1), (1,)), 0.0)
    assert [effect.server for effect in of(core.handle(WantPush("small"), 0.0), Send)] == [1]
    assert core.handle(WantClock(), 0.0) == []
    effects = core.handle(Arrived(1, Applied(push_id(0, 0))), 0.0)
    assert [(e.server, e.message) for e in of(effects, Send)] == [(0, tick(0, 1)), (1, tick(0, 1))]


def test_t3_a_tick_waits_until_every_server_has_the_pushes_it_closes() -> None:
    core = make_worker(bsp(), num_servers=2)
    core.handle(WantPush("w"), 0.0)
    assert core.handle(WantClock(), 0.0) == []
    assert said(core.handle(Arrived(0, Held(push_id(0, 0))), 0.0), Clock) == []
    effects = core.handle(Arrived(1, Held(push_id(0, 0))), 0.0)
    assert said(effects, Clock) == [tick(0, 1), tick(0, 1)]


def test_a_clock_without_pushes_ticks_at_once() -> None:
    assert said(make_worker().handle(WantClock(), 0.0), Clock) == [tick(0, 1)]


def test_later_clocks_do_not_hold_back_the_tick_of_an_earlier_one() -> None:
    core = make_worker(asynchronous())
    core.handle(WantPush("w"), 0.0)
    core.handle(WantClock(), 0.0)
    core.handle(WantPush("w"), 0.0)
    core.handle(WantClock(), 0.0)
    assert said(core.handle(Arrived(0, Applied(push_id(0, 0))), 0.0), Clock) == [tick(0, 1)]
    assert said(core.handle(Arrived(0, Applied(push_id(0, 1))), 0.0), Clock) == [tick(0, 2)]


def test_t29_a_retry_repeats_the_same_push_to_the_letter() -> None:
    core = make_worker()
    (first,) = said(core.handle(WantPush("w"), 0.0), Push)
    core.handle(WantClock(), 0.0)
    assert core.next_deadline() == 1.0
    assert core.handle(Timeout(), 0.9) == []
    assert core.handle(Timeout(), 1.0) == [Send(0, first)]


def test_a_held_push_is_repeated_without_its_tensor_and_never_given_up() -> None:
    core = make_worker(bsp())
    core.handle(WantPush("w"), 0.0)
    core.handle(Arrived(0, Held(push_id(0, 0))), 0.0)
    for _ in range(50):
        now = core.next_deadline()
        assert now is not None
        assert core.handle(Timeout(), now) == [Send(0, push(0, 0, 0), bare=True)]
        assert core.handle(Arrived(0, Held(push_id(0, 0))), now) == []


def test_l5_what_is_never_answered_is_given_up_after_so_many_attempts() -> None:
    core = make_worker(max_attempts=3)
    core.handle(WantPush("w"), 0.0)
    effects = list[object]()
    for _ in range(3):
        now = core.next_deadline()
        assert now is not None
        effects += core.handle(Timeout(), now)
    assert len(of(effects, Send)) == 2  # the first attempt went out at once
    assert of(effects, Fail) == [Fail("server 0 has not answered a push in 3 attempts")]


def test_each_servers_part_is_released_once_by_its_own_answer() -> None:
    core = make_worker(bsp(), num_servers=2)
    core.handle(WantPush("w"), 0.0)
    assert core.handle(Arrived(0, Applied(push_id(0, 0))), 0.0) == [Release(0, "w", push_id(0, 0))]
    assert core.handle(Arrived(0, Applied(push_id(0, 0))), 0.0) == []
    assert core.num_unsettled("w") == 1
    assert core.handle(Arrived(1, Applied(push_id(0, 0))), 0.0) == [Release(1, "w", push_id(0, 0))]
    assert (core.num_unsettled("w"), core.next_push("w").settled) == (0, 1)


def test_a_refused_push_is_released_with_its_reason_and_withdrawn_with_the_tick() -> None:
    core = make_worker(bsp(), num_servers=2)
    core.handle(WantPush("w"), 0.0)
    core.handle(WantClock(), 0.0)
    refused = PushRefused(push_id(0, 0), "value 0 is nan")
    assert core.handle(Arrived(0, refused), 0.0) == [Release(0, "w", push_id(0, 0), "value 0 is nan")]
    effects = core.handle(Arrived(1, Held(push_id(0, 0))), 0.0)
    assert said(effects, Clock) == [tick(0, 1, ("w", 0, 0))] * 2
    core.handle(Arrived(0, Ticked(1)), 0.0)
    core.handle(Arrived(1, Ticked(1)), 0.0)
    core.handle(Arrived(1, PushRefused(push_id(0, 0), "was completed without worker 0")), 0.0)
    assert said(core.handle(WantClock(), 0.0), Clock)[0].clock == 2


def test_pushes_say_below_which_number_all_is_settled() -> None:
    core = make_worker(asynchronous(), num_servers=2)
    for _ in range(3):
        core.handle(WantPush("w"), 0.0)
    for seq, server in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1)):
        core.handle(Arrived(server, Applied(push_id(0, seq))), 0.0)
    assert core.next_push("w").settled == 1
    core.handle(Arrived(1, Applied(push_id(0, 1))), 0.0)
    assert said(core.handle(WantPush("w"), 0.0), Push)[0].settled == 3


def test_a_tick_is_repeated_until_that_clock_is_known() -> None:
    core = make_worker()
    core.handle(WantClock(), 0.0)
    core.handle(WantClock(), 0.0)
    core.handle(Arrived(0, Ticked(1)), 0.0)  # the answer to the tick that was replaced
    assert core.handle(Timeout(), 1.0) == [Send(0, tick(0, 2))]
    core.handle(Arrived(0, Ticked(2)), 1.0)
    assert core.next_deadline() is None


def test_r5_a_new_connection_repeats_the_join_and_then_all_that_is_unanswered() -> None:
    core = make_worker(bsp(), num_servers=2)
    core.handle(WantPush("w"), 0.0)
    core.handle(Arrived(0, Held(push_id(0, 0))), 0.0)
    assert core.handle(Connected(0), 0.5) == [Send(0, Join(sender(0))), Send(0, push(0, 0, 0))]
    assert core.handle(Connected(1), 0.5) == [Send(1, Join(sender(0))), Send(1, push(0, 0, 0))]


def test_a_connection_made_again_while_another_server_has_yet_to_answer_joins_anew() -> None:
    core = make_worker(num_servers=2, joined=False)
    core.handle(WantJoin(), 0.0)
    core.handle(Arrived(0, Joined(0)), 0.0)
    assert core.handle(Connected(0), 0.5) == [Send(0, Join(sender(0)))]
    assert core.handle(Connected(1), 0.5) == [Send(1, Join(sender(0)))]


def test_a_join_on_a_new_connection_is_repeated_too() -> None:
    core = make_worker()
    core.handle(Connected(0), 0.0)
    assert core.handle(Timeout(), 1.0) == [Send(0, Join(sender(0)))]
    assert core.handle(Arrived(0, Joined(0)), 1.0) == []
    assert core.next_deadline() is None


def test_m3_a_worker_starts_at_the_highest_clock_it_is_told_and_ticks_the_rest() -> None:
    core = make_worker(ssp(1), num_servers=2, joined=False)
    assert [effect.server for effect in of(core.handle(WantJoin(), 0.0), Send)] == [0, 1]
    assert core.handle(Arrived(0, Joined(3)), 0.0) == []
    effects = core.handle(Arrived(1, Joined(5)), 0.0)
    assert (core.clock, said(effects, Clock)) == (5, [tick(0, 5), tick(0, 5)])


def test_a_worker_leaves_when_all_its_pushes_are_settled() -> None:
    core = make_worker(ssp(1), num_servers=2)
    core.handle(WantPush("w"), 0.0)
    core.handle(WantClock(), 0.0)
    assert core.handle(WantLeave(), 0.0) == []
    core.handle(Arrived(0, Applied(push_id(0, 0))), 0.0)
    effects = core.handle(Arrived(1, Applied(push_id(0, 0))), 0.0)
    assert said(effects, Leave) == [Leave(sender(0))] * 2
    assert core.handle(Arrived(0, Left()), 0.0) == []
    assert core.handle(Arrived(1, Left()), 0.0) == [LeaveDone()]
    assert core.handle(Arrived(1, Left()), 0.0) == []
    assert core.next_deadline() is None


def test_leaving_in_the_middle_of_a_clock_finishes_it_so_that_its_pushes_settle() -> None:
    core = make_worker(bsp())
    core.handle(WantPush("w"), 0.0)
    core.handle(Arrived(0, Held(push_id(0, 0))), 0.0)
    assert said(core.handle(WantLeave(), 0.0), Clock) == [tick(0, 1)]
    assert said(core.handle(Arrived(0, Applied(push_id(0, 0))), 0.0), Leave) == [Leave(sender(0))]


def test_a_refused_worker_cannot_go_on() -> None:
    effects = make_worker().handle(Arrived(0, WorkerRefused(sender(0), "it was given up")), 0.0)
    assert effects == [Fail("server 0 refused worker 0: it was given up")]


def test_a_worker_that_is_refused_once_it_leaves_has_left() -> None:
    core = make_worker()
    assert said(core.handle(WantLeave(), 0.0), Leave) == [Leave(sender(0))]
    refused = Arrived(0, WorkerRefused(sender(0), "its namespace has ended"))
    assert core.handle(refused, 0.0) == [LeaveDone()]
    assert core.next_deadline() is None, "nothing is repeated"
    assert core.handle(refused, 0.0) == []


def test_a_message_that_no_worker_can_get_is_a_bug() -> None:
    with pytest.raises(ProtocolBug, match="a worker cannot process"):
        make_worker().handle(Arrived(0, tick(0, 1)), 0.0)


def test_a_push_waits_for_servers_to_answer_earlier_ones_of_its_own_table_only() -> None:
    core = make_worker(bsp())
    core.handle(Opened("a", asynchronous(), (0,)), 0.0)
    core.handle(WantPush("w"), 0.0)
    for seq in range(1, WINDOW + 2):
        assert core.may_push("a")
        assert said(core.handle(WantPush("a"), 0.0), Push)[0].settled == seq
        core.handle(Arrived(0, Applied(push_id(0, seq))), 0.0)
    for _ in range(WINDOW):
        assert core.may_push("a")
        core.handle(WantPush("a"), 0.0)
    assert not core.may_push("a")
    assert not core.waits_for_own_clock("a")
    assert core.waits_for_own_clock("w")


def test_a_held_push_is_waited_for_until_others_finish_its_clock_and_one_that_is_lost_is_not() -> None:
    core = make_worker(bsp(), max_attempts=3)
    core.handle(WantPush("w"), 0.0)
    core.handle(Arrived(0, Held(push_id(0, 0))), 0.0)
    effects = [effect for _ in range(50) for effect in core.handle(Timeout(), core.next_deadline() or 0.0)]
    assert of(effects, Fail) == []
    assert len(said(effects, Push)) == 50


def test_t19_what_is_withdrawn_is_told_until_every_server_has_heard_it() -> None:
    core = make_worker(Consistency(bound=None, visible="on_clock"), num_servers=2)
    core.handle(WantPush("w"), 0.0)
    core.handle(WantClock(), 0.0)
    core.handle(Arrived(0, Held(push_id(0, 0))), 0.0)
    core.handle(Arrived(1, PushRefused(push_id(0, 0), "value 0 is nan")), 0.0)
    core.handle(Arrived(1, Ticked(1)), 0.0)  # and server 0 has not heard of it: the tick on its way there is lost
    assert said(core.handle(WantClock(), 0.0), Clock) == [tick(0, 2, ("w", 0, 0))] * 2
    for server in (0, 1):
        core.handle(Arrived(server, Ticked(2)), 0.0)
    assert said(core.handle(WantClock(), 0.0), Clock) == [tick(0, 3)] * 2


def test_t19_what_is_withdrawn_from_the_open_clock_is_told_although_all_servers_know_the_ticks_before_it() -> None:
    core = make_worker(bsp(), num_servers=2)
    core.handle(WantClock(), 0.0)
    core.handle(WantPush("w"), 0.0)
    core.handle(Arrived(0, Held(push_id(0, 0))), 0.0)
    core.handle(Arrived(1, PushRefused(push_id(0, 0), "value 0 is nan")), 0.0)
    for server in (0, 1):
        core.handle(Arrived(server, Ticked(1)), 0.0)
    assert said(core.handle(WantClock(), 0.0), Clock) == [tick(0, 2, ("w", 1, 0))] * 2


def with_two_pushes() -> WorkerCore:
    """A worker of two servers, whose replicas may lag: both have applied a push of clock 0, and hold one of clock 1."""
    core = make_worker(bsp(), num_servers=2, keeps_pushes=True)
    for seq in range(2):
        core.handle(WantPush("w"), 0.0)
        core.handle(WantClock(), 0.0)
        for server in range(2):
            core.handle(Arrived(server, Held(push_id(0, seq))), 0.0)
    for server in range(2):
        core.handle(Arrived(server, Ticked(2)), 0.0)
        assert of(core.handle(Arrived(server, Applied(push_id(0, 0))), 0.0), Drop) == []
    return core


def test_what_a_replica_may_lack_is_said_again_in_order_before_the_tick_that_vouches_for_it() -> None:
    effects = with_two_pushes().handle(Connected(1), 0.0)
    everything = [Join(sender(0)), push(0, 0, 0), push(0, 1, 1), tick(0, 2), Repeated(sender(0), -1)]
    assert effects == [Send(1, message) for message in everything]


def test_what_the_replica_of_a_server_has_is_dropped_there_and_kept_for_others() -> None:
    core = with_two_pushes()
    assert of(core.handle(Arrived(1, Replicated((0,))), 0.0), Drop) == [Drop(1, "w", push_id(0, 0))]
    assert core.handle(Arrived(1, Replicated((0,))), 0.0) == []
    assert push(0, 0, 0) not in said(core.handle(Connected(1), 0.0), Push)
    assert push(0, 0, 0) in said(core.handle(Connected(0), 0.0), Push)


def test_what_a_replica_has_before_it_is_applied_is_not_kept_any_more_once_it_is() -> None:
    core = with_two_pushes()
    assert core.handle(Arrived(0, Replicated((1,))), 0.0) == []
    assert push(0, 1, 1) in said(core.handle(Connected(0), 0.0), Push), "it is not answered yet"
    assert of(core.handle(Arrived(0, Applied(push_id(0, 1))), 0.0), Drop) == [Drop(0, "w", push_id(0, 1))]


def test_a_push_that_is_refused_is_not_kept() -> None:
    core = make_worker(asynchronous(), keeps_pushes=True)
    core.handle(WantPush("w"), 0.0)
    core.handle(Arrived(0, PushRefused(push_id(0, 0), "value 0 is nan")), 0.0)
    assert said(core.handle(Connected(0), 0.0), Push) == []

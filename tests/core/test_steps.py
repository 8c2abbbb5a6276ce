"""A push, the end of its clock and the read after it travel in one message, and their answers in another."""

from __future__ import annotations

import pytest
from tests.core.cores import make_server, make_worker, of, pull, push, push_id, said, sender, tick

from paceline.core.consistency import Consistency, asynchronous, backup, bsp, ssp
from paceline.core.effects import Apply, Fail, ReadDone, Release, Reply, Send, Serve
from paceline.core.events import (
    Arrived,
    Connected,
    Declared,
    Died,
    Opened,
    Timeout,
    WantClock,
    WantLeave,
    WantPush,
    WantRead,
)
from paceline.core.messages import (
    Applied,
    Clock,
    Fetched,
    Held,
    Leave,
    Pull,
    Push,
    PushRefused,
    Ticked,
    WholeStep,
    WorkerRefused,
)
from paceline.core.worker import MAX_TOGETHER, WorkerCore


def step_of(made: Push, asked: Pull) -> WholeStep:
    """Return a push, the tick that ends its clock, and a pull."""
    return WholeStep((made,), Clock(asked.sender, asked.clock), (asked,))


STEP = step_of(push(0, 0, 0), pull(0, 1, 1, needs=1))
OTHER = step_of(push(1, 0, 0), pull(1, 1, 1, needs=1))


def step(core: WorkerCore, now: float = 0.0) -> list[Send]:
    """Take a step; return what leaves."""
    effects = core.handle(WantPush("w", ends_clock=True), now)
    effects += core.handle(WantClock(), now)
    return of(effects + core.handle(WantRead("w"), now), Send)


def values(request: int, clock: int, *includes: int, ticked: int, settled: int = 0) -> Arrived:
    return Arrived(0, Fetched(request, "w", clock, clock, settled, includes, ticked))


# -- the worker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [bsp(), ssp(1), asynchronous(), backup(1)], ids=str)
def test_steps_leave_in_one_message_and_values_answer_all_of_it(policy: Consistency) -> None:
    core = make_worker(policy)
    for clock in range(3):
        needs = policy.needs(clock + 1)
        assert step(core) == [
            Send(0, step_of(push(0, clock, clock, settled=clock), pull(0, clock + 1, clock + 1, needs)))
        ]
        effects = core.handle(values(clock + 1, clock + 1, clock, ticked=clock + 1), 0.0)
        assert of(effects, Release) == [Release(0, "w", push_id(0, clock))]
        assert [done.clock for done in of(effects, ReadDone)] == [clock + 1]
        assert not of(effects, Send)
        assert core.next_deadline() is None, "nothing is left to be repeated"


def test_a_lost_step_is_repeated_message_by_message_and_its_tick_follows_the_push() -> None:
    core = make_worker(bsp())
    step(core)
    repeated = core.handle(Timeout(), 1.5)
    assert [type(message) for message in said(repeated, object)] == [Push, Pull]
    assert said(core.handle(Arrived(0, Held(push_id(0, 0))), 1.5), object) == [tick(0, 1)]
    assert said(core.handle(Connected(0), 1.5), Clock) == [tick(0, 1)]


def test_values_without_the_push_do_not_settle_it() -> None:
    core = make_worker(asynchronous())
    step(core)
    assert not of(core.handle(values(1, 1, ticked=0), 0.0), Release)
    assert said(core.handle(Timeout(), 1.5), object) == [push(0, 0, 0)]


def test_a_refused_push_of_a_step_is_withdrawn_by_the_next_tick() -> None:
    core = make_worker(bsp())
    step(core)
    effects = core.handle(Arrived(0, PushRefused(push_id(0, 0), "spoiled")), 0.0)
    assert of(effects, Release) == [Release(0, "w", push_id(0, 0), "spoiled")]
    assert said(effects, Clock) == [tick(0, 1, ("w", 0, 0))]
    assert of(core.handle(values(1, 1, ticked=1), 0.0), ReadDone)
    core.handle(Arrived(0, Ticked(1)), 0.0)
    assert said(step(core), WholeStep), "the next step is whole again"


def test_a_push_that_waits_for_its_read_leaves_before_anything_that_may_depend_on_it() -> None:
    core = make_worker(ssp(1))
    core.handle(Opened("v", ssp(1), (0,)), 0.0)
    kept = WantPush("w", ends_clock=True)
    assert core.handle(kept, 0.0) == []
    assert said(core.handle(WantPush("v"), 0.0), object) == [push(0, 0, 0), push(0, 1, 0, table="v", settled=1)]
    for table in ("v", "w"):
        core = make_worker(ssp(1))
        core.handle(Opened("v", ssp(1), (0,)), 0.0)
        core.handle(kept, 0.0)
        told = said(core.handle(WantRead(table), 0.0), object)
        assert told == [WholeStep((push(0, 0, 0),), None, (pull(0, 1, 0, 0, table=table),))], "the clock goes on"
    core = make_worker(ssp(1))
    core.handle(kept, 0.0)
    assert said(core.handle(WantLeave(), 0.0), Push)
    assert said(core.handle(Arrived(0, Applied(push_id(0, 0))), 0.0), Leave)


def test_a_push_whose_read_does_not_come_leaves_by_itself() -> None:
    core = make_worker(bsp())
    core.handle(WantPush("w", ends_clock=True), 0.0)
    core.handle(WantClock(), 0.0)
    due = core.next_deadline()
    assert due is not None
    assert due < 1.0, "sooner than a repetition"
    assert said(core.handle(Timeout(), due), object) == [WholeStep((push(0, 0, 0),), tick(0, 1), ())]
    assert core.handle(Arrived(0, Held(push_id(0, 0))), due) == [Send(0, tick(0, 1))]


@pytest.mark.parametrize("policy", [bsp(), ssp(1)], ids=str)
def test_with_two_servers_a_push_that_is_followed_by_a_read_leaves_at_once(policy: Consistency) -> None:
    core = make_worker(policy, num_servers=2)
    assert [type(sent.message) for sent in step(core)] == [Push, Push, Pull, Pull]


def test_with_two_servers_the_tick_of_pushes_that_travel_together_waits_for_both() -> None:
    core = make_worker(bsp(), num_servers=2)
    core.handle(Opened("v", bsp(), (0, 1)), 0.0)
    for table in ("w", "v"):
        assert not core.handle(WantPush(table, may_wait=True), 0.0)
    together = WholeStep((push(0, 0, 0), push(0, 1, 0, table="v", settled=1)), None, ())
    assert core.handle(WantClock(), 0.0) == [Send(0, together), Send(1, together)]
    for server in (0, 1):
        assert not core.handle(Arrived(server, Held(push_id(0, 1))), 0.0)
    assert not said(core.handle(Arrived(1, Held(push_id(0, 0))), 0.0), Clock)
    assert core.handle(Arrived(0, Held(push_id(0, 0))), 0.0) == [Send(0, tick(0, 1)), Send(1, tick(0, 1))]


def test_an_earlier_push_that_no_server_has_confirmed_keeps_the_tick_back() -> None:
    core = make_worker(bsp())
    core.handle(WantPush("w"), 0.0)
    assert [type(sent.message) for sent in step(core)] == [Push, Pull]


# -- several tables --------------------------------------------------------------------------------------------------


def two_tables(policy: Consistency) -> WorkerCore:
    core = make_worker(policy)
    core.handle(Opened("v", policy, (0,)), 0.0)
    return core


def step_of_two(core: WorkerCore) -> list[Send]:
    """Push two tables, end the clock and read both; return what leaves."""
    effects = core.handle(WantPush("w", ends_clock=True), 0.0)
    effects += core.handle(WantPush("v", may_wait=True), 0.0)
    effects += core.handle(WantClock(), 0.0)
    effects += core.handle(WantRead("w", more=True), 0.0)
    return of(effects + core.handle(WantRead("v"), 0.0), Send)


@pytest.mark.parametrize("policy", [bsp(), ssp(1), asynchronous(), backup(1)], ids=str)
def test_tables_that_move_together_leave_in_one_message(policy: Consistency) -> None:
    core = two_tables(policy)
    for clock in range(2):
        needs, seq, request = policy.needs(clock + 1), 2 * clock, 2 * clock + 1
        pushes = (push(0, seq, clock, settled=seq), push(0, seq + 1, clock, table="v", settled=seq + 1))
        pulls = (pull(0, request, clock + 1, needs), pull(0, request + 1, clock + 1, needs, table="v"))
        assert step_of_two(core) == [Send(0, WholeStep(pushes, tick(0, clock + 1), pulls))]
        core.handle(Arrived(0, Fetched(request, "w", clock + 1, clock + 1, 0, (seq,), clock + 1)), 0.0)
        v = Fetched(request + 1, "v", clock + 1, clock + 1, 0, (seq + 1,), clock + 1)
        assert not of(core.handle(Arrived(0, v), 0.0), Send)
        assert core.next_deadline() is None, "nothing is left to be repeated"


def test_pushes_that_wait_for_the_end_of_their_clock_leave_with_its_tick() -> None:
    core = two_tables(bsp())
    for table in ("w", "v"):
        assert not core.handle(WantPush(table, may_wait=True), 0.0)
    pushes = (push(0, 0, 0), push(0, 1, 0, table="v", settled=1))
    assert core.handle(WantClock(), 0.0) == [Send(0, WholeStep(pushes, tick(0, 1), ()))]
    assert not of(core.handle(Arrived(0, Ticked(1)), 0.0), Send)
    assert [type(sent.message) for sent in step_of_two(core)] == [WholeStep], "a tick that is known confirms its pushes"


def test_a_lost_step_of_several_tables_is_repeated_message_by_message() -> None:
    core = two_tables(bsp())
    step_of_two(core)
    assert [type(message) for message in said(core.handle(Timeout(), 1.5), object)] == [Push, Push, Pull, Pull]
    assert not core.handle(Arrived(0, Held(push_id(0, 0))), 1.5)
    assert core.handle(Arrived(0, Held(push_id(0, 1))), 1.5) == [Send(0, tick(0, 1))]


def test_more_reads_than_fit_leave_in_several_messages() -> None:
    core = make_worker(bsp())
    names = [f"t{number}" for number in range(MAX_TOGETHER + 2)]
    sent: list[Send] = []
    for name in names:
        core.handle(Opened(name, bsp(), (0,)), 0.0)
        sent += of(core.handle(WantRead(name, more=name != names[-1]), 0.0), Send)
    assert [len(found.message.pulls) for found in sent if isinstance(found.message, WholeStep)] == [MAX_TOGETHER, 2]


def test_more_tables_than_fit_leave_in_several_messages_and_the_tick_by_itself() -> None:
    core = make_worker(bsp())
    names = [f"t{number}" for number in range(MAX_TOGETHER + 1)]
    sent: list[Send] = []
    for name in names:
        core.handle(Opened(name, bsp(), (0,)), 0.0)
        sent += of(core.handle(WantPush(name, may_wait=True), 0.0), Send)
    sent += of(core.handle(WantClock(), 0.0), Send)
    steps, last = [found.message for found in sent][:-1], sent[-1].message
    assert [(len(found.pushes), found.tick) for found in steps if isinstance(found, WholeStep)] == [
        (MAX_TOGETHER, None)
    ]
    assert isinstance(last, Push)
    assert last.table == names[-1]
    for seq in range(MAX_TOGETHER):
        assert not core.handle(Arrived(0, Held(push_id(0, seq))), 0.0)
    assert core.handle(Arrived(0, Held(push_id(0, MAX_TOGETHER))), 0.0) == [Send(0, tick(0, 1))]


# -- the server ------------------------------------------------------------------------------------------------------


def test_a_step_alone_is_answered_by_values_alone() -> None:
    core = make_server(bsp(), workers=[0])
    effects = core.handle(STEP, 0.0)
    assert of(effects, Apply) == [Apply("w", (push_id(0, 0),))]
    assert not of(effects, Reply)
    assert [serve.message for serve in of(effects, Serve)] == [Fetched(1, "w", 1, 1, 0, (0,), ticked=1)]


def test_a_step_that_waits_for_others_is_answered_when_they_are_there() -> None:
    core = make_server(bsp())
    assert not said(core.handle(STEP, 0.0), object)
    effects = core.handle(OTHER, 0.0)
    assert [(serve.worker, type(serve.message)) for serve in of(effects, Serve)] == [(0, Fetched), (1, Fetched)]
    assert not of(effects, Reply)


def test_a_copy_of_a_step_is_answered_message_by_message() -> None:
    core = make_server(bsp())
    core.handle(STEP, 0.0)
    assert said(core.handle(STEP, 0.0), object) == [Held(push_id(0, 0)), Ticked(1)]
    core.handle(OTHER, 0.0)
    again = said(core.handle(STEP, 0.0), object)
    assert again == [Applied(push_id(0, 0)), Ticked(1), Fetched(1, "w", 1, 1, 0, (0,), ticked=1)]


def test_a_step_of_two_tables_is_answered_by_their_values_and_what_is_not_read_in_words() -> None:
    core = make_server(bsp(), workers=[0])
    core.handle(Declared("v", bsp()), 0.0)
    pushes = (push(0, 0, 0), push(0, 1, 0, table="v"))
    found = said(core.handle(WholeStep(pushes, tick(0, 1), (pull(0, 1, 1, needs=1),)), 0.0), object)
    assert found == [Applied(push_id(0, 1)), Fetched(1, "w", 1, 1, 0, (0,), ticked=1)]
    pushes = (push(0, 2, 1), push(0, 3, 1, table="v"))
    found = said(core.handle(WholeStep(pushes, tick(0, 2), ()), 0.0), object)
    assert found == [Ticked(2), Applied(push_id(0, 2)), Applied(push_id(0, 3))]


def test_a_refused_push_of_a_step_leaves_those_of_other_tables_alone() -> None:
    core = make_server(bsp(), workers=[0])
    pushes = (push(0, 0, 0, table="v"), push(0, 1, 0))
    effects = core.handle(WholeStep(pushes, tick(0, 1), (pull(0, 1, 1, needs=1),)), 0.0)
    assert [type(message) for message in said(effects, object)] == [PushRefused, Fetched]
    assert of(effects, Apply) == [Apply("w", (push_id(0, 1),))]


def test_a_step_without_a_tick_says_that_its_push_is_held() -> None:
    core = make_server(bsp())
    assert said(core.handle(WholeStep((push(0, 0, 0),), None, (pull(0, 1, 1, 1),)), 0.0), object) == [
        Held(push_id(0, 0))
    ]


def test_a_late_push_of_a_step_is_refused_in_words_and_its_values_come() -> None:
    core = make_server(backup(1), workers=[0, 1])
    core.handle(OTHER, 0.0)  # completes the clock without worker 0
    found = said(core.handle(STEP, 0.0), object)
    assert [type(message) for message in found] == [PushRefused, Fetched]


def test_a_worker_that_dies_after_its_step_has_not_contributed_to_an_open_clock() -> None:
    core = make_server(bsp())
    core.handle(STEP, 0.0)
    core.handle(Died(0, 0, "killed"), 0.0)
    effects = core.handle(OTHER, 0.0)
    assert of(effects, Apply) == [Apply("w", (push_id(1, 0),))]
    assert [serve.worker for serve in of(effects, Serve)] == [1]


def test_a_step_of_an_ended_life_or_of_an_unknown_table_changes_nothing() -> None:
    core = make_server(bsp())
    core.handle(Died(0, 0, "killed"), 0.0)
    assert [type(message) for message in said(core.handle(STEP, 0.0), object)] == [WorkerRefused]
    unknown = core.handle(step_of(push(1, 0, 0, table="v"), pull(1, 1, 1, needs=1, table="v")), 0.0)
    assert not of(unknown, Apply)
    assert not of(unknown, Fail)


def test_a_pull_that_waits_says_that_pushes_are_applied_without_steps_as_well() -> None:
    core = make_server(bsp())
    for message in (push(0, 0, 0), tick(0, 1), pull(0, 1, 1, needs=1), push(1, 0, 0)):
        core.handle(message, 0.0)
    effects = core.handle(tick(1, 1), 0.0)
    assert said(effects, Applied) == [Applied(push_id(1, 0))]
    assert said(effects, Fetched)[0].includes == (0,)
    assert sender(0).worker == of(effects, Serve)[0].worker

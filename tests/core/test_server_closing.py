"""Several servers close a clock with the same contributors: the lead decides, the others follow (BSP2, BSP5, T22)."""

from tests.core.cores import make_server, of, pull, push, push_id, said, sender, tick

from paceline.core.consistency import backup, bsp, ssp
from paceline.core.effects import Advanced, Apply, Discard, Tell
from paceline.core.events import Declared, Died, Timeout
from paceline.core.messages import Closed, Fetched, Follow, Join, PushRefused
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings

FOLLOW_0 = Follow(1, 1, "w", 0)


def pair(consistency: object = None, workers: tuple[int, ...] = (0, 1)) -> tuple[ServerCore, ServerCore]:
    lead = make_server(consistency or bsp(), workers=workers, server=0, num_servers=2)  # type: ignore[arg-type]
    follower = make_server(consistency or bsp(), workers=workers, server=1, num_servers=2)  # type: ignore[arg-type]
    return lead, follower


def test_a_follower_asks_the_lead_when_the_table_begins_and_again_until_answered() -> None:
    core = ServerCore(ServerSettings(1, 2, workers=(0,), retry_s=1.0), started=0.0)
    assert core.handle(Declared("w", bsp()), 0.0) == [Tell(0, FOLLOW_0)]
    assert core.next_deadline() == 1.0
    assert core.handle(Timeout(), 0.5) == []
    assert core.handle(Timeout(), 1.0) == [Tell(0, FOLLOW_0)]


def test_t22_a_follower_closes_nothing_by_itself() -> None:
    _, follower = pair()
    for worker in (0, 1):
        follower.handle(push(worker, 0, 0), 0.0)
        effects = follower.handle(tick(worker, 1), 0.0)
    assert of(effects, Apply) == []
    assert follower.clock_of("w") == 0


def test_bsp2_both_apply_what_the_lead_has_decided() -> None:
    lead, follower = pair(backup(1), workers=(0, 1, 2))
    lead.handle(FOLLOW_0, 0.0)
    for core in (lead, follower):
        for worker in (2, 1, 0):
            core.handle(push(worker, 0, 0), 0.0)
    lead.handle(tick(2, 1), 0.0)
    effects = lead.handle(tick(0, 1), 0.0)
    (told,) = of(effects, Tell)
    assert told == Tell(1, Closed(1, "w", 0, ((0, 0), (2, 0))))
    for worker in (0, 1):  # the follower has heard of others, and does not mind
        follower.handle(tick(worker, 1), 0.0)
    effects = follower.handle(told.message, 0.0)
    assert of(effects, Apply) == [Apply("w", (push_id(0, 0), push_id(2, 0)))]
    assert of(effects, Discard) == [Discard("w", push_id(1, 0))]
    assert [m.id for m in said(effects, PushRefused)] == [push_id(1, 0)]
    assert of(effects, Tell) == [Tell(0, Follow(1, 1, "w", 1))]


def test_a_decision_is_repeated_to_a_follower_that_asks_late_and_taken_once() -> None:
    lead, follower = pair()
    for worker in (0, 1):
        for core in (lead, follower):
            core.handle(push(worker, 0, 0), 0.0)
        effects = lead.handle(tick(worker, 1), 0.0)
    assert of(effects, Tell) == []  # no server had asked yet
    (told,) = of(lead.handle(FOLLOW_0, 0.0), Tell)
    assert len(of(follower.handle(told.message, 0.0), Apply)) == 1
    assert follower.handle(told.message, 0.0) == [Tell(0, Follow(1, 1, "w", 1))]  # its question may have been lost


def test_a_follower_behind_by_several_clocks_catches_up_one_by_one() -> None:
    lead, follower = pair(workers=(0,))
    for clock in (1, 2, 3):
        lead.handle(tick(0, clock), 0.0)
    follow = FOLLOW_0
    for clock in (1, 2, 3):
        (told,) = of(lead.handle(follow, 0.0), Tell)
        effects = follower.handle(told.message, 0.0)  # type: ignore[arg-type]
        assert Advanced("w", clock) in effects
        follow = of(effects, Tell)[0].message  # type: ignore[assignment]
    assert lead.handle(follow, 0.0) == []


def test_bsp5_a_clock_with_a_worker_that_died_after_its_tick_is_whole_on_both() -> None:
    lead, follower = pair()
    lead.handle(FOLLOW_0, 0.0)
    for core in (lead, follower):
        for worker in (0, 1):
            core.handle(push(worker, 0, 0), 0.0)
    lead.handle(tick(1, 1), 0.0)
    (told,) = of(lead.handle(tick(0, 1), 0.0), Tell)
    follower.handle(Died(1, 0, "killed"), 0.0)  # before it hears of the decision
    effects = follower.handle(told.message, 0.0)
    assert of(effects, Apply) == [Apply("w", (push_id(0, 0), push_id(1, 0)))]


def test_a_reader_waits_for_the_clock_of_the_follower_too() -> None:
    _, follower = pair(workers=(0,))
    follower.handle(tick(0, 1), 0.0)
    assert follower.handle(pull(0, 1, 1, needs=1), 0.0) == []
    assert [m.clock for m in said(follower.handle(Closed(1, "w", 0, ((0, 0),)), 0.0), Fetched)] == [1]


def test_what_another_generation_says_is_ignored() -> None:
    lead, follower = pair(workers=(0,))
    lead.handle(tick(0, 1), 0.0)
    assert lead.handle(Follow(9, 1, "w", 0), 0.0) == []
    assert lead.handle(Follow(1, 1, "unknown", 0), 0.0) == []
    assert follower.handle(Closed(9, "w", 0, ()), 0.0) == []
    assert follower.handle(Closed(1, "w", 4, ()), 0.0) == []


def test_a_table_that_begins_late_begins_where_the_workers_are() -> None:
    lead = make_server(bsp(), workers=(0,), num_servers=2)
    lead.handle(tick(0, 3), 0.0)
    lead.handle(Declared("late", bsp()), 0.0)
    assert lead.clock_of("late") == 3
    assert of(lead.handle(Follow(1, 1, "late", 2), 0.0), Tell) == [Tell(1, Closed(1, "late", 2, ()))]
    assert lead.handle(Follow(1, 1, "late", 3), 0.0) == []


def test_a_restarted_worker_contributes_with_its_new_life_only() -> None:
    lead, _ = pair()
    lead.handle(push(1, 0, 0), 0.0)
    lead.handle(Join(sender(1, 1)), 0.0)
    lead.handle(push(1, 0, 0, incarnation=1), 0.0)
    lead.handle(push(0, 0, 0), 0.0)
    lead.handle(tick(0, 1), 0.0)
    effects = lead.handle(tick(1, 1, incarnation=1), 0.0)
    assert of(effects, Apply) == [Apply("w", (push_id(0, 0), push_id(1, 0, 1)))]


def test_a_question_about_a_table_that_the_lead_has_yet_to_hear_of_is_answered_when_it_has() -> None:
    lead = ServerCore(ServerSettings(0, 2, workers=(0,)), started=0.0)
    lead.handle(Join(sender(0)), 0.0)
    assert lead.handle(FOLLOW_0, 0.0) == []
    lead.handle(Declared("w", bsp()), 0.0)
    lead.handle(push(0, 0, 0), 0.0)
    assert of(lead.handle(tick(0, 1), 0.0), Tell) == [Tell(1, Closed(1, "w", 0, ((0, 0),)))]


def test_a_worker_that_joins_behind_closed_clocks_counts_as_finished_with_them() -> None:
    core = make_server(backup(1), workers=(0, 1, 2))
    core.handle(Declared("s", ssp(0)), 0.0)
    for worker in (0, 1):
        core.handle(tick(worker, 3), 0.0)
    core.handle(Join(sender(3)), 0.0)  # told to begin at clock 3
    assert said(core.handle(pull(0, 1, 3, needs=3, table="s"), 0.0), Fetched) == []
    effects = core.handle(Died(2, 0, "killed"), 0.0)  # the only one that has yet to finish them
    assert [m.clock for m in said(effects, Fetched)] == [3]

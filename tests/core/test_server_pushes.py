"""A server core and pushes: applied once, answered after that, refused for good, whatever arrives how often."""

import pytest
from tests.core.cores import make_server, of, pull, push, push_id, said, sender, tick

from paceline.core.consistency import Consistency, asynchronous, backup, bsp, essp, ssp
from paceline.core.effects import Apply, Discard, Hold, Reply, Tell
from paceline.core.events import Declared, InvalidPush, Timeout, Unapplied
from paceline.core.exactly_once import WINDOW
from paceline.core.messages import Applied, Clock, Fetched, Follow, Held, PushRefused, WorkerRefused
from paceline.core.tables import MAX_WITHDRAWN
from paceline.errors import ProtocolBug


def test_on_arrival_a_push_is_applied_and_then_acknowledged() -> None:
    core = make_server(ssp(1))
    assert core.handle(push(0, 0, 0), 0.0) == [Apply("w", (push_id(0, 0),)), Reply(0, 0, Applied(push_id(0, 0)))]


def test_t29_a_copy_gets_the_same_answer_and_is_not_applied_again() -> None:
    core = make_server(ssp(1))
    core.handle(push(0, 0, 0), 0.0)
    for _ in range(3):
        assert core.handle(push(0, 0, 0), 0.0) == [Reply(0, 0, Applied(push_id(0, 0)))]


def test_t29_a_late_copy_of_a_settled_push_is_ignored() -> None:
    core = make_server(ssp(1))
    core.handle(push(0, 0, 0), 0.0)
    core.handle(push(0, 1, 0, settled=1), 0.0)
    assert core.handle(push(0, 0, 0), 0.0) == []


def test_t29_copies_of_a_held_push_are_answered_held_until_the_clock_closes_then_applied() -> None:
    core = make_server(bsp())
    assert core.handle(push(0, 0, 0), 0.0) == [Hold("w", push_id(0, 0)), Reply(0, 0, Held(push_id(0, 0)))]
    assert core.handle(push(0, 0, 0), 0.0) == [Reply(0, 0, Held(push_id(0, 0)))]
    core.handle(push(1, 0, 0), 0.0)
    core.handle(tick(0, 1), 0.0)
    core.handle(tick(1, 1), 0.0)
    assert core.handle(push(0, 0, 0), 0.0) == [Reply(0, 0, Applied(push_id(0, 0)))]


def test_t21_bsp_sums_a_clock_in_rank_order_and_acknowledges_after_it() -> None:
    core = make_server(bsp(), workers=(0, 1, 2))
    for worker in (2, 0, 1):
        core.handle(push(worker, 0, 0), 0.0)
        effects = core.handle(tick(worker, 1), 0.0)
    assert of(effects, Apply) == [Apply("w", (push_id(0, 0), push_id(1, 0), push_id(2, 0)))]
    assert [m.id.worker for m in said(effects, Applied)] == [0, 1, 2]
    assert effects.index(of(effects, Apply)[0]) < effects.index(Reply(0, 0, Applied(push_id(0, 0))))


def test_e4_a_push_that_arrives_after_its_clock_closed_is_refused_for_good() -> None:
    core = make_server(backup(1), workers=(0, 1, 2))
    for worker in (0, 1):
        core.handle(push(worker, 0, 0), 0.0)
        core.handle(tick(worker, 1), 0.0)
    refused = core.handle(push(2, 0, 0), 0.0)
    reason = "clock 0 of table 'w' is closed, the table stands at 1"
    assert refused == [Reply(2, 0, PushRefused(push_id(2, 0), reason))]
    assert core.handle(push(2, 0, 0), 0.0) == refused


def test_t33_a_held_push_that_misses_the_quorum_is_discarded_and_refused() -> None:
    core = make_server(backup(1), workers=(0, 1, 2))
    for worker in (0, 1, 2):
        core.handle(push(worker, 0, 0), 0.0)
    core.handle(tick(0, 1), 0.0)
    effects = core.handle(tick(1, 1), 0.0)
    assert of(effects, Apply) == [Apply("w", (push_id(0, 0), push_id(1, 0)))]
    assert Discard("w", push_id(2, 0)) in effects
    (refused,) = said(effects, PushRefused)
    assert "was completed without worker 2" in refused.reason


def test_t33_a_quorum_is_of_distinct_workers_not_of_pushes() -> None:
    core = make_server(backup(1), workers=(0, 1, 2))
    for clock in (0, 1):
        core.handle(push(0, clock, clock), 0.0)
    assert of(core.handle(tick(0, 2), 0.0), Apply) == []
    core.handle(push(1, 0, 0), 0.0)
    assert of(core.handle(tick(1, 1), 0.0), Apply) == [Apply("w", (push_id(0, 0), push_id(1, 0)))]


def test_r15_a_spoiled_push_is_refused_and_its_copies_too() -> None:
    core = make_server(ssp(1))
    refusal = [Reply(0, 0, PushRefused(push_id(0, 0), "value 3 is nan"))]
    assert core.handle(InvalidPush(push(0, 0, 0), "value 3 is nan"), 0.0) == refusal
    assert core.handle(push(0, 0, 0), 0.0) == refusal


def test_t19_a_withdrawn_part_keeps_the_worker_out_of_the_clock_on_every_server() -> None:
    lead = make_server(bsp(), num_servers=2)
    for worker in (0, 1):
        lead.handle(push(worker, 0, 0), 0.0)
    lead.handle(tick(0, 1, ("w", 0, 0)), 0.0)
    effects = lead.handle(tick(1, 1), 0.0)
    assert of(effects, Apply) == [Apply("w", (push_id(1, 0),))]
    assert [m.id for m in said(effects, PushRefused)] == [push_id(0, 0)]


def test_e4_a_sound_push_is_applied_though_its_sibling_of_the_same_clock_is_withdrawn() -> None:
    lead, follower = (make_server(bsp(), server=server, num_servers=2) for server in (0, 1))
    for core in (lead, follower):
        for seq in (0, 1):
            core.handle(push(0, seq, 0), 0.0)
    lead.handle(Follow(1, 1, "w", 0), 0.0)
    lead.handle(tick(0, 1, ("w", 0, 1)), 0.0)
    effects = lead.handle(tick(1, 1), 0.0)
    (told,) = of(effects, Tell)
    for done in (effects, follower.handle(told.message, 0.0)):
        assert of(done, Apply) == [Apply("w", (push_id(0, 0),))]
        assert [(m.id.seq, "another server refused" in m.reason) for m in said(done, PushRefused)] == [(1, True)]


def test_a_push_of_an_unknown_table_is_refused_with_the_names_that_exist() -> None:
    core = make_server(ssp(1))
    (refused,) = said(core.handle(push(0, 0, 0, table="x"), 0.0), PushRefused)
    assert refused.reason == "there is no table 'x' on server 0; tables: w"


def test_r4_too_many_unsettled_pushes_end_in_a_refusal_of_the_worker() -> None:
    core = make_server(ssp(1))
    for seq in range(WINDOW):
        core.handle(push(0, seq, 0), 0.0)
    (refused,) = said(core.handle(push(0, WINDOW, 0), 0.0), WorkerRefused)
    assert f"more than {WINDOW} unsettled pushes of table 'w'" in refused.reason
    for seq in range(WINDOW, 2 * WINDOW):  # nor may a name that does not exist make the server remember more
        core.handle(push(0, seq, 0, table=f"no {seq}"), 0.0)
    assert said(core.handle(push(0, 2 * WINDOW, 0, table="no"), 0.0), WorkerRefused)


def test_a_push_that_is_held_costs_a_worker_no_push_of_another_table() -> None:
    core = make_server(bsp())
    core.handle(Declared("a", asynchronous()), 0.0)
    core.handle(push(0, 0, 0), 0.0)
    for seq in range(1, 2 * WINDOW):
        assert of(core.handle(push(0, seq, 0, table="a", settled=seq), 0.0), Apply)
    assert len(core.lives.current(0).dedup) == 2  # type: ignore[union-attr]
    assert said(core.handle(push(0, 0, 0), 0.0), Held)


def test_a_withdrawal_however_far_ahead_is_kept_and_too_many_end_the_worker_not_the_clock() -> None:
    far = Consistency(bound=None, visible="on_clock")
    core = make_server(far, num_servers=2)
    core.handle(push(0, 0, 20_000), 0.0)
    core.handle(tick(0, 20_001, ("w", 20_000, 0)), 0.0)
    effects = core.handle(tick(1, 20_001), 0.0)
    while core.clock_of("w") <= 20_000:
        effects += core.handle(Follow(1, 1, "w", core.clock_of("w")), 0.0)
        effects += core.handle(Timeout(), 0.0)
    assert of(effects, Apply) == []
    assert [m.reason for m in said(effects, PushRefused)] == [
        "another server refused its part of this push of table 'w', clock 20000"
    ]
    core.handle(push(0, 1, 30_000), 0.0)
    effects = core.handle(tick(0, 30_001, *(("w", 25_000, seq) for seq in range(MAX_WITHDRAWN + 1))), 0.0)
    assert "are withdrawn from open clocks" in said(effects, WorkerRefused)[0].reason
    assert of(effects, Discard) == [Discard("w", push_id(0, 1))]
    assert core.members == [1]


def test_r4_the_ledger_stays_small_over_ten_thousand_pushes() -> None:
    core = make_server(asynchronous(), workers=(0,))
    for seq in range(10_000):
        core.handle(push(0, seq, seq, settled=max(0, seq - 10)), 0.0)
        core.handle(tick(0, seq + 1), 0.0)
    dedup = core.lives.current(0).dedup  # type: ignore[union-attr]
    assert len(dedup) == 11
    (message,) = [effect.message for effect in core.handle(pull(0, 1, 0, 0), 0.0)]  # type: ignore[union-attr]
    assert len(message.includes) == 11


def test_k5_another_generation_changes_nothing() -> None:
    core = make_server(ssp(1))
    old = push(0, 0, 0, generation=0)
    (refused,) = said(core.handle(old, 0.0), WorkerRefused)
    assert "belongs to generation 0" in refused.reason
    assert of(core.handle(Clock(sender(0, generation=0), 5), 0.0), Apply) == []
    assert core.clock_of("w") == 0


def test_m2_a_former_incarnation_changes_nothing() -> None:
    core = make_server(ssp(1))
    effects = core.handle(push(0, 0, 0, incarnation=1), 0.0)
    assert "has not joined" in said(effects, WorkerRefused)[0].reason
    assert of(effects, Apply) == []


def test_declaring_again_changes_nothing_but_another_consistency_is_a_bug() -> None:
    core = make_server(essp(1))
    core.handle(push(0, 0, 0), 0.0)
    assert core.handle(Declared("w", essp(1)), 0.0) == []
    with pytest.raises(ProtocolBug, match="declared with ssp:1, but exists with essp:1"):
        core.handle(Declared("w", ssp(1)), 0.0)


def test_pushes_of_an_update_that_failed_are_refused_to_every_copy_and_in_no_read() -> None:
    core = make_server(ssp(1))
    core.handle(push(0, 0, 0), 0.0)
    core.handle(push(0, 1, 0), 0.0)
    refusal = Reply(0, 0, PushRefused(push_id(0, 1), "it failed"))
    assert core.handle(Unapplied("w", (push_id(0, 1),), "it failed"), 0.0) == [refusal]
    assert core.handle(push(0, 1, 0), 0.0) == [refusal]
    [values] = said(core.handle(pull(0, 1, 0, 0), 0.0), Fetched)
    assert values.includes == (0,)

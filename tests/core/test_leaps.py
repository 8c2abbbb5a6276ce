"""A clock that leaps is followed step by step: others are served between, and other servers are not left behind."""

from tests.core.cores import make_server, of, said, tick

from paceline.core.consistency import backup, bsp
from paceline.core.effects import Advanced, Tell
from paceline.core.events import Timeout
from paceline.core.messages import Closed, Follow, Ticked
from paceline.core.tables import MAX_AT_ONCE, MAX_LEAD

FAR = 3 * MAX_AT_ONCE + 1


def test_many_clocks_are_closed_some_at_a_time_and_all_in_the_end() -> None:
    core = make_server(bsp(), workers=(0,))
    effects = core.handle(tick(0, FAR), 0.0)
    assert said(effects, Ticked) == [Ticked(FAR)]
    closed = [effect.clock for effect in of(effects, Advanced)]
    assert closed == list(range(1, MAX_AT_ONCE + 1))
    while core.next_deadline() == 0.0:
        closed += [effect.clock for effect in of(core.handle(Timeout(), 0.0), Advanced)]
    assert closed == list(range(1, FAR + 1))
    assert core.next_deadline() is None


def test_what_others_say_is_heard_before_the_rest_is_closed() -> None:
    core = make_server(backup(1), workers=(0, 1))
    core.handle(tick(0, 2**63), 0.0)
    assert core.clock_of("w") == MAX_AT_ONCE
    assert said(core.handle(tick(1, 1), 0.0), Ticked) == [Ticked(1)]
    assert core.clock_of("w") == 2 * MAX_AT_ONCE


def test_the_lead_decides_no_more_than_others_can_follow() -> None:
    core = make_server(bsp(), workers=(0,), num_servers=2)
    core.handle(tick(0, 2**63), 0.0)
    while core.next_deadline() == 0.0:
        core.handle(Timeout(), 0.0)
    assert core.clock_of("w") == MAX_LEAD
    told = of(core.handle(Follow(1, 1, "w", 7), 0.0), Tell)
    assert told == [Tell(1, Closed(1, "w", 7, ((0, 0),)))]
    assert core.clock_of("w") == MAX_LEAD + 7

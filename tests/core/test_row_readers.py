"""The readers of a row table on a server: each pull counts, and deliveries say since when."""

from tests.core.cores import make_server, of, pull, push, said, sender, tick

from paceline.core.consistency import Consistency, essp, ssp
from paceline.core.effects import Serve
from paceline.core.events import Declared, Died
from paceline.core.messages import Delivered, Fetched, Join, Taken
from paceline.core.server import ServerCore
from paceline.core.tables import DenseReadQueue


def server(point: Consistency, workers: tuple[int, ...] = (0, 1)) -> ServerCore:
    """Return a server with the row table "r" whose workers have joined."""
    core = make_server(point, workers=workers)
    core.handle(Declared("r", point, keyed=True), 0.0)
    return core


def requests(effects: list) -> list[tuple[int, int]]:
    return [(e.worker, e.message.request) for e in of(effects, Serve) if isinstance(e.message, Fetched)]


def test_all_pulls_of_a_worker_are_answered_an_older_one_too() -> None:
    core = server(ssp(0))
    assert requests(core.handle(pull(0, 5, 0, 0, table="r"), 0.0)) == [(0, 5)]
    assert requests(core.handle(pull(0, 4, 0, 0, table="r"), 0.0)) == [(0, 4)]


def test_pulls_that_wait_are_answered_one_by_one_as_the_clock_comes_to_them() -> None:
    core = server(ssp(0))
    for request, needs in ((1, 1), (2, 1), (3, 2)):
        assert requests(core.handle(pull(0, request, needs, needs, table="r"), 0.0)) == []
    core.handle(tick(0, 3), 0.0)
    assert requests(core.handle(tick(1, 1), 0.0)) == [(0, 1), (0, 2)]
    assert requests(core.handle(tick(1, 2), 0.0)) == [(0, 3)]


def test_t4_a_clock_that_jumps_releases_all_that_waited_for_less() -> None:
    core = server(ssp(0))
    for request, needs in ((1, 1), (2, 2), (3, 3)):
        core.handle(pull(0, request, needs, needs, table="r"), 0.0)
    core.handle(tick(0, 4), 0.0)
    assert requests(core.handle(Died(1, 0, "killed"), 0.0)) == [(0, 1), (0, 2), (0, 3)]


def test_a_copy_of_a_pull_that_waits_is_answered_once() -> None:
    core = server(ssp(0))
    for _ in range(2):
        core.handle(pull(0, 1, 1, 1, table="r"), 0.0)
    core.handle(tick(0, 1), 0.0)
    assert requests(core.handle(tick(1, 1), 0.0)) == [(0, 1)]


def test_a_dead_worker_is_answered_no_more() -> None:
    core = server(ssp(0), workers=(0, 1, 2))
    core.handle(pull(0, 1, 1, 1, table="r"), 0.0)
    core.handle(Died(0, 0, "killed"), 0.0)
    core.handle(tick(1, 1), 0.0)
    assert requests(core.handle(tick(2, 1), 0.0)) == []


def deliveries(core: ServerCore, clock: int) -> list[tuple[int, int]]:
    """Finish a clock, and return (clock, since) of what is delivered for it."""
    return [(m.clock, m.since) for m in said(core.handle(tick(0, clock), 0.0), Delivered) if m.table == "r"]


def taken(core: ServerCore, clock: int) -> list[tuple[int, int]]:
    return [(m.clock, m.since) for m in said(core.handle(Taken(sender(0), "r", clock), 0.0), Delivered)]


def test_deliveries_say_after_which_they_come() -> None:
    core = server(essp(1), workers=(0,))
    core.handle(pull(0, 1, 0, 0, table="r"), 0.0)
    assert deliveries(core, 1) == [(1, -1)]
    assert taken(core, 1) == []
    assert deliveries(core, 2) == [(2, 1)]


def test_an_answer_is_no_delivery() -> None:
    core = server(essp(1), workers=(0,))
    core.handle(pull(0, 1, 0, 0, table="r"), 0.0)
    assert deliveries(core, 1) == [(1, -1)]
    core.handle(pull(0, 2, 1, 0, table="r"), 0.0)
    assert deliveries(core, 2) == [], "the one before has yet to be taken"
    assert taken(core, 1) == [(2, 1)]


def test_a_delivery_after_a_new_connection_says_that_some_may_be_lost() -> None:
    core = server(essp(1), workers=(0,))
    core.handle(pull(0, 1, 0, 0, table="r"), 0.0)
    deliveries(core, 1)
    core.handle(Join(sender(0)), 0.0)
    assert deliveries(core, 2) == [(2, -2)]
    assert taken(core, 1) == [], "an older notice ends no newer delivery"
    assert taken(core, 2) == []
    assert deliveries(core, 3) == [(3, 2)]


def test_no_reader_is_delivered_to_before_its_first_answer() -> None:
    core = server(essp(0), workers=(0, 1))
    core.handle(pull(0, 1, 1, 1, table="r"), 0.0)
    core.handle(push(0, 0, 0, table="r"), 0.0)
    core.handle(tick(0, 1), 0.0)
    effects = core.handle(tick(1, 1), 0.0)
    kinds = [(e.worker, type(e.message).__name__) for e in of(effects, Serve) if e.message.table == "r"]
    assert kinds == [(0, "Fetched"), (0, "Delivered")]


def test_deliveries_of_whole_tables_say_nothing_of_what_was_before() -> None:
    readers = DenseReadQueue(subscribing=True)
    assert readers.add_pull(pull(0, 1, 0, 0), clock=0)
    assert readers.start_delivery(0, 1)
    assert readers.clock_before(0) == -1

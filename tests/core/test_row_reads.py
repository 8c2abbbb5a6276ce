"""A worker core and its reads of rows: which servers are asked, what ends a read, and how far deliveries count."""

from tests.core.cores import of, said, sender

from paceline.core.consistency import Consistency, backup, bsp, essp, ssp
from paceline.core.effects import Fail, Forget, Install, ReadDone, Send
from paceline.core.events import Arrived, Connected, Opened, Timeout, WantClock, WantJoin, WantRows
from paceline.core.messages import Clock, Delivered, Fetched, Joined, Pull, Taken
from paceline.core.settings import WorkerSettings
from paceline.core.worker import WorkerCore


def worker(point: Consistency, num_servers: int = 1, clock: int = 0) -> WorkerCore:
    """Return worker 0 with the row table "r" open."""
    core = WorkerCore(WorkerSettings(sender(0), num_servers, retry_s=1.0, max_attempts=5))
    core.handle(Opened("r", point, tuple(range(num_servers)), keyed=True), 0.0)
    core.handle(WantJoin(), 0.0)
    for server in range(num_servers):
        core.handle(Arrived(server, Joined(0)), 0.0)
    for _ in range(clock):
        core.handle(WantClock(), 0.0)
    return core


def pull(request: int, needs: int, clock: int = 0) -> Pull:
    return Pull(sender(0), request, "r", clock, needs)


def fetched(request: int, clock: int, version: int = 0) -> Fetched:
    return Fetched(request, "r", clock, version, 2, (5,))


def delivered(clock: int, version: int = 0, since: int = -1) -> Delivered:
    return Delivered("r", clock, version, 2, (5,), since)


def install(request: int, clock: int, server: int = 0) -> Install:
    return Install(server, "r", request, clock, 2, (5,))


def test_a_read_asks_the_servers_it_names_and_ends_with_the_last_answer() -> None:
    core = worker(ssp(1), num_servers=3, clock=3)
    wanted = core.handle(WantRows("r", 2, (0, 2)), 0.0)
    assert wanted == [Send(0, pull(1, 2, 3)), Send(2, pull(1, 2, 3))]
    assert core.handle(Arrived(2, fetched(1, 4)), 0.0) == [install(1, 4, server=2)]
    assert core.handle(Arrived(0, fetched(1, 3)), 0.0) == [install(1, 3), ReadDone(1, "r", 3, "fetch")]


def test_a_read_of_rows_that_are_kept_ends_at_once() -> None:
    assert worker(ssp(1)).handle(WantRows("r", 0, ()), 0.0) == [ReadDone(1, "r", 0, "cache")]


def test_several_reads_at_once_each_end_with_their_own_answer() -> None:
    core = worker(ssp(1))
    for _ in range(3):
        core.handle(WantRows("r", 0, (0,)), 0.0)
    for request in (2, 1, 3):
        assert of(core.handle(Arrived(0, fetched(request, 1)), 0.0), ReadDone) == [ReadDone(request, "r", 1, "fetch")]


def test_a_second_copy_of_an_answer_and_an_unasked_one_change_nothing() -> None:
    core = worker(ssp(1))
    core.handle(WantRows("r", 0, (0,)), 0.0)
    core.handle(Arrived(0, fetched(1, 0)), 0.0)
    assert core.handle(Arrived(0, fetched(1, 0)), 0.0) == []
    assert core.handle(Arrived(0, fetched(9, 0)), 0.0) == []


def test_ssp6_an_answer_that_is_too_old_ends_the_worker_and_says_whose_fault_it_is() -> None:
    core = worker(bsp(), clock=2)
    core.handle(WantRows("r", 2, (0,)), 0.0)
    assert core.handle(Arrived(0, fetched(1, 1)), 0.0) == [
        Fail(
            "server 0 answered a pull of rows of table 'r' with values of clock 1, but worker 0 at clock 2 needs 2; "
            "the server breaks the staleness bound"
        )
    ]


def test_a_lost_pull_is_repeated_to_the_letter() -> None:
    core = worker(ssp(1))
    core.handle(WantRows("r", 0, (0,)), 0.0)
    assert core.handle(Timeout(), 1.0) == [Send(0, pull(1, 0))]


def test_an_answer_that_was_overtaken_is_not_taken_in_but_asked_for_again() -> None:
    core = worker(ssp(1))
    for _ in range(2):
        core.handle(WantRows("r", 0, (0,)), 0.0)
    core.handle(Arrived(0, fetched(2, 1, version=4)), 0.0)
    assert core.handle(Arrived(0, fetched(1, 1, version=3)), 0.0) == [Send(0, pull(1, 0))]
    assert of(core.handle(Arrived(0, fetched(1, 1, version=4)), 0.0), ReadDone) == [ReadDone(1, "r", 1, "fetch")]


def test_t10_a_delivery_is_installed_before_anything_is_told_or_woken() -> None:
    core = worker(essp(0), clock=1)
    assert core.handle(WantRows("r", 1, (), (0,)), 0.0) == []
    assert core.reads("r").reached(0) == -1
    assert core.handle(Arrived(0, delivered(1)), 0.0) == [
        install(-1, 1),
        Send(0, Taken(sender(0), "r", 1)),
        ReadDone(1, "r", 1, "delivery"),
    ]
    assert core.reads("r").reached(0) == 1


def test_a_delivery_of_an_earlier_clock_or_of_another_server_does_not_end_a_read() -> None:
    core = worker(essp(0), num_servers=2, clock=2)
    core.handle(WantRows("r", 2, (), (0,)), 0.0)
    assert of(core.handle(Arrived(1, delivered(2)), 0.0), ReadDone) == []
    assert of(core.handle(Arrived(0, delivered(1)), 0.0), ReadDone) == []
    assert of(core.handle(Arrived(0, delivered(2, since=1)), 0.0), ReadDone) == [ReadDone(1, "r", 2, "delivery")]


def test_a_read_whose_delivery_does_not_come_asks_itself() -> None:
    core = worker(essp(0), clock=1)
    core.handle(WantRows("r", 1, (), (0,)), 0.0)
    assert said(core.handle(Timeout(), 0.9), Pull) == []
    assert said(core.handle(Timeout(), 1.0), Pull) == [pull(1, 1, 1)]
    assert of(core.handle(Arrived(0, fetched(1, 1)), 1.0), ReadDone) == [ReadDone(1, "r", 1, "fetch")]
    assert said(core.handle(Timeout(), 100.0), Pull) == []


def test_after_a_connection_is_made_again_a_read_asks_itself_and_a_delivery_does_not_end_it() -> None:
    core = worker(essp(0), num_servers=2, clock=1)
    core.handle(WantRows("r", 1, (), (0, 1)), 0.0)
    assert said(core.handle(Connected(0), 0.0), Pull) == [pull(1, 1, 1)]
    assert of(core.handle(Arrived(1, delivered(1)), 0.0), ReadDone) == []
    assert of(core.handle(Arrived(0, fetched(1, 1)), 0.0), ReadDone) == [ReadDone(1, "r", 1, "fetch")]


def test_deliveries_follow_each_other_or_all_that_was_kept_is_forgotten() -> None:
    core = worker(essp(2))
    assert of(core.handle(Arrived(0, delivered(1)), 0.0), Install)
    assert of(core.handle(Arrived(0, delivered(3, since=1)), 0.0), Install)
    assert core.handle(Arrived(0, delivered(5, since=4)), 0.0) == [
        Forget(0, "r"),
        Send(0, Taken(sender(0), "r", 5)),
    ]
    assert core.reads("r").reached(0) == 5
    assert of(core.handle(Arrived(0, delivered(6, since=5)), 0.0), Install)


def test_a_server_that_heard_of_a_new_connection_says_that_something_may_be_lost() -> None:
    core = worker(essp(2))
    assert of(core.handle(Arrived(0, delivered(1, since=-2)), 0.0), Forget) == [Forget(0, "r")]


def test_a_copy_of_a_delivery_is_acknowledged_again_and_costs_nothing() -> None:
    core = worker(essp(2))
    core.handle(Arrived(0, delivered(1)), 0.0)
    assert core.handle(Arrived(0, delivered(1)), 0.0) == [Send(0, Taken(sender(0), "r", 1))]


def test_a_delivery_that_newer_rows_have_overtaken_is_not_taken_in() -> None:
    core = worker(essp(2))
    core.handle(WantRows("r", 0, (0,)), 0.0)
    core.handle(Arrived(0, fetched(1, 1, version=7)), 0.0)
    assert of(core.handle(Arrived(0, delivered(1, version=6)), 0.0), Install | Forget) == [Forget(0, "r")]


def test_servers_from_which_an_answer_may_come_are_known() -> None:
    core = worker(essp(0), num_servers=3, clock=1)
    assert core.reads("r").awaited() == set()
    core.handle(WantRows("r", 1, (0,), (2,)), 0.0)
    assert core.reads("r").awaited() == {0, 2}
    core.handle(Arrived(0, fetched(1, 1)), 0.0)
    assert core.reads("r").awaited() == {2}


def test_t33_a_worker_that_missed_clocks_goes_on_at_the_one_that_it_reads() -> None:
    core = worker(backup(1), num_servers=2)
    core.handle(WantRows("r", 0, (0, 1)), 0.0)
    core.handle(Arrived(0, fetched(1, 5)), 0.0)
    effects = core.handle(Arrived(1, fetched(1, 4)), 0.0)
    assert of(effects, ReadDone) == [ReadDone(1, "r", 4, "fetch")]
    assert core.clock == 4
    assert [message.clock for message in said(effects, Clock)] == [4, 4]


def test_a_read_ahead_that_lacks_no_rows_moves_no_worker() -> None:
    core = worker(backup(1), clock=3)
    assert core.handle(WantRows("r", 4, ()), 0.0) == [ReadDone(1, "r", 3, "cache")]
    assert core.clock == 3

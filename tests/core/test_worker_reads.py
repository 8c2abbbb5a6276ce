"""A worker core and its reads: what the cache may answer, what must be fetched, what a delivery does."""

from tests.core.cores import make_worker, of, pull, said, sender, tick

from paceline.core.consistency import asynchronous, backup, bsp, essp, ssp
from paceline.core.effects import Fail, Install, ReadDone, Send
from paceline.core.events import Arrived, Connected, Timeout, WantClock, WantPush, WantRead
from paceline.core.messages import Clock, Delivered, Fetched, Join, Pull, PullRefused, Push, Taken


def fetched(request: int, clock: int, version: int = 0, *, settled: int = 0, includes: tuple[int, ...] = ()) -> Fetched:
    return Fetched(request, "w", clock, version, settled, includes)


def delivered(clock: int, version: int = 0) -> Delivered:
    return Delivered("w", clock, version, 0, ())


def test_t1_a_pull_says_what_the_reader_needs() -> None:
    core = make_worker(ssp(2))
    for _ in range(5):
        core.handle(WantClock(), 0.0)
    assert core.handle(WantRead("w"), 0.0) == [Send(0, pull(0, 1, 5, needs=3))]


def test_an_exact_read_needs_everything_below_the_readers_clock() -> None:
    core = make_worker(asynchronous())
    for _ in range(4):
        core.handle(WantClock(), 0.0)
    assert said(core.handle(WantRead("w", exact=True), 0.0), Pull) == [pull(0, 1, 4, needs=4)]


def test_a_read_is_done_when_every_server_has_answered() -> None:
    core = make_worker(ssp(1), num_servers=2)
    core.handle(WantRead("w"), 0.0)
    assert core.handle(Arrived(0, fetched(1, 3)), 0.0) == [Install(0, "w", 1, 3, 0, ())]
    effects = core.handle(Arrived(1, fetched(1, 1)), 0.0)
    assert effects == [Install(1, "w", 1, 1, 0, ()), ReadDone(1, "w", 1, "fetch")]


def test_t2_a_cached_part_older_than_c_minus_s_is_never_used() -> None:
    core = make_worker(ssp(1))
    core.handle(WantRead("w"), 0.0)
    core.handle(Arrived(0, fetched(1, 0)), 0.0)
    core.handle(WantClock(), 0.0)
    assert core.handle(WantRead("w", refresh=False), 0.0) == [ReadDone(2, "w", 0, "cache")]
    core.handle(WantClock(), 0.0)
    assert core.handle(WantRead("w", refresh=False), 0.0) == [Send(0, pull(0, 3, 2, needs=1))]


def test_t2_only_the_parts_that_are_too_old_are_fetched() -> None:
    core = make_worker(ssp(0), num_servers=2)
    core.handle(WantRead("w"), 0.0)
    core.handle(Arrived(0, fetched(1, 0)), 0.0)
    core.handle(Arrived(1, fetched(1, 1)), 0.0)
    core.handle(WantClock(), 0.0)
    assert [e.server for e in of(core.handle(WantRead("w", refresh=False), 0.0), Send)] == [0]


def test_a_never_seen_table_is_always_fetched() -> None:
    core = make_worker(asynchronous())
    assert len(of(core.handle(WantRead("w", refresh=False), 0.0), Send)) == 1


def test_a_refresh_asks_although_the_cache_would_do() -> None:
    core = make_worker(asynchronous())
    core.handle(WantRead("w"), 0.0)
    core.handle(Arrived(0, fetched(1, 0)), 0.0)
    assert said(core.handle(WantRead("w", refresh=True), 0.0), Pull) == [pull(0, 2, 0, needs=0)]


def test_ssp5_older_values_are_not_installed_over_newer_ones() -> None:
    core = make_worker(asynchronous())
    core.handle(WantRead("w"), 0.0)
    core.handle(Arrived(0, fetched(1, 2, version=9)), 0.0)
    assert core.handle(Arrived(0, fetched(1, 2, version=8)), 0.0) == []
    assert core.handle(Arrived(0, fetched(1, 1, version=9)), 0.0) == []
    assert of(core.handle(Arrived(0, fetched(1, 2, version=9)), 0.0), Install) == [Install(0, "w", 1, 2, 0, ())]


def test_an_answer_to_a_former_request_does_not_end_a_refresh() -> None:
    core = make_worker(asynchronous())
    core.handle(WantRead("w"), 0.0)
    core.handle(Arrived(0, fetched(1, 0)), 0.0)
    core.handle(WantRead("w"), 0.0)
    assert of(core.handle(Arrived(0, fetched(1, 0)), 0.0), ReadDone) == []
    assert of(core.handle(Arrived(0, fetched(2, 0)), 0.0), ReadDone) == [ReadDone(2, "w", 0, "fetch")]


def test_ssp6_a_worker_checks_the_bound_itself() -> None:
    core = make_worker(bsp())
    core.handle(WantClock(), 0.0)
    core.handle(WantRead("w"), 0.0)
    (failure,) = of(core.handle(Arrived(0, fetched(1, 0)), 0.0), Fail)
    assert "values of clock 0, but worker 0 at clock 1 needs 1" in failure.reason


def test_t10_a_delivery_is_installed_then_taken_and_wakes_the_reader_that_it_satisfies() -> None:
    core = make_worker(essp(0))
    core.handle(WantClock(), 0.0)
    core.handle(WantRead("w", refresh=False), 0.0)
    assert core.handle(Arrived(0, delivered(1)), 0.0) == [
        Install(0, "w", -1, 1, 0, ()),
        Send(0, Taken(sender(0), "w", 1)),
        ReadDone(1, "w", 1, "delivery"),
    ]
    assert core.handle(Timeout(), 100.0) == [Send(0, tick(0, 1))]  # the pull needs no answer any more


def test_a_delivery_that_is_not_fresh_enough_does_not_wake_the_reader() -> None:
    core = make_worker(essp(0))
    for _ in range(2):
        core.handle(WantClock(), 0.0)
    core.handle(WantRead("w", refresh=False), 0.0)
    assert of(core.handle(Arrived(0, delivered(1)), 0.0), ReadDone) == []


def test_a_read_after_a_delivery_asks_no_server() -> None:
    core = make_worker(essp(1))
    core.handle(Arrived(0, delivered(4)), 0.0)
    core.handle(WantClock(), 0.0)
    assert core.handle(WantRead("w", refresh=False), 0.0) == [ReadDone(1, "w", 4, "delivery")]


def test_an_overtaken_delivery_is_taken_but_not_installed() -> None:
    core = make_worker(essp(1))
    core.handle(Arrived(0, delivered(4, 8)), 0.0)
    assert core.handle(Arrived(0, delivered(3, 7)), 0.0) == [Send(0, Taken(sender(0), "w", 3))]


def test_a_delivery_does_not_end_a_refresh() -> None:
    core = make_worker(essp(5))
    core.handle(WantRead("w", refresh=True), 0.0)
    assert of(core.handle(Arrived(0, delivered(4)), 0.0), ReadDone) == []


def test_essp1_an_install_says_which_own_pushes_the_values_contain() -> None:
    core = make_worker(essp(0))
    effects = core.handle(Arrived(0, Delivered("w", 1, 3, 2, (4,))), 0.0)
    assert of(effects, Install) == [Install(0, "w", -1, 1, 2, (4,))]


def test_t33_a_worker_that_missed_clocks_jumps_to_the_one_it_reads() -> None:
    core = make_worker(backup(1), num_servers=2)
    core.handle(WantRead("w"), 0.0)
    core.handle(Arrived(0, fetched(1, 5)), 0.0)
    effects = core.handle(Arrived(1, fetched(1, 4)), 0.0)
    assert of(effects, ReadDone) == [ReadDone(1, "w", 4, "fetch")]
    assert (core.clock, said(effects, Clock)) == (4, [tick(0, 4), tick(0, 4)])
    assert said(core.handle(WantPush("w"), 0.0), Push)[0].clock == 4


def test_without_a_quorum_a_worker_keeps_its_own_clock() -> None:
    core = make_worker(asynchronous())
    core.handle(WantRead("w"), 0.0)
    core.handle(Arrived(0, fetched(1, 5)), 0.0)
    assert core.clock == 0


def test_a_refused_pull_ends_the_worker() -> None:
    effects = make_worker().handle(Arrived(0, PullRefused(1, "w", "there is no table 'w'")), 0.0)
    assert effects == [Fail("server 0 refused a pull: there is no table 'w'")]


def test_a_lost_pull_is_repeated_to_the_letter() -> None:
    core = make_worker()
    core.handle(WantRead("w"), 0.0)
    assert core.handle(Timeout(), 1.0) == [Send(0, pull(0, 1, 0, needs=0))]


def test_a_read_waits_for_slow_workers_however_often_it_is_repeated() -> None:
    core = make_worker(ssp(0), max_attempts=3)
    core.handle(WantRead("w"), 0.0)
    effects = [effect for _ in range(50) for effect in core.handle(Timeout(), core.next_deadline() or 0.0)]
    assert of(effects, Fail) == []
    assert len(said(effects, Pull)) == 50


def test_a_read_that_takes_the_place_of_an_older_one_is_repeated_after_the_pushes_between() -> None:
    core = make_worker(asynchronous())
    for wish in (WantRead("w"), WantPush("w"), WantRead("w")):
        core.handle(wish, 0.0)
    again = [effect.message for effect in of(core.handle(Connected(0), 0.0), Send)]
    assert [type(message) for message in again] == [Join, Push, Pull]

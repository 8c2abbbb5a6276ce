import pytest
from tests.observe.stories import OWN_S, left, story, window_of

from paceline.observe.disk import DiskUse
from paceline.observe.trace import Exit, Refusal, State
from paceline.observe.verdict import ProcessState, RunVerdict, Surroundings, judge
from paceline.observe.window import Window, worker_times


def only(slow: int, seconds: float):  # noqa: ANN201 - a function of worker and clock
    return lambda worker, _clock: seconds if worker == slow else 0.0


def verdict(**what: object) -> RunVerdict:
    return judge(window_of(story(**what)))  # pyright: ignore[reportArgumentType]


def test_a_run_without_records_or_with_few_steps_is_starting() -> None:
    assert judge(Window()).kind == "starting"
    assert verdict(num_clocks=3, more=only(1, 1.0)).kind == "starting"


def test_equal_workers_are_healthy() -> None:
    assert verdict().text == "healthy"


def test_one_worker_alone_is_healthy() -> None:
    assert verdict(num_workers=1).text == "healthy"


def test_a_slow_worker_is_named_with_what_the_others_wait() -> None:
    found = verdict(more=only(1, 2 * OWN_S))
    assert found.text == "worker 1 is 3.0x slower: computing; the others wait 66 % for it"
    assert (found.kind, found.subject) == ("worker", "worker 1")


@pytest.mark.parametrize(
    ("used", "cause"),
    [
        ({"delayed_s": 2 * OWN_S}, "other processes have its core"),
        ({"gc_s": 2 * OWN_S}, "garbage collection"),
        ({"num_faults": 300.0}, "its memory is short, 300 pages a step come from the disk"),
        ({"cpu_s": 0.01}, "computing (asleep)"),
        ({"cpu_s": 3 * OWN_S}, "computing"),
    ],
)
def test_the_cause_is_what_explains_the_longer_work(used: dict[str, float], cause: str) -> None:
    found = verdict(more=only(2, 2 * OWN_S), used=lambda worker, _: used if worker == 2 else {})
    assert found.cause == cause


def test_pauses_in_some_steps_are_named() -> None:
    found = verdict(
        more=lambda worker, clock: 6 * OWN_S if worker == 0 and clock % 3 == 0 else 0.0,
        used=lambda worker, _: {"gc_s": 2 * OWN_S} if worker == 0 else {},
    )
    assert (found.subject, found.cause) == ("worker 0", "garbage collection")


def test_a_single_long_step_is_no_verdict() -> None:
    assert verdict(more=lambda worker, clock: 2 * OWN_S if (worker, clock) == (1, 9) else 0.0).is_healthy


def test_workers_that_are_late_in_turn_are_no_verdict() -> None:
    assert verdict(more=lambda worker, clock: OWN_S if clock % 3 == worker else 0.0).is_healthy


def test_a_worker_that_waits_for_its_data_is_named() -> None:
    found = verdict(load=only(0, OWN_S))
    assert found.text == "worker 0 waits for its data and is 2.0x slower; the others wait 49 % for it"


def test_data_of_all_workers() -> None:
    assert verdict(load=lambda _worker, _clock: 3 * OWN_S).text == "all workers wait for their data, 74 % of the time"


def test_a_slow_server_that_is_busy_is_slow_to_apply() -> None:
    found = verdict(apply_s=OWN_S, busy=0.6)
    assert found.text.startswith("server 0 is slow to apply: it is busy 60 %, 50.0 ms an update; the workers wait 50 %")


def test_a_server_that_is_idle_while_all_wait_is_slow_to_answer() -> None:
    found = verdict(up=lambda _worker, _clock: OWN_S, down=lambda _worker, _clock: OWN_S)
    assert (found.kind, found.subject) == ("server", "server 0")
    assert "idle" in found.text


@pytest.mark.parametrize("way", ["up", "down"])
def test_the_link_of_one_worker(way: str) -> None:
    found = judge(window_of(story(**{way: only(2, 2 * OWN_S)})))  # pyright: ignore[reportArgumentType]
    assert (found.kind, found.subject) == ("link", "worker 2")
    assert "thin" in found.text


def test_a_link_that_sends_again_loses_packets() -> None:
    found = verdict(up=only(1, OWN_S), used=lambda worker, _: {"num_resent": 4} if worker == 1 else {})
    assert "the link of worker 1 loses packets" in found.text


def test_a_hot_row_is_told_when_nothing_else_is() -> None:
    hot = (("words", 7, 1.0), ("words", 9, 0.1))
    assert (
        verdict(hot_rows=hot).text
        == "row 7 of table 'words' is hot: 100 % of the pushes have it, and the next one 10 %"
    )
    assert verdict(hot_rows=hot, more=only(1, OWN_S)).subject == "worker 1"


def test_frequent_rows_without_a_gap_are_no_hot_row() -> None:
    assert verdict(hot_rows=(("words", 7, 1.0), ("words", 9, 0.9))).is_healthy


def test_a_stopped_worker_and_one_that_is_gone() -> None:
    window = window_of(story())
    stopped = judge(window, Surroundings(processes={("worker", 1): ProcessState("T")}))
    assert stopped.text == "worker 1 is stopped by a signal; `kill -CONT 1001` lets it go on"
    assert judge(window, Surroundings(processes={("worker", 2): ProcessState("")})).kind == "dead"
    assert judge(window, Surroundings(processes={("worker", 2): ProcessState("")}, has_ended=True)).is_healthy


def test_a_server_whose_end_the_launcher_has_told_is_not_missed() -> None:
    told = Exit(0.0, "server 0", "server", 0, 0, None, -9, 0.0, "was killed by SIGKILL", "another process goes on")
    gone = Surroundings(processes={("server", 0): ProcessState("")})
    assert judge(window_of(story()), gone).text == "server 0 is dead: its process is gone"
    assert judge(window_of([*story(), told]), gone).is_healthy


def test_a_worker_that_has_left_is_not_missed() -> None:
    records = story()
    window = window_of([*records, left(2, records[-1].t + 1)])
    assert judge(window, Surroundings(processes={("worker", 2): ProcessState("")})).is_healthy


def test_what_the_launcher_says_of_a_death_comes_first() -> None:
    assert judge(Window(), Surroundings(ends={1: "dead since 14:03"})).text == "worker 1 is dead since 14:03"


def test_a_silent_worker_is_hung_and_one_that_computes_long_is_named() -> None:
    records = story()
    now = records[-1].t + 11
    states = [State(now, worker, 14, "communicating", 11.0) for worker in (0, 2)]
    assert judge(window_of([*records, *states]), Surroundings(now=now)).subject == "worker 1"
    computes = State(now, 1, 14, "computing", 11.0)
    found = judge(window_of([*records, *states, computes]), Surroundings(now=now))
    assert found.text.startswith("worker 1 computes for 11 s in clock 14; its steps took 5")


def test_a_job_in_which_all_workers_wait_is_told_so_and_no_earlier_verdict() -> None:
    records = story(more=only(1, 2 * OWN_S))
    now = records[-1].t + 6
    states = [State(now, worker, 14, "communicating", 6.0) for worker in range(3)]
    found = judge(window_of([*records, *states]), Surroundings(now=now))
    assert (found.kind, found.text) == ("waiting", "no worker goes on: all 3 wait, for 6 s")
    assert judge(window_of([*records, *states[1:]]), Surroundings(now=now)).subject == "worker 1"


def test_records_that_end_and_refused_pushes() -> None:
    records = story()
    found = judge(
        window_of(records), Surroundings(records_end=True, disk=DiskUse(0, 1_000_000, 904_000, (("filling", 904_000),)))
    )
    assert found.text == (
        "the disk of the run is full, or a limit of its files is reached: records end. "
        "0 MB of 1.0 MB are free; filling takes 0.9 MB"
    )
    refusals = [Refusal(records[-1].t, -1, 1, "w", "3 of its elements are NaN")] * 6
    assert judge(window_of([*records, *refusals])).text == "pushes of worker 1 are refused: 3 of its elements are NaN"


def test_where_a_step_goes_adds_up_to_the_step() -> None:
    times = worker_times(window_of(story(more=only(1, OWN_S), up=only(1, 0.01), load=only(0, 0.01))))
    for time in times.values():
        assert time.own_s + time.load_s + time.for_workers_s + time.wire_s == pytest.approx(time.step_s)
    assert times[0].awaited == 1
    assert times[1].for_workers_s == 0


def test_the_first_records_of_another_run_do_not_break_it() -> None:
    window = Window()
    for record in story(2, 14)[::-1]:  # in any order
        window.add(record)
    judge(window)

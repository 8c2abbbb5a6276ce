"""What a page is told of all of a run has a fixed size, and loses nothing of the sums."""

import random

import pytest

from paceline.observe.dashboard.history import MAX_EVENTS, MAX_SHOWN_WORKERS, NUM_BINS, Axis, RunHistory
from paceline.observe.trace import Carried, Exit, ReadRecord, Reported, RowRead, Serving, Step, TraceRecord


def series(history: RunHistory) -> dict[str, dict[str, list[float | None]]]:
    return history.times.news(whole=True)["series"]  # type: ignore[return-value]


def total(values: list[float | None]) -> float:
    return sum(value or 0.0 for value in values)


def steps(num_workers: int, num_clocks: int, step_s: float) -> list[TraceRecord]:
    return [
        Step(100 + (clock + 1) * step_s, worker, clock, 8, 0.5, 0.2 * step_s, step_s, 0.3 * step_s, 0.1 * step_s)
        for clock in range(num_clocks)
        for worker in range(num_workers)
    ]


@pytest.mark.parametrize("step_s", [0.01, 0.7, 90.0])
def test_however_long_a_run_is_its_series_are_bounded_and_their_sums_are_right(step_s: float) -> None:
    history = RunHistory()
    history.add_all(steps(2, 3000, step_s))
    times = history.times.news(whole=True)
    assert NUM_BINS / 2 - 1 <= history.times.num <= NUM_BINS or step_s == 0.01
    assert history.times.width * history.times.num >= 2999 * step_s
    for name, share in (("compute", 0.6), ("data", 0.1), ("wait", 0.2), ("wire", 0.1)):
        seconds = total(series(history)[name]["1"])
        assert seconds == pytest.approx(2999 * step_s * share, rel=0.01), name
    assert total(series(history)["num"][""]) == pytest.approx(2 * 3000 * 8, rel=0.001)
    assert total(series(history)["losses"][""]) == 6000
    assert all(len(values) == times["num"] for of in series(history).values() for values in of.values())


def test_records_may_come_in_any_order() -> None:
    records = steps(3, 200, 0.1)
    mixed = [records[0], *random.Random(1).sample(records[1:], len(records) - 1)]
    one, other = RunHistory(), RunHistory()
    one.add_all(records)
    other.add_all(mixed)
    for name, of in series(one).items():
        for key, values in of.items():
            assert [value or 0 for value in series(other)[name][key]] == pytest.approx(
                [value or 0 for value in values], rel=0.01, abs=1e-9
            )


def test_only_what_has_changed_is_news() -> None:
    axis = Axis(1.0)
    axis.add(("a", ""), 0.5, 1.0)
    axis.add(("a", ""), 7.5, 2.0)
    axis.note_told()
    axis.add(("a", ""), 7.9, 3.0)
    axis.add(("a", ""), 9.0, 4.0)
    assert axis.news(whole=False) == {"width": 1.0, "from": 7, "num": 10, "series": {"a": {"": [5.0, None, 4.0]}}}
    axis.note_told()
    axis.add(("b", ""), 9.5, 1.0)  # a series that is not known yet
    assert axis.news(whole=False)["from"] == 0
    axis.note_told()
    axis.add(("a", ""), 2.0 * NUM_BINS, 1.0)  # spans are wider from here on
    assert (axis.news(whole=False)["from"], axis.width) == (0, 4.0)


def test_staleness_is_counted_by_reads_and_by_rows() -> None:
    history = RunHistory()
    history.add_all([
        ReadRecord(100.0, 0, "model", 5, 5, 0.0, "fetch"),
        ReadRecord(100.0, 0, "model", 9, 4, 0.0, "cache"),
        RowRead(100.0, 1, "words", 100, {100: 3, 86: 2, 1: 4}, 0.0),
    ])  # fmt: skip
    assert {bar: total(values) for bar, values in series(history)["stale"].items()} == {
        "0": 4,
        "5": 1,
        "12": 2,
        "64": 4,
    }


def test_bytes_are_what_totals_have_grown_by_also_over_the_lives_of_a_server() -> None:
    history = RunHistory()
    totals = [(100.0, 1000, 500), (101.0, 3000, 900), (102.0, 400, 100)]  # then another process is the server
    for t, received, sent in totals:
        history.add_all([Carried(t, 0, ((2, received, sent),), (("model", received, sent),))])
        history.add_all([Serving(t, 0, t - 100.0, 0.5 * (t - 100.0), received, sent, 4)])
    assert total(series(history)["up"]["2"]) == total(series(history)["pushed"]["model"]) == 2400
    assert total(series(history)["down"]["2"]) == total(series(history)["sent"]["0"]) == 500
    assert total(series(history)["busy"]["0"]) == pytest.approx(1.0)
    assert history.news(whole=True)["rates"] == [[2, 0, 400.0, 100.0]]


def test_events_and_workers_have_a_bound() -> None:
    history = RunHistory()
    exits = [
        Exit(100.0 + n, f"worker {n}", "worker", n, 0, 1, -9, 0.0, "was killed", "the others go on") for n in range(500)
    ]
    history.add_all([*exits, *(Step(200.0, worker, 0, 8, 0.5, 0.0, 0.1) for worker in range(2 * MAX_SHOWN_WORKERS))])
    assert len(history.events) == MAX_EVENTS
    assert len(series(history)["compute"]) == MAX_SHOWN_WORKERS
    assert total(series(history)["num"][""]) == pytest.approx(2 * MAX_SHOWN_WORKERS * 8)


def test_a_loss_that_is_no_number_is_an_event_once_for_each_worker() -> None:
    history = RunHistory()
    history.add_all([Reported(100.0 + clock, 1, clock, None, "nan") for clock in range(5)])
    assert list(history.events) == [(0.0, "worker 1: its loss is nan in clock 0")]

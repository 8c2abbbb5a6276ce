"""Reported values as points: those of a worker as they come, and merged ones once no worker can add to them."""

from __future__ import annotations

import math

from paceline.observe.export.points import MOST_NAMES, MOST_WORKERS, Point, PointMaker
from paceline.observe.trace import (
    Evaluated,
    MembershipRecord,
    ReadRecord,
    Reported,
    ReportedValues,
    Step,
    TraceRecord,
)


def step(worker: int, clock: int, loss: float | None = None) -> Step:
    return Step(float(clock), worker, clock, 8, loss, 0.25, 1.0)


def named(points: list[Point]) -> dict[tuple[str, int], float]:
    return {(point.name, point.clock): point.value for point in points if not point.name.startswith("paceline/")}


def feed(maker: PointMaker, *records: TraceRecord) -> dict[tuple[str, int], float]:
    return named([point for record in records for point in maker.add(record)])


def test_a_clock_is_merged_once_every_worker_that_takes_part_is_past_it() -> None:
    maker = PointMaker()
    read = ReadRecord(0.0, 1, "model", 0, 0, 0.0, "fetch")
    assert feed(maker, read, step(0, 0, 1.0), step(0, 1, 3.0)) == {("worker-0/loss", 0): 1.0, ("worker-0/loss", 1): 3.0}
    assert maker.pop_merged() == []
    feed(maker, step(1, 0, 2.0))
    assert named(maker.pop_merged()) == {("loss", 0): 1.5}
    assert named(maker.pop_merged(is_over=True)) == {("loss", 1): 3.0}


def test_a_worker_that_has_left_is_not_waited_for_and_what_it_said_counts() -> None:
    maker = PointMaker()
    feed(maker, step(0, 0, 1.0), step(1, 0, 2.0), step(0, 1, 5.0))
    maker.pop_merged()
    feed(maker, MembershipRecord(3.0, 0, 1, 0, "died"))
    assert named(maker.pop_merged()) == {("loss", 1): 5.0}


def test_all_names_of_a_script_are_merged_and_nan_stays_nan() -> None:
    maker = PointMaker()
    points = feed(
        maker,
        ReportedValues(0.0, 0, 0, {"grad_norm": 1.0, "kl": "nan"}),
        ReportedValues(0.0, 1, 0, {"grad_norm": 3.0, "kl": 1.0}),
        Reported(0.0, 1, 0, None, "inf"),
        Evaluated(0.0, 0, 0, 0.5, None),
        step(0, 0),
        step(1, 0),
    )
    assert points["worker-1/grad_norm", 0] == 3.0
    merged = named(maker.pop_merged())
    assert (merged["grad_norm", 0], merged["loss", 0], merged["evaluation/loss", 0]) == (2.0, math.inf, 0.5)
    assert math.isnan(merged["kl", 0])
    assert math.isnan(merged["evaluation/accuracy", 0])


def test_values_whose_sum_is_not_finite_have_a_mean_that_is_not() -> None:
    maker = PointMaker()
    feed(maker, ReportedValues(0.0, 0, 0, {"both": "inf", "large": 1.5e308}))
    feed(maker, ReportedValues(0.0, 1, 0, {"both": "-inf", "large": 1.5e308}))
    merged = named(maker.pop_merged(is_over=True))
    assert math.isnan(merged["both", 0])
    assert merged["large", 0] == math.inf


def test_staleness_and_time_are_merged_for_each_clock() -> None:
    maker = PointMaker()
    for record in (ReadRecord(0.0, 0, "model", 5, 3, 0.0, "fetch"), step(0, 5)):
        maker.add(record)
    merged = {point.name: point.value for point in maker.pop_merged()}
    assert merged == {"paceline/staleness": 2, "paceline/step_s": 1.0, "paceline/wait_s": 0.25}


def test_names_workers_and_open_clocks_are_bounded() -> None:
    maker = PointMaker()
    values: dict[str, float] = {f"value {number}": 1.0 for number in range(MOST_NAMES + 10)}
    assert len(maker.add(ReportedValues(0.0, 0, 0, dict(values)))) == MOST_NAMES
    assert maker.add(ReportedValues(0.0, MOST_WORKERS, 0, {"value 0": 1.0})) == []
    maker.add(ReadRecord(0.0, 1, "model", 0, 0, 0.0, "fetch"))  # a worker that never finishes a clock
    for clock in range(3000):
        maker.add(step(0, clock))
    given = {point.clock for point in maker.pop_merged()}
    assert given == set(range(3000 - 1024))
    maker.add(step(1, 0))
    assert list(maker.pop_merged()) == [], "it is of a clock that was given out"

"""What a worker counts of each clock, on a clock of the test's own, and tells of refused pushes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.observe.runs import read_run
from paceline.observe.trace import Trace, trace_path
from paceline.worker.dense import ReadOutcome
from paceline.worker.metrics import Refusals, StepMetrics


class Watch:
    """A watch that is put forward by hand."""

    def __init__(self) -> None:
        self.shown_s = 100.0

    def __call__(self) -> float:
        return self.shown_s

    def forward(self, s: float) -> None:
        self.shown_s += s


class Metered:
    """A metrics, its watch, and the steps that it has recorded."""

    def __init__(self, run: Path, trace: Trace) -> None:
        self.watch = Watch()
        self.metrics = StepMetrics(trace, 0, self.watch)
        self._run = run

    def read(self, wait_s: float) -> None:
        """Read values, which takes as long as they are waited for."""
        with self.metrics.communicating():
            self.watch.forward(wait_s)
        self.metrics.note_read("w", ReadOutcome(0, 0, "fetch", wait_s))

    def steps(self) -> list[tuple[float, float, float]]:
        """Communication, waiting and length of each step."""
        self.metrics.trace.flush()
        return [(step.comm_s, step.wait_s, step.step_s) for step in read_run(self._run).steps]


@pytest.fixture
def metered(tmp_path: Path) -> Iterator[Metered]:
    with Trace(trace_path(tmp_path, "worker", 0)) as trace:
        yield Metered(tmp_path, trace)


def test_communication_is_what_passes_inside(metered: Metered) -> None:
    metered.watch.forward(8.0)
    for _ in range(2):
        with metered.metrics.communicating():
            metered.watch.forward(0.5)
        metered.watch.forward(0.25)
    metered.metrics.finish_clock(0)
    assert metered.steps() == [(1.0, 0.0, 9.5)]


def test_uses_within_another_count_once(metered: Metered) -> None:
    with metered.metrics.communicating():
        metered.watch.forward(1.0)
        for _ in range(2):
            with metered.metrics.communicating():
                metered.watch.forward(2.0)
        metered.watch.forward(4.0)
    metered.watch.forward(16.0)
    metered.metrics.finish_clock(0)
    assert metered.steps() == [(9.0, 0.0, 25.0)]


def test_what_follows_the_end_of_a_clock_is_of_the_next(metered: Metered) -> None:
    """As in a step: push, clock, pull."""
    for clock in range(2):
        metered.watch.forward(10.0)
        with metered.metrics.communicating():
            metered.watch.forward(1.0)
            metered.metrics.finish_clock(clock)
            metered.watch.forward(0.5)
            metered.read(wait_s=2.0)
    metered.watch.forward(10.0)
    metered.metrics.finish_clock(2)
    assert metered.steps() == [(1.0, 0.0, 11.0), (3.5, 2.0, 13.5), (2.5, 2.0, 12.5)]


def test_what_fails_has_been_communication_all_the_same(metered: Metered) -> None:
    def fail() -> None:
        with metered.metrics.communicating():
            metered.watch.forward(1.0)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        fail()
    metered.watch.forward(1.0)
    metered.metrics.finish_clock(0)
    assert metered.steps() == [(1.0, 0.0, 2.0)]


def test_nothing_before_the_first_clock_begins_is_counted(metered: Metered) -> None:
    metered.read(wait_s=1.0)
    with metered.metrics.communicating():
        metered.watch.forward(2.0)
        metered.metrics.start_training()
        metered.watch.forward(4.0)
    metered.metrics.finish_clock(0)
    metered.read(wait_s=8.0)
    metered.metrics.start_training()  # from now on it changes nothing
    metered.metrics.finish_clock(1)
    assert metered.steps() == [(4.0, 0.0, 4.0), (8.0, 8.0, 8.0)]


def test_a_loss_that_no_step_has_is_recorded_by_itself(tmp_path: Path) -> None:
    with Trace(trace_path(tmp_path, "worker", 0)) as trace:
        metrics = StepMetrics(trace, 0, Watch())
        for loss in (3.0, 2.0):
            metrics.note_loss(0, loss)
        metrics.finish_clock(0)
        metrics.note_loss(1, float("nan"))
        metrics.finish_clock(1)
        metrics.note_loss(2, 1.0)
        metrics.note_end(2)
        metrics.note_end(2)
    run = read_run(tmp_path)
    assert [(told.clock, told.loss) for told in run.reported] == [(0, 3.0), (1, None), (2, 1.0)]
    assert [step.loss for step in run.steps] == [2.0, None]


def test_a_measurement_that_is_no_number_can_be_read_back(tmp_path: Path) -> None:
    with Trace(trace_path(tmp_path, "worker", 0)) as trace:
        StepMetrics(trace, 0, Watch()).note_evaluation(3, float("nan"), 0.1)
    (measured,) = read_run(tmp_path).evaluations
    assert (measured.loss, measured.accuracy) == (None, 0.1)


def test_a_worker_says_what_it_does_when_it_has_done_it_for_a_while(metered: Metered, tmp_path: Path) -> None:
    metrics, watch = metered.metrics, metered.watch
    metrics.record_state()
    watch.forward(2.0)
    metrics.record_state()
    metrics.finish_clock(0)
    with metrics.communicating():
        watch.forward(1.0)
        metrics.record_state()
        watch.forward(2.0)
        metrics.record_state()
    metrics.record_state()

    lines = trace_path(tmp_path, "worker", 0).read_text().splitlines()
    states = [record for record in map(json.loads, lines) if record["kind"] == "state"]
    assert [(state["clock"], state["doing"], state["for_s"]) for state in states] == [
        (0, "computing", 2.0),
        (1, "communicating", 3.0),
    ]


def test_the_first_is_told_in_full_then_powers_of_ten_and_all_at_the_end() -> None:
    told: list[str] = []
    refusals = Refusals(1, told.append)
    for clock in range(400):
        refusals.note_push("model")
        if clock >= 3:
            refusals.note_refused("push", "model", clock, "it has NaN")
    refusals.tell_all()
    assert told == [
        "worker 1, clock 3: a push of 'model' was refused: it has NaN",
        "worker 1, clock 12: 10 of 13 pushes of 'model' were refused by now",
        "worker 1, clock 102: 100 of 103 pushes of 'model' were refused by now",
        "worker 1: 397 of 400 pushes of 'model' were refused and had no effect, from clock 3 to clock 399",
    ]


def test_each_table_is_told_of_by_itself_and_one_refusal_only_once() -> None:
    told: list[str] = []
    refusals = Refusals(0, told.append)
    for table in ("a", "b"):
        refusals.note_refused("step", table, 2, "why")
    refusals.tell_all()
    assert told == [f"worker 0, clock 2: a step of '{table}' was refused: why" for table in ("a", "b")]

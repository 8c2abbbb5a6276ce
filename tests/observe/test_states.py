"""What the live display says of workers that do not compute: by their traces, their silence, and their launcher."""

import io
from pathlib import Path

import pytest

from paceline.observe.progress import HUNG_S, TraceDisplay, WorkerRow, plain_line
from paceline.observe.trace import Resources, State, Step, Trace, TraceRecord, trace_path


class Stage:
    """A board, and the traces that it reads; its clock is another one than theirs, as on a cluster."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        self._folder = folder
        self.out = io.StringIO()
        self.board = TraceDisplay(folder / "trace", num_workers, stream=self.out)

    def write(self, worker: int, *records: TraceRecord) -> None:
        with Trace(trace_path(self._folder, "worker", worker)) as trace:
            for record in records:
                trace.record(record)

    def step(self, worker: int, clock: int) -> None:
        self.write(worker, Step(9000.0 + clock, worker, clock, 10, 1.0, 0.0, 1.0))

    def does(self, worker: int, doing: str, for_s: float) -> None:
        self.write(worker, State(9000.0, worker, 0, "communicating" if doing == "waiting" else "computing", for_s))

    def is_in(self, worker: int, call: str, for_s: float) -> None:
        self.write(worker, State(9000.0, worker, 0, "communicating", for_s, call))

    def states(self, now: float) -> list[str]:
        return [row.state for row in self.rows(now)]

    def rows(self, now: float) -> list[WorkerRow]:
        self.board.refresh(now)
        return self.board.rows()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, 2)


def test_a_rate_falls_when_nothing_happens_and_comes_to_nothing(stage: Stage) -> None:
    for clock in range(4):
        stage.step(0, clock)
        stage.step(1, clock)
    assert [row.samples_per_s for row in stage.rows(100.0)] == [10.0, 10.0]
    assert [row.samples_per_s for row in stage.rows(101.0)] == [10.0, 10.0], "the next step is not late yet"
    for clock in range(4, 8):
        stage.step(0, clock)
    assert [row.samples_per_s for row in stage.rows(103.0)] == [10.0, pytest.approx(40 / 6)]
    assert [row.samples_per_s for row in stage.rows(105.1)] == [pytest.approx(60 / 7.1), 0.0]


def test_a_rate_of_long_steps_waits_as_long(stage: Stage) -> None:
    stage.write(0, Step(0.0, 0, 0, 600, None, 0.0, 60.0))
    assert [stage.rows(now)[0].samples_per_s for now in (0.0, 59.0, 181.0)] == [10.0, 10.0, 0.0]


def test_a_worker_that_waits_is_told_with_what_for(stage: Stage) -> None:
    stage.step(0, 4)
    stage.step(1, 3)
    assert stage.states(100.0) == ["", ""]
    stage.does(0, "waiting", 2.0)
    stage.does(1, "computing", 6.0)
    assert stage.states(103.0) == ["waiting for worker 1 for 2 s", "computing for 6 s"]
    stage.does(1, "waiting", 2.0)
    assert stage.states(104.0) == ["waiting for worker 1 for 3 s", "waiting for the server for 2 s"]


def test_of_one_clock_those_that_compute_are_waited_for(stage: Stage) -> None:
    stage.step(0, 3)
    stage.step(1, 3)
    stage.does(0, "waiting", 3.0)
    stage.does(1, "computing", 3.0)
    assert stage.states(100.0) == ["waiting for worker 1 for 3 s", ""]


def test_a_worker_in_a_barrier_waits_for_those_that_have_not_come(stage: Stage) -> None:
    stage.step(0, 2)
    stage.step(1, 7)
    stage.states(100.0)
    stage.is_in(0, "barrier()", 3.0)
    assert stage.states(100.0)[0] == "in barrier(), waiting for worker 1 for 3 s"
    stage.is_in(1, "barrier()", 3.0)
    assert stage.states(100.0) == ["in barrier(), waiting for the server for 3 s"] * 2
    stage.step(0, 3)
    assert stage.states(101.0)[0] == ""


def test_a_collective_call_waits_for_those_that_are_in_another(stage: Stage) -> None:
    stage.step(0, 3)
    stage.step(1, 3)
    stage.states(100.0)
    stage.is_in(0, "barrier()", 3.0)
    stage.is_in(1, "model all_reduce", 3.0)
    assert stage.states(100.0) == ["in barrier(), waiting for worker 1 for 3 s", "waiting for worker 0 for 3 s"]
    stage.is_in(0, "model all_reduce", 3.0)
    assert stage.states(100.0) == ["waiting for the others for 3 s"] * 2
    stage.does(0, "computing", 3.0)
    assert stage.states(100.0) == ["", "waiting for worker 0 for 3 s"]


def test_a_silent_process_is_hung(stage: Stage) -> None:
    stage.step(0, 0)
    stage.step(1, 0)
    stage.states(100.0)
    stage.does(0, "computing", 9.0)
    assert stage.states(109.0) == ["computing for 9 s", "computing for 9 s"]
    assert stage.states(100.0 + HUNG_S) == ["computing for 10 s", "hung for 10 s"]
    stage.step(1, 1)
    assert stage.states(112.0)[1] == ""


def test_a_worker_that_has_left_the_job_is_not_hung(stage: Stage) -> None:
    stage.write(0, Resources(0.0, 0, 1, 0, 0))
    assert [stage.states(now)[0] for now in (0.0, 100.0)] == ["leaving", "leaving"]


def test_a_dead_worker_is_not_the_slowest_and_has_no_rate(stage: Stage) -> None:
    stage.step(0, 6)
    stage.step(1, 2)
    stage.rows(100.0)
    stage.board.note(1, "dead since 14:03:22")
    first, second = stage.rows(100.25)
    assert (first.lead, first.samples_per_s) == (0, 10.0)
    assert (second.lead, second.samples_per_s, second.state) == (None, 0.0, "dead since 14:03:22")
    assert plain_line([first, second], 9.0) == (
        "9 s  |  clock 7 3  |  lead +0 -  |  loss 1.0000  |  10 samples/s  |  communication 0% 0%  |  waiting 0% 0%"
        "  |  worker 1 dead since 14:03:22"
    )


def test_a_script_without_samples_has_no_rate_of_them(stage: Stage) -> None:
    stage.write(0, Step(0.0, 0, 0, 0, 1.0, 0.0, 1.0))
    assert "samples/s" not in plain_line(stage.rows(100.0)[:1], 1.0)


def test_a_worker_that_was_started_again_takes_part_again(stage: Stage) -> None:
    stage.step(0, 6)
    stage.step(1, 2)
    stage.rows(100.0)
    stage.board.note(1, "dead since 14:03:22")
    stage.board.note(1, "")
    assert stage.states(100.0 + 2 * HUNG_S)[1] == "starting"
    stage.step(1, 3)
    assert [(row.lead, row.state) for row in stage.rows(121.0)][1] == (0, "")


def test_a_run_whose_workers_have_ended_says_so_of_none(stage: Stage) -> None:
    stage.step(0, 6)
    stage.step(1, 5)
    stage.rows(100.0)
    for worker in (0, 1):
        stage.board.note(worker, "ended")
    stage.board.close()
    line = stage.out.getvalue().splitlines()[-1]
    assert "lead +1 +0" in line
    assert "ended" not in line


def test_many_states_are_counted() -> None:
    rows = [WorkerRow(worker, 1, None, 0.0, None, 0.0, 0.0, state="dead since 14:03:22") for worker in range(12)]
    line = plain_line(rows, 1.0)
    assert line.endswith("worker 7 dead since 14:03:22 and 4 more")
    assert "lead -  |" in line

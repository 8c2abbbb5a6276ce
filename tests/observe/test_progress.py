import io
import sys
from pathlib import Path

import pytest

from paceline.observe.progress import RunView, TraceDisplay, plain_line
from paceline.observe.screen import WorkerRow
from paceline.observe.trace import Step, Trace, trace_path


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def two_workers(run: Path) -> None:
    """Worker 0 finishes three clocks without waiting; worker 1 finishes two and waits a quarter of the time.

    Communication takes a tenth of the time of the one and half that of the other.
    """
    with Trace(trace_path(run, "worker", 0)) as trace:
        for clock in range(3):
            trace.record(Step(100.0 + clock, 0, clock, 64, 0.5 - 0.1 * clock, 0.0, 0.5, 0.05))
    with Trace(trace_path(run, "worker", 1)) as trace:
        for clock in range(2):
            trace.record(Step(100.5 + clock, 1, clock, 64, 0.6, 0.25, 1.0, 0.5))


def test_rows_say_clock_loss_rate_lead_communication_and_waiting(tmp_path: Path) -> None:
    two_workers(tmp_path)
    board = TraceDisplay(tmp_path / "trace", 2, stream=io.StringIO())
    board.refresh(0.0)
    assert board.rows() == [
        WorkerRow(0, 3, pytest.approx(0.4), 128.0, lead=1, comm_share=pytest.approx(0.1), wait_share=0.0),
        WorkerRow(1, 2, pytest.approx(0.6), 64.0, lead=0, comm_share=0.5, wait_share=0.25),
    ]


def test_rates_forget_what_is_older_than_the_window(tmp_path: Path) -> None:
    with Trace(trace_path(tmp_path, "worker", 0)) as trace:
        trace.record(Step(100.0, 0, 0, 1, 9.0, 0.0, 1.0))
        trace.record(Step(106.0, 0, 1, 30, 1.0, 1.5, 3.0, 2.25))
    board = TraceDisplay(tmp_path / "trace", 1, stream=io.StringIO())
    board.refresh(0.0)
    assert board.rows() == [WorkerRow(0, 2, loss=1.0, samples_per_s=10.0, lead=0, comm_share=0.75, wait_share=0.5)]


def test_without_a_terminal_one_line_every_two_seconds(tmp_path: Path) -> None:
    out = io.StringIO()
    board = TraceDisplay(tmp_path / "trace", 2, stream=out)
    for now in (50.0, 51.0, 52.0):
        board.refresh(now)
    assert out.getvalue() == ""  # nothing to tell yet
    two_workers(tmp_path)
    for now in (53.0, 53.9, 54.0, 54.25, 55.0):
        board.refresh(now)
    board.close()
    assert out.getvalue().splitlines() == [
        "4 s  |  clock 3 2  |  lead +1 +0  |  loss 0.5000  |  192 samples/s  |  "
        "communication 10% 50%  |  waiting 0% 25%"
    ]


def test_without_a_terminal_the_last_line_tells_what_came_since(tmp_path: Path) -> None:
    out = io.StringIO()
    board = TraceDisplay(tmp_path / "trace", 2, stream=out)
    board.refresh(50.0)
    two_workers(tmp_path)
    board.close()
    assert out.getvalue().startswith("0 s  |  clock 3 2")


def test_a_line_for_many_workers_says_the_range() -> None:
    rows = [WorkerRow(worker, 10 + worker, None, 5.0, worker, worker / 15, worker / 20) for worker in range(12)]
    assert plain_line(rows, 60.0) == (
        "60 s  |  clock 10 .. 21  |  lead +0 .. +11  |  60 samples/s  |  communication 0% .. 73%  |  waiting 0% .. 55%"
    )


def test_on_a_terminal_lines_with_every_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    two_workers(tmp_path)
    out, stdout = Terminal(), sys.stdout
    board = TraceDisplay(tmp_path / "trace", 2, stream=out)
    board.refresh(10.0)
    board.refresh(12.0)
    board.close()
    assert sys.stdout is stdout
    for text in ("samples/s", "wait", "wire", "+1", "0.4000", "0.6000", "128", "1.0 s  50%", "2 s", "starting"):
        assert text in out.getvalue()


def test_a_terminal_that_cannot_redraw_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    two_workers(tmp_path)
    out = Terminal()
    board = TraceDisplay(tmp_path / "trace", 2, stream=out)
    board.refresh(10.0)
    board.close()
    assert out.getvalue().startswith("0 s  |  clock 3 2  |")


def test_states_stand_in_the_place_of_the_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    two_workers(tmp_path)
    out = Terminal()
    board = TraceDisplay(tmp_path / "trace", 2, stream=out)
    board.refresh(10.0)
    board.note(1, "dead since 14:03:22")
    board.refresh(20.0)
    board.close()
    last = out.getvalue().rpartition("20 s")[2]
    for text in ("+0  0.4000         0 hung for 10 s", "-  0.6000         0 dead since 14:03:22"):
        assert text in last, last


def test_rows_are_those_of_one_moment_though_traces_are_written_in_pieces(tmp_path: Path) -> None:
    """Under bsp the lead is at most 1; of worker 0 the steps of the last 18 ms are not written yet."""
    for worker, num_written in ((0, 50), (1, 59)):
        with Trace(trace_path(tmp_path, "worker", worker)) as trace:
            for clock in range(num_written):
                trace.record(Step(100.0 + 0.002 * clock + 0.001 * worker, worker, clock, 8, 0.5, 0.0, 0.002))
    view = RunView(tmp_path / "trace")
    view.refresh(0.0)
    assert [(row.clock, row.lead) for row in view.rows()] == [(50, 1), (49, 0)]


def test_a_worker_that_has_long_finished_no_step_is_shown_as_far_behind(tmp_path: Path) -> None:
    for worker, num_steps, step_s in ((0, 2, 0.5), (1, 300, 0.01)):
        with Trace(trace_path(tmp_path, "worker", worker)) as trace:
            for clock in range(num_steps):
                trace.record(Step(100.0 + step_s * clock, worker, clock, 8, 0.5, 0.0, step_s))
    view = RunView(tmp_path / "trace")
    view.refresh(0.0)
    assert [(row.clock, row.lead) for row in view.rows()] == [(2, 0), (300, 298)]

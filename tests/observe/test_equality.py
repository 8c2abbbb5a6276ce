"""Two runs are equal if every worker had the same losses and evaluations at every clock."""

from pathlib import Path

import pytest

from paceline.observe.equality import LossComparison
from paceline.observe.trace import Evaluated, Reported, ReportedValues, Step, Trace, TraceRecord, trace_path


def write(run: Path, worker: int, losses: list[float | None], first: int = 0) -> None:
    with Trace(trace_path(run, "worker", worker)) as trace:
        for clock, loss in enumerate(losses, start=first):
            trace.record(Step(100.0 + clock, worker, clock, 8, loss, 0.0, 1.0))


def add(run: Path, *reported: TraceRecord) -> None:
    with Trace(trace_path(run, "worker", 0)) as trace:
        for record in reported:
            trace.record(record)


def compared(tmp_path: Path) -> str:
    comparison = LossComparison(tmp_path / "a", tmp_path / "b")
    comparison.advance()
    return comparison.text()


def test_equal_runs(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, 0, [0.1 + 0.2, 0.25])
        write(tmp_path / name, 1, [1 / 3, 0.5])
    assert compared(tmp_path) == "equal: 4 losses of 2 workers, bit by bit"


def test_the_last_bit_of_a_loss_counts(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, [0.5, 0.3])
    write(tmp_path / "b", 0, [0.5, 0.1 + 0.2])
    assert compared(tmp_path) == (
        "not equal: worker 0 has a loss of 0.3 over 8 samples in clock 1, and the other's a loss of "
        "0.30000000000000004 over 8 samples; 1 loss before"
    )


def test_a_clock_that_one_has_not_finished_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, [0.5, 0.25])
    write(tmp_path / "b", 0, [0.5])
    write(tmp_path / "b", 0, [0.25], first=2)
    assert "worker 0 finished clock 1, and the other's clock 2" in compared(tmp_path)


def test_runs_that_go_on_are_compared_as_they_come(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, [0.5, 0.25, 0.125])
    write(tmp_path / "b", 0, [0.5])
    comparison = LossComparison(tmp_path / "a", tmp_path / "b")
    comparison.advance()
    assert comparison.text() == "equal so far: 1 loss of 1 worker, bit by bit; one run has more steps"
    write(tmp_path / "b", 0, [0.25, 0.125], first=1)
    comparison.advance()
    assert comparison.text() == "equal: 3 losses of 1 worker, bit by bit"


def test_without_losses_nothing_is_said_to_be_equal(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, 0, [None, None])
    assert compared(tmp_path) == "not comparable: no step of both has a loss"
    assert LossComparison(tmp_path / "c", tmp_path / "d").text() == "not comparable: no step of both has a loss"


def test_the_last_loss_counts_where_a_script_reports_after_its_step(tmp_path: Path) -> None:
    for name, last in (("a", 0.25), ("b", 0.25), ("c", 30.0)):
        write(tmp_path / name, 0, [None, 0.5])
        add(tmp_path / name, Reported(102.0, 0, 2, last))
    assert compared(tmp_path) == "equal: 2 losses of 1 worker, bit by bit"
    (tmp_path / "c").rename(tmp_path / "b" / "c")
    comparison = LossComparison(tmp_path / "a", tmp_path / "b" / "c")
    comparison.advance()
    assert comparison.text() == (
        "not equal: worker 0 has a loss of 0.25 in clock 2, and the other's a loss of 30.0; 1 loss before"
    )


@pytest.mark.parametrize("is_last", [False, True])
def test_evaluations_are_compared(tmp_path: Path, *, is_last: bool) -> None:
    for name, accuracy in (("a", 0.9), ("b", 0.9), ("c", 0.8)):
        write(tmp_path / name, 0, [0.5])
        add(tmp_path / name, Evaluated(101.0, 0, 1, 0.4, accuracy))
        write(tmp_path / name, 0, [] if is_last else [0.25], first=1)
    losses = "1 loss" if is_last else "2 losses"
    assert compared(tmp_path) == f"equal: {losses} and 1 evaluation of 1 worker, bit by bit"
    comparison = LossComparison(tmp_path / "a", tmp_path / "c")
    comparison.advance()
    assert comparison.text() == (
        "not equal: worker 0 has an evaluation with loss 0.4 and accuracy 0.9 in clock 1, and the other's an "
        "evaluation with loss 0.4 and accuracy 0.8; 1 loss before"
    )


def test_losses_that_are_not_finite_are_compared(tmp_path: Path) -> None:
    for name, reported in (("a", Reported(100.0, 0, 0, None, "nan")), ("b", Reported(100.0, 0, 0, None, "inf"))):
        add(tmp_path / name, reported)
        write(tmp_path / name, 0, [None])
    assert "worker 0 has a loss of nan in clock 0, and the other's a loss of inf; 0 losses" in compared(tmp_path)


def test_what_was_not_compared_is_said(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, 0, [0.5])
        add(tmp_path / name, Evaluated(101.0, 0, 1, None, 0.5), ReportedValues(101.0, 0, 1, {"norm": 2.0}))
    add(tmp_path / "a", Evaluated(101.0, 0, 1, 0.4, 0.9), Reported(101.0, 0, 1, 0.3))
    assert compared(tmp_path) == (
        "equal: 1 loss of 1 worker, bit by bit; not compared: evaluations that are not finite, evaluations that one "
        "run lacks, losses that one run lacks, values of other names"
    )

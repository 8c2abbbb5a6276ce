"""Two runs are equal if every worker had the same loss at every clock."""

from pathlib import Path

from paceline.observe.equality import LossComparison
from paceline.observe.trace import Step, Trace, trace_path


def write(run: Path, worker: int, losses: list[float | None], first: int = 0) -> None:
    with Trace(trace_path(run, "worker", worker)) as trace:
        for clock, loss in enumerate(losses, start=first):
            trace.record(Step(100.0 + clock, worker, clock, 8, loss, 0.0, 1.0))


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

"""What is told of refused pushes: the first at once, then ever more rarely, and all at the end."""

import io
from pathlib import Path

import pytest

from paceline.observe.notices import Refusals, tell
from paceline.observe.progress import TraceDisplay
from paceline.observe.runs import read_run
from paceline.observe.summary import summarize
from paceline.observe.trace import NO_SERVER, Refusal, Reported, Step, Trace, trace_path


def test_the_first_is_told_in_full_then_powers_of_ten_and_all_at_the_end() -> None:
    told: list[str] = []
    refusals = Refusals(1, told.append)
    for clock in range(400):
        refusals.note_made("push", "model")
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


def test_a_notice_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    tell("one\ntwo")
    assert capsys.readouterr().err == "paceline: one two\n"


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_the_live_line_shows_refusals_and_losses_that_are_not_finite(tmp_path: Path, text: str) -> None:
    out = io.StringIO()
    with Trace(trace_path(tmp_path, "worker", 0)) as trace:
        trace.record(Step(100.0, 0, 0, 64, 0.5, 0.0, 0.5))
        for clock in range(1, 4):
            trace.record(Reported(100.0 + clock, 0, clock, None, text))
            trace.record(Refusal(100.0 + clock, NO_SERVER, 0, "model", "it has NaN"))
            trace.record(Step(100.0 + clock, 0, clock, 64, None, 0.0, 0.5))
    board = TraceDisplay(tmp_path / "trace", 1, stream=out)
    board.refresh(0.0)
    board.refresh(2.0)
    board.close()
    assert out.getvalue().count("\n") == 1
    assert f"|  loss {text}  |  refused 3  |" in out.getvalue()
    assert summarize(read_run(tmp_path)).num_refused == 3


def test_a_loss_that_is_finite_again_is_shown_once_the_others_are_old(tmp_path: Path) -> None:
    with Trace(trace_path(tmp_path, "worker", 0)) as trace:
        trace.record(Reported(100.0, 0, 0, None, "nan"))
        trace.record(Step(100.0, 0, 0, 64, None, 0.0, 0.5))
        trace.record(Step(106.0, 0, 1, 64, 0.25, 0.0, 0.5))
    board = TraceDisplay(tmp_path / "trace", 1, stream=io.StringIO())
    board.refresh(0.0)
    assert [row.loss for row in board.rows()] == [0.25]

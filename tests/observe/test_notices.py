"""What the live line shows of losses that are not finite."""

import io
from pathlib import Path

import pytest

from paceline.observe.progress import TraceDisplay
from paceline.observe.runs import read_run
from paceline.observe.summary import summarize
from paceline.observe.trace import NO_SERVER, Refusal, Reported, Step, Trace, trace_path


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

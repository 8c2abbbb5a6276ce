from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from paceline.launch.guard import Guard
from paceline.observe.runs import TraceFollower
from paceline.observe.trace import Evaluated
from paceline.tools.tune.display import open_display, search_table
from paceline.tools.tune.driver import TrialProcess, Values
from paceline.tools.tune.search_space import read_search
from paceline.tools.tune.study import Study

SEARCH = read_search({"trials": 9, "metric": "accuracy", "parameters": {"lr": [0.125, 0.25], "amp": [True]}}, "here")


class Terminal(io.StringIO):
    """A text file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class NoProcess(subprocess.Popen[bytes]):
    """A process that was never started."""

    def __init__(self) -> None:
        self.pid, self.returncode = 0, 0


class NoGuard(Guard):
    """A guard that was never started."""

    def __init__(self) -> None:
        self.pid = 0


@pytest.fixture
def study() -> Study:
    """One that is best, many that failed, and one that runs."""
    study = Study.open(SEARCH)
    for accuracy in (0.5, 0.875):
        trial = study.ask()
        assert trial is not None
        study.finish(trial.number, accuracy, [accuracy])
    for _ in range(5):
        trial = study.ask()
        assert trial is not None
        study.fail(trial.number, "no data")
    assert study.ask() is not None
    return study


def running(study: Study, folder: Path) -> TrialProcess:
    values = Values("accuracy", 1)
    values.add(Evaluated(1.0, 0, 1, 0.5, 0.25))
    return TrialProcess(study.trials()[-1], 0, folder, NoProcess(), values, TraceFollower(folder), NoGuard())


def test_a_terminal_shows_the_best_what_runs_and_the_latest(study: Study, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(search_table(study, SEARCH, [running(study, tmp_path)], room=4, elapsed_s=61.0))
    title, _, *rows = console.export_text().splitlines()
    assert title.split() == ["7", "of", "9", "trials,", "61", "s"]
    cells = [row.split() for row in rows]
    assert cells[0][0] == "1"
    assert cells[0][2:] == ["true", "1", "0.875", "best"]
    assert [row[0] for row in cells] == ["1", "5", "6", "7"]
    assert cells[1][3:] == ["-", "-", "failed:", "no", "data"]
    assert cells[3][3:5] == ["1", "0.25"]


def test_a_terminal_is_redrawn(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    display = open_display(SEARCH, stream)
    run = running(study, tmp_path)
    display.show(study, [run])
    display.ended(study, run)
    display.close(study)
    assert "7 of 9 trials" in stream.getvalue()
    assert "failed: no data" in stream.getvalue()

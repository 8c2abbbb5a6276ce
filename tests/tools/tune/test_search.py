"""Whole searches, with trials that are pretended."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from tests.tools.tune.searching import begin, pretend, pretended_task

import paceline
from paceline.errors import UsageError
from paceline.launch.config import read_config
from paceline.tools.tune.study import Folder, Study, Trial

ENDINGS = {"method": "grid", "parameters": {"do": ["good", "crash", "silent", "diverge"], "x": [3.0, 2.0]}}


def test_a_grid_tries_everything_and_no_failure_ends_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tuned = pretend(begin(ENDINGS, tmp_path, ("--reports=2",)), jobs=2, progress=True)
    lines = sorted(line.split(" ", 1)[1] for line in capfd.readouterr().err.splitlines())

    found = [(trial.parameters["do"], trial.parameters["x"], trial.state) for trial in tuned.trials]
    states = {"good": "finished", "crash": "failed", "silent": "failed", "diverge": "pruned"}
    assert found == [(do, x, states[do]) for do in states for x in (3.0, 2.0)]
    reasons = [trial.reason for trial in tuned.trials[::2]]
    assert reasons[:2] == ["", "no data here"]
    assert "has not reported" in reasons[2]
    assert "no longer finite" in reasons[3]
    assert len(lines) == 8
    assert lines[2].startswith("trial 2  |  do crash, x 3  |  failed: no data here  |")

    assert tuned.best == Trial(1, {"do": "good", "x": 2.0}, "finished", 1.0, (2.0, 1.0))
    assert read_config(tuned.folder / "best.toml").args == ("--reports=2", "--do=good", "--x=2.0")
    assert (tuned.folder / "trials.png").read_bytes().startswith(b"\x89PNG")


def test_a_trial_that_hangs_has_failed(tmp_path: Path) -> None:
    tuned = pretend(begin({"method": "grid", "parameters": {"do": ["hang", "good"]}}, tmp_path), trial_timeout_s=8.0)
    assert [trial.state for trial in tuned.trials] == ["failed", "finished"]
    assert "did not end within 8 s" in tuned.trials[0].reason


SPREAD = {"x": {"low": 1.0, "high": 100.0, "log": True}, "k": {"low": 1, "high": 9}}


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_a_trial_that_is_behind_is_stopped(method: str, tmp_path: Path) -> None:
    search = {"method": method, "trials": 4, "pruning": "halving", "run": {"workers": 3}, "parameters": SPREAD}
    tuned = pretend(begin(search, tmp_path, ("--reports=30",)))
    assert tuned.trials[0].state == "finished"  # no trial to be behind
    assert {trial.state for trial in tuned.trials} <= {"finished", "pruned"}
    assert all(isinstance(trial.parameters["k"], int) for trial in tuned.trials)
    assert read_config(tuned.folder / "best.toml").options == {"workers": 3}


def test_a_trial_that_goes_on_is_told_to_stop(tmp_path: Path) -> None:
    late = begin({"trials": 2, "method": "random", "pruning": "halving", "parameters": {"do": ["late"]}}, tmp_path)
    with late:
        study = Study.open(late.task.search, late.journal)
        first = study.ask()
        assert first is not None
        study.finish(first.number, 1e-6, [1e-6] * 30)
    told = pretend(Folder.reopen(late.path)).trials[1]
    assert told.state == "pruned"
    assert "was worse than others at report" in told.reason


# Runs a search as a process of its own.
DRIVE = """
import sys
from pathlib import Path
from tests.tools.tune.searching import pretend
from paceline.tools.tune.study import Folder
pretend(Folder.reopen(Path(sys.argv[1])), jobs=2, progress=True)
"""
WAITING = {"method": "random", "trials": 6, "parameters": {"x": {"low": 1.0, "high": 2.0}, "do": ["good", "wait"]}}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_search_that_was_ended_goes_on_and_leaves_no_process_behind(number: int, tmp_path: Path) -> None:
    folder = begin({**WAITING, "seed": 3}, tmp_path)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with subprocess.Popen([sys.executable, "-c", DRIVE, str(folder.path)], stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stderr is not None
        assert driver.stderr.readline().startswith("[1/6] trial ")
        driver.send_signal(number)
        told = driver.stderr.read()
    assert driver.returncode == (128 + number if number == signal.SIGTERM else -number), told
    _wait_until_all_are_gone(tmp_path / "alive")

    before = {trial.number: trial for trial in _trials(folder)}
    done = {number: trial for number, trial in before.items() if trial.state == "finished"}
    cut = [trial for trial in before.values() if trial.state == "interrupted" and len(trial.parameters) == 2]
    assert done
    assert len(done) < 6

    gate.unlink()
    gate.touch()
    tuned = pretend(Folder.reopen(folder.path), jobs=2)
    after = {trial.number: trial for trial in tuned.trials}
    assert {number: after[number] for number in before} == before
    new = [trial for trial in tuned.trials if trial.number not in before]
    assert [trial.parameters for trial in new[: len(cut)]] == [trial.parameters for trial in cut]
    assert sum(trial.state == "finished" for trial in tuned.trials) == 6
    xs = [trial.parameters["x"] for trial in tuned.trials if trial.state == "finished"]
    assert len(set(xs)) == 6  # nothing is suggested twice


def test_a_folder_is_for_one_search_and_one_process(tmp_path: Path) -> None:
    folder = begin(ENDINGS, tmp_path)
    with pytest.raises(UsageError, match="holds a search already: continue it with --resume"):
        Folder.create(folder.path, pretended_task(ENDINGS, tmp_path))
    assert Folder.reopen(folder.path).task == folder.task
    with folder, pytest.raises(UsageError, match="another process runs this search"), Folder.reopen(folder.path):
        pass
    with pytest.raises(UsageError, match="is not the folder of a search"):
        Folder.reopen(tmp_path)
    (folder.path / "search.json").write_text("{}")
    with pytest.raises(UsageError, match="is damaged, or of another version"):
        Folder.reopen(folder.path)


def test_it_is_called_from_the_main_thread(tmp_path: Path) -> None:
    (script := tmp_path / "no.py").touch()
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="from the main thread"):
        pool.submit(paceline.tune, ENDINGS, script, out=tmp_path / "out").result()
    assert not (tmp_path / "out").exists()


def _trials(folder: Folder) -> list[Trial]:
    with Folder.reopen(folder.path) as again:
        return Study.open(again.task.search, again.journal).trials()


def _wait_until_all_are_gone(alive: Path) -> None:
    deadline_s, pause = time.monotonic() + 30.0, threading.Event()
    with alive.open("a") as file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # each trial holds a share of this lock
                return
            assert time.monotonic() < deadline_s, "a trial has outlived its search"
            pause.wait(0.02)

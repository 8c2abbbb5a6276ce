"""`paceline dashboard` as a process, and beside a job: it begins, is found, and leaves nothing behind."""

import io
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from tests.observe.dashboard.test_feed import write
from tests.observe.stories import story

from paceline.errors import UsageError
from paceline.launch import dashboard as beside_a_job
from paceline.launch.dashboard import beside
from paceline.launch.output import Console
from paceline.tools.dashboard import MAX_RUNS, dashboard

DEADLINE_S = 200.0


def test_it_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    write(tmp_path, story())
    command = [sys.executable, "-m", "paceline", "dashboard", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("paceline: the dashboard is at http://127.0.0.1:"), line
        with urllib.request.urlopen(line.split()[-1], timeout=DEADLINE_S) as answer:
            assert b"<title>Paceline</title>" in answer.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (130, "")


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused(port: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"--port is {port}, expected a number from 0"):
        dashboard(str(tmp_path), port=port)


def test_too_many_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"9 jobs do not fit on a page; name {MAX_RUNS} at most"):
        dashboard(*[str(tmp_path)] * 9)


def test_beside_a_job_it_ends_with_it(tmp_path: Path) -> None:
    write(tmp_path, story())
    told = io.StringIO()
    before = set(psutil.Process(os.getpid()).children())
    with beside(tmp_path, Console(told)):
        url = told.getvalue().split()[-1]
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            assert answer.status == 200
        (child,) = set(psutil.Process(os.getpid()).children()) - before
        assert url.split("/")[-2] not in " ".join(child.cmdline()), "others can read the token"
    assert not child.is_running()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=DEADLINE_S)


def test_a_job_goes_on_without_a_dashboard_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_a_job.sys, "executable", "false")
    told = io.StringIO()
    with beside(tmp_path, Console(told)):
        pass
    assert "the dashboard cannot be shown: it has not begun" in told.getvalue()
    monkeypatch.setattr(beside_a_job.sys, "executable", str(tmp_path / "none"))
    with beside(tmp_path, Console(told)):
        pass
    assert "the dashboard cannot be shown: " in told.getvalue().splitlines()[-1]
    assert "the run goes on without it" in told.getvalue().splitlines()[-1]

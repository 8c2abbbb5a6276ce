"""A whole job is stopped, as by a batch system that makes room, and goes on later: no time passes for it meanwhile."""

import os
import re
import signal
import threading
from pathlib import Path

import psutil
import pytest
from tests.faults.running import SCRIPTS, running

SCRIPT = SCRIPTS / "stopped.py"
LEASE_S = 5.0  # of a worker that cannot be reached


@pytest.mark.parametrize(
    ("transport", "stopped_s"), [("shm", 6.5), pytest.param("tcp", LEASE_S + 2.0, marks=pytest.mark.campaign)]
)
def test_a_job_that_is_stopped_for_longer_than_its_waits_may_take_goes_on(
    tmp_path: Path, transport: str, stopped_s: float
) -> None:
    enough = tmp_path / "enough"
    options = ("-n", "2", "--transport", transport)
    with running(tmp_path / "run", SCRIPT, str(enough), options=options) as run:
        run.wait_for("under way", 2)
        launcher = psutil.Process(run.process.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        threading.Event().wait(stopped_s)
        for process in reversed(processes):
            os.kill(process.pid, signal.SIGCONT)
        threading.Event().wait(1.0)
        enough.touch()
        assert run.end() == 0, run.output
        assert len(run.wait_for("went on", 2)) == 2
        assert not re.search("lost|gave up|died", run.output)

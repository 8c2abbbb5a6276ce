"""A server is gone: the script of every worker is told by an exception, and can save what it holds."""

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.faults.running import SCRIPTS, Run, running

SAVER = SCRIPTS / "saver.py"


def assert_saved(folder: Path, run: Run) -> None:
    """Both workers have saved values that are numbers, and have moved from those at the beginning."""
    assert len(run.saying("saved after")) == 2, run.output
    for rank in range(2):
        state = torch.load(folder / f"model-{rank}.pt")
        assert all(bool(values.isfinite().all()) for values in state.values())
        assert float(state["2.bias"].abs().sum()) > 0.0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_after_kill_9_of_a_server_every_worker_saves_its_model(transport: str, tmp_path: Path) -> None:
    options = ("-n", "2", "-m", "2", "--transport", transport, "--on-server-crash", "stop")
    with running(tmp_path / "run", SAVER, str(tmp_path), options=options) as run:
        run.wait_for("going", times=2)

        os.kill(run.wait_for_server(1), signal.SIGKILL)
        caught = run.wait_for("caught ServerLost", times=2)  # for which they would wait for longer by themselves

        assert all("server 1 is lost:" in line and "was killed by SIGKILL" in line for line in caught)
        assert run.end() == 1
        assert_saved(tmp_path, run)
        assert run.told()[-1] == "paceline: server 1 was killed by SIGKILL; the run ends"


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_workers_of_a_silent_server_save_even_though_the_first_to_end_ends_the_run(
    transport: str, tmp_path: Path
) -> None:
    options = ("-n", "2", "--transport", transport)
    with running(tmp_path / "run", SAVER, str(tmp_path), "1.0", options=options) as run:
        run.wait_for("going", times=2)

        server = run.wait_for_server(0)
        os.kill(server, signal.SIGSTOP)
        try:
            run.wait_for("caught DeadlineExceeded", times=2)
            run.wait_for("saved after", times=2)
        finally:
            os.kill(server, signal.SIGCONT)

        assert run.end() == 1
        assert_saved(tmp_path, run)

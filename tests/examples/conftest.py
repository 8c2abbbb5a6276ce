"""Runs examples alone, forked from one process that has imported torch for all of them."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.job.environment import child_environment, fork_server_environment
from paceline.launch.child import Launch
from paceline.launch.forkserver.server import ForkServer

EXAMPLES = Path(__file__).parents[2] / "examples"
READY_WITHIN_S = 200.0

Alone = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    """Runs an example of this name, with these arguments, to its end."""
    environment = {**child_environment(1, 1), "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("forkserver")
    fork_server = ForkServer(
        fork_server_environment(environment, EXAMPLES), folder, "paceline.api.preloaded", EXAMPLES / "one_line.py"
    )
    process = fork_server.start_server(fork_server.launch)
    assert process.stdout is not None
    assert process.stderr is not None

    def run(name: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "paceline.launch.worker", str(EXAMPLES / name), *map(str, args))
        started = fork_server.start(Launch(role="worker", name=name, rank=0, command=command, environment=environment))
        assert started.stdout is not None
        assert started.stderr is not None
        with started.stdout, started.stderr:
            told, complained = started.stdout.read().decode(), started.stderr.read().decode()
        return subprocess.CompletedProcess(command, started.wait(), told, complained)

    with fork_server, process.stdout, process.stderr:
        deadline_s = time.monotonic() + READY_WITHIN_S
        while not fork_server.settled():
            select.select([process.stdout], [], [], 0.01)
            assert time.monotonic() < deadline_s, "the fork server is not ready"
        yield run
    assert process.wait() == 0

"""Servers and their nodes are killed under jobs on Ray, and training goes on with their replicas."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.hosts.replicas_worker import STOPS, train
from tests.jobs import run_job
from tests.ray.test_engine import START_S, Launcher, started, write

from paceline.job.views import Views

# Ray takes its time where others work, too.
pytestmark = pytest.mark.timeout(900)

PATIENCE_S = 300.0  # for another actor to import torch beside all else that runs here
ROOT = Path(__file__).parents[2]
HOME = {"num_cpus": 2, "resources": {"home": 2}}  # of workers and of the launcher
SCRIPT = """
import sys
from pathlib import Path
import paceline
from tests.hosts.replicas_worker import train
folder = Path(sys.argv[1])
with paceline.connect() as ps:
    (folder / f"bits-{ps.rank}").write_text(train(ps, folder))
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with started(HOME, *({"num_cpus": 1} for _ in range(4))) as launcher:
        yield launcher


def wait_until(launcher: Launcher, look: Callable[[], bool]) -> None:
    """Block until that is so; fail with what was said if the job ends before."""
    deadline_s, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not look():
        assert launcher.process.poll() is None
        assert time.monotonic() < deadline_s, "it did not happen in time"
        pause.wait(0.02)


def actor_of_server(launcher: Launcher, process: int) -> psutil.Process:
    """The actor of the process of server 0 with this number."""
    for child in psutil.Process(launcher.process.pid).children(recursive=True):
        words = child.as_dict(["cmdline"])["cmdline"] or []
        if "paceline.launch.server" in words and (words[6:] or ["0"]) == [str(process)]:
            return parent_of(child)
    raise AssertionError(f"there is no process {process} of server 0")


def parent_of(process: psutil.Process) -> psutil.Process:
    parent = process.parent()
    assert parent is not None
    return parent


def kill_node(actor: psutil.Process) -> None:
    """Kill all that runs on the node of Ray where this is, as when its machine is lost."""
    raylet = parent_of(actor)
    assert raylet.name() == "raylet", raylet
    for process in (raylet, *raylet.children(recursive=True)):
        os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("lag", [0, pytest.param(2, marks=pytest.mark.campaign)])
def test_the_node_of_a_server_is_lost_and_then_the_actor_of_its_replica(
    launcher: Launcher, lag: int, tmp_path: Path
) -> None:
    views, first, second = Views(tmp_path / "run", 0), *STOPS
    asked = {"run_dir": str(tmp_path / "run"), "replicas": 1, "lag": lag, "worker_resources": {"home": 1}}
    launcher.start(
        script=str(write(tmp_path / "train.py", SCRIPT)),
        args=[str(tmp_path)],
        env={"PYTHONPATH": str(ROOT)},
        start_timeout_s=START_S,
        **asked,
    )

    wait_until(launcher, lambda: all((tmp_path / f"at-{first}-{rank}").exists() for rank in range(2)))
    kill_node(actor_of_server(launcher, 0))
    (tmp_path / f"go-{first}").touch()
    wait_until(launcher, lambda: all((tmp_path / f"at-{second}-{rank}").exists() for rank in range(2)))
    # Ray may try the lost node first, so that the first process in its place comes to nothing.
    wait_until(launcher, lambda: (view := views.newest()) is not None and view.head == 1 and view.replica > 1)
    actor_of_server(launcher, 1).kill()
    (tmp_path / f"go-{second}").touch()
    code, lines = launcher.result()

    assert code == 0, lines
    (tmp_path / "here").mkdir()
    undisturbed = set(run_job(tmp_path / "here", train, workers=2, servers=1))
    assert {(tmp_path / f"bits-{rank}").read_text() for rank in range(2)} == undisturbed
    said = "\n".join(lines)
    assert said.count("server 0 is served by its replica from now on") == 2
    assert "server 0 was killed by SIGKILL; another process goes on in its place" in said
    assert "server 0.1 was killed by SIGKILL; another process goes on in its place" in said
    [where] = [line for line in lines if "its replica on" in line]
    server, replica = (words.split()[0] for words in where.split("(node ")[1:])
    assert server != replica
    assert "Unhandled error" not in said

"""Jobs of other launchers over several hosts, each with a name, an address and a kernel's view of the network."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from benchmarks.shaped_network import CannotShapeError, Line, ShapedNetwork
from tests.hosts.nodes_worker import train
from tests.jobs import run_job
from tests.launch.launching import processes_of, wait_gone

WORKER = Path(__file__).with_name("nodes_worker.py")
MASTER_PORT = 29431
PATIENCE_S = 200.0
CUT_S = 1.0


@contextmanager
def hosts(number: int) -> Iterator[ShapedNetwork]:
    """Make hosts, or skip the test where that is not possible."""
    with ExitStack() as exit_:
        try:
            network = exit_.enter_context(ShapedNetwork([Line()] * number, network="10.231.7"))
        except CannotShapeError as problem:
            pytest.skip(str(problem))
        yield network


@contextmanager
def torchrun(network: ShapedNetwork, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a worker on each host, by the agent of torchrun that runs there."""
    settings = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", network.address(0))
    variables = {
        "OMP_NUM_THREADS": "1",
        "PACELINE_RUN_DIR": str(folder / "runs"),
        "PACELINE_SERVERS": "node:1",
    }
    with ExitStack() as running:
        agents: list[subprocess.Popen[str]] = []
        for host in range(len(network.lines)):
            place = ("--node-rank", str(host), "--master-port", str(MASTER_PORT))
            script = (sys.executable, "-m", "torch.distributed.run", *settings, *place, str(WORKER), str(folder))
            agent = subprocess.Popen(
                network.command(host, *script),
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            running.callback(agent.communicate)
            running.callback(agent.kill)
            agents.append(agent)
        yield agents


def test_torchrun_over_two_machines_learns_what_one_machine_does(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with hosts(2) as network, torchrun(network, tmp_path) as agents:
        wait_for(agents, lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
        [run_dir] = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
        listening = {host: listening_at(network, host) for host in range(2)}
        secrets = [run_dir] + [path for path in run_dir.rglob("*") if path.name == "token" or path.suffix == ".key"]
        modes = {path.name: path.stat().st_mode & 0o077 for path in secrets}
        family = processes_of(run_dir)
        network.cut(1)
        (tmp_path / "go").touch()
        threading.Event().wait(CUT_S)
        assert not list(tmp_path.glob("bits-*")), "no clock is finished without worker 1"
        network.heal(1)
        told = [agent.communicate(timeout=PATIENCE_S) for agent in agents]

    assert [agent.returncode for agent in agents] == [0, 0], told
    assert listening == {host: {network.address(host)} for host in range(2)}
    assert len(modes) == 1 + 1 + 4  # the folder, the token, and the key of each worker and server
    assert set(modes.values()) == {0}, "others can read what only this user may"
    said = [line for _, errors in told for line in errors.splitlines() if line.startswith("paceline")]
    assert said == [
        "paceline: torchrun, 2 workers on 2 nodes, 1 server on each node",
        f"paceline: 2 machines (host-0, host-1): tcp, encrypted; this one is {network.address(0)}",
    ]
    assert [out for out, _ in told] == [f"worker {rank} of 2 counts 2, and by torch 2\n" for rank in range(2)]
    bits = {(tmp_path / f"bits-{rank}").read_text() for rank in range(2)}
    (tmp_path / "here").mkdir()
    assert bits == set(run_job(tmp_path / "here", train, workers=2, servers=2))
    assert wait_gone(family, PATIENCE_S) == set()
    assert [path for path in secrets if path.exists()] == [run_dir]


def listening_at(network: ShapedNetwork, host: int) -> set[str]:
    """The addresses of a host at which a process accepts connections, but for the store of torchrun."""
    command = network.command(host, "ss", "-ltnH")
    shown = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    places = [line.split()[3].rpartition(":") for line in shown.splitlines()]
    return {address for address, _, port in places if port != str(MASTER_PORT)}


def wait_for(agents: list[subprocess.Popen[str]], there: Callable[[], bool]) -> None:
    """Block until something is there that the job makes."""
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not there():
        pause.wait(0.02)
        ended = [agent.communicate() for agent in agents if agent.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline

"""Servers and machines are killed under a job over several hosts, and training goes on with their replicas."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from benchmarks.shaped_network import ShapedNetwork
from tests.hosts.replicas_worker import IDS, NUM_CLOCKS, STOPS, train
from tests.hosts.test_nodes import PATIENCE_S, hosts, wait_for
from tests.jobs import run_job

from paceline.errors import EXIT_PREEMPTED
from paceline.job.views import FIRST, NO_PROCESS, Views
from paceline.launch.rendezvous.node_places import PlaceClaims

WORKER = Path(__file__).with_name("replicas_worker.py")
MASTER_PORT = "29437"
REPLICATED = "node:1+replicas:1"
each_way = pytest.mark.parametrize("servers", [REPLICATED, f"{REPLICATED}+lag:2"])
CUT_S = 8.0  # after it was noticed: more than 5 s, which are enough for connections that break on one machine


@contextmanager
def started(network: ShapedNetwork, folder: Path, servers: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a worker on each host."""
    with ExitStack() as running:
        yield [running.enter_context(worker_on(network, folder, servers, host)) for host in range(len(network.lines))]


@contextmanager
def worker_on(
    network: ShapedNetwork, folder: Path, servers: str, host: int, size: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start the worker of a host, as a launcher does that tells ranks alone; by default all hosts have one."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": MASTER_PORT,
        "RANK": str(host),
        "WORLD_SIZE": str(size or len(network.lines)),
        "PACELINE_RUN_DIR": str(folder / "runs"),
        "PACELINE_SERVERS": servers,
    }
    with process_on(network, host, variables, str(WORKER), str(folder)) as worker:
        yield worker


@contextmanager
def process_on(
    network: ShapedNetwork, host: int, variables: dict[str, str], *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    worker = subprocess.Popen(
        network.command(host, sys.executable, *arguments),
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield worker
    finally:
        worker.kill()
        worker.communicate()


def views_of(folder: Path, rank: int) -> Views:
    [run_dir] = [path for path in (folder / "runs").iterdir() if path.is_dir()]
    return Views(run_dir, rank)


def server_pid(folder: Path, rank: int, process: int) -> int:
    """The process that serves, or is the replica, in the place of a server of this job."""
    [run_dir] = [path for path in (folder / "runs").iterdir() if path.is_dir()]
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if str(run_dir) in words and words[words.index(str(run_dir)) + 1 :: 2][:2] == [str(rank), str(process)]:
                return int(entry.name)
    raise AssertionError(f"there is no process {process} of server {rank}")


def wait_at(workers: list[subprocess.Popen[str]], folder: Path, clock: int) -> None:
    """Block until all workers wait before a clock."""
    wait_for(workers, lambda: all((folder / f"at-{clock}-{rank}").exists() for rank in range(len(workers))))


@pytest.mark.campaign
@each_way
def test_servers_are_killed_and_the_bytes_are_those_of_an_undisturbed_run(servers: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with hosts(2) as network, started(network, tmp_path, servers) as workers:
        for rank, clock in enumerate(STOPS):
            wait_at(workers, tmp_path, clock)
            os.kill(server_pid(tmp_path, rank, 0), signal.SIGKILL)
            if clock == STOPS[-1]:  # and once more what goes on in the place of the first
                wait_for(workers, lambda: (view := views_of(tmp_path, 0).newest()) is not None and view.replica > 1)
                os.kill(server_pid(tmp_path, 0, 1), signal.SIGKILL)
            (tmp_path / f"go-{clock}").touch()
        told = [worker.communicate(timeout=PATIENCE_S) for worker in workers]

    assert [worker.returncode for worker in workers] == [0, 0], told
    (tmp_path / "here").mkdir()
    undisturbed = set(run_job(tmp_path / "here", train, workers=2, servers=2))
    assert {(tmp_path / f"bits-{rank}").read_text() for rank in range(2)} == undisturbed
    said = "".join(errors for _, errors in told)
    assert said.count("server 0 is served by its replica from now on") == 2
    assert "server 0 has a replica again" in said
    for rank in range(2):
        assert f"server {rank} is served by its replica from now on" in said
        assert f"a process of server {rank} was killed by SIGKILL; the run goes on with another" in said


@pytest.mark.campaign
@pytest.mark.parametrize("is_silent", [False, True])
@each_way
def test_a_machine_is_lost_with_all_that_runs_there_and_no_push_that_was_made(
    servers: str, is_silent: bool, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    first = STOPS[0]
    with hosts(2) as network, started(network, tmp_path, servers) as workers:
        wait_at(workers, tmp_path, first)
        if is_silent:
            network.signal(1, signal.SIGSTOP)
            network.cut(1)
        else:
            network.signal(1, signal.SIGKILL)
        for clock in STOPS:
            (tmp_path / f"go-{clock}").touch()
        _, errors = workers[0].communicate(timeout=PATIENCE_S)
        network.signal(1, signal.SIGKILL)

    assert workers[0].returncode == 0, errors
    whole, part = sum(range(NUM_CLOCKS + 1)), sum(range(first + 1))  # what each worker has added, clock by clock
    rows = torch.tensor([whole, *[whole + part] * 4, part, 0, 0], dtype=torch.float32)[:, None].expand(8, 4)
    assert (tmp_path / "bits-0").read_text().endswith(rows.contiguous().numpy().tobytes().hex())
    assert "server 1 is served by its replica from now on" in errors
    assert "the run ends if server 0 is lost, as it has no replica any more" in errors


@pytest.mark.campaign
@each_way
def test_machines_are_lost_one_after_the_other_and_the_last_has_all_that_was_pushed(
    servers: str, tmp_path: Path
) -> None:
    """Each server loses its process or its replica with the first machine, and has another before the second goes."""
    tmp_path.chmod(0o700)
    first, second = STOPS
    with hosts(3) as network, started(network, tmp_path, servers) as workers:
        wait_at(workers, tmp_path, first)
        network.signal(1, signal.SIGKILL)
        workers[1].wait(PATIENCE_S)
        left = [workers[0], workers[2]]
        (tmp_path / f"go-{first}").touch()
        wait_for(left, lambda: all(has_two_processes(tmp_path, rank, lost=1) for rank in range(3)))
        wait_for(left, lambda: all((tmp_path / f"at-{second}-{rank}").exists() for rank in (0, 2)))
        network.signal(2, signal.SIGKILL)
        (tmp_path / f"go-{second}").touch()
        _, errors = workers[0].communicate(timeout=PATIENCE_S)

    assert workers[0].returncode == 0, errors
    assert (tmp_path / "bits-0").read_text().endswith(rows_of((NUM_CLOCKS, first, second)))
    assert "a machine with a process of server 1 is gone, or leaves; this one has another, its replica" in errors
    for rank in (1, 2):
        assert f"server {rank} is served by its replica from now on" in errors


@pytest.mark.campaign
@each_way
def test_a_machine_that_is_taken_away_hands_its_servers_over_and_another_is_lost_later(
    servers: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    first, second = STOPS
    with hosts(3) as network, started(network, tmp_path, servers) as workers:
        wait_at(workers, tmp_path, first)
        network.signal(1, signal.SIGTERM)
        (tmp_path / f"go-{first}").touch()
        _, said = workers[1].communicate(timeout=PATIENCE_S)
        left = [workers[0], workers[2]]
        wait_for(left, lambda: all((tmp_path / f"at-{second}-{rank}").exists() for rank in (0, 2)))
        wait_for(left, lambda: all(has_two_processes(tmp_path, rank, lost=1) for rank in range(3)))
        network.signal(2, signal.SIGKILL)
        (tmp_path / f"go-{second}").touch()
        _, errors = workers[0].communicate(timeout=PATIENCE_S)

    assert workers[1].returncode == EXIT_PREEMPTED, said
    assert "worker 1 leaves, and servers of its machine have moved to others" in said
    assert "server 1 is handed over, to its replica on another machine" in said
    assert "exit code 1" not in said
    assert workers[0].returncode == 0, errors
    assert (tmp_path / "bits-0").read_text().endswith(rows_of((NUM_CLOCKS, first + 1, second)))
    assert "server 0 has another replica" in errors


@pytest.mark.parametrize(
    ("servers", "how"),
    [
        (REPLICATED, signal.SIGKILL),
        pytest.param(f"{REPLICATED}+lag:2", signal.SIGKILL, marks=pytest.mark.campaign),
        pytest.param(REPLICATED, signal.SIGTERM, marks=pytest.mark.campaign),
    ],
)
def test_a_machine_that_was_lost_comes_again_and_has_its_worker_and_its_servers(
    servers: str, how: signal.Signals, tmp_path: Path
) -> None:
    """What it has again is what counts: the process of the other machine that serves is killed after that."""
    tmp_path.chmod(0o700)
    first, second = STOPS
    # Where servers serve and have their replicas; server 1 serves where it began only after a while.
    where = {0: [(0, 1)], 1: [(1, 0)] if how == signal.SIGTERM else [(0, 1), (1, 0)]}
    with hosts(2) as network, ExitStack() as running:
        workers = [running.enter_context(worker_on(network, tmp_path, servers, host)) for host in range(2)]
        wait_at(workers, tmp_path, first)
        network.signal(1, how)
        (tmp_path / f"go-{first}").touch()
        workers[1].wait(PATIENCE_S)
        wait_for(workers[:1], (tmp_path / f"at-{second}-0").exists)
        workers[1] = running.enter_context(worker_on(network, tmp_path, servers, 1))
        wait_for(workers, (tmp_path / f"at-{second}-1").exists)
        wait_for(workers, lambda: all(nodes_of(tmp_path, rank) in places for rank, places in where.items()))
        os.kill(server_pid(tmp_path, 0, 0), signal.SIGKILL)
        (tmp_path / f"go-{second}").touch()
        told = [worker.communicate(timeout=PATIENCE_S) for worker in workers]

    assert [worker.returncode for worker in workers] == [0, 0], told
    bits = {(tmp_path / f"bits-{rank}").read_text() for rank in range(2)}
    assert len(bits) == 1
    num_clocks = first + (how == signal.SIGTERM)  # in its first life: one that is told to leave finishes a clock
    whole = sum(range(NUM_CLOCKS + 1))
    assert bits.pop().endswith(rows_that_had((whole, whole - sum(range(num_clocks + 1, second + 1)))))
    assert "worker 1 takes the place of the process that was worker 1 before it" in told[1][1]
    for rank in range(2):
        assert f"this machine is the home of server {rank}, and has a replica of it" in told[1][1]


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.campaign)])
def test_a_spare_has_the_servers_of_a_machine_that_is_lost_or_leaves(how: signal.Signals, tmp_path: Path) -> None:
    """What it has is what counts: the process of the first machine that serves is killed after that."""
    tmp_path.chmod(0o700)
    first, second = STOPS
    with hosts(3) as network, ExitStack() as running:
        workers = [running.enter_context(worker_on(network, tmp_path, REPLICATED, host, 2)) for host in range(2)]
        wait_at(workers, tmp_path, first)
        command = ("-m", "paceline", "spare", str(tmp_path / "runs"))
        spare = running.enter_context(process_on(network, 2, {}, *command))
        assert spare.stderr is not None
        assert "this machine is node 2 of the job in" in spare.stderr.readline()
        network.signal(1, how)
        (tmp_path / f"go-{first}").touch()
        workers[1].wait(PATIENCE_S)
        left = [workers[0], spare]
        wait_for(left, lambda: all(has_two_processes(tmp_path, rank, lost=1) for rank in range(2)))
        wait_for(left, (tmp_path / f"at-{second}-0").exists)
        os.kill(server_pid(tmp_path, 0, 0), signal.SIGKILL)
        (tmp_path / f"go-{second}").touch()
        _, errors = workers[0].communicate(timeout=PATIENCE_S)
        _, said = spare.communicate(timeout=PATIENCE_S)

    assert (workers[0].returncode, spare.returncode) == (0, 0), errors + said
    num_clocks = first + (how == signal.SIGTERM)  # one that is told to leave finishes a clock
    assert (tmp_path / "bits-0").read_text().endswith(rows_of((NUM_CLOCKS, num_clocks)))
    assert "a machine with a process of server 0 is gone, or leaves; this one has another, its replica" in said
    assert "server 0 is served by its replica from now on" in said


@pytest.mark.campaign
@each_way
def test_a_server_moves_to_a_machine_that_comes_for_it_and_training_goes_on(servers: str, tmp_path: Path) -> None:
    """What has moved is what counts: once it is there, its replica, the last process of before, is killed."""
    tmp_path.chmod(0o700)
    with hosts(3) as network, ExitStack() as running:
        workers = [running.enter_context(worker_on(network, tmp_path, servers, host, 2)) for host in range(2)]
        wait_at(workers, tmp_path, STOPS[0])
        command = ("-m", "paceline", "spare", str(tmp_path / "runs"), "--servers", "1")
        spare = running.enter_context(process_on(network, 2, {}, *command))
        assert spare.stderr is not None
        assert "to which servers move: 0" in spare.stderr.readline()
        (tmp_path / f"go-{STOPS[0]}").touch()
        every = [*workers, spare]
        wait_for(every, lambda: nodes_of(tmp_path, 0) == (2, 1))
        wait_at(workers, tmp_path, STOPS[1])
        assert nodes_of(tmp_path, 1) == (1, 0)
        view = views_of(tmp_path, 0).newest()
        assert view is not None
        os.kill(server_pid(tmp_path, 0, view.replica), signal.SIGKILL)
        (tmp_path / f"go-{STOPS[1]}").touch()
        told = [process.communicate(timeout=PATIENCE_S) for process in every]

    assert [process.returncode for process in every] == [0, 0, 0], told
    (tmp_path / "here").mkdir()
    undisturbed = set(run_job(tmp_path / "here", train, workers=2, servers=2))
    assert {(tmp_path / f"bits-{rank}").read_text() for rank in range(2)} == undisturbed
    assert "this machine is the home of server 0, and has a replica of it" in told[2][1]


def nodes_of(folder: Path, rank: int) -> tuple[int, int] | None:
    """On which nodes a server serves and has its replica; None while it lacks one."""
    view = views_of(folder, rank).newest()
    claims = PlaceClaims(views_of(folder, rank).published(0).parent, rank)
    if view is None or view.replica == NO_PROCESS:
        return None
    return claims.node_of(view.head), claims.node_of(view.replica)


def rows_of(num_clocks: tuple[int, ...]) -> str:
    """The bits of the rows to which each worker has pushed in so many clocks."""
    return rows_that_had(tuple(sum(range(clocks + 1)) for clocks in num_clocks))


def rows_that_had(added: tuple[int, ...]) -> str:
    """The bits of the rows to whose values each worker has added so much."""
    counts = [sum(each for rank, each in enumerate(added) if 0 <= row - rank < len(IDS)) for row in range(8)]
    rows = torch.tensor(counts, dtype=torch.float32)[:, None].expand(8, 4)
    return rows.contiguous().numpy().tobytes().hex()


def has_two_processes(folder: Path, rank: int, lost: int) -> bool:
    """Whether a server has a replica, and neither of the two is on the node that was lost."""
    nodes = nodes_of(folder, rank)
    return nodes is not None and lost not in nodes


@pytest.mark.campaign
@each_way
def test_a_line_that_is_cut_for_longer_than_it_takes_to_notice_ends_no_job(servers: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with hosts(2) as network, started(network, tmp_path, servers) as workers:
        wait_at(workers, tmp_path, STOPS[0])
        network.cut(1)
        for clock in STOPS:
            (tmp_path / f"go-{clock}").touch()
        for rank in range(2):  # of the two processes of each server, one has decided to go on alone
            wait_for(workers, lambda rank=rank: (views_of(tmp_path, rank).newest() or FIRST).number > FIRST.number)
        threading.Event().wait(CUT_S)
        network.heal(1)
        told = [worker.communicate(timeout=PATIENCE_S) for worker in workers]

    assert [worker.returncode for worker in workers] == [0, 0], told
    (tmp_path / "here").mkdir()
    undisturbed = set(run_job(tmp_path / "here", train, workers=2, servers=2))
    assert {(tmp_path / f"bits-{rank}").read_text() for rank in range(2)} == undisturbed


@pytest.mark.campaign
def test_both_copies_of_a_server_are_killed_and_every_worker_is_told_that_it_is_lost(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with hosts(2) as network, started(network, tmp_path, REPLICATED) as workers:
        wait_at(workers, tmp_path, STOPS[0])
        for process in [server_pid(tmp_path, 0, copy) for copy in range(2)]:
            os.kill(process, signal.SIGKILL)
        for clock in STOPS:
            (tmp_path / f"go-{clock}").touch()
        told = [worker.communicate(timeout=PATIENCE_S) for worker in workers]

    assert [worker.returncode for worker in workers] == [1, 1], told
    assert all("ServerLost: worker" in errors and "server 0 is lost: " in errors for _, errors in told), told
    assert "server 0 was killed by SIGKILL; the run ends" in "".join(errors for _, errors in told)

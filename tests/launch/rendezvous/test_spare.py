"""A machine that comes to a running job for its servers: which job it finds, and which one it is no use for."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.launch.rendezvous.test_node_places import NUM_NODES

from paceline.errors import EXIT_INTERRUPTED, DeadlineExceeded, UsageError
from paceline.job.addresses import CLUSTER_NAME, SPEC_NAME
from paceline.job.machines import Machine, this_machine
from paceline.job.spec import ClusterSpec, write_token
from paceline.job.views import FIRST, Views
from paceline.launch.rendezvous.liveness_lock import VERSION, LivenessLock, ProcessInfo
from paceline.launch.rendezvous.node_places import NodePlaces
from paceline.launch.rendezvous.spare import find_job, spare

DEADLINE_S = 120.0


def job(folder: Path, *, has_replicas: bool = True) -> ClusterSpec:
    """A job that has begun, of one worker."""
    folder.mkdir(mode=0o700, parents=True)
    write_token(folder)
    spec = ClusterSpec(
        job="a7", num_workers=1, num_servers=1, transport="shm", run_dir=str(folder), has_replicas=has_replicas
    )
    for name in (SPEC_NAME, CLUSTER_NAME):
        spec.write(folder / name)
    return spec


def test_the_only_job_of_a_folder_is_found(tmp_path: Path) -> None:
    job(tmp_path / "runs" / "one")
    (tmp_path / "runs" / "over").mkdir()
    (tmp_path / "runs" / "notes").touch()
    for folder in (tmp_path / "runs" / "one", tmp_path / "runs"):
        assert find_job(folder, 0.0) == tmp_path / "runs" / "one"
    job(tmp_path / "runs" / "two")
    with pytest.raises(UsageError, match=r"several jobs run in .*/runs: .*/runs/one, .*/runs/two; name the folder"):
        find_job(tmp_path / "runs", 0.0)
    with pytest.raises(DeadlineExceeded, match=r"no job has begun in .*/runs/over within 0 s, or it has ended: name"):
        find_job(tmp_path / "runs" / "over", 0.0)
    with pytest.raises(UsageError, match=r"cannot look into .*/runs/none: No such file or directory"):
        find_job(tmp_path / "runs" / "none", 0.0)


def test_a_job_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(find_job, tmp_path / "runs", DEADLINE_S)
        job(tmp_path / "runs" / "late")
        assert found.result(DEADLINE_S) == tmp_path / "runs" / "late"


def test_a_job_without_replicas_has_no_use_for_a_spare(tmp_path: Path) -> None:
    job(tmp_path / "run", has_replicas=False)
    with pytest.raises(UsageError, match=r"the servers of the job in .*/run have no replicas"):
        spare(tmp_path / "run")


@pytest.mark.parametrize(
    ("number", "refusal"),
    [
        (-1, r"--servers is -1, expected how many servers are to move here, or 0 for a spare"),
        (2, r"--servers is 2, and the job in .*/run has 1"),
    ],
)
def test_servers_that_cannot_move_are_refused(number: int, refusal: str, tmp_path: Path) -> None:
    job(tmp_path / "run")
    with pytest.raises(UsageError, match=refusal):
        spare(tmp_path / "run", servers=number)


def test_servers_that_do_not_begin_are_waited_for_no_longer_than_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path / "run")
    monkeypatch.setenv("PACELINE_START_TIMEOUT_S", "0")
    worker = LivenessLock.acquire(tmp_path / "run", "worker", 0, 1)
    with pytest.raises(DeadlineExceeded, match=r"not all servers of the job in .*/run have begun within 0 s"):
        spare(tmp_path / "run", servers=1)
    worker.release()


def tell_of(path: Path, machine: Machine, version: str = VERSION) -> None:
    """Have the file of a process say that it is another one."""
    path.write_bytes(msgspec.json.encode(ProcessInfo(machine, version)))


def test_a_job_of_another_version_takes_no_spare(tmp_path: Path) -> None:
    job(tmp_path / "run")
    worker = LivenessLock.acquire(tmp_path / "run", "worker", 0, 1)
    tell_of(tmp_path / "run" / "worker-0.life", this_machine(), "0.1")
    with pytest.raises(UsageError, match=r"the first process of the job on .* runs paceline 0\.1, and this process"):
        spare(tmp_path / "run")
    worker.release()


def test_a_machine_of_the_job_is_no_spare_while_it_takes_part(tmp_path: Path) -> None:
    job(tmp_path / "run")
    worker, node = LivenessLock.acquire(tmp_path / "run", "worker", 0, 1), NodePlaces(tmp_path / "run", 0, 1)
    with pytest.raises(UsageError, match=r" is node 0 of the job in .*/run already, .*: start the spare on another"):
        spare(tmp_path / "run")
    node.close()
    worker.release()
    assert spare(tmp_path / "run") == 0, "the job is over"


def test_spares_have_numbers_behind_the_nodes_of_the_start(tmp_path: Path) -> None:
    nodes = [NodePlaces(tmp_path, node, NUM_NODES) for node in range(NUM_NODES)]
    spares = [NodePlaces(tmp_path, None, NUM_NODES) for _ in range(2)]
    spares[0].close()
    spares.append(NodePlaces(tmp_path, None, NUM_NODES))
    assert [one.node for one in spares] == [NUM_NODES, NUM_NODES + 1, NUM_NODES + 2]
    for one in (*nodes, *spares):
        one.close()


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A spare that has come."""
    command = [sys.executable, "-m", "paceline", "spare", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "a spare for those that are lost" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_spare_ends_by_a_signal_and_with_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job(folder)
    Views(folder, 0).change(FIRST)
    node, worker = NodePlaces(folder, 0, 1), LivenessLock.acquire(folder, "worker", 0, 1)
    tell_of(folder / "node-0.life", Machine("another"))
    assert node.claim(0, FIRST.head)
    assert node.claim(0, FIRST.replica)
    with started(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, "this machine leaves" in said) == (EXIT_INTERRUPTED, True), said
    with started(tmp_path) as process:
        worker.release()
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said
        assert f"the job in {folder} is over" in said
    node.close()

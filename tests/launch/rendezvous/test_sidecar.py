"""Servers beside a worker: how one has ended is known to all workers at once, unless all end together."""

import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from paceline.errors import PeerError
from paceline.job.addresses import how_server_ended
from paceline.job.folders import wait_for
from paceline.job.spec import ClusterSpec
from paceline.job.views import FIRST, Views
from paceline.launch.rendezvous import sidecar
from paceline.launch.rendezvous.liveness_lock import LivenessLock
from paceline.launch.rendezvous.node_places import NodePlaces, PlaceClaims
from paceline.launch.rendezvous.sidecar import SidecarServers, WorkerWatch
from paceline.launch.replicas import MAX_FAILURES

PATIENCE_S = 60.0


def test_workers_are_told_how_a_server_beside_one_of_them_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sidecar, "ENTRY", "no_such_program")
    servers = SidecarServers(tmp_path, range(2, 3), "")
    for watch in servers._watches:
        watch.join(PATIENCE_S)
    servers.kill()
    assert how_server_ended(tmp_path, 2) == "ended with exit code 1"
    assert "paceline: server 2 ended with exit code 1; the run ends" in capfd.readouterr().err


def test_a_process_that_has_ended_is_replaced_while_another_serves_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sidecar, "ENTRY", "no_such_program")
    Views(tmp_path, 2).change(FIRST)
    servers = SidecarServers(tmp_path, range(0), "", range(2, 3))
    for watch in servers._watches:
        watch.join(PATIENCE_S)
    assert [process for _, process in servers._processes] == [1, 3, 5, 7, 9]
    with pytest.raises(PeerError, match="server 2 ended with exit code 1 before the job began"):
        servers.check()
    servers.kill()
    said = "paceline: a process of server 2 ended with exit code 1; the run goes on with another"
    assert capfd.readouterr().err.count(said) == MAX_FAILURES
    assert how_server_ended(tmp_path, 2) == ""


def test_a_process_that_was_killed_after_it_had_been_the_replica_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views, view = Views(tmp_path, 2), FIRST
    views.change(view)
    for process in range(3, 15, 2):
        view = view.alone()
        views.change(view)
        view = view.repaired(process)
        views.change(view)
    package = tmp_path / "killed"
    package.mkdir()
    (package / "__main__.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setattr(sidecar, "ENTRY", "killed")
    monkeypatch.syspath_prepend(str(tmp_path))
    servers = SidecarServers(tmp_path, range(0), "", range(2, 3))
    for watch in servers._watches:
        watch.join(PATIENCE_S)
    servers.kill()
    assert max(process for _, process in servers._processes) == 13 + 2 * MAX_FAILURES


def test_a_place_that_has_moved_to_another_node_has_no_other_process_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "ENTRY", "no_such_program")
    Views(tmp_path, 0).change(FIRST)
    nodes = [NodePlaces(tmp_path, node, num_servers=1) for node in (1, 2)]
    assert nodes[1].claim(0, 5)
    servers = SidecarServers(tmp_path, range(0), "", range(1), nodes[0])
    for watch in servers._watches[:1]:
        watch.join(PATIENCE_S)
    servers.kill()
    nodes[1].close()
    assert [process for _, process in servers._processes] == [1, 3]


def test_a_disk_that_is_full_when_a_process_has_ended_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sidecar, "ENTRY", "no_such_program")
    monkeypatch.setattr(sidecar, "LOOK_S", 0.01)
    Views(tmp_path, 0).change(FIRST)
    node = NodePlaces(tmp_path, 1, num_servers=1)
    claim, num_failures = node.claim, 3

    def claim_later(rank: int, process: int) -> bool:
        nonlocal num_failures
        if process > 1 and num_failures:
            num_failures -= 1
            raise OSError(28, "No space left on device")
        return claim(rank, process)

    monkeypatch.setattr(node, "claim", claim_later)
    servers = SidecarServers(tmp_path, range(0), "", range(1), node)
    for watch in servers._watches[:1]:
        watch.join(PATIENCE_S)
    servers.kill()
    assert num_failures == 0
    assert [process for _, process in servers._processes] == [1, 3, 5, 7, 9]
    told = "paceline: no other process of server 0 comes here until the folder of the job can be written to: "
    assert capfd.readouterr().err.count(told) == 1


def test_a_folder_that_cannot_be_read_when_a_process_has_ended_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(views: Views) -> str:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(sidecar, "ENTRY", "no_such_program")
    monkeypatch.setattr(Views, "how_ended", fail)
    servers = SidecarServers(tmp_path, range(0), "", range(2, 3))
    for watch in servers._watches:
        watch.join(PATIENCE_S)
    servers.kill()
    said = capfd.readouterr().err
    told = f"no other one comes here: [Errno 13] Permission denied: '{tmp_path}'"
    assert said.count(f"paceline: a process of server 2 has ended, and {told}") == 1
    assert "Traceback" not in said


def beside_a_node_that_is_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SidecarServers:
    """The servers of the last node of three, of which the second one had the replica of server 0."""
    monkeypatch.setattr(sidecar, "LOOK_S", 0.01)
    views, gone = Views(folder, 0), NodePlaces(folder, 1, num_servers=1)
    views.change(FIRST)
    assert PlaceClaims(folder, 0).claim(0, node=0)
    assert gone.claim(0, 1)
    servers = SidecarServers(folder, range(0), "", range(0), NodePlaces(folder, 2, num_servers=1))
    assert not servers.pids
    gone.close()
    assert views.dismiss(FIRST.number)
    return servers


def test_a_process_is_started_in_the_place_of_a_node_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sidecar, "ENTRY", "no_such_program")
    servers = beside_a_node_that_is_gone(tmp_path, monkeypatch)
    said = "paceline: a machine with a process of server 0 is gone, or leaves; this one has another, its replica"
    wait_for(lambda: len(servers._processes) == MAX_FAILURES or None, PATIENCE_S, lambda: f"{servers._processes}")
    servers.kill()
    assert [process for _, process in servers._processes] == [3, 5, 7, 9, 11]
    assert capfd.readouterr().err.count(said) == 1


def test_a_place_of_a_node_that_is_gone_in_which_no_process_can_be_started_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = threading.Event()

    def fail(*_: object, **__: object) -> None:
        failed.set()
        raise BlockingIOError(11, "No room")

    monkeypatch.setattr(sidecar.subprocess, "Popen", fail)
    servers = beside_a_node_that_is_gone(tmp_path, monkeypatch)
    assert failed.wait(PATIENCE_S)
    servers.kill()
    told = "server 0 stays without a replica, as this machine cannot start a process: [Errno 11] No room"
    assert capfd.readouterr().err == f"paceline: {told}\n"


def test_servers_that_end_with_their_worker_are_not_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "ENTRY", "asyncio")  # it would wait for ever
    servers = SidecarServers(tmp_path, range(1), "")
    servers.kill()
    assert how_server_ended(tmp_path, 0) == ""


def test_the_end_of_each_life_of_a_worker_is_told_and_one_that_comes_again_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "LOOK_S", 0.01)
    spec = ClusterSpec(job="3f", num_workers=2, num_servers=1, transport="shm", run_dir=str(tmp_path))
    told: SimpleQueue[tuple[int, int]] = SimpleQueue()
    watch = WorkerWatch(spec, lambda worker, life, _: told.put((worker, life)))
    first, other = (LivenessLock.acquire(tmp_path, "worker", rank, 2) for rank in range(2))
    waiting = threading.Thread(target=watch.wait_all_ended, daemon=True)
    waiting.start()
    first.release()
    assert told.get(timeout=PATIENCE_S) == (0, 0)
    again = LivenessLock.acquire(tmp_path, "worker", 0, 2)
    other.release()
    assert told.get(timeout=PATIENCE_S) == (1, 0)
    wait_for(lambda: 0 not in watch._ended or None, PATIENCE_S, lambda: "the worker that has come again is not seen")
    late: SimpleQueue[tuple[int, int]] = SimpleQueue()  # of a server that is started only now
    another = WorkerWatch(spec, lambda worker, life, _: late.put((worker, life)))
    waiting_late = threading.Thread(target=another.wait_all_ended, daemon=True)
    waiting_late.start()
    assert late.get(timeout=PATIENCE_S) == (1, 0)
    assert waiting.is_alive()
    assert waiting_late.is_alive()
    again.release()
    assert told.get(timeout=PATIENCE_S) == (0, 1)
    assert late.get(timeout=PATIENCE_S) == (0, 1)
    for one in (waiting, waiting_late):
        one.join(PATIENCE_S)
        assert not one.is_alive()
    assert told.empty()
    assert late.empty()

"""Servers beside a worker: how one has ended is known to all workers at once, unless all end together."""

from pathlib import Path

import pytest

from paceline.errors import PeerError
from paceline.job.addresses import how_server_ended
from paceline.job.views import FIRST, Views
from paceline.launch.rendezvous import sidecar
from paceline.launch.rendezvous.sidecar import SidecarServers
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


def test_servers_that_end_with_their_worker_are_not_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "ENTRY", "asyncio")  # it would wait for ever
    servers = SidecarServers(tmp_path, range(1), "")
    servers.kill()
    assert how_server_ended(tmp_path, 0) == ""

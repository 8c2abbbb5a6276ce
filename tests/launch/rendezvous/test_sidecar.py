"""Servers beside a worker: how one has ended is known to all workers at once, unless all end together."""

from pathlib import Path

import pytest

from paceline.job.addresses import how_server_ended
from paceline.launch.rendezvous import sidecar
from paceline.launch.rendezvous.sidecar import SidecarServers

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


def test_servers_that_end_with_their_worker_are_not_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "ENTRY", "asyncio")  # it would wait for ever
    servers = SidecarServers(tmp_path, range(1), "")
    servers.kill()
    assert how_server_ended(tmp_path, 0) == ""

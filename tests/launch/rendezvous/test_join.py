"""How a process enters a job, as far as one process can show it."""

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from paceline.errors import CheckpointError, UsageError
from paceline.job.machines import Machine, this_machine
from paceline.launch.rendezvous.detect import detect
from paceline.launch.rendezvous.join import join_started_job
from paceline.launch.rendezvous.liveness_lock import VERSION
from paceline.launch.rendezvous.store import FolderRendezvous, Invitation

SECOND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
CRASHES = """
from paceline.launch.script_exit import leave_after_crash, when_script_ends
when_script_ends(lambda well: print("left", "well" if well else "badly"))
leave_after_crash()
raise ValueError("no data")
"""


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Be rank 1 of 2; returns how their job is called."""
    for name, value in {**SECOND, "PACELINE_RUN_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    found = detect(SECOND)
    assert found is not None
    return found.key


def test_without_a_launcher_there_is_no_job() -> None:
    assert join_started_job(None) is None
    assert join_started_job("ranks:1") is None


def test_a_mistake_in_where_servers_are_is_told_to_a_script_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "everywhere")

    with pytest.raises(UsageError, match="servers is 'everywhere', expected first:M"):
        join_started_job(None)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ({"PACELINE_SERVERS": "everywhere"}, "servers is 'everywhere', expected first:M"),
        ({"PACELINE_SERVERS": "ranks:2"}, "servers as ranks:2 leave no worker of 2 ranks: start more, or take fewer"),
        ({"PACELINE_RESUME": "/none"}, "/none"),
    ],
    ids=["text", "ranks", "snapshots"],
)
def test_where_the_first_process_refuses_to_start_the_job_the_others_end_at_once_with_what_it_said(
    cause: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SECOND, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as first:
        for name, value in {"RANK": "0", **cause}.items():
            first.setenv(name, value)
        with pytest.raises((UsageError, CheckpointError), match=said):
            join_started_job(None)

    refused = f"the first process of the job, on {this_machine()}, does not start it: .*{said}"
    with pytest.raises(UsageError, match=refused):
        join_started_job(None)


def test_a_process_on_another_machine_than_the_launcher_counts_is_refused(tmp_path: Path, second: str) -> None:
    store = FolderRendezvous(tmp_path, second)
    store.invite(Invitation(str(tmp_path), Machine("elsewhere"), VERSION))

    with pytest.raises(
        UsageError, match=r"the first of its job on elsewhere, but .* says that the job is on one machine"
    ):
        join_started_job(None)
    store.close()


def test_a_folder_that_others_can_enter_is_not_the_job(tmp_path: Path, second: str) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    store = FolderRendezvous(tmp_path, second)
    store.invite(Invitation(str(folder), this_machine(), VERSION))

    with pytest.raises(UsageError, match=r"has mode 0755 .* it is not the folder of a job of yours"):
        join_started_job(None)
    store.close()


def test_a_folder_without_room_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*, shared: bool) -> NoReturn:
        raise OSError(28, "No space left on device")

    for name, value in {**SECOND, "RANK": "0", "PACELINE_RUN_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("paceline.launch.rendezvous.join.make_folder", fail)
    told = rf"take part in its job, by {tmp_path}: No space left .*; free some space"
    with pytest.raises(UsageError, match=told):
        join_started_job(None)

    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match=f"the first process of the job, on {this_machine()}, .*{told}"):
        join_started_job(None)


def test_a_script_that_fails_leaves_badly() -> None:
    ended = subprocess.run([sys.executable, "-c", CRASHES], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (1, "left badly\n")
    assert "ValueError: no data" in ended.stderr

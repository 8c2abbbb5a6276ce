"""Real jobs whose versions are read while readers and servers are killed: no byte is wrong, and training goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.running import Run, running
from tests.faults.test_server_killed import GOES_ON, kill_server
from tests.versions.held_up import MOST_S, steps_of

import paceline
from paceline.versions.rows import SubscribedRows
from paceline.versions.subscription import Version, VersionSubscription

SCRIPTS = Path(__file__).with_name("scripts")
PATIENCE_S = 100.0


def check(version: Version) -> int:
    values = {bound for tensor in version.values() for bound in (tensor.min().item(), tensor.max().item())}
    assert values == {float(version.number)}
    assert version.verify()
    return version.number


def check_some(reader: VersionSubscription, num: int) -> int:
    for _ in range(num):
        number = check(reader.wait(timeout_s=PATIENCE_S))
    return number


def check_rows(rows: SubscribedRows, before: float) -> float:
    """Check that rows are of one update each time, whole, and do not go back; return what they are at last."""
    for _ in range(20):
        (value,) = rows.pull(range(100), timeout_s=PATIENCE_S).unique().tolist()
        assert value >= before
        before = value
    return before


def check_job(run: Run, end: Path, folder: Path, num_kills: int, reading: list[str]) -> None:
    """Read while servers, and readers with leases, are killed as often as that."""
    with paceline.subscribe(folder) as reader, reader.table("rows", timeout_s=PATIENCE_S) as rows:
        newest, killed, before = check_some(reader, 3), list[int](), 0.0
        for _ in range(num_kills):
            killed.append(kill_server(run, 0, but=tuple(killed)))
            run.wait_for(GOES_ON, times=len(killed))
            with reader.wait(newest + 1, timeout_s=PATIENCE_S) as version:
                newest = check(version)
            if reading:
                one = subprocess.Popen(reading, stdout=subprocess.PIPE, text=True)
                assert one.stdout is not None
                assert one.stdout.readline().startswith("has")
                one.kill()
                one.wait()
                one.stdout.close()
            newest = check_some(reader, 3)
            before = check_rows(rows, before)
        end.touch()
        assert run.end() == 0, run.output


def test_a_reader_goes_on_when_a_server_is_killed_and_sees_no_wrong_byte(tmp_path: Path) -> None:
    folder, end = tmp_path / "run", tmp_path / "end"
    with running(folder, SCRIPTS / "publishes.py", str(end), options=("-n", "1")) as run:
        check_job(run, end, folder, 1, [])


@pytest.mark.campaign
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_kills_of_readers_and_servers_make_no_wrong_byte_and_hold_up_no_worker(transport: str, tmp_path: Path) -> None:
    folder, end = tmp_path / "run", tmp_path / "end"
    reading = [sys.executable, str(SCRIPTS / "reads.py"), str(folder)]
    options = ("-n", "2", "-m", "1", "--transport", transport)
    with running(folder, SCRIPTS / "publishes.py", str(end), options=options) as run:
        check_job(run, end, folder, 10, reading)
    steps = steps_of(run)
    assert len(steps) == 2, run.output
    assert all(each.longest_s < MOST_S for each in steps), run.output

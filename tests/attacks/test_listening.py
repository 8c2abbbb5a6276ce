"""What listens, and where: while a job runs, nothing off the loopback interface; afterwards, nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from tests.jobs import job
from tests.tidy.tree import place, python_files

import paceline
from paceline.api.session import Session

PLACE = re.compile(r"(\S+):(\d+)\s+\S+:\*\s+users:\((.*)\)")
LOOPBACK = {"127.0.0.1", "[::1]"}
# Clocks that differ from machine to machine, and jump.
WALL_CLOCK = re.compile(r"\b(time\.(time|time_ns|localtime|gmtime)|datetime\.(now|utcnow|today))\(")


def listening() -> set[tuple[str, int]]:
    """Return (host, port) of all tcp sockets on which this process listens, as the system sees it."""
    said = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    found = [match for line in said.splitlines() if (match := PLACE.search(line))]
    return {(match[1], int(match[2])) for match in found if f"pid={os.getpid()}," in match[3]}


@pytest.mark.skipif(shutil.which("ss") is None, reason="the program ss is not installed")
@pytest.mark.parametrize("carrier", ["tcp", "shm"])
def test_a_job_listens_on_the_loopback_interface_alone(carrier: str, tmp_path: Path) -> None:
    before = listening()
    meeting = threading.Barrier(2)
    seen: list[set[tuple[str, int]]] = []

    def work(worker: Session) -> None:
        table = worker.table("w", shape=(4,), update=paceline.update.Add())
        table.push(torch.ones(4))
        paceline.all_reduce(torch.ones(4))  # over connections among the workers
        meeting.wait(120)
        if worker.rank == 0:
            seen.append(listening() - before)
        meeting.wait(120)

    with job(tmp_path, workers=2, servers=2, carrier=carrier) as started:
        started.run(work)
        servers = {int(address.rpartition(":")[2]) for address in started.spec.addresses if carrier == "tcp"}
    places = seen[0]
    assert {host for host, _ in places} <= LOOPBACK
    assert {port for _, port in places} >= servers
    assert len(places) <= len(servers) + 2, "one more for each worker, where torch meets"
    assert listening() == before


def test_no_code_looks_at_a_clock_that_another_machine_may_have_set_otherwise() -> None:
    """But for certificates, whose times are told by such clocks, for what is written for people, and for publishers.

    One that takes the place of another shares nothing with it but readers, who say where a clock is behind.
    """
    keys = {f"job/credentials/{name}.py" for name in ("certificates", "key_store", "command")}
    told = keys | {"transport/peer_identity.py", "launch/supervise.py", "launch/guard.py", "observe/progress.py"}
    told |= {"snapshots/command.py", "snapshots/folder.py", "observe/export/trackers.py", "worker/publishing.py"}
    found = {
        place(path, number): line.strip()
        for path in python_files("src")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if WALL_CLOCK.search(line) and not any(str(path).endswith(other) for other in told)
    }
    assert found == {}

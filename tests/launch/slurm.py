"""A Slurm of one node, of this test's own: no root, no munge, nothing outside of its folder."""

import getpass
import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo")
START_TIMEOUT_S = 30.0

CONFIG = """
ClusterName=paceline
SlurmctldHost=localhost
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0
NodeName=localhost NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES State=UP
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start it; gives the environment in which `srun` reaches it. Skips the test where it cannot be."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"Slurm is not installed: there is no {', '.join(missing)}")
    ports = _free_ports()
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(folder=folder, user=getpass.getuser(), controller_port=ports[0], node_port=ports[1])
    )
    (folder / "state").mkdir()
    environment = {**os.environ, "SLURM_CONF": str(config)}
    with ExitStack() as running:
        for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"]):
            running.enter_context(_running(command, environment, folder / f"{command[0]}.log"))
        _wait_idle(environment, folder)
        yield environment


@contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    with (
        log.open("wb") as out,
        subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_idle(environment: dict[str, str], folder: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True).stdout.strip() != b"idle":
        if time.monotonic() >= deadline_s:
            logs = [path.read_text()[-500:] for path in sorted(folder.glob("*.log"))]
            pytest.skip(f"Slurm does not start here within {START_TIMEOUT_S:g} s: {' '.join(logs)}")
        select.select([], [], [], 0.1)


def _free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as other:
        for taken in (one, other):
            taken.bind(("127.0.0.1", 0))
        return [taken.getsockname()[1] for taken in (one, other)]

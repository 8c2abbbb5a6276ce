"""A run that listens for `paceline join`, in the process of a test: its folder, and what a supervisor would see."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.leaks import nothing_left_behind

from paceline.job.addresses import CLUSTER_NAME, SPEC_NAME
from paceline.job.credentials.holders import Holder, TokenFiles, tls_settings
from paceline.job.environment import Place
from paceline.job.machines import Machine
from paceline.job.spec import ClusterSpec, write_token
from paceline.launch.child import Launch
from paceline.launch.joining.admission import Joiner, JoinListener
from paceline.launch.joining.connection import find_run_address
from paceline.launch.joining.messages import JOB, LIMITS, JoinRequest
from paceline.launch.rendezvous.liveness_lock import VERSION, ProcessInfo
from paceline.transport.tcp import TcpTransport

WAIT_S = 60.0
PROGRAM = "a" * 64
ELSEWHERE = ProcessInfo(Machine("elsewhere"), VERSION)


def request(num: int = 1, process: ProcessInfo = ELSEWHERE, program: str = PROGRAM) -> JoinRequest:
    return JoinRequest(num, process, 4242, program)


def launches(*ranks: int) -> list[Launch]:
    return [
        Launch(
            role="worker",
            name=f"worker {rank}",
            rank=rank,
            command=(),
            environment={},
            place=Place(Path("cluster.json"), rank, rank, incarnation=1),
        )
        for rank in ranks
    ]


@dataclass
class Host:
    """The run: `told` is what its launcher would announce."""

    run_dir: Path
    told: list[str] = field(default_factory=list)
    _news: threading.Event = field(default_factory=threading.Event)
    admission: JoinListener = field(init=False)

    def wake(self) -> None:
        self._news.set()

    def wait_requests(self, num: int = 1) -> list[Joiner]:
        found: list[Joiner] = []
        while len(found) < num:
            assert self._news.wait(WAIT_S), f"{len(found)} of {num} requests have come"
            self._news.clear()
            found += self.admission.requested()
        return found

    def wait_exit(self, joiner: Joiner, rank: int) -> int:
        while (code := joiner.exit_code(rank)) is None:
            assert self._news.wait(WAIT_S), f"no end of worker {rank}"
            self._news.clear()
        return code


def make_run(run_dir: Path, *, num_at_start: int = 1, encrypted: bool = False, snapshots: str = "") -> ClusterSpec:
    run_dir.mkdir(mode=0o700)
    spec = ClusterSpec(
        job="a",
        num_workers=4,
        num_at_start=num_at_start,
        num_servers=1,
        transport="tcp",
        run_dir=str(run_dir),
        encrypted=encrypted,
        snapshots=snapshots,
    )
    spec.write(run_dir / SPEC_NAME)
    spec.write(run_dir / CLUSTER_NAME)
    return spec


@contextmanager
def hosting(run_dir: Path, keys: Path | None = None, snapshots: str = "") -> Iterator[Host]:
    """Listen as a run does; afterwards nothing is left."""
    spec = make_run(run_dir, encrypted=keys is not None, snapshots=snapshots)
    if keys is None:
        write_token(run_dir)
    host = Host(run_dir)
    with nothing_left_behind():
        tls = None if keys is None else tls_settings(keys, Holder("server", 0))
        transport = TcpTransport(TokenFiles(keys or run_dir, JOB), LIMITS, tls=tls)
        listener = transport.listen("127.0.0.1:0")
        with JoinListener(listener, spec, PROGRAM, host.wake, host.told.append) as host.admission:
            yield host


def address_of(host: Host) -> str:
    return host.admission.address.removeprefix("tcp://")


__all__ = ["WAIT_S", "Host", "address_of", "find_run_address", "hosting", "launches", "make_run", "request"]

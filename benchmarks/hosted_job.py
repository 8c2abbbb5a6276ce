"""A job whose servers and workers run on hosts of a shaped network, each where it is told to."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from msgspec.structs import replace

from paceline.job.addresses import CLUSTER_NAME, SPEC_NAME, AddressBook
from paceline.job.environment import NUM_THREADS, Place
from paceline.job.spec import ClusterSpec, write_token

if TYPE_CHECKING:
    from shaped_network import ShapedNetwork

_SERVER: Final = Path(__file__).resolve().parent / "host_server.py"
_END_S: Final = 30.0
_POLL_S: Final = 0.01


class JobFailedError(Exception):
    """A process of the job has failed, or it did not come as far as it should in time."""


def hosted_spec(num_workers: int, num_servers: int, shares: tuple[float, ...] = ()) -> ClusterSpec:
    """Return the spec of a job over TCP; its folder comes with `HostedJob`."""
    return ClusterSpec(
        job=secrets.token_hex(8),
        num_workers=num_workers,
        num_servers=num_servers,
        transport="tcp",
        run_dir="",
        shares=shares,
    )


@dataclass(slots=True)
class HostedJob:
    """The processes of a job; a context manager that starts them and leaves nothing behind, whatever happens.

    Args:
        server_hosts: the host of each server, by rank; likewise `worker_hosts`.
        command: what every worker runs; "{folder}" in it becomes the folder of the job.
        start_s: how long servers may take to listen.
    """

    network: ShapedNetwork
    spec: ClusterSpec
    server_hosts: Sequence[int]
    worker_hosts: Sequence[int]
    command: Sequence[str]
    start_s: float = 60.0
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    _exit: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        """Start all processes; raises JobFailedError when the servers do not listen in time."""
        folder = self._exit.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
        self.spec = replace(self.spec, run_dir=folder)
        write_token(self.folder)
        self.spec.write(self.folder / SPEC_NAME)
        (self.folder / "trace").mkdir()
        self._exit.callback(self._end)
        try:
            self._start()
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End all processes and remove the folder."""
        self._exit.close()

    @property
    def folder(self) -> Path:
        """The folder of the job, while it runs."""
        return Path(self.spec.run_dir)

    def running(self) -> bool:
        """Say whether a worker still runs; raises JobFailedError when a process has failed."""
        codes = [process.poll() for process in self.workers]
        if any(codes) or any(server.poll() is not None for server in self.servers):
            raise JobFailedError(f"workers ended with {codes}, servers with {[s.poll() for s in self.servers]}")
        return None in codes

    def wait(self, timeout_s: float) -> None:
        """Block until all workers have ended well; raises JobFailedError when they do not in time, or fail."""
        deadline = time.monotonic() + timeout_s
        while self.running():
            if time.monotonic() > deadline:
                raise JobFailedError(f"the workers have not ended within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def _start(self) -> None:
        environment = os.environ | {NUM_THREADS: "1"}
        for rank, host in enumerate(self.server_hosts):
            what = (sys.executable, str(_SERVER), str(self.folder / SPEC_NAME), str(rank), self.network.address(host))
            command = self.network.command(host, *what)
            self.servers.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment))
        book, deadline = AddressBook(self.spec), time.monotonic() + self.start_s
        while not book.poll():
            if time.monotonic() > deadline or any(server.poll() is not None for server in self.servers):
                raise JobFailedError(f"servers {book.missing()} do not listen")
            time.sleep(_POLL_S)
        arguments = [argument.replace("{folder}", self.spec.run_dir) for argument in self.command]
        for rank, host in enumerate(self.worker_hosts):
            place = Place(self.folder / CLUSTER_NAME, rank, rank).as_environment()
            command = self.network.command(host, *arguments)
            self.workers.append(subprocess.Popen(command, env=environment | place))

    def stop_servers(self) -> None:
        """Have the servers end, so that all of their traces is written. Idempotent."""
        for server in self.servers:
            server.stdin.close()  # pyright: ignore[reportOptionalMemberAccess] - it has one
        for server in self.servers:
            try:
                server.wait(_END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    def _end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.stop_servers()

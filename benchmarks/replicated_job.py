"""A job on hosts of its own, each with a worker, a server, and the replica of another host's server."""

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
from shaped_network import Line, ShapedNetwork

from paceline.job.views import FIRST, View, Views
from paceline.launch.rendezvous.node_places import ask_for_handover

NUM_HOSTS: Final = 2
SIDECAR: Final = "paceline.launch.rendezvous.sidecar"


class JobFailedError(Exception):
    """A worker has failed, or did not come as far as it should in time."""


@dataclass(slots=True)
class ReplicatedJob:
    """The workers of a job that runs, by host, and the lines that all have written.

    Args:
        runs: a folder, in which the folder of the job comes to be.
    """

    workers: list["subprocess.Popen[str]"]
    runs: Path
    lines: list[str] = field(default_factory=list[str])
    _news: threading.Condition = field(default_factory=threading.Condition)

    def read(self, worker: "subprocess.Popen[str]") -> None:
        """Keep the lines that a worker writes; returns when it has ended."""
        assert worker.stdout is not None
        for line in worker.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()

    def wait_for(self, line: str, timeout_s: float) -> None:
        """Block until a worker has written this line; raises JobFailedError if the first one ends before."""
        first = self.workers[0]
        with self._news:
            came = self._news.wait_for(
                lambda: any(each.endswith(line) for each in self.lines) or first.poll() is not None, timeout_s
            )
        if not came or first.poll() is not None:
            raise JobFailedError(f"no {line.strip()!r} came:\n{self.tail()}")

    def end(self, timeout_s: float) -> None:
        """Block until all workers have ended; raises JobFailedError if one has failed."""
        codes = [worker.wait(timeout_s) for worker in self.workers]
        if any(codes):
            raise JobFailedError(f"the workers ended with codes {codes}:\n{self.tail()}")

    def tail(self) -> str:
        """Return the last lines."""
        return "".join(self.lines[-30:])

    def processes(self) -> dict[tuple[int, int], psutil.Process]:
        """Return the processes of servers that run, by the rank of the server and the number of its process."""
        found: dict[tuple[int, int], psutil.Process] = {}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if SIDECAR in words and words[-4].startswith(str(self.runs)):
                found[int(words[-3]), int(words[-1])] = process
        return found

    def num_changes(self) -> int:
        """Return how often another process was made a server or a replica, of all servers together."""
        return sum(self._view(rank).number - FIRST.number for rank in range(len(self.workers)))

    def hand_over(self, rank: int) -> None:
        """Have the replica of a server serve in its place, as for a machine that has come back; does not block."""
        ask_for_handover(self._folder, rank, self._view(rank))

    @property
    def _folder(self) -> Path:
        [folder] = [path for path in self.runs.iterdir() if path.is_dir()]
        return folder

    def _view(self, rank: int) -> View:
        return Views(self._folder, rank).newest() or FIRST


@contextmanager
def replicated(servers: str, command: Sequence[str], network: str, port: int) -> Iterator[ReplicatedJob]:
    """Run the command as the worker of each host; ends what still runs when it is left.

    `servers` is PACELINE_SERVERS, `network` the first three numbers of the hosts' addresses. Raises CannotShapeError
    where there can be no hosts.
    """
    with (
        tempfile.TemporaryDirectory(prefix="paceline-runs-") as runs,
        ShapedNetwork([Line()] * NUM_HOSTS, network=network) as hosts,
    ):
        environment = os.environ | {
            "MASTER_ADDR": hosts.address(0),
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(NUM_HOSTS),
            "PACELINE_RUN_DIR": runs,
            "PACELINE_SERVERS": servers,
        }
        workers = [
            subprocess.Popen(
                hosts.command(host, *command),
                env=environment | {"RANK": str(host)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in range(NUM_HOSTS)
        ]
        job = ReplicatedJob(workers, Path(runs))
        readers = [threading.Thread(target=job.read, args=(worker,), daemon=True) for worker in workers]
        for reader in readers:
            reader.start()
        try:
            yield job
        finally:
            for worker in workers:
                worker.kill()
            for reader in readers:
                reader.join()

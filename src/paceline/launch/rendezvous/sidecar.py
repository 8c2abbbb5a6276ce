"""Sidecar servers: servers that a worker starts in a job without a supervisor; they end when all workers have.

`python -m paceline.launch.rendezvous.sidecar RUN_DIR RANK HOST PROCESS` is one beside a worker, or the replica of
another node's (PROCESS 1). It ends with that worker, too:
its standard input is a pipe that the worker holds open.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final, final

from paceline.errors import PeerError
from paceline.job.addresses import SPEC_NAME, record_server_ended
from paceline.job.environment import inherited, with_import_path
from paceline.job.spec import ClusterSpec
from paceline.job.views import FIRST, Views
from paceline.launch.entry import run_program
from paceline.launch.policy import describe_exit
from paceline.launch.rendezvous.liveness_lock import wait_worker_ended
from paceline.launch.rendezvous.roster import wait_complete
from paceline.launch.replicas import ServerPlace
from paceline.launch.signals import ignore_preemption_signals
from paceline.notices import tell
from paceline.server.node import ServerNode

ENTRY: Final = "paceline.launch.rendezvous.sidecar"


@final
class SidecarServers:
    """Server processes, children of this one, that end with it."""

    def __init__(self, run_dir: Path, ranks: range, host: str, replicas: range = range(0)) -> None:
        """Start them, and `replicas` of others; where they listen by TCP, at an address of this machine, `host`."""
        # What lies beside the script, an update rule of the user's own for example, is there for a server too.
        self._environment = with_import_path(inherited(), Path(sys.path[0]).absolute())
        self._run_dir, self._host = run_dir, host
        self._is_ending = False
        self._lock = threading.Lock()  # of what runs, and of whether it is to end
        self._processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        places = [(rank, FIRST.head) for rank in ranks] + [(rank, FIRST.replica) for rank in replicas]
        for place in places:
            self._start(*place)
        self._watches = [
            threading.Thread(target=self._watch, args=place, name=f"paceline-server-{place[0]}", daemon=True)
            for place in places
        ]
        for watch in self._watches:
            watch.start()

    def _start(self, rank: int, process: int) -> None:
        """Start a process of a server, unless all are to end."""
        with self._lock:
            if not self._is_ending:
                self._processes[rank, process] = subprocess.Popen(
                    [sys.executable, "-m", ENTRY, str(self._run_dir), str(rank), self._host, str(process)],
                    stdin=subprocess.PIPE,
                    env=self._environment,
                    start_new_session=True,
                )

    def _watch(self, rank: int, process: int) -> None:
        """Tell the workers at once how a server has ended; have a replica made in the place of a process that has."""
        views, life = Views(self._run_dir, rank), process
        place = ServerPlace(views, process)
        while True:
            child = self._processes.get((rank, life))
            code = 0 if child is None else child.wait()
            if not code or self._is_ending:
                return
            record_server_ended(self._run_dir, rank, describe_exit(code), life)
            if views.how_ended():
                tell(f"server {rank} {describe_exit(code)}; the run ends")
                return
            tell(f"a process of server {rank} {describe_exit(code)}; the run goes on with another")
            successor = place.next_process(code)
            if successor is None:
                return
            life = successor
            self._start(rank, life)

    @property
    def pids(self) -> list[int]:
        """Their numbers, without those that have ended; each leads a process group."""
        return [process.pid for process in self._running() if process.poll() is None]

    def _running(self) -> list[subprocess.Popen[bytes]]:
        with self._lock:
            return list(self._processes.values())

    def check(self) -> None:
        """Raise PeerError when one of them has ended."""
        with self._lock:
            processes = dict(self._processes)
        for (rank, _), process in processes.items():
            code = process.poll()
            if code is not None:
                raise PeerError(f"server {rank} {describe_exit(code)} before the job began; look at what it wrote")

    def wait(self, timeout_s: float) -> None:
        """Block until they have ended by themselves, at most so long."""
        deadline_s = time.monotonic() + timeout_s
        for process in self._running():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def kill(self) -> None:
        """End those that still run, at once."""
        with self._lock:
            self._is_ending = True
        for process in self._running():
            process.kill()
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        for watch in self._watches:
            watch.join()


EXIT_FAILURE: Final = 1


def serve_until_workers_end(spec: ClusterSpec, rank: int, host: str, process: int = FIRST.head) -> None:
    """Serve one shard of the job; blocks until all workers have left or died.

    By TCP it listens at `host`, an address of this machine. `process`: which one it is of those of its server.
    Ends the process with an error when not all have come in time.
    """
    # Deferred: workers import this module, and the fork server then runs that one as a program.
    from paceline.launch.server import serve

    ignore_preemption_signals()
    serve(spec, rank, lambda node: _follow_workers(spec, rank, node), host, process=process)


def _follow_workers(spec: ClusterSpec, rank: int, node: ServerNode) -> None:
    try:
        wait_complete(spec, lambda: None, spec.join_timeout_s)
    except PeerError as error:
        tell(f"server {rank}: {error}")
        os._exit(EXIT_FAILURE)
    workers = range(spec.num_workers)
    watches = [threading.Thread(target=_watch, args=(spec, node, worker), daemon=True) for worker in workers]
    for watch in watches:
        watch.start()
    for watch in watches:
        watch.join()
    node.stop()


def _watch(spec: ClusterSpec, node: ServerNode, worker: int) -> None:
    if wait_worker_ended(spec, worker):  # else the server itself will have missed it, or it goes on
        node.report_death(worker, 0, "its process ended")


def _end_with_parent() -> None:
    """Block until standard input ends, and then end this process at once."""
    # Unbuffered: a process whose other threads have failed could not end while this one holds a buffer's lock.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as parent:
        parent.read(1)
    os._exit(EXIT_FAILURE)


def main() -> None:
    """Serve as the command line says."""
    threading.Thread(target=_end_with_parent, name="paceline-parent", daemon=True).start()
    run_dir, rank, host, process = sys.argv[1:]
    run_program(
        lambda: serve_until_workers_end(ClusterSpec.read(Path(run_dir) / SPEC_NAME), int(rank), host, int(process))
    )


if __name__ == "__main__":
    main()

"""Sidecar servers: servers that a worker starts in a job without a supervisor; they end when all workers have.

`python -m paceline.launch.rendezvous.sidecar RUN_DIR RANK HOST` is one beside a worker. It ends with that worker, too:
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
from paceline.job.carriers import tell_user
from paceline.job.environment import inherited, with_import_path
from paceline.job.spec import ClusterSpec
from paceline.launch.entry import run_program
from paceline.launch.policy import describe_exit
from paceline.launch.rendezvous.liveness_lock import wait_worker_ended
from paceline.launch.rendezvous.roster import wait_complete
from paceline.launch.signals import ignore_preemption_signals
from paceline.server.node import ServerNode

ENTRY: Final = "paceline.launch.rendezvous.sidecar"


@final
class SidecarServers:
    """Server processes, children of this one, that end with it."""

    def __init__(self, run_dir: Path, ranks: range, host: str) -> None:
        """Start them; where they listen by TCP, at an address of this machine, `host`."""
        # What lies beside the script, an update rule of the user's own for example, is there for a server too.
        environment = with_import_path(inherited(), Path(sys.path[0]).absolute())
        self._processes = {
            rank: subprocess.Popen(
                [sys.executable, "-m", ENTRY, str(run_dir), str(rank), host],
                stdin=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
            for rank in ranks
        }
        self._run_dir = run_dir
        self._is_ending = False
        self._watches = [
            threading.Thread(target=self._watch, args=(rank,), name=f"paceline-server-{rank}", daemon=True)
            for rank in ranks
        ]
        for watch in self._watches:
            watch.start()

    def _watch(self, rank: int) -> None:
        """Let the workers know at once, and not once they have tried to connect again, how a server has ended."""
        code = self._processes[rank].wait()
        if code and not self._is_ending:
            tell_user(f"server {rank} {describe_exit(code)}; the run ends")
            record_server_ended(self._run_dir, rank, describe_exit(code))

    @property
    def pids(self) -> list[int]:
        """Their numbers; each leads a process group."""
        return [process.pid for process in self._processes.values()]

    def check(self) -> None:
        """Raise PeerError when one of them has ended."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                raise PeerError(f"server {rank} {describe_exit(code)} before the job began; look at what it wrote")

    def wait(self, timeout_s: float) -> None:
        """Block until they have ended by themselves, at most so long."""
        deadline_s = time.monotonic() + timeout_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def kill(self) -> None:
        """End those that still run, at once."""
        self._is_ending = True
        for process in self._processes.values():
            process.kill()
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        for watch in self._watches:
            watch.join()


EXIT_FAILURE: Final = 1


def serve_until_workers_end(spec: ClusterSpec, rank: int, host: str) -> None:
    """Serve one shard of the job; blocks until all workers have left or died.

    By TCP it listens at `host`, an address of this machine.
    Ends the process with an error when not all have come in time.
    """
    # Deferred: workers import this module, and the fork server then runs that one as a program.
    from paceline.launch.server import serve

    ignore_preemption_signals()
    serve(spec, rank, lambda node: _follow_workers(spec, rank, node), host)


def _follow_workers(spec: ClusterSpec, rank: int, node: ServerNode) -> None:
    try:
        wait_complete(spec, lambda: None, spec.join_timeout_s)
    except PeerError as error:
        tell_user(f"server {rank}: {error}")
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
    run_program(
        lambda: serve_until_workers_end(ClusterSpec.read(Path(sys.argv[1]) / SPEC_NAME), int(sys.argv[2]), sys.argv[3])
    )


if __name__ == "__main__":
    main()

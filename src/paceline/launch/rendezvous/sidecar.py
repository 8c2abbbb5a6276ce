"""Sidecar servers: servers that a worker starts in a job without a supervisor; they end when all workers have.

`python -m paceline.launch.rendezvous.sidecar RUN_DIR RANK HOST PROCESS` is one beside a worker, or the replica of
another node's (PROCESS 1). It ends with that worker, too: its standard input is a pipe that the worker holds open.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, final

from paceline.errors import EXIT_FAILURE, EXIT_PREEMPTED, PeerError
from paceline.job.addresses import SPEC_NAME, record_server_ended
from paceline.job.environment import inherited, with_import_path
from paceline.job.spec import ClusterSpec
from paceline.job.views import FIRST, Views
from paceline.launch.crash_policy import describe_exit
from paceline.launch.entry import run_program
from paceline.launch.folder_watch import LOOK_S, looks
from paceline.launch.rendezvous.liveness_lock import newest_life, wait_worker_ended
from paceline.launch.rendezvous.node_places import NodePlaces
from paceline.launch.rendezvous.roster import wait_complete
from paceline.launch.replicas import ServerPlace
from paceline.launch.signals import ignore_preemption_signals
from paceline.notices import NEWS, tell
from paceline.server.node import ServerNode
from paceline.server.replica_place import HandedOver

ENTRY: Final = "paceline.launch.rendezvous.sidecar"
_END_TIMEOUT_S: Final = 5.0  # a file server that does not answer does not keep this process from ending


@final
class SidecarServers:
    """Server processes, children of this one, that end with it."""

    def __init__(
        self,
        run_dir: Path,
        ranks: range,
        host: str,
        replicas: range = range(0),
        node: NodePlaces | None = None,
        imports: Path | None = None,
    ) -> None:
        """Start them, and `replicas` of others. By TCP they listen at `host`, an address of this machine.

        `node`: what other nodes know of the places here, where servers have replicas; closed with this.
        `imports`: where an update rule of the user's own, for example, is found; by default beside the script.
        """
        self._environment = with_import_path(inherited(), imports or Path(sys.path[0]).absolute())
        self._run_dir, self._host = run_dir, host
        self._node = node
        self._ending = threading.Event()
        self._lock = threading.Lock()  # of what runs, and of whether it is to end
        self._processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        self._watches: list[threading.Thread] = []
        first = [(rank, FIRST.head) for rank in ranks] + [(rank, FIRST.replica) for rank in replicas]
        for place in first:
            if self._may_start(*place):
                self._start(*place)
        for place in first:
            self._begin_watch(f"paceline-server-{place[0]}", self._watch, place)
        if node is not None:
            self._begin_watch("paceline-places", self._take_over, (node,))

    def _begin_watch(self, name: str, watch: Callable[..., None], arguments: tuple[object, ...]) -> None:
        thread = threading.Thread(target=watch, args=arguments, name=name, daemon=True)
        with self._lock:
            self._watches.append(thread)
        thread.start()

    def _may_start(self, rank: int, process: int) -> bool:
        """Return whether no other node has come to start a process of a server in the place that this node had."""
        return self._node is None or self._node.claim(rank, process)

    def _take_over(self, node: NodePlaces) -> None:
        """Start replicas of servers whose nodes are gone, and of those whose places come back to this node."""
        problem = "this machine cannot see which servers to take over from others"
        for taken in looks(node.take_over, self._ending, problem, LOOK_S):
            for rank, process in taken:
                try:
                    self._start(rank, process)
                except OSError as error:
                    tell(f"server {rank} stays without a replica, as this machine cannot start a process: {error}")
                    continue
                if node.has_brought_home(rank, process):
                    tell(f"this machine is the home of server {rank}, and has a replica of it", NEWS)
                else:
                    tell(
                        f"a machine with a process of server {rank} is gone, or leaves; this one has another, its "
                        "replica"
                    )
                self._begin_watch(f"paceline-server-{rank}", self._watch, (rank, process))

    def _start(self, rank: int, process: int) -> None:
        """Start a process of a server, unless all are to end."""
        with self._lock:
            if not self._ending.is_set():
                self._processes[rank, process] = subprocess.Popen(
                    [sys.executable, "-m", ENTRY, str(self._run_dir), str(rank), self._host, str(process)],
                    stdin=subprocess.PIPE,
                    env=self._environment,
                    start_new_session=True,
                )

    def _watch(self, rank: int, process: int) -> None:
        """Tell the workers at once how a server has ended; have a replica made in the place of a process that has."""
        try:
            self._follow(rank, process)
        except OSError as error:
            tell(f"a process of server {rank} has ended, and no other one comes here: {error}")

    def _follow(self, rank: int, process: int) -> None:
        views, life = Views(self._run_dir, rank), process
        place = ServerPlace(views, process)
        while True:
            child = self._processes.get((rank, life))
            code = 0 if child is None else child.wait()
            if not code or self._ending.is_set():
                return
            record_server_ended(self._run_dir, rank, describe_exit(code), life)
            if views.how_ended():
                tell(f"server {rank} {describe_exit(code)}; the run ends")
                return
            tell(f"a process of server {rank} {describe_exit(code)}; the run goes on with another")
            successor = place.next_process(code)
            if successor is None or not self._wait_may_start(rank, successor):
                return
            life = successor
            self._start(rank, life)

    def _wait_may_start(self, rank: int, process: int) -> bool:
        """Return as `_may_start`; block while that cannot be told, as on a full disk, until all are to end."""
        try:
            return self._may_start(rank, process)
        except OSError:
            problem = f"no other process of server {rank} comes here until the folder of the job can be written to"
            return next(looks(lambda: self._may_start(rank, process), self._ending, problem, LOOK_S), False)

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

    def leave(self, is_over: Callable[[], bool]) -> bool:
        """Have what runs here move to other nodes; return whether nothing is needed here any more.

        Blocks until it has moved or the job is over. Where servers have no replicas nothing moves.
        """
        if self._node is None:
            return False
        try:
            self._node.leave()
            while self._node.is_needed():
                if is_over():
                    return False
                self._ending.wait(LOOK_S)
        except OSError as error:
            tell(f"servers cannot move from here: {error}")
            return False
        return True

    def kill(self) -> None:
        """End those that still run, at once."""
        with self._lock:
            self._ending.set()
        for process in self._running():
            process.kill()
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        while self._watches:  # one that joins may have been begun by one before it
            self._watches.pop().join(_END_TIMEOUT_S)
        if self._node is not None:
            self._node.close()


def serve_until_workers_end(spec: ClusterSpec, rank: int, host: str, process: int = FIRST.head) -> None:
    """Serve one shard of the job; blocks until all workers have left or died.

    By TCP it listens at `host`, an address of this machine. `process`: which one it is of those of its server.
    Ends the process with an error when not all have come in time, and with code 143 once it has handed over.
    """
    # Deferred: workers import this module, and the fork server then runs that one as a program.
    from paceline.launch.server import serve

    ignore_preemption_signals()
    try:
        serve(spec, rank, lambda node: _follow_workers(spec, rank, node), host, process=process)
    except HandedOver as handed_over:
        tell(str(handed_over), NEWS)
        sys.exit(EXIT_PREEMPTED)


def _follow_workers(spec: ClusterSpec, rank: int, node: ServerNode) -> None:
    try:
        wait_complete(spec, lambda: None, spec.join_timeout_s)
    except PeerError as error:
        tell(f"server {rank}: {error}")
        os._exit(EXIT_FAILURE)
    WorkerWatch(spec, node.report_death).wait_all_ended()
    node.stop()


@final
class WorkerWatch:
    """Tells which workers have ended, and waits until none takes part; one that has died may come again."""

    def __init__(self, spec: ClusterSpec, report_death: Callable[[int, int, str], None]) -> None:
        """Of a job that is complete; `report_death` is called with a worker, its incarnation, and what has happened."""
        self._spec = spec
        self._report_death = report_death
        self._newest = [partial(newest_life, Path(spec.run_dir), "worker", rank) for rank in range(spec.num_workers)]
        self._lock = threading.Lock()  # of what follows
        self._ended: dict[int, int] = {}  # the latest life of each worker that takes part no longer
        self._all_have_ended = threading.Event()

    def wait_all_ended(self) -> None:
        """Block until no worker takes part."""
        workers = range(self._spec.num_workers)
        watches = [threading.Thread(target=self._follow, args=(worker,), daemon=True) for worker in workers]
        for watch in watches:
            watch.start()
        self._all_have_ended.wait()
        for watch in watches:
            watch.join(_END_TIMEOUT_S)

    def _follow(self, worker: int) -> None:
        """Wait for the end of each life of a worker, until none of all workers is left."""
        life = self._wait_ended(worker, max(0, self._newest[worker]()))
        problem = f"this server cannot see whether worker {worker} comes again"
        for latest in looks(self._newest[worker], self._all_have_ended, problem, LOOK_S):
            if latest > life:
                with self._lock:
                    del self._ended[worker]
                life = self._wait_ended(worker, latest)
            else:
                self._look_whether_all_have_ended()

    def _wait_ended(self, worker: int, life: int) -> int:
        """Block until this life has ended, and return it."""
        if wait_worker_ended(self._spec, worker, life):  # else the server itself will have missed it, or it goes on
            self._report_death(worker, life, "its process ended")
        with self._lock:
            self._ended[worker] = life
        with suppress(OSError):  # then it is looked for again
            self._look_whether_all_have_ended()
        return life

    def _look_whether_all_have_ended(self) -> None:
        """Note that no worker is left, also none that has come again and was not seen yet. Raises OSError."""
        with self._lock:
            ended = dict(self._ended)
        if len(ended) == len(self._newest) and all(self._newest[rank]() <= life for rank, life in ended.items()):
            self._all_have_ended.set()


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

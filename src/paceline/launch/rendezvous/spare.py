"""`paceline spare`: a machine more for the servers of a job that torchrun, srun or mpirun has started with replicas.

It stands by for machines that are lost, or has servers move to it.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from paceline.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, UsageError
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.environment import start_timeout_s
from paceline.job.folders import INTERVAL_SHARED_S, check_folder, names_in, wait_for
from paceline.job.machines import this_machine
from paceline.job.spec import TOKEN_NAME, ClusterSpec
from paceline.launch.rendezvous.join import listening_host
from paceline.launch.rendezvous.liveness_lock import indices_in, newest_life, process_info, takes_part, wait_all_ended
from paceline.launch.rendezvous.node_places import ROLE, NodePlaces
from paceline.launch.rendezvous.roster import START_TIMEOUT_S
from paceline.launch.rendezvous.sidecar import SidecarServers
from paceline.launch.signals import at_first_signal
from paceline.notices import NEWS, tell

_OVER: Final = 0  # is the number of no signal


def spare(job: Path, /, *, servers: int = 0) -> int:
    """Run servers of a job on this machine: some that move, or those of a machine that is lost or leaves.

    For jobs of torchrun, srun or mpirun whose servers have replicas (PACELINE_SERVERS=node:1+replicas:1). No worker
    runs here. If the script has update rules of its own, start this in the folder of the script. Blocks until the job
    is over; on SIGTERM and Ctrl-C the servers here first move to other machines.

    Parameters
    ----------
    job
        The folder of the job, or the one that PACELINE_RUN_DIR names if it has one job. One that has not begun is
        waited for, as processes of a job wait for each other.
    servers
        How many servers move here, half a minute after it has come, from the machines that have most; they move back
        once this one leaves.
    """
    if servers < 0:
        raise UsageError(f"--servers is {servers}, expected how many servers are to move here, or 0 for a spare")
    run_dir = find_job(job, start_timeout_s(START_TIMEOUT_S))
    spec = ClusterSpec.read(run_dir / CLUSTER_NAME)
    if spec.launcher_decides:
        raise UsageError(f"the job in {run_dir} is of Ray, which finds another node for servers by itself")
    if not spec.has_replicas:
        raise UsageError(
            f"the servers of the job in {run_dir} have no replicas, and do not move to another machine: start the job "
            "with PACELINE_SERVERS=node:1+replicas:1"
        )
    if servers > spec.num_servers:
        raise UsageError(f"--servers is {servers}, and the job in {run_dir} has {spec.num_servers}")
    first = process_info(run_dir, "worker", 0)
    refusal = first.refusal("the first process of the job")
    if refusal is not None:
        raise UsageError(refusal)
    _require_other_machine(run_dir)
    host = listening_host(spec, first.machine)
    ending = SimpleQueue[int]()  # a handler of signals may put there while this thread is in `get`
    with at_first_signal(ending.put), closing(NodePlaces(run_dir, None, spec.num_servers)) as node:
        here = _wait_home(node, servers, run_dir) if servers else []
        sidecars = SidecarServers(run_dir, range(0), host, node=node, imports=Path.cwd())
        moving = ", ".join(map(str, here))
        task = f"to which servers move: {moving}" if here else "a spare for those that are lost"
        tell(f"this machine is node {node.node} of the job in {run_dir}, {task}", NEWS)
        try:
            return _stay(spec, sidecars, ending)
        finally:
            sidecars.kill()


def _wait_home(node: NodePlaces, num_servers: int, run_dir: Path) -> list[int]:
    """Make a node the home of so many servers, once they have begun; return which. Raises DeadlineExceeded."""
    timeout_s = start_timeout_s(START_TIMEOUT_S)
    return wait_for(
        lambda: node.make_home(num_servers),
        timeout_s,
        lambda: f"not all servers of the job in {run_dir} have begun within {timeout_s:g} s",
        INTERVAL_SHARED_S,
    )


def find_job(folder: Path, timeout_s: float) -> Path:
    """Return the folder of a job that has begun: this one, or the only one in it; blocks until there is one.

    Raises:
        UsageError: there are several, or the folder cannot be used.
        DeadlineExceeded: none has begun in time.
    """
    if _only_job(folder) is None:
        tell(f"no job has begun in {folder} yet: it is waited for, {timeout_s:g} s", NEWS)
    return wait_for(
        lambda: _only_job(folder),
        timeout_s,
        lambda: (
            f"no job has begun in {folder} within {timeout_s:g} s, or it has ended: name the folder of one that runs, "
            "on a file system that its machines share"
        ),
        INTERVAL_SHARED_S,
    )


def _only_job(folder: Path) -> Path | None:
    """Return the folder of the job that has begun in this one, or is this one; None where none has."""
    try:
        found = [path for path in (folder, *sorted(folder.iterdir())) if _has_begun(path)]
    except OSError as error:
        raise UsageError(f"cannot look into {folder}: {error.strerror}") from error
    if len(found) > 1:
        raise UsageError(f"several jobs run in {folder}: {', '.join(map(str, found))}; name the folder of one of them")
    if found:
        check_folder(found[0])
    return found[0] if found else None


def _require_other_machine(run_dir: Path) -> None:
    """Raise UsageError where this machine has a node of the job: both processes of a server would go with it."""
    for node in sorted(indices_in(run_dir, ROLE)):
        life = newest_life(run_dir, ROLE, node)
        if takes_part(run_dir, ROLE, node) and process_info(run_dir, ROLE, node, life).machine == this_machine():
            raise UsageError(
                f"{this_machine()} is node {node} of the job in {run_dir} already, and would take both processes of a "
                "server along: start the spare on another machine"
            )


def _has_begun(path: Path) -> bool:
    """Return whether this is the folder of a job that has begun and not ended; of other users, what they let see."""
    return path.is_dir() and os.access(path, os.R_OK | os.X_OK) and {TOKEN_NAME, CLUSTER_NAME} <= names_in(path)


def _stay(spec: ClusterSpec, servers: SidecarServers, ending: SimpleQueue[int]) -> int:
    """Block until the job is over, or what serves here has moved after a signal; return the exit code.

    `ending`: gets the number of the first signal.
    """
    is_over = threading.Event()

    def wait_over() -> None:
        wait_all_ended(spec)
        is_over.set()
        ending.put(_OVER)

    threading.Thread(target=wait_over, name="paceline-job", daemon=True).start()
    first = ending.get()
    if first == _OVER:
        servers.wait(spec.grace_s)
        tell(f"the job in {spec.run_dir} is over", NEWS)
        return 0
    tell("this machine leaves, once its servers have moved to others; a second signal ends it at once", NEWS)
    servers.leave(is_over.is_set)
    return EXIT_INTERRUPTED if first == signal.SIGINT else EXIT_PREEMPTED

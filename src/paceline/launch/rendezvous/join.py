"""Joins a job under a launcher that does not know Paceline: torchrun, srun or mpirun.

One process, the founder, makes a folder, as `paceline run` does, and tells the others where. From then on the job is
like one of `paceline run`, but without a supervisor: each worker holds a lock while it takes part, servers end when the
last lock is released, and a process whose servers or folder others need stays until then.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

from paceline.job.addresses import CLUSTER_NAME
from paceline.job.environment import Place, asked_servers, inherited
from paceline.job.spec import ClusterSpec
from paceline.launch.rendezvous.bootstrap import BootstrapResult, bootstrap_process
from paceline.launch.rendezvous.detect import detect
from paceline.launch.rendezvous.exit_wait import announcing_wait, wait_all_ended
from paceline.launch.rendezvous.liveness_lock import LivenessLock
from paceline.launch.rendezvous.roles import Servers
from paceline.launch.rendezvous.roster import declare_complete, wait_complete
from paceline.launch.rendezvous.setup import listening_host
from paceline.launch.rendezvous.sidecar import SidecarServers
from paceline.launch.script_exit import leave_after_crash


@final
@dataclass(frozen=True, slots=True)
class JoinedJob:
    """A worker's part in a job that it has entered by itself, until it leaves."""

    place: Place
    spec: ClusterSpec
    liveness_lock: LivenessLock
    beside: SidecarServers
    hosts: bool  # others need what this process has: its servers, or the folder that it made
    undo: ExitStack

    def close(self, *, politely: bool) -> None:
        """Take part no longer. Politely: block for as long as others need what this process has."""
        with self.undo:
            self.liveness_lock.release()
            if politely and self.hosts:
                with announcing_wait(self.spec, self.place.rank):
                    wait_all_ended(self.spec)
                self.beside.wait(self.spec.grace_s)


def join_started_job(servers: str | None) -> JoinedJob | None:
    """Find the job that this process belongs to, and enter it as a worker; None when it belongs to none.

    Blocks until all processes of the job have come. A process that is a server does not return: it serves until the job
    is over, and raises SystemExit(0).

    Args:
        servers: "first:M", "node:M", "ranks:M", or "node:M+ranks:N"; by default what PACELINE_SERVERS says, else
            "first:1".

    Raises:
        UsageError: launcher and `servers` make no sense, or not together.
        DeadlineExceeded: not all have come in time; the message names who is missing.
    """
    asked = servers or asked_servers()
    if asked is not None:
        Servers.parse(asked)  # report a mistake even without a launcher
    detected = detect(inherited())
    if detected is None:
        return None
    with ExitStack() as undo:
        started = bootstrap_process(detected, asked, undo)
        liveness_lock = started.liveness_lock
        if liveness_lock is None:
            _schedule(started)
        elif started.assignment.role == "server":
            _serve(started, liveness_lock)
        else:
            return _work(started, liveness_lock, undo)
        sys.exit(0)


def _work(started: BootstrapResult, liveness_lock: LivenessLock, undo: ExitStack) -> JoinedJob:
    assignment, spec, run_dir = started.assignment, started.spec, Path(started.spec.run_dir)
    beside = SidecarServers(
        run_dir, assignment.beside, listening_host(spec, started.founder) if assignment.beside else ""
    )
    undo.callback(beside.kill)
    if started.guard is not None:
        for pid in beside.pids:
            started.guard.watch(pid)

    def meanwhile() -> None:
        beside.check()
        if assignment.founds:
            declare_complete(spec, started.roster)

    wait_complete(spec, meanwhile, started.timeout_s)
    leave_after_crash()
    local_rank = liveness_lock.index if started.local_rank is None else started.local_rank
    place = Place(run_dir / CLUSTER_NAME, liveness_lock.index, local_rank)
    return JoinedJob(place, spec, liveness_lock, beside, assignment.founds or bool(assignment.beside), undo.pop_all())


def _serve(started: BootstrapResult, liveness_lock: LivenessLock) -> None:
    # Deferred: the fork server imports this module, and then runs that one as a program.
    from paceline.launch.rendezvous.sidecar import serve_until_workers_end

    serve_until_workers_end(started.spec, liveness_lock.index, listening_host(started.spec, started.founder))


def _schedule(started: BootstrapResult) -> None:
    """Be there until the job is over."""
    wait_complete(started.spec, lambda: declare_complete(started.spec, started.roster), started.timeout_s)
    wait_all_ended(started.spec)

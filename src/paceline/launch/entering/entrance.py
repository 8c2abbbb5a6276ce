"""How a process enters a job that its launcher knows nothing of: a script under torchrun, srun or mpirun.

One process sets the job up: it makes a folder, as `paceline run` does, and tells the others where. From then on all is
as in a job of `paceline run`, but that nobody watches over it: each worker holds a lock while it takes part, servers
end when the last one is let go of, and whoever has what others need stays until then.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

from paceline.launch.addresses import CLUSTER_NAME
from paceline.launch.ending import leave_after_crash
from paceline.launch.entering.arrival import Arrival, arrive
from paceline.launch.entering.beside import Beside
from paceline.launch.entering.detect import detect
from paceline.launch.entering.founding import listening_host
from paceline.launch.entering.gathering import declare_complete, wait_complete
from paceline.launch.entering.parting import telling, wait_all_ended
from paceline.launch.entering.placement import Servers
from paceline.launch.entering.presence import Presence
from paceline.launch.environment import Place, asked_servers, inherited
from paceline.launch.spec import ClusterSpec


@final
@dataclass(frozen=True, slots=True)
class Stay:
    """A worker's part in a job that it has entered by itself, until it leaves."""

    place: Place
    spec: ClusterSpec
    presence: Presence
    beside: Beside
    hosts: bool  # others need what this process has: its servers, or the folder that it made
    undo: ExitStack

    def close(self, *, politely: bool) -> None:
        """Take part no longer. Politely: block for as long as others need what this process has."""
        with self.undo:
            self.presence.end()
            if politely and self.hosts:
                with telling(self.spec, self.place.rank):
                    wait_all_ended(self.spec)
                self.beside.wait(self.spec.grace_s)


def enter(servers: str | None) -> Stay | None:
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
        Servers.parse(asked)  # a mistake is told to whoever runs alone, too
    detected = detect(inherited())
    if detected is None:
        return None
    with ExitStack() as undo:
        arrival = arrive(detected, asked, undo)
        presence = arrival.presence
        if presence is None:
            _schedule(arrival)
        elif arrival.seat.role == "server":
            _serve(arrival, presence)
        else:
            return _work(arrival, presence, undo)
        sys.exit(0)


def _work(arrival: Arrival, presence: Presence, undo: ExitStack) -> Stay:
    seat, spec, run_dir = arrival.seat, arrival.spec, Path(arrival.spec.run_dir)
    beside = Beside(run_dir, seat.beside, listening_host(spec, arrival.founder) if seat.beside else "")
    undo.callback(beside.end)
    if arrival.guard is not None:
        for pid in beside.pids:
            arrival.guard.watch(pid)

    def meanwhile() -> None:
        beside.check()
        if seat.founds:
            declare_complete(spec, arrival.roll)

    wait_complete(spec, meanwhile, arrival.timeout_s)
    leave_after_crash()
    local_rank = presence.index if arrival.local_rank is None else arrival.local_rank
    place = Place(run_dir / CLUSTER_NAME, presence.index, local_rank)
    return Stay(place, spec, presence, beside, seat.founds or bool(seat.beside), undo.pop_all())


def _serve(arrival: Arrival, presence: Presence) -> None:
    # Here: the nursery imports us, and then runs servers as programs.
    from paceline.launch.entering.attendant import attend

    attend(arrival.spec, presence.index, listening_host(arrival.spec, arrival.founder))


def _schedule(arrival: Arrival) -> None:
    """Be there until the job is over."""
    wait_complete(arrival.spec, lambda: declare_complete(arrival.spec, arrival.roll), arrival.timeout_s)
    wait_all_ended(arrival.spec)

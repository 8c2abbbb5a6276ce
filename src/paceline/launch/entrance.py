"""How a process enters a job that its launcher knows nothing of: a script under torchrun, srun or mpirun.

One process sets the job up: it makes a folder, as `paceline run` does, and tells the others where. From then on all is
as in a job of `paceline run`, but that nobody watches over it: each worker holds a lock while it takes part, servers
end when the last one is let go of, and whoever has what others need stays until then.
"""

import secrets
import socket
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

from paceline.errors import UsageError
from paceline.launch.addresses import CLUSTER_NAME, SPEC_NAME
from paceline.launch.beside import Beside
from paceline.launch.detect import Detected, detect
from paceline.launch.ending import leave_after_crash
from paceline.launch.environment import Place, asked_folder, asked_servers, cache_folder, inherited
from paceline.launch.gathering import START_TIMEOUT_S, declare_complete, wait_complete
from paceline.launch.guard import Guard
from paceline.launch.local import GUARD_TIMEOUT_S, TRACE_NAME
from paceline.launch.meeting import Board, Invitation, check_folder, make_private, open_board
from paceline.launch.placement import Seat, Servers, take_seat
from paceline.launch.presence import Presence, wait_end
from paceline.launch.spec import ClusterSpec, write_token


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
                wait_all_ended(self.spec)
                self.beside.wait(self.spec.grace_s)


def enter(servers: str | None) -> Stay | None:
    """Find the job that this process belongs to, and enter it as a worker; None when it belongs to none.

    Blocks until all processes of the job have come. A process that is a server does not return: it serves until the job
    is over, and raises SystemExit(0).

    Args:
        servers: "first:M", "node:M" or "ranks:M"; by default what PACELINE_SERVERS says, else "first:1".

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
    seat = take_seat(detected, asked)
    with ExitStack() as undo:
        board = open_board(detected, asked_folder() or cache_folder())
        undo.callback(board.close)
        spec, guard = _found(seat, board, undo) if seat.founds else (_follow(board), None)
        if seat.role == "worker":
            return _work(seat, detected, spec, guard, undo)
        if seat.role == "server":
            _serve(seat, spec)
        else:
            _schedule(spec)
        sys.exit(0)


def wait_all_ended(spec: ClusterSpec) -> None:
    """Block until no worker takes part any longer."""
    for worker in range(spec.num_workers):
        wait_end(Path(spec.run_dir), "worker", worker)


def _found(seat: Seat, board: Board, undo: ExitStack) -> tuple[ClusterSpec, Guard]:
    """Set the job up, and tell the others where."""
    print(f"paceline: {seat.summary}", file=sys.stderr, flush=True)
    run_dir = _make_run_dir()
    guard = Guard(run_dir, temporary=asked_folder() is None)
    undo.callback(guard.dismiss, GUARD_TIMEOUT_S)
    spec = ClusterSpec(
        job=secrets.token_hex(8),
        num_workers=seat.num_workers,
        num_servers=seat.num_servers,
        transport="shm",
        run_dir=str(run_dir),
        join_timeout_s=2 * START_TIMEOUT_S,  # from the start of a server on: first all have to come
    )
    write_token(run_dir)
    spec.write(run_dir / SPEC_NAME)
    (run_dir / TRACE_NAME).mkdir()
    board.invite(Invitation(str(run_dir), socket.gethostname()))
    return spec, guard


def _make_run_dir() -> Path:
    folder = asked_folder()
    if folder is not None:
        make_private(folder)
    return Path(tempfile.mkdtemp(prefix="paceline-", dir=folder))  # short: sockets in it have 107 bytes for their paths


def _follow(board: Board) -> ClusterSpec:
    """Go where the process that set the job up says."""
    invitation = board.wait_invitation(START_TIMEOUT_S)
    here = socket.gethostname()
    if invitation.host != here:
        raise UsageError(
            f"this process runs on {here}, and the first of its job on {invitation.host}: what travels between "
            "machines must be encrypted, and jobs that torchrun, srun or mpirun starts have no certificates for that "
            "yet. Start all processes on one machine"
        )
    run_dir = Path(invitation.run_dir)
    check_folder(run_dir)
    return ClusterSpec.read(run_dir / SPEC_NAME)


def _work(seat: Seat, detected: Detected, spec: ClusterSpec, guard: Guard | None, undo: ExitStack) -> Stay:
    run_dir = Path(spec.run_dir)
    beside = Beside(run_dir, seat.beside)
    undo.callback(beside.end)
    if guard is not None:
        for pid in beside.pids:
            guard.watch(pid)
    presence = Presence.begin(run_dir, "worker", seat.index, seat.num_workers)
    undo.callback(presence.end)

    def meanwhile() -> None:
        beside.check()
        if seat.founds:
            declare_complete(spec)

    wait_complete(spec, meanwhile)
    leave_after_crash()
    local_rank = presence.index if detected.local_rank is None else detected.local_rank
    place = Place(run_dir / CLUSTER_NAME, presence.index, local_rank)
    return Stay(place, spec, presence, beside, seat.founds or bool(seat.beside), undo.pop_all())


def _serve(seat: Seat, spec: ClusterSpec) -> None:
    from paceline.launch.attendant import attend  # here: the nursery imports us, and then runs servers as programs

    presence = Presence.begin(Path(spec.run_dir), "server", seat.index, seat.num_servers)
    try:
        attend(spec, presence.index)
    finally:
        presence.end()


def _schedule(spec: ClusterSpec) -> None:
    """Be there until the job is over."""
    wait_complete(spec, lambda: declare_complete(spec))
    wait_all_ended(spec)

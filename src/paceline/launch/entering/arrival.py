"""How a process that another launcher has started meets the others of its job, and hears how all reach each other.

One machine or several: where the launcher counts several nodes, or none, all come first, and tell on which machine they
are. Then the process that sets the job up settles the rest.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.carriers import tell_user
from paceline.launch.entering.cards import Card
from paceline.launch.entering.detect import Detected
from paceline.launch.entering.founding import make_folder, settle
from paceline.launch.entering.gathering import START_TIMEOUT_S, Roll, wait_all, wait_settled
from paceline.launch.entering.meeting import Board, Invitation, open_board
from paceline.launch.entering.placement import Seat, asked_for, locate, take_seat
from paceline.launch.entering.presence import Presence
from paceline.launch.environment import asked_folder, cache_folder, start_timeout_s
from paceline.launch.folders import check_folder, names_in
from paceline.launch.guard import Guard
from paceline.launch.local import GUARD_TIMEOUT_S
from paceline.launch.machines import Machine, this_machine
from paceline.launch.spec import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """This process among the others of its job.

    Attributes:
        founder: the machine of the process that has set the job up.
        presence: what others see of this process; None for a scheduler, whom nobody needs to see.
        guard: of the folder of the job, if this process has made it.
    """

    seat: Seat
    spec: ClusterSpec
    roll: Roll
    founder: Machine
    presence: Presence | None
    local_rank: int | None
    guard: Guard | None
    timeout_s: float


def arrive(detected: Detected, asked: str | None, undo: ExitStack) -> Arrival:
    """Meet the others of the job; `undo` takes back what this process has done for that.

    Blocks until it is settled how all reach each other. Between machines that takes all of them.

    Raises:
        UsageError: launcher and `asked` make no sense together, or this process cannot be in this job.
        DeadlineExceeded: not all have come in time; the message names who is missing.
    """
    timeout_s, seat = start_timeout_s(START_TIMEOUT_S), take_seat(detected, asked)
    servers = asked_for(detected, asked)
    board = open_board(detected, asked_folder() or cache_folder())
    undo.callback(board.close)
    invitation, guard = (
        _found(seat, detected, board, undo) if seat.founds else (_follow(detected, board, timeout_s), None)
    )
    run_dir = Path(invitation.run_dir)
    presence = _take_part(run_dir, seat, undo)
    refusal = Card(invitation.machine, invitation.version).refusal("the first process of the job")
    if refusal is not None:  # said after others can see why
        raise UsageError(refusal)
    roll = Roll(run_dir, seat.num_workers, seat.num_serving)
    if detected.may_span:
        wait_all(roll, timeout_s)
        if presence is not None and seat.role == "worker":
            detected = locate(detected, roll.workers, presence.index, anew=servers.has_both)
            seat = take_seat(detected, asked)
        if seat.founds:
            settle(run_dir, seat, roll.machines, detected.master, servers.shares(roll.workers, roll.servers))
    spec = wait_settled(run_dir, timeout_s)
    if presence is not None and spec.encrypted:
        presence.show()
    return Arrival(
        seat=seat,
        spec=spec,
        roll=roll,
        founder=invitation.machine,
        presence=presence,
        local_rank=detected.local_rank,
        guard=guard,
        timeout_s=timeout_s,
    )


def _found(seat: Seat, detected: Detected, board: Board, undo: ExitStack) -> tuple[Invitation, Guard]:
    """Set the job up, and tell the others where."""
    tell_user(seat.summary)
    invitation, guard = make_folder(shared=detected.may_span)
    undo.callback(guard.dismiss, GUARD_TIMEOUT_S)
    if not detected.may_span:
        settle(Path(invitation.run_dir), seat, [invitation.machine], detected.master)
    board.invite(invitation)
    return invitation, guard


def _follow(detected: Detected, board: Board, timeout_s: float) -> Invitation:
    """Hear where the process that sets the job up has made its folder."""
    invitation = board.wait_invitation(timeout_s)
    here, run_dir = this_machine(), Path(invitation.run_dir)
    if here != invitation.machine:
        if not detected.may_span:
            raise UsageError(
                f"this process runs on {here}, and the first of its job on {invitation.machine}, but "
                f"{detected.launcher} says that the job is on one machine. Let it count its nodes; where MASTER_ADDR "
                "or DMLC_PS_ROOT_URI names the first machine, let it be an address that all reach, and not localhost"
            )
        if run_dir.name not in names_in(run_dir.parent):
            raise UsageError(
                f"{invitation.machine} has made the folder of the job, {run_dir}, which {here} does not see: let "
                "PACELINE_RUN_DIR name a folder on a file system that all machines of the job share"
            )
    check_folder(run_dir)
    return invitation


def _take_part(run_dir: Path, seat: Seat, undo: ExitStack) -> Presence | None:
    if seat.role == "scheduler":
        return None
    count = seat.num_workers if seat.role == "worker" else seat.num_servers
    presence = Presence.begin(run_dir, seat.role, seat.index, count)
    undo.callback(presence.end)
    return presence

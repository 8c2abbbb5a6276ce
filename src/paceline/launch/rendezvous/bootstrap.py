"""How a process that another launcher has started meets the others of its job, and hears how all reach each other.

One machine or several: where the launcher counts several nodes, or none, all come first, and tell on which machine they
are. Then the process that sets the job up settles the rest.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.job.carriers import tell_user
from paceline.job.environment import asked_folder, cache_folder, start_timeout_s
from paceline.job.folders import check_folder, names_in
from paceline.job.machines import Machine, this_machine
from paceline.job.spec import ClusterSpec
from paceline.launch.guard import Guard
from paceline.launch.local import GUARD_TIMEOUT_S
from paceline.launch.rendezvous.detect import Detected
from paceline.launch.rendezvous.liveness_lock import LivenessLock
from paceline.launch.rendezvous.process_info import ProcessInfo
from paceline.launch.rendezvous.roles import RoleAssignment, assign_nodes, assign_role, requested_servers
from paceline.launch.rendezvous.roster import START_TIMEOUT_S, Roster, wait_all, wait_settled
from paceline.launch.rendezvous.setup import make_folder, settle
from paceline.launch.rendezvous.store import Invitation, RendezvousStore, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapResult:
    """This process among the others of its job.

    Attributes:
        founder: the machine of the process that has set the job up.
        liveness_lock: shows others that this process takes part; None for a scheduler.
        guard: of the folder of the job, if this process has made it.
    """

    assignment: RoleAssignment
    spec: ClusterSpec
    roster: Roster
    founder: Machine
    liveness_lock: LivenessLock | None
    local_rank: int | None
    guard: Guard | None
    timeout_s: float


def bootstrap_process(detected: Detected, asked: str | None, undo: ExitStack) -> BootstrapResult:
    """Meet the others of the job; `undo` takes back what this process has done for that.

    Blocks until it is settled how all reach each other. Between machines that takes all of them.

    Raises:
        UsageError: launcher and `asked` make no sense together, or this process cannot be in this job.
        DeadlineExceeded: not all have come in time; the message names who is missing.
    """
    timeout_s, assignment = start_timeout_s(START_TIMEOUT_S), assign_role(detected, asked)
    servers = requested_servers(detected, asked)
    store = open_store(detected, asked_folder() or cache_folder())
    undo.callback(store.close)
    invitation, guard = (
        _set_up(assignment, detected, store, undo)
        if assignment.founds
        else (_find_founder(detected, store, timeout_s), None)
    )
    run_dir = Path(invitation.run_dir)
    liveness_lock = _take_part(run_dir, assignment, undo)
    refusal = ProcessInfo(invitation.machine, invitation.version).refusal("the first process of the job")
    if refusal is not None:  # said after others can see why
        raise UsageError(refusal)
    roster = Roster(run_dir, assignment.num_workers, assignment.num_serving)
    if detected.may_span:
        wait_all(roster, timeout_s)
        if liveness_lock is not None and assignment.role == "worker":
            detected = assign_nodes(detected, roster.workers, liveness_lock.index, anew=servers.has_both)
            assignment = assign_role(detected, asked)
        if assignment.founds:
            settle(
                run_dir, assignment, roster.machines, detected.master, servers.shares(roster.workers, roster.servers)
            )
    spec = wait_settled(run_dir, timeout_s)
    if liveness_lock is not None and spec.encrypted:
        liveness_lock.start_heartbeat()
    return BootstrapResult(
        assignment=assignment,
        spec=spec,
        roster=roster,
        founder=invitation.machine,
        liveness_lock=liveness_lock,
        local_rank=detected.local_rank,
        guard=guard,
        timeout_s=timeout_s,
    )


def _set_up(
    assignment: RoleAssignment, detected: Detected, store: RendezvousStore, undo: ExitStack
) -> tuple[Invitation, Guard]:
    """Set the job up, and tell the others where."""
    tell_user(assignment.summary)
    invitation, guard = make_folder(shared=detected.may_span)
    undo.callback(guard.dismiss, GUARD_TIMEOUT_S)
    if not detected.may_span:
        settle(Path(invitation.run_dir), assignment, [invitation.machine], detected.master)
    store.invite(invitation)
    return invitation, guard


def _find_founder(detected: Detected, store: RendezvousStore, timeout_s: float) -> Invitation:
    """Hear where the process that sets the job up has made its folder."""
    invitation = store.wait_invitation(timeout_s)
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


def _take_part(run_dir: Path, assignment: RoleAssignment, undo: ExitStack) -> LivenessLock | None:
    if assignment.role == "scheduler":
        return None
    count = assignment.num_workers if assignment.role == "worker" else assignment.num_servers
    liveness_lock = LivenessLock.acquire(run_dir, assignment.role, assignment.index, count)
    undo.callback(liveness_lock.release)
    return liveness_lock

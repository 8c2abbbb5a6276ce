"""Joins a job under a launcher that does not know Paceline: torchrun, srun or mpirun.

One process, the founder, makes a folder, as `paceline run` does, tells the others where, and settles how all reach each
other: on one machine by its memory, between machines by TCP and TLS. Where the launcher counts several nodes, or none,
all processes first tell on which machine they are. From then on the job is like one of `paceline run`, but without a
supervisor: each worker holds a lock while it takes part, servers end when the last lock is released, and a process
whose servers or folder others need stays until then.
"""

import secrets
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, final

import msgspec

from paceline.errors import CheckpointError, PacelineError, UsageError
from paceline.job.addresses import CLUSTER_NAME, SPEC_NAME
from paceline.job.credentials.holders import KEYS_NAME, Holder
from paceline.job.environment import (
    Place,
    asked_folder,
    asked_host,
    asked_servers,
    cache_folder,
    inherited,
    start_timeout_s,
    wait_timeout_s,
)
from paceline.job.folders import ANOTHER_FOLDER, check_folder, make_private, names_in, require_text
from paceline.job.machines import (
    LOOPBACK,
    Machine,
    address_for_others,
    address_towards,
    check_family,
    own_address,
    own_addresses,
    this_machine,
)
from paceline.job.spec import ClusterSpec, write_private, write_token
from paceline.job.views import FIRST, Views
from paceline.launch.guard import PREFIX, Guard
from paceline.launch.limits import explain
from paceline.launch.local import GUARD_TIMEOUT_S, TRACE_NAME, make_temporary
from paceline.launch.rendezvous.detect import Detected, detect
from paceline.launch.rendezvous.liveness_lock import (
    VERSION,
    LifeWatch,
    LivenessLock,
    ProcessInfo,
    announcing_wait,
    wait_all_ended,
)
from paceline.launch.rendezvous.node_places import NodePlaces
from paceline.launch.rendezvous.roles import (
    RoleAssignment,
    Servers,
    assign_nodes,
    assign_role,
    is_founder,
    requested_servers,
)
from paceline.launch.rendezvous.roster import (
    START_TIMEOUT_S,
    Roster,
    declare_complete,
    wait_all,
    wait_complete,
    wait_settled,
)
from paceline.launch.rendezvous.sidecar import SidecarServers
from paceline.launch.rendezvous.store import Invitation, JobRefusal, RendezvousStore, open_store
from paceline.launch.script_exit import leave_after_crash
from paceline.launch.snapshots import options_of_environment, resumption, with_snapshots
from paceline.notices import NEWS, tell
from paceline.observe.trace import UNNAMED_TRACE_BYTES

FOUNDER_NAME: Final = "founder.address"  # in the folder of the job: where this process is, for others to find a way to


def make_folder(*, shared: bool) -> tuple[Invitation, Guard]:
    """Make the folder of the job, with a secret in it, and a guard that clears it in the end.

    Args:
        shared: make it where other machines may see it too.
    """
    asked = asked_folder()
    place = asked or (cache_folder() if shared else None)
    if place is not None:
        require_text(place)
        make_private(place, ANOTHER_FOLDER)
    run_dir = make_temporary() if place is None else Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    guard = Guard(run_dir, temporary=asked is None)
    write_token(run_dir)
    (run_dir / TRACE_NAME).mkdir()
    return Invitation(str(run_dir), this_machine(), VERSION), guard


def settle(
    run_dir: Path,
    assignment: RoleAssignment,
    machines: list[Machine],
    master: tuple[str, int] | None,
    shares: tuple[float, ...] = (),
) -> None:
    """Say how the processes of the job reach each other: on one machine by its memory, between machines by TCP and TLS.

    Raises UsageError where others cannot reach this machine.

    `machines` are those on which workers and servers are; at `master`, all have been told, is the first process.
    `shares` are those of the servers, none for equal parts.
    """
    job, spans = secrets.token_hex(8), len(machines) > 1
    if assignment.has_replicas and not spans:
        raise UsageError(
            f"all processes of the job are on {machines[0]}, and a replica is for the case that a machine is lost: "
            "leave out replicas:1, or start the job on several machines"
        )
    if spans:
        host = asked_host()
        address = own_address(host) if host else address_for_others(master[0] if master else None)
        write_private(run_dir / FOUNDER_NAME, address.encode())
        _issue(run_dir, job, assignment)
        names = ", ".join(map(str, machines[:8])) + (", ..." if len(machines) > 8 else "")
        tell(f"{len(machines)} machines ({names}): tcp, encrypted; this one is {address}", NEWS)
    if shares:
        tell(
            f"servers hold {', '.join(f'{share:.2f}' for share in shares)} of every table, as their hosts have workers"
        )
    spec = ClusterSpec(
        job=job,
        num_workers=assignment.num_workers,
        num_servers=assignment.num_servers,
        transport="tcp" if spans else "shm",
        run_dir=str(run_dir),
        encrypted=spans,
        shares=shares,
        wait_timeout_s=wait_timeout_s(),
        trace_bytes=UNNAMED_TRACE_BYTES if asked_folder() is None else 0,
        join_timeout_s=2 * start_timeout_s(START_TIMEOUT_S),  # from the start of a server on: first all have to come
        has_replicas=assignment.has_replicas,
        replica_lag=assignment.replica_lag,
    )
    spec = with_snapshots(spec, options_of_environment())
    if spec.resume:
        tell(resumption(spec), NEWS)
    for rank in range(spec.num_servers) if spec.has_replicas else ():
        Views(run_dir, rank).change(FIRST)
    spec.write(run_dir / SPEC_NAME)


def listening_host(spec: ClusterSpec, founder: Machine) -> str:
    """Return the address of this machine at which a server of the job listens.

    Raises UsageError when there is none that the others could reach.
    """
    if not spec.encrypted:
        return LOOPBACK
    there, host = (Path(spec.run_dir) / FOUNDER_NAME).read_text(), asked_host()
    if host is not None:
        own = own_address(host)
        check_family(own, there, founder)
        return own
    return there if there in own_addresses() else address_towards(there, founder)


def _issue(run_dir: Path, job: str, assignment: RoleAssignment) -> None:
    """Give every process of the job a certificate; the key that signed is forgotten, so that there will be no more."""
    from paceline.job.credentials.certificates import Authority  # deferred: not needed on one machine

    keys, authority = run_dir / KEYS_NAME, Authority.make(job)
    keys.mkdir(mode=0o700)
    for rank in range(assignment.num_servers):
        authority.issue(keys, Holder("server", rank))
    for rank in range(assignment.num_workers):
        authority.issue(keys, Holder("worker", rank))


class BootstrapResult(msgspec.Struct, frozen=True, kw_only=True):
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
        DeadlineExceeded: not all have come in time; the message names the missing ones.
    """
    store = open_store(detected)
    undo.callback(store.close)
    with _refusal_told(detected, store):
        timeout_s, assignment = start_timeout_s(START_TIMEOUT_S), assign_role(detected, asked)
        servers = requested_servers(detected, asked)
        invitation, guard = (
            _set_up(assignment, detected, store, undo)
            if assignment.is_founder
            else (_find_founder(detected, store, timeout_s), None)
        )
    run_dir = Path(invitation.run_dir)
    liveness_lock = _take_part(run_dir, assignment, undo)
    if liveness_lock is not None and detected.may_span:
        liveness_lock.start_heartbeat()
    refusal = ProcessInfo(invitation.machine, invitation.version).refusal("the first process of the job")
    if refusal is not None:  # said after others can see why
        raise UsageError(refusal)
    roster = Roster(run_dir, assignment.num_workers, assignment.num_serving)
    if detected.may_span:
        wait_all(roster, timeout_s)
        if liveness_lock is not None and assignment.role == "worker":
            detected = assign_nodes(detected, roster.workers, liveness_lock.index, anew=servers.has_both)
            assignment = assign_role(detected, asked)
        if assignment.is_founder:
            settle(
                run_dir, assignment, roster.machines, detected.master, servers.shares(roster.workers, roster.servers)
            )
    spec = wait_settled(run_dir, timeout_s)
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


@contextmanager
def _refusal_told(detected: Detected, store: RendezvousStore) -> Generator[None]:
    """Have the others of the job end at once where the process that they wait for cannot set it up."""
    try:
        yield
    except (UsageError, CheckpointError, OSError) as error:
        reason = _cannot_take_part(error) if isinstance(error, OSError) else error
        if is_founder(detected):
            with suppress(OSError, PacelineError):  # then the others wait to the end, and this error says why
                store.refuse(JobRefusal(str(reason), this_machine()))
        raise


def _cannot_take_part(error: OSError) -> UsageError:
    where = asked_folder() or "the folder where its processes meet"
    return UsageError(f"this process cannot take part in its job, by {where}: {explain(error)}")


def _set_up(
    assignment: RoleAssignment, detected: Detected, store: RendezvousStore, undo: ExitStack
) -> tuple[Invitation, Guard]:
    """Set the job up, and tell the others where."""
    tell(assignment.summary, NEWS)
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


@final
class JoinedJob(msgspec.Struct, frozen=True):
    """A worker's part in a job that it has entered by itself, until it leaves."""

    place: Place
    spec: ClusterSpec
    liveness_lock: LivenessLock
    sidecars: SidecarServers
    is_founder: bool  # others need the folder that this process has made
    has_servers: bool  # others need these
    undo: ExitStack
    was_preempted: Callable[[], bool] = lambda: False

    def close(self, *, politely: bool) -> None:
        """Take part no longer. Politely: block for as long as others need what this process has.

        Where its machine is about to be taken away, its servers move to others first, if these can have them.
        """
        with self.undo:
            if politely and not self.was_preempted():
                self.liveness_lock.note_finished()
            self.liveness_lock.release()
            if not politely or not (self.is_founder or self.has_servers):
                return
            with announcing_wait(self.spec, self.place.rank):
                have_moved = self.has_servers and self.was_preempted() and self._move_servers()
                if have_moved and not self.is_founder:
                    return
                wait_all_ended(self.spec)
            self.sidecars.wait(self.spec.grace_s)

    def _move_servers(self) -> bool:
        workers = [LifeWatch(Path(self.spec.run_dir), "worker", rank) for rank in range(self.spec.num_workers)]
        have_moved = self.sidecars.leave(lambda: not any(worker.is_taken() for worker in workers))
        if have_moved:
            tell(f"worker {self.place.rank} leaves, and servers of its machine have moved to others")
        return have_moved


def join_started_job(servers: str | None) -> JoinedJob | None:
    """Find the job that this process belongs to, and enter it as a worker; None when it belongs to none.

    Blocks until all processes of the job have come. A process that is a server does not return: it serves until the job
    is over, and raises SystemExit(0).

    Args:
        servers: "first:M", "node:M", "ranks:M", or "node:M+ranks:N"; by default what PACELINE_SERVERS says, else
            "first:1".

    Raises:
        UsageError: launcher and `servers` make no sense, or not together; or there is no place for the job's files.
        DeadlineExceeded: not all have come in time; the message names the missing ones.
    """
    asked, detected = servers or asked_servers(), detect(inherited())
    if detected is None:
        if asked is not None:
            Servers.parse(asked)  # report a mistake even without a launcher
        return None
    with ExitStack() as undo:
        try:
            started = bootstrap_process(detected, asked, undo)
        except OSError as error:
            raise _cannot_take_part(error) from error
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
    sidecars = SidecarServers(
        run_dir,
        assignment.sidecars,
        listening_host(spec, started.founder) if assignment.sidecars else "",
        assignment.replicas,
        NodePlaces(run_dir, assignment.node, assignment.num_servers) if assignment.replicas else None,
    )
    undo.callback(sidecars.kill)
    if started.guard is not None:
        for pid in sidecars.pids:
            started.guard.watch(pid)

    def meanwhile() -> None:
        sidecars.check()
        if assignment.is_founder:
            declare_complete(spec, started.roster)

    wait_complete(spec, meanwhile, started.timeout_s)
    leave_after_crash()
    local_rank = liveness_lock.index if started.local_rank is None else started.local_rank
    place = Place(run_dir / CLUSTER_NAME, liveness_lock.index, local_rank, liveness_lock.life)
    return JoinedJob(
        place, spec, liveness_lock, sidecars, assignment.is_founder, bool(assignment.sidecars), undo.pop_all()
    )


def _serve(started: BootstrapResult, liveness_lock: LivenessLock) -> None:
    # Deferred: the fork server imports this module, and then runs that one as a program.
    from paceline.launch.rendezvous.sidecar import serve_until_workers_end

    serve_until_workers_end(started.spec, liveness_lock.index, listening_host(started.spec, started.founder))


def _schedule(started: BootstrapResult) -> None:
    """Be there until the job is over."""
    wait_complete(started.spec, lambda: declare_complete(started.spec, started.roster), started.timeout_s)
    wait_all_ended(started.spec)

"""What the process does that sets a job up: it makes the folder of the job, and settles how all reach each other."""

import secrets
import tempfile
from pathlib import Path
from typing import Final

from paceline.job.addresses import SPEC_NAME
from paceline.job.carriers import tell_user
from paceline.job.credentials.holders import KEYS_NAME, Holder
from paceline.job.environment import asked_folder, asked_host, cache_folder, start_timeout_s, wait_timeout_s
from paceline.job.folders import ANOTHER_FOLDER, make_private
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
from paceline.launch.guard import PREFIX, Guard
from paceline.launch.local import TRACE_NAME, make_temporary
from paceline.launch.rendezvous.process_info import VERSION
from paceline.launch.rendezvous.roles import RoleAssignment
from paceline.launch.rendezvous.roster import START_TIMEOUT_S
from paceline.launch.rendezvous.store import Invitation
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
    if spans:
        host = asked_host()
        address = own_address(host) if host else address_for_others(master[0] if master else None)
        write_private(run_dir / FOUNDER_NAME, address.encode())
        _issue(run_dir, job, assignment)
        names = ", ".join(map(str, machines[:8])) + (", ..." if len(machines) > 8 else "")
        tell_user(f"{len(machines)} machines ({names}): tcp, encrypted; this one is {address}")
    if shares:
        tell_user(
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
    )
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
    """Give every process of the job a certificate; who signed is forgotten, so that there will be no more."""
    from paceline.job.credentials.certificates import Authority  # deferred: not needed on one machine

    keys, authority = run_dir / KEYS_NAME, Authority.make(job)
    keys.mkdir(mode=0o700)
    for rank in range(assignment.num_servers):
        authority.issue(keys, Holder("server", rank))
    for rank in range(assignment.num_workers):
        authority.issue(keys, Holder("worker", rank))

"""The roster of a job without a supervisor: which processes have come, and whether the job is complete."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from paceline.errors import PeerError, UsageError
from paceline.job.addresses import CLUSTER_NAME, SPEC_NAME, AddressBook
from paceline.job.folders import INTERVAL_S, INTERVAL_SHARED_S, names_in, wait_for
from paceline.job.machines import Machine
from paceline.job.spec import TOKEN_NAME, ClusterSpec
from paceline.launch.rendezvous.detect import Role
from paceline.launch.rendezvous.liveness_lock import ProcessInfo, describe_machines, missing_ranks, process_info

START_TIMEOUT_S: Final = 60.0


@final
class Roster:
    """The processes that come by themselves: all workers, and the servers that are not sidecars of a worker."""

    def __init__(self, run_dir: Path, num_workers: int, num_servers: int) -> None:
        self._run_dir = run_dir
        self._awaited: tuple[tuple[Role, int], ...] = (("worker", num_workers), ("server", num_servers))
        self._infos: dict[str, ProcessInfo] = {}
        self.missing: list[str] = []  # when last polled

    def poll_missing(self) -> list[str]:
        """Return the processes that have not come yet; raises UsageError when one runs another version of paceline."""
        missing: list[str] = []
        for role, count in self._awaited:
            gone = missing_ranks(self._run_dir, role, count)
            missing += [f"{role} {index}" for index in gone]
            for index in sorted(set(range(count)).difference(gone)):
                if f"{role} {index}" not in self._infos:
                    self._add(f"{role} {index}", process_info(self._run_dir, role, index))
        self.missing = missing
        return missing

    @property
    def workers(self) -> list[Machine]:
        """Where each worker is; once all have come."""
        return [self._infos[f"worker {index}"].machine for index in range(self._awaited[0][1])]

    @property
    def servers(self) -> list[Machine]:
        """Where each of those servers is; once all have come."""
        return [self._infos[f"server {index}"].machine for index in range(self._awaited[1][1])]

    @property
    def machines(self) -> list[Machine]:
        """The machines of all processes that have come, each once."""
        return list(dict.fromkeys(info.machine for info in self._infos.values()))

    def __str__(self) -> str:
        """Return which process is where."""
        return describe_machines(self._infos)

    def _add(self, name: str, told: ProcessInfo) -> None:
        refusal = told.refusal(name)
        if refusal is not None:
            raise UsageError(refusal)
        self._infos[name] = told


def wait_all(roster: Roster, timeout_s: float = START_TIMEOUT_S) -> None:
    """Block until all have come.

    Raises:
        DeadlineExceeded: some have not in time; the message names them, and where the others are.
        UsageError: a process runs another version of paceline.
    """
    wait_for(
        lambda: None if roster.poll_missing() else roster,
        timeout_s,
        lambda: (
            f"{', '.join(roster.missing)} did not come to {socket.gethostname()} within {timeout_s:g} s (there: "
            f"{str(roster) or 'none'}). Look at what the missing ones wrote, whether they call paceline.init(), "
            "and whether they see the same folder"
        ),
        INTERVAL_SHARED_S,
    )


def wait_settled(run_dir: Path, timeout_s: float = START_TIMEOUT_S) -> ClusterSpec:
    """Block until the process that sets the job up has said how the others reach each other.

    Raises:
        DeadlineExceeded: it has not in time.
        PeerError: it is gone, and has cleared the folder of the job.
    """
    return wait_for(
        lambda: ClusterSpec.read(run_dir / SPEC_NAME) if SPEC_NAME in _names(run_dir) else None,
        timeout_s,
        lambda: (
            f"the process that sets the job up has not said within {timeout_s:g} s how the others reach each "
            f"other, in {run_dir / SPEC_NAME} as {socket.gethostname()} sees it: look at what it wrote"
        ),
        INTERVAL_SHARED_S,
    )


def wait_complete(spec: ClusterSpec, each_turn: Callable[[], None], timeout_s: float = START_TIMEOUT_S) -> None:
    """Block until the job is complete, calling `each_turn` all the while.

    Raises:
        DeadlineExceeded: it is not in time; the message names the missing ones.
        PeerError: the process that has set it up is gone, and has cleared the folder of the job.
    """

    def look() -> bool | None:
        if CLUSTER_NAME in _names(Path(spec.run_dir)):
            return True
        each_turn()
        return None

    wait_for(
        look,
        timeout_s,
        lambda: (
            f"not all of {spec.num_workers} workers and {spec.num_servers} servers came within {timeout_s:g} s: "
            f"{missing(spec)} did not. Look at what they wrote, and whether they call paceline.init()"
        ),
        INTERVAL_SHARED_S if spec.encrypted else INTERVAL_S,
    )


def declare_complete(spec: ClusterSpec, roster: Roster) -> None:
    """Tell all that wait, if it is so. For the process that has set the job up."""
    if not roster.poll_missing():
        AddressBook(spec).poll()


def missing(spec: ClusterSpec) -> str:
    """Name the processes of a job that have not come yet."""
    workers = [f"worker {index}" for index in missing_ranks(Path(spec.run_dir), "worker", spec.num_workers)]
    return ", ".join([*workers, *AddressBook(spec).missing()]) or "the process that sets the job up"


def _names(run_dir: Path) -> set[str]:
    names = names_in(run_dir)
    if TOKEN_NAME not in names:  # the first to be there and the first to go, also from a folder that is kept
        raise PeerError(
            f"the folder of the job, {run_dir}, is cleared: the process that made it has ended. Look at what it wrote"
        )
    return names

"""The carriers between the processes of a job: a new one is a file in `transport` and a line here."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from paceline.errors import UsageError
from paceline.job.addresses import Serving
from paceline.job.credentials.holders import KEYS_NAME, Holder, TokenFiles, tls_settings
from paceline.job.machines import LOOPBACK
from paceline.job.spec import ClusterSpec
from paceline.notices import tell
from paceline.transport import shm, tcp
from paceline.transport.base import Transport
from paceline.transport.carrier import Carrier, JobSettings

# The names that users choose from are in `job/choices.py`, which the command line reads without loading this.
CARRIERS: Final[Mapping[str, Carrier]] = {
    "shm": shm.CARRIER,
    "tcp": tcp.CARRIER,
}


def make_transport(spec: ClusterSpec, holder: Holder, notice: Callable[[str], None] = tell) -> Transport:
    """Make the carrier between the processes of this job, for one of them.

    `notice` is told what works less well than it could, and which clients are turned away. Raises UsageError when a
    file that it needs is not there.
    """
    if spec.transport == "memory":
        raise UsageError("the memory transport joins threads of one process, it cannot join the processes of a job")
    run_dir = Path(spec.run_dir)
    return CARRIERS[spec.transport].make(
        JobSettings(
            spec.job,
            spec.run_dir,
            secret=lambda: TokenFiles(run_dir, spec.job),
            tls=lambda: tls_settings(run_dir / KEYS_NAME, holder) if spec.encrypted else None,
            notice=notice,
        )
    )


def listen_address(spec: ClusterSpec, rank: int, host: str = LOOPBACK, *, role: Serving = "server") -> str:
    """Return where a server of this job listens: a free port of `host`, or a socket in the job's folder."""
    return CARRIERS[spec.transport].free_address(host, spec.run_dir, f"{role}-{rank}")

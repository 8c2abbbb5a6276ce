"""Which transport a job uses, made from its spec."""

import sys
from collections.abc import Callable
from pathlib import Path

from paceline.errors import UsageError
from paceline.job.addresses import Serving
from paceline.job.credentials.holders import KEYS_NAME, Holder, TokenFiles, tls_settings
from paceline.job.machines import LOOPBACK
from paceline.job.spec import ClusterSpec
from paceline.transport.base import Transport


def tell_user(text: str) -> None:
    """Write on stderr what works less well than it could."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def make_transport(spec: ClusterSpec, holder: Holder, notice: Callable[[str], None] = tell_user) -> Transport:
    """Make the carrier between the processes of this job, for one of them.

    `notice` is told what works less well than it could, and who is turned away. Raises UsageError when a file that it
    needs is not there.
    """
    if spec.transport == "tcp":
        from paceline.transport.tcp import TcpTransport

        run_dir = Path(spec.run_dir)
        tls = tls_settings(run_dir / KEYS_NAME, holder) if spec.encrypted else None
        return TcpTransport(TokenFiles(run_dir, spec.job), tls=tls, notice=notice)
    if spec.transport == "shm":
        from paceline.transport.shm import ShmTransport

        return ShmTransport(spec.job, notice=notice)
    raise UsageError("the memory transport joins threads of one process, it cannot join the processes of a job")


def listen_address(spec: ClusterSpec, rank: int, host: str = LOOPBACK, *, role: Serving = "server") -> str:
    """Return where a server of this job listens: a free port of `host`, or a socket in the job's folder."""
    place = f"[{host}]" if ":" in host else host
    return f"tcp://{place}:0" if spec.transport == "tcp" else f"shm://{spec.run_dir}/{role}-{rank}.sock"

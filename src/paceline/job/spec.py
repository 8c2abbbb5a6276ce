"""What the processes of one job must agree on, as one small file.

The launcher writes it, all other processes read it. The job's secret is not in it: the token has a file of its
own, and never travels by command line or environment.
"""

import os
import secrets
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import msgspec

from paceline.core.settings import LEASE_S, MAX_WORKERS, WAIT_TIMEOUT_S
from paceline.errors import UsageError
from paceline.job.choices import ScaleName, TraceLevel, TransportName
from paceline.job.folders import naming, open_file, wait_for

TOKEN_NAME: Final = "token"
TOKEN_BYTES: Final = 32
REPLICATED_LEASE_S: Final = 15.0
MAX_LAG: Final = 9999  # clocks by which answers may be ahead of replicas

Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORKERS)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One job: its size, how its processes reach each other, and how long they wait for each other.

    `num_at_start` workers begin, where that is not 0, and the others of `num_workers` may come and go while it runs.
    `addresses` holds one address per server, in the order of their ranks, and `data_addresses` one per data server;
    empty until all of them listen.

    >>> spec = ClusterSpec(job="3f", num_workers=4, num_servers=2, transport="shm", run_dir="/tmp/run")
    >>> spec.generation, spec.addresses
    (1, ())
    """

    job: str
    num_workers: int
    num_servers: int
    transport: TransportName
    run_dir: str
    consistency: str | None = None
    scale: ScaleName | None = None
    divide_lr: bool = False  # among the pushes of a clock, where each is an update of its own
    strategy: str | None = None
    addresses: tuple[str, ...] = ()
    trace: TraceLevel = "steps"
    generation: int = 1
    join_timeout_s: float = 60.0
    wait_timeout_s: float = WAIT_TIMEOUT_S
    grace_s: float = 5.0
    shares: tuple[float, ...] = ()  # of each table, one a server, as proportions; none for equal parts
    encrypted: bool = False  # then transport is tcp, and the folder `keys` in run_dir holds certificates
    server_threads: int | None = None  # of each server, for updates; None leaves it to the table's consistency
    num_data_servers: int = 0
    data_addresses: tuple[str, ...] = ()
    trace_bytes: int = 0  # that bound the trace of each process, see `TraceFile`; 0 keeps all of it
    record_bytes: int = 0  # that the record of each server may have; 0 keeps none
    num_at_start: int = 0
    has_replicas: bool = False  # of its servers, each on another machine than its server
    replica_lag: int = 0  # clocks by which answers to workers may be ahead of these
    launcher_decides: bool = False  # on views, as processes have no folder in common
    publish_every: int = 0  # clocks, after which worker 0 publishes the models; 0 for never
    clock: int = 0  # the first one: those below were finished by the job that this one goes on from
    resume: str = ""  # folder of the snapshot that it goes on from
    snapshots: str = ""  # folder that snapshots go to; empty for none
    snapshot_every_s: float = 0.0  # 0 chooses by what a snapshot takes
    snapshots_kept: int = 3

    @property
    def is_elastic(self) -> bool:
        """Whether workers come and go while the job runs."""
        return self.num_at_start > 0

    @property
    def lease_s(self) -> float:
        """How long a worker and a server may be without a connection to each other before one gives the other up.

        Where servers have replicas, a line that is cut is noticed after a second, and not only by the kernel after ten.
        """
        return REPLICATED_LEASE_S if self.has_replicas else LEASE_S

    @property
    def first_workers(self) -> range:
        """The ranks of the workers that the job begins with."""
        return range(self.num_at_start or self.num_workers)

    @staticmethod
    def read(path: Path) -> "ClusterSpec":
        """Read a spec; raises UsageError when the file is missing or is not a spec."""
        try:
            with open_file(path) as file:
                return msgspec.json.decode(file.read(), type=ClusterSpec)
        except OSError as error:
            raise UsageError(
                f"cannot read the cluster spec {path}: {error.strerror}; name the folder of a run (--run-dir)"
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path} is not a cluster spec: {error}") from error

    def write(self, path: Path) -> None:
        """Write the spec, readable by this user only; a reader sees either all of it or no file."""
        write_private(path, msgspec.json.format(msgspec.json.encode(self), indent=2))


def wait_spec(path: Path, timeout_s: float) -> ClusterSpec:
    """Block until the launcher has written the spec at `path`, and read it.

    Raises DeadlineExceeded when it is still missing after `timeout_s`.
    """
    return wait_for(
        lambda: ClusterSpec.read(path) if path.exists() else None,
        timeout_s,
        lambda: (
            f"no cluster spec at {path} after {timeout_s:g} s: the servers did not start listening in time, or the "
            "launcher is gone; look at what the servers printed"
        ),
    )


def write_token(run_dir: Path) -> None:
    """Make a fresh secret for the job in `run_dir`, readable by this user only."""
    write_private(run_dir / TOKEN_NAME, secrets.token_bytes(TOKEN_BYTES))


def read_token(run_dir: Path, name: str = TOKEN_NAME) -> bytes:
    """Return the job's secret; raises UsageError when it is missing or too short to be one."""
    path = run_dir / name
    try:
        with path.open("rb") as file:
            found, token = os.fstat(file.fileno()), file.read()
    except OSError as error:
        raise UsageError(
            f"cannot read the job's token {path!s:.300}: {error.strerror}; a run has one while it runs, and a folder "
            "of keys as long as it is there"
        ) from error
    if len(token) < TOKEN_BYTES:
        raise UsageError(f"the job's token {path} has {len(token)} bytes, expected {TOKEN_BYTES}")
    _require_private(path, found)
    return token


def _require_private(path: Path, found: os.stat_result) -> None:
    """Refuse a secret that another user has put there, or may read or change; that of root is as good as one's own.

    A file that all may read is private in a folder that no other user can enter.
    """
    mode, folder_mode = stat.S_IMODE(found.st_mode), stat.S_IMODE(path.parent.stat().st_mode)
    may_read = mode & 0o044 and folder_mode & 0o011
    if found.st_uid not in (os.geteuid(), 0) or mode & 0o022 or may_read:
        raise UsageError(
            f"{path} has mode {mode:04o} and owner {found.st_uid}, expected 0600 and "
            f"{os.geteuid()}: chmod 600 it if it is yours"
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600 that appears at once and whole, or not at all; an OSError names it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with naming(path), ExitStack() as undo:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            undo.callback(unfinished.unlink)
            file.write(content)
        unfinished.rename(path)
        undo.pop_all()

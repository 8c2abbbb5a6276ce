"""Files in the folder of a job that say where its servers listen, and which of them have ended."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, final

from msgspec.structs import replace

from paceline.job.folders import names_in
from paceline.job.spec import ClusterSpec

SPEC_NAME: Final = "spec.json"  # for the servers, before any of them listens
CLUSTER_NAME: Final = "cluster.json"  # what the workers wait for: all servers listen

Serving = Literal["server", "data"]


def address_path(run_dir: Path, role: Serving, rank: int) -> Path:
    """Return where a server or a data server says that it listens."""
    return run_dir / f"{role}-{rank}.address"


def serving_name(role: Serving, rank: int) -> str:
    """Return what a server or a data server is called in messages.

    >>> serving_name("server", 0), serving_name("data", 1)
    ('server 0', 'data server 1')
    """
    return f"{'data server' if role == 'data' else role} {rank}"


def data_addresses(spec: ClusterSpec) -> Sequence[str]:
    """Return where the data servers listen now: one that was started again may listen elsewhere than before."""
    paths = [address_path(Path(spec.run_dir), "data", rank) for rank in range(spec.num_data_servers)]
    return [_read(path) or known for path, known in zip(paths, spec.data_addresses, strict=True)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


@final
class AddressBook:
    """Collects the addresses that servers publish as files, and hands them to the workers as one spec."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._run_dir = Path(spec.run_dir)
        # In threads of one process the servers need no addresses, and there is nothing to wait for.
        apart = spec.transport != "memory"
        self._counts: dict[Serving, int] = (
            {"server": spec.num_servers, "data": spec.num_data_servers} if apart else {"server": 0, "data": 0}
        )

    def poll(self) -> bool:
        """Publish the whole spec once all addresses are known; True when that is done."""
        if self.missing():
            return False
        whole = replace(self._spec, addresses=self._addresses("server"), data_addresses=self._addresses("data"))
        whole.write(self._run_dir / CLUSTER_NAME)
        return True

    def missing(self) -> list[str]:
        """Return the names of those that have not published an address yet."""
        there = names_in(self._run_dir)
        return [
            serving_name(role, rank)
            for role, count in self._counts.items()
            for rank in range(count)
            if address_path(self._run_dir, role, rank).name not in there
        ]

    def _addresses(self, role: Serving) -> tuple[str, ...]:
        paths = (address_path(self._run_dir, role, rank) for rank in range(self._counts[role]))
        return tuple(path.read_text().strip() for path in paths)


def record_server_ended(run_dir: Path, rank: int, how: str, process: int = 0) -> None:
    """Record that a server has ended, and how, for the workers of this job; `process`: which one of those in its place.

    If the file cannot be written, because the disk is full for example, workers find out seconds later by themselves.
    """
    with suppress(OSError):
        _path(run_dir, rank, process).write_text(how, encoding="utf-8")


def how_server_ended(run_dir: Path, rank: int, process: int = 0) -> str:
    """Return how a server of this job has ended, or nothing where it is not known to have ended."""
    try:
        return _path(run_dir, rank, process).read_text(encoding="utf-8")
    except OSError:
        return ""


def process_name(rank: int, process: int) -> str:
    """Return the name of a process in the place of a server, as files of it begin.

    >>> process_name(2, 0), process_name(2, 1)
    ('server-2', 'server-2.1')
    """
    return f"server-{rank}.{process}" if process else f"server-{rank}"


def _path(run_dir: Path, rank: int, process: int) -> Path:
    return run_dir / f"{process_name(rank, process)}.ended"

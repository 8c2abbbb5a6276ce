"""Where the servers of a job say that they listen, and the workers hear it: files in the run directory."""

from dataclasses import replace
from pathlib import Path
from typing import Final, final

from paceline.launch.folders import names_in
from paceline.launch.spec import ClusterSpec

SPEC_NAME: Final = "spec.json"  # what the servers read: nobody listens yet
CLUSTER_NAME: Final = "cluster.json"  # what the workers wait for: all servers listen


@final
class AddressBook:
    """Collects the addresses that the servers publish as files, and hands them to the workers as one spec."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._run_dir = Path(spec.run_dir)
        # In threads of one process the servers need no addresses, and there is nobody to wait for.
        self._awaited = range(0 if spec.transport == "memory" else spec.num_servers)

    def poll(self) -> bool:
        """Publish the whole spec once all addresses are known; True when that is done."""
        if self.missing():
            return False
        addresses = tuple(self._path(rank).read_text().strip() for rank in self._awaited)
        replace(self._spec, addresses=addresses).write(self._run_dir / CLUSTER_NAME)
        return True

    def missing(self) -> list[int]:
        """Return the ranks of the servers that have not published an address yet."""
        there = names_in(self._run_dir)
        return [rank for rank in self._awaited if self._path(rank).name not in there]

    def _path(self, rank: int) -> Path:
        return self._run_dir / f"server-{rank}.address"

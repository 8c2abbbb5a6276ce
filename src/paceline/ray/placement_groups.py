"""Room on a cluster for the processes of a job: kept as a whole or not at all, in a placement group for each role."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

from paceline.errors import DeadlineExceeded, UsageError
from paceline.ray.engine import Cluster, load_ray

if TYPE_CHECKING:
    from types import ModuleType

    from paceline.launch.child import Launch
    from paceline.launch.output import Console
    from paceline.launch.plan import LocalRun
    from paceline.ray.options import RayOptions

TELL_INTERVAL_S: Final = 5.0
_NAMES: Final = {"worker": "worker", "server": "server", "data": "data server"}


@final
class PlacementGroups:
    """Where workers, servers and data servers go. Ask for room, look whether it is there, and give it back."""

    def __init__(self, run: LocalRun, options: RayOptions, cluster: Cluster, console: Console) -> None:
        """Plan it."""
        self._options = options
        self._cluster = cluster
        self._console = console
        # Workers first: they may need what few nodes have, and servers take what is left.
        counts = {"worker": run.num_workers, "server": run.num_servers, "data": run.num_data_servers}
        self._counts = {role: count for role, count in counts.items() if count}
        self._needs: dict[str, dict[str, float]] = {
            "worker": options.worker_needs(),
            "server": {"CPU": options.server_cpus},
            "data": {"CPU": options.server_cpus},
        }
        self._ray_util: ModuleType = load_ray().util
        self._groups: dict[str, Any] = {}

    def request(self) -> None:
        """Request room; raises UsageError when a cluster that will not grow has less than that."""
        self._start_s = self._told_s = time.monotonic()
        if self._cluster.is_own:
            self._check_enough()
        for role, count in self._counts.items():
            spread = self._options.place_workers if role == "worker" else self._options.place_servers
            strategy = spread.upper().replace("-", "_")
            self._groups[role] = self._ray_util.placement_group(
                [dict(self._needs[role]) for _ in range(count)], strategy
            )

    def is_ready(self) -> bool:
        """Return whether all have room; does not block. Raises DeadlineExceeded when it takes too long."""
        if all(group.wait(0) for group in self._groups.values()):
            return True
        now = time.monotonic()
        if now - self._start_s >= self._options.start_timeout:
            raise DeadlineExceeded(
                f"the Ray cluster had no room within {self._options.start_timeout:g} s for {self._asked()}; "
                f"{self._found()}: ask for less, or wait longer with --start-timeout"
            )
        if now - self._told_s >= TELL_INTERVAL_S:
            self._told_s = now
            self._console.announce(f"waiting for room on the Ray cluster: {self._asked()}; {self._found()}")
        return False

    def nodes(self) -> dict[tuple[str, int], str]:
        """Return the node of each process, by role and rank."""
        return {
            (role, int(rank)): node
            for role, group in self._groups.items()
            for rank, node in self._ray_util.placement_group_table(group)["bundles_to_node_id"].items()
        }

    def settings(self, launch: Launch) -> dict[str, Any]:
        """Return how Ray is to start the actor of a process: in its place, with all that was kept for it."""
        strategies = self._ray_util.scheduling_strategies
        named = dict(self._needs[launch.role])
        return {
            "num_cpus": named.pop("CPU"),
            "num_gpus": named.pop("GPU", 0),
            "resources": named or None,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(self._groups[launch.role], launch.rank),
        }

    def give_back(self) -> None:
        """Give the room back; what still runs there is killed."""
        for group in self._groups.values():
            self._ray_util.remove_placement_group(group)
        self._groups.clear()

    def _check_enough(self) -> None:
        total = self._cluster.total()
        wanted: dict[str, float] = {}
        for role, count in self._counts.items():
            for name, amount in self._needs[role].items():
                wanted[name] = wanted.get(name, 0) + count * amount
        if any(amount > total.get(name, 0) for name, amount in wanted.items()):
            raise UsageError(f"no room on this machine for {self._asked()}; it has {listed(total)}")

    def _asked(self) -> str:
        return " and ".join(
            f"{count} {_NAMES[role]}{'s' if count > 1 else ''} of {listed(self._needs[role])}"
            for role, count in self._counts.items()
        )

    def _found(self) -> str:
        return f"it has {listed(self._cluster.total())}, and free are {listed(self._cluster.free())}"


def listed(resources: Mapping[str, float]) -> str:
    """Say what that is.

    >>> listed({"memory": 2.0**31, "CPU": 4.0, "GPU": 0.5})
    '4 CPU, 0.5 GPU'
    """
    told = {name: amount for name, amount in sorted(resources.items()) if "memory" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in told.items()) or "nothing"

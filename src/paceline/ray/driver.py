"""Starts a job in actors on a Ray cluster, in reserved room, and supervises it: `paceline run --engine ray`."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, final

from msgspec.structs import replace

from paceline.errors import DeadlineExceeded, PacelineError, UsageError
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.spec import write_token
from paceline.job.views import FIRST, NUM_PLACES
from paceline.launch.local import (
    TRACE_NAME,
    guarded_folder,
    open_board,
    open_copy,
    open_dashboard,
    require_startable,
)
from paceline.launch.output import CHUNK_BYTES, Console, unblocked_output
from paceline.launch.plan import DEFAULT_PROGRAMS, LocalRun, plan_launches
from paceline.launch.signals import Signals
from paceline.launch.snapshots import options_of_environment
from paceline.launch.supervise import Exits, SupervisionConfig, Supervisor
from paceline.ray.actor import ProcessActor
from paceline.ray.engine import Cluster, joined, load_ray, prepare
from paceline.ray.options import RayOptions
from paceline.ray.registry import RayRegistry, RemoteProcess
from paceline.ray.replicas import ReplicatedServers
from paceline.snapshots.options import SnapshotOptions

if TYPE_CHECKING:
    from paceline.launch.child import Launch
    from paceline.launch.output import Outlets
    from paceline.launch.supervision import Member

TELL_INTERVAL_S: Final = 5.0
_NAMES: Final = {"worker": "worker", "server": "server", "data": "data server"}


@final
class RayBackend:
    """Starts processes in actors; also the rendezvous of these, because the launcher alone hears all of them.

    Every life of a worker has an actor of its own: Ray is not asked to restart any, because an actor that Ray has
    started again cannot know whether its process was counted as ended.
    """

    def __init__(
        self,
        run: LocalRun,
        options: RayOptions,
        run_dir: Path,
        cluster: Cluster,
        console: Console,
        wakeup_fd: int,
        outlets: Outlets,
    ) -> None:
        """Plan it; a signal makes `wakeup_fd` readable, and what `outlets` keep is written at every turn."""
        self._run = run
        self._options = options
        self._run_dir = run_dir
        self._cluster = cluster
        self._console = console
        self._wakeup_fd = wakeup_fd
        self._outlets = outlets
        self._places = PlacementGroups(run, options, cluster, console)
        self._ray: Any = load_ray()
        # Orders are followed one by one, as they come; news are waited for beside them.
        self._actors: Any = self._ray.remote(concurrency_groups={"news": 1})(ProcessActor)
        self._registry: RayRegistry | None = None  # from when all have a place
        self._members: list[RemoteProcess] = []

    # -- process backend -----------------------------------------------------------------------------------------------

    def prepare(self) -> Sequence[Member]:
        """Ask for room."""
        self._places.request()
        return ()

    def settled(self) -> bool:
        """Return whether there is room for all."""
        if self._registry is None and self._places.is_ready():
            nodes = self._places.nodes()
            self._registry = RayRegistry(self._run, self._options, self._run_dir, nodes, self._cluster.node_id)
            if not self._run.quiet:
                self._console.announce(_placed(self._registry))
                for line in _places_of_replicas(nodes, self._cluster):
                    self._console.announce(line)
                if self._registry.resumption:
                    self._console.announce(self._registry.resumption)
        return self._registry is not None

    def start(self, launch: Launch) -> RemoteProcess:
        """Have an actor started in its place."""
        assert self._registry is not None
        actor = self._actors.options(**self._places.settings(launch), max_restarts=0).remote()
        deadline_s = time.monotonic() + self._options.start_timeout
        member = RemoteProcess(launch, actor, self._registry, self._console, self._ray.kill, deadline_s)
        self._members.append(member)
        return member

    def wait(self, timeout_s: float) -> None:
        """Block until an actor answers or `timeout_s` have passed; a signal is seen then, too."""
        awaited = {member.question: member for member in self._members if self._can_go_on(member)}
        if not awaited:
            select.select([self._wakeup_fd], [], [], timeout_s)
        else:
            self._ray.wait(list(awaited), timeout=timeout_s)
            answered, _ = self._ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
            for question in answered:
                self._handle_answer(awaited[question])
        for member in self._members:
            if member.is_late(time.monotonic()):
                self._give_up(member)
        self._tell_of_servers()
        if select.select([self._wakeup_fd], [], [], 0)[0]:
            os.read(self._wakeup_fd, CHUNK_BYTES)
        self._outlets.push()

    def release(self, member: Member) -> None:
        """Let its actor go; it has told everything."""
        ended = next(other for other in self._members if other is member)
        self._members.remove(ended)
        ended.kill()

    def close(self) -> None:
        """Give the room back."""
        if self._registry is not None:
            self._registry.close()
        self._places.give_back()

    # -- rendezvous ----------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Return whether all servers listen; then the addresses are sent to every process."""
        if self._registry is None or self._registry.missing() or not self._registry.book.poll():
            return False
        for name, content in self._registry.read_file(CLUSTER_NAME).items():
            for member in self._members:
                member.write_file(name, content)
        return True

    def missing(self) -> list[str]:
        """Return the names of the servers that do not listen yet."""
        assert self._registry is not None
        return self._registry.missing()

    def _give_up(self, member: RemoteProcess) -> None:
        """Count a process as lost that Ray has not started in time; a replica in the place of one waits for room."""
        if member.launch.process > FIRST.replica:
            self._console.announce(f"{member.name} waits for room on the Ray cluster, to become a replica there")
            member.wait_for_room()
        else:
            member.mark_lost(f"Ray has not started it within {self._options.start_timeout:g} s")

    def _tell_of_servers(self) -> None:
        """Tell all processes what is new of servers with replicas."""
        new = {} if self._registry is None else self._registry.take_server_files()
        for name, content in new.items():
            for member in self._members:
                member.write_file(name, content)

    def _tell_addresses(self) -> None:
        """Tell workers where a data server listens that was started again."""
        assert self._registry is not None
        for name, content in self._registry.data_addresses().items():
            for member in self._members:
                if member.launch.role == "worker":
                    member.write_file(name, content)

    def _can_go_on(self, member: RemoteProcess) -> bool:
        """Return whether its answer can be used now: the first command may have to be server 0's."""
        assert self._registry is not None
        is_first = (member.launch.role, member.launch.rank) == ("server", 0)
        return member.reap() is None and (is_first or not self._registry.awaits_folder)

    def _handle_answer(self, member: RemoteProcess) -> None:
        try:
            if member.handle_answer(self._ray.get(member.question)) and member.launch.incarnation:
                self._tell_addresses()
        except self._ray.exceptions.RayError as error:
            member.mark_lost(f"Ray: {_cause(error)}")
        except PacelineError as error:
            member.mark_lost(str(error))


def _cause(error: Exception) -> str:
    """Return in one line why an actor is gone; Ray's message has many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1] + [line for line in lines[1:] if "Error" in line][-1:])


def _placed(registry: RayRegistry) -> str:
    if registry.encrypted:
        return f"Ray has placed the processes on {registry.num_nodes} nodes; they talk over TCP, encrypted"
    return "Ray has placed all processes on one node"


def _places_of_replicas(nodes: Mapping[tuple[str, int], str], cluster: Cluster) -> list[str]:
    """Return a line for each server that has a replica, with the nodes of the two."""
    return [
        f"server {rank} is on {cluster.name_of(nodes['server', rank])}, its replica on {cluster.name_of(node)}"
        for (role, rank), node in nodes.items()
        if role == "replica"
    ]


def run_on_ray(run: LocalRun, options: RayOptions) -> int:
    """Run a script as a job of several processes on a Ray cluster.

    Without options on snapshots the variables of this process count, as under other launchers.

    Blocks until the job has ended, and returns its exit code as `run_local` does. Raises UsageError for a run that
    cannot start, and PeerError when there is no cluster, or no room on it in time. Call it from the main thread: it
    answers signals while it runs.
    """
    if run.snapshots == SnapshotOptions():
        run = replace(run, snapshots=options_of_environment())
    run.validate()
    options = options.with_environment()
    if run.num_at_start is not None:
        raise UsageError(
            f"--workers is {run.num_at_start}:{run.num_workers}, and under Ray workers do not come and go yet: leave "
            "out --engine ray, or give one number of workers"
        )
    options.validate(run)
    require_startable(run.script, "paceline.ray.run")
    ray = prepare(options)
    with guarded_folder(run.run_dir) as (run_dir, _):
        return _supervise(ray, run, options, run_dir)


def _supervise(ray: ModuleType, run: LocalRun, options: RayOptions, run_dir: Path) -> int:
    write_token(run_dir)
    trace_folder = run_dir / TRACE_NAME
    config = SupervisionConfig(
        crash_policy=run.crash_policy,
        start_timeout_s=options.start_timeout,
        grace_s=run.crash_policy.grace_s,
        run_dir=run_dir,
        needs_all=run.needs_all,
    )
    with open_copy(run.copy_to) as copy:
        console = Console(copy)
        with (
            joined(ray, run, options, console) as cluster,
            Signals() as signals,
            unblocked_output() as outlets,
            open_dashboard(run, run_dir, console),
        ):
            board = open_board(trace_folder, run.num_workers) if run.progress else None
            backend = RayBackend(run, options, run_dir, cluster, console, signals.wakeup_fd, outlets)
            replicated = ReplicatedServers(run_dir, run.num_servers) if options.replicas else None
            exits = Exits(console, board, run_dir)
            supervisor = Supervisor(config, backend, backend, console, signals, board, exits, successors=replicated)
            launches = plan_launches(run, DEFAULT_PROGRAMS, run_dir, {})
            return supervisor.run(launches if replicated is None else replicated.equip(launches))


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
        self._groups: dict[str, list[Any]] = {}  # one for all of a role, or one for each server and its replica

    def request(self) -> None:
        """Request room; raises UsageError when a cluster that will not grow has less than that."""
        self._start_s = self._told_s = time.monotonic()
        if self._cluster.is_own:
            self._check_enough()
        for role, count in self._counts.items():
            if role == "server" and self._options.replicas:
                apart = "STRICT_SPREAD" if self._cluster.num_nodes_with(self._needs[role]) > 1 else "PACK"
                self._groups[role] = [self._group(role, NUM_PLACES, apart) for _ in range(count)]
                continue
            spread = self._options.place_workers if role == "worker" else self._options.place_servers
            self._groups[role] = [self._group(role, count, spread.upper().replace("-", "_"))]

    def _group(self, role: str, count: int, strategy: str) -> object:
        return self._ray_util.placement_group([dict(self._needs[role]) for _ in range(count)], strategy)

    def is_ready(self) -> bool:
        """Return whether all have room; does not block. Raises DeadlineExceeded when it takes too long."""
        if all(group.wait(0) for groups in self._groups.values() for group in groups):
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
        """Return the node of each process, by role and rank; the roles are those of processes, and "replica"."""
        found: dict[tuple[str, int], str] = {}
        for role, groups in self._groups.items():
            for number, group in enumerate(groups):
                bundles = self._ray_util.placement_group_table(group)["bundles_to_node_id"]
                for bundle, node in bundles.items():
                    is_pair = role == "server" and self._options.replicas
                    place = (("server", "replica")[int(bundle)], number) if is_pair else (role, int(bundle))
                    found[place] = node
        return found

    def settings(self, launch: Launch) -> dict[str, Any]:
        """Return how Ray is to start the actor of a process: in its place, with all that was kept for it."""
        strategies = self._ray_util.scheduling_strategies
        named = dict(self._needs[launch.role])
        groups, bundle = self._groups[launch.role], launch.rank
        group = groups[0]
        if (
            launch.role == "server" and self._options.replicas
        ):  # Ray finds another node for what was on one that is lost
            group, bundle = groups[launch.rank], launch.process % NUM_PLACES
        return {
            "num_cpus": named.pop("CPU"),
            "num_gpus": named.pop("GPU", 0),
            "resources": named or None,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(group, bundle),
        }

    def give_back(self) -> None:
        """Give the room back; what still runs there is killed."""
        for groups in self._groups.values():
            for group in groups:
                self._ray_util.remove_placement_group(group)
        self._groups.clear()

    def _check_enough(self) -> None:
        total = self._cluster.total()
        wanted: dict[str, float] = {}
        for role, count in self._counts.items():
            num = count * NUM_PLACES if role == "server" and self._options.replicas else count
            for name, amount in self._needs[role].items():
                wanted[name] = wanted.get(name, 0) + num * amount
        if any(amount > total.get(name, 0) for name, amount in wanted.items()):
            raise UsageError(f"no room on this machine for {self._asked()}; it has {format_resources(total)}")

    def _asked(self) -> str:
        return " and ".join(
            f"{count} {self._named(role)}{'s' if count > 1 else ''} of {format_resources(self._needs[role])}"
            for role, count in self._counts.items()
        )

    def _named(self, role: str) -> str:
        return "replicated server" if role == "server" and self._options.replicas else _NAMES[role]

    def _found(self) -> str:
        return (
            f"it has {format_resources(self._cluster.total())}, and free are {format_resources(self._cluster.free())}"
        )


def format_resources(resources: Mapping[str, float]) -> str:
    """Return amounts of resources as a message has them; memory is left out.

    >>> format_resources({"memory": 2.0**31, "CPU": 4.0, "GPU": 0.5})
    '4 CPU, 0.5 GPU'
    """
    told = {name: amount for name, amount in sorted(resources.items()) if "memory" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in told.items()) or "nothing"

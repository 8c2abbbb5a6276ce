"""Which process of a job is what: how many servers there are, and who starts them or becomes one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from paceline.core.partition import shares_over_hosts
from paceline.errors import UsageError
from paceline.job.machines import Machine
from paceline.launch.rendezvous.detect import Detected, Role

Home = Literal["first", "node"]
DEFAULT: Final = "first:1"


@dataclass(frozen=True, slots=True)
class Servers:
    """Where servers are: so many beside rank 0 or beside the first rank of every node, and instead of the last ranks.

    Those instead of ranks are counted first.
    """

    home: Home
    beside: int
    alone: int

    @staticmethod
    def parse(text: str) -> "Servers":
        """Read "first:2", "node:1", "ranks:2", or two of these as "node:1+ranks:2"; raises UsageError for other text.

        >>> Servers.parse("node:1+ranks:2")
        Servers(home='node', beside=1, alone=2)
        """
        counts: dict[str, int] = {}
        for part in text.split("+"):
            home, _, count = part.partition(":")
            counts[home] = int(count) if count.isdecimal() else 0
        homes = counts.keys() - {"ranks"}
        if len(homes) > 1 or homes - {*get_args(Home)} or 0 in counts.values() or len(counts) <= text.count("+"):
            raise UsageError(
                f"servers is {text!r}, expected first:M (M servers beside rank 0), node:M (M beside the first rank of "
                "every node) or ranks:M (the last M ranks are servers), with M of at least 1, or one of the first two "
                "with the last, such as node:1+ranks:2"
            )
        home = "node" if "node" in homes else "first"
        return Servers(home, counts.get(home, 0), counts.get("ranks", 0))

    @property
    def has_both(self) -> bool:
        """Whether there are some of either kind."""
        return bool(self.beside and self.alone)

    def shares(self, workers: Sequence[Machine], alone: Sequence[Machine]) -> tuple[float, ...]:
        """Return how much each server holds if only some are on machines of `workers`; none, for equal parts, if not.

        `alone` are the machines of those servers that are not started beside a worker.
        """
        hosts = dict.fromkeys(workers) if self.home == "node" else workers[:1]
        at = [*alone, *(host for host in hosts for _ in range(self.beside))]
        return shares_over_hosts(workers, at) if len({host in workers for host in at}) == 2 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAssignment:
    """What this process is in its job.

    Attributes:
        index: its number among those of its role; None for the order of arrival.
        num_serving: how many of the servers are processes of the launcher, and not started beside a worker.
        beside: the numbers of the servers that it starts; none before it is known on which node it is.
        founds: whether it is the one that sets the job up, and tells the others where they meet.
        summary: the job in half a line.
    """

    role: Role
    index: int | None
    num_workers: int
    num_servers: int
    num_serving: int
    beside: range
    founds: bool
    summary: str


def requested_servers(detected: Detected, asked: str | None) -> Servers:
    """Return where servers are: as the launcher has settled, or else as the user has `asked`.

    Raises UsageError for both together, and for text that says nothing of servers.
    """
    if detected.num_servers and asked is not None:
        raise UsageError(
            f"servers are to be at {asked!r}, but {detected.launcher} has named {detected.num_servers} already: leave "
            "out one of the two"
        )
    return Servers("first", 0, detected.num_servers) if detected.num_servers else Servers.parse(asked or DEFAULT)


def assign_nodes(detected: Detected, machines: Sequence[Machine], index: int, *, anew: bool = False) -> Detected:
    """Add what the launcher has not told: each machine is a node, in the order of the workers on them.

    `machines` says where each worker is, and this process is the worker `index`. `anew`: whatever the launcher has
    told, as it counts the nodes of servers alone, too.
    """
    if detected.node_rank is not None and not anew:
        return detected
    here, nodes = machines[index], list(dict.fromkeys(machines))
    local_rank = machines[:index].count(here) if detected.local_rank is None or anew else detected.local_rank
    return replace(
        detected, local_rank=local_rank, node_rank=nodes.index(here), num_nodes=len(nodes), counts_nodes=True
    )


def assign_role(detected: Detected, asked: str | None) -> RoleAssignment:
    """Return what this process is, with servers where they were `asked` for; raises UsageError where that cannot be."""
    servers = requested_servers(detected, asked)
    if detected.num_servers:
        return _given_role(detected)
    num_workers = _count_workers(detected, servers.alone)
    everywhere = servers.home == "node"
    serves = servers.alone > 0 and (detected.rank or 0) >= num_workers
    number = detected.local_rank if everywhere and detected.local_rank is not None else detected.rank
    node = detected.node_rank if everywhere else 0
    starts = number == 0 and node is not None and not serves
    start = servers.alone + (node or 0) * servers.beside
    return RoleAssignment(
        role="server" if serves else "worker",
        index=(detected.rank or 0) - num_workers if serves else detected.rank,
        num_workers=num_workers,
        num_servers=servers.alone + servers.beside * (detected.num_nodes if everywhere else 1),
        num_serving=servers.alone,
        beside=range(start, start + servers.beside) if starts else range(0),
        founds=detected.rank == 0,
        summary=_summary(detected, num_workers, _where(servers, num_workers)),
    )


def _given_role(detected: Detected) -> RoleAssignment:
    """Return the seat that the launcher itself has given: the scheduler sets the job up where there is one."""
    role = detected.role or "worker"
    return RoleAssignment(
        role=role,
        index=detected.rank,
        num_workers=detected.size,
        num_servers=detected.num_servers,
        num_serving=detected.num_servers,
        beside=range(0),
        founds=role == "scheduler" or (detected.launcher != "DMLC" and role == "worker" and detected.rank == 0),
        summary=_summary(detected, detected.size, f"{_counted(detected.num_servers, 'server')} of its own"),
    )


def _count_workers(detected: Detected, num_alone: int) -> int:
    """Return how many ranks are left for workers."""
    if num_alone and detected.rank is None:
        raise UsageError(
            f"servers as ranks:{num_alone} need ranks, and {detected.launcher} gives none; take first:{num_alone}"
        )
    if detected.size <= num_alone:
        raise UsageError(
            f"servers as ranks:{num_alone} leave no worker of {_counted(detected.size, 'rank')}: start more, or take "
            "fewer"
        )
    return detected.size - num_alone


def _where(servers: Servers, num_workers: int) -> str:
    told: list[str] = []
    if servers.beside:
        everywhere = "on each node with workers" if servers.alone else "on each node"
        home = everywhere if servers.home == "node" else "beside rank 0"
        told.append(f"{_counted(servers.beside, 'server')} {home}")
    if servers.alone:
        last = num_workers + servers.alone - 1
        ranks = f"rank {last}" if servers.alone == 1 else f"ranks {num_workers} to {last}"
        told.append(f"{_counted(servers.alone, 'server')} as {ranks}")
    return ", ".join(told)


def _summary(detected: Detected, num_workers: int, servers: str) -> str:
    nodes = f" on {_counted(detected.num_nodes, 'node')}" if detected.counts_nodes else ""
    return f"{detected.launcher}, {_counted(num_workers, 'worker')}{nodes}, {servers}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

"""Which process of a job is what: how many servers there are, and which processes start them or become one."""

import re
from collections.abc import Sequence
from typing import Final, Literal, get_args

import msgspec
from msgspec.structs import replace

from paceline.core.partition import shares_over_hosts
from paceline.errors import UsageError
from paceline.job.machines import Machine
from paceline.launch.rendezvous.detect import Detected, Role

Home = Literal["first", "node"]
DEFAULT: Final = "first:1"
REPLICAS: Final = "+replicas:1"
LAG: Final = re.compile(r"\+lag:([1-9][0-9]{0,3})$")  # clocks by which replicas may lag


class Servers(msgspec.Struct, frozen=True):
    """Where servers are: sidecars of rank 0 or of the first rank of every node, and ranks that serve: the last ones.

    Ranks that serve are counted first. The replicas of a node's servers are sidecars on the next node.
    """

    home: Home
    num_sidecars: int  # of one worker
    num_ranks: int
    has_replicas: bool = False
    replica_lag: int = 0

    @staticmethod
    def parse(text: str) -> "Servers":
        """Read "first:2", "node:1", "ranks:2", or two of these as "node:1+ranks:2"; raises UsageError for other text.

        "node:1+replicas:1" has a replica of each server, too, which with "+lag:2" may lag by two clocks.

        >>> Servers.parse("node:1+ranks:2")
        Servers(home='node', num_sidecars=1, num_ranks=2, has_replicas=False, replica_lag=0)
        """
        counts: dict[str, int] = {}
        lag = LAG.search(text)
        without_lag = text if lag is None else text[: lag.start()]
        body = without_lag.removesuffix(REPLICAS)
        for part in body.split("+"):
            home, _, count = part.partition(":")
            counts[home] = int(count) if count.isdecimal() else 0
        homes = counts.keys() - {"ranks"}
        if len(homes) > 1 or homes - {*get_args(Home)} or 0 in counts.values() or len(counts) <= body.count("+"):
            raise UsageError(
                f"servers is {text!r}, expected first:M (M servers beside rank 0), node:M (M beside the first rank of "
                "every node) or ranks:M (the last M ranks are servers), with M of at least 1, or one of the first two "
                "with the last, such as node:1+ranks:2"
            )
        has_replicas = body != without_lag
        if lag is not None and not has_replicas:
            raise UsageError(
                f"servers is {text!r}: replicas may lag, and there are none. Take node:M{REPLICAS}{lag.group()}, with "
                "M of at least 1, or leave out what follows M"
            )
        if has_replicas and not (homes == {"node"} and "ranks" not in counts):
            raise UsageError(
                f"servers is {text!r}: replicas are for servers on every node. Take node:M{REPLICAS}, with M of at "
                "least 1"
            )
        home = "node" if "node" in homes else "first"
        return Servers(home, counts.get(home, 0), counts.get("ranks", 0), has_replicas, int(lag[1]) if lag else 0)

    @property
    def has_both(self) -> bool:
        """Whether there are some of either kind."""
        return bool(self.num_sidecars and self.num_ranks)

    def shares(self, workers: Sequence[Machine], serving: Sequence[Machine]) -> tuple[float, ...]:
        """Return how much each server holds if only some are on machines of `workers`; none, for equal parts, if not.

        `serving` are the machines of the ranks that serve.
        """
        hosts = dict.fromkeys(workers) if self.home == "node" else workers[:1]
        at = [*serving, *(host for host in hosts for _ in range(self.num_sidecars))]
        return shares_over_hosts(workers, at) if len({host in workers for host in at}) == 2 else ()


class RoleAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """What this process is in its job.

    Attributes:
        index: its number among those of its role; None for the order of arrival.
        num_serving: how many of the servers are ranks of the launcher, and not sidecars of a worker.
        sidecars: the numbers of the servers that it starts; none before it is known on which node it is.
        replicas: the numbers of the servers of which it starts the replicas.
        node: the number of its node, where servers have replicas.
        has_replicas: whether servers have replicas at all.
        replica_lag: clocks by which these may lag.
        is_founder: whether it is the one that sets the job up, and tells the others where they meet.
        summary: the job in half a line.
    """

    role: Role
    index: int | None
    num_workers: int
    num_servers: int
    num_serving: int
    sidecars: range
    is_founder: bool
    summary: str
    replicas: range = range(0)
    node: int = 0
    has_replicas: bool = False
    replica_lag: int = 0


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
    told, as it counts nodes without workers, too.
    """
    if detected.node_rank is not None and not anew:
        return detected
    here, nodes = machines[index], list(dict.fromkeys(machines))
    local_rank = machines[:index].count(here) if detected.local_rank is None or anew else detected.local_rank
    return replace(
        detected, local_rank=local_rank, node_rank=nodes.index(here), num_nodes=len(nodes), counts_nodes=True
    )


def is_founder(detected: Detected) -> bool:
    """Return whether this process sets the job up: the scheduler where there is one, else the first worker."""
    if detected.launcher == "DMLC":
        return detected.role == "scheduler"
    return detected.role in ("worker", None) and detected.rank == 0


def assign_role(detected: Detected, asked: str | None) -> RoleAssignment:
    """Return what this process is, with servers where they were `asked` for; raises UsageError where that cannot be."""
    servers = requested_servers(detected, asked)
    if detected.num_servers:
        return _given_role(detected)
    num_workers = _count_workers(detected, servers.num_ranks)
    everywhere = servers.home == "node"
    serves = servers.num_ranks > 0 and (detected.rank or 0) >= num_workers
    number = detected.local_rank if everywhere and detected.local_rank is not None else detected.rank
    node = detected.node_rank if everywhere else 0
    starts = number == 0 and node is not None and not serves
    start = servers.num_ranks + (node or 0) * servers.num_sidecars
    behind = ((node or 0) - 1) % detected.num_nodes * servers.num_sidecars
    return RoleAssignment(
        role="server" if serves else "worker",
        index=(detected.rank or 0) - num_workers if serves else detected.rank,
        num_workers=num_workers,
        num_servers=servers.num_ranks + servers.num_sidecars * (detected.num_nodes if everywhere else 1),
        num_serving=servers.num_ranks,
        sidecars=range(start, start + servers.num_sidecars) if starts else range(0),
        is_founder=is_founder(detected),
        summary=_summary(detected, num_workers, _where(servers, num_workers)),
        replicas=range(behind, behind + servers.num_sidecars) if starts and servers.has_replicas else range(0),
        node=node or 0,
        has_replicas=servers.has_replicas,
        replica_lag=servers.replica_lag,
    )


def _given_role(detected: Detected) -> RoleAssignment:
    """Return the role that the launcher itself has given."""
    role = detected.role or "worker"
    return RoleAssignment(
        role=role,
        index=detected.rank,
        num_workers=detected.size,
        num_servers=detected.num_servers,
        num_serving=detected.num_servers,
        sidecars=range(0),
        is_founder=is_founder(detected),
        summary=_summary(detected, detected.size, f"{_counted(detected.num_servers, 'server')} of its own"),
    )


def _count_workers(detected: Detected, num_ranks: int) -> int:
    """Return how many ranks are left for workers."""
    if num_ranks and detected.rank is None:
        raise UsageError(
            f"servers as ranks:{num_ranks} need ranks, and {detected.launcher} gives none; take first:{num_ranks}"
        )
    if detected.size <= num_ranks:
        raise UsageError(
            f"servers as ranks:{num_ranks} leave no worker of {_counted(detected.size, 'rank')}: start more, or take "
            "fewer"
        )
    return detected.size - num_ranks


def _where(servers: Servers, num_workers: int) -> str:
    told: list[str] = []
    if servers.num_sidecars:
        everywhere = "on each node with workers" if servers.num_ranks else "on each node"
        home = everywhere if servers.home == "node" else "beside rank 0"
        told.append(f"{_counted(servers.num_sidecars, 'server')} {home}")
        if servers.has_replicas:
            lag = f" that may lag by {_counted(servers.replica_lag, 'clock')}" if servers.replica_lag else ""
            told.append(f"each with a replica on the next{lag}")
    if servers.num_ranks:
        last = num_workers + servers.num_ranks - 1
        ranks = f"rank {last}" if servers.num_ranks == 1 else f"ranks {num_workers} to {last}"
        told.append(f"{_counted(servers.num_ranks, 'server')} as {ranks}")
    return ", ".join(told)


def _summary(detected: Detected, num_workers: int, servers: str) -> str:
    nodes = f" on {_counted(detected.num_nodes, 'node')}" if detected.counts_nodes else ""
    return f"{detected.launcher}, {_counted(num_workers, 'worker')}{nodes}, {servers}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

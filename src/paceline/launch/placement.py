"""Which process of a job is what: how many servers there are, and who starts them or becomes one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, cast, get_args

from paceline.errors import UsageError
from paceline.launch.detect import Detected, Role
from paceline.launch.machines import Machine

Home = Literal["first", "node", "ranks"]
DEFAULT: Final = "first:1"


@dataclass(frozen=True, slots=True)
class Servers:
    """Where servers are: so many beside rank 0, beside the first rank of every node, or instead of the last ranks."""

    home: Home
    count: int

    @staticmethod
    def parse(text: str) -> "Servers":
        """Read "first:2", "node:1" or "ranks:2"; raises UsageError for anything else.

        >>> Servers.parse("ranks:2")
        Servers(home='ranks', count=2)
        """
        home, _, count = text.partition(":")
        if home not in get_args(Home) or not count.isdecimal() or int(count) == 0:
            raise UsageError(
                f"servers is {text!r}, expected first:M (M servers beside rank 0), node:M (M beside the first rank of "
                "every node) or ranks:M (the last M ranks are servers), with M of at least 1"
            )
        return Servers(cast(Home, home), int(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What this process is in its job.

    Attributes:
        index: its number among those of its role; None where whoever comes first is first.
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


def locate(detected: Detected, machines: Sequence[Machine], index: int) -> Detected:
    """Add what the launcher has not told: each machine is a node, in the order of the workers on them.

    `machines` says where each worker is, and this process is the worker `index`.
    """
    if detected.node_rank is not None:
        return detected
    here, nodes = machines[index], list(dict.fromkeys(machines))
    local_rank = machines[:index].count(here) if detected.local_rank is None else detected.local_rank
    return replace(
        detected, local_rank=local_rank, node_rank=nodes.index(here), num_nodes=len(nodes), counts_nodes=True
    )


def take_seat(detected: Detected, asked: str | None) -> Seat:
    """Return what this process is, with servers where they were `asked` for; raises UsageError where that cannot be."""
    if detected.num_servers:
        return _given_seat(detected, asked)
    servers = Servers.parse(asked or DEFAULT)
    if servers.home == "ranks":
        return _seat_among_ranks(detected, servers.count)
    everywhere = servers.home == "node"
    number = detected.local_rank if everywhere and detected.local_rank is not None else detected.rank
    node = detected.node_rank if everywhere else 0
    starts = number == 0 and node is not None
    start = (node or 0) * servers.count
    where = "on each node" if everywhere else "beside rank 0"
    return Seat(
        role="worker",
        index=detected.rank,
        num_workers=detected.size,
        num_servers=servers.count * (detected.num_nodes if everywhere else 1),
        num_serving=0,
        beside=range(start, start + servers.count) if starts else range(0),
        founds=detected.rank == 0,
        summary=_summary(detected, detected.size, f"{_counted(servers.count, 'server')} {where}"),
    )


def _given_seat(detected: Detected, asked: str | None) -> Seat:
    """Return the seat that the launcher itself has given: the scheduler sets the job up where there is one."""
    if asked is not None:
        raise UsageError(
            f"servers are to be at {asked!r}, but {detected.launcher} has named {detected.num_servers} already: leave "
            "out one of the two"
        )
    role = detected.role or "worker"
    return Seat(
        role=role,
        index=detected.rank,
        num_workers=detected.size,
        num_servers=detected.num_servers,
        num_serving=detected.num_servers,
        beside=range(0),
        founds=role == "scheduler" or (detected.launcher != "DMLC" and role == "worker" and detected.rank == 0),
        summary=_summary(detected, detected.size, f"{_counted(detected.num_servers, 'server')} of its own"),
    )


def _seat_among_ranks(detected: Detected, count: int) -> Seat:
    rank, num_workers = detected.rank, detected.size - count
    if rank is None:
        raise UsageError(f"servers as ranks:{count} need ranks, and {detected.launcher} gives none; take first:{count}")
    if num_workers < 1:
        raise UsageError(
            f"servers as ranks:{count} leave no worker of {_counted(detected.size, 'rank')}: start more, or take fewer"
        )
    serves = rank >= num_workers
    ranks = f"rank {num_workers}" if count == 1 else f"ranks {num_workers} to {detected.size - 1}"
    return Seat(
        role="server" if serves else "worker",
        index=rank - num_workers if serves else rank,
        num_workers=num_workers,
        num_servers=count,
        num_serving=count,
        beside=range(0),
        founds=rank == 0,
        summary=_summary(detected, num_workers, f"{_counted(count, 'server')} as {ranks}"),
    )


def _summary(detected: Detected, num_workers: int, servers: str) -> str:
    nodes = f" on {_counted(detected.num_nodes, 'node')}" if detected.counts_nodes else ""
    return f"{detected.launcher}, {_counted(num_workers, 'worker')}{nodes}, {servers}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

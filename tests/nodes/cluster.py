"""Real servers and workers as threads of the test, over any carrier, with faults if wanted."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.messages import Sender
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import Holder, tls_settings
from paceline.observe.trace import Trace
from paceline.server.node import ServerNode
from paceline.server.served_table import TableHost
from paceline.server.tables import ServedTables
from paceline.transport import (
    Credentials,
    FaultCounts,
    FaultPlan,
    FaultyTransport,
    MemoryTransport,
    ShmTransport,
    TcpTransport,
    Transport,
)
from paceline.update.dtypes import torch_dtype
from paceline.update.named_rules import Add
from paceline.update.rules import RuleSpec
from paceline.update.table import Scale, Segment, TableSpec
from paceline.wire.requests import AwaitValues, Initialise
from paceline.worker.dense import DenseClient, ReadOutcome
from paceline.worker.node import WorkerNode
from paceline.worker.waits import WorkerOptions

CARRIERS = ("memory", "tcp", "shm")  # and "tls"
CREDENTIALS = Credentials(bytes(range(32)), "nodes")
RETRY_S = 0.05
LEASE_S = 5.0
JOIN_S = 150.0  # by then every thread of a test has ended, or the test fails

Work = Callable[[WorkerNode], None]


@dataclass
class Cluster:
    """Servers that run, and what it takes to join them.

    Args:
        reconnect_s: how long workers try to reconnect.
    """

    transport: Transport
    servers: list[ServerNode]
    addresses: tuple[str, ...]
    lease_s: float
    shares: tuple[float, ...] = ()
    retry_s: float = RETRY_S
    reconnect_s: float = LEASE_S
    errors: list[BaseException] = field(default_factory=list)

    def worker(self, rank: int, incarnation: int = 0, wait_timeout_s: float = 30.0) -> WorkerNode:
        settings = WorkerSettings(
            Sender(1, rank, incarnation), len(self.addresses), retry_s=self.retry_s, shares=self.shares
        )
        return WorkerNode(
            settings,
            self.transport,
            self.addresses,
            WorkerOptions(wait_timeout_s, self.reconnect_s, checks_memory=True),
        )

    @contextmanager
    def joined(self, rank: int, incarnation: int = 0, wait_timeout_s: float = 30.0) -> Iterator[WorkerNode]:
        node = self.worker(rank, incarnation, wait_timeout_s)
        try:
            node.join()
            yield node
        finally:
            node.close()

    def run(self, num_workers: int, work: Work) -> None:
        """Run `work` as each of the workers at once, which then leave; raises what went wrong first."""

        def live(rank: int) -> None:
            try:
                with self.joined(rank) as node:
                    work(node)
                    node.leave()
            except BaseException as error:
                self.errors.append(error)

        run_threads([lambda rank=rank: live(rank) for rank in range(num_workers)])
        if self.errors:
            raise self.errors[0]

    def values(self, table: str) -> Tensor:
        """The values of a table as they lie on the servers; only while they do not change."""
        return torch.cat([server._tables[table].shard.values for server in self.servers])

    def num_waiting(self) -> int:
        """How many pushes the servers keep the tensors of."""
        return sum(table.num_waiting for server in self.servers for table in server._tables.values())


def run_threads(targets: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=JOIN_S)
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"


@contextmanager
def cluster(
    kind: str,
    directory: Path,
    *,
    num_workers: int = 0,
    num_servers: int = 2,
    plan: FaultPlan | None = None,
    seed: int = 0,
    lease_s: float = LEASE_S,
    shares: tuple[float, ...] = (),
    retry_s: float = RETRY_S,
    traces: Sequence[Trace] = (),
) -> Iterator[Cluster]:
    """Run servers that expect these workers, with a trace for each if so; everything has ended afterwards.

    Where a plan has faults nothing is given up for them: on a busy machine a few broken connections take any time.
    """
    transport, reconnect_s = make_transport(kind, directory), LEASE_S
    if plan is not None:
        transport = FaultyTransport(transport, plan, seed)
        lease_s = reconnect_s = JOIN_S
    listeners = [transport.listen(address_of(kind, directory, rank)) for rank in range(num_servers)]
    addresses = tuple(listener.address for listener in listeners)
    servers = [
        ServerNode(
            ServerSettings(
                rank,
                num_servers,
                workers=tuple(range(num_workers)),
                lease_s=lease_s,
                retry_s=retry_s,
                shares=shares,
            ),
            listener,
            transport,
            lambda: addresses,
            traces[rank] if traces else Trace(None),
            checks_memory=True,
        )
        for rank, listener in enumerate(listeners)
    ]
    threads = [threading.Thread(target=server.run, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield Cluster(transport, servers, addresses, lease_s, shares=shares, retry_s=retry_s, reconnect_s=reconnect_s)
    finally:
        for server in servers:
            server.stop()
        for thread in threads:
            thread.join(timeout=JOIN_S)
        assert not any(thread.is_alive() for thread in threads), "a server hangs"


def make_transport(kind: str, directory: Path) -> Transport:
    if kind == "memory":
        return MemoryTransport()
    if kind == "tcp":
        return TcpTransport(CREDENTIALS)
    if kind == "tls":
        Authority.make(CREDENTIALS.job).issue(directory, Holder("any"))
        return TcpTransport(CREDENTIALS, tls=tls_settings(directory, Holder("any")))
    os.chmod(directory, 0o700)
    return ShmTransport("nodes")


def address_of(kind: str, directory: Path, rank: int) -> str:
    return {
        "memory": f"memory://server-{rank}",
        "tcp": "tcp://127.0.0.1:0",
        "tls": "tcp://127.0.0.1:0",
        "shm": f"shm://{directory}/server-{rank}.sock",
    }[kind]


def counts_of(transport: Transport) -> FaultCounts:
    assert isinstance(transport, FaultyTransport)
    return transport.counts


def hosted_tables(**options: Any) -> ServedTables:
    """The tables of a server that is not there; `options`: of their host."""
    return ServedTables(TableHost(ServerSettings(0, 1), options.pop("transport", MemoryTransport()), **options))


def table(name: str, numel: int, consistency: str, *, rule: RuleSpec | None = None, scale: Scale = "sum") -> TableSpec:
    return TableSpec(name, (Segment(name, (numel,)),), "float32", rule or Add(), consistency, scale, "reject")


def open_table(node: WorkerNode, spec: TableSpec, first: Tensor | None = None) -> None:
    """Open a table as a session does: worker 0 gives the first values, all wait for them."""
    cache = DenseClient.open(node.context, spec).cache
    if node.settings.sender.worker == 0:
        values = torch.zeros(spec.numel, dtype=torch_dtype(spec.dtype)) if first is None else first
        parts = [memoryview(cache.part(values, span.server).numpy()).cast("B") for span in cache.spans]
        node.rpc.call_all(lambda number: Initialise(number, spec.name), "initialise", parts)
    node.rpc.call_all(lambda number: AwaitValues(number, spec.name), "first values")


def read_values(node: WorkerNode, name: str, out: Tensor, *, refresh: bool = True) -> ReadOutcome:
    """Copy the values of a table into a tensor once they are fresh enough."""
    return node.client(name).read(lambda cache: cache.read_into(out), refresh=refresh)

"""A server is killed at any point, again and again: another goes on in its place, and nothing is lost or doubled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nodes.cluster import CARRIERS, Cluster, address_of, make_transport, open_table, read_values, table
from tests.nodes.test_faults import NUM_CLOCKS, NUM_WORKERS, Ledger
from torch import Tensor

from paceline.core.messages import PushId
from paceline.core.settings import ServerSettings
from paceline.observe.trace import Trace
from paceline.server.node import ServerNode
from paceline.transport.base import Transport
from paceline.transport.lasting_memory import LastingMemory, MemoryHolder
from paceline.update.named_rules import SGD
from paceline.wire.requests import Barrier
from paceline.worker.lock import WorkerOptions
from paceline.worker.node import WorkerNode

PATIENCE_S = 60.0
POLICIES = ("bsp", "ssp:2", "essp:2", "asynchronous", "backup:1", "bound=0,visible=on_clock,deliver=on_clock")


class Killed(BaseException):
    """Ends the thread of a server as SIGKILL ends a process, but that its connections are closed politely."""


@dataclass
class Fate:
    """Kills a server at every so many points: before and after it writes something down, and before each effect."""

    stride: int
    num_points: int = 0
    num_kills: int = 0

    def pass_point(self) -> None:
        self.num_points += 1
        if self.stride and self.num_points % self.stride == 0:
            self.num_kills += 1
            raise Killed


class MortalServer(ServerNode):
    fate: Fate

    def _write_down(self, written: Any, now: float) -> None:
        self.fate.pass_point()
        super()._write_down(written, now)
        self.fate.pass_point()

    def _perform(self, effects: list[Any]) -> set[PushId]:
        held = set[PushId]()
        for effect in effects:
            self.fate.pass_point()
            held |= super()._perform([effect])
        return held


@dataclass
class Seat:
    """The place of one server, whose processes come and go."""

    rank: int
    num_servers: int
    transport: Transport
    address: str
    addresses: tuple[str, ...]
    fate: Fate
    holder: MemoryHolder
    num_workers: int = NUM_WORKERS
    server: ServerNode | None = None
    is_over: bool = False
    errors: list[BaseException] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self) -> None:
        while not self.is_over:
            settings = ServerSettings(
                self.rank, self.num_servers, workers=tuple(range(self.num_workers)), lease_s=PATIENCE_S, retry_s=0.05
            )
            server = MortalServer(
                settings,
                self.transport.listen(self.address),
                self.transport,
                lambda: self.addresses,
                Trace(None),
                checks_memory=True,
                memory=LastingMemory.connect(self.holder.theirs),
            )
            server.fate = self.fate
            with self._changed:
                self.server = server
                if self.is_over:
                    server.stop()
            try:
                server.run()
            except Killed:
                continue
            except BaseException as error:
                self.errors.append(error)
                raise

    def stop(self) -> None:
        with self._changed:
            self.is_over = True
            if self.server is not None:
                self.server.stop()


@contextmanager
def mortal_cluster(kind: str, directory: Path, strides: tuple[int, ...]) -> Iterator[tuple[Cluster, list[Seat]]]:
    """Run a server for each stride, which is killed at every so many points; 0: at none."""
    transport = make_transport(kind, directory)
    listeners = [transport.listen(address_of(kind, directory, rank)) for rank in range(len(strides))]
    addresses = tuple(listener.address for listener in listeners)
    for listener in listeners:
        listener.close()
    with ExitStack() as stack:
        seats = [
            Seat(
                rank,
                len(strides),
                transport,
                addresses[rank],
                addresses,
                Fate(stride),
                stack.enter_context(MemoryHolder()),
            )
            for rank, stride in enumerate(strides)
        ]
        threads = [threading.Thread(target=seat.run, daemon=True) for seat in seats]
        for seat, thread in zip(seats, threads, strict=True):
            seat.holder.start()
            thread.start()
        try:
            yield MortalCluster(transport, [], addresses, PATIENCE_S), seats
        finally:
            for seat in seats:
                seat.fate.stride = 0
                seat.stop()
            for thread in threads:
                thread.join(timeout=PATIENCE_S)
            assert not any(thread.is_alive() for thread in threads), "a server hangs"
            assert not any(seat.errors for seat in seats), [seat.errors for seat in seats]


class MortalCluster(Cluster):
    def worker(self, rank: int, incarnation: int = 0, wait_timeout_s: float = PATIENCE_S) -> WorkerNode:
        node = super().worker(rank, incarnation, wait_timeout_s)
        options = WorkerOptions(wait_timeout_s, reconnect_timeout_s=PATIENCE_S, checks_memory=True)
        return WorkerNode(node.settings, self.transport, self.addresses, options)


@dataclass
class Trained:
    """A ledger, and beside it a table with momentum whose values depend on every push and its order."""

    ledger: Ledger
    values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def work(self, node: WorkerNode) -> None:
        if self.ledger.consistency.backups:  # a worker that is left behind jumps, and would miss a barrier
            self.ledger.work(node)
            return
        spec = table("model", 257, str(self.ledger.consistency), rule=SGD(lr=0.1, momentum=0.9))
        open_table(node, spec, torch.linspace(-1, 1, 257))
        rank, seen = node.settings.sender.worker, torch.empty(257)
        rng = torch.Generator().manual_seed(rank)
        for _ in range(3):
            read_values(node, "model", seen, refresh=True)
            node.client("model").push(seen * 0.5 + torch.randn(257, generator=rng), count=1.0)
            node.tick()
        node.rpc.call_all(lambda number: Barrier(number, "begun"), "all workers to have begun")
        self.ledger.work(node)
        node.settle()
        node.rpc.call_all(lambda number: Barrier(number, "done"), "all workers to be done")
        self.values[rank] = torch.empty(257)
        read_values(node, "model", self.values[rank], refresh=True)


def trained(kind: str, policy: str, directory: Path, strides: tuple[int, ...]) -> tuple[Trained, list[Seat]]:
    directory.mkdir(mode=0o700)
    job = Trained(Ledger(policy))
    with mortal_cluster(kind, directory, strides) as (servers, seats):
        servers.run(NUM_WORKERS, job.work)
    return job, seats


def check(kind: str, policy: str, directory: Path, strides: tuple[int, ...]) -> None:
    """Kill at every so many points, and compare with what is promised."""
    job, seats = trained(kind, policy, directory / "killed", strides)
    assert all(seat.fate.num_kills > 1 for seat in seats)
    outcomes = job.ledger.expected()
    if not job.ledger.consistency.backups:
        assert outcomes.sum() == NUM_WORKERS * NUM_CLOCKS
    if policy == "bsp":
        undisturbed, _ = trained(kind, policy, directory / "undisturbed", (0,) * len(strides))
        for rank in range(NUM_WORKERS):
            assert torch.equal(job.values[rank], undisturbed.values[rank])


@pytest.mark.parametrize(
    ("kind", "policy"), [*(("shm", policy) for policy in POLICIES if policy != "bsp"), ("tcp", "bsp")]
)
def test_nothing_is_lost_or_doubled_wherever_servers_are_killed(kind: str, policy: str, tmp_path: Path) -> None:
    check(kind, policy, tmp_path, (83, 149))


@pytest.mark.campaign
@pytest.mark.parametrize("strides", [(37,), (41, 43), (47, 101), (61,), (53, 59, 67)])
@pytest.mark.parametrize("kind", CARRIERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_lost_or_doubled_however_often_servers_are_killed(
    kind: str, policy: str, strides: tuple[int, ...], tmp_path: Path
) -> None:
    check(kind, policy, tmp_path, strides)

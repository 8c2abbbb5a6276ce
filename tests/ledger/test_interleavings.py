"""The ledger under many orders in which the threads of nodes may run: each order by its seed, the same every time."""

from __future__ import annotations

from contextlib import suppress

import pytest
from tests.ledger.tables import KINDS, NUM_WORKERS, Cell, Counting, Ledger
from tests.nodes.cluster import Cluster
from tests.nodes.stage import PATIENCE_S, Stage, StagedTransport, staged

from paceline.core.messages import Sender
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.server.node import ServerNode
from paceline.transport.base import Frame
from paceline.transport.buffer_pool import Buffer, BufferPool
from paceline.wire.messages import PushFrame
from paceline.worker.node import WorkerNode
from paceline.worker.waits import WorkerOptions

NEVER_S = 1e6
POLICIES = ("asynchronous", "ssp:1", "essp:1", "bsp", "bound=1,visible=on_clock,deliver=on_clock")


def play(stage: Stage, cell: Cell) -> None:
    transport = StagedTransport(stage, maps_memory=cell.carrier == "maps")
    addresses = tuple(f"server-{rank}" for rank in range(cell.num_servers))
    counting = [Counting() for _ in addresses]
    servers = [
        ServerNode(
            ServerSettings(rank, cell.num_servers, workers=tuple(range(NUM_WORKERS)), retry_s=PATIENCE_S),
            transport.listen(address),
            transport,
            lambda: addresses,
            trace,
            checks_memory=True,
        )
        for rank, (address, trace) in enumerate(zip(addresses, counting, strict=True))
    ]
    ledger = Ledger(cell)
    left: list[int] = []

    def live(rank: int) -> None:
        settings = WorkerSettings(Sender(1, rank, 0), cell.num_servers, retry_s=NEVER_S)
        node = WorkerNode(settings, transport, addresses, WorkerOptions(checks_memory=True))
        try:
            node.join()
            ledger.work(node)
            node.leave()
        finally:
            node.close()
            left.append(rank)

    def end() -> None:
        stage.pause("the workers", lambda: len(left) == NUM_WORKERS)
        if not stage.errors:
            ledger.check(Cluster(transport, servers, addresses, NEVER_S), counting)  # type: ignore[arg-type]
        for server in servers:
            server.stop()

    for rank, server in enumerate(servers):
        stage.spawn(f"server {rank}", server.run)
    for rank in range(NUM_WORKERS):
        stage.spawn(f"worker {rank}", lambda rank=rank: live(rank))
    stage.spawn("end", end)
    stage.play()


@pytest.mark.parametrize("carrier", ["copies", "maps"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_order_of_threads_counts_each_push_once(policy: str, carrier: str) -> None:
    for seed, (kind, num_servers) in enumerate([("dense", 1), ("dense", 2), ("views", 1), ("kept rows", 1)]):
        with staged(seed) as stage:
            play(stage, Cell(carrier, policy, kind, 640, num_servers, 1))
            assert stage.num_steps > 100


def give_back_by_memory(pool: BufferPool, buffer: Buffer) -> None:
    """Take memory back from any caller, as long as it has an owner."""
    owners = [owner for owner in pool._lent if owner.whole is buffer.whole]
    for owner in owners:
        pool._lent.discard(owner)
        pool._pieces.free(owner.whole)


def test_memory_that_is_given_back_twice_and_to_two_readers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take_in = ServerNode._on_push

    def give_back_again(node: ServerNode, message: PushFrame, frame: Frame) -> None:
        take_in(node, message, frame)
        frame.release()

    monkeypatch.setattr(BufferPool, "reclaim", give_back_by_memory)
    monkeypatch.setattr(ServerNode, "_on_push", give_back_again)
    found = 0
    for seed in range(20):
        with staged(seed) as stage, suppress(AssertionError):
            play(stage, Cell("copies", "asynchronous", "dense", 640, 1, 1))
            continue
        found += 1
    assert found, "no order shows it"


@pytest.mark.parametrize("carrier", ["copies", "maps"])
def test_a_seed_names_an_order(carrier: str) -> None:
    def steps(seed: int) -> int:
        with staged(seed) as stage:
            play(stage, Cell(carrier, "ssp:1", "dense", 640, 1, 1))
        return stage.num_steps

    assert steps(7) == steps(7)
    assert len({steps(seed) for seed in range(5)}) > 1


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("carrier", ["copies", "maps"])
@pytest.mark.parametrize("policy", [*POLICIES, "backup:1"])
def test_many_orders_of_threads_count_each_push_once(policy: str, carrier: str, kind: str) -> None:
    for seed in range(300):
        with staged(seed) as stage:
            play(stage, Cell(carrier, policy, kind, 640, 1 + seed % 2, 1 + seed // 2 % 2))

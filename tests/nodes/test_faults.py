"""Whatever the network does to frames, every push counts once and every read is as fresh as promised."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from tests.nodes.cluster import CARRIERS, Cluster, cluster, counts_of, open_table, read_values, table
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.transport import FaultPlan
from paceline.update.named_rules import SGD
from paceline.worker.node import WorkerNode
from paceline.worker.pushes import PushOutcome

NUM_WORKERS = 3
NUM_CLOCKS = 16
FAULTS = FaultPlan(drop=0.03, duplicate=0.05, delay=0.05, reorder=0.05, cut=0.03, delay_s=(0.001, 0.005))
POLICIES = ("bsp", "ssp:2", "essp:2", "asynchronous", "backup:1")


class Ledger:
    """A table with a slot for each (worker, clock): a lost push shows as 0 there, a push applied twice as 2."""

    def __init__(self, consistency: str) -> None:
        self.consistency = Consistency.parse(consistency)
        self.spec = table("ledger", NUM_WORKERS * NUM_CLOCKS, consistency)
        self.outcomes: dict[int, Future[PushOutcome]] = {}
        self.seen: dict[int, Tensor] = {}  # by worker, the last values that it has read

    def work(self, node: WorkerNode) -> None:
        """Push into the slot of each clock, and check every read."""
        open_table(node, self.spec)
        values = torch.empty(self.spec.numel)
        done = 0
        while done < NUM_CLOCKS:
            slot = node.settings.sender.worker * NUM_CLOCKS + done
            self.outcomes[slot] = node.client("ledger").push(one_hot(slot, self.spec.numel), count=1.0)
            done += 1
            node.tick()
            read_values(node, "ledger", values, refresh=done % 2 == 0)
            self.check(node, values, done)

    def check(self, node: WorkerNode, values: Tensor, done: int) -> None:
        rows = values.view(NUM_WORKERS, NUM_CLOCKS)
        assert ((rows == 0) | (rows == 1)).all(), f"a push counts twice:\n{rows}"
        if self.consistency.backups:
            return
        rank = node.settings.sender.worker
        own, before = rows[rank], self.seen.get(rank, torch.zeros_like(rows))
        assert (rows >= before).all(), f"a read at clock {done} lacks what one before had:\n{before}\n{rows}"
        self.seen[rank] = rows.clone()
        if self.consistency.visible == "on_clock":
            assert own.sum() == done
            assert (rows[:, :done] == 1).all()
            assert (rows[:, done:] == 0).all(), f"a read at clock {done} shows later updates:\n{rows}"
            return
        assert own.sum() == done, f"worker misses its own push at clock {done}:\n{rows}"
        if self.consistency.bound is not None:
            assert (rows[:, : max(0, done - self.consistency.bound)] == 1).all(), f"too stale at clock {done}:\n{rows}"

    def expected(self) -> Tensor:
        """1 where a worker was told that its push is applied, 0 where it was told that it is not."""
        outcomes = [self.outcomes[slot].result(timeout=0) for slot in range(self.spec.numel)]
        return torch.tensor([float(outcome.applied) for outcome in outcomes])


def one_hot(slot: int, numel: int) -> Tensor:
    tensor = torch.zeros(numel)
    tensor[slot] = 1.0
    return tensor


def assert_faults_happened(servers: Cluster) -> None:
    counts = counts_of(servers.transport)
    assert min(counts.dropped, counts.duplicated, counts.delayed, counts.reordered, counts.cut) > 0, counts


@pytest.mark.parametrize("kind", CARRIERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_push_counts_once_whatever_happens_to_frames(kind: str, policy: str, tmp_path: Path) -> None:
    ledger = Ledger(policy)
    with cluster(kind, tmp_path, num_workers=NUM_WORKERS, plan=FAULTS, seed=len(kind + policy)) as servers:
        servers.run(NUM_WORKERS, ledger.work)

        assert torch.equal(servers.values("ledger"), ledger.expected())
        assert policy == "backup:1" or ledger.expected().all()
        assert servers.num_waiting() == 0, "servers keep tensors of settled pushes"
        assert_faults_happened(servers)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", CARRIERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_every_push_counts_once_for_many_seeds(kind: str, policy: str, seed: int, tmp_path: Path) -> None:
    ledger = Ledger(policy)
    with cluster(kind, tmp_path, num_workers=NUM_WORKERS, plan=FAULTS, seed=seed) as servers:
        servers.run(NUM_WORKERS, ledger.work)

        assert torch.equal(servers.values("ledger"), ledger.expected())


@pytest.mark.parametrize("kind", CARRIERS)
def test_under_bsp_faults_do_not_show_in_a_single_bit(kind: str, tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=NUM_WORKERS) as servers:
        servers.run(NUM_WORKERS, descend)
        undisturbed = servers.values("model")

    with cluster(kind, tmp_path, num_workers=NUM_WORKERS, plan=FAULTS, seed=7) as servers:
        servers.run(NUM_WORKERS, descend)

        assert servers.values("model").numpy().tobytes() == undisturbed.numpy().tobytes()
        assert_faults_happened(servers)


def descend(node: WorkerNode) -> None:
    """Momentum SGD on a loss of each worker's own: any other order or set of pushes would change the last bits."""
    spec = table("model", 1001, "bsp", rule=SGD(lr=0.1, momentum=0.9), scale="mean")
    target = torch.randn(spec.numel, generator=torch.Generator().manual_seed(node.settings.sender.worker))
    open_table(node, spec, torch.ones(spec.numel))
    values = torch.empty(spec.numel)
    for _ in range(NUM_CLOCKS):
        read_values(node, "model", values)
        node.client("model").push((values - target) * values.cos(), count=1.0)
        node.tick()

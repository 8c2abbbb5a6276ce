"""Whatever a carrier does to frames: pushes of rows count once, and reads are as fresh as promised."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.nodes.cluster import CARRIERS, cluster, counts_of
from tests.worker.rows.tables import open_rows, rows_of, stored
from tests.worker.rows.truth import Truth
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.transport import FaultPlan
from paceline.update.filters import KeyCache
from paceline.worker.node import WorkerNode
from paceline.worker.rows.state import CacheOptions

NUM_WORKERS, NUM_CLOCKS = 2, 12
ALL_FAULTS = FaultPlan(drop=0.02, duplicate=0.04, delay=0.04, reorder=0.04, cut=0.03, delay_s=(0.001, 0.004))
ONLY_CUTS = FaultPlan(cut=0.05)
IDS = torch.arange(8) - 3
POLICIES = ("bsp", "ssp:1", "essp:1")


def train(truth: Truth, spec_options: CacheOptions, own_writes: bool) -> Callable[[WorkerNode], None]:
    """Push the mark of each clock, and check every read. Workers share the truth, and add to it before they push."""
    spec = rows_of(consistency=str(truth.consistency), width=NUM_WORKERS, filters=(KeyCache(max_lists=2),))

    def work(node: WorkerNode) -> None:
        rank = node.settings.sender.worker
        table = open_rows(node, spec, spec_options)
        for clock in range(NUM_CLOCKS):
            ids, marks = truth.rows_for(rank, clock, IDS[(clock + rank) % 3 :: 3].tolist())
            table.push(ids, marks)
            node.tick()
            needs = truth.consistency.needs(clock + 1)
            reading = node.client("r").start_read(IDS, needs, refresh=clock % 2 == 0)
            rows, clocks = node.client("r").wait_read(reading)
            truth.check(rank, needs, clock + 1, IDS, rows, clocks, own_writes=own_writes)

    return work


def final(truth: Truth) -> Tensor:
    return torch.tensor([truth.final(row) for row in IDS.tolist()], dtype=torch.float64)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", CARRIERS)
def test_pushes_count_once_and_no_read_is_stale(kind: str, policy: str, tmp_path: Path) -> None:
    truth = Truth(Consistency.parse(policy), NUM_WORKERS)
    with cluster(kind, tmp_path, num_workers=NUM_WORKERS, plan=ALL_FAULTS, seed=len(kind + policy)) as servers:
        servers.run(NUM_WORKERS, train(truth, CacheOptions(keep=True), own_writes=True))
        assert torch.equal(stored(servers, IDS), final(truth))
        counts = counts_of(servers.transport)
        assert min(counts.dropped, counts.duplicated, counts.delayed, counts.reordered) > 0, counts


def test_without_a_cache_own_pushes_are_read_though_connections_are_cut(tmp_path: Path) -> None:
    """What a worker says to a server comes in order, over a new connection too."""
    truth = Truth(Consistency.parse("asynchronous"), NUM_WORKERS)
    with cluster("tcp", tmp_path, num_workers=NUM_WORKERS, plan=ONLY_CUTS, seed=3) as servers:
        servers.run(NUM_WORKERS, train(truth, CacheOptions(), own_writes=True))
        assert torch.equal(stored(servers, IDS), final(truth))
        assert counts_of(servers.transport).cut > 0


@pytest.mark.campaign
@pytest.mark.parametrize("policy", [*POLICIES, "ssp:0", "essp:0", "asynchronous"])
@pytest.mark.parametrize("kind", CARRIERS)
@pytest.mark.parametrize("seed", range(6))
def test_pushes_count_once_and_no_read_is_stale_for_many_seeds(
    kind: str, policy: str, seed: int, tmp_path: Path
) -> None:
    truth = Truth(Consistency.parse(policy), NUM_WORKERS)
    with cluster(kind, tmp_path, num_workers=NUM_WORKERS, plan=ALL_FAULTS, seed=seed) as servers:
        servers.run(NUM_WORKERS, train(truth, CacheOptions(keep=True, max_rows=5 * (seed % 2)), own_writes=True))
        assert torch.equal(stored(servers, IDS), final(truth))

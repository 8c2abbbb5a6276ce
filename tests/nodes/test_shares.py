"""Servers that hold unequal shares: each holds its own, also none, and what is computed does not change."""

from pathlib import Path

import pytest
import torch
from tests.nodes.cluster import cluster, open_table, read_values, table
from torch import Tensor

from paceline.worker.node import WorkerNode

NUMEL = 6400
CLOCKS = 3


def train(shares: tuple[float, ...], folder: Path) -> tuple[Tensor, list[int]]:
    """Have two workers push some gradients to three servers; return the values, and how many each server holds."""

    def work(node: WorkerNode) -> None:
        open_table(node, table("w", NUMEL, "bsp"))
        draws = torch.Generator().manual_seed(node.settings.sender.worker)
        for _ in range(CLOCKS):
            node.client("w").push(torch.randn(NUMEL, generator=draws), count=1.0)
            node.tick()
            read_values(node, "w", torch.empty(NUMEL))

    with cluster("tcp", folder, num_workers=2, num_servers=3, shares=shares) as servers:
        servers.run(2, work)
        return servers.values("w"), [len(server._tables["w"].shard.values) for server in servers.servers]


@pytest.mark.parametrize(
    ("shares", "lengths"),
    [((3.0, 1.0, 1.0), [3840, 1280, 1280]), ((0.0, 0.5, 0.5), [0, 3200, 3200]), ((1.0, 0.0, 0.0), [6400, 0, 0])],
)
def test_servers_hold_their_shares_and_the_values_are_those_of_equal_ones(
    shares: tuple[float, ...], lengths: list[int], tmp_path: Path
) -> None:
    values, held = train(shares, tmp_path / "unequal")
    assert held == lengths
    assert torch.equal(values, train((), tmp_path / "equal")[0])

"""Pushes through filters that servers refuse: what earlier ones kept back arrives all the same."""

from __future__ import annotations

import random

import pytest
import torch
from tests.update.filters.filtering import rest
from tests.worker.rows.tables import open_rows, rows_of
from tests.worker.rows.world import World

import paceline
from paceline.update.filters import Cast, FilterSpec, Int8, TopK
from paceline.update.named_rules import SGD
from paceline.worker.rows import client
from paceline.worker.rows.table import RowTable

IDS = torch.arange(40)


def values(seed: int) -> torch.Tensor:
    return torch.randn(40, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def places_of(world: World) -> list[torch.Tensor]:
    """Return the positions in IDS of the rows of each server."""
    order, counts = world.servers[0]._tables.host.ops.split(IDS, 2)
    return list(order.split(counts))


def stored(world: World) -> torch.Tensor:
    """Return all rows as they lie on the two servers."""
    out = torch.zeros(40, 2, dtype=torch.float64)
    for server, places in zip(world.servers, places_of(world), strict=True):
        out[places] = server._tables["r"].store.read(IDS[places])
    return out


def kept(table: RowTable) -> torch.Tensor:
    out = torch.zeros(40, 2, dtype=torch.float64)
    ids, rows = rest(table.client.state.pipeline)
    out[ids] = rows
    return out


@pytest.mark.parametrize("is_flush", [False, True])
@pytest.mark.parametrize("consistency", ["ssp:9", "bsp"])
@pytest.mark.parametrize("filters", [(TopK(0.3),), (Int8(),), (TopK(0.5), Cast("bfloat16"))], ids=str)
def test_a_refused_push_takes_nothing_with_it_that_was_kept_back_before(
    filters: tuple[FilterSpec, ...], consistency: str, is_flush: bool
) -> None:
    world = World(1, 2, random.Random(1))
    try:
        table = open_rows(world.workers[0], rows_of("r", consistency, filters=filters))
        broken = world.servers[1]._tables["r"]
        given = torch.zeros(40, 2, dtype=torch.float64)
        for clock in range(6):
            rows = values(clock)
            broken.broken = "for a while" if clock in (2, 3) else ""
            refuse = is_flush and clock == 2
            pushed = table.flush() if refuse else table.push(IDS, rows)
            table.node.tick()
            world.settle()
            assert pushed.result(timeout=0).applied == (clock not in (2, 3))
            if clock in (2, 3):
                rows[places_of(world)[1]] = 0.0
            if clock in (2, 3) and consistency == "bsp":  # else the other server has applied its part at once
                rows.zero_()
            given += 0.0 if refuse else rows
        assert torch.allclose(stored(world) + kept(table), given, rtol=0, atol=1e-12)
    finally:
        world.close()


def test_a_list_of_ids_that_came_with_a_refused_push_is_known_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "pushed_problem", lambda *_: "")  # else a worker refuses it before it is sent
    with paceline.connect() as ps:
        table = ps.table(
            "t", rows=1, update=SGD(lr=1.0), consistency="asynchronous", filters=(paceline.filters.KeyCache(),)
        )
        ids, rows = [3, -7], torch.ones(2, 1)
        assert "missing" in table.push(ids, rows, hyper=({"lr": 1.0},)).result(60.0).reason
        table.push(ids, rows, hyper=table.spec.rule.groups)
        assert table.pull([3]).tolist() == [[-1.0]], "a read has all earlier pushes"

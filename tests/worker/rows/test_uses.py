"""Rows that are read from a worker's cache are in use: servers let others go."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.worker.rows.tables import open_rows, rows_of
from tests.worker.rows.world import World

from paceline.core.events import Died
from paceline.server.row_table import ServedRowTable
from paceline.update.rows.layout import NUM_USES
from paceline.update.rows.spec import Lifecycle
from paceline.worker.rows.client import MAX_REPORTS
from paceline.worker.rows.state import CacheOptions
from paceline.worker.rows.table import RowTable

KEPT = CacheOptions(keep=True)
CACHED = [("essp:0", CacheOptions()), ("essp:2", CacheOptions()), ("ssp:3", KEPT), ("asynchronous", KEPT)]


@contextmanager
def world_of(
    consistency: str, life: Lifecycle, options: CacheOptions, *, num_workers: int = 1, num_servers: int = 1
) -> Iterator[tuple[World, list[RowTable]]]:
    world = World(num_workers, num_servers, random.Random(1))
    try:
        spec = rows_of("r", consistency, life=life)
        yield world, [open_rows(node, spec, options) for node in world.workers.values()]
    finally:
        world.close()


def push(world: World, table: RowTable, *ids: int) -> None:
    table.push(list(ids), [[1.0, 1.0]] * len(ids))
    world.settle()


def tick(world: World, table: RowTable, num: int = 1) -> None:
    for _ in range(num):
        table.node.tick()
        world.settle()


def served(world: World, server: int = 0) -> ServedRowTable:
    return world.servers[server]._tables["r"]


def num_uses(world: World) -> dict[int, int]:
    """Return how often each row was used."""
    piece = served(world).store.rows(0, 100)
    return dict(zip(piece.ids.tolist(), piece.columns[NUM_USES].view(-1).tolist(), strict=True))


@pytest.mark.parametrize(("consistency", "options"), CACHED)
def test_rows_that_are_read_from_the_cache_every_clock_do_not_expire_and_go_when_they_are_not(
    consistency: str, options: CacheOptions
) -> None:
    life = Lifecycle(expire_after=1)
    with world_of(consistency, life, options, num_servers=2) as (world, (table,)):
        ids = list(range(8))
        push(world, table, *ids)
        for _ in range(6):
            assert table.pull(ids).tolist() == [[1.0, 1.0]] * 8
            tick(world, table)
        assert sum(len(served(world, server).store) for server in range(2)) == 8
        tick(world, table, 2)
        assert sum(len(served(world, server).store) for server in range(2)) == 0


@pytest.mark.parametrize("evict", ["lru", "lfu"])
@pytest.mark.parametrize(("consistency", "options"), CACHED)
def test_a_row_that_is_read_from_the_cache_outlives_one_that_is_not(
    consistency: str, options: CacheOptions, evict: str
) -> None:
    life = Lifecycle(max_rows=2, evict=evict)  # type: ignore[arg-type]
    with world_of(consistency, life, options) as (world, (table,)):
        push(world, table, 7, 8)
        table.pull([7, 8])
        for _ in range(3):
            table.pull([7])
            tick(world, table)
        push(world, table, 9)
        if evict == "lfu":
            table.pull([9])
            table.pull([9], refresh=True)
            table.pull([9], refresh=True)  # used more often than 8
        tick(world, table)
        assert sorted(ids_on(world)) == [7, 9]


def ids_on(world: World) -> list[int]:
    return served(world).store.rows(0, 100).ids.tolist()


def test_a_row_counts_once_a_clock_however_often_it_is_read_from_the_cache_and_deliveries_count_as_nothing() -> None:
    with world_of("essp:1", Lifecycle(max_rows=99, evict="lfu"), CacheOptions()) as (world, (table,)):
        push(world, table, 7, 8)  # one use of each
        table.pull([7, 8])  # one more, by the server
        for _ in range(5):
            table.pull([7, 7])
        tick(world, table)
        tick(world, table, 3)
        assert num_uses(world) == {7: 3, 8: 2}
        push(world, table, 7, 8)
        tick(world, table, 2)  # which delivers both
        assert num_uses(world) == {7: 4, 8: 3}


def test_a_report_counts_once_though_it_is_said_again_and_is_not_lost_with_a_connection() -> None:
    with world_of("asynchronous", Lifecycle(max_rows=99, evict="lfu"), KEPT) as (world, (table,)):
        push(world, table, 7)
        table.pull([7])
        for is_heard in (False, True):
            table.pull([7])
            table.node.tick()
            while is_heard and world.links[0, 0].up.frames:
                world.step(0, 0, up=True)
            before = num_uses(world)[7] - is_heard
            world.cut(0, 0)  # and the answer is lost
            world.old.clear()  # and so is what the server has not read
            world.settle()
            assert num_uses(world)[7] - before == 1
        assert table.client.state.uses is not None
        assert table.client.state.uses.num_unconfirmed == 0


def test_rows_in_use_by_a_worker_that_is_ahead_do_not_expire_when_the_slowest_catches_up() -> None:
    life = Lifecycle(expire_after=1)
    for keep in (False, True):
        with world_of("ssp:2", life, CacheOptions(keep=keep), num_workers=2) as (world, (ahead, slowest)):
            push(world, ahead, 7)  # is read
            for _ in range(2):
                push(world, ahead, 8)  # is pushed
                tick(world, ahead)
                ahead.pull([7])
            push(world, ahead, 8)
            tick(world, slowest, 2)
            assert sorted(ids_on(world)) == [7, 8]
            tick(world, slowest)
            tick(world, ahead, 2)
            tick(world, slowest, 2)
            assert ids_on(world) == []


def test_what_waits_for_a_server_that_does_not_answer_is_bounded() -> None:
    with world_of("asynchronous", Lifecycle(expire_after=1), KEPT) as (world, (table,)):
        push(world, table, 7)
        table.pull([7])
        uses = table.client.state.uses
        assert uses is not None
        for _ in range(3 * MAX_REPORTS):
            table.pull([7])
            table.node.tick()  # no frame moves, unless this waits
            assert uses.num_unconfirmed <= MAX_REPORTS
        world.settle()
        assert uses.num_unconfirmed == 0


def test_nothing_is_said_of_rows_whose_use_decides_nothing() -> None:
    with world_of("ssp:3", Lifecycle(), KEPT) as (world, (table,)):
        push(world, table, 7)
        table.pull([7])
        before = table.traffic.pulled
        for _ in range(3):
            table.pull([7])
            tick(world, table)
        assert table.traffic.pulled == before
        assert served(world)._told == {}


def test_what_was_told_goes_with_the_worker_and_clocks_that_cannot_be_do_no_harm() -> None:
    with world_of("essp:1", Lifecycle(expire_after=1), CacheOptions()) as (world, (table,)):
        push(world, table, 7)
        table.pull([7])
        table.pull([7])
        tick(world, table)
        assert served(world)._told == {(0, 0): 0}
        served(world).store.use(torch.tensor([7, 8]), 2**62)
        assert len(served(world).store.advance(1000)) == 0
        world.servers[0]._handle(Died(0, 0, "killed"))
        assert served(world)._told == {}

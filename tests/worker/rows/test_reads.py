"""Which rows a read asks which server for: those that are not kept, or older than the reader's clock allows."""

import threading

import torch

from paceline.core.consistency import essp, ssp
from paceline.core.events import WantRows
from paceline.update.named_rules import Add
from paceline.update.placement import RowSharding
from paceline.update.rows.ops import row_ops
from paceline.update.rows.spec import RowTableSpec
from paceline.worker.dense import PendingRead
from paceline.worker.rows.in_flight import RowReadsInFlight
from paceline.worker.rows.state import CacheOptions, RowTableState

OPS = row_ops("torch")


def places_by_server(ids: torch.Tensor) -> list[list[int]]:
    order, counts = OPS.split(ids, 2)
    return [ids[at].tolist() for at in order.split(counts)]


def opened(consistency: object, kept: dict[int, list[int]]) -> RowTableState:
    """Return a table of which rows are kept: by clock, their ids."""
    spec = RowTableSpec("r", 1, "float64", Add(), str(consistency), "sum", "reject")
    made = RowTableState.make(spec, CacheOptions(keep=True), RowSharding(OPS, 2), 0)
    assert made.cache is not None
    for clock, ids in kept.items():
        rows = torch.zeros(len(ids), 1, dtype=torch.float64)
        made.cache.install(0, torch.tensor(ids), rows, clock, 0, ())
    return made


def plan(table: RowTableState, needs: int, delivered: list[int], *, refresh: bool = False) -> tuple[WantRows, set[int]]:
    """Return what is wanted of which servers, and which ids are asked for."""
    reading, want = RowReadsInFlight(RowSharding(OPS, 2)).plan(
        table, torch.arange(20), needs, delivered, PendingRead(0, threading.Condition()), refresh=refresh
    )
    return want, {int(row) for server in reading.requested for row in reading.ids_for(server)}


def test_t1_rows_are_asked_for_that_are_one_clock_too_old_and_those_that_are_just_fresh_enough_are_not() -> None:
    table = opened(ssp(1), {4: list(range(10)), 5: list(range(10, 20))})
    assert plan(table, 4, [-1, -1])[1] == set()
    assert plan(table, 5, [-1, -1])[1] == set(range(10))
    assert plan(table, 6, [-1, -1])[1] == set(range(20))
    table.close()


def test_deliveries_of_one_server_say_nothing_of_rows_of_another() -> None:
    table = opened(essp(1), {1: list(range(20))})
    _, other = places_by_server(torch.arange(20))
    assert plan(table, 4, [4, 3]) == (WantRows("r", 4, (), (1,)), set(other))
    assert plan(table, 4, [4, 4]) == (WantRows("r", 4, ()), set())
    table.close()


def test_a_row_that_is_not_kept_has_its_server_asked_at_once() -> None:
    table = opened(essp(1), {1: list(range(19))})
    one, _ = places_by_server(torch.arange(20))
    has_last = 0 if 19 in one else 1
    want, ids = plan(table, 2, [2, 2])
    assert (want, ids) == (WantRows("r", 2, (has_last,)), {19})
    want, ids = plan(table, 3, [2, 2])
    assert (want, ids) == (WantRows("r", 3, (has_last,), (1 - has_last,)), set(range(20)))
    table.close()


def test_a_refresh_asks_for_all() -> None:
    table = opened(essp(1), {9: list(range(20))})
    assert plan(table, 0, [9, 9], refresh=True) == (WantRows("r", 0, (0, 1)), set(range(20)))
    table.close()

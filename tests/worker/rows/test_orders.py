"""Orders of events that chance seldom draws, one by one: what each worker is sent when frames cross each other."""

import random
from dataclasses import dataclass

import pytest
import torch
from tests.worker.rows.tables import open_rows, rows_of
from tests.worker.rows.world import Link, World

from paceline.core.messages import Clock
from paceline.transport.base import EMPTY
from paceline.update.filters import KeyCache
from paceline.update.named_rules import SGD
from paceline.update.rows.ops import row_ops
from paceline.wire.messages import RowPullFrame, decode
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.in_flight import RowReadInFlight
from paceline.worker.rows.state import CacheOptions
from paceline.worker.rows.table import RowFuture

X, Y = torch.tensor([1]), torch.tensor([2])
READER, WRITER = 0, 1


def two(consistency: str, *, max_rows: int = 0, num_servers: int = 1) -> World:
    """Return a world of a reader and a writer."""
    world = World(2, num_servers, random.Random(0))
    for node in world.workers.values():
        RowClient.open(
            node.context, rows_of(consistency=consistency, width=1), CacheOptions(keep=True, max_rows=max_rows)
        )
    return world


def ask(world: World, ids: torch.Tensor, *, refresh: bool = False) -> RowReadInFlight:
    node = world.workers[READER]
    return node.client("r").start_read(ids, node.client("r").state.consistency.needs(node.clock), refresh=refresh)


def read(world: World, ids: torch.Tensor) -> list[float]:
    return world.workers[READER].client("r").wait_read(ask(world, ids))[0].view(-1).tolist()


def write(world: World, ids: torch.Tensor, by: int = WRITER) -> None:
    world.workers[by].client("r").push(ids, torch.ones(len(ids), 1, dtype=torch.float64), count=1.0, hyper=())


def up(world: World, worker: int) -> None:
    """Move all that a worker has said."""
    for server in range(world.num_servers):
        while world.links[worker, server].up.frames:
            world.step(worker, server, up=True)


def tick(world: World) -> None:
    for node in world.workers.values():
        node.tick()
    world.settle()


def test_a_row_that_goes_while_it_is_on_its_way_is_delivered_all_the_same() -> None:
    world = two("essp:0", max_rows=1, num_servers=2)
    order, counts = row_ops().split(torch.arange(20), 2)
    here, there = order.split(counts)
    assert read(world, here[:1]) == [0.0]
    again = ask(world, here[:1], refresh=True)
    up(world, READER)  # its server has answered, and the answer is on its way
    for other in there[:2]:
        reading = ask(world, other.view(1))
        while not reading.future.done():
            world.step(READER, 1, up=True)
            world.step(READER, 1, up=False)
    up(world, READER)
    world.settle()
    world.workers[READER].client("r").wait_read(again)
    for value in (1.0, 2.0):
        write(world, here[:1])
        tick(world)
        assert read(world, here[:1]) == [value]
    world.close()


def test_t9_an_own_push_is_read_though_its_acknowledgement_overtakes_an_older_answer() -> None:
    world = two("ssp:9")
    down = world.links[READER, 0].down.frames
    asked = ask(world, X)
    up(world, READER)
    write(world, X, by=READER)
    up(world, READER)
    down.rotate(-1)  # now the acknowledgement comes first
    world.settle()
    assert world.workers[READER].client("r").wait_read(asked)[0].tolist() == [[1.0]]
    world.close()


def test_an_older_answer_that_comes_last_does_not_show() -> None:
    world = two("ssp:0")
    down = world.links[READER, 0].down.frames
    older = ask(world, X)
    up(world, READER)
    write(world, X)
    up(world, WRITER)
    newer = ask(world, X, refresh=True)
    up(world, READER)
    down.rotate(-1)
    world.settle()
    for reading in (newer, older):
        assert world.workers[READER].client("r").wait_read(reading)[0].tolist() == [[1.0]]
    world.close()


def test_a_delivery_that_is_lost_with_its_connection_is_made_good() -> None:
    world = two("essp:0")
    assert read(world, X) == [0.0]
    write(world, X)
    up(world, WRITER)
    for node in world.workers.values():
        node.tick()
    for worker in (READER, WRITER):
        up(world, worker)
    world.cut(READER, 0)  # the delivery of X is on it
    for value in (1.0, 1.0):
        world.settle()
        assert read(world, X) == [value]
        tick(world)
    world.close()


def test_a_server_that_learns_late_that_rows_went_keeps_sending_those_that_were_read_again() -> None:
    world = two("essp:0", max_rows=1)
    assert read(world, X) == [0.0]
    more = ask(world, torch.tensor([2, 3]))
    world.settle()
    ask(world, Y)  # X goes
    frames = world.links[READER, 0].up.frames
    notice = next((frame for frame in frames if len(frame.body)), None)
    assert notice is not None
    frames.remove(notice)
    world.settle()
    world.workers[READER].client("r").wait_read(more)
    assert read(world, X) == [0.0]
    frames.append(notice)
    world.settle()
    write(world, X)
    tick(world)
    assert read(world, X) == [1.0]
    world.close()


def test_t23_lists_of_ids_that_begin_alike_are_other_lists() -> None:
    world = World(1, 1, random.Random(0))
    node = world.workers[0]
    RowClient.open(node.context, rows_of(width=1, filters=(KeyCache(),)), CacheOptions())
    for last in (1000, 2000):
        ids = torch.cat([torch.arange(300), torch.tensor([last])])
        node.client("r").push(ids, torch.full((301, 1), float(last), dtype=torch.float64), count=1.0, hyper=())
        world.settle()
    reading = node.client("r").start_read(torch.tensor([1000, 2000]), 0, refresh=True)
    assert node.client("r").wait_read(reading)[0].tolist() == [[1000.0], [2000.0]]
    world.close()


def test_hyperparameters_of_a_push_reach_the_servers_that_get_the_next_ones() -> None:
    world = World(1, 3, random.Random(0))
    node, rule, ids = world.workers[0], SGD(lr=1.0), torch.arange(12)
    RowClient.open(node.context, rows_of(width=1, rule=rule), CacheOptions())
    hyper = ({**rule.groups[0], "lr": 0.5},)
    for number, pushed in enumerate((ids, ids[:1], ids)):
        rows = torch.full((len(pushed), 1), 2.0 - 2 * (number == 1), dtype=torch.float64)
        node.client("r").push(pushed, rows, count=1.0, hyper=hyper if number == 1 else ())
    world.settle()
    assert node.client("r").wait_read(node.client("r").start_read(ids, 0, refresh=True))[0].unique().tolist() == [-3.0]
    world.close()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("keep", [None, True])
def test_what_a_read_gives_under_bsp_is_that_of_its_clock_whenever_it_is_used(ahead: int, keep: bool | None) -> None:
    world = World(1, 2, random.Random(0))
    try:
        table = open_rows(world.workers[0], rows_of(consistency="bsp", width=1), CacheOptions(keep=keep))
        ids = list(range(8))
        at_clock: dict[int, list[float]] = {}
        asked: dict[int, list[RowFuture]] = {}
        for clock in range(5):
            asked.setdefault(clock + ahead, []).append(table.pull_later(ids, ahead=ahead))
            at_clock[clock] = table.pull(ids).view(-1).tolist()  # which brings newer rows than those asked for before
            table.push(ids[clock:], torch.ones(8 - clock, 1))
            table.node.tick()
        at_clock[5] = table.pull(ids).view(-1).tolist()
        for clock, futures in asked.items():
            for future in futures:
                assert future.result().view(-1).tolist() == at_clock[clock]
        assert len({tuple(rows) for rows in at_clock.values()}) == 6
    finally:
        world.close()


@pytest.mark.parametrize("keep", [None, True])
def test_a_tick_does_not_overtake_a_read_of_its_clock(keep: bool | None) -> None:
    world = two("bsp") if keep else World(2, 1, random.Random(0))
    if not keep:
        for node in world.workers.values():
            RowClient.open(node.context, rows_of(consistency="bsp", width=1), CacheOptions())
    sent: list[tuple[type, bool]] = []
    call_queue = world.links[READER, 0]
    world.workers[READER]._connections[0] = Watched(call_queue, sent)  # type: ignore[call-overload]
    reading = ask(world, X)
    world.workers[READER].tick()
    assert sent == [(RowPullFrame, False), (Clock, False)]
    world.settle()
    assert reading.future.done()
    world.workers[READER].tick()
    assert sent[-1] == (Clock, True)
    world.close()


@dataclass
class Watched:
    """A connection of which a test sees what was sent, and what was urgent."""

    call_queue: Link
    sent: list[tuple[type, bool]]

    def send(self, header: bytes, body: memoryview = EMPTY, *, urgent: bool = False, **_: object) -> None:
        self.sent.append((type(decode(header)), urgent))
        self.call_queue.send(header, body)

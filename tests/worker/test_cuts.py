"""Cuts that a worker reads while training goes on: one clock on all servers, whatever comes after it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from tests.nodes.client import Client, member, serve_table
from tests.nodes.cluster import Cluster, cluster, open_table, table
from torch import Tensor

from paceline.errors import Refused
from paceline.transport.base import EMPTY
from paceline.update import cuts
from paceline.update.named_rules import Add
from paceline.update.rows.spec import RowTableSpec
from paceline.wire.requests import BeginCut, CutHead, ReadCut, RequestDone, RequestFailed, TableCall
from paceline.worker.cuts import CutReader, list_tables
from paceline.worker.node import WorkerNode
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.state import CacheOptions

NUM, PIECE, NUM_CLOCKS, AT = 700, 64, 6, 3


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "CHUNK", PIECE)


def push(node: WorkerNode, name: str, number: float) -> None:
    node.client(name).push(torch.full((NUM,), number), count=1.0, absent=(), hyper=())


def values_of(reader: CutReader, heads: list[CutHead]) -> Tensor:
    found: list[Tensor] = []
    for server, head in enumerate(heads):
        found += [torch.frombuffer(piece, dtype=torch.float32) for piece in reader.pieces(server, head.num_pieces)]
    return torch.cat(found)


def rows_of(reader: CutReader, heads: list[CutHead]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for server, head in enumerate(heads):
        for piece in reader.pieces(server, head.num_pieces):
            columns = load(bytes(piece))
            found.update(zip(columns["ids"].tolist(), columns["values"].tolist(), strict=True))
    return found


@pytest.mark.parametrize(("kind", "num_servers"), [("memory", 1), ("tcp", 3), ("shm", 2)])
def test_all_servers_cut_at_one_clock_and_training_goes_on(kind: str, num_servers: int, tmp_path: Path) -> None:
    seen: list[tuple[Tensor, dict[int, list[float]], set[int]]] = []

    def work(node: WorkerNode) -> None:
        open_table(node, table("w", NUM, "bsp"))
        RowClient.open(node.context, RowTableSpec("rows", 2, "float32", Add(), "bsp", "sum", "reject"), CacheOptions())
        readers: list[CutReader] = []
        for clock in range(NUM_CLOCKS):
            if clock == AT and node.settings.sender.worker == 0:
                assert [each.name for each in list_tables(node)] == ["w", "rows"]
                readers = [CutReader.begin(node, name, node.clock) for name in ("w", "rows")]
            push(node, "w", 1.0)
            node.client("rows").push(torch.tensor([clock, 100]), torch.ones(2, 2), count=1.0, hyper=())
            node.tick()
        if readers:
            heads = [reader.heads() for reader in readers]
            clocks = {head.clock for found in heads for head in found}
            seen.append((values_of(readers[0], heads[0]), rows_of(readers[1], heads[1]), clocks))
            for reader in readers:
                reader.end()

    with cluster(kind, tmp_path, num_workers=2, num_servers=num_servers) as servers:
        servers.run(2, work)
        assert servers.values("w").tolist() == [2.0 * NUM_CLOCKS] * NUM
    ((values, rows, clocks),) = seen
    assert clocks == {AT}
    assert values.tolist() == [2.0 * AT] * NUM
    assert rows == {**{clock: [2.0, 2.0] for clock in range(AT)}, 100: [2.0 * AT, 2.0 * AT]}


def call(number: int, needs: int) -> BeginCut:
    return BeginCut(TableCall(number, "w", needs, 0))


def test_a_clock_that_has_passed_is_refused_and_a_cut_ends_with_its_worker(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers:
        with member(servers, 1) as worker:
            serve_table(worker, "bsp")
            worker.say(call(3, 0))
            worker.hear(RequestDone)
            for number in (4, 4):  # an answer may be lost
                worker.say(ReadCut(number, "w", 0))
                assert worker.hear(RequestDone)[1].nbytes == 16
            assert "no piece 7" in refusal(worker, ReadCut(5, "w", 7))
            assert "no cut of table 'x'" in refusal(worker, ReadCut(6, "x", 0))
            assert "'w' is at clock 0, and cannot be cut at clock -1 any more" in refusal(worker, call(7, -1))
            assert cuts_of(servers) == 1
        with member(servers, 1, incarnation=1) as worker:
            assert "no cut of table 'w'" in refusal(worker, ReadCut(5, "w", 0))
            assert cuts_of(servers) == 0


def refusal(worker: Client, message: object) -> str:
    worker.say(message, EMPTY)
    return worker.hear(RequestFailed)[0].reason


def cuts_of(servers: Cluster) -> int:
    return len(servers.servers[0]._tables.cuts._cuts)


def test_a_cut_whose_memory_is_short_is_refused_and_the_updates_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.server.dense_table.has_plenty", lambda num_bytes: num_bytes < 8 * PIECE)

    def work(node: WorkerNode) -> None:
        open_table(node, table("w", NUM, "bsp"))
        reader = CutReader.begin(node, "w", 0)
        (head,) = reader.heads()
        push(node, "w", 1.0)
        node.tick()
        node.settle()
        with pytest.raises(Refused, match="there was no memory"):
            list(reader.pieces(0, head.num_pieces))

    with cluster("memory", tmp_path, num_workers=1, num_servers=1) as servers:
        servers.run(1, work)
        assert servers.values("w").tolist() == [1.0] * NUM

"""Row tables when things go wrong: other declarations, limits, workers that die, and peers that break the rules."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.nodes.client import NUMEL, ONES, client, member, push, serve_table
from tests.nodes.cluster import Cluster, cluster, hosted_tables, open_table, run_threads, table
from tests.worker.rows.tables import open_rows, rows_of, served, stored

from paceline.core.messages import Applied, Fetched, Pull, Push, PushId, PushRefused, Sender
from paceline.core.settings import WorkerSettings
from paceline.errors import PeerError, Refused, UsageError
from paceline.observe.trace import Trace
from paceline.transport.base import Connection
from paceline.update.filters import KeyCache
from paceline.update.filters.key_cache import digest
from paceline.update.named_rules import SGD
from paceline.wire.messages import Hello, Keys, KeysWanted, RowPullFrame, RowPushFrame
from paceline.wire.requests import DeclareRows, RequestDone
from paceline.wire.row_codec import ids_body
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.rows.client import MAX_READS
from paceline.worker.rows.state import CacheOptions
from paceline.worker.table_opener import TableOpener
from paceline.worker.waits import WorkerOptions

WORKER = Hello("worker", 1, 0, 1)


def test_a_worker_that_declares_a_table_otherwise_is_refused_alone(tmp_path: Path) -> None:
    with (
        cluster("memory", tmp_path, num_workers=2) as servers,
        servers.joined(0) as node,
        servers.joined(1) as other,
    ):
        mine = open_rows(node, rows_of("r"))
        theirs = open_rows(other, rows_of("s"))
        for wrong, difference in (
            (rows_of("r", width=3), "width is 3 here and 2 there"),
            (rows_of("r", "bsp"), "consistency is bsp here and ssp:1 there"),
            (rows_of("r", rule=SGD(lr=0.1)), "rule is"),
            (rows_of("r", filters=(KeyCache(),)), "filters is"),
        ):
            with pytest.raises(Refused, match=difference):
                open_rows(other, wrong)
        with pytest.raises(Refused, match=r"exists on server . with rows; use another name"):
            open_table(other, table("r", 4, "ssp:1"))
        open_table(node, table("w", 4, "ssp:1"))
        with pytest.raises(Refused, match=r"exists on server . with a shape; use another name"):
            open_rows(other, rows_of("w"))
        mine.push([1], [[1.0, 2.0]]).result(timeout=30)
        assert open_rows(other, rows_of("r")).pull([1]).tolist() == [[1.0, 2.0]]
        assert theirs.pull([1]).tolist() == [[0.0, 0.0]]


def test_a_worker_opens_a_table_once(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        opening = TableOpener(0, node, StepMetrics(Trace(None), 0))
        opening.open_rows(rows_of(), CacheOptions())
        with pytest.raises(UsageError, match="has already opened table 'r'"):
            opening.open_rows(rows_of(), CacheOptions())
        with pytest.raises(UsageError, match="cannot do without a cache"):
            opening.open_rows(rows_of("e", "essp:1"), CacheOptions(keep=False))


@contextmanager
def patient(servers: Cluster) -> Iterator[WorkerNode]:
    """Worker 0, which does not repeat what it said for a while: servers have much to do."""
    settings, options = WorkerSettings(Sender(1, 0, 0), 1, retry_s=20.0), WorkerOptions(wait_timeout_s=20.0)
    node = WorkerNode(settings, servers.transport, servers.addresses, options)
    try:
        node.join()
        yield node
    finally:
        node.close()


def test_a_worker_with_too_many_pushes_in_a_clock_is_told_and_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.core.worker.WINDOW", 40)
    with cluster("memory", tmp_path, num_workers=1, num_servers=1) as servers, patient(servers) as node:
        held, at_once = open_rows(node, rows_of("h", "bsp")), open_rows(node, rows_of("a", "asynchronous"))
        for _ in range(40):
            held.push([1], [[1.0, 0.0]])
        with pytest.raises(UsageError, match=r"has made .* pushes of table 'h' in clock 0"):
            held.push([1], [[1.0, 0.0]])
        for _ in range(100):  # whatever waits in another table
            at_once.push([1], [[1.0, 0.0]])
        node.tick()
        assert held.pull([1]).tolist() == [[40.0, 0.0]]
        assert at_once.pull([1]).tolist() == [[100.0, 0.0]]


def test_a_worker_with_too_many_reads_under_way_is_told(tmp_path: Path) -> None:
    with (
        cluster("memory", tmp_path, num_workers=2, num_servers=1) as servers,
        patient(servers) as node,
        servers.joined(1),
    ):
        rows = open_rows(node, rows_of(consistency="bsp"))
        later = [rows.pull_later([1], ahead=1) for _ in range(MAX_READS)]
        with pytest.raises(UsageError, match="1000 reads of table 'r' under way"):
            rows.pull_later([1], ahead=1)
        assert not later[0].reading.future.done()


def test_a_reader_that_waits_for_a_worker_that_dies_is_released(tmp_path: Path) -> None:
    for policy in ("bsp", "essp:0"):
        folder = tmp_path / policy.replace(":", "")
        folder.mkdir()
        with cluster("memory", folder, num_workers=2) as servers, servers.joined(0) as node:
            with servers.joined(1) as other:
                open_rows(other, rows_of(consistency=policy)).push([1], [[8.0, 8.0]])
                rows = open_rows(node, rows_of(consistency=policy))
                rows.push([1], [[1.0, 1.0]])
                node.tick()
                later = rows.pull_later([1])
                assert not later.reading.future.done()
            for server in servers.servers:
                server.report_death(1, 0, "killed")
            assert later.result().tolist() == [[1.0, 1.0]] if policy == "bsp" else [[9.0, 9.0]]


def test_what_is_kept_for_a_worker_goes_with_it(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers:

        def work(node: WorkerNode) -> None:
            rows = open_rows(node, rows_of(consistency="essp:1", filters=(KeyCache(),)))
            rows.push(torch.arange(9), torch.ones(9, 2))
            rows.pull(torch.arange(9))

        servers.run(1, work)
        for each in served(servers):
            assert (each.subscriptions, each._lists, each.asked, each._waiting) == ({}, {}, {}, {})


# -- peers that break the rules --------------------------------------------------------------------------------------


def row_push(seq: int, ids: torch.Tensor, *, name: str = "r", keys: Keys | None = None) -> RowPushFrame:
    frame = Push(PushId(1, 1, 0, seq), name, 0, 0)
    return RowPushFrame(frame, 1.0, (), keys or Keys(len(ids), b"", sent=True))


def body_of(ids: torch.Tensor) -> memoryview:
    rows = torch.ones(len(ids), 2, dtype=torch.float64)
    return memoryview(bytes(ids_body(ids)) + rows.numpy().tobytes())


def row_pull(request: int, keys: Keys) -> RowPullFrame:
    return RowPullFrame(Pull(Sender(1, 1, 0), request, "r", 0, 0), keys)


def still_serves(servers: Cluster) -> None:
    with servers.joined(0) as node:
        rows = open_rows(node, rows_of(consistency="asynchronous", filters=(KeyCache(),)))
        assert rows.push([100], [[1.0, 1.0]]).result(timeout=30).applied
        assert rows.pull([100]).tolist() == [[1.0, 1.0]]


def test_pushes_that_make_no_sense_are_refused_and_no_row_changes(tmp_path: Path) -> None:
    ids = torch.tensor([1, 2])
    with cluster("tcp", tmp_path, num_servers=1) as servers:
        with member(servers, 1) as peer:
            serve_table(peer)
            peer.say(DeclareRows(3, rows_of(consistency="asynchronous", filters=(KeyCache(),))))
            peer.hear(RequestDone)
            for seq, (frame, body) in enumerate(
                [
                    (row_push(0, ids), body_of(ids)[:-1]),
                    (row_push(1, ids), memoryview(b"")),
                    (row_push(2, ids, keys=Keys(-1, b"", sent=True)), body_of(ids)),
                    (row_push(3, ids, name="w"), body_of(ids)),  # a table that has a shape
                    (row_push(4, ids, name="unknown"), body_of(ids)),
                    (push(5, name="r"), ONES),  # a whole tensor for a table of rows
                    (row_push(6, ids), memoryview(bytes(16) + b"\xff" * 32)),  # NaN
                ]
            ):
                peer.say(frame, body)
                refused, _ = peer.hear(PushRefused)
                assert refused.id.seq == seq
                assert seq != 1 or refused.reason == "its rows did not come with it"
            peer.say(row_push(7, ids), body_of(ids))
            assert peer.hear(Applied)[0].id.seq == 7
            peer.say(row_push(8, ids, keys=Keys(2, b"x" * 16, sent=False)), body_of(ids)[16:])
            assert peer.hear(KeysWanted)[0].seq == 8
        still_serves(servers)
        assert stored(servers, ids).tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert servers.values("w").tolist() == [0.0] * NUMEL


def test_pulls_that_make_no_sense_end_the_connection_and_nothing_else(tmp_path: Path) -> None:
    ids = torch.tensor([1, 2])
    other = digest("r", 0, torch.tensor([3, 4]))
    with cluster("tcp", tmp_path, num_servers=1) as servers:
        with member(servers, 1) as peer:
            peer.say(DeclareRows(1, rows_of(consistency="asynchronous", filters=(KeyCache(),))))
            peer.hear(RequestDone)
        for number, (keys, body) in enumerate(
            [
                (Keys(2, b"", sent=True), memoryview(b"1234567")),
                (Keys(3, b"", sent=True), ids_body(ids)),
                (Keys(2, other, sent=True), ids_body(ids)),
            ]
        ):
            with member(servers, 1, connection=number + 1) as peer:
                peer.say(row_pull(number, keys), body)
                assert peer.is_cut_off()
        with member(servers, 1, connection=9) as peer:
            peer.say(row_pull(9, Keys(2, digest("r", 0, ids), sent=False)))
            assert peer.hear(KeysWanted)[0].request == 9
            peer.say(row_pull(9, Keys(2, digest("r", 0, ids), sent=True)), ids_body(ids))
            assert len(peer.hear(Fetched)[1]) == 2 * 16
        still_serves(servers)


NOWHERE = cast("Connection", object())


def test_a_server_keeps_what_a_worker_asks_for_within_bounds_and_until_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.row_table.MAX_READS", 3)
    tables, ids = hosted_tables(), torch.tensor([1, 2])
    tables.declare(rows_of())
    served = tables["r"]
    for request in range(3):
        served.accept_pull(row_pull(request, Keys(2, b"", sent=True)), NOWHERE, ids_body(ids))
    with pytest.raises(PeerError, match="has more than 3 reads of table 'r' waiting"):
        served.accept_pull(row_pull(3, Keys(2, b"", sent=True)), NOWHERE, ids_body(ids))
    served.forget_worker((1, 0))
    assert not served.asked
    tables.close()


def test_a_worker_that_has_not_joined_leaves_nothing_on_the_server(tmp_path: Path) -> None:
    with cluster("tcp", tmp_path, num_servers=1) as servers:
        still_serves(servers)
        with client(servers, WORKER) as stranger:
            stranger.say(row_pull(1, Keys(1, b"", sent=True)), ids_body(torch.tensor([1])))
            stranger.say(row_push(1, torch.tensor([1])), body_of(torch.tensor([1])))
            stranger.say(row_pull(2, Keys(1, b"", sent=True)), memoryview(b"1"))
            assert stranger.is_cut_off()
        (here,) = served(servers)
        assert (here.asked, here._waiting) == ({}, {})
        assert (1, 0) not in here._lists


def test_a_wait_for_rows_ends_when_the_servers_are_gone(tmp_path: Path) -> None:
    problems = list[BaseException]()
    with cluster("memory", tmp_path, num_workers=2, num_servers=1) as servers, servers.joined(1):
        node = servers.worker(0)
        node.options = type(node.options)(wait_timeout_s=30.0, reconnect_timeout_s=0.1)
        node.join()
        rows = open_rows(node, rows_of(consistency="bsp"))

        def wait() -> None:
            try:
                rows.pull_later([1], ahead=1).result()
            except PeerError as error:
                problems.append(error)

        run_threads([wait, servers.servers[0].stop])
        node.close()
    assert "is lost" in str(problems[0])

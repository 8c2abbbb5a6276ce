"""What travels for row tables: lists of ids by their digest, filters, what is kept and what is delivered."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.nodes.cluster import cluster
from tests.update.filters.filtering import rest
from tests.worker.rows.tables import open_rows, rows_of, served, stored

from paceline.update.filters import Cast, Int8, KeyCache, TopK
from paceline.update.named_rules import AdaptiveRevision
from paceline.update.rows.spec import FilterSpec
from paceline.worker.node import WorkerNode
from paceline.worker.rows.state import CacheOptions

IDS = torch.arange(40)
ONES = torch.ones(40, 2, dtype=torch.float64)


def test_t23_a_list_that_a_server_has_forgotten_is_sent_again(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        table = open_rows(node, rows_of(filters=(KeyCache(),)))
        for number in range(1, 4):
            table.push(IDS, ONES).result(timeout=30)
            assert torch.equal(table.pull(IDS), number * ONES)
            key_bytes = table.traffic.pushed.key_bytes
            for each in served(servers):
                each._lists.clear()
        assert key_bytes == 3 * 8 * len(IDS), "each time the ids were sent in the end"
        for _ in range(2):
            table.push(IDS, ONES).result(timeout=30)
        assert table.traffic.pushed.key_bytes == key_bytes + 8 * len(IDS), "and only once while they are known"
        for server in range(2):
            table.client.state.forget_lists(server)
        assert torch.equal(table.pull(IDS), 5 * ONES)


def test_t23_lists_that_differ_beyond_their_first_2048_bytes_are_other_lists(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1, num_servers=1) as servers, servers.joined(0) as node:
        table = open_rows(node, rows_of(filters=(KeyCache(),)))
        start = torch.arange(300)
        for last in (1000, 2000):
            ids = torch.cat([start, torch.tensor([last])])
            table.push(ids, torch.full((301, 2), float(last))).result(timeout=30)
        assert table.pull([1000, 2000])[:, 0].tolist() == [1000.0, 2000.0]


@pytest.mark.parametrize("filters", [(Cast("bfloat16", on="push"),), (Int8(on="push"),), (TopK(0.2), Int8("push"))])
def test_t25_what_is_sent_and_what_is_kept_back_are_what_was_given(
    filters: tuple[FilterSpec, ...], tmp_path: Path
) -> None:
    dice = torch.Generator().manual_seed(0)
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        table = open_rows(node, rows_of(filters=filters))
        given = torch.zeros_like(ONES)
        for _ in range(6):
            rows = torch.randn(40, 2, generator=dice, dtype=torch.float64)
            table.push(IDS, rows)
            given += rows
            node.tick()
        table.flush().result(timeout=30)
        ids, kept = rest(table.client.state.pipeline)
        whole = stored(servers, IDS)
        whole[ids] += kept
        assert torch.allclose(whole, given, rtol=0, atol=1e-12)
        assert torch.allclose(table.pull(IDS), given, rtol=0, atol=0.05)


def test_filters_on_pulls_round_what_is_read_and_nothing_else(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        table = open_rows(node, rows_of(filters=(Cast("bfloat16", on="pull"),)), CacheOptions(keep=True))
        rows = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        table.push(IDS, rows).result(timeout=30)
        assert torch.equal(table.pull(IDS), rows.bfloat16().double())
        assert torch.equal(stored(servers, IDS), rows)


def two_workers(tmp_path: Path, first: Callable[[WorkerNode, WorkerNode], None]) -> None:
    """Have `first` work with two workers of one thread, on two servers."""
    with (
        cluster("memory", tmp_path, num_workers=2) as servers,
        servers.joined(0) as one,
        servers.joined(1) as other,
    ):
        first(one, other)


def await_deliveries(node: WorkerNode, clock: int) -> None:
    with node._changed:
        node._lock.wait(lambda: all(node._core.reads("r").reached(s) >= clock for s in (0, 1)), "deliveries")


def tick(*nodes: WorkerNode) -> None:
    for node in nodes:
        node.tick()


def test_t10_what_changes_between_a_reply_and_the_next_clock_is_delivered(tmp_path: Path) -> None:
    def work(reader: WorkerNode, writer: WorkerNode) -> None:
        spec = rows_of(consistency="essp:0")
        reads, writes = open_rows(reader, spec), open_rows(writer, spec)
        for clock in range(1, 4):
            assert torch.equal(reads.pull(IDS), (clock - 1) * ONES)  # the first one subscribes
            writes.push(IDS, ONES).result(timeout=30)
            asked = reads.traffic.pulled.frames
            tick(reader, writer)
            await_deliveries(reader, clock)
            assert torch.equal(reads.pull(IDS), clock * ONES)
            assert reads.traffic.pulled.frames == asked, "no server was asked"
        assert reads.traffic.delivered.frames >= 2 * 3
        assert reads.traffic.delivered.value_bytes == 3 * IDS.numel() * 16, "each change once"

    two_workers(tmp_path, work)


def test_rows_that_need_room_go_and_are_delivered_no_longer(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        table = open_rows(node, rows_of(consistency="essp:1"), CacheOptions(max_rows=10))
        for start in range(0, 40, 10):
            assert torch.equal(table.pull(IDS[start : start + 10]), 0 * ONES[:10])
        assert len(table.client.state.cache or ()) <= 20
        table.push(IDS, ONES).result(timeout=30)
        assert sum(len(entry) for each in served(servers) for entry in each.subscriptions.values()) <= 20
        node.tick()
        assert torch.equal(table.pull(IDS), ONES), "more than fits may be read at once"


def test_reads_that_take_each_others_room_all_end(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        table = open_rows(node, rows_of(consistency="ssp:1"), CacheOptions(keep=True, max_rows=4))
        table.push(IDS, ONES).result(timeout=30)
        later = [table.pull_later(IDS[start : start + 20]) for start in (0, 10, 20)]
        for future in (later[0], later[2], later[1]):
            assert torch.equal(future.result(), ONES[:20])


def test_t2_a_kept_row_is_asked_for_again_only_when_the_bound_demands_it(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1, num_servers=1) as servers, servers.joined(0) as node:
        table, frames = open_rows(node, rows_of(consistency="ssp:2"), CacheOptions(keep=True)), list[int]()
        for _ in range(8):
            table.pull([1, 2])
            frames.append(table.traffic.pulled.frames)
            node.tick()
        assert frames == [1, 1, 1, 2, 2, 2, 3, 3], "its age is a saw-tooth"


def test_t9_own_writes_are_read_where_that_is_wanted_and_then_only_once(tmp_path: Path) -> None:
    for reads_own_writes in (True, False):
        folder = tmp_path / str(reads_own_writes)
        folder.mkdir()
        with cluster("memory", folder, num_workers=1) as servers, servers.joined(0) as node:
            options = CacheOptions(keep=True, reads_own_writes=reads_own_writes)
            table = open_rows(node, rows_of(consistency="ssp:3"), options)
            table.pull(IDS)
            table.push(IDS, ONES).result(timeout=30)
            assert torch.equal(table.pull(IDS), ONES if reads_own_writes else 0 * ONES)
            assert torch.equal(table.pull(IDS, refresh=True), ONES)


def test_t17_a_gradient_goes_with_the_sum_that_its_reader_saw_not_with_what_came_since(tmp_path: Path) -> None:
    """One worker reads, others' gradients come, then it pushes: the rule must hear of what came between."""

    def work(stale: WorkerNode, fresh: WorkerNode) -> None:
        spec = rows_of(consistency="ssp:9", rule=AdaptiveRevision(lr=1.0), width=1)
        slow, quick = open_rows(stale, spec), open_rows(fresh, spec)
        slow.pull([7])
        quick.pull([7])
        quick.push([7], [[2.0]]).result(timeout=30)
        slow.pull_later([7]).reading.future.result(timeout=30)  # on its way for a later batch, not what this one is of
        slow.push([7], [[3.0]]).result(timeout=30)
        # By hand: z = 1 + 2², w = -2/√5; then what came between is 2: z = 5 + 3 (3 + 4), η = 1/√26.
        expected = -2 / 5**0.5 - 3 / 26**0.5 + (1 / 5**0.5 - 1 / 26**0.5) * 2
        assert quick.pull([7]).item() == pytest.approx(expected, rel=1e-12)

    two_workers(tmp_path, work)

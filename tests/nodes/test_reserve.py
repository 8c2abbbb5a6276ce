"""Memory of pushes and of values: taken when there is some, given back once it is read, lent where it can be mapped."""

import threading
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nodes.cluster import CARRIERS, cluster, open_table, read_values, table

from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.wire.requests import AwaitValues
from paceline.worker.cache import Readable
from paceline.worker.dense import DenseClient
from paceline.worker.node import WorkerNode


def push_one(node: WorkerNode) -> int:
    """Push ones from reserved memory, and return where that lies."""
    reserved = node.client("w").reserve()
    reserved.gradient.fill_(1.0)
    node.client("w").push_reserved(reserved, count=1.0)
    return reserved.gradient.data_ptr()


def test_a_script_that_waits_for_each_push_is_given_the_same_memory(tmp_path: Path) -> None:
    with cluster("shm", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "bsp"))
        values, places = torch.empty(4), set()
        for clock in range(1, 5):
            places.add(push_one(node))
            node.tick()
            read_values(node, "w", values)
            node.settle()
            assert values.tolist() == [float(clock)] * 4
        assert len(places) == 1
        node.leave()


def test_there_is_no_more_while_two_pushes_are_under_way(tmp_path: Path) -> None:
    with (
        cluster("shm", tmp_path, num_workers=2) as servers,
        servers.joined(0) as node,
        servers.joined(1) as late,
    ):
        open_table(node, table("w", 4, "bsp"))
        DenseClient.open(late.context, table("w", 4, "bsp"))
        places = []
        for _ in range(2):
            places.append(push_one(node))
            node.tick()
        assert len(set(places)) == 2
        given: list[int] = []
        waiting = threading.Thread(target=lambda: given.append(push_one(node)), daemon=True)
        waiting.start()
        waiting.join(timeout=0.2)
        assert waiting.is_alive()

        late.tick()
        waiting.join(timeout=30)
        assert given == places[:1]  # that of the clock which both have finished
        for _ in range(2):
            late.tick()
        node.tick()
        node.settle()
        assert servers.values("w").tolist() == [3.0] * 4


def test_a_wait_for_memory_that_takes_too_long_says_what_for(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=2) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "bsp"))
        for _ in range(2):
            push_one(node)
            node.tick()
        node.waits.set_timeout(0.2)

        with pytest.raises(
            DeadlineExceeded, match=r"worker 0 \(clock 2\) waited .* s for servers to apply earlier pushes"
        ):
            node.client("w").reserve()


def test_what_is_not_sent_is_not_under_way(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "bsp"))
        places = set()
        for _ in range(5):  # more than may be under way
            reserved = node.client("w").reserve()
            places.add(reserved.gradient.data_ptr())
            reserved.gradient.fill_(torch.nan)
            outcome = node.client("w").push_reserved(reserved, count=1.0).outcome
            assert outcome is not None
            assert not outcome.applied
            assert "4 of 4 elements" in outcome.reason
        for _ in range(5):
            reserved = node.client("w").reserve()
            places.add(reserved.gradient.data_ptr())
            node.client("w").return_buffer(reserved)
        assert len(places) == 1
        node.leave()


def test_memory_is_reserved_of_open_tables_of_open_workers_only(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers:
        with servers.joined(0) as node:
            open_table(node, table("w", 4, "bsp"))
            with pytest.raises(UsageError, match="worker 0 has not opened table 'v'; it has opened: w"):
                node.client("v").reserve()
        with pytest.raises(PeerError, match="its session is closed"):
            node.client("w").reserve()


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("kind", CARRIERS)
def test_values_are_lent_where_memory_is_mapped_and_shown_where_asked(kind: str, live: bool, tmp_path: Path) -> None:
    with cluster(kind, tmp_path, num_workers=1, num_servers=2) as servers, servers.joined(0) as node:
        open_table(node, table("w", 200, "bsp"))
        cache = DenseClient.open(node.context, table("w", 200, "bsp"), live=live).cache
        node.rpc.call_all(lambda number: AwaitValues(number, "w"), "first values")
        push_one(node)
        node.tick()
        read_values(node, "w", out := torch.empty(200))

        assert out.tolist() == [1.0] * 200
        assert cache.live is (live and kind == "shm")
        num_send_buffers = 1 if kind == "shm" and not live else 0
        assert [len(server._tables["w"].send_buffers) for server in servers.servers] == [num_send_buffers] * 2
        for server in servers.servers:
            server._tables["w"].shard.values.add_(1.0)
        node.client("w").use_cache(lambda cache: cache.read_into(out))
        assert out.tolist() == [2.0 if cache.live else 1.0] * 200
        node.leave()


# -- values that lie in several pieces -------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_a_slice_is_a_view_exactly_where_the_elements_lie_together(lengths: list[int], data: st.DataObject) -> None:
    whole = torch.arange(float(sum(lengths)))
    starts = list(accumulate(lengths[:-1], initial=0))
    parts = [part.clone() for part in whole.split(lengths)]
    values = Readable(tuple(zip(starts, parts, strict=True)))
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))

    found = values.slice(start, stop)

    assert torch.equal(found, whole[start:stop])
    together = any(first <= start and stop <= first + length for first, length in zip(starts, lengths, strict=True))
    assert values.lie_together(start, stop) is together
    assert together is any(part.untyped_storage().data_ptr() == found.untyped_storage().data_ptr() for part in parts)
    assert values.places == tuple(part.data_ptr() for part in parts)

"""Memory that travels to others: not written to while they may look at it, and shown to be free afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.nodes.cluster import cluster, open_table, table

from paceline.errors import ProtocolBug
from paceline.server.buffers import SendBuffers
from paceline.transport import ShmTransport
from paceline.transport.base import Connection
from paceline.transport.buffer_pool import is_poisoned
from paceline.transport.buffers import fresh_buffer
from paceline.worker.node import WorkerNode
from paceline.worker.pushes import PushBuffer, Pushes

HERE = cast("Connection", object())


def test_values_lie_where_they_were_until_the_worker_has_taken_them_in() -> None:
    send_buffers = SendBuffers(ShmTransport("loans").allocate, poisons=True)
    first = send_buffers.lend(HERE, "read", 1, 64)
    first[:] = bytes(64)

    send_buffers.reclaim(HERE, "read", 0)
    send_buffers.reclaim(HERE, "delivery", 9)
    assert send_buffers.lend(HERE, "read", 2, 64).obj is not first.obj, "the worker has not taken in the first"
    assert not any(first)

    send_buffers.reclaim(HERE, "read", 1)
    assert is_poisoned(first)
    assert send_buffers.lend(HERE, "read", 3, 64).obj is first.obj
    send_buffers.reclaim(HERE, "read", 2)
    assert send_buffers.lend(HERE, "read", 4, 64).obj is not first.obj
    send_buffers.clear()


def slots(**options: Any) -> Pushes:
    def make() -> PushBuffer:
        memory = fresh_buffer(64)
        return PushBuffer(memory, torch.frombuffer(memory, dtype=torch.float32))

    return Pushes(1, False, make, poisons=True, **options)


def test_memory_of_a_push_shows_that_it_is_free_unless_a_gradient_may_lie_in_it() -> None:
    memory = slots()
    for shown in (False, True):
        buffer = memory.lend(shown=shown)
        buffer.gradient.zero_()
        memory.reclaim(buffer)
        assert is_poisoned(buffer.memory) != shown


def test_memory_of_a_push_is_given_back_once() -> None:
    memory = slots()
    buffer = memory.lend(shown=False)
    more = memory.lend(shown=True)
    memory.reclaim(buffer)
    with pytest.raises(ProtocolBug, match="for pushes was given back twice"):
        memory.reclaim(buffer)
    memory.reclaim(more)
    assert memory.has_slot(0)
    assert not memory._lent


def test_memory_of_a_push_that_an_interrupted_call_has_dropped_is_not_waited_for() -> None:
    memory = slots()
    buffer = memory.lend(shown=True)
    assert not memory.has_slot(0)
    del buffer  # as by Ctrl-C between its reservation and its push
    assert memory.has_slot(0)
    memory.reclaim(memory.lend(shown=True))


@pytest.mark.parametrize("kind", ["memory", "shm", "tcp"])
def test_nothing_of_a_push_is_left_once_all_servers_have_answered(kind: str, tmp_path: Path) -> None:
    seen: list[PushBuffer] = []

    def work(node: WorkerNode) -> None:
        open_table(node, table("w", 300, "asynchronous"))
        for _ in range(5):
            assert node.client("w").push(torch.ones(300), count=1.0).result(timeout=30).applied
        seen.extend(node.client("w").pushes._free)

    with cluster(kind, tmp_path, num_workers=1) as servers:
        servers.run(1, work)
        assert (servers.values("w") == 5.0).all()
    assert seen
    assert all(is_poisoned(buffer.memory) for buffer in seen)

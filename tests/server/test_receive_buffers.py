"""Memory that pushes arrive in: used again once given back, by its owner alone, and gone with all that broke off."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
from msgspec.structs import replace
from tests.nodes.cluster import table

from paceline.core.messages import Clock, Join, Push, PushId, Sender
from paceline.core.settings import ServerSettings
from paceline.errors import ProtocolBug
from paceline.observe import trace as records
from paceline.observe.trace import Trace
from paceline.server import buffers
from paceline.server.buffers import ReceiveBuffers
from paceline.server.node import ServerNode
from paceline.transport import MemoryTransport
from paceline.transport.base import Frame
from paceline.transport.buffer_pool import Buffer
from paceline.transport.buffers import fresh_buffer
from paceline.wire.messages import Hello, PushFrame, encode

NUMEL = 1 << 18
SIZE_BYTES = 4 * NUMEL
POLICIES = ["bsp", "ssp:2", "essp:2", "asynchronous"]


def push(seq: int, clock: int = 0) -> PushFrame:
    return PushFrame(Push(PushId(1, 0, 0, seq), "w", clock, 0), 1.0, (), ())


PUSH = encode(push(0))


def taken(receive_buffers: ReceiveBuffers) -> Buffer:
    buffer = receive_buffers.place(PUSH, SIZE_BYTES)
    assert buffer is not None
    return buffer


class AtUpdate(Trace):
    """A trace that lends a reader memory at the moment that an update is done: readers do not wait for the server."""

    def __init__(self) -> None:
        super().__init__(None)
        self.is_kept = True
        self.receive_buffers: ReceiveBuffers | None = None
        self.lent: list[Buffer] = []

    def record(self, record: records.TraceRecord) -> None:
        if isinstance(record, records.AppliedRecord) and self.receive_buffers is not None:
            self.lent.append(taken(self.receive_buffers))


class Told(Trace):
    """A trace that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.is_kept = True
        self.told: list[records.TraceRecord] = []

    def record(self, record: records.TraceRecord) -> None:
        self.told.append(record)


@contextmanager
def serving(policy: str, trace: Trace) -> Iterator[ServerNode]:
    """A server whose thread is the test: worker 0 takes part, and there is a table 'w'."""
    transport = MemoryTransport()
    with closing(transport.listen("memory://server-0")) as listener:
        settings = ServerSettings(0, 1, workers=(0,))
        node = ServerNode(settings, listener, transport, lambda: (listener.address,), trace, checks_memory=True)
        node._handle(Join(Sender(1, 0, 0)))
        node._handle(node._tables.declare(table("w", NUMEL, policy)))
        yield node
        node._tables.close()


def arrive(node: ServerNode, message: PushFrame, value: float) -> None:
    """Do with a push of one value what a reader thread does, and then the server's."""
    buffer = taken(node._receive_buffers)
    np.frombuffer(buffer.memory, dtype=np.float32)[:] = value
    node._on_push(message, Frame(encode(message), buffer.memory, buffer))


@pytest.mark.parametrize("policy", ["ssp:2", "essp:2", "asynchronous"])
def test_memory_that_a_reader_was_lent_during_an_update_is_lent_to_no_other(policy: str) -> None:
    trace = AtUpdate()
    with serving(policy, trace) as node:
        trace.receive_buffers = node._receive_buffers
        arrive(node, push(0), 1.0)

        [mine] = trace.lent
        assert taken(node._receive_buffers).memory is not mine.memory
        assert node._receive_buffers.pool.num_lent == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_each_push_gives_its_memory_back_whatever_becomes_of_it(policy: str) -> None:
    with serving(policy, Trace(None)) as node:
        arrive(node, push(0), 1.0)
        arrive(node, push(0), 1.0)  # a copy
        arrive(node, PushFrame(push(1).push, -1.0, (), ()), 1.0)  # refused: it stands for less than no samples
        arrive(node, push(2), np.nan)  # refused
        arrive(node, PushFrame(Push(PushId(1, 0, 0, 3), "none", 0, 0), 1.0, (), ()), 1.0)  # of no table
        arrive(node, PushFrame(Push(PushId(1, 0, 7, 4), "w", 0, 0), 1.0, (), ()), 1.0)  # of another life
        arrive(node, push(5), 2.0)

        held = 2 if policy == "bsp" else 0
        assert node._receive_buffers.pool.num_lent == node._tables["w"].num_waiting == held
        assert (node._tables["w"].shard.values == (0.0 if held else 3.0)).all()


def refusals(trace: Told) -> list[str]:
    return [record.reason for record in trace.told if isinstance(record, records.Refusal)]


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_that_are_not_those_that_were_sent_are_refused(policy: str) -> None:
    trace = Told()
    right = zlib.crc32(np.full(NUMEL, 1.0, dtype=np.float32))
    with serving(policy, trace) as node:
        for seq, checksum in enumerate((right, right ^ 1)):
            arrive(node, replace(push(seq), checksums=(checksum,)), 1.0)
        if policy == "bsp":
            node._handle(Clock(Sender(1, 0, 0), 1))

        assert refusals(trace) == [f"its {SIZE_BYTES} bytes on server 0 are not those that worker 0 sent"]
        assert (node._tables["w"].shard.values == 1.0).all()
        assert node._receive_buffers.pool.num_lent == 0


def test_memory_that_changes_while_its_push_waits_is_found() -> None:
    trace = Told()
    with serving("bsp", trace) as node:
        arrive(node, push(0), 1.0)
        [waiting] = node._tables["w"]._waiting.values()
        waiting.contribution.gradient[7] = 3.0

        node._handle(Clock(Sender(1, 0, 0), 1))

        [problem] = refusals(trace)
        assert "the memory of a push of worker 0 changed while it waited" in problem
        assert not node._tables["w"].shard.values.any()


def test_memory_that_was_given_back_is_used_again_and_once() -> None:
    receive_buffers = ReceiveBuffers()
    first, second = taken(receive_buffers), taken(receive_buffers)
    assert first.memory is not second.memory

    first.release()
    third = taken(receive_buffers)
    with pytest.raises(ProtocolBug, match="given back twice"):
        first.release()

    assert third.memory is first.memory
    assert all(taken(receive_buffers).memory is not other.memory for other in (first, second))


def test_a_push_that_breaks_off_leaves_nothing() -> None:
    receive_buffers = ReceiveBuffers()
    for _ in range(5):
        taken(receive_buffers)  # dropped by its owner
    gc.collect()

    assert receive_buffers.pool.num_lent == 0


def test_only_large_pushes_arrive_here() -> None:
    receive_buffers = ReceiveBuffers()

    assert receive_buffers.place(encode(Hello("worker", 0, 0, 1)), SIZE_BYTES) is None
    assert receive_buffers.place(PUSH, 1000) is None


def test_a_worker_that_sends_pieces_of_all_sizes_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(buffers, "fresh_buffer", lambda size_bytes: made.append(size_bytes) or fresh_buffer(size_bytes))
    receive_buffers = ReceiveBuffers()
    for size_bytes in range(SIZE_BYTES, SIZE_BYTES + 200_000, 64):
        first, second = receive_buffers.place(PUSH, size_bytes), receive_buffers.place(PUSH, size_bytes)
        assert first is not None
        assert second is not None
        assert len(first.memory) == size_bytes
        first.release()
        second.release()
    assert len(made) <= 2 * 3
    assert sum(made) <= 2 * 3 * 1.125 * (SIZE_BYTES + 200_000)

"""Memory of batches: used again, but never while a worker may look at it, and never more than can be borne."""

from __future__ import annotations

import pytest

from paceline.data.service.buffer_pool import (
    MAX_FREE,
    MAX_FREE_BYTES,
    MAX_SEND_BUFFERS,
    BatchBuffers,
    BatchPool,
    LendingLimit,
    LentPiece,
)
from paceline.data.service.messages import NO_LENT_BUFFER
from paceline.errors import ProtocolBug
from paceline.transport import MemoryTransport, ShmTransport, Transport
from paceline.transport.buffer_pool import is_poisoned


def whole(piece: LentPiece) -> memoryview:
    """The memory that a batch is the start of."""
    assert piece.buffer is not None
    return piece.buffer.whole


def test_memory_is_lent_until_it_is_given_back() -> None:
    batch_buffers = BatchBuffers(ShmTransport("lending"))
    first = batch_buffers.allocate(5000)
    second = batch_buffers.allocate(5000)
    assert (first.memory.nbytes, whole(first) is whole(second)) == (5000, False)
    assert batch_buffers.release(first.lent_buffer)
    assert not batch_buffers.release(first.lent_buffer)
    third = batch_buffers.allocate(4000)
    assert whole(third) is whole(first)
    assert third.lent_buffer not in (first.lent_buffer, second.lent_buffer)
    batch_buffers.drop(third)
    assert whole(batch_buffers.allocate(8192)) is whole(first)
    batch_buffers.clear()


def test_a_reader_that_keeps_very_much_is_sent_copies() -> None:
    batch_buffers = BatchBuffers(ShmTransport("lending"))
    pieces = [batch_buffers.allocate(1) for _ in range(MAX_SEND_BUFFERS + 1)]
    assert [piece.lent_buffer == NO_LENT_BUFFER for piece in pieces] == [False] * MAX_SEND_BUFFERS + [True]
    assert all(batch_buffers.release(piece.lent_buffer) for piece in pieces[:-1])
    assert len(batch_buffers._free_shared._free) == MAX_FREE
    batch_buffers.clear()


def test_what_all_keep_together_has_its_bound() -> None:
    limit, transport = LendingLimit(send_buffers=3), ShmTransport("lending")
    first, second = BatchBuffers(transport, limit), BatchBuffers(transport, limit)
    assert [first.allocate(1).lent_buffer for _ in range(2)] == [0, 1]
    assert [second.allocate(1).lent_buffer for _ in range(2)] == [0, NO_LENT_BUFFER]
    assert first.release(1)
    assert second.allocate(1).lent_buffer == 1
    first.clear()
    assert first.allocate(1).lent_buffer == NO_LENT_BUFFER, "it would not be returned"
    second._free_shared.make = lambda _: memoryview(bytearray(1 << 62))
    with pytest.raises(MemoryError):
        second.allocate(1)
    second._free_shared.make = transport.allocate
    assert second.allocate(1).lent_buffer == 2, "the limit has room for it"
    second.clear()


def test_what_all_keep_together_has_a_bound_in_bytes() -> None:
    limit, transport = LendingLimit(size_bytes=3 * 4096), ShmTransport("lending")
    first, second = BatchBuffers(transport, limit), BatchBuffers(transport, limit)
    assert first.allocate(8192).lent_buffer == 0
    assert [second.allocate(4000).lent_buffer for _ in range(2)] == [0, NO_LENT_BUFFER]
    assert first.release(0)
    assert second.allocate(8000).lent_buffer == 1
    second.clear()
    assert limit == LendingLimit(size_bytes=3 * 4096)
    first.allocate(1)
    assert limit.size_bytes == 4096, "the piece that was free is larger than what is asked for"
    first.clear()


def test_the_memory_that_is_kept_for_later_has_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.service.buffer_pool.MAX_FREE_BYTES", 100 << 12)
    pool, made = BatchPool(lambda size: memoryview(bytearray(size))), list[int]()
    for pages in range(1, 60):
        pieces = [pool.allocate(pages << 12) for _ in range(3)]
        for piece in pieces:
            pool.free(piece)
        made.append(sum(piece.nbytes for piece in pool._free))
    assert max(made) <= 100 << 12
    assert MAX_FREE_BYTES > 100 << 12


def test_where_the_carrier_copies_memory_is_free_once_it_has_left() -> None:
    batch_buffers = BatchBuffers(MemoryTransport())
    first = batch_buffers.allocate(5000)
    assert first.lent_buffer == NO_LENT_BUFFER
    batch_buffers.on_sent(first)
    assert whole(batch_buffers.allocate(100)) is whole(first)
    batch_buffers.clear()


@pytest.mark.parametrize("transport", [ShmTransport("lending"), MemoryTransport()])
def test_a_late_look_at_a_batch_finds_nothing_of_it(transport: Transport) -> None:
    batch_buffers = BatchBuffers(transport, poisons=True)
    piece = batch_buffers.allocate(5000)
    late = piece.memory[:]
    late[:] = bytes(5000)
    batch_buffers.drop(piece)
    assert is_poisoned(late)
    batch_buffers.clear()


def test_a_batch_that_has_left_twice_is_a_mistake_of_ours() -> None:
    batch_buffers = BatchBuffers(MemoryTransport())
    piece = batch_buffers.allocate(100)
    batch_buffers.on_sent(piece)
    with pytest.raises(ProtocolBug, match="given back twice"):
        batch_buffers.on_sent(piece)

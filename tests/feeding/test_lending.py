"""Memory of batches: used again, but never while a worker may look at it, and never more than can be borne."""

from __future__ import annotations

import pytest

from paceline.errors import ProtocolBug
from paceline.feeding.lending import MAX_FREE, MAX_FREE_BYTES, MAX_LOANS, Lending, Piece, Pool, Room
from paceline.feeding.wire import NO_LOAN
from paceline.transport import MemoryTransport, ShmTransport, Transport
from paceline.transport.pool import is_poisoned


def whole(piece: Piece) -> memoryview:
    """The memory that a batch is the start of."""
    assert piece.buffer is not None
    return piece.buffer.whole


def test_memory_is_lent_until_it_is_given_back() -> None:
    lending = Lending(ShmTransport("lending"))
    first = lending.take(5000)
    second = lending.take(5000)
    assert (first.memory.nbytes, whole(first) is whole(second)) == (5000, False)
    assert lending.give_back(first.loan)
    assert not lending.give_back(first.loan)
    third = lending.take(4000)
    assert whole(third) is whole(first)
    assert third.loan not in (first.loan, second.loan)
    lending.drop(third)
    assert whole(lending.take(8192)) is whole(first)
    lending.clear()


def test_who_keeps_very_much_is_sent_copies() -> None:
    lending = Lending(ShmTransport("lending"))
    pieces = [lending.take(1) for _ in range(MAX_LOANS + 1)]
    assert [piece.loan == NO_LOAN for piece in pieces] == [False] * MAX_LOANS + [True]
    assert all(lending.give_back(piece.loan) for piece in pieces[:-1])
    assert len(lending._free_shared._free) == MAX_FREE
    lending.clear()


def test_what_all_keep_together_has_its_bound() -> None:
    room, transport = Room(loans=3), ShmTransport("lending")
    first, second = Lending(transport, room), Lending(transport, room)
    assert [first.take(1).loan for _ in range(2)] == [0, 1]
    assert [second.take(1).loan for _ in range(2)] == [0, NO_LOAN]
    assert first.give_back(1)
    assert second.take(1).loan == 1
    first.clear()
    assert first.take(1).loan == NO_LOAN, "nobody would return it"
    second._free_shared.make = lambda _: memoryview(bytearray(1 << 62))
    with pytest.raises(MemoryError):
        second.take(1)
    second._free_shared.make = transport.allocate
    assert second.take(1).loan == 2, "there is still room for it"
    second.clear()


def test_what_all_keep_together_has_a_bound_in_bytes() -> None:
    room, transport = Room(size_bytes=3 * 4096), ShmTransport("lending")
    first, second = Lending(transport, room), Lending(transport, room)
    assert first.take(8192).loan == 0
    assert [second.take(4000).loan for _ in range(2)] == [0, NO_LOAN]
    assert first.give_back(0)
    assert second.take(8000).loan == 1
    second.clear()
    assert room == Room(size_bytes=3 * 4096)
    first.take(1)
    assert room.size_bytes == 4096, "the piece that was free is larger than what is asked for"
    first.clear()


def test_the_memory_that_is_kept_for_later_has_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.feeding.lending.MAX_FREE_BYTES", 100 << 12)
    pool, made = Pool(lambda size: memoryview(bytearray(size))), list[int]()
    for pages in range(1, 60):
        pieces = [pool.take(pages << 12) for _ in range(3)]
        for piece in pieces:
            pool.give(piece)
        made.append(sum(piece.nbytes for piece in pool._free))
    assert max(made) <= 100 << 12
    assert MAX_FREE_BYTES > 100 << 12


def test_where_the_carrier_copies_memory_is_free_once_it_has_left() -> None:
    lending = Lending(MemoryTransport())
    first = lending.take(5000)
    assert first.loan == NO_LOAN
    lending.on_sent(first)
    assert whole(lending.take(100)) is whole(first)
    lending.clear()


@pytest.mark.parametrize("transport", [ShmTransport("lending"), MemoryTransport()])
def test_a_late_look_at_a_batch_finds_nothing_of_it(transport: Transport) -> None:
    lending = Lending(transport, poisons=True)
    piece = lending.take(5000)
    late = piece.memory[:]
    late[:] = bytes(5000)
    lending.drop(piece)
    assert is_poisoned(late)
    lending.clear()


def test_a_batch_that_has_left_twice_is_a_mistake_of_ours() -> None:
    lending = Lending(MemoryTransport())
    piece = lending.take(100)
    lending.on_sent(piece)
    with pytest.raises(ProtocolBug, match="given back twice"):
        lending.on_sent(piece)

"""Lent memory has one owner, which gives it back once; what is free shows that it is."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from paceline.errors import ProtocolBug
from paceline.transport.buffer_pool import BufferPool, ExactAllocator, is_poisoned
from paceline.transport.buffers import fresh_buffer


@pytest.mark.parametrize("size_bytes", [1, 24, 1 << 20])
def test_what_came_back_is_poisoned_and_lent_again(size_bytes: int) -> None:
    pool = BufferPool(ExactAllocator(fresh_buffer), poisons=True)
    first = pool.lend(size_bytes)
    late = first.memory[:]
    late[:] = bytes(size_bytes)

    first.release()

    assert is_poisoned(late)
    assert pool.lend(size_bytes).whole is first.whole
    assert pool.lend(size_bytes).whole is not first.whole
    assert pool.num_lent == 0, "their owners have dropped them"


@pytest.mark.parametrize("kind", ["f", "d"])
def test_poison_is_no_number(kind: str) -> None:
    pool = BufferPool(ExactAllocator(fresh_buffer), poisons=True)
    buffer = pool.lend(16)
    buffer.release()
    assert all(math.isnan(number) for number in buffer.memory.cast(kind))


def test_memory_stays_as_it_is_unless_poison_is_asked_for() -> None:
    pool = BufferPool(ExactAllocator(fresh_buffer))
    buffer = pool.lend(4)
    buffer.memory[:] = b"abcd"
    buffer.release()
    assert bytes(pool.lend(4).memory) == b"abcd"


def test_a_late_owner_cannot_give_away_what_is_lent_to_another() -> None:
    pool = BufferPool(ExactAllocator(fresh_buffer))
    late = pool.lend(8)
    late.release()
    owner = pool.lend(8)
    assert owner.whole is late.whole
    with pytest.raises(ProtocolBug, match="memory of 8 bytes was given back twice"):
        late.release()
    assert pool.lend(8).whole is not owner.whole


def test_sizes_are_kept_apart() -> None:
    pool = BufferPool(ExactAllocator(fresh_buffer))
    small = pool.lend(8)
    small.release()
    large = pool.lend(16)
    assert large.memory.nbytes == 16
    assert pool.lend(8).whole is small.whole
    pool.clear()
    large.release()
    assert pool.lend(16).whole is large.whole


def test_of_two_threads_that_give_back_the_same_one_is_told() -> None:
    pool, together = BufferPool(ExactAllocator(fresh_buffer)), Barrier(2)

    def give_back(buffer_of: list) -> bool:
        together.wait(timeout=30)
        try:
            buffer_of[0].release()
        except ProtocolBug:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        for _ in range(50):
            held = [pool.lend(8)]
            assert sorted(threads.map(give_back, [held, held])) == [False, True]

"""Buffer pool: memory with one owner at a time, which releases it exactly once.

Tests poison free memory, so that a late reader finds NaN and not values that look right.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Final, Protocol, final
from weakref import WeakSet

from paceline.errors import ProtocolBug

_POISON: Final = 0xFF  # in every byte: NaN as floating-point numbers of any size, -1 as integers


def poison(memory: memoryview) -> None:
    """Overwrite free memory with bytes that cannot be mistaken for values."""
    if memory.nbytes:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), _POISON, memory.nbytes)


def is_poisoned(memory: memoryview) -> bool:
    """Return whether memory is as `poison` leaves it."""
    return bytes(memory).count(_POISON) == memory.nbytes


class Allocator(Protocol):
    """The free memory of a pool. Used under the lock of the pool."""

    def allocate(self, size_bytes: int) -> memoryview:
        """Return memory of at least this size, allocated if need be; raises what the allocation raises."""
        ...

    def free(self, memory: memoryview) -> None:
        """Take memory back."""
        ...

    def clear(self) -> None:
        """Drop all memory."""
        ...


class ExactAllocator:
    """Free memory by exact size; what was released last is reused first."""

    def __init__(self, make: Callable[[int], memoryview]) -> None:
        self._make = make
        self._free: dict[int, list[memoryview]] = {}

    def allocate(self, size_bytes: int) -> memoryview:
        """Return memory of this size; see `Allocator.allocate`."""
        free = self._free.get(size_bytes)
        return free.pop() if free else self._make(size_bytes)

    def free(self, memory: memoryview) -> None:
        """Take memory back."""
        self._free.setdefault(memory.nbytes, []).append(memory)

    def clear(self) -> None:
        """Release all memory."""
        self._free.clear()


def rounded_up(size_bytes: int) -> int:
    """Return the next of the eight sizes between a power of two and the one above it: at most an eighth more.

    >>> [rounded_up(size_bytes) for size_bytes in (0, 7, 16, 17, 256, 257, 300)]
    [0, 7, 16, 18, 256, 288, 320]
    """
    step = 1 << max(0, size_bytes.bit_length() - 4)
    return -(-size_bytes // step) * step


@final
class RoundedAllocator(ExactAllocator):
    """Free memory by rounded size, for sizes that peers choose: few of them are kept apart."""

    def allocate(self, size_bytes: int) -> memoryview:
        """Return memory of this size or up to an eighth more; see `Allocator.allocate`."""
        return super().allocate(rounded_up(size_bytes))


@final
class Buffer:
    """Memory of a pool with one owner. A buffer that is dropped without `release` is freed, and not reused.

    Reused memory is a new buffer, so that a late `release` of this one cannot free that.
    """

    __slots__ = ("__weakref__", "_pool", "memory", "whole")

    def __init__(self, whole: memoryview, size_bytes: int, pool: BufferPool) -> None:
        self.whole: Final = whole  # the piece that this is the start of
        self.memory: Final = whole if whole.nbytes == size_bytes else whole[:size_bytes]
        self._pool = pool

    def release(self) -> None:
        """Return the memory to the pool, for others to overwrite.

        Raises:
            ProtocolBug: it was released before.
        """
        self._pool.reclaim(self)


@final
class BufferPool:
    """Lends memory, and takes it back from each owner exactly once. Thread-safe.

    Args:
        pieces: the free memory.
        poisons: overwrite released memory; tests do.

    Example:
        >>> pool = BufferPool(ExactAllocator(lambda size_bytes: memoryview(bytearray(size_bytes))))
        >>> first = pool.lend(8)
        >>> first.release()
        >>> second = pool.lend(8)
        >>> second.memory is first.memory, pool.num_lent
        (True, 1)
        >>> first.release()
        Traceback (most recent call last):
            ...
        paceline.errors.ProtocolBug: memory of 8 bytes was given back twice
    """

    def __init__(self, pieces: Allocator, *, poisons: bool = False) -> None:
        self._pieces = pieces
        self._poisons = poisons
        self._lock = threading.Lock()
        self._lent: WeakSet[Buffer] = WeakSet()

    @property
    def num_lent(self) -> int:
        """Number of buffers that have an owner."""
        with self._lock:
            return len(self._lent)

    def lend(self, size_bytes: int) -> Buffer:
        """Lend memory of this size with arbitrary content; raises what its allocation raises."""
        with self._lock:
            buffer = Buffer(self._pieces.allocate(size_bytes), size_bytes, self)
            self._lent.add(buffer)
        return buffer

    def reclaim(self, buffer: Buffer) -> None:
        """Release a buffer; see `Buffer.release`."""
        with self._lock:
            if buffer not in self._lent:
                raise ProtocolBug(f"memory of {buffer.memory.nbytes} bytes was given back twice")
            self._lent.discard(buffer)
            if self._poisons:
                poison(buffer.whole)
            self._pieces.free(buffer.whole)

    def clear(self) -> None:
        """Drop all free memory."""
        with self._lock:
            self._pieces.clear()

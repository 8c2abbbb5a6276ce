"""Memory that is lent and comes back: one owner at a time, who gives it back once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final
from weakref import WeakSet

from paceline.errors import ProtocolBug


@final
class Buffer:
    """Lent memory in the hands of its one owner. What is dropped without `release` is freed, and lent no more.

    The same memory lent again is another buffer, so that a late owner of this one cannot give that away.
    """

    __slots__ = ("__weakref__", "_pool", "memory")

    def __init__(self, memory: memoryview, pool: BufferPool) -> None:
        self.memory = memory
        self._pool = pool

    def release(self) -> None:
        """Give the memory back: from now on it is others' to write to.

        Raises:
            ProtocolBug: it was given back before.
        """
        self._pool.take_back(self)


@final
class BufferPool:
    """Lends memory of exact sizes, the piece given back last first. Safe to use from several threads.

    Args:
        make: gives new writable memory of a size in bytes; what it raises comes out of `lend`.

    Example:
        >>> pool = BufferPool(lambda size_bytes: memoryview(bytearray(size_bytes)))
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

    def __init__(self, make: Callable[[int], memoryview]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self._lent: WeakSet[Buffer] = WeakSet()

    @property
    def num_lent(self) -> int:
        """Number of buffers that have an owner."""
        with self._lock:
            return len(self._lent)

    def lend(self, size_bytes: int) -> Buffer:
        """Lend memory of this size, of any content."""
        with self._lock:
            free = self._free.get(size_bytes)
            buffer = Buffer(free.pop() if free else self._make(size_bytes), self)
            self._lent.add(buffer)
        return buffer

    def take_back(self, buffer: Buffer) -> None:
        """Do what `Buffer.release` says."""
        with self._lock:
            if buffer not in self._lent:
                raise ProtocolBug(f"memory of {buffer.memory.nbytes} bytes was given back twice")
            self._lent.discard(buffer)
            self._free.setdefault(buffer.memory.nbytes, []).append(buffer.memory)

    def clear(self) -> None:
        """Let go of all memory that is free."""
        with self._lock:
            self._free.clear()

"""Memory that is lent and comes back: one owner at a time, who gives it back once.

What is free can be poisoned, so that whoever still looks at it finds NaN, and not what happens to be there.
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
    """Overwrite free memory with what nobody can take for values."""
    if memory.nbytes:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), _POISON, memory.nbytes)


def is_poisoned(memory: memoryview) -> bool:
    """Say whether memory is as `poison` leaves it."""
    return bytes(memory).count(_POISON) == memory.nbytes


class Pieces(Protocol):
    """Memory that is free. Used under the lock of its pool."""

    def take(self, size_bytes: int) -> memoryview:
        """Return memory of at least this size, made if need be; what making it raises comes out here."""
        ...

    def give(self, memory: memoryview) -> None:
        """Take memory back."""
        ...

    def clear(self) -> None:
        """Let go of all memory."""
        ...


@final
class ExactPieces:
    """Keeps all that is free by its size, and gives out what came back last."""

    def __init__(self, make: Callable[[int], memoryview]) -> None:
        self._make = make
        self._free: dict[int, list[memoryview]] = {}

    def take(self, size_bytes: int) -> memoryview:
        """Return memory of this size; see `Pieces.take`."""
        free = self._free.get(size_bytes)
        return free.pop() if free else self._make(size_bytes)

    def give(self, memory: memoryview) -> None:
        """Take memory back."""
        self._free.setdefault(memory.nbytes, []).append(memory)

    def clear(self) -> None:
        """Let go of all memory."""
        self._free.clear()


@final
class Buffer:
    """Lent memory in the hands of its one owner. What is dropped without `release` is freed, and lent no more.

    The same memory lent again is another buffer, so that a late owner of this one cannot give that away.
    """

    __slots__ = ("__weakref__", "_pool", "memory", "whole")

    def __init__(self, whole: memoryview, size_bytes: int, pool: BufferPool) -> None:
        self.whole: Final = whole  # the piece that this is the start of
        self.memory: Final = whole if whole.nbytes == size_bytes else whole[:size_bytes]
        self._pool = pool

    def release(self) -> None:
        """Give the memory back: from now on it is others' to write to.

        Raises:
            ProtocolBug: it was given back before.
        """
        self._pool.take_back(self)


@final
class BufferPool:
    """Lends memory, and takes it back from each owner once. Safe to use from several threads.

    Args:
        pieces: what is free.
        poisons: overwrite what comes back; tests do.

    Example:
        >>> pool = BufferPool(ExactPieces(lambda size_bytes: memoryview(bytearray(size_bytes))))
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

    def __init__(self, pieces: Pieces, *, poisons: bool = False) -> None:
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
        """Lend memory of this size, of any content; raises what making it raises."""
        with self._lock:
            buffer = Buffer(self._pieces.take(size_bytes), size_bytes, self)
            self._lent.add(buffer)
        return buffer

    def take_back(self, buffer: Buffer) -> None:
        """Do what `Buffer.release` says."""
        with self._lock:
            if buffer not in self._lent:
                raise ProtocolBug(f"memory of {buffer.memory.nbytes} bytes was given back twice")
            self._lent.discard(buffer)
            if self._poisons:
                poison(buffer.whole)
            self._pieces.give(buffer.whole)

    def clear(self) -> None:
        """Let go of all memory that is free."""
        with self._lock:
            self._pieces.clear()

"""Pools of buffers in which batches travel to one worker; a buffer is reused once the worker no longer reads it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from paceline.data.service.messages import NO_LENT_BUFFER
from paceline.transport.base import EMPTY, Transport
from paceline.transport.buffer_pool import Buffer, BufferPool
from paceline.transport.buffers import fresh_buffer
from paceline.transport.segments import PeerMemory


def borrowed(memory: memoryview, on_returned: Callable[[], None]) -> memoryview:
    """Return a view of memory (not empty), and call `on_returned` when the last reference to any part of it is gone.

    The call comes on the thread that drops the reference, at any point of its code, so it must not lock.

    >>> returned = []
    >>> view = borrowed(memoryview(bytearray(b"abcd")), lambda: returned.append(1))
    >>> part = view[1:3]
    >>> del view
    >>> returned, bytes(part)
    ([], b'bc')
    >>> del part
    >>> returned
    [1]
    """
    holder = np.frombuffer(memory, dtype=np.uint8)
    weakref.finalize(holder, on_returned).atexit = False
    return holder.data


def forget_writes(memory: memoryview) -> None:
    """Drop the writes of this process to shared memory, which would hide what the data server has written there since.

    A loop may write to its batches; such writes are private to this process.
    """
    if isinstance(memory.obj, PeerMemory) and memory.obj.was_written_anywhere():
        memory.obj.reread()


# Limits of shared memory; beyond them batches are copied. A lent buffer takes two descriptors here, one at the worker.
MAX_SEND_BUFFERS: Final = 64  # over one connection
MAX_SEND_BUFFERS_OF_ALL: Final = 256
MAX_LENT_BYTES: Final = 2 << 30
MAX_LENT_BYTES_OF_ALL: Final = 8 << 30
MAX_FREE: Final = 8  # free buffers kept for the next batches
MAX_FREE_BYTES: Final = 2 << 30  # of these together
_PAGE_BYTES: Final = 4096


@dataclass(slots=True)
class BatchPool:
    """Free buffers, kept for reuse; `BatchBuffers` tracks those in use."""

    make: Callable[[int], memoryview]
    _free: list[memoryview] = field(default_factory=list[memoryview])  # the smallest first

    def allocate(self, size_bytes: int) -> memoryview:
        """Return a buffer of at least this size: the smallest free one that fits, or a new one in place of one."""
        fitting = self._fitting(size_bytes)
        if fitting is not None:
            return self._free.pop(fitting)
        if self._free:
            self._free.pop(0)  # batches have become larger: never keep more buffers than were in use at once
        return self.make(_rounded(size_bytes))

    def bytes_for(self, size_bytes: int) -> int:
        """Return the size of the buffer that `take` would return."""
        fitting = self._fitting(size_bytes)
        return _rounded(size_bytes) if fitting is None else self._free[fitting].nbytes

    def free(self, memory: memoryview) -> None:
        """Free a buffer for reuse; the largest ones are kept, up to the limits."""
        free = sorted([*self._free, memory], key=_size)[-MAX_FREE:]
        while sum(map(_size, free)) > MAX_FREE_BYTES:
            free.pop(0)
        self._free = free

    def clear(self) -> None:
        """Drop all free buffers."""
        self._free = []

    def _fitting(self, size_bytes: int) -> int | None:
        return next((at for at, memory in enumerate(self._free) if memory.nbytes >= size_bytes), None)


class LentPiece(msgspec.Struct, frozen=True):
    """Buffer of one batch: lent to the worker under a number, or copied by the transport (`NO_LENT_BUFFER`).

    An empty batch has no buffer.
    """

    lent_buffer: int
    buffer: Buffer | None

    @property
    def memory(self) -> memoryview:
        """The part of the buffer that the batch needs."""
        return EMPTY if self.buffer is None else self.buffer.memory


@dataclass(slots=True)
class LendingLimit:
    """Limit of lent memory over all connections together. Safe to use from several threads."""

    send_buffers: int = MAX_SEND_BUFFERS_OF_ALL
    size_bytes: int = MAX_LENT_BYTES_OF_ALL
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def try_reserve(self, size_bytes: int) -> bool:
        """Reserve this size and return True, if it is available."""
        with self._lock:
            if not self.send_buffers or size_bytes > self.size_bytes:
                return False
            self.send_buffers, self.size_bytes = self.send_buffers - 1, self.size_bytes - size_bytes
            return True

    def release(self, size_bytes: int) -> None:
        """Release a reserved size."""
        with self._lock:
            self.send_buffers, self.size_bytes = self.send_buffers + 1, self.size_bytes + size_bytes


@dataclass(slots=True)
class BatchBuffers:
    """Batch buffers of one connection. Safe to use from several threads.

    Where the transport maps memory, the worker reads the data server's own until it returns the buffer; at most
    `MAX_SEND_BUFFERS` are lent at once. Other transports copy, and the buffer is free once the batch is sent.
    """

    transport: Transport
    limit: LendingLimit = field(default_factory=LendingLimit)
    poisons: bool = False
    _free_shared: BatchPool = field(init=False)
    _shared: BufferPool = field(init=False)
    _own: BufferPool = field(init=False)
    _lent: dict[int, Buffer] = field(default_factory=dict[int, Buffer])
    _lent_bytes: int = 0
    _num_send_buffers: int = 0
    _is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Make the pools: one of memory that the worker can map, and one of private memory."""
        self._free_shared = BatchPool(self.transport.allocate)
        self._shared = BufferPool(self._free_shared, poisons=self.poisons)
        self._own = BufferPool(BatchPool(fresh_buffer), poisons=self.poisons)

    def allocate(self, size_bytes: int) -> LentPiece:
        """Return a buffer for a batch of this size.

        Raises:
            OSError, MemoryError: there is none.
        """
        if not size_bytes:
            return LentPiece(NO_LENT_BUFFER, None)
        with self._lock:
            whole_bytes = self._free_shared.bytes_for(size_bytes)
            if not (self._may_lend(whole_bytes) and self.limit.try_reserve(whole_bytes)):
                return LentPiece(NO_LENT_BUFFER, self._own.lend(size_bytes))
            try:
                buffer = self._shared.lend(size_bytes)
            except (OSError, MemoryError):
                self.limit.release(whole_bytes)
                raise
            lent_buffer, self._num_send_buffers = self._num_send_buffers, self._num_send_buffers + 1
            self._lent[lent_buffer] = buffer
            self._lent_bytes += buffer.whole.nbytes
            return LentPiece(lent_buffer, buffer)

    def drop(self, piece: LentPiece) -> None:
        """Free a buffer that was never announced to the worker."""
        self.release(piece.lent_buffer)
        self.on_sent(piece)

    def on_sent(self, piece: LentPiece) -> None:
        """Free the buffer of a batch that the transport has copied; a lent one stays."""
        if piece.lent_buffer == NO_LENT_BUFFER and piece.buffer is not None:
            piece.buffer.release()

    def release(self, lent_buffer: int) -> bool:
        """Free a lent buffer; return False when none is lent under this number."""
        with self._lock:
            buffer = self._lent.pop(lent_buffer, None)
            if buffer is None:
                return False
            self._lent_bytes -= buffer.whole.nbytes
            self.limit.release(buffer.whole.nbytes)
            buffer.release()
            return True

    def clear(self) -> None:
        """Free all buffers, after the connection has ended."""
        with self._lock:
            self._shared.clear()
            self._own.clear()
            for buffer in self._lent.values():
                self.limit.release(buffer.whole.nbytes)
            self._lent.clear()
            self._is_over = True

    def _may_lend(self, size_bytes: int) -> bool:
        few = len(self._lent) < MAX_SEND_BUFFERS and self._lent_bytes + size_bytes <= MAX_LENT_BYTES
        return self.transport.maps_memory and few and not self._is_over


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _size(memory: memoryview) -> int:
    return memory.nbytes

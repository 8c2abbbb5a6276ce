"""Memory for bodies: allocation, flat views, and lending.

A lent body is sent from memory whose owner will change it, without a copy unless it does so meanwhile.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Final, Protocol, final, runtime_checkable

from paceline.errors import UsageError
from paceline.transport.base import EMPTY, AllocateBody
from paceline.transport.buffer_pool import Buffer

# Below this a zeroed bytearray is cheaper than a mapping; above it, pages are better touched as bytes arrive.
MIN_MAPPED_BYTES: Final = 256 * 1024


def fresh_buffer(size_bytes: int) -> memoryview:
    """Return writable memory. Large buffers cost nothing until written, so neither does a peer's false length."""
    if size_bytes < MIN_MAPPED_BYTES:
        return memoryview(bytearray(size_bytes))
    return memoryview(map_private(size_bytes))


def map_private(size_bytes: int) -> mmap.mmap:
    """Map fresh memory of this process alone."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= MIN_MAPPED_BYTES:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def check_size(size_bytes: int) -> None:
    """Raise UsageError for a negative size."""
    if size_bytes < 0:
        raise UsageError(f"cannot allocate {size_bytes} bytes")


def flat(body: memoryview) -> memoryview:
    """Return `body` as contiguous bytes, without a copy; raises UsageError when it is not contiguous."""
    if body.nbytes == 0:
        return EMPTY
    if body.format == "B" and body.ndim == 1 and body.contiguous:
        return body
    if not body.c_contiguous:
        raise UsageError(f"a body must be contiguous, got shape {body.shape} with strides {body.strides}")
    return body.cast("B")


def copied(body: memoryview) -> memoryview:
    """Return a copy of a flat body in memory of its own."""
    if not body.nbytes:
        return EMPTY
    copy = fresh_buffer(body.nbytes)
    copy[:] = body
    return copy


def destination(place: AllocateBody | None, header: bytes, size_bytes: int) -> tuple[memoryview, Buffer | None] | None:
    """Return the memory that `place` gives for a body, as bytes, and its buffer, if any; None for fresh memory.

    Raises UsageError when the memory is read-only or has another size.
    """
    given = None if place is None else place(header, size_bytes)
    if given is None:
        return None
    memory, buffer = (given.memory, given) if isinstance(given, Buffer) else (given, None)
    if memory.readonly or memory.nbytes != size_bytes:
        kind = "read-only" if memory.readonly else "writable"
        raise UsageError(
            f"a body of {size_bytes} bytes was to go into {kind} memory of {memory.nbytes} bytes, expected writable "
            "memory of its size"
        )
    return flat(memory), buffer


@final
class LentBody:
    """A body of a frame: the memory of its owner, or a copy once the owner has taken that back.

    `lock` is held while bytes are taken from `memory`, which no thread does for long.

    Args:
        memory: to send.
        owner: has lent it; None if it never changes.
        start: where it lies in the memory of its owner.
    """

    __slots__ = ("lock", "memory", "owner", "start")

    def __init__(self, memory: memoryview, owner: LentMemory | None = None, start: int = 0) -> None:
        self.lock = threading.Lock()
        self.memory = memory
        self.owner = owner
        self.start = start

    def replace(self, copy: memoryview) -> None:
        """Have the bytes that have not been taken yet come from a copy."""
        with self.lock:
            self.memory = copy

    def note_left(self) -> None:
        """Note that its frame has left, or will not."""
        if self.owner is not None:
            self.owner.note_left(self)


@final
class LentMemory:
    """Memory that lends bodies. Used by one thread, the one that changes the memory, except for `note_left`.

    Example:
        >>> values = bytearray(b"ab")
        >>> memory = LentMemory(memoryview(values))
        >>> body = memory.lend(1)
        >>> memory.take_back()
        >>> values[:] = b"cd"
        >>> bytes(body.memory)
        b'b'
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._bodies: set[LentBody] = set()
        self._then: Callable[[], object] | None = None

    def lend(self, start: int = 0) -> LentBody:
        """Return the memory from `start` on as a body."""
        body = LentBody(self._memory[start:], self, start)
        with self._lock:
            self._bodies.add(body)
        return body

    def take_back(self) -> None:
        """Call before the memory changes: frames that have not left get a copy, one for all."""
        with self._lock:
            bodies, self._bodies, self._then = self._bodies, set(), None
        if bodies:
            copy = fresh_buffer(self._memory.nbytes)
            copy[:] = self._memory
            for body in bodies:
                body.replace(copy[body.start :])

    def when_left(self, call: Callable[[], object]) -> None:
        """Have `call` called, on any thread, when the next bodies that are lent have left; not once taken back."""
        with self._lock:
            self._then = call

    def note_left(self, body: LentBody) -> None:
        """See `LentBody.note_left`."""
        with self._lock:
            self._bodies.discard(body)
            then = None if self._bodies else self._then
            if then is not None:
                self._then = None
        if then is not None:
            then()


@runtime_checkable
class SendsLent(Protocol):
    """A connection that sends lent bodies from where they are."""

    def send_lent(self, header: bytes, body: LentBody, *, timeout_s: float) -> None:
        """Send one frame as `Connection.send` does; its bytes are taken one part after the other."""
        ...

"""Memory for bodies: allocation, flat views, and the lookup of the buffer that a view lies in."""

import ctypes
import mmap
import threading
import weakref
from bisect import bisect_right
from dataclasses import dataclass
from itertools import count
from typing import Final, final

from paceline.errors import UsageError
from paceline.transport.base import EMPTY, Place
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


def destination(place: Place | None, header: bytes, size_bytes: int) -> tuple[memoryview, Buffer | None] | None:
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


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """One buffer in the address space, alive as long as a view of it exists.

    In shared memory, `descriptor` is that of the file behind it, open as long as the region is alive.
    """

    number: int
    start: int
    size_bytes: int
    mapping: "weakref.ref[mmap.mmap]"
    descriptor: int | None


@final
class MemoryRegions:
    """The buffers that a transport has allocated, found by address. Thread-safe.

    Holds no buffer alive: when the last view of one is dropped it is freed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        # Sorted by start; may still name freed buffers, whose `mapping()` is None, until the next add.
        self._regions: list[MemoryRegion] = []
        self._of_object: dict[int, MemoryRegion] = {}  # the same, by the identity of the mapping

    def add(self, mapping: mmap.mmap, descriptor: int | None = None) -> None:
        """Register a buffer under a number of its own."""
        start, size_bytes = _address(memoryview(mapping)), len(mapping)
        with self._lock:
            region = MemoryRegion(next(self._numbers), start, size_bytes, weakref.ref(mapping), descriptor)
            self._regions = sorted([*self.alive(), region], key=_start)
            alive = ((each.mapping(), each) for each in self._regions)
            self._of_object = {id(owner): each for owner, each in alive if owner is not None}

    def alive(self) -> list[MemoryRegion]:
        """Return the buffers that have views."""
        return [region for region in self._regions if region.mapping() is not None]

    def find(self, body: memoryview) -> tuple[MemoryRegion, int] | None:
        """Return the buffer that a flat body lies wholly inside, and where in it, or None."""
        regions = self._regions
        if body.readonly or not body.nbytes or not regions:
            return None
        whole = self._of_object.get(id(body.obj))
        if whole is not None and whole.size_bytes == body.nbytes and whole.mapping() is body.obj:
            return whole, 0
        address = _address(body)
        index = bisect_right(regions, address, key=_start) - 1
        if index < 0:
            return None
        region = regions[index]
        offset = address - region.start
        if offset + body.nbytes > region.size_bytes or region.mapping() is None:
            return None
        return region, offset


def _start(region: MemoryRegion) -> int:
    return region.start


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

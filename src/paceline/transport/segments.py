"""Shared-memory segments: as their owner allocates them and finds them, and as other processes of a machine map them.

A segment is an anonymous memory file (memfd): it has no name, so nothing can be left behind. Its descriptor is passed
over each connection once, with the first frame that uses it there; later frames name it by number. Its size is sealed,
so that neither side can make the other fault by shrinking it, and its owner alone can write to it: a mapping of a
peer is private, so that it shows what the owner writes, and what is written to it stays local. Memory that outlives
its owner (`LastingMemory`) is not sealed against writing, as the successor has to write: peers get it read-only. What
never changes (`seal`) is sealed against its owner, too.
Children that the owner forks have it as private memory: what they write stays with them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from errno import EFBIG, EMFILE, ENOSYS
from itertools import count
from typing import Final, final

import msgspec

from paceline.errors import PeerError
from paceline.transport.buffers import check_size, fresh_buffer
from paceline.transport.rate_limited_log import Notice

_PAGEMAP: Final = "/proc/self/pagemap"
_ENTRY_BYTES: Final = 8
_STRETCH_PAGES: Final = 1024
# The highest byte of an entry says: the page is in memory, or in the swap, and if so whether it is one of a file.
_HERE: Final = 0x80 | 0x40
_FROM_FILE: Final = 0x20
_NOT_OWN: Final = bytes(flags for flags in range(256) if not flags & _HERE or flags & _FROM_FILE)

_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_OWN: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
# Linux's numbers, which Python does not name.
_MAP_FIXED: Final = 0x10
_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_FAILED: Final = ctypes.c_void_p(-1).value

_MORE_MEMORY: Final = "give the job more memory or fewer workers per machine"
_REMEDIES: Final = {
    EFBIG: "raise the limit of file sizes (`ulimit -f`)",
    EMFILE: "raise the limit of open files (`ulimit -n`)",
}

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


@final
class PeerMemory(mmap.mmap):
    """The private mapping of a segment. A page that is written to here becomes this process's own copy of it."""

    _turn = 0  # which stretch is looked at next
    _pagemap = -1  # what tells which pages are whose, once it is open
    _owner = 0  # the process that has opened it: it shows the pages of that one
    _closing: weakref.finalize[[int], PeerMemory] | None = None

    @staticmethod
    def of(descriptor: int, size_bytes: int) -> PeerMemory:
        """Map the file behind a descriptor, which is not needed any more then; raises OSError."""
        # Python maps files only while it keeps a descriptor of its own: the peer's memory would live as long.
        made = PeerMemory(-1, size_bytes, flags=_OWN, prot=_READ_WRITE)
        map_privately(made._address, size_bytes, descriptor)
        return made

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def keep(self) -> None:
        """Replace the mapping in place by a copy that this process owns; raises OSError."""
        size_bytes = len(self)
        copy = _succeeded(_libc.mmap(None, size_bytes, _READ_WRITE, _OWN, -1, 0))
        ctypes.memmove(copy, self._address, size_bytes)
        # Moved there atomically: a concurrent reader sees the same bytes before and after.
        _succeeded(_libc.mremap(copy, size_bytes, size_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, self._address))

    def was_written(self, at: Iterable[int] = ()) -> bool:
        """Return whether this process has written here since the last `reread`; True where that cannot be found out.

        The check takes 1 ms for each 100 MB. So in large memory it covers the pages of the addresses `at` and one
        stretch of all pages, the next one at each call: writes elsewhere are noticed some calls later.
        """
        start = self._address // mmap.PAGESIZE
        stop = start + -(-len(self) // mmap.PAGESIZE)
        first = start + self._turn * _STRETCH_PAGES
        self._turn = 0 if first + _STRETCH_PAGES >= stop else self._turn + 1
        stretches = [(first, min(stop - first, _STRETCH_PAGES))]
        if stop - start > _STRETCH_PAGES:
            stretches += [(address // mmap.PAGESIZE, 1) for address in at]
        try:
            if self._owner != os.getpid():
                self._open_pagemap()
            return any(_has_own(self._pagemap, first, num_pages) for first, num_pages in stretches)
        except OSError:
            return True

    def shows_writes(self, address: int, size_bytes: int) -> bool:
        """Return whether the kernel shows that this process has written to the pages of these addresses, if of here."""
        if not self._address <= address < self._address + len(self) or self._owner != os.getpid():
            return False
        first = address // mmap.PAGESIZE
        try:
            return _has_own(self._pagemap, first, (address + size_bytes - 1) // mmap.PAGESIZE + 1 - first)
        except OSError:
            return False

    def _open_pagemap(self) -> None:
        """Open what tells which pages are whose, for as long as the mapping lives; raises OSError."""
        self._pagemap = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        self._owner = os.getpid()
        self._closing = weakref.finalize(self, os.close, self._pagemap)
        self._closing.atexit = False

    def close(self) -> None:
        """Unmap the memory, and free the descriptor beside it."""
        super().close()
        if self._closing is not None:
            self._closing()

    def was_written_anywhere(self) -> bool:
        """Return whether this process has written to any page; looks at all of them."""
        return any(self.was_written() for _ in range(-(-len(self) // (_STRETCH_PAGES * mmap.PAGESIZE))))

    def reread(self) -> None:
        """Discard local writes: every page shows the peer's memory again."""
        self.madvise(mmap.MADV_DONTNEED)


def map_privately(address: int, size_bytes: int, descriptor: int) -> None:
    """Map a file in the place of memory of this process, so that writes stay here; raises OSError."""
    _succeeded(_libc.mmap(address, size_bytes, _READ_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, 0))


def _succeeded(address: int | None) -> int:
    """Return the address that a call has given; raises OSError if it has failed."""
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def _has_own(pagemap: int, first: int, num_pages: int) -> bool:
    """Return whether one of these pages is a private copy and not the file's page."""
    entries = os.pread(pagemap, num_pages * _ENTRY_BYTES, first * _ENTRY_BYTES)
    known = entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]
    return len(known) < num_pages or bool(known.translate(None, delete=_NOT_OWN))


class MemoryRegion(msgspec.Struct, frozen=True):
    """One buffer in the address space, alive as long as a view of it exists.

    In shared memory, `descriptor` is that of the file behind it, open as long as the region is alive.
    """

    number: int
    start: int
    size_bytes: int
    mapping: weakref.ref[mmap.mmap]
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


CreateMemory = Callable[[int], int]

_F_SEAL_FUTURE_WRITE: Final = 0x0010  # Linux 5.1; Python's fcntl does not name it yet
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@final
class Segments:
    """The shared memory that one transport has allocated. Thread-safe.

    A segment lives until its last view is dropped, whatever becomes of connections and of the transport; its
    descriptor is closed then. When shared memory is not available, `allocate` falls back to plain memory and calls
    `notice`.
    """

    def __init__(self, create_memory: CreateMemory, notice: Notice) -> None:
        self._create_memory = create_memory
        self._notice = notice
        self.regions: Final = MemoryRegions()
        _all_segments.add(self)

    def allocate(self, size_bytes: int) -> memoryview:
        """Return memory that peers will map, or plain memory when shared memory is not available."""
        check_size(size_bytes)
        if size_bytes == 0:
            return fresh_buffer(0)
        try:
            descriptor, mapping = _create_segment(size_bytes, self._create_memory)
        except OSError as error:
            self._notice(
                f"shared memory of {size_bytes} bytes cannot be allocated ({error.strerror}); such bodies are copied "
                f"through the socket instead, which is slower: {_REMEDIES.get(error.errno or 0, _MORE_MEMORY)}"
            )
            return fresh_buffer(size_bytes)
        # Not at exit: a thread may then still be sending it, and the kernel closes it anyway.
        weakref.finalize(mapping, os.close, descriptor).atexit = False
        self.regions.add(mapping, descriptor)
        return memoryview(mapping)

    def share(self, memory: memoryview, descriptor: int) -> None:
        """Have peers map memory that was allocated elsewhere: all of the file that is open here. Raises OSError."""
        mapping = memory.obj
        if not isinstance(mapping, mmap.mmap):
            return  # without bytes
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        os.fchmod(descriptor, stat.S_IRUSR)  # so that what peers get cannot be opened anew for writing
        shown = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(mapping, os.close, shown).atexit = False
        self.regions.add(mapping, shown)

    def find(self, body: memoryview) -> tuple[MemoryRegion, int] | None:
        """Return the segment that a flat body lies wholly inside, and where in it, or None."""
        return self.regions.find(body)

    def keep_private(self) -> None:
        """Keep what this forked child writes from the processes that share the memory."""
        for region in self.regions.alive():
            if region.descriptor is not None:
                map_privately(region.start, region.size_bytes, region.descriptor)


# What is registered for forks stays registered, and a reader makes a transport each time it connects anew: so one call
# is registered for all of them.
_all_segments: Final[weakref.WeakSet[Segments]] = weakref.WeakSet()


def _keep_all_private() -> None:
    for segments in list(_all_segments):
        segments.keep_private()


os.register_at_fork(after_in_child=_keep_all_private)


def create_memory(size_bytes: int, *, sparse: bool = False) -> int:
    """Create an anonymous memory file with all of its pages allocated; raises OSError when memory is full.

    The pages of a `sparse` one are allocated as they are written.
    """
    try:
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except AttributeError:
        raise OSError(ENOSYS, "this system has no memfd_create") from None
    try:
        if sparse:
            os.ftruncate(descriptor, size_bytes)
        else:
            os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def append(descriptor: int, content: memoryview) -> None:
    """Write bytes behind those that were written to a memory file; raises OSError when memory is full."""
    while content:
        content = content[os.write(descriptor, content) :]


def seal(descriptor: int, size_bytes: int) -> PeerMemory:
    """Have no process change what was written to a memory file, and map it; raises OSError."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_WRITE)
    return PeerMemory.of(descriptor, size_bytes)


def _create_segment(size_bytes: int, create: CreateMemory) -> tuple[int, mmap.mmap]:
    """Return the descriptor of new sealed memory and our writable mapping of it."""
    descriptor = create(size_bytes)
    try:
        mapping = mmap.mmap(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, mapping


def map_segment(descriptor: int, size_bytes: int, peer: str) -> PeerMemory:
    """Map the peer's memory after checking that it has the announced size and cannot shrink.

    The mapping is private: a write here makes a copy of the page and leaves the peer's memory as it was.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise PeerError(f"{peer} passed a descriptor that is not sealed memory ({error.strerror})") from None
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise PeerError(f"{peer} passed memory that could still change its size (seals {seals:#x}); refused")
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes != size_bytes or size_bytes == 0:
        raise PeerError(f"{peer} passed a segment of {found_bytes} bytes and announced {size_bytes}")
    try:
        return PeerMemory.of(descriptor, size_bytes)
    except OSError as error:
        raise PeerError(f"memory passed by {peer} cannot be mapped here: {error.strerror}") from error

"""Shared-memory segments of a transport, which other processes of this machine can map.

A segment is an anonymous memory file (memfd): it has no name, so nothing can be left behind. Its descriptor is passed
over each connection once, with the first frame that uses it there; later frames name it by number. Its size is sealed,
so that neither side can make the other fault by shrinking it, and its owner alone can write to it. Memory that outlives
its owner (`LastingMemory`) is not sealed against writing, as the successor has to write: peers get it read-only.
Children that the owner forks have it as private memory: what they write stays with them.
"""

import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Callable
from errno import ENOSYS
from typing import Final, final

from paceline.errors import PeerError
from paceline.transport.buffers import MemoryRegion, MemoryRegions, check_size, fresh_buffer
from paceline.transport.peer_memory import PeerMemory, map_privately

CreateMemory = Callable[[int], int]
Notice = Callable[[str], None]

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
        self._regions = MemoryRegions()
        forked = weakref.WeakMethod(self._keep_private)
        os.register_at_fork(after_in_child=lambda: act() if (act := forked()) is not None else None)

    def allocate(self, size_bytes: int) -> memoryview:
        """Return memory that peers will map, or plain memory when shared memory is not available."""
        check_size(size_bytes)
        if size_bytes == 0:
            return fresh_buffer(0)
        try:
            descriptor, mapping = _create_segment(size_bytes, self._create_memory)
        except OSError as error:
            self._notice(
                f"shared memory of {size_bytes} bytes is not to be had ({error.strerror}); such bodies are copied "
                "through the socket instead, which is slower: give the job more memory or fewer workers per machine"
            )
            return fresh_buffer(size_bytes)
        # Not at exit: a thread may then still be sending it, and the kernel closes it anyway.
        weakref.finalize(mapping, os.close, descriptor).atexit = False
        self._regions.add(mapping, descriptor)
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
        self._regions.add(mapping, shown)

    def find(self, body: memoryview) -> tuple[MemoryRegion, int] | None:
        """Return the segment that a flat body lies wholly inside, and where in it, or None."""
        return self._regions.find(body)

    def _keep_private(self) -> None:
        """Keep what this forked child writes from the processes that share the memory."""
        for region in self._regions.alive():
            if region.descriptor is not None:
                map_privately(region.start, region.size_bytes, region.descriptor)


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

"""How the bodies of one connection travel: inside the stream, or as memory that both processes map.

A segment is an anonymous memory file (memfd): it has no name, so nothing can be left behind. Its descriptor is passed
once, with the first frame that uses it; later frames name it by number. Its size is sealed, so that neither side can
make the other fault by shrinking it, and its owner alone can write to it.
"""

import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from errno import ENOSYS
from typing import Final, Protocol, final

from paceline.errors import PeerError
from paceline.transport.base import Limits
from paceline.transport.buffers import Regions, check_size, fresh_buffer
from paceline.transport.frames import Kind, Prefix

CreateMemory = Callable[[int], int]
Notice = Callable[[str], None]

_F_SEAL_FUTURE_WRITE: Final = 0x0010  # Linux 5.1; Python's fcntl does not name it yet
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a body lies in shared memory; `descriptor` is set when the peer has yet to be given it."""

    segment: int
    offset: int
    segment_bytes: int
    descriptor: int | None


class Bodies(Protocol):
    """How bodies travel over one stream connection."""

    @property
    def passes_descriptors(self) -> bool:
        """Whether descriptors may come with the stream."""
        ...

    def allocate(self, size_bytes: int) -> memoryview:
        """Give writable memory, shared if possible."""
        ...

    def place(self, body: memoryview) -> Placement | None:
        """Find `body` in shared memory; None means that it travels in the stream."""
        ...

    def passed(self, segment: int) -> None:
        """Note that the peer has been sent the descriptor of a segment."""
        ...

    def take_retired(self) -> list[int]:
        """Return the segments the peer knows and that are gone here, each once."""
        ...

    def view(self, prefix: Prefix, descriptors: deque[int], peer: str) -> memoryview:
        """Return the shared body that a prefix from `peer` names, or drop the segment it retires."""
        ...

    def close(self) -> None:
        """Free everything held; memory still viewed by someone lives until they drop it."""
        ...


@final
class InlineBodies:
    """Every body travels in the stream."""

    def __init__(self) -> None:
        self.passes_descriptors: Final = False

    def allocate(self, size_bytes: int) -> memoryview:
        """Give plain memory."""
        check_size(size_bytes)
        return fresh_buffer(size_bytes)

    def place(self, body: memoryview) -> Placement | None:
        """Return None."""
        return None

    def passed(self, segment: int) -> None:
        """Do nothing: no segment exists."""

    def take_retired(self) -> list[int]:
        """Return nothing."""
        return []

    def view(self, prefix: Prefix, descriptors: deque[int], peer: str) -> memoryview:
        """Refuse."""
        raise PeerError(f"{peer} named shared memory over a transport that has none")

    def close(self) -> None:
        """Do nothing."""


@final
class SharedBodies:
    """Allocated bodies are shared with the peer; all others travel in the stream.

    When memory cannot be had, `allocate` falls back to plain memory and says so to `notice`.
    """

    def __init__(self, limits: Limits, create_memory: CreateMemory, notice: Notice) -> None:
        self.passes_descriptors: Final = True
        self._limits = limits
        self._create_memory = create_memory
        self._notice = notice
        self._lock = threading.Lock()
        self._num_allocated = 0
        # Ours. A segment is in `_unpassed` from allocation until its descriptor is sent or its memory is freed.
        self._regions = Regions(self._freed)
        self._unpassed: dict[int, int] = {}
        self._freed_segments: deque[int] = deque()
        self._retired: list[int] = []
        self._closed = False
        # The peer's, by its numbers.
        self._mapped: dict[int, mmap.mmap] = {}

    def allocate(self, size_bytes: int) -> memoryview:
        """Give memory that the peer will map, or plain memory when none is to be had."""
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
        with self._lock:
            self._sort_freed()
            if self._closed:
                os.close(descriptor)
                return memoryview(mapping)
            self._num_allocated += 1
            number = self._num_allocated
            self._unpassed[number] = descriptor
        self._regions.add(number, mapping)
        return memoryview(mapping)

    def place(self, body: memoryview) -> Placement | None:
        """Find `body` among the memory allocated here."""
        found = self._regions.find(body)
        if found is None:
            return None
        region, offset = found
        return Placement(region.number, offset, region.size_bytes, self._unpassed.get(region.number))

    def passed(self, segment: int) -> None:
        """Close our descriptor of a segment: the mapping keeps it alive here, the peer's descriptor there."""
        os.close(self._unpassed.pop(segment))

    def take_retired(self) -> list[int]:
        """Return the freed segments that the peer was given."""
        with self._lock:
            self._sort_freed()
            retired, self._retired = self._retired, []
        return retired

    def view(self, prefix: Prefix, descriptors: deque[int], peer: str) -> memoryview:
        """Return a view of the peer's memory; raises PeerError unless the segment is what the peer says."""
        if prefix.kind is Kind.RETIRED:
            self._mapped.pop(prefix.segment, None)
            return memoryview(b"")
        if prefix.kind is Kind.SHARED_FIRST:
            self._adopt(prefix, descriptors, peer)
        mapping = self._mapped.get(prefix.segment)
        if mapping is None or len(mapping) != prefix.segment_bytes:
            raise PeerError(f"{peer} named segment {prefix.segment} of {prefix.segment_bytes} bytes, never passed")
        return memoryview(mapping)[prefix.offset : prefix.offset + prefix.body_bytes]

    def close(self) -> None:
        """Close the descriptors never passed and let go of the peer's memory."""
        with self._lock:
            self._closed = True
            unpassed, self._unpassed = self._unpassed, {}
        for descriptor in unpassed.values():
            os.close(descriptor)
        self._mapped.clear()

    def _adopt(self, prefix: Prefix, descriptors: deque[int], peer: str) -> None:
        if not descriptors:
            raise PeerError(f"{peer} announced segment {prefix.segment} without its descriptor")
        if prefix.segment in self._mapped or len(self._mapped) >= self._limits.max_segments:
            raise PeerError(
                f"{peer} passed segment {prefix.segment} twice or more than {self._limits.max_segments} segments"
            )
        descriptor = descriptors.popleft()
        try:
            self._mapped[prefix.segment] = _map_segment(descriptor, prefix.segment_bytes, peer)
        finally:
            os.close(descriptor)

    def _sort_freed(self) -> None:
        """Close the descriptors of freed segments never passed; the peer is to be told of the others."""
        while self._freed_segments:
            segment = self._freed_segments.popleft()
            descriptor = self._unpassed.pop(segment, None)
            if descriptor is None:
                self._retired.append(segment)
            else:
                os.close(descriptor)

    def _freed(self, number: int) -> None:
        # Runs wherever the last view is dropped, perhaps under our own lock: it may only append.
        self._freed_segments.append(number)


def create_memory(size_bytes: int) -> int:
    """Create an anonymous memory file with all of its pages there; raises OSError when they are not to be had."""
    try:
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except AttributeError:
        raise OSError(ENOSYS, "this system has no memfd_create") from None
    try:
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


def _map_segment(descriptor: int, size_bytes: int, peer: str) -> mmap.mmap:
    """Map the peer's memory once it is known that it is as large as said and cannot shrink.

    The mapping is private: should anyone here write to it, the page becomes a copy and the peer's memory stays as
    it was.
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
        return mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise PeerError(f"memory passed by {peer} cannot be mapped here: {error.strerror}") from error

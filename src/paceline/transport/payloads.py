"""Bodies of frames on a stream connection: inside the stream, or as memory that both processes map."""

import mmap
import os
import weakref
from collections import deque
from typing import Final, Protocol, final

import msgspec

from paceline.errors import PeerError
from paceline.transport.base import Limits
from paceline.transport.frames import Kind, Prefix
from paceline.transport.segments import MemoryRegion, Segments, map_segment


class Placement(msgspec.Struct, frozen=True):
    """Where a body lies in shared memory; `descriptor` is set when the peer has yet to be given it."""

    region: MemoryRegion
    offset: int
    descriptor: int | None


class Payloads(Protocol):
    """How bodies travel over one stream connection. Sending and receiving may each be one thread at a time."""

    @property
    def passes_descriptors(self) -> bool:
        """Whether descriptors may come with the stream."""
        ...

    def take_retired(self) -> list[int]:
        """Return the segments that the peer knows and that are freed here, each once."""
        ...

    def place(self, body: memoryview) -> Placement | None:
        """Find `body` in shared memory; None means that it travels in the stream."""
        ...

    def passed(self, region: MemoryRegion) -> None:
        """Note that the peer has been sent the descriptor of a region, which is alive."""
        ...

    def view(self, prefix: Prefix, descriptors: deque[int], peer: str) -> memoryview:
        """Return the shared body that a prefix from `peer` names, or drop the segment it retires."""
        ...

    def close(self) -> None:
        """Free everything; memory with existing views lives until these are dropped."""
        ...


@final
class InlinePayloads:
    """Every body travels in the stream."""

    def __init__(self) -> None:
        self.passes_descriptors: Final = False

    def take_retired(self) -> list[int]:
        """Return nothing."""
        return []

    def place(self, body: memoryview) -> Placement | None:
        """Return None."""
        return None

    def passed(self, region: MemoryRegion) -> None:
        """Do nothing: no segment exists."""

    def view(self, prefix: Prefix, descriptors: deque[int], peer: str) -> memoryview:
        """Refuse."""
        raise PeerError(f"{peer} named shared memory over a transport that has none")

    def close(self) -> None:
        """Do nothing."""


@final
class SharedPayloads:
    """Bodies in the transport's segments are shared with the peer; all others travel in the stream.

    Every connection passes a segment's descriptor for itself, and tells its own peer when the segment is gone.
    """

    def __init__(self, segments: Segments, limits: Limits) -> None:
        self.passes_descriptors: Final = True
        self._segments = segments
        self._max_segments = limits.max_segments
        # Ours, by number: a segment is in `_given` from when the peer has its descriptor until the peer is told that
        # it is gone. Its reference puts it into `_freed` when its memory is freed, in whatever thread that happens.
        self._given: dict[int, weakref.ref[mmap.mmap]] = {}
        self._freed: deque[int] = deque()
        # The peer's, by its numbers.
        self._mapped: dict[int, mmap.mmap] = {}

    def take_retired(self) -> list[int]:
        """Return the freed segments that the peer was given."""
        retired: list[int] = []
        while self._freed:
            retired.append(self._freed.popleft())
            del self._given[retired[-1]]
        return retired

    def place(self, body: memoryview) -> Placement | None:
        """Find `body` among the transport's segments; None also when the peer accepts no more of them."""
        found = self._segments.find(body)
        if found is None:
            return None
        region, offset = found
        if region.number in self._given:
            return Placement(region, offset, None)
        return Placement(region, offset, region.descriptor) if len(self._given) < self._max_segments else None

    def passed(self, region: MemoryRegion) -> None:
        """Watch a segment that the peer knows from now on."""
        mapping, number, freed = region.mapping(), region.number, self._freed
        assert mapping is not None
        self._given[number] = weakref.ref(mapping, lambda _: freed.append(number))

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
        """Release the peer's memory, and stop watching ours."""
        self._given.clear()
        self._mapped.clear()

    def _adopt(self, prefix: Prefix, descriptors: deque[int], peer: str) -> None:
        if not descriptors:
            raise PeerError(f"{peer} announced segment {prefix.segment} without its descriptor")
        if prefix.segment in self._mapped or len(self._mapped) >= self._max_segments:
            raise PeerError(f"{peer} passed segment {prefix.segment} twice or more than {self._max_segments} segments")
        descriptor = descriptors.popleft()
        try:
            self._mapped[prefix.segment] = map_segment(descriptor, prefix.segment_bytes, peer)
        finally:
            os.close(descriptor)

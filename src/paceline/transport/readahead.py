"""Bytes read ahead of what is wanted, so that small frames cost one read, or less."""

import os
from collections import deque
from typing import Final, final

from paceline.errors import PeerError
from paceline.transport.base import Limits
from paceline.transport.bodies import Bodies
from paceline.transport.channel import Channel
from paceline.transport.deadline import Deadline
from paceline.transport.frames import PREFIX_BYTES

# What is read ahead of a body is copied once more, so it must be little beside bodies for which a copy matters.
_AHEAD_BYTES: Final = 16 * 1024
# A frame brings at most one descriptor; a few may wait while the frame before theirs is still being read.
_MAX_WAITING_DESCRIPTORS: Final = 4


@final
class ReadAhead:
    """The next bytes of a channel, with room for one whole header. One thread at a time."""

    def __init__(self, channel: Channel, limits: Limits, bodies: Bodies) -> None:
        self._channel = channel
        self._memory = memoryview(bytearray(max(_AHEAD_BYTES, PREFIX_BYTES + limits.max_header_bytes)))
        self._takes_descriptors = bodies.passes_descriptors
        # Invariant: 0 <= start <= end <= len(memory); the bytes between are not consumed yet.
        self._start = 0
        self._end = 0
        self.descriptors: deque[int] = deque()

    def wait_for(self, num_bytes: int, deadline: Deadline) -> memoryview:
        """Return the next `num_bytes` without consuming them; they stay there until the next call."""
        while self._end - self._start < num_bytes:
            self._read_more(num_bytes, deadline)
        return self._memory[self._start : self._start + num_bytes]

    def skip(self, num_bytes: int) -> None:
        """Consume bytes."""
        self._start += num_bytes
        if self._start == self._end:
            self._start = self._end = 0

    def drain_into(self, buffer: memoryview) -> int:
        """Consume bytes into `buffer`, as many as there are and fit; returns how many."""
        num_bytes = min(len(buffer), self._end - self._start)
        buffer[:num_bytes] = self._memory[self._start : self._start + num_bytes]
        self.skip(num_bytes)
        return num_bytes

    def close(self) -> None:
        """Close the descriptors that no frame asked for."""
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _read_more(self, num_wanted: int, deadline: Deadline) -> None:
        if self._start:
            waiting = bytes(self._memory[self._start : self._end])
            self._memory[: len(waiting)] = waiting
            self._start, self._end = 0, len(waiting)
        room = self._memory[self._end : max(num_wanted, _AHEAD_BYTES)]
        if not self._takes_descriptors:
            self._end += self._channel.read_some(room, deadline)
            return
        num_bytes, descriptors = self._channel.read_with_descriptors(room, deadline)
        self._end += num_bytes
        self.descriptors.extend(descriptors)
        if len(self.descriptors) > _MAX_WAITING_DESCRIPTORS:
            raise PeerError("more descriptors came than frames that use them")

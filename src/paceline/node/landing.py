"""Memory in which pushes arrive over carriers that copy: used again once their update is done."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, field
from weakref import WeakSet

from paceline.node.wire import is_push
from paceline.transport.buffers import MIN_MAPPED_BYTES, map_private


@dataclass(slots=True)
class Landing:
    """Gives memory to reader threads and takes it back from the server's thread.

    Holds only what has been given back, so a push that breaks off or is refused on the way leaves nothing behind.
    """

    # Under way or in use: each lives as long as somebody looks at it. And those that are free, by size.
    _lent: WeakSet[mmap.mmap] = field(default_factory=WeakSet)
    _free: dict[int, list[mmap.mmap]] = field(default_factory=dict[int, list[mmap.mmap]])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def place(self, header: bytes, size_bytes: int) -> memoryview | None:
        """Return where the body of a frame goes; None leaves it to the carrier, for which small ones are no work."""
        if size_bytes < MIN_MAPPED_BYTES or not is_push(header):
            return None
        with self._lock:
            free = self._free.get(size_bytes)
            memory = free.pop() if free else map_private(size_bytes)
            self._lent.add(memory)
        return memoryview(memory)

    def give_back(self, body: memoryview) -> None:
        """Note that nobody looks at this body any more; nothing happens if it did not arrive here, or twice."""
        memory = body.obj
        with self._lock:
            if isinstance(memory, mmap.mmap) and memory in self._lent:
                self._lent.discard(memory)
                self._free.setdefault(len(memory), []).append(memory)

    def clear(self) -> None:
        """Let go of all memory."""
        with self._lock:
            self._free.clear()

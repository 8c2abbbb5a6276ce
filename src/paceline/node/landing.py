"""Memory in which pushes arrive over carriers that copy: used again once their update is done."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from paceline.node.wire import is_push
from paceline.transport.buffers import fresh_buffer

_LEAST_BYTES = 64 * 1024  # below this fresh memory is as good


@dataclass(slots=True)
class Landing:
    """Gives memory to reader threads and takes it back from the server's thread.

    Holds as many pieces as pushes were ever here at the same time: one for each worker and table under bsp.
    """

    # Under way or in use, by the object that is the memory; and those that are free, by size.
    _lent: dict[int, memoryview] = field(default_factory=dict[int, memoryview])
    _free: dict[int, list[memoryview]] = field(default_factory=dict[int, list[memoryview]])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def place(self, header: bytes, size_bytes: int) -> memoryview | None:
        """Return where the body of a frame goes; None leaves it to the carrier."""
        if size_bytes < _LEAST_BYTES or not is_push(header):
            return None
        with self._lock:
            free = self._free.get(size_bytes)
            memory = free.pop() if free else fresh_buffer(size_bytes)
            self._lent[id(memory.obj)] = memory
        return memory

    def give_back(self, body: memoryview) -> None:
        """Note that nobody looks at this body any more; nothing happens if it did not arrive here, or twice."""
        with self._lock:
            memory = self._lent.pop(id(body.obj), None)
            if memory is not None:
                self._free.setdefault(len(memory), []).append(memory)

    def clear(self) -> None:
        """Let go of all memory."""
        with self._lock:
            self._lent.clear()
            self._free.clear()

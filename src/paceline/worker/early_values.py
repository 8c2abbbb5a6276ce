"""Values of a dense table that a server sends while their clock is open, kept until it says whether they count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EarlyPart:
    """What has come ahead of one server's part of a table. It lies beside the cache, as it may have to be dropped.

    Frames may be lost, or come twice: only what continues what is here is taken. `place` is called by the thread that
    reads the connection, `forget` and `whole` by the same one under the worker's lock, between two frames.
    """

    memory: memoryview
    clock: int = -1  # the values are those after this one
    num_bytes: int = 0  # from the start of the part

    def place(self, clock: int, at: int, size_bytes: int) -> memoryview | None:
        """Return memory for the next bytes of the part, which are those from `at` on; None for others.

        >>> part = EarlyPart(memoryview(bytearray(8)))
        >>> part.place(3, 0, 6).nbytes, part.place(3, 0, 6), part.whole(3)
        (6, None, None)
        >>> part.place(3, 6, 2).nbytes, part.whole(3).nbytes, part.whole(4)
        (2, 8, None)
        >>> part.forget()
        >>> part.place(3, -1, 4) is None  # no server says so that keeps to the protocol
        True
        """
        continues = at >= 0 and (clock, at) == (self.clock, self.num_bytes)
        begins = at == 0 and clock > self.clock
        if not (continues or begins) or at + size_bytes > self.memory.nbytes:
            return None
        self.clock, self.num_bytes = clock, at + size_bytes
        return self.memory[at : at + size_bytes]

    def forget(self) -> None:
        """Take no more values of this clock: what was on its way over a connection that has ended is lost."""
        self.num_bytes = -1

    def whole(self, clock: int) -> memoryview | None:
        """Return the values after this clock if all have come, else None."""
        return self.memory if (self.clock, self.num_bytes) == (clock, self.memory.nbytes) else None

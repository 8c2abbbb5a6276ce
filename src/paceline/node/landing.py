"""Memory in which pushes arrive over carriers that copy: used again once their update is done."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.node.wire import is_push
from paceline.transport.buffers import MIN_MAPPED_BYTES, fresh_buffer
from paceline.transport.pool import Buffer, BufferPool, ExactPieces


@dataclass(slots=True)
class Landing:
    """Lends memory to reader threads; the server's thread, which is its owner from then on, gives it back.

    Holds only what has been given back, so a push that breaks off or is refused on the way leaves nothing behind.
    """

    poisons: bool = False
    pool: BufferPool = field(init=False)

    def __post_init__(self) -> None:
        """Start without memory."""
        self.pool = BufferPool(ExactPieces(fresh_buffer), poisons=self.poisons)

    def place(self, header: bytes, size_bytes: int) -> Buffer | None:
        """Return where the body of a frame goes; None leaves it to the carrier, for which small ones are no work."""
        if size_bytes < MIN_MAPPED_BYTES or not is_push(header):
            return None
        return self.pool.lend(size_bytes)

    def clear(self) -> None:
        """Let go of all memory."""
        self.pool.clear()

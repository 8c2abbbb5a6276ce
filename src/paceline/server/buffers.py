"""Memory in which pushes arrive over carriers that copy: used again once their update is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.transport.base import Connection, Transport
from paceline.transport.buffer_pool import Buffer, BufferPool, ExactPieces
from paceline.transport.buffers import MIN_MAPPED_BYTES, fresh_buffer
from paceline.wire.messages import is_push

Purpose = Literal["read", "delivery"]


@dataclass(slots=True)
class _LentBuffer:
    """Memory shared with one worker for one table and purpose: `buffer` as long as the worker may look at it.

    It was sent with `mark`, the request of a read or the clock of a delivery.
    """

    pool: BufferPool
    buffer: Buffer | None = None
    mark: int = -1


@dataclass(slots=True)
class SendBuffers:
    """Shared memory by connection, table and purpose: at most one piece each, however slow the worker."""

    transport: Transport
    poisons: bool = False
    _send_buffers: dict[tuple[int, str, Purpose], _LentBuffer] = field(
        default_factory=dict[tuple[int, str, Purpose], _LentBuffer]
    )

    def lend(self, connection: Connection, table: str, purpose: Purpose, mark: int, size_bytes: int) -> memoryview:
        """Return memory for values that are sent with this mark.

        While the worker may still read what was sent before, this is memory of its own, which the carrier copies.
        """
        key = id(connection), table, purpose
        lent_buffer = self._send_buffers.get(key)
        if lent_buffer is None:
            pieces = ExactPieces(self.transport.allocate)
            lent_buffer = self._send_buffers[key] = _LentBuffer(BufferPool(pieces, poisons=self.poisons))
        if lent_buffer.buffer is not None:
            return fresh_buffer(size_bytes)
        lent_buffer.buffer, lent_buffer.mark = lent_buffer.pool.lend(size_bytes), mark
        return lent_buffer.buffer.memory

    def give_back(self, connection: Connection, table: str, purpose: Purpose, mark: int) -> None:
        """Note that the worker has taken in what was sent with this mark and before."""
        lent_buffer = self._send_buffers.get((id(connection), table, purpose))
        if lent_buffer is not None and lent_buffer.buffer is not None and lent_buffer.mark <= mark:
            buffer, lent_buffer.buffer = lent_buffer.buffer, None
            buffer.release()

    def forget(self, connection: Connection) -> None:
        """Let go of the memory shared over a connection that has ended."""
        self._send_buffers = {
            key: lent_buffer for key, lent_buffer in self._send_buffers.items() if key[0] != id(connection)
        }

    def clear(self) -> None:
        """Let go of all memory: nobody is served any more."""
        self._send_buffers = {}


@dataclass(slots=True)
class ReceiveBuffers:
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

"""Memory of a server for bodies: shared memory for values that it sends, a pool for pushes that it receives, limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from paceline.errors import PeerError
from paceline.server.served_table import ServedTable
from paceline.transport.base import Connection
from paceline.transport.buffer_pool import Buffer, BufferPool, ExactAllocator, RoundedAllocator
from paceline.transport.buffers import MIN_MAPPED_BYTES, fresh_buffer
from paceline.wire.messages import (
    FactoredPush,
    PushFrame,
    PushPiece,
    RowPullFrame,
    RowPushFrame,
    RowsUsed,
    StepFrame,
    Unsubscribe,
    decode,
    is_push,
)
from paceline.wire.requests import MAX_IDS, MAX_JOINED_BYTES, SMALL_BYTES, Initialise, LoadState, WriteRows
from paceline.wire.row_codec import ID_BYTES

Purpose = Literal["read", "delivery"]


@dataclass(slots=True)
class _LentBuffer:
    """Memory shared with one worker for one purpose; `buffer` is set while the worker may read it.

    It was sent with `mark`: the request of a read, or the clock of a delivery.
    """

    pool: BufferPool
    buffer: Buffer | None = None
    mark: int = -1


@dataclass(slots=True)
class SendBuffers:
    """Shared memory for the values of one table, by connection and purpose: one buffer each, however slow the worker.

    Args:
        allocate: returns memory that workers can map, given its size in bytes.
        poisons: overwrite memory that is free.
    """

    allocate: Callable[[int], memoryview]
    poisons: bool = False
    lent: dict[tuple[int, Purpose], _LentBuffer] = field(default_factory=dict[tuple[int, Purpose], _LentBuffer])

    def __len__(self) -> int:
        """Count the buffers."""
        return len(self.lent)

    def lend(self, connection: Connection, purpose: Purpose, mark: int, size_bytes: int) -> memoryview:
        """Return memory for values that are sent with this mark.

        While the worker may still read the previous buffer, this is private memory, which the transport copies.
        """
        key = id(connection), purpose
        lent = self.lent.get(key)
        if lent is None:
            lent = self.lent[key] = _LentBuffer(BufferPool(ExactAllocator(self.allocate), poisons=self.poisons))
        if lent.buffer is not None:
            return fresh_buffer(size_bytes)
        lent.buffer, lent.mark = lent.pool.lend(size_bytes), mark
        return lent.buffer.memory

    def reclaim(self, connection: Connection, purpose: Purpose, mark: int) -> None:
        """Return the buffer to its pool if the worker has read everything up to this mark."""
        lent = self.lent.get((id(connection), purpose))
        if lent is not None and lent.buffer is not None and lent.mark <= mark:
            buffer, lent.buffer = lent.buffer, None
            buffer.release()

    def forget(self, connection: Connection) -> None:
        """Release the memory shared over a connection that has ended."""
        self.lent = {key: lent for key, lent in self.lent.items() if key[0] != id(connection)}

    def clear(self) -> None:
        """Release all memory, when the server closes."""
        self.lent = {}


@dataclass(slots=True)
class ReceiveBuffers:
    """Lends memory for pushes to reader threads; the server's thread, its next owner, returns it.

    The pool holds only returned memory, so a push that breaks off on the way leaks nothing. Sizes are rounded, as those
    of pieces are for their worker to choose.
    """

    poisons: bool = False
    pool: BufferPool = field(init=False)

    def __post_init__(self) -> None:
        """Create an empty pool."""
        self.pool = BufferPool(RoundedAllocator(fresh_buffer), poisons=self.poisons)

    def place(self, header: bytes, size_bytes: int) -> Buffer | None:
        """Return memory for the body of a frame; None (small, or no push) leaves it to the transport."""
        if size_bytes < MIN_MAPPED_BYTES or not is_push(header):
            return None
        return self.pool.lend(size_bytes)

    def clear(self) -> None:
        """Release all memory."""
        self.pool.clear()


class BodyLimits(msgspec.Struct, frozen=True):
    """Checks the size of a body, and allocates memory for it where the transport copies.

    Called by reader threads while the server's thread adds tables, so each call looks a table up once.
    """

    find_table: Callable[[str], ServedTable | None]
    receive_buffers: ReceiveBuffers

    def place(self, header: bytes, size_bytes: int) -> Buffer | None:
        """Return memory for a body; None leaves it to the transport. Raises PeerError for an impossible size."""
        if size_bytes > SMALL_BYTES:
            self._check(decode(header), size_bytes)
        return self.receive_buffers.place(header, size_bytes)

    def _check(self, message: object, size_bytes: int) -> None:
        least, most = self._bounds(message)
        if not least <= size_bytes <= most:
            expected = f"{least}" if least == most else f"at most {most}"
            raise PeerError(f"a {type(message).__name__} came with {size_bytes} bytes, expected {expected}")

    def _bounds(self, message: object) -> tuple[int, int]:
        """Return the least and the most bytes that may travel beside a message."""
        match message:
            case StepFrame(pushes=(only,), row_pushes=()) | StepFrame(pushes=(), row_pushes=(only,)):
                return self._bounds(only)
            case StepFrame():
                return 0, MAX_JOINED_BYTES
            case PushFrame() | RowPushFrame():
                name = message.push.table
            case PushPiece() | FactoredPush():
                name = message.push.push.table
            case Initialise() | LoadState():
                name = message.table
            case WriteRows():
                name = message.table_call.table
            case RowPullFrame():
                num_bytes = max(0, message.keys.num) * ID_BYTES
                return num_bytes, min(num_bytes, MAX_IDS * ID_BYTES)
            case Unsubscribe() | RowsUsed():
                return 0, MAX_IDS * ID_BYTES
            case _:
                return 0, SMALL_BYTES
        table = self.find_table(name)
        return (0, SMALL_BYTES) if table is None else table.body_bounds(message)

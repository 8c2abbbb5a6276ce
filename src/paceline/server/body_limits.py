"""Limits on the size of a body by its header: no memory is allocated for one that cannot be valid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import PeerError
from paceline.server.buffers import ReceiveBuffers
from paceline.server.served_table import ServedTable
from paceline.transport.buffer_pool import Buffer
from paceline.wire.bounds import MAX_IDS, SMALL_BYTES
from paceline.wire.messages import PushFrame, RowPullFrame, RowPushFrame, RowsUsed, Unsubscribe, decode
from paceline.wire.requests import Initialise, LoadState, WriteRows
from paceline.wire.row_codec import ID_BYTES


@dataclass(frozen=True, slots=True)
class BodyLimits:
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
            case PushFrame() | RowPushFrame():
                name = message.push.table
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

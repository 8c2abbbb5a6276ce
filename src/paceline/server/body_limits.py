"""Limits on the size of a body by its header: no memory is allocated for one that cannot be valid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.errors import PeerError
from paceline.server.buffers import ReceiveBuffers
from paceline.server.dense_tables import DenseTables
from paceline.server.row_tables import RowTables
from paceline.transport.buffer_pool import Buffer
from paceline.wire.bounds import MAX_IDS, MAX_PUSH_BYTES
from paceline.wire.messages import PushFrame, RowPullFrame, RowPushFrame, RowsUsed, Unsubscribe, decode
from paceline.wire.requests import Initialise, LoadState, WriteRows
from paceline.wire.row_codec import ID_BYTES

SMALL_BYTES: Final = 64 << 10  # accepted unchecked here; an invalid body is refused later, with a reason
# One piece of a row table that a worker loads: a few megabytes, unless rows are very wide.
MAX_PIECE_BYTES: Final = 1 << 28
_PIECE_BYTES_BY_WIDTH: Final = 64 * 16 * 8  # the least rows of a piece, with a rule of many states in float64
MAX_STATE_FACTOR: Final = 64  # the state of a rule is at most this many times as large as the values
_STATE_SLACK_BYTES: Final = 16 << 20  # names, and states that do not grow with the values


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Checks the size of a body, and allocates memory for it where the transport copies.

    Called by reader threads while the server's thread adds tables, so each call looks a table up once.
    """

    dense_tables: DenseTables
    row_tables: RowTables
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
            case PushFrame():
                return self._exactly(message.push.table)
            case Initialise():
                return self._exactly(message.table)
            case LoadState():
                _, values_bytes = self._exactly(message.table)
                return 0, values_bytes * MAX_STATE_FACTOR + _STATE_SLACK_BYTES
            case RowPushFrame():
                return self._rows_exactly(message)
            case RowPullFrame():
                num_bytes = max(0, message.keys.num) * ID_BYTES
                return num_bytes, min(num_bytes, MAX_IDS * ID_BYTES)
            case WriteRows():
                served = self.row_tables.tables.get(message.table_call.table)
                width = 0 if served is None else served.spec.width
                return 0, max(MAX_PIECE_BYTES, width * _PIECE_BYTES_BY_WIDTH)
            case Unsubscribe() | RowsUsed():
                return 0, MAX_IDS * ID_BYTES
            case _:
                return 0, SMALL_BYTES

    def _exactly(self, table: str) -> tuple[int, int]:
        memory = self.dense_tables.memories.get(table)
        return (0, SMALL_BYTES) if memory is None else (memory.nbytes, memory.nbytes)

    def _rows_exactly(self, frame: RowPushFrame) -> tuple[int, int]:
        served = self.row_tables.tables.get(frame.push.table)
        if served is None:
            return 0, SMALL_BYTES
        num_bytes = max(0, frame.keys.num) * (served.up.row_bytes + ID_BYTES * frame.keys.sent)
        return num_bytes, min(num_bytes, MAX_PUSH_BYTES)

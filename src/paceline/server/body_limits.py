"""How large a body may be, by what its header says: no memory is taken for one that cannot be right."""

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

SMALL_BYTES: Final = 64 << 10  # so much is taken without a look; if it makes no sense, it is refused with a reason
# What a worker sends of the rows of a table in one piece: a few megabytes, unless they are very wide.
MAX_PIECE_BYTES: Final = 1 << 28
_PIECE_BYTES_BY_WIDTH: Final = 64 * 16 * 8  # the least rows of a piece, with a rule of many states in float64
MAX_STATE_FACTOR: Final = 64  # the state of a rule is so many times as large as the values at most
_STATE_SLACK_BYTES: Final = 16 << 20  # names, and states that do not grow with the values


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Where bodies go that the carrier copies, once their size has been found to be possible.

    Asked by reader threads, while the server's thread adds tables: a table is looked up once, and is there or not.
    """

    dense_tables: DenseTables
    rows: RowTables
    receive_buffers: ReceiveBuffers

    def place(self, header: bytes, size_bytes: int) -> Buffer | None:
        """Return where a body goes; None leaves it to the carrier. Raises PeerError for a body that cannot be right."""
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
                served = self.rows.tables.get(message.table_call.table)
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
        served = self.rows.tables.get(frame.push.table)
        if served is None:
            return 0, SMALL_BYTES
        num_bytes = max(0, frame.keys.num) * (served.up.row_bytes + ID_BYTES * frame.keys.sent)
        return num_bytes, min(num_bytes, MAX_PUSH_BYTES)

"""Values of a dense table that leave while its clock is still open, so that a line carries both ways at once.

Pushes come in pieces, each push from its start. Where every member has sent the same bytes of its push, the values that
these bytes will have are computed beside the table and sent to the members that take them. They count only if they are,
byte for byte, those that the update makes in the end: a worker that dies in the middle of its push changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from paceline.core.messages import Push, PushId
from paceline.core.work_queue import Life
from paceline.errors import PeerError
from paceline.transport.base import Connection, Frame
from paceline.transport.buffer_pool import Buffer, BufferPool
from paceline.update.placement import as_tensor
from paceline.update.summing import Contribution
from paceline.wire.malformed import REQUEST_ERRORS
from paceline.wire.messages import EarlyValues, PushPiece

_LEAST_BYTES: Final = 32 << 10  # of values that are computed together, but for the last
_GRAIN_BYTES: Final = 512  # where they end

Preview = Callable[[int, int, Sequence[Contribution]], Tensor]


@dataclass(slots=True)
class _Assembly:
    """A push that comes in pieces; `contribution` is None if it will be refused."""

    push: Push
    buffer: Buffer
    contribution: Contribution | None
    num_bytes: int = 0  # that are here, from its start


@dataclass(slots=True)
class Assemblies:
    """The pushes of one dense table that come in pieces, one over each connection. Used by the server's thread.

    Args:
        table: its name.
        size_bytes: of a push.
        dtype: of its elements.
        pool: lends memory for pushes.
    """

    table: str
    size_bytes: int
    dtype: torch.dtype
    pool: BufferPool
    _by_connection: dict[int, _Assembly] = field(default_factory=dict[int, _Assembly])

    def add(
        self, piece: PushPiece, body: memoryview, connection: Connection, like: Contribution | None
    ) -> Frame | None:
        """Add a piece; return the push as a frame once it is complete, whose buffer the caller owns from then on.

        Pieces that do not continue their push are ignored: the worker repeats it as a whole.
        `like`: the contribution, but for its gradient; None if it will be refused.

        Raises:
            PeerError: the piece is too long.
        """
        push, end, key = piece.push.push, piece.at + len(body), id(connection)
        if not 0 <= piece.at < end <= self.size_bytes:
            raise PeerError(f"a piece of a push of table '{self.table}' has bytes {piece.at} to {end}")
        assembly = self._by_connection.get(key)
        if piece.at == 0 and (assembly is None or assembly.push.id != push.id):
            self.forget_connection(connection)
            buffer = self.pool.lend(self.size_bytes)
            whole = None if like is None else replace(like, gradient=as_tensor(buffer.memory, self.dtype))
            assembly = self._by_connection[key] = _Assembly(push, buffer, whole)
        if assembly is None or (assembly.push.id, assembly.num_bytes) != (push.id, piece.at):
            return None
        assembly.buffer.memory[piece.at : end] = body
        assembly.num_bytes = end
        if end < self.size_bytes:
            return None
        del self._by_connection[key]
        return Frame(b"", assembly.buffer.memory, assembly.buffer)

    def coming(self, clock: int) -> dict[PushId, tuple[Contribution, int]]:
        """Return the unfinished pushes of a clock: each with the number of bytes that are here."""
        return {
            each.push.id: (each.contribution, each.num_bytes)
            for each in self._by_connection.values()
            if each.push.clock == clock and each.contribution is not None
        }

    def forget_connection(self, connection: Connection) -> None:
        """Drop the unfinished push of a connection, if there is one."""
        assembly = self._by_connection.pop(id(connection), None)
        if assembly is not None:
            assembly.buffer.release()

    def clear(self) -> None:
        """Drop all memory, when the server closes."""
        self._by_connection.clear()
        self.pool.clear()


class EarlyBody(msgspec.Struct, frozen=True):
    """Values to send to some members; they do not change any more."""

    message: EarlyValues
    body: memoryview
    readers: Mapping[Life, Connection]


@dataclass(slots=True)
class EarlySeries:
    """The values of one dense table that are sent ahead of its open clock. Used by the server's thread.

    Args:
        table: its name.
        memory: of its values, as bytes.
        item_bytes: of an element.
        preview: returns what the elements from one to another will be after these contributions, and changes nothing.
    """

    table: str
    memory: memoryview
    item_bytes: int
    preview: Preview
    _clock: int = -1
    _readers: dict[Life, Connection] = field(default_factory=dict[Life, Connection])  # that take values ahead
    _ids: tuple[PushId, ...] = ()  # of the pushes that the values are made of
    _made: list[Tensor] = field(default_factory=list[Tensor])  # as bytes; each begins where the one before ends
    _num_made: int = 0  # bytes
    _is_over: bool = False  # no more are made in this clock
    # Which connections were sent how many bytes of the values as they are since the last update.
    _sent: dict[Life, Connection] = field(default_factory=dict[Life, Connection])
    _num_sent: int = 0
    is_used: bool = False  # a member has taken values ahead

    def add_reader(self, life: Life, connection: Connection) -> None:
        """Note a member that takes values ahead of the clock; ignored once some have been sent."""
        self.is_used = True
        if not self._made:
            self._readers[life] = connection

    @property
    def has_readers(self) -> bool:
        """Whether a member takes values ahead."""
        return bool(self._readers)

    def make(
        self, members: Sequence[int], clock: int, pushes: Mapping[PushId, tuple[Contribution, int]]
    ) -> EarlyBody | None:
        """Return the next values of the open clock, if every member has sent more of its push.

        Args:
            members: ranks, in ascending order.
            clock: that is open.
            pushes: of this clock, each with the number of bytes that are here.
        """
        if clock != self._clock:
            self._begin(clock)
        ids = tuple(sorted(pushes))
        if not self._readers or self._is_over or [push_id.worker for push_id in ids] != list(members):
            return None
        self._is_over = bool(self._made) and ids != self._ids
        start, whole = self._num_made, self.memory.nbytes
        stop = min(num_bytes for _, num_bytes in pushes.values())
        stop -= stop % _GRAIN_BYTES if stop < whole else 0
        if self._is_over or stop == start or (stop - start < _LEAST_BYTES and stop < whole):
            return None
        try:
            values = self.preview(
                start // self.item_bytes, stop // self.item_bytes, [pushes[push_id][0] for push_id in ids]
            )
        except REQUEST_ERRORS:  # the update itself says what is wrong
            self._is_over = True
            return None
        made = values.view(torch.uint8)
        self._ids, self._num_made = ids, stop
        self._made.append(made)
        return EarlyBody(EarlyValues(self.table, clock, start), made.numpy().data, dict(self._readers))

    def prove(self) -> None:
        """Find out, after an update, whether the values that were sent are those that it has made."""
        start, self._num_sent, self._sent = 0, 0, {}
        for made in self._made:
            if not torch.equal(made, as_tensor(self.memory[start : start + len(made)], torch.uint8)):
                break
            start += len(made)
        if start and start == self._num_made:
            self._num_sent, self._sent = start, self._readers
        self._readers = {}
        self._begin(-1)

    def forget(self) -> None:
        """Note that the values have changed otherwise: what was sent does not count."""
        self._is_over, self._sent = True, {}

    def take_sent(self, life: Life, connection: Connection) -> int:
        """Return how many bytes of the values were sent to a reader ahead, once."""
        if self._sent.get(life) is not connection:
            return 0
        del self._sent[life]
        return self._num_sent

    def forget_connection(self, connection: Connection) -> None:
        """Send no more to a connection that has ended."""
        for readers in (self._readers, self._sent):
            for life in [life for life, each in readers.items() if each is connection]:
                del readers[life]

    def _begin(self, clock: int) -> None:
        self._clock, self._ids, self._made, self._num_made, self._is_over = clock, (), [], 0, False

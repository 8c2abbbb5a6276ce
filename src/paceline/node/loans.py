"""Memory in which a server's values travel to workers: used again and again, but never while a worker may read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.transport.base import Connection, Transport
from paceline.transport.buffers import fresh_buffer
from paceline.transport.pool import Buffer, BufferPool, ExactPieces

Purpose = Literal["read", "delivery"]


@dataclass(slots=True)
class _Loan:
    """Memory shared with one worker for one table and purpose: `buffer` as long as the worker may look at it.

    It was sent with `mark`, the request of a read or the clock of a delivery.
    """

    pool: BufferPool
    buffer: Buffer | None = None
    mark: int = -1


@dataclass(slots=True)
class Loans:
    """Shared memory by connection, table and purpose: at most one piece each, however slow the worker."""

    transport: Transport
    poisons: bool = False
    _loans: dict[tuple[int, str, Purpose], _Loan] = field(default_factory=dict[tuple[int, str, Purpose], _Loan])

    def lend(self, connection: Connection, table: str, purpose: Purpose, mark: int, size_bytes: int) -> memoryview:
        """Return memory for values that are sent with this mark.

        While the worker may still read what was sent before, this is memory of its own, which the carrier copies.
        """
        key = id(connection), table, purpose
        loan = self._loans.get(key)
        if loan is None:
            pieces = ExactPieces(self.transport.allocate)
            loan = self._loans[key] = _Loan(BufferPool(pieces, poisons=self.poisons))
        if loan.buffer is not None:
            return fresh_buffer(size_bytes)
        loan.buffer, loan.mark = loan.pool.lend(size_bytes), mark
        return loan.buffer.memory

    def give_back(self, connection: Connection, table: str, purpose: Purpose, mark: int) -> None:
        """Note that the worker has taken in what was sent with this mark and before."""
        loan = self._loans.get((id(connection), table, purpose))
        if loan is not None and loan.buffer is not None and loan.mark <= mark:
            buffer, loan.buffer = loan.buffer, None
            buffer.release()

    def forget(self, connection: Connection) -> None:
        """Let go of the memory shared over a connection that has ended."""
        self._loans = {key: loan for key, loan in self._loans.items() if key[0] != id(connection)}

    def clear(self) -> None:
        """Let go of all memory: nobody is served any more."""
        self._loans = {}

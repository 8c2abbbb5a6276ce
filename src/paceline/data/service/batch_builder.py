"""Thread of a data server that makes batches, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from paceline.data.service.buffer_pool import LentPiece
from paceline.data.service.fair_queue import FairQueue, WorkerTurn
from paceline.data.service.messages import BatchFailed, BatchParcel, encode
from paceline.data.service.send_queue import ServiceAnswer
from paceline.data.service.source_cache import CODE_MISHAPS
from paceline.data.sources.batches import require_served
from paceline.errors import DataError, UsageError
from paceline.observe.trace import Fed
from paceline.transport.base import Limits
from paceline.wire.malformed import story

_MAX_HEADER_BYTES: Final = Limits().max_header_bytes


@dataclass(slots=True)
class BatchBuilder:
    """Makes the batches that are next in the queue, straight into their send buffers.

    An error in a batch is the answer to its request, and affects no other.
    """

    turns: FairQueue
    max_batch_bytes: int
    now: Callable[[], float] = time.monotonic
    num_batches: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0

    def run(self) -> None:
        """Make batches until the queue is closed."""
        while self._serve_next():
            pass

    def record(self, server: int) -> Fed:
        """Return the totals so far."""
        counts = self.num_batches, self.num_samples, self.num_skipped, self.num_bytes
        return Fed(self.now(), server, *counts, self.busy_s)

    def _serve_next(self) -> bool:
        turn = self.turns.get()
        if turn is None:
            return False
        began_t = self.now()
        turn.caller.outbox.put(self._answer(turn))
        self.busy_s += self.now() - began_t
        return True

    def _answer(self, turn: WorkerTurn) -> ServiceAnswer:
        batch_buffers = turn.caller.batch_buffers
        pieces: list[LentPiece] = []
        try:
            with turn.source.lock:
                parcel = self._make(turn, pieces)
            header = encode(parcel)
            if len(header) > _MAX_HEADER_BYTES:
                raise UsageError("a batch is of too many parts to be described in one message")
        except CODE_MISHAPS as error:
            for piece in pieces:
                batch_buffers.drop(piece)
            return ServiceAnswer(encode(BatchFailed.of(turn.number, error, story(error))))
        self._count(parcel, pieces[0])
        return ServiceAnswer(header, pieces[0].memory, partial(batch_buffers.on_sent, pieces[0]))

    def _make(self, turn: WorkerTurn, pieces: list[LentPiece]) -> BatchParcel:
        """Make a batch in a buffer, which is appended to `pieces`."""
        records = turn.source.records
        if records is None:
            raise DataError("the source was closed here in the meantime")
        prepared = records.prepare(turn.batch_request(), self.max_batch_bytes)
        require_served(turn.indices.size, prepared.size_bytes, self.max_batch_bytes)
        pieces.append(turn.caller.batch_buffers.allocate(prepared.size_bytes))
        prepared.fill(pieces[0].memory)
        reasons = records.faults().reasons if prepared.layout.num_skipped else ()
        return BatchParcel(turn.number, pieces[0].lent_buffer, prepared.layout, reasons)

    def _count(self, parcel: BatchParcel, piece: LentPiece) -> None:
        self.num_batches += 1
        self.num_samples += parcel.layout.num_samples
        self.num_skipped += parcel.layout.num_skipped
        self.num_bytes += piece.memory.nbytes

"""Rounds between machines: each worker sends every other one the piece of its slot that this one takes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

from paceline.collective.failures import names
from paceline.collective.peers import ROUND_TAG, Peers
from paceline.collective.rounds import CALL_BYTES, Call, Fill, Piece, Take, refusal
from paceline.errors import PeerError
from paceline.transport.deadline import Deadline

SENT_SLOT_BYTES: Final = 1 << 21
# A worker that is in a round has had the pieces of all of the one before, so it is at most one round ahead.
_NUM_TURNS: Final = 2
_FRAME: Final = struct.Struct(f"<2q{CALL_BYTES}s")  # which round, where in the slot the piece begins, and the call


@final
class Arrivals:
    """The slots of other workers, as far as their pieces have come; see `RoundArrivals`.

    A piece goes straight to its place in memory that is there already; what is not the next piece is refused.

    Args:
        ranks: of the workers that make the rounds.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: Final = list(ranks)
        self.slots: Final = [
            [torch.empty(SENT_SLOT_BYTES, dtype=torch.uint8) for _ in ranks] for _ in range(_NUM_TURNS)
        ]
        self.num_over = 0  # rounds whose slots may be filled again
        # By rank: how many pieces have come, and what is known of those in the slots.
        self.num_arrived = dict.fromkeys(ranks, 0)
        self.known: Final[list[dict[int, tuple[int, int, bytes]]]] = [{} for _ in range(_NUM_TURNS)]
        self._num_bytes = dict.fromkeys(ranks, 0)  # of the piece that is coming

    def place(self, rank: int, about: bytes, size_bytes: int) -> memoryview:
        """Return the memory for a piece; see `RoundArrivals.place`."""
        if rank not in self.num_arrived or len(about) != _FRAME.size:
            raise PeerError("it sent a piece of a round in which it has no part, or of another version")
        number, start, _ = _FRAME.unpack(about)
        expected = self.num_arrived[rank] + 1
        if number != expected or number > self.num_over + _NUM_TURNS:
            raise PeerError(f"it sent a piece of round {number}, expected round {expected}, after {self.num_over}")
        if not 0 <= start <= start + size_bytes <= SENT_SLOT_BYTES:
            raise PeerError(f"it sent {size_bytes} bytes for a slot of {SENT_SLOT_BYTES} from byte {start} on")
        self._num_bytes[rank] = size_bytes
        slot = self.slots[number % _NUM_TURNS][self.ranks.index(rank)]
        return slot.numpy().data[start : start + size_bytes]

    def note(self, rank: int, about: bytes) -> None:
        """Note that a piece is there; see `RoundArrivals.note`."""
        number, start, call = _FRAME.unpack(about)
        self.known[number % _NUM_TURNS][rank] = start, start + self._num_bytes[rank], call
        self.num_arrived[rank] = number


@final
class SentRounds:
    """Rounds over connections. Slots take turns as in shared memory, so one round costs one way over the line."""

    def __init__(self, peers: Peers, arrivals: Arrivals) -> None:
        self.slot_bytes: Final = SENT_SLOT_BYTES
        self.place: Final = arrivals.ranks.index(peers.rank)
        self.size: Final = len(arrivals.ranks)
        self._peers = peers
        self._arrivals = arrivals
        # Beginning with the next one, so that not all send to the first at once.
        self._others = arrivals.ranks[self.place + 1 :] + arrivals.ranks[: self.place]
        self._num_rounds = 0

    def run(self, call: Call, deadline: Deadline, fill: Fill, take: Take, piece: Piece) -> None:
        """Make one round; see `Rounds.run`."""
        peers, arrivals, encoded = self._peers, self._arrivals, call.encoded()
        peers.require_open()
        self._num_rounds = number = self._num_rounds + 1
        turn = number % _NUM_TURNS
        slots = arrivals.slots[turn]
        fill(slots[self.place])
        self._send(number, encoded, slots[self.place], deadline, piece)
        peers.wait(lambda: self._missing(number), call.kind, deadline)
        try:
            for rank in sorted(self._others):
                self._check(rank, encoded, turn, piece)
            take(slots)
        finally:
            arrivals.num_over = number

    def close(self) -> None:
        """Let go of the memory; see `Rounds.close`."""
        self._arrivals.slots.clear()

    def _send(self, number: int, encoded: bytes, slot: Tensor, deadline: Deadline, piece: Piece) -> None:
        memory, ranks = slot.numpy().data, self._arrivals.ranks
        for rank in self._others:
            start, stop = piece(self.place, ranks.index(rank))
            about = _FRAME.pack(number, start, encoded)
            self._peers.send(rank, ROUND_TAG, about, memory[start:stop], deadline.remaining_s())

    def _missing(self, number: int) -> list[int]:
        return [rank for rank in self._others if self._arrivals.num_arrived[rank] < number]

    def _check(self, rank: int, encoded: bytes, turn: int, piece: Piece) -> None:
        """Raise UsageError if another worker makes another call, PeerError if its piece is not the one expected."""
        start, stop, told = self._arrivals.known[turn][rank]
        index = self._arrivals.ranks.index(rank)
        if told != encoded:
            raise refusal(self._peers.rank, encoded, rank, told, self._arrivals.slots[turn][index])
        expected = piece(index, self.place)
        if (start, stop) != expected and (stop > start or expected[1] > expected[0]):
            self._peers.missing = (rank,)
            raise PeerError(
                f"worker {self._peers.rank}: {names([rank])} sent bytes {start} to {stop} of its slot, expected "
                f"{expected[0]} to {expected[1]}"
            )

"""Rounds between machines: each worker sends every other one the piece of its slot that this one takes."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, final

import torch
from torch import Tensor

from paceline.collective.failures import names
from paceline.collective.peers import ROUND_TAG, Peers
from paceline.collective.rounds import CALL_BYTES, Call, Piece, Round, refusal
from paceline.errors import PeerError
from paceline.transport.deadline import Deadline

SENT_SLOT_BYTES: Final = 1 << 21
# So many rounds are under way at once: the line is busy while what has come is added.
_NUM_AHEAD: Final = 2
# A worker that has ended a round has had the pieces of all, so its pieces are at most twice as many rounds ahead.
_NUM_TURNS: Final = 2 * _NUM_AHEAD
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
    """Rounds over connections: each costs one way over the line, and the next one begins meanwhile."""

    def __init__(self, peers: Peers, arrivals: Arrivals) -> None:
        self.slot_bytes: Final = SENT_SLOT_BYTES
        self.is_overlapping: Final = True
        self.place: Final = arrivals.ranks.index(peers.rank)
        self.size: Final = len(arrivals.ranks)
        self._peers = peers
        self._arrivals = arrivals
        # Beginning with the next one, so that not all send to the first at once.
        self._others = arrivals.ranks[self.place + 1 :] + arrivals.ranks[: self.place]
        self._num_begun = 0

    def run(self, call: Call, deadline: Deadline, steps: Iterable[Round]) -> None:
        """Make rounds; see `Rounds.run`. Not before the first has shown that all make this call, the others overlap."""
        self._peers.require_open()
        encoded, begun = call.encoded(), deque[Round]()
        num_ended = 0
        for number, step in enumerate(steps):
            while num_ended < max(number - _NUM_AHEAD + 1, step.needs + 1, min(number, 1)):
                self._end(call, encoded, begun.popleft(), deadline)
                num_ended += 1
            self._begin(encoded, step, deadline)
            begun.append(step)
        while begun:
            self._end(call, encoded, begun.popleft(), deadline)

    def close(self) -> None:
        """Let go of the memory; see `Rounds.close`."""
        self._arrivals.slots.clear()

    def _begin(self, encoded: bytes, step: Round, deadline: Deadline) -> None:
        """Fill the own slot of the next round, and send the pieces of it."""
        self._num_begun += 1
        slot, ranks = self._slots(self._num_begun)[self.place], self._arrivals.ranks
        step.fill(slot)
        memory = slot.numpy().data
        for rank in self._others:
            start, stop = step.piece(self.place, ranks.index(rank))
            about = _FRAME.pack(self._num_begun, start, encoded)
            self._peers.send(rank, ROUND_TAG, about, memory[start:stop], deadline.remaining_s())

    def _end(self, call: Call, encoded: bytes, step: Round, deadline: Deadline) -> None:
        """Wait for the pieces of the oldest round that has not ended, and take them."""
        number = self._arrivals.num_over + 1
        self._peers.wait(lambda: self._missing(number), call.kind, deadline)
        try:
            for rank in sorted(self._others):
                self._check(rank, encoded, number, step.piece)
            step.take(self._slots(number))
        finally:
            self._arrivals.num_over = number

    def _slots(self, number: int) -> list[Tensor]:
        return self._arrivals.slots[number % _NUM_TURNS]

    def _missing(self, number: int) -> list[int]:
        return [rank for rank in self._others if self._arrivals.num_arrived[rank] < number]

    def _check(self, rank: int, encoded: bytes, number: int, piece: Piece) -> None:
        """Raise UsageError if another worker makes another call, PeerError if its piece is not the one expected."""
        start, stop, told = self._arrivals.known[number % _NUM_TURNS][rank]
        index = self._arrivals.ranks.index(rank)
        if told != encoded:
            raise refusal(self._peers.rank, encoded, rank, told, self._slots(number)[index])
        expected = piece(index, self.place)
        if (start, stop) != expected and (stop > start or expected[1] > expected[0]):
            self._peers.missing = (rank,)
            raise PeerError(
                f"worker {self._peers.rank}: {names([rank])} sent bytes {start} to {stop} of its slot, expected "
                f"{expected[0]} to {expected[1]}"
            )

"""Rounds: every worker puts bytes into its slot, and once all have, takes what it needs from the slots of all.

Collectives are made of rounds. On one machine the slots are shared memory, and a round is a counter that each worker
raises in memory that the others see (`SharedRounds`). Between machines each worker sends every other one the piece of
its slot that this one takes (`SentRounds`).
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from os import sched_yield
from typing import Final, Protocol, final

import msgspec
import torch
from torch import Tensor

from paceline.collective.failures import names
from paceline.collective.peers import ROUND_TAG, SEGMENT_TAG, Peers
from paceline.errors import PeerError, UsageError
from paceline.transport.base import EMPTY
from paceline.transport.deadline import Deadline
from paceline.update.dtypes import dtype_name

# Small enough that the slots of some workers stay in the cache between being filled and being taken.
SLOT_BYTES: Final = 1 << 21
_CONTROL_BYTES: Final = 4096
SEGMENT_BYTES: Final = _CONTROL_BYTES + 2 * SLOT_BYTES
# Words of the first page, in cache lines of their own: how many rounds are filled, whether this worker sleeps, and in
# which round it gave up (0: in none).
_FILLED: Final = 0
_SLEEPS: Final = 8
_GAVE_UP: Final = 9
_CALL: Final = struct.Struct("<4q")
CALL_BYTES: Final = _CALL.size
_CALLS_AT: Final = (128, 192)  # in bytes, one for each slot
_NUM_LOOKS: Final = 200
_SPIN_S: Final = 100e-6

KINDS: Final = (
    *("all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter", "gather", "scatter", "all_to_all"),
    *("barrier", "agree", "refused"),
)
REFUSAL_BYTES: Final = 1024
DTYPES: Final = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


class Call(msgspec.Struct, frozen=True):
    """What a round belongs to, the same on all workers.

    Args:
        kind: index in `KINDS`.
        dtype: of its tensors.
        num_elements: of its tensor.
        how: number of the reduction, or of the root.
    """

    kind: str
    dtype: torch.dtype = torch.uint8
    num_elements: int = 0
    how: int = 0

    def encoded(self) -> bytes:
        """Return it as bytes."""
        dtype = DTYPES.index(self.dtype) if self.dtype in DTYPES else -1
        return _CALL.pack(KINDS.index(self.kind), dtype, self.num_elements, self.how)

    @staticmethod
    def describe(encoded: bytes) -> str:
        """Return an encoded call in words; it comes from another process and may hold any numbers."""
        kind, dtype, num_elements, how = _CALL.unpack(encoded)
        name = KINDS[kind] if 0 <= kind < len(KINDS) else "an unknown call"
        of = dtype_name(DTYPES[dtype]) if 0 <= dtype < len(DTYPES) else "another dtype"
        return name if name in ("barrier", "refused") else f"{name} of {num_elements} x {of} ({how})"


REFUSED: Final = Call("refused")  # a round of a worker that tells others why it does not make their call

Fill = Callable[[Tensor], object]
Take = Callable[[Sequence[Tensor]], object]
# Which bytes of a worker's slot, from where to where, another one takes; both by their places among the members.
Piece = Callable[[int, int], tuple[int, int]]


class Round(msgspec.Struct, frozen=True):
    """One round of a call.

    Args:
        fill: is given the slot of this worker, `slot_bytes` of uint8.
        take: is given the slots of all workers, by place, which it may only read, and not keep.
        piece: which bytes are taken of the slot of one worker by another one, the same on all workers.
        needs: the number of the round of this call whose `take` comes before `fill`; -1 for none.
    """

    fill: Fill
    take: Take
    piece: Piece
    needs: int = -1


class Rounds(Protocol):
    """The rounds of one worker among the members of a group, or some of them; one thread at a time."""

    @property
    def place(self) -> int:
        """The place of this worker among those that make the rounds, who are in the order of their ranks."""
        ...

    @property
    def size(self) -> int:
        """How many make the rounds."""
        ...

    @property
    def slot_bytes(self) -> int:
        """The size of a slot."""
        ...

    @property
    def is_overlapping(self) -> bool:
        """Whether a round begins before the one before it has ended."""
        ...

    def run(self, call: Call, deadline: Deadline, steps: Iterable[Round]) -> None:
        """Fill this worker's slot, wait until all have filled theirs, and take from them; for each step.

        Args:
            call: what the rounds belong to.
            deadline: of all waits together.
            steps: the rounds, at least one.

        Raises:
            UsageError: another worker makes another call; then one round was made, whatever number of steps there are.
            PeerError: a worker is gone, or has not come in time.
        """
        ...

    def close(self) -> None:
        """Release the memory, once no round is under way any more. May be repeated."""
        ...


def nothing(_: object) -> None:
    """Fill or take nothing."""


def no_piece(_source: int, _to: int) -> tuple[int, int]:
    """Return that no bytes are taken."""
    return (0, 0)


@final
class SharedRounds:
    """Rounds on one machine, in shared memory that each worker owns and the others only read.

    There are two slots for each worker, which take turns. A slot is filled again two rounds later: every worker has
    taken from it before it filled its slot of the round between, for which this worker has waited.
    """

    def __init__(self, peers: Peers, segments: Mapping[int, memoryview]) -> None:
        ranks = self._ranks = sorted(segments)
        self.slot_bytes: Final = SLOT_BYTES
        self.is_overlapping: Final = False
        self.place: Final = ranks.index(peers.rank)
        self.size: Final = len(ranks)
        self.peers: Final = peers
        self._own = segments[peers.rank]
        self._others = [rank for rank in ranks if rank != peers.rank]
        self._bytes = dict(segments)
        self._words = {rank: memory[:_CONTROL_BYTES].cast("q") for rank, memory in segments.items()}
        whole = [torch.frombuffer(segments[rank], dtype=torch.uint8) for rank in ranks]
        starts = (_CONTROL_BYTES, _CONTROL_BYTES + SLOT_BYTES)
        self._slots = [[one[start : start + SLOT_BYTES] for one in whole] for start in starts]
        self._num_rounds = 0

    def run(self, call: Call, deadline: Deadline, steps: Iterable[Round]) -> None:
        """Make rounds; see `Rounds.run`. All see all of a slot."""
        for step in steps:
            self._run(call, deadline, step.fill, step.take)

    def _run(self, call: Call, deadline: Deadline, fill: Fill, take: Take) -> None:
        peers, turn = self.peers, self._num_rounds % 2
        peers.require_open()
        slots, at, encoded = self._slots[turn], _CALLS_AT[turn], call.encoded()
        fill(slots[self.place])
        self._own[at : at + _CALL.size] = encoded
        self._num_rounds += 1
        self._words[peers.rank][_FILLED] = self._num_rounds
        self._wake_sleeping()
        self._wait(call, deadline)
        for rank in self._others:
            told = bytes(self._bytes[rank][at : at + _CALL.size])
            if told != encoded:
                raise refusal(peers.rank, encoded, rank, told, slots[self._ranks.index(rank)])
        take(slots)

    def close(self) -> None:
        """Release the memory; see `Rounds.close`."""
        self._slots, self._bytes, self._words = [], {}, {}
        self._own = EMPTY

    def _missing(self) -> list[int]:
        """Return the workers that have not filled their slots, or else those that gave up in this round or before."""
        others, words = self._others, self._words
        absent = [rank for rank in others if words[rank][_FILLED] < self._num_rounds]
        return absent or [rank for rank in others if 0 < words[rank][_GAVE_UP] <= self._num_rounds]

    def _wait(self, call: Call, deadline: Deadline) -> None:
        """Wait for all workers: a little while without sleeping, as they mostly come soon."""
        peers = self.peers
        if not self._missing():
            return
        for _ in repeat(None, _NUM_LOOKS):
            if not self._missing():
                return
        until_s = time.monotonic() + _SPIN_S
        while time.monotonic() < until_s:
            sched_yield()
            if not self._missing():
                return
        # The lock that `wait` takes orders the two: either a worker that comes sees this, or this worker sees it.
        self._words[peers.rank][_SLEEPS] = 1
        try:
            peers.wait(self._missing, call.kind, deadline)
        except BaseException:  # a worker that comes late is not to go on without this one
            self._words[peers.rank][_GAVE_UP] = self._num_rounds
            raise
        finally:
            self._words[peers.rank][_SLEEPS] = 0

    def _wake_sleeping(self) -> None:
        with self.peers.news:  # orders what this worker has written before what it reads now
            sleeping = [rank for rank in self._others if self._words[rank][_SLEEPS]]
        for rank in sleeping:
            self.peers.wake(rank)


def refusal(rank: int, expected: bytes, other: int, told: bytes, slot: Tensor) -> UsageError:
    """Return the error for another worker that makes another call, or says in its slot why it makes none."""
    if told == REFUSED.encoded():
        return UsageError(bytes(slot[:REFUSAL_BYTES].numpy()).partition(b"\0")[0].decode(errors="replace"))
    return UsageError(
        f"worker {rank}: expected {Call.describe(expected)} of every worker, got {Call.describe(told)} from worker "
        f"{other}. All workers must make the same calls in the same order."
    )


def share_segments(peers: Peers, ranks: Sequence[int], own: memoryview, deadline: Deadline) -> SharedRounds:
    """Give this worker's memory to these others, and map theirs; blocks until all have."""
    others = [rank for rank in ranks if rank != peers.rank]
    for rank in others:
        peers.send(rank, SEGMENT_TAG, body=own)
    segments = {peers.rank: own}
    for rank in others:
        _, (_, segments[rank]) = peers.take([rank], SEGMENT_TAG, "shared memory", deadline)
        if len(segments[rank]) != SEGMENT_BYTES:
            raise PeerError(f"{names([rank])} has sent {len(segments[rank])} bytes of shared memory")
    return SharedRounds(peers, segments)


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
        """Release the memory; see `Rounds.close`."""
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

"""The work queue: leases pieces of work to workers until each piece counts, exactly once.

Work comes in ascending rounds. A round has a share for each home (the samples of a worker's clock, say), and a share
has pieces. A worker that reaches a round gets the remaining pieces of earlier rounds without workers, then those of its
own share, then those of the share with the most pieces left. A slow worker gets none of the last pieces if faster ones
finish them sooner.

Rules that hold for any order of calls:
1. A piece is free, held by one life, or settled; a settled piece stays so.
2. When a life ends, its pieces are free again.
3. A worker gets no piece of a round before it reaches it, and an opened round is the same for all.
4. An epoch is over only when every piece of it is settled, and then for all.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec.structs import replace

Life = tuple[int, int]  # (rank, incarnation) of a worker
# The answer without a piece: nothing is left of this round; the epoch is over; begin with another round.
Word = Literal["rest", "over", "elsewhere"]


class WorkRound(msgspec.Struct, frozen=True, order=True):
    """The work that all workers share at a time; `number` counts within an epoch."""

    epoch: int
    number: int


_BEGINNING = WorkRound(-1, -1)  # before the first


class WorkPiece(msgspec.Struct, frozen=True):
    """A piece of a round: the home of its share, and its index there."""

    round: WorkRound
    home: int
    index: int


class WorkAnswer(msgspec.Struct, frozen=True):
    """The answer to a claim: a piece of a round, or a word about the round.

    `num_left`: how many pieces were free at that time. `again`: a former holder of this piece has ended without
    delivering it.
    """

    word: Word | Literal["piece"]
    round: WorkRound
    home: int = -1
    index: int = -1
    num_left: int = 0
    again: bool = False


class _Lease(msgspec.Struct, frozen=True):
    piece: WorkPiece
    taken_in: WorkRound  # the round of its holder at the time


class _Stand(msgspec.Struct, frozen=True, order=True):
    round: WorkRound
    clock: int  # of its holder when it reached the round


@dataclass(slots=True)
class WorkQueue:
    """The pieces of one work, from the first round that a worker reaches."""

    # Rounds up to here have been opened, in order. Their pieces that are neither free nor held are settled.
    _newest: WorkRound = _BEGINNING
    # Round -> home -> free pieces in ascending order. Invariant: no dict or list in it is empty.
    _free: dict[WorkRound, dict[int, list[int]]] = field(default_factory=dict[WorkRound, dict[int, list[int]]])
    _held: dict[Life, list[_Lease]] = field(default_factory=dict[Life, list[_Lease]])
    # The round of each life that has claimed work and has not ended. Invariant: never decreases.
    _places: dict[Life, _Stand] = field(default_factory=dict[Life, _Stand])
    _num_taken: dict[Life, int] = field(default_factory=dict[Life, int])  # by each of those, in its round
    _returned: set[WorkPiece] = field(default_factory=set[WorkPiece])  # of the newest epoch, by lives that have ended
    # Rounds after the last one of their epoch, for pieces that were freed late.
    _extra: set[WorkRound] = field(default_factory=set[WorkRound])

    def claim(self, life: Life, place: WorkRound, sizes: Sequence[int], clock: int = 0) -> WorkAnswer | None:
        """Return the answer to a life in the round that it has reached; None if it has to wait for others.

        Its pieces of earlier rounds are settled: a worker moves on only after delivering them. To repeat the call after
        None is harmless.

        Args:
            life: the caller.
            place: the round that it has reached.
            sizes: pieces of each share, by home; empty after the last round of an epoch, to wait for its end.
            clock: the clock that the caller has begun; a restarted worker finds its round by it.
        """
        last = self._places.setdefault(life, _Stand(self._start(life, clock), clock)).round
        if place < last:  # a restarted worker: its script is at the beginning, the others are not
            return WorkAnswer("elsewhere", last)
        if place > last or life not in self._num_taken:
            self._places[life], self._num_taken[life] = _Stand(place, clock), 0
        self._held[life] = [lease for lease in self._held.get(life, []) if lease.taken_in >= place]
        if place > self._newest:
            self._open(place, sizes)
        piece = None if self._is_too_slow(life, place) else self._take(life, place)
        if piece is not None:
            if not sizes:
                self._extra.add(place)
            return WorkAnswer("piece", piece.round, piece.home, piece.index, self.num_free, piece in self._returned)
        if sizes or place in self._extra:
            return WorkAnswer("rest", place)
        return WorkAnswer("over", place) if self.is_settled(place) else None

    def settle(self, life: Life) -> None:
        """Settle the pieces of a life: the update that contains them is applied."""
        if life in self._held:
            self._held[life] = []

    def end_life(self, life: Life) -> list[WorkPiece]:
        """End a life; free its pieces of the newest epoch and return them."""
        self._places.pop(life, None)
        self._num_taken.pop(life, None)
        leases = self._held.pop(life, [])
        back = [lease.piece for lease in leases if lease.piece.round.epoch == self._newest.epoch]
        self._returned.update(back)
        for piece in back:
            insort(self._free.setdefault(piece.round, {}).setdefault(piece.home, []), piece.index)
        return back

    def is_settled(self, place: WorkRound) -> bool:
        """Return whether every piece of the rounds up to this one is settled."""
        held = (lease.piece.round for leases in self._held.values() for lease in leases)
        return min([*self._free, *held], default=self._newest) > place or not (self._free or any(self._held.values()))

    def holders(self) -> list[int]:
        """Return the ranks of the workers that hold pieces, in ascending order."""
        return sorted({rank for (rank, _), leases in self._held.items() if leases})

    def _is_too_slow(self, life: Life, place: WorkRound) -> bool:
        """Return whether faster workers would finish all free pieces before this one finishes one more.

        The speed of a worker is the number of pieces that it has taken in this round; on average, half of its last
        piece is done.
        """
        own = self._num_taken[life]
        faster = [self._num_taken[other] for other in self._at_work(place) if self._num_taken[other] > own]
        if not own or not faster:
            return False
        turns = -(-self.num_free // len(faster)) + 0.5
        return turns / max(faster) < 1 / own

    def _at_work(self, place: WorkRound) -> list[Life]:
        """Return the lives in this round that hold pieces, and so may claim more."""
        return [life for life, where in self._places.items() if where.round == place and self._held.get(life)]

    @property
    def num_free(self) -> int:
        """The number of free pieces."""
        return sum(len(rest) for shares in self._free.values() for rest in shares.values())

    @property
    def num_rounds(self) -> int:
        """The number of rounds with free pieces."""
        return len(self._free)

    def _open(self, place: WorkRound, sizes: Sequence[int]) -> None:
        if place.epoch > self._newest.epoch:  # a worker that leaves an epoch before its end has ended it for all
            self._free.clear()
            self._returned.clear()
        self._newest = place
        shares = {home: list(range(size)) for home, size in enumerate(sizes) if size}
        if shares:
            self._free[place] = shares

    def _take(self, life: Life, place: WorkRound) -> WorkPiece | None:
        busy = {where.round for other, where in self._places.items() if self._held.get(other)}
        here = [where for where in self._free if where == place or (where < place and where not in busy)]
        if not here:
            return None
        first = min(here)
        shares = self._free[first]
        if life[0] in shares:
            home, at = life[0], 0
        else:  # from the end, which the owner of the share reaches last
            home, at = max(shares, key=lambda home: (len(shares[home]), -home)), -1
        piece = WorkPiece(first, home, shares[home].pop(at))
        self._held[life].append(_Lease(piece, place))
        self._num_taken[life] += 1
        self._free[first] = {home: rest for home, rest in shares.items() if rest}
        if not self._free[first]:
            del self._free[first]
        return piece

    def _start(self, life: Life, clock: int) -> WorkRound:
        """Return the first round of a life: the beginning, or for a restarted worker the round of its clock.

        That is the round of the slowest worker, or the next one if the slowest has not begun this clock: in the same
        round, the restarted worker would stay a clock ahead of the others.
        """
        if life[1] == 0:
            return _BEGINNING
        hindmost = min(self._places.values(), default=_Stand(self._newest, clock))
        return replace(hindmost.round, number=hindmost.round.number + (clock > hindmost.clock))

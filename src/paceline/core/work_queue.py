"""Who works on what: each piece of work is given out until it counts, and counts once.

Work comes in rounds, in the order of their names; a round has a share for each home (the samples of a worker's clock,
say), and a share has pieces. A worker that comes to a round takes what is left of earlier rounds that nobody is in any
more, then the pieces of its own share, then those of the share that lags most: the one of which most is left. Only the
last pieces a slow worker leaves to faster ones, if they are through with them sooner.

Rules that this file keeps, whatever comes in whatever order:
1. A piece is free, held by one life, or settled; what is settled never comes back.
2. What a life holds when it ends is free again.
3. Nobody works on a round before coming to it, and a round that somebody has come to is the same for all.
4. An epoch is over only when every piece of it is settled, and then for all.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Life = tuple[int, int]  # (rank, incarnation) of a worker
# What a worker is told that gets no piece: nothing is left of this round; the epoch is over; begin with another round.
Word = Literal["rest", "over", "elsewhere"]


@dataclass(frozen=True, slots=True, order=True)
class WorkRound:
    """Part of the work that all workers share at a time; `number` counts within an epoch."""

    epoch: int
    number: int


_BEGINNING = WorkRound(-1, -1)  # before the first


@dataclass(frozen=True, slots=True)
class WorkPiece:
    """A piece of a round, by the home whose share it is of and its place in that."""

    round: WorkRound
    home: int
    index: int


@dataclass(frozen=True, slots=True)
class WorkAnswer:
    """What a worker gets that asks for work: a piece of a round, or else a word about it.

    `num_left`: how many pieces were free then for whoever comes to that round. `again`: whoever had this piece before
    has ended without delivering it.
    """

    word: Word | Literal["piece"]
    round: WorkRound
    home: int = -1
    index: int = -1
    num_left: int = 0
    again: bool = False


@dataclass(frozen=True, slots=True)
class _Lease:
    piece: WorkPiece
    taken_in: WorkRound  # where its holder was


@dataclass(frozen=True, slots=True, order=True)
class _Stand:
    round: WorkRound
    clock: int  # that was under way when its holder came there


@dataclass(slots=True)
class WorkQueue:
    """The pieces of one work, from the first round that somebody comes to."""

    # Rounds up to here have been opened, in order. What the two books below do not have of them is settled.
    _newest: WorkRound = _BEGINNING
    # Round -> home -> free pieces in ascending order. Invariant: nothing in it is empty.
    _free: dict[WorkRound, dict[int, list[int]]] = field(default_factory=dict[WorkRound, dict[int, list[int]]])
    _held: dict[Life, list[_Lease]] = field(default_factory=dict[Life, list[_Lease]])
    # Where each life is that has ever asked and has not ended. Invariant: nobody goes back.
    _places: dict[Life, _Stand] = field(default_factory=dict[Life, _Stand])
    _num_taken: dict[Life, int] = field(default_factory=dict[Life, int])  # by each of those, since it came there
    _returned: set[WorkPiece] = field(default_factory=set[WorkPiece])  # of the newest epoch, by lives that have ended
    # Rounds behind the last one of their epoch, for pieces that came back late.
    _extra: set[WorkRound] = field(default_factory=set[WorkRound])

    def ask(self, life: Life, place: WorkRound, sizes: Sequence[int], clock: int = 0) -> WorkAnswer | None:
        """Return what a life gets in the round to which it has come; None if it has to wait for others.

        What it took in earlier rounds is settled by that: whoever goes on has delivered. Asking again after None is
        asking once.

        Args:
            life: who asks.
            place: the round to which it has come.
            sizes: pieces of each share, by home; none behind the last round of an epoch, where the end is waited for.
            clock: that it has begun: how those find a place who were started again, as they begin at a clock.
        """
        last = self._places.setdefault(life, _Stand(self._start(life, clock), clock)).round
        if place < last:  # a worker that was started again: its script is at the beginning, the others are not
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
        """Count all that a life holds: the update that carries it is applied."""
        if life in self._held:
            self._held[life] = []

    def end(self, life: Life) -> list[WorkPiece]:
        """Free what a life holds of the epoch that takes part no longer; return it."""
        self._places.pop(life, None)
        self._num_taken.pop(life, None)
        work_queue = self._held.pop(life, [])
        back = [lease.piece for lease in work_queue if lease.piece.round.epoch == self._newest.epoch]
        self._returned.update(back)
        for piece in back:
            insort(self._free.setdefault(piece.round, {}).setdefault(piece.home, []), piece.index)
        return back

    def is_settled(self, place: WorkRound) -> bool:
        """Say whether every piece of the rounds up to this one is settled."""
        held = (lease.piece.round for work_queue in self._held.values() for lease in work_queue)
        return min([*self._free, *held], default=self._newest) > place or not (self._free or any(self._held.values()))

    def holders(self) -> list[int]:
        """Return the ranks of those that hold pieces, in ascending order."""
        return sorted({rank for (rank, _), work_queue in self._held.items() if work_queue})

    def _is_too_slow(self, life: Life, place: WorkRound) -> bool:
        """Say whether others would be through with all that is left before this life with one piece more.

        Their speeds are what they have taken in this round so far. On average each is half through with its last.
        """
        own = self._num_taken[life]
        faster = [self._num_taken[other] for other in self._at_work(place) if self._num_taken[other] > own]
        if not own or not faster:
            return False
        turns = -(-self.num_free // len(faster)) + 0.5
        return turns / max(faster) < 1 / own

    def _at_work(self, place: WorkRound) -> list[Life]:
        """Return who is in this round and has not delivered yet, and so may ask for more of it."""
        return [life for life, where in self._places.items() if where.round == place and self._held.get(life)]

    @property
    def num_free(self) -> int:
        """Count the pieces that nobody has."""
        return sum(len(rest) for shares in self._free.values() for rest in shares.values())

    @property
    def num_rounds(self) -> int:
        """Count the rounds that have pieces without an owner."""
        return len(self._free)

    def _open(self, place: WorkRound, sizes: Sequence[int]) -> None:
        if place.epoch > self._newest.epoch:  # whoever has left an epoch before its end has ended it for all
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
        else:  # from behind, where the owner of the share comes last
            home, at = max(shares, key=lambda home: (len(shares[home]), -home)), -1
        piece = WorkPiece(first, home, shares[home].pop(at))
        self._held[life].append(_Lease(piece, place))
        self._num_taken[life] += 1
        self._free[first] = {home: rest for home, rest in shares.items() if rest}
        if not self._free[first]:
            del self._free[first]
        return piece

    def _start(self, life: Life, clock: int) -> WorkRound:
        """Return where a life begins: at the beginning, or after another of its rank in the round of its clock.

        That is the round of the hindmost, or the one behind it, to which nobody may have come: where all have finished
        the clock of a round, whoever came into that round would be a clock ahead of them for ever.
        """
        if life[1] == 0:
            return _BEGINNING
        hindmost = min(self._places.values(), default=_Stand(self._newest, clock))
        return replace(hindmost.round, number=hindmost.round.number + (clock > hindmost.clock))

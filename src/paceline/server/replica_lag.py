"""How far a replica lags behind its server, and which pushes of which worker it has by now.

A server whose replica lags answers pushes, ticks and reads before the replica has received what they rest on, by a
number of clocks at most. Workers keep what they have pushed until the replica has it, and say it again to the process
that serves in the server's place (`catch_up.py`). What is decided otherwise than by what workers repeat, as who takes
part, is never ahead of the replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, final

from paceline.core.events import ClippedPush
from paceline.core.messages import (
    Applied,
    Clock,
    Closed,
    Delivered,
    Fetched,
    Follow,
    Held,
    Pull,
    Push,
    Replicated,
    Taken,
    Ticked,
    WholeStep,
)
from paceline.core.tables import TableCore
from paceline.core.work_queue import Life
from paceline.server.journal import Written
from paceline.wire.messages import EarlyValues, FetchedRest, KeysWanted

# Events that workers and servers say again, after which a process decides the same.
_REPEATED: Final = Push | WholeStep | Clock | Pull | Taken | Follow | Closed
# What may leave before the replica has what it rests on.
_MAY_LAG: Final = (
    Held | Applied | Ticked | Fetched | FetchedRest | EarlyValues | Delivered | KeysWanted | Replicated | Closed
)


def _is_repeated(written: Written) -> bool:
    """Return whether an event is said again; a norm is not, as a server that has made the update forgets it."""
    has_norm = isinstance(written, Follow | Closed) and written.norm is not None
    return isinstance(written, _REPEATED) and not has_norm


def may_lag(message: object) -> bool:
    """Return whether a message to a worker or a server may leave ahead of the replica.

    >>> may_lag(Ticked(3)), may_lag("an answer to a request")
    (True, False)
    """
    return isinstance(message, _MAY_LAG)


@final
@dataclass(slots=True)
class ReplicaLag:
    """Counts, in frames that the replica is told, how far it may lag and what it has.

    Args:
        clocks: of each worker that answers may be ahead of the replica. Of a table whose updates show on arrival, as
            many pushes of each worker.
        tables: returns the tables of the core.

    Attributes:
        num_needed: frames that the replica must have received before a message leaves that may be ahead of it.

    Example:
        >>> from paceline.core.messages import PushId, Sender
        >>> lag, sender = ReplicaLag(1), Sender(1, 0, 0)
        >>> lag.note_told(Push(PushId(1, 0, 0, seq=5), "w", 0, 0), 1)
        >>> lag.note_told(Clock(sender, 1), 2)
        >>> lag.num_needed
        0
        >>> lag.note_told(Clock(sender, 2), 3)
        >>> lag.num_needed, lag.take_received(2)
        (2, {(0, 0): [5]})
        >>> lag.num_behind(2), lag.num_behind(3)
        (1, 0)
    """

    clocks: int
    tables: Callable[[], Mapping[str, TableCore]] = dict[str, TableCore]
    num_needed: int = 0
    # The frame of each of the last ticks of a worker, and of its last pushes to a table that shows them on arrival.
    _latest: dict[tuple[Life, str], deque[int]] = field(default_factory=dict[tuple[Life, str], deque[int]])
    # Frames with pushes that the replica may not have, in order: number, worker, sequence numbers.
    _told: deque[tuple[int, Life, tuple[int, ...]]] = field(default_factory=deque[tuple[int, Life, tuple[int, ...]]])
    _num_tables: int = 0
    _has_quorums: bool = False

    def note_told(self, written: Written, num_frames: int) -> None:
        """Note that the replica is told of this, by the last of so many frames."""
        match written:
            case Push():
                self._note_pushes((written,), num_frames)
            case ClippedPush(push):
                self._note_pushes((push,), num_frames)
            case WholeStep():
                self._note_pushes(written.pushes, num_frames)
                if written.tick is not None:
                    self._note_tick(written.tick, num_frames)
            case Clock():
                self._note_tick(written, num_frames)
            case _:
                pass
        if not _is_repeated(written) or self._is_decided_by_order():
            self.num_needed = num_frames
            self._latest.clear()  # the replica has all of it before anything leaves

    def take_received(self, num_frames: int | None) -> dict[Life, list[int]]:
        """Return by worker the pushes in the first frames, or in all, that were not returned before."""
        found: dict[Life, list[int]] = {}
        while self._told and (num_frames is None or self._told[0][0] <= num_frames):
            _, life, seqs = self._told.popleft()
            found.setdefault(life, []).extend(seqs)
        return found

    def num_behind(self, num_frames: int) -> int:
        """Return by how many clocks of a worker a replica that has so many frames lags, or pushes shown on arrival."""
        return max((sum(frame > num_frames for frame in latest) for latest in self._latest.values()), default=0)

    def restart(self) -> None:
        """Count from zero again: there is another replica, which has all, or none."""
        self._latest.clear()
        self._told = deque((0, life, seqs) for _, life, seqs in self._told)
        self.num_needed = 0

    def _note_pushes(self, pushes: tuple[Push, ...], num_frames: int) -> None:
        for push in pushes:
            life = push.id.worker, push.id.incarnation
            self._told.append((num_frames, life, (push.id.seq,)))
            table = self.tables().get(push.table)
            if table is not None and not table.closes_clocks:
                self._note_latest((life, push.table), num_frames)

    def _note_tick(self, tick: Clock, num_frames: int) -> None:
        self._note_latest(((tick.sender.worker, tick.sender.incarnation), ""), num_frames)
        if tick.withdrawn:  # it is not said again once it is answered
            self.num_needed = num_frames

    def _note_latest(self, key: tuple[Life, str], num_frames: int) -> None:
        latest = self._latest.setdefault(key, deque())
        latest.append(num_frames)
        if len(latest) > self.clocks:
            self.num_needed = max(self.num_needed, latest.popleft())

    def _is_decided_by_order(self) -> bool:
        """Return whether a clock has the pushes of the workers that come first, as with a quorum."""
        tables = self.tables()
        if len(tables) != self._num_tables:
            self._num_tables = len(tables)
            self._has_quorums = any(table.consistency.backups for table in tables.values())
        return self._has_quorums

"""Commit of a clock of a table with `visible = on_clock`: the same contributors on every server.

One server decides. A worker ticks only after every server holds its pushes, so once the tick has reached the lead
(server 0), all parts of that worker's update are safe. The lead alone decides which workers contribute to a clock (all
of them, or the first n). The other servers follow its decision, so no clock is split between servers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.core.messages import PushId

_WITHOUT, _CLOSED = "was completed without worker", "is closed, the table stands at"

# Clocks that the lead may decide before all other servers have followed.
MAX_LEAD = 1 << 13
# Pushes that one worker may withdraw from open clocks; a worker with more is a misbehaving peer.
MAX_WITHDRAWN = 1 << 13
# Clocks closed per event, so that a worker whose clock leaps does not delay the others.
MAX_AT_ONCE = 64


def completed_without(worker: int, table: str, clock: int) -> str:
    """Return the reason to refuse a held push whose clock was completed without its worker."""
    return f"clock {clock} of table '{table}' {_WITHOUT} {worker}"


def closed_before(table: str, clock: int, now: int) -> str:
    """Return the reason to refuse a push that arrives after its clock was completed."""
    return f"clock {clock} of table '{table}' {_CLOSED} {now}"


def is_late(reason: str) -> bool:
    """Return whether this reason means that a push came too late, as is usual when a quorum completes clocks.

    >>> is_late(closed_before("w", 3, 5)), is_late("3 of its 4 elements are NaN")
    (True, False)
    """
    return _WITHOUT in reason or _CLOSED in reason


@dataclass(frozen=True, slots=True)
class CommitDecision:
    """The decision that completes a clock: the (worker, incarnation) of each contributor.

    `withdrawn` excludes pushes that some server refused, as (worker, incarnation, sequence number).
    """

    contributors: tuple[tuple[int, int], ...]
    withdrawn: tuple[tuple[int, int, int], ...] = ()


@dataclass(slots=True)
class ClockCommit:
    """The held pushes of one table on one server; on the lead also the decisions that followers have not applied."""

    num_followers: int
    # Invariant: every clock below is applied here; nothing at or above it is.
    clock: int = 0
    # The clock this table began at; earlier clocks have no contributors.
    _began: int = field(init=False)
    _held: dict[int, list[PushId]] = field(default_factory=dict[int, list[PushId]])
    # By open clock, (worker, incarnation, sequence number) of pushes not to be applied; below, their number by life.
    _withdrawn: dict[int, set[tuple[int, int, int]]] = field(default_factory=dict[int, set[tuple[int, int, int]]])
    _num_withdrawn: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    # Invariant: holds only clocks that some follower has not applied.
    _decided: dict[int, CommitDecision] = field(default_factory=dict[int, CommitDecision])
    _following: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        """Remember where the table began."""
        self._began = self.clock

    @property
    def is_far_ahead(self) -> bool:
        """Whether the followers lag by MAX_LEAD clocks, so that the lead has to wait for them."""
        return len(self._decided) >= MAX_LEAD

    @property
    def is_idle(self) -> bool:
        """Whether open clocks have no pushes here."""
        return not self._held and not self._withdrawn

    def hold(self, push_id: PushId, clock: int) -> None:
        """Keep a push until its clock closes."""
        self._held.setdefault(clock, []).append(push_id)

    def withdraw(self, worker: int, incarnation: int, clock: int, seq: int) -> bool:
        """On the lead: exclude a push that some server refused; return False if its worker has withdrawn too many."""
        if clock < self.clock:
            return True
        entries, life = self._withdrawn.setdefault(clock, set()), (worker, incarnation)
        self._num_withdrawn[life] += (*life, seq) not in entries
        entries.add((*life, seq))
        return self._num_withdrawn[life] <= MAX_WITHDRAWN

    def decide(self, finished: list[tuple[int, int]]) -> CommitDecision:
        """On the lead: decide the current clock, given the (worker, incarnation) of those that have finished it."""
        lives = set(finished)
        withdrawn = sorted(entry for entry in self._withdrawn.get(self.clock, ()) if entry[:2] in lives)
        decision = CommitDecision(tuple(finished), tuple(withdrawn))
        if self.num_followers:
            self._decided[self.clock] = decision
        return decision

    def close(self, decision: CommitDecision) -> tuple[list[PushId], list[PushId], list[PushId]]:
        """Complete the current clock; return the pushes to apply, to refuse as withdrawn, and to refuse as late.

        Each list is in ascending order of rank and sequence number.
        """
        chosen, gone = set(decision.contributors), set(decision.withdrawn)
        applied: list[PushId] = []
        withdrawn: list[PushId] = []
        late: list[PushId] = []
        for push_id in sorted(self._held.pop(self.clock, [])):
            life = (push_id.worker, push_id.incarnation)
            kind = late if life not in chosen else withdrawn if (*life, push_id.seq) in gone else applied
            kind.append(push_id)
        for worker, incarnation, _ in self._withdrawn.pop(self.clock, ()):
            self._num_withdrawn[worker, incarnation] -= 1
        self.clock += 1
        return applied, withdrawn, late

    def drop(self, worker: int, incarnation: int) -> list[PushId]:
        """Remove the pushes of an ended life for open clocks, and return them."""
        if self._num_withdrawn.pop((worker, incarnation), 0):
            rest = {c: {e for e in own if e[:2] != (worker, incarnation)} for c, own in self._withdrawn.items()}
            self._withdrawn = {clock: own for clock, own in rest.items() if own}
        dropped: list[PushId] = []
        for clock, ids in self._held.items():
            gone = {i for i in ids if (i.worker, i.incarnation) == (worker, incarnation)}
            dropped += sorted(gone)
            self._held[clock] = [i for i in ids if i not in gone]
        return dropped

    def follow(self, server: int, clock: int) -> CommitDecision | None:
        """On the lead: note that a server waits for `clock`; return its decision, or None while it is open."""
        self._following[server] = max(clock, self._following.get(server, 0))
        if len(self._following) == self.num_followers:
            done = min(self._following.values())
            self._decided = {c: each for c, each in self._decided.items() if c >= done}
        return CommitDecision(()) if clock < self._began else self._decided.get(clock)

    def decisions(self) -> list[tuple[int, int, CommitDecision]]:
        """On the lead: return (server, clock, decision) for each server that has asked for one that is made."""
        wanted = sorted(self._following.items())
        return [(server, clock, self._decided[clock]) for server, clock in wanted if clock in self._decided]

    def held(self) -> list[PushId]:
        """Return the pushes that wait for their clock, in ascending order of the clocks."""
        return [push_id for _, ids in sorted(self._held.items()) for push_id in ids]

    def followers_of(self, clock: int) -> list[int]:
        """On the lead: return the servers that wait for the decision on this clock."""
        return sorted(server for server, wanted in self._following.items() if wanted == clock)

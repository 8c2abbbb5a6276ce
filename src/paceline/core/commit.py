"""How a clock of a table with `visible = on_clock` is completed: with the same contributors on every server.

Note: one server decides. A worker ticks only after every server holds its pushes, so when the tick has reached the
first server, the lead, all parts of that worker's update are safe. The lead alone decides who contributes to a clock
(everyone, or the first n) and the others follow its word, so no clock is ever torn between servers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.core.messages import PushId

_WITHOUT, _CLOSED = "was completed without worker", "is closed, the table stands at"

# The lead decides no more clocks than this before all other servers have followed.
MAX_LEAD = 1 << 13
# A worker that has more pushes than this withdrawn from clocks that are still open is a misbehaving peer.
MAX_WITHDRAWN = 1 << 13
# By one event no more clocks are closed than this, so that a worker whose clock leaps keeps nobody waiting.
MAX_AT_ONCE = 64


def completed_without(worker: int, table: str, clock: int) -> str:
    """Return why a push that waited for its clock is refused: others have completed the clock."""
    return f"clock {clock} of table '{table}' {_WITHOUT} {worker}"


def closed_before(table: str, clock: int, now: int) -> str:
    """Return why a push is refused that arrives after its clock was completed."""
    return f"clock {clock} of table '{table}' {_CLOSED} {now}"


def is_late(reason: str) -> bool:
    """Return whether a push was refused for nothing but its time, as is usual where a quorum completes a clock.

    >>> is_late(closed_before("w", 3, 5)), is_late("3 of its 4 elements are NaN")
    (True, False)
    """
    return _WITHOUT in reason or _CLOSED in reason


@dataclass(frozen=True, slots=True)
class CommitDecision:
    """What completes a clock: (worker, incarnation) of all whose pushes are applied, but for those withdrawn.

    `withdrawn` names (worker, incarnation, sequence number) of pushes that some server refused.
    """

    contributors: tuple[tuple[int, int], ...]
    withdrawn: tuple[tuple[int, int, int], ...] = ()


@dataclass(slots=True)
class ClockCommit:
    """The held pushes of one table on one server, and on the lead the decisions that others have yet to follow."""

    num_followers: int
    # Invariant: every clock below is applied here; nothing at or above it is.
    clock: int = 0
    # The clock this table began at: earlier ones had nobody who could contribute.
    _began: int = field(init=False)
    _held: dict[int, list[PushId]] = field(default_factory=dict[int, list[PushId]])
    # By open clock, (worker, incarnation, sequence number) of pushes that are not to be applied; and how many by life.
    _withdrawn: dict[int, set[tuple[int, int, int]]] = field(default_factory=dict[int, set[tuple[int, int, int]]])
    _num_withdrawn: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    # Invariant: holds only clocks that some follower has yet to apply.
    _decided: dict[int, CommitDecision] = field(default_factory=dict[int, CommitDecision])
    _following: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        """Remember where the table began."""
        self._began = self.clock

    @property
    def is_far_ahead(self) -> bool:
        """Whether the other servers have to follow first."""
        return len(self._decided) >= MAX_LEAD

    def hold(self, push_id: PushId, clock: int) -> None:
        """Keep a push until its clock closes."""
        self._held.setdefault(clock, []).append(push_id)

    def withdraw(self, worker: int, incarnation: int, clock: int, seq: int) -> bool:
        """On the lead: apply no part of a push, as some server refused its own; False when there are too many."""
        if clock < self.clock:
            return True
        entries, life = self._withdrawn.setdefault(clock, set()), (worker, incarnation)
        self._num_withdrawn[life] += (*life, seq) not in entries
        entries.add((*life, seq))
        return self._num_withdrawn[life] <= MAX_WITHDRAWN

    def decide(self, finished: list[tuple[int, int]]) -> CommitDecision:
        """On the lead: decide what completes the current clock, given the workers that have finished it."""
        lives = set(finished)
        withdrawn = sorted(entry for entry in self._withdrawn.get(self.clock, ()) if entry[:2] in lives)
        decision = CommitDecision(tuple(finished), tuple(withdrawn))
        if self.num_followers:
            self._decided[self.clock] = decision
        return decision

    def close(self, decision: CommitDecision) -> tuple[list[PushId], list[PushId], list[PushId]]:
        """Complete the current clock; return pushes to apply, to refuse as withdrawn, and to refuse as late.

        Those to apply are in the order of the ranks, and of pushing.
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
        """Give up what a worker that is gone has pushed for clocks that are still open."""
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
        """On the lead: a server asks what completed `clock`; return the decision, or None while that is open."""
        self._following[server] = max(clock, self._following.get(server, 0))
        if len(self._following) == self.num_followers:
            done = min(self._following.values())
            self._decided = {c: who for c, who in self._decided.items() if c >= done}
        return CommitDecision(()) if clock < self._began else self._decided.get(clock)

    def followers_of(self, clock: int) -> list[int]:
        """On the lead: the servers that wait for the decision on this clock."""
        return sorted(server for server, wanted in self._following.items() if wanted == clock)

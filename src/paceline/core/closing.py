"""How a clock of a table with `visible = on_clock` is completed: with the same contributors on every server.

Note: one server decides. A worker ticks only after every server holds its pushes, so when the tick has reached the
first server, the lead, all parts of that worker's update are safe. The lead alone decides who contributes to a clock
(everyone, or the first n) and the others follow its word, so no clock is ever torn between servers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.messages import PushId

Contributors = tuple[tuple[int, int], ...]

# The lead decides no more clocks than this before all other servers have followed.
MAX_LEAD = 1 << 13
# By one event no more clocks are closed than this, so that a worker whose clock leaps keeps nobody waiting.
MAX_AT_ONCE = 64


@dataclass(slots=True)
class Closing:
    """The held pushes of one table on one server, and on the lead the decisions that others have yet to follow."""

    num_followers: int
    # Invariant: every clock below is applied here; nothing at or above it is.
    clock: int = 0
    # The clock this table began at: earlier ones had nobody who could contribute.
    _began: int = field(init=False)
    _held: dict[int, list[PushId]] = field(default_factory=dict[int, list[PushId]])
    _withdrawn: set[tuple[int, int, int]] = field(default_factory=set[tuple[int, int, int]])
    # Invariant: holds only clocks that some follower has yet to apply.
    _decided: dict[int, Contributors] = field(default_factory=dict[int, Contributors])
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

    def withdraw(self, worker: int, incarnation: int, clock: int) -> None:
        """Exclude a worker from a clock although it ticks: some server refused its part of the update."""
        if self.clock <= clock <= self.clock + MAX_LEAD:
            self._withdrawn.add((worker, incarnation, clock))

    def decide(self, finished: list[tuple[int, int]]) -> Contributors:
        """On the lead: fix the contributors of the current clock from the workers that have finished it."""
        contributors = tuple(
            (worker, incarnation)
            for worker, incarnation in finished
            if (worker, incarnation, self.clock) not in self._withdrawn
        )
        if self.num_followers:
            self._decided[self.clock] = contributors
        return contributors

    def close(self, contributors: Contributors) -> tuple[list[PushId], list[PushId]]:
        """Complete the current clock; return (to apply, in rank order then in order of pushing) and (to refuse)."""
        held = sorted(self._held.pop(self.clock, []))
        chosen = set(contributors)
        applied = [push_id for push_id in held if (push_id.worker, push_id.incarnation) in chosen]
        refused = [push_id for push_id in held if (push_id.worker, push_id.incarnation) not in chosen]
        self.clock += 1
        self._withdrawn = {entry for entry in self._withdrawn if entry[2] >= self.clock}
        return applied, refused

    def drop(self, worker: int, incarnation: int) -> list[PushId]:
        """Give up what a worker that is gone has pushed for clocks that are still open."""
        dropped: list[PushId] = []
        for clock, ids in self._held.items():
            gone = [i for i in ids if (i.worker, i.incarnation) == (worker, incarnation)]
            dropped += gone
            self._held[clock] = [i for i in ids if i not in gone]
        return dropped

    def follow(self, server: int, clock: int) -> Contributors | None:
        """On the lead: a server asks who completed `clock`; return them, or None while that is open."""
        self._following[server] = max(clock, self._following.get(server, 0))
        if len(self._following) == self.num_followers:
            done = min(self._following.values())
            self._decided = {c: who for c, who in self._decided.items() if c >= done}
        return () if clock < self._began else self._decided.get(clock)

    def followers_of(self, clock: int) -> list[int]:
        """On the lead: the servers that wait for the decision on this clock."""
        return sorted(server for server, wanted in self._following.items() if wanted == clock)

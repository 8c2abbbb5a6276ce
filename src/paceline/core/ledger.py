"""The answers given to the pushes of one life of one worker: why a push is applied once, however often it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.messages import Applied, Held, Push, PushRefused

Answer = Held | Applied | PushRefused

# A worker waits before it has this many unsettled pushes, so a longer ledger is a misbehaving peer.
WINDOW = 1024


@dataclass(slots=True)
class Ledger:
    """Answers by sequence number, bounded by what the worker may have unsettled."""

    # Everything below is known to its sender as answered; a copy that still arrives is late and needs nothing.
    settled: int = 0
    # Invariant: every key is >= settled, and there are at most WINDOW of them.
    _answers: dict[int, tuple[str, Answer]] = field(default_factory=dict[int, tuple[str, Answer]])

    def __len__(self) -> int:
        """Count the answers kept."""
        return len(self._answers)

    def settle(self, settled: int) -> None:
        """Forget what the sender has said that it knows; it cannot know the answer to what is only held."""
        if settled > self.settled:
            settled = min([settled, *(seq for seq, (_, answer) in self._answers.items() if isinstance(answer, Held))])
            self.settled = settled
            self._answers = {seq: entry for seq, entry in self._answers.items() if seq >= settled}

    def is_late(self, push: Push) -> bool:
        """Say whether the sender already has the answer to this copy of a push."""
        return push.id.seq < self.settled

    def overflows(self, push: Push) -> bool:
        """Say whether the sender has more unsettled pushes than it may."""
        return push.id.seq >= self.settled + WINDOW

    def answer(self, push: Push) -> Answer | None:
        """Return the answer to an earlier copy of this push, if there was one."""
        entry = self._answers.get(push.id.seq)
        return entry[1] if entry else None

    def record(self, table: str, answer: Answer) -> None:
        """Remember the answer; a later one (held, then applied) replaces it."""
        if answer.id.seq >= self.settled:
            self._answers[answer.id.seq] = (table, answer)

    def applied_in(self, table: str) -> tuple[int, ...]:
        """Return the unsettled sequence numbers that are applied to this table, in ascending order."""
        return tuple(
            sorted(seq for seq, (own, answer) in self._answers.items() if own == table and isinstance(answer, Applied))
        )

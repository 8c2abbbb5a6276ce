"""Deduplication of pushes: the answers given to one life of one worker, so that a repeated push is applied once."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from paceline.core.messages import Applied, Held, Push, PushRefused

Answer = Held | Applied | PushRefused

# Unsettled pushes of one table. A worker waits before it exceeds this, so a peer that does not is misbehaving.
WINDOW = 1 << 13


@dataclass(slots=True)
class _Kept:
    """What is kept of the pushes of one table."""

    # The sender has the answers to all pushes below; a copy that still arrives is ignored.
    settled: int = 0
    # Invariant: a heap of sequence numbers, each >= settled, at most WINDOW of them.
    seqs: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class DedupWindow:
    """Answers by sequence number; at most WINDOW for each table.

    Tables settle independently: a push that is held for its clock does not keep the answers of another table.
    """

    _answers: dict[int, Answer] = field(default_factory=dict[int, Answer])
    _tables: dict[str, _Kept] = field(default_factory=dict[str, _Kept])

    def __len__(self) -> int:
        """Count the answers kept."""
        return len(self._answers)

    def settled_in(self, table: str) -> int:
        """Return the sequence number below which the sender has the answers to all its pushes of a table."""
        kept = self._tables.get(table)
        return kept.settled if kept else 0

    def settle(self, table: str, settled: int) -> None:
        """Forget answers below `settled`, which the sender has received; a held push has no final answer yet."""
        kept = self._tables.setdefault(table, _Kept())
        if settled > kept.settled:
            while kept.seqs and kept.seqs[0] < settled and not isinstance(self._answers[kept.seqs[0]], Held):
                del self._answers[heappop(kept.seqs)]
            kept.settled = min(settled, *kept.seqs[:1]) if kept.seqs else settled

    def is_late(self, push: Push) -> bool:
        """Return whether the sender already has the answer to this copy of a push."""
        kept = self._tables.get(push.table)
        return kept is not None and push.id.seq < kept.settled

    def overflows(self, table: str) -> bool:
        """Return whether a table has no room for another unsettled push."""
        kept = self._tables.get(table)
        return kept is not None and len(kept.seqs) >= WINDOW

    def answer(self, push: Push) -> Answer | None:
        """Return the answer to an earlier copy of this push, or None."""
        return self._answers.get(push.id.seq)

    def record(self, table: str, answer: Answer) -> None:
        """Remember the answer; a later one (held, then applied) replaces it."""
        kept, seq = self._tables.setdefault(table, _Kept()), answer.id.seq
        if seq in self._answers:
            self._answers[seq] = answer
        elif seq >= kept.settled:
            self._answers[seq] = answer
            heappush(kept.seqs, seq)

    def applied_in(self, table: str) -> tuple[int, ...]:
        """Return the unsettled sequence numbers that are applied to this table, in ascending order."""
        kept = self._tables.get(table)
        if kept is None:
            return ()
        return tuple(sorted([seq for seq in kept.seqs if isinstance(self._answers[seq], Applied)]))

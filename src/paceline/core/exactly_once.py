"""Exactly-once pushes: a worker repeats a message until it is answered, a server remembers the answers it gave.

`Retransmit` is the worker's end, with growing pauses. `DedupWindow` is the end of a server, for one life of one worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from paceline.core.messages import Applied, FromWorker, Held, Join, Pull, Push, PushRefused

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
        kept = self._tables.get(table) or self._tables.setdefault(table, _Kept())
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
        kept, seq = self._tables.get(table) or self._tables.setdefault(table, _Kept()), answer.id.seq
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


# (server, kind, identity) of a message; a later message under the same key replaces the earlier one.
Key = tuple[int, str, int | str]

_LONGEST_PAUSE = 12  # times the first one


@dataclass(slots=True)
class Unanswered:
    """One message that waits for its answer."""

    message: FromWorker
    due: float
    attempts: int = 1
    bare: bool = False

    @property
    def waits_for_others(self) -> bool:
        """Whether the answer depends on other workers finishing a clock, which may take any time."""
        return self.bare or isinstance(self.message, Pull)


@dataclass(slots=True)
class Retransmit:
    """Unanswered messages by key, each with the time when it is repeated."""

    retry_s: float
    _unanswered: dict[Key, Unanswered] = field(default_factory=dict[Key, Unanswered])

    def add(self, key: Key, message: FromWorker, now: float) -> None:
        """Expect an answer under this key."""
        self._unanswered.pop(key, None)  # a replacement goes to the end of the order of sending
        self._unanswered[key] = Unanswered(message, due=now + self.retry_s)

    def moves_back(self, key: Key, message: FromWorker, now: float) -> bool:
        """Have a message be repeated after those added since; False if it is answered or replaced already."""
        entry = self._unanswered.get(key)
        if entry is None or entry.message is not message:
            return False
        del self._unanswered[key]
        self._unanswered[key] = entry
        entry.due = now + self.retry_s
        return True

    def answered(self, key: Key) -> bool:
        """Note an answer; return whether one was expected."""
        return self._unanswered.pop(key, None) is not None

    def make_bare(self, key: Key) -> None:
        """Repeat a push without its tensor from now on, and count its attempts anew: the server holds it."""
        if key in self._unanswered:
            self._unanswered[key].bare = True
            self._unanswered[key].attempts = 1

    def message(self, key: Key) -> FromWorker | None:
        """Return the message that waits under this key, or None."""
        entry = self._unanswered.get(key)
        return entry.message if entry else None

    def for_server(self, server: int) -> list[Unanswered]:
        """Return the messages that this server has not answered, in the order of sending, but a join first."""
        entries = [entry for key, entry in self._unanswered.items() if key[0] == server]
        return sorted(entries, key=lambda entry: not isinstance(entry.message, Join))

    def next_due(self) -> float | None:
        """Return when the next message is due to be repeated, or None."""
        return min((entry.due for entry in self._unanswered.values()), default=None)

    def repeat_due(self, now: float) -> list[tuple[int, Unanswered]]:
        """Return (server, message) of all messages that are due, and double the pause before their next repetition."""
        due = [(key[0], entry) for key, entry in self._unanswered.items() if entry.due <= now]
        for _, entry in due:
            entry.due = now + self.retry_s * min(2**entry.attempts, _LONGEST_PAUSE)
            entry.attempts += 1
        return due

"""Retransmission of a worker's messages until they are answered, with growing pauses."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.messages import FromWorker, Join, Pull

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

"""The readers of one table on one server: who waits for a value, and who is sent every new one."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.messages import Pull

NONE_YET, SOME_LOST = -1, -2  # what a subscriber to rows was last sent, where that is no clock


@dataclass(slots=True)
class _Subscriber:
    sent: int  # the clock it was last sent
    busy: bool  # Invariant: at most one delivery is under way to a subscriber, so a slow one costs one buffer
    before: int = NONE_YET  # `sent` before the last delivery


@dataclass(slots=True)
class ReadQueue:
    """Pulls that wait for the clock, and subscribers that get new values when it advances.

    A pull of a whole table takes the place of an older one of the same worker. Where a pull asks for some rows
    (`keyed`), each is a read of its own, and an answer says nothing of what the subscriber has yet to be sent.
    """

    subscribing: bool
    keyed: bool = False
    # By worker, and by request where each counts.
    _waiting: dict[tuple[int, int], Pull] = field(default_factory=dict[tuple[int, int], Pull])
    _last_request: dict[int, int] = field(default_factory=dict[int, int])
    _subscribers: dict[int, _Subscriber] = field(default_factory=dict[int, _Subscriber])

    def ask(self, pull: Pull, clock: int) -> bool:
        """Take in a pull and say whether it is answered now; else it waits. An overtaken copy is ignored."""
        worker = pull.sender.worker
        if not self.keyed and pull.request < self._last_request.get(worker, 0):
            return False
        self._last_request[worker] = pull.request
        if pull.needs > clock:
            self._waiting[self._place(pull)] = pull
            return False
        self.answered(pull, clock)
        return True

    def answered(self, pull: Pull, clock: int) -> None:
        """Note that values of this clock are on their way to the reader, who is a subscriber from then on."""
        worker = pull.sender.worker
        self._waiting.pop(self._place(pull), None)
        if self.subscribing and not (self.keyed and worker in self._subscribers):
            self._subscribers[worker] = _Subscriber(sent=NONE_YET if self.keyed else clock, busy=False)

    def ready(self, clock: int) -> list[Pull]:
        """Return the waiting pulls that this clock satisfies, lowest rank first (it may have jumped)."""
        return [pull for _, pull in sorted(self._waiting.items()) if pull.needs <= clock]

    def waiting(self) -> list[Pull]:
        """Return the pulls that wait for a clock, lowest rank first."""
        return [pull for _, pull in sorted(self._waiting.items())]

    def deliverable(self, clock: int) -> list[int]:
        """Return the subscribers that are free and have not been sent this clock; they are busy from now on."""
        return [worker for worker in sorted(self._subscribers) if self.start_delivery(worker, clock)]

    def start_delivery(self, worker: int, clock: int) -> bool:
        """Say whether this subscriber is free and has not been sent this clock; it is busy from now on."""
        reader = self._subscribers.get(worker)
        if reader is None or reader.busy or reader.sent >= clock:
            return False
        self._subscribers[worker] = _Subscriber(sent=clock, busy=True, before=reader.sent)
        return True

    def before(self, worker: int) -> int:
        """Return the clock of the delivery before the last one to a subscriber; of rows, the last says what changed."""
        reader = self._subscribers.get(worker)
        return reader.before if reader and self.keyed else NONE_YET

    def taken(self, worker: int, clock: int) -> None:
        """Note that a subscriber has taken in its delivery; a copy of an older notice changes nothing."""
        reader = self._subscribers.get(worker)
        if reader and reader.sent == clock:
            reader.busy = False

    def reconnected(self, worker: int) -> None:
        """Note that a delivery under way to a worker may be lost: it relies on none from before."""
        reader = self._subscribers.get(worker)
        if reader:
            reader.busy = False
            reader.sent = SOME_LOST if self.keyed else reader.sent

    def forget(self, worker: int) -> None:
        """Drop all that a worker waits for or subscribes to."""
        self._waiting = {place: pull for place, pull in self._waiting.items() if place[0] != worker}
        self._last_request.pop(worker, None)
        self._subscribers.pop(worker, None)

    def _place(self, pull: Pull) -> tuple[int, int]:
        return pull.sender.worker, pull.request if self.keyed else 0

"""The protocol state of one table on one server: its consistency, its current clock and its readers.

Readers are pulls that wait for a clock, and subscribers to new values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import final

from paceline.core.clocks import Clocks
from paceline.core.commit import ClockCommit
from paceline.core.consistency import Consistency
from paceline.core.dedup import DedupWindow
from paceline.core.messages import Delivered, Fetched, Pull

NONE_YET, SOME_LOST = -1, -2  # in the place of the clock that a subscriber to rows was last sent


@dataclass(slots=True)
class _Subscriber:
    sent: int  # the clock it was last sent
    busy: bool  # a delivery is under way; there is never a second one, so a slow subscriber costs one buffer
    before: int = NONE_YET  # `sent` before the last delivery


@dataclass(slots=True)
class ReadQueue(ABC):
    """Pulls that wait for the clock, and subscribers that get new values when it advances."""

    subscribing: bool
    # By worker, and in row tables by request.
    _waiting: dict[tuple[int, int], Pull] = field(default_factory=dict[tuple[int, int], Pull])
    _last_request: dict[int, int] = field(default_factory=dict[int, int])
    _subscribers: dict[int, _Subscriber] = field(default_factory=dict[int, _Subscriber])

    @property
    def is_idle(self) -> bool:
        """Whether no reader waits or subscribes."""
        return not self._waiting and not self._subscribers

    def add_pull(self, pull: Pull, clock: int) -> bool:
        """Add a pull; return whether it is answered now, else it waits. An outdated copy is ignored."""
        worker = pull.sender.worker
        if self._is_outdated(pull):
            return False
        self._last_request[worker] = pull.request
        if pull.needs > clock:
            self._waiting[self._place(pull)] = pull
            return False
        if self._waiting or self.subscribing:
            self.note_answered(pull, clock)
        return True

    def note_answered(self, pull: Pull, clock: int) -> None:
        """Note that values of this clock are on their way to the reader, which is a subscriber from then on."""
        self._waiting.pop(self._place(pull), None)
        if self.subscribing:
            self._subscribe(pull.sender.worker, clock)

    def satisfied_pulls(self, clock: int) -> list[Pull]:
        """Return the waiting pulls that this clock satisfies, lowest rank first; the clock may have jumped."""
        return [pull for _, pull in sorted(self._waiting.items()) if pull.needs <= clock]

    def satisfied_readers(self, clock: int) -> set[tuple[int, int]]:
        """Return the (worker, incarnation) of the waiting pulls that this clock satisfies."""
        pulls = self._waiting.values()
        return {(pull.sender.worker, pull.sender.incarnation) for pull in pulls if pull.needs <= clock}

    def waiting_pulls(self) -> list[Pull]:
        """Return the pulls that wait for a clock, lowest rank first."""
        return [pull for _, pull in sorted(self._waiting.items())]

    def start_deliveries(self, clock: int) -> list[int]:
        """Return the free subscribers that have not been sent this clock, and mark them busy."""
        return [worker for worker in sorted(self._subscribers) if self.start_delivery(worker, clock)]

    def start_delivery(self, worker: int, clock: int) -> bool:
        """Return whether this subscriber is free and has not been sent this clock; if so, mark it busy."""
        reader = self._subscribers.get(worker)
        if reader is None or reader.busy or reader.sent >= clock:
            return False
        self._subscribers[worker] = _Subscriber(sent=clock, busy=True, before=reader.sent)
        return True

    @abstractmethod
    def clock_before(self, worker: int) -> int:
        """Return the clock since which the last delivery has the changes; NONE_YET if it has all values."""

    def note_taken(self, worker: int, clock: int) -> None:
        """Note that a subscriber has installed its delivery; an older confirmation changes nothing."""
        reader = self._subscribers.get(worker)
        if reader and reader.sent == clock:
            reader.busy = False

    def reconnected(self, worker: int) -> None:
        """Note that a worker has reconnected: the next delivery does not rely on the last, which may be lost."""
        reader = self._subscribers.get(worker)
        if reader:
            reader.busy = False
            self._note_lost(reader)

    def forget(self, worker: int) -> None:
        """Drop all that a worker waits for or subscribes to."""
        self._waiting = {place: pull for place, pull in self._waiting.items() if place[0] != worker}
        self._last_request.pop(worker, None)
        self._subscribers.pop(worker, None)

    @abstractmethod
    def _is_outdated(self, pull: Pull) -> bool:
        """Return whether a newer pull takes the place of this one."""

    @abstractmethod
    def _place(self, pull: Pull) -> tuple[int, int]:
        """Return the key under which a pull waits."""

    @abstractmethod
    def _subscribe(self, worker: int, clock: int) -> None:
        """Note that a reader has been sent values of this clock in answer to a pull."""

    @abstractmethod
    def _note_lost(self, reader: _Subscriber) -> None:
        """Note that the last delivery may be lost."""


@final
@dataclass(slots=True)
class DenseReadQueue(ReadQueue):
    """The readers of a dense table: a pull replaces an older one of the same worker, and its answer is a delivery."""

    def clock_before(self, worker: int) -> int:
        """Return NONE_YET: a delivery has all values."""
        return NONE_YET

    def _is_outdated(self, pull: Pull) -> bool:
        return pull.request < self._last_request.get(pull.sender.worker, 0)

    def _place(self, pull: Pull) -> tuple[int, int]:
        return pull.sender.worker, 0

    def _subscribe(self, worker: int, clock: int) -> None:
        self._subscribers[worker] = _Subscriber(sent=clock, busy=False)

    def _note_lost(self, reader: _Subscriber) -> None:
        """Do nothing: the answer to the repeated pull has all values."""


@final
@dataclass(slots=True)
class RowReadQueue(ReadQueue):
    """The readers of a row table: every pull is a read of its own, and its answer does not count as a delivery."""

    def clock_before(self, worker: int) -> int:
        """Return the clock of the delivery before the last."""
        reader = self._subscribers.get(worker)
        return reader.before if reader else NONE_YET

    def _is_outdated(self, pull: Pull) -> bool:
        return False

    def _place(self, pull: Pull) -> tuple[int, int]:
        return pull.sender.worker, pull.request

    def _subscribe(self, worker: int, clock: int) -> None:
        self._subscribers.setdefault(worker, _Subscriber(sent=NONE_YET, busy=False))

    def _note_lost(self, reader: _Subscriber) -> None:
        reader.sent = SOME_LOST


@dataclass(slots=True)
class TableCore:
    """The protocol of one table on one server."""

    name: str
    consistency: Consistency
    commit: ClockCommit
    keyed: bool = False  # a table of rows
    readers: ReadQueue = field(init=False)
    closes_clocks: bool = field(init=False)  # updates become visible clock by clock
    # Number of updates applied here; a reader orders values by it.
    version: int = 0
    ask_lead_at: float = 0.0
    reached: int = 0  # the last clock that `Advanced` has said

    def __post_init__(self) -> None:
        """Create the read queue, which has subscribers if the consistency delivers on clock."""
        self.closes_clocks = self.consistency.visible == "on_clock"
        subscribing = self.consistency.deliver == "on_clock"
        self.readers = RowReadQueue(subscribing) if self.keyed else DenseReadQueue(subscribing)

    @property
    def is_idle(self) -> bool:
        """Whether the end of a clock changes nothing here; row tables have accounts of clocks."""
        return not self.keyed and self.readers.is_idle and self.commit.is_idle

    def is_complete(self, clocks: Clocks) -> bool:
        """Return whether enough workers have finished its current clock, and no follower is too far behind."""
        clock, backups = self.commit.clock, self.consistency.backups
        if self.commit.num_followers and self.commit.is_far_ahead:
            return False
        if not backups:
            return clocks.slowest > clock and len(clocks) > 0
        return len(clocks.past(clock)) >= max(1, len(clocks) - backups)

    def fetched(self, pull: Pull, clock: int, ticked: int, dedup: DedupWindow) -> Fetched:
        """Return the answer to a pull, to be sent with the current values."""
        settled, includes = dedup.settled_in(self.name), dedup.applied_in(self.name)
        return Fetched(pull.request, self.name, clock, self.version, settled, includes, ticked)

    def delivered(self, worker: int, clock: int, dedup: DedupWindow) -> Delivered:
        """Return a delivery to a subscriber, to be sent with the current values."""
        includes, since = dedup.applied_in(self.name), self.readers.clock_before(worker)
        return Delivered(self.name, clock, self.version, dedup.settled_in(self.name), includes, since)

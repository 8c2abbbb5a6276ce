"""The protocol state of one table on one server: its consistency, its readers, and the commit of its clocks.

Readers are pulls that wait for a clock, and subscribers to new values.

With `visible = on_clock`, every clock has the same contributors on every server, as one server decides. A worker ticks
only after every server holds its pushes, so once the tick has reached the lead (server 0), all parts of that worker's
update are safe. The lead alone decides which workers contribute to a clock (all of them, or the first n). The other
servers follow its decision, so no clock is split between servers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from math import hypot
from typing import final

import msgspec
from msgspec.structs import replace

from paceline.core.adaptive import AdaptiveBound
from paceline.core.consistency import Consistency
from paceline.core.exactly_once import DedupWindow
from paceline.core.membership import Clocks
from paceline.core.messages import Delivered, Fetched, Pull, PushId

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


class CommitDecision(msgspec.Struct, frozen=True):
    """The decision that completes a clock: the (worker, incarnation) of each contributor.

    `withdrawn` excludes pushes that some server refused, as (worker, incarnation, sequence number). An update that
    `clips` waits for its `norm`, that of the parts of all servers together.
    """

    contributors: tuple[tuple[int, int], ...]
    withdrawn: tuple[tuple[int, int, int], ...] = ()
    clips: bool = False
    norm: float | None = None

    @property
    def lacks_norm(self) -> bool:
        """Whether the update cannot be made yet."""
        return self.clips and self.norm is None


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
    _clipped: set[int] = field(default_factory=set[int])  # open clocks with a push whose update is to be clipped
    # Of the current clock, once it is decided but lacks its norm: no push joins or leaves its update any more.
    pending: CommitDecision | None = None
    _norms: dict[int, float] = field(default_factory=dict[int, float])  # of the parts of the pending update, by server

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

    def note_clip(self, clock: int) -> None:
        """On the lead: clip the update of this clock, unless it is closed."""
        if clock >= self.clock:
            self._clipped.add(clock)

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
        lives, entries = set(finished), self._withdrawn.get(self.clock)
        withdrawn = tuple(sorted(entry for entry in entries if entry[:2] in lives)) if entries else ()
        decision = CommitDecision(tuple(finished), withdrawn, clips=self.clock in self._clipped)
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
        if decision.clips:
            self._clipped.discard(self.clock)
            self.pending = None
        self.clock += 1
        return applied, withdrawn, late

    def await_norm(self, decision: CommitDecision) -> list[PushId]:
        """Note that the current clock waits for its norm; return the pushes that `close` will return as applied."""
        self.pending, self._norms = decision, {}
        chosen, gone = set(decision.contributors), set(decision.withdrawn)
        return [
            push_id
            for push_id in sorted(self._held.get(self.clock, []))
            if (push_id.worker, push_id.incarnation) in chosen
            and (push_id.worker, push_id.incarnation, push_id.seq) not in gone
        ]

    def note_norm(self, server: int, clock: int, norm: float) -> None:
        """Note the norm of a server's part of the pending update; one of another clock changes nothing."""
        if self.pending is not None and clock == self.clock:
            self._norms[server] = norm

    def norm_of(self, server: int) -> float | None:
        """Return the norm of a server's part of the pending update; None if it is not known, or none is pending."""
        return None if self.pending is None else self._norms.get(server)

    def with_norm(self) -> CommitDecision | None:
        """On the lead: return the pending decision with its norm once all servers have told theirs, else None."""
        if self.pending is None or len(self._norms) <= self.num_followers:
            return None
        decision = replace(self.pending, norm=hypot(*(norm for _, norm in sorted(self._norms.items()))))
        self._decided[self.clock] = decision
        return decision

    def drop(self, worker: int, incarnation: int) -> list[PushId]:
        """Remove the pushes of an ended life for open clocks that are not decided, and return them."""
        is_chosen = self.pending is not None and (worker, incarnation) in self.pending.contributors
        if self._num_withdrawn.pop((worker, incarnation), 0):
            rest = {c: {e for e in own if e[:2] != (worker, incarnation)} for c, own in self._withdrawn.items()}
            self._withdrawn = {clock: own for clock, own in rest.items() if own}
        dropped: list[PushId] = []
        for clock, ids in self._held.items():
            if is_chosen and clock == self.clock:
                continue
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

    def waiting_copy(self, pull: Pull) -> Pull | None:
        """Return the pull that waits already and that this one repeats, or None."""
        waiting = self._waiting.get(self._place(pull))
        return waiting if waiting is not None and waiting.request == pull.request else None

    @property
    def num_waiting(self) -> int:
        """The number of workers with a pull that waits for a clock."""
        return len({worker for worker, _ in self._waiting})

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
    adaptive: AdaptiveBound | None = field(init=False)  # the bound in force, where it moves
    # Number of updates applied here; a reader orders values by it.
    version: int = 0
    ask_lead_at: float = 0.0
    reached: int = 0  # the last clock that `Advanced` has said

    def __post_init__(self) -> None:
        """Create the read queue, which has subscribers if the consistency delivers on clock."""
        self.closes_clocks = self.consistency.visible == "on_clock"
        subscribing = self.consistency.deliver == "on_clock"
        self.readers = RowReadQueue(subscribing) if self.keyed else DenseReadQueue(subscribing)
        lowest, highest = self.consistency.lowest, self.consistency.bound
        self.adaptive = None if lowest is None or highest is None else AdaptiveBound(lowest, highest)

    @property
    def is_idle(self) -> bool:
        """Whether the end of a clock changes nothing here; row tables have accounts of clocks."""
        return not self.keyed and self.readers.is_idle and self.commit.is_idle

    def is_complete(self, clocks: Clocks) -> bool:
        """Return whether enough workers have finished its current clock, and no follower is too far behind."""
        clock, backups = self.commit.clock, self.consistency.backups
        if self.commit.pending is not None or (self.commit.num_followers and self.commit.is_far_ahead):
            return False
        if not backups:
            return clocks.slowest > clock and len(clocks) > 0
        return clocks.num_past(clock) >= max(1, len(clocks) - backups)

    def fetched(self, pull: Pull, clock: int, ticked: int, dedup: DedupWindow) -> Fetched:
        """Return the answer to a pull, to be sent with the current values."""
        if self.adaptive is not None:
            self.adaptive.note_answer(pull.clock - clock)
        settled, includes = dedup.settled_in(self.name), dedup.applied_in(self.name)
        return Fetched(pull.request, self.name, clock, self.version, settled, includes, ticked)

    def delivered(self, worker: int, clock: int, dedup: DedupWindow) -> Delivered:
        """Return a delivery to a subscriber, to be sent with the current values."""
        includes, since = dedup.applied_in(self.name), self.readers.clock_before(worker)
        return Delivered(self.name, clock, self.version, dedup.settled_in(self.name), includes, since)

"""The worker's side of the protocol as a pure state machine: calls and answers in, messages and results out.

Rules:
1. A tick is sent only after every server has every push that it closes, so a tick seen by one server vouches for all.
   Where there is one server, it may travel with all that it closes in a `WholeStep`, which is repeated in parts.
2. A retry repeats the same message with the same identity.
3. A read is served from what is cached only while that is fresh enough for the reader's clock: `TableReads` knows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.core.consistency import Consistency
from paceline.core.effects import Drop, Fail, JoinDone, LeaveDone, ReadDone, Release, Send, WorkerEffect
from paceline.core.events import (
    Arrived,
    Connected,
    Opened,
    Timeout,
    WantClock,
    WantJoin,
    WantLeave,
    WantPush,
    WantRead,
    WantRows,
)
from paceline.core.exactly_once import WINDOW, Key, Retransmit, Unanswered
from paceline.core.messages import (
    Applied,
    Clock,
    Delivered,
    Fetched,
    FromWorker,
    Held,
    Join,
    Joined,
    Leave,
    Left,
    Pull,
    PullRefused,
    Push,
    PushId,
    PushRefused,
    Repeated,
    Replicated,
    Ticked,
    WholeStep,
    WorkerRefused,
)
from paceline.core.settings import WorkerSettings
from paceline.core.table_reads import TableReads, reads_of
from paceline.errors import ProtocolBug

MAX_TOGETHER = 256  # pushes, or pulls, that wait for each other, to travel in one message

WorkerEvent = Arrived | Connected | Opened | Timeout | WantClock | WantJoin | WantLeave | WantPush | WantRead | WantRows
_MAY_END_WAIT = {Timeout, WantLeave, WantPush, WantRows}


@dataclass(slots=True)
class _Table:
    consistency: Consistency
    servers: tuple[int, ...]
    reads: TableReads
    # Pushes that some server has neither applied nor refused: sequence number -> number of pushes made before it.
    unsettled: dict[int, int] = field(default_factory=dict[int, int])
    num_made: int = 0


@dataclass(slots=True)
class _Pushed:
    push: Push
    unseen: set[int]  # servers that have not confirmed that they have it
    unsettled: set[int]  # servers that have neither applied nor refused it
    replicated: set[int] = field(default_factory=set[int])  # servers whose replicas have it


@dataclass(slots=True)
class WorkerCore:
    """The protocol state of one worker. Call `handle` for every event, and with `Timeout` after `next_deadline`."""

    settings: WorkerSettings
    clock: int = 0
    _joined: dict[int, int] = field(default_factory=dict[int, int])
    _has_joined: bool = False
    _tables: dict[str, _Table] = field(default_factory=dict[str, _Table])
    _pushed: dict[int, _Pushed] = field(default_factory=dict[int, _Pushed])
    next_seq: int = 0
    next_request: int = 1
    # Invariant: every push of the clocks below is on every server that holds a part of its table.
    _ticked: int = 0
    # By clock, the number of pushes that some server has not confirmed yet.
    _unseen: Counter[int] = field(default_factory=Counter[int])
    # Pushes of one clock and pulls, (server, pull), that wait for others to travel with; until when.
    _kept: list[Push] = field(default_factory=list[Push])
    _asked: list[tuple[int, Pull]] = field(default_factory=list[tuple[int, Pull]])
    _kept_until: float = 0.0  # a quarter of the pause before a repetition, from the first that is kept
    _read_follows: bool = False  # at once after the clock of the pushes that are kept
    # (table, clock, sequence number) of pushes that some server refused.
    _withdrawn: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])
    # By server, applied pushes that its replica may not have, in ascending order of their sequence numbers.
    _unreplicated: dict[int, dict[int, Push]] = field(default_factory=dict[int, dict[int, Push]])
    _leaving: bool = False
    _left: set[int] = field(default_factory=set[int])
    _retransmit: Retransmit = field(init=False)

    def __post_init__(self) -> None:
        """Start with no message under way."""
        self._retransmit = Retransmit(self.settings.retry_s)

    # -- driving -----------------------------------------------------------------------------------------------------

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerEffect]:
        """Process one event; return the effects to perform, in order."""
        effects: list[WorkerEffect] = []
        if (self._kept or self._asked) and type(event) in _MAY_END_WAIT and self._ends_wait(event):
            self._send_kept(now, effects)
        match event:
            case Arrived():
                self._on_arrived(event, now, effects)
            case WantPush():
                self._on_push(event, now, effects)
            case WantClock():
                self._on_clock(now, effects)
            case WantRead() | WantRows():
                self._on_read(event, now, effects)
            case Timeout():
                self._on_timeout(now, effects)
            case Opened():
                self._open(event)
            case WantJoin():
                self._send_to_all("join", Join(self.settings.sender), now, effects)
            case WantLeave():
                self._on_leave(now, effects)
            case Connected():
                self._on_connected(event.server, now, effects)
        return effects

    def next_deadline(self) -> float | None:
        """Return when `handle(Timeout(), now)` is due next, or None."""
        due = self._retransmit.next_due()
        return min(self._kept_until, due or self._kept_until) if self._kept or self._asked else due

    def may_push(self, table: str) -> bool:
        """Return whether servers accept one more push of this table: they keep at most WINDOW answers."""
        entry = self._tables[table]
        return entry.num_made - next(iter(entry.unsettled.values()), entry.num_made) < WINDOW

    def waits_for_own_clock(self, table: str) -> bool:
        """Return whether the oldest unsettled push of this table is held until this worker finishes its clock."""
        entry = self._tables[table]
        oldest = next(iter(entry.unsettled), None)
        held = entry.consistency.visible == "on_clock"
        return held and oldest is not None and self._pushed[oldest].push.clock == self.clock

    def reads(self, table: str) -> TableReads:
        """Return the reads of an open table."""
        return self._tables[table].reads

    def num_unsettled(self, table: str) -> int:
        """Count the pushes of this table that some server has neither applied nor refused."""
        return len(self._tables[table].unsettled)

    def _open(self, event: Opened) -> None:
        """Open a table; opening it again changes nothing."""
        if event.table not in self._tables:
            reads = reads_of(event, self.settings.sender, self._retransmit)
            self._tables[event.table] = _Table(event.consistency, event.servers, reads)

    # -- pushes and clocks -------------------------------------------------------------------------------------------

    def next_push(self, table: str) -> Push:
        """Return the next push of this table, as it will be sent.

        Every server has answered all pushes of the table that are older than its oldest unsettled one.
        """
        sender, unsettled = self.settings.sender, self._tables[table].unsettled
        push_id = PushId(sender.generation, sender.worker, sender.incarnation, self.next_seq)
        return Push(push_id, table, self.clock, next(iter(unsettled), self.next_seq))

    def _on_push(self, want: WantPush, now: float, effects: list[WorkerEffect]) -> None:
        table, push = self._tables[want.table], self.next_push(want.table)
        servers, seq = table.servers if want.servers is None else want.servers, self.next_seq
        self.next_seq += 1
        may_wait = self._may_wait(want)
        self._pushed[seq] = _Pushed(push, set(servers), set(servers))
        table.unsettled[seq] = table.num_made
        table.num_made += 1
        self._unseen[push.clock] += 1
        if may_wait:
            if not self._kept and not self._asked:
                self._kept_until = now + self.settings.retry_s / 4
            self._kept.append(push)
            self._read_follows = self._read_follows or want.ends_clock
            return
        for server in servers:
            self._send((server, "push", seq), push, now, effects)

    def _on_clock(self, now: float, effects: list[WorkerEffect]) -> None:
        if self._asked:
            self._send_kept(now, effects)
        self.clock += 1
        if self._kept and not self._read_follows:
            self._send_kept(now, effects)
        if not self._kept:  # else all that is not confirmed is kept, and the tick follows it
            self._tick(now, effects)

    # -- what travels together ---------------------------------------------------------------------------------------

    def _may_wait(self, want: WantPush) -> bool:
        """Return whether a push may wait for others, a tick and reads: every earlier push is confirmed or waits, too.

        Where there are several servers, the tick waits for their answers, so a push that a read follows leaves at once;
        and one that may show on arrival as well.
        """
        table = self._tables[want.table]
        if not (want.may_wait or want.ends_clock) or self._withdrawn:
            return False
        is_fit = self.settings.num_servers == 1 or (table.consistency.visible == "on_clock" and not want.ends_clock)
        of_clock = not self._kept or self._kept[0].clock == self.clock
        return is_fit and of_clock and self._unseen.total() == len(self._kept) < MAX_TOGETHER

    def _ends_wait(self, event: WorkerEvent) -> bool:
        """Return whether what is kept leaves before this event is processed."""
        match event:
            case WantPush():
                return bool(self._asked) or not self._may_wait(event)
            case WantRows() | WantLeave() | Timeout():
                return True
            case _:
                return False

    def _send_kept(self, now: float, effects: list[WorkerEffect]) -> None:
        """Send what is kept: one message to each server, with the tick if that needs no server's confirmation."""
        pushes, asked = self._kept, self._asked
        self._kept, self._asked, self._read_follows = [], [], False
        parts: dict[int, tuple[list[Push], list[Pull]]] = {}
        expect = self._retransmit.add
        for push in pushes:
            for server in sorted(self._pushed[push.id.seq].unseen):
                expect((server, "push", push.id.seq), push, now)
                parts.setdefault(server, ([], []))[0].append(push)
        for server, pull in asked:
            if self._retransmit.moves_back((server, "pull", pull.table), pull, now):  # repeated after the pushes
                parts.setdefault(server, ([], []))[1].append(pull)
        tick = Clock(self.settings.sender, self.clock) if pushes and self._may_tick_with(pushes) else None
        for server, (own, pulls) in parts.items():
            alone = None if tick is not None or len(own) + len(pulls) > 1 else (*own, *pulls)[0]
            effects.append(Send(server, alone or WholeStep(tuple(own), tick, tuple(pulls))))

    def _may_tick_with(self, pushes: list[Push]) -> bool:
        """Return whether the tick may travel with these pushes: one server has every other push of their clock."""
        is_over = pushes[0].clock < self.clock
        is_whole = self._unseen.total() == len(pushes) and not self._withdrawn
        return is_over and is_whole and self.settings.num_servers == 1

    def _tick(self, now: float, effects: list[WorkerEffect]) -> None:
        """Send the finished clocks to all servers, up to the first with a push that has not arrived everywhere."""
        if self.clock <= self._ticked:
            return
        ready = min((clock for clock in self._unseen if clock < self.clock), default=self.clock)
        if ready > self._ticked:
            self._ticked = ready
            withdrawn = tuple(sorted(self._withdrawn))
            self._send_to_all("clock", Clock(self.settings.sender, ready, withdrawn), now, effects)

    def _on_push_answer(
        self, server: int, answer: Held | Applied | PushRefused, now: float, effects: list[WorkerEffect]
    ) -> None:
        pushed = self._pushed.get(answer.id.seq)
        if pushed is None or server not in pushed.unsettled:
            return
        if isinstance(answer, Held):
            self._note_seen(pushed, server)
            self._retransmit.make_bare((server, "push", answer.id.seq))
        else:
            refused = answer.reason if isinstance(answer, PushRefused) else ""
            self._on_answered(server, answer.id.seq, refused, effects)
        self._tick(now, effects)
        if self._leaving:
            self._leave_when_settled(now, effects)

    def _on_answered(self, server: int, seq: int, refused: str, effects: list[WorkerEffect]) -> None:
        """Note the final answer of a server to a push, unless it has been noted before."""
        pushed = self._pushed[seq]
        push = pushed.push
        if server not in pushed.unsettled:
            return
        if server in pushed.unseen:
            self._note_seen(pushed, server)
        self._retransmit.answered((server, "push", seq))
        pushed.unsettled.discard(server)
        if refused:
            self._withdrawn.add((push.table, push.clock, seq))
        effects.append(Release(server, push.table, push.id, refused))
        if self.settings.keeps_pushes and not refused:
            if server in pushed.replicated:
                effects.append(Drop(server, push.table, push.id))
            else:
                self._unreplicated.setdefault(server, {})[seq] = push
        if not pushed.unsettled:
            del self._pushed[seq]
            del self._tables[push.table].unsettled[seq]

    def _note_seen(self, pushed: _Pushed, server: int) -> None:
        """Note that a server has its part of a push."""
        if server in pushed.unseen:
            pushed.unseen.discard(server)
            if not pushed.unseen:
                clock = pushed.push.clock
                self._unseen[clock] -= 1
                if not self._unseen[clock]:
                    del self._unseen[clock]

    def _on_replicated(self, server: int, message: Replicated, effects: list[WorkerEffect]) -> None:
        """Note that a server's replica has pushes: those that are applied need not be repeated any more."""
        kept = self._unreplicated.get(server, {})
        for seq in message.seqs:
            push = kept.pop(seq, None)
            if push is not None:
                effects.append(Drop(server, push.table, push.id))
            elif seq in self._pushed:
                self._pushed[seq].replicated.add(server)

    def oldest_push(self, table: str = "") -> int:
        """Return the oldest clock with a push under way, of this table if given; -1 if there is none."""
        of = (pushed.push for pushed in self._pushed.values())
        return min((push.clock for push in of if not table or push.table == table), default=-1)

    # -- reads -------------------------------------------------------------------------------------------------------

    def _on_read(self, want: WantRead | WantRows, now: float, effects: list[WorkerEffect]) -> None:
        table, request = self._tables[want.table], self.next_request
        self.next_request += 1
        if isinstance(want, WantRows):
            table.reads.start(want, request, self.clock, now, effects)
        else:
            started: list[WorkerEffect] = []
            table.reads.start(want, request, self.clock, now, started)
            if not self._kept and not self._asked:
                self._kept_until = now + self.settings.retry_s / 4
            for effect in started:
                if isinstance(effect, Send) and isinstance(effect.message, Pull):
                    self._asked.append((effect.server, effect.message))
            if not want.more or len(self._asked) >= MAX_TOGETHER:
                self._send_kept(now, effects)
            effects += [effect for effect in started if not isinstance(effect, Send)]
        if table.consistency.backups:
            self._follow(now, effects)

    def _on_values(self, server: int, message: Fetched | Delivered, now: float, effects: list[WorkerEffect]) -> None:
        table = self._tables[message.table]
        if isinstance(message, Fetched) and table.reads.join_steps:
            self._on_told(server, message, now, effects)
        table.reads.on_values(server, message, effects)
        if table.consistency.backups:
            self._follow(now, effects)

    def _on_told(self, server: int, message: Fetched, now: float, effects: list[WorkerEffect]) -> None:
        """Note what values say of a step: its tick is known, and pushes of their table are applied."""
        self._note_ticked(message.ticked)
        for seq in message.includes:
            if seq in self._pushed:
                self._on_answered(server, seq, "", effects)
        self._tick(now, effects)
        if self._leaving:
            self._leave_when_settled(now, effects)

    def _follow(self, now: float, effects: list[WorkerEffect]) -> None:
        """Jump to the clock of reads that have ended when a quorum completed clocks without this worker."""
        for oldest in [effect.clock for effect in effects if isinstance(effect, ReadDone)]:
            if oldest > self.clock:
                self.clock = oldest
                self._tick(now, effects)

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def _on_joined(self, server: int, message: Joined, now: float, effects: list[WorkerEffect]) -> None:
        self._retransmit.answered((server, "join", 0))
        self._joined[server] = message.clock
        if len(self._joined) < self.settings.num_servers or self._has_joined:
            return
        self._has_joined = True
        self.clock = max(self._joined.values())
        self._ticked = min(self._joined.values())
        effects.append(JoinDone(self.clock))
        self._tick(now, effects)

    def _on_leave(self, now: float, effects: list[WorkerEffect]) -> None:
        self._leaving = True
        if any(pushed.push.clock == self.clock for pushed in self._pushed.values()):
            self.clock += 1
            self._tick(now, effects)
        self._leave_when_settled(now, effects)

    def _leave_when_settled(self, now: float, effects: list[WorkerEffect]) -> None:
        if self._leaving and not self._pushed:
            self._leaving = False
            self._send_to_all("leave", Leave(self.settings.sender), now, effects)

    def _on_left(self, server: int, effects: list[WorkerEffect]) -> None:
        self._retransmit.answered((server, "clock", 0))
        if self._retransmit.answered((server, "leave", 0)):
            self._left.add(server)
            if len(self._left) == self.settings.num_servers:
                effects.append(LeaveDone())

    # -- answers, retries, connections -------------------------------------------------------------------------------

    def _on_arrived(self, event: Arrived, now: float, effects: list[WorkerEffect]) -> None:
        server, message = event.server, event.message
        match message:
            case Held() | Applied() | PushRefused():
                self._on_push_answer(server, message, now, effects)
            case Fetched() | Delivered():
                self._on_values(server, message, now, effects)
            case Ticked():
                self._on_ticked(server, message)
                self._note_ticked(message.clock)
                self._tick(now, effects)
            case Replicated():
                self._on_replicated(server, message, effects)
            case Joined():
                self._on_joined(server, message, now, effects)
            case Left():
                self._on_left(server, effects)
            case PullRefused():
                effects.append(Fail(f"server {server} refused a pull: {message.reason}"))
            case WorkerRefused() if self._has_left(server):
                self._on_left(server, effects)  # this life is over there; only the answer to its leave was lost
            case WorkerRefused():
                effects.append(Fail(f"server {server} refused worker {message.sender.worker}: {message.reason}"))
            case _:
                raise ProtocolBug(f"a worker cannot process {message} from server {server}")

    def _has_left(self, server: int) -> bool:
        """Return whether this worker has sent its leave to a server, answered or not."""
        return server in self._left or self._retransmit.message((server, "leave", 0)) is not None

    def _note_ticked(self, clock: int) -> None:
        """Note that a server knows a tick; if it is the only one, it has every push that the tick closes."""
        if self.settings.num_servers > 1 or clock <= self._ticked:
            return
        self._ticked = clock
        for pushed in self._pushed.values():
            if pushed.push.clock < clock:
                self._note_seen(pushed, 0)

    def _on_ticked(self, server: int, message: Ticked) -> None:
        asked = self._retransmit.message((server, "clock", 0))
        if isinstance(asked, Clock) and message.clock >= asked.clock:
            self._retransmit.answered((server, "clock", 0))
        if all(self._retransmit.message((s, "clock", 0)) is None for s in range(self.settings.num_servers)):
            self._withdrawn = {entry for entry in self._withdrawn if entry[1] >= self._ticked}

    def _on_connected(self, server: int, now: float, effects: list[WorkerEffect]) -> None:
        if server in self._joined:  # even before all others have answered: its lease runs
            self._retransmit.add((server, "join", 0), Join(self.settings.sender), now)
        for table in self._tables.values():
            table.reads.on_connected(server)
        # With their tensors: another process may go on in the server's place, which has none of them.
        unanswered = self._retransmit.for_server(server)
        if self.settings.keeps_pushes:
            effects += [Send(server, message) for message in self._with_kept(server, unanswered)]
        else:
            effects += [Send(server, entry.message) for entry in unanswered]

    def _with_kept(self, server: int, entries: list[Unanswered]) -> list[FromWorker]:
        """Return what a process needs to know that serves in a server's place, and has not seen the latest of it.

        First all pushes as they were made, then the tick that vouches for those of finished clocks, and then the rest.
        """
        unanswered = [entry.message for entry in entries]
        pushes = dict(self._unreplicated.get(server, {}))
        pushes.update({message.id.seq: message for message in unanswered if isinstance(message, Push)})
        joins = [message for message in unanswered if isinstance(message, Join)]
        rest = [message for message in unanswered if not isinstance(message, Push | Join)]
        in_order = [push for _, push in sorted(pushes.items())]
        sender, withdrawn = self.settings.sender, tuple(sorted(self._withdrawn))
        ticks = [Clock(sender, self._ticked, withdrawn)] if self._has_joined else []
        return [*joins, *in_order, *ticks, *rest, Repeated(sender, self._reached(server))]

    def _reached(self, server: int) -> int:
        """Return the clock below which values from a server, as this worker has read them, have every update."""
        return max((table.reads.reached(server) for table in self._tables.values()), default=-1)

    def _on_timeout(self, now: float, effects: list[WorkerEffect]) -> None:
        for server, entry in self._retransmit.repeat_due(now):
            if entry.attempts > self.settings.max_attempts and not entry.waits_for_others:
                what = type(entry.message).__name__.lower()
                effects.append(Fail(f"server {server} has not answered a {what} in {entry.attempts - 1} attempts"))
                return
            effects.append(Send(server, entry.message, entry.bare))

    def _send(self, key: Key, message: FromWorker, now: float, effects: list[WorkerEffect]) -> None:
        self._retransmit.add(key, message, now)
        effects.append(Send(key[0], message))

    def _send_to_all(self, kind: str, message: FromWorker, now: float, effects: list[WorkerEffect]) -> None:
        for server in range(self.settings.num_servers):
            self._send((server, kind, 0), message, now, effects)

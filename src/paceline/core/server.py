"""The server's side of the protocol as a pure state machine: events in, effects out, time as an argument.

Rules that hold for any order of events:
1. A read is answered once the table's clock is at least what the reader needs, and not before.
2. A push is applied once, and acknowledged after it is applied. Every copy gets the same answer. When an update fails,
   its pushes are refused: the driver reports `Unapplied` instead of sending the acknowledgement. So are pushes that it
   finds to be not finite (`NotFinite`), which the update leaves out.
3. Messages from an ended life or another generation change nothing.
4. A wait for workers that are all gone ends.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.core.adaptive import AdaptiveBound
from paceline.core.effects import (
    Advanced,
    Apply,
    BoundMoved,
    Discard,
    Hold,
    Measure,
    MembershipChanged,
    Reply,
    Serve,
    ServerEffect,
    Tell,
)
from paceline.core.events import (
    Changed,
    ClippedPush,
    Declared,
    Died,
    Disconnected,
    InvalidPush,
    Measured,
    NotFinite,
    Resumed,
    ServerHappening,
    Timeout,
    Unapplied,
    Woke,
)
from paceline.core.exactly_once import WINDOW
from paceline.core.membership import Clocks, Incarnation, WorkerLives
from paceline.core.messages import (
    Applied,
    Clock,
    Closed,
    Follow,
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
    Sender,
    Taken,
    Ticked,
    WholeStep,
    WorkerRefused,
)
from paceline.core.settings import ServerSettings
from paceline.core.tables import (
    MAX_AT_ONCE,
    MAX_WITHDRAWN,
    ClockCommit,
    CommitDecision,
    TableCore,
    closed_before,
    completed_without,
)
from paceline.errors import ProtocolBug

ServerEvent = ServerHappening | Join | Leave | Push | Clock | Pull | WholeStep | Taken | Follow | Closed

LEAD = 0  # the server that decides which workers contribute to a clock
MAX_EARLY = 1 << 12  # `Follow` messages kept for tables that are not declared yet


@dataclass(slots=True)
class ServerCore:
    """The protocol state of one server. Call `handle` for every event, and with `Timeout` after `next_deadline`."""

    settings: ServerSettings
    started: float
    # Public for reading; only events change them.
    lives: WorkerLives = field(init=False)
    tables: dict[str, TableCore] = field(default_factory=dict[str, TableCore])
    _clocks: Clocks = field(init=False)
    _follows: bool = field(init=False)  # another server decides which workers contribute to a clock
    _has_more: bool = False  # some complete clocks are still open: one event closes at most MAX_AT_ONCE
    # Tables for which the end of a clock may change something; the others are brought to it when they are used again.
    _awake: dict[str, TableCore] = field(default_factory=dict[str, TableCore])
    _adaptive: dict[str, AdaptiveBound] = field(default_factory=dict[str, AdaptiveBound])  # by table, where it moves
    # From followers, about tables that are not declared here yet.
    _early: list[Follow] = field(default_factory=list[Follow])

    def __post_init__(self) -> None:
        """Count the expected workers from the start, so that an early one does not run ahead of the others."""
        self._follows = self.settings.server != LEAD
        self.lives = WorkerLives(self.settings.generation)
        self._clocks = Clocks(slowest=self.settings.clock)
        for worker in self.settings.workers:
            self.lives.expect(worker, self.started + self.settings.join_timeout_s)
            self._clocks.add(worker)

    # -- driving -----------------------------------------------------------------------------------------------------

    def handle(self, event: ServerEvent, now: float) -> list[ServerEffect]:
        """Process one event; return the effects to perform, in order."""
        effects: list[ServerEffect] = []
        if self._adaptive:
            self._pass_time(event, now)
        match event:
            case Push():
                self._on_push(event, "", effects)
            case Clock():
                self._on_clock(event, effects)
            case Pull():
                self._on_pull(event, effects)
            case WholeStep():
                self._on_step(event, effects)
            case Taken():
                self._on_taken(event, effects)
            case InvalidPush():
                self._on_push(event.push, event.reason, effects)
            case ClippedPush():
                self._on_clipped(event.push, effects)
            case Measured():
                self._on_measured(event, effects)
            case Unapplied():
                for push_id in event.ids:
                    self._answer(push_id, event.table, PushRefused(push_id, event.reason), effects)
            case NotFinite():
                self._answer(event.id, event.table, PushRefused(event.id, event.reason), effects)
            case Join():
                self._on_join(event, effects)
            case Leave():
                self._on_leave(event, effects)
            case Closed():
                self._on_closed(event, now, effects)
            case Follow():
                self._on_follow(event, effects)
            case Declared():
                self._on_declared(event, now, effects)
            case Changed():
                self.tables[event.table].version += 1
            case Disconnected():
                self._on_disconnected(event, now)
            case Died():
                self._on_died(event, effects)
            case Timeout():
                self._on_timeout(now, effects)
            case Woke():
                for _, life in self.lives.overdue(now):
                    life.lease_until = now + self.settings.lease_s
            case Resumed():
                self._on_resumed(now, effects)
        return effects

    def next_deadline(self) -> float | None:
        """Return when `handle(Timeout(), now)` is due next, or None."""
        if self._has_more:
            return 0.0
        deadline = self.lives.next_deadline()
        if self._follows:
            asks = [table.ask_lead_at for table in self.tables.values() if table.closes_clocks]
            return min([*asks, *filter(None, [deadline])], default=None)
        return deadline

    def clock_of(self, table: str) -> int:
        """Return m: every update of the clocks below m is in this table here."""
        entry = self.tables[table]
        return entry.commit.clock if entry.closes_clocks and table in self._awake else self._clocks.slowest

    @property
    def members(self) -> list[int]:
        """Return the ranks that take part or are expected, in ascending order."""
        return self._clocks.past(-1)

    def held_pushes(self) -> list[tuple[str, PushId]]:
        """Return the table and the identity of every push that waits for its clock."""
        return [(name, push_id) for name, table in self.tables.items() for push_id in table.commit.held()]

    def waiting_pulls(self) -> list[Pull]:
        """Return the pulls that wait for other workers, table by table."""
        return [pull for table in self.tables.values() for pull in table.readers.waiting_pulls()]

    def behind(self, clock: int) -> list[int]:
        """Return the members that have not finished every clock below this one, in ascending order."""
        finished = set(self._clocks.past(clock - 1))
        return [worker for worker in self.members if worker not in finished]

    def finished(self, worker: int) -> int:
        """Return the clock below which a member has finished every clock."""
        return self._clocks.of(worker)

    def whereabouts(self, worker: int) -> str:
        """Return a description of a member that waits for nothing."""
        life = self.lives.current(worker)
        if life is None or life.joined_at is None:
            return "has not joined yet"
        if life.lease_until is not None:
            return "has lost its connection"
        return f"is at clock {self._clocks.of(worker)}, in no call that waits: computing, or stopped"

    # -- pushes ------------------------------------------------------------------------------------------------------

    def _on_push(self, push: Push, invalid: str, effects: list[ServerEffect], life: Incarnation | None = None) -> bool:
        """Process a push of this life, if it is known already; return whether it is a copy."""
        if life is None:
            life = self._life_of(push.id.sender, effects)
        if life is None:
            return True
        if push.table in self.tables:
            life.dedup.settle(push.table, push.settled)
        if life.dedup.is_late(push):
            return True
        known = life.dedup.answer(push)
        if known is not None:
            effects.append(self._to(push.id, known))
            return True
        if life.dedup.overflows(push.table if push.table in self.tables else ""):
            reason = f"worker {push.id.worker} has more than {WINDOW} unsettled pushes of table '{push.table[:200]}'"
            effects.append(self._to(push.id, WorkerRefused(push.id.sender, reason)))
        else:
            self._decide_push(push, invalid, effects)
        return False

    def _on_clipped(self, push: Push, effects: list[ServerEffect]) -> None:
        is_copy, table = self._on_push(push, "", effects), self.tables.get(push.table)
        if not is_copy and not self._follows and table is not None and table.closes_clocks:
            table.commit.note_clip(push.clock)

    def _decide_push(self, push: Push, invalid: str, effects: list[ServerEffect]) -> None:
        """Answer a push that is seen for the first time."""
        table = self.tables.get(push.table)
        if table is not None and push.table not in self._awake:
            self._wake(push.table, table, effects)
        if invalid or table is None:
            self._answer(push.id, push.table, PushRefused(push.id, invalid or self._unknown(push.table)), effects)
        elif not table.closes_clocks:
            effects.append(Apply(push.table, (push.id,)))
            table.version += 1
            self._answer(push.id, push.table, Applied(push.id), effects)
        elif push.clock < table.commit.clock:
            reason = closed_before(push.table, push.clock, table.commit.clock)
            self._answer(push.id, push.table, PushRefused(push.id, reason), effects)
        else:
            table.commit.hold(push.id, push.clock)
            effects.append(Hold(push.table, push.id))
            self._answer(push.id, push.table, Held(push.id), effects)

    def _answer(
        self,
        push_id: PushId,
        table: str,
        answer: Held | Applied | PushRefused,
        effects: list[ServerEffect],
        *,
        by_values: bool = False,
    ) -> None:
        """Answer a push; `by_values`: values that are sent say so already."""
        life = self.lives.current(push_id.worker)
        if life and life.incarnation == push_id.incarnation:
            # All unknown tables share one window, which bounds the number of answers.
            life.dedup.record(table if table in self.tables else "", answer)
        if not by_values:
            effects.append(Reply(push_id.worker, push_id.incarnation, answer))

    # -- clocks ------------------------------------------------------------------------------------------------------

    def _on_clock(
        self,
        event: Clock,
        effects: list[ServerEffect],
        life: Incarnation | None = None,
        read_next: Collection[str] = (),
    ) -> None:
        """Note that a worker has finished clocks; `read_next` are tables that it reads in the same message."""
        sender = event.sender
        if life is None:
            life = self._life_of(sender, effects)
        if life is None:
            return
        for name, clock, seq in () if self._follows else event.withdrawn:
            table = self.tables.get(name)
            if table is None or not table.closes_clocks:
                continue
            self._wake(name, table, effects)
            if not table.commit.withdraw(sender.worker, sender.incarnation, clock, seq):
                reason = f"more than {MAX_WITHDRAWN} of its pushes of table '{name}' are withdrawn from open clocks"
                effects.append(Reply(sender.worker, sender.incarnation, WorkerRefused(sender, reason)))
                self._give_up(sender.worker, life, "died", reason, effects)
                return
        before = self._clocks.slowest
        finished = self._clocks.advance(sender.worker, event.clock)
        effects.append(Reply(sender.worker, sender.incarnation, Ticked(finished)))
        self._progress(before, effects, read_next)

    def _progress(self, before: int, effects: list[ServerEffect], read_next: Collection[str] = ()) -> None:
        """React to a change of the clocks: close complete ones, then answer and deliver."""
        self._has_more = False
        has_advanced = self._clocks.slowest > before
        for name, table in list(self._awake.items()):
            if table.closes_clocks:
                self._close_complete(name, table, effects)
            elif has_advanced:
                self._release(name, table, effects)
            if has_advanced and name not in read_next and self._may_rest(name, table):
                del self._awake[name]

    def _may_rest(self, name: str, table: TableCore) -> bool:
        """Return whether the end of clocks may pass a table by: it is up to date, and others do not follow it."""
        is_closed_here = not table.closes_clocks or (self.settings.num_servers == 1 and not table.consistency.backups)
        return is_closed_here and table.is_idle and self.clock_of(name) == self._clocks.slowest

    def _wake(self, name: str, table: TableCore, effects: list[ServerEffect]) -> None:
        """Bring a table to the clocks that have passed it by, and have it take part in their end from now on."""
        if name in self._awake:
            return
        self._awake[name] = table
        if table.closes_clocks:
            table.commit.clock = self._clocks.slowest
        if self.clock_of(name) > table.reached:
            self._advance(name, table, effects)

    def _advance(self, name: str, table: TableCore, effects: list[ServerEffect]) -> int:
        clock = table.reached = self.clock_of(name)
        effects.append(Advanced(name, clock))
        if table.adaptive is not None:
            bound, before = table.adaptive, table.adaptive.reach(clock)
            if before is not None:
                effects.append(BoundMoved(name, before, bound.bound, bound.seen.waiting, bound.seen.staleness))
        return clock

    def _close_complete(self, name: str, table: TableCore, effects: list[ServerEffect]) -> None:
        """On the lead: close at most MAX_AT_ONCE complete clocks, and send the decisions to the followers."""
        last = table.commit.clock + MAX_AT_ONCE
        while not self._follows and table.is_complete(self._clocks):
            clock = table.commit.clock
            if clock == last:
                self._has_more = True
                return
            finished = self._clocks.past(clock)
            decision = table.commit.decide(self.lives.incarnations(finished))
            if decision.clips:
                self._measure(name, table, decision, effects)
            else:
                self._close(name, table, decision, effects)
            if table.commit.num_followers:
                self._tell_followers(name, table, clock, decision, effects)

    def _tell_followers(
        self, name: str, table: TableCore, clock: int, decision: CommitDecision, effects: list[ServerEffect]
    ) -> None:
        for server in table.commit.followers_of(clock):
            effects.append(Tell(server, self._closed(name, clock, decision)))

    def _closed(self, table: str, clock: int, decision: CommitDecision) -> Closed:
        return Closed(
            self.settings.generation,
            table,
            clock,
            decision.contributors,
            decision.withdrawn,
            decision.clips,
            decision.norm,
        )

    @staticmethod
    def _measure(name: str, table: TableCore, decision: CommitDecision, effects: list[ServerEffect]) -> None:
        """Have the update of the current clock measured, which is decided but waits for its norm."""
        effects.append(Measure(name, tuple(table.commit.await_norm(decision)), table.commit.clock))

    def _on_measured(self, event: Measured, effects: list[ServerEffect]) -> None:
        table = self.tables[event.table]
        table.commit.note_norm(self.settings.server, event.clock, event.norm)
        if self._follows:
            effects.append(Tell(LEAD, self._question(event.table, table)))
        else:
            self._close_measured(event.table, table, effects)

    def _close_measured(self, name: str, table: TableCore, effects: list[ServerEffect]) -> None:
        """On the lead: close the pending clock once its norm is known, and those after it."""
        clock, decision = table.commit.clock, table.commit.with_norm()
        if decision is not None:
            self._close(name, table, decision, effects)
            self._tell_followers(name, table, clock, decision, effects)
            self._close_complete(name, table, effects)

    def _close(self, name: str, table: TableCore, decision: CommitDecision, effects: list[ServerEffect]) -> None:
        clock = table.commit.clock
        applied, withdrawn, late = table.commit.close(decision)
        if applied:
            effects.append(Apply(name, tuple(applied), decision.norm))
            table.version += 1
        # Those whose pulls this answers; values name the own pushes that they include.
        readers = set() if table.keyed else table.readers.satisfied_readers(table.commit.clock)
        for push_id in applied:
            by_values = bool(readers) and (push_id.worker, push_id.incarnation) in readers
            self._answer(push_id, name, Applied(push_id), effects, by_values=by_values)
        for push_id in withdrawn:
            reason = f"another server refused its part of this push of table '{name}', clock {clock}"
            self._refuse_held(push_id, name, reason, effects)
        for push_id in late:
            self._refuse_held(push_id, name, completed_without(push_id.worker, name, clock), effects)
        self._release(name, table, effects)

    def _refuse_held(self, push_id: PushId, table: str, reason: str, effects: list[ServerEffect]) -> None:
        effects.append(Discard(table, push_id))
        self._answer(push_id, table, PushRefused(push_id, reason), effects)

    def _on_closed(self, event: Closed, now: float, effects: list[ServerEffect]) -> None:
        table = self.tables.get(event.table)
        if event.generation != self.settings.generation or table is None or event.clock > table.commit.clock:
            return
        if event.clock == table.commit.clock:
            decision = CommitDecision(event.contributors, event.withdrawn, event.clips, event.norm)
            if not decision.lacks_norm:
                self._close(event.table, table, decision, effects)
            elif table.commit.pending is None:
                self._measure(event.table, table, decision, effects)
                return  # the lead is told once it is measured
        self._ask_lead(event.table, table, now, effects)  # also after an old decision: the lead has missed a question

    def _on_follow(self, event: Follow, effects: list[ServerEffect]) -> None:
        if event.generation != self.settings.generation:
            return
        table = self.tables.get(event.table)
        if table is None:  # a worker has declared it on the follower first
            if len(self._early) < MAX_EARLY:  # else the follower asks again
                self._early.append(event)
        elif table.closes_clocks:
            decision = table.commit.follow(event.server, event.clock)
            if decision is not None and not (decision.lacks_norm and event.norm is not None):
                effects.append(Tell(event.server, self._closed(event.table, event.clock, decision)))
            if event.norm is not None:
                table.commit.note_norm(event.server, event.clock, event.norm)
                self._close_measured(event.table, table, effects)
            self._close_complete(event.table, table, effects)

    def _ask_lead(self, name: str, table: TableCore, now: float, effects: list[ServerEffect]) -> None:
        table.ask_lead_at = now + self.settings.retry_s
        effects.append(Tell(LEAD, self._question(name, table)))

    def _question(self, name: str, table: TableCore) -> Follow:
        server, commit = self.settings.server, table.commit
        return Follow(self.settings.generation, server, name, commit.clock, commit.norm_of(server))

    # -- reads -------------------------------------------------------------------------------------------------------

    def _on_step(self, step: WholeStep, effects: list[ServerEffect]) -> None:
        """Process pushes, their tick and pulls in turn. Unless a push is a copy, leave out what other answers say."""
        sender = step.tick.sender if step.tick is not None else step.sender
        life = self._life_of(sender, effects)
        if life is None:
            return
        read = [pull.table for pull in step.pulls]
        copies = [push for push in step.pushes if self._on_push(push, "", effects, life)]
        if step.tick is not None:
            self._on_clock(step.tick, effects, life, read)
        for pull in step.pulls:
            self._on_pull(pull, effects, life)
        if not copies:
            _leave_out_implied(step, sender.worker, read, effects)

    def _on_pull(self, pull: Pull, effects: list[ServerEffect], life: Incarnation | None = None) -> None:
        if life is None:
            life = self._life_of(pull.sender, effects)
        if life is None:
            return
        table = self.tables.get(pull.table)
        if table is None:
            refusal = PullRefused(pull.request, pull.table, self._unknown(pull.table))
            effects.append(Reply(pull.sender.worker, pull.sender.incarnation, refusal))
        else:
            if pull.table not in self._awake:
                self._wake(pull.table, table, effects)
            clock = self.clock_of(pull.table)
            if table.adaptive is not None:
                pull = table.readers.waiting_copy(pull) or table.adaptive.admit(pull)
            if table.readers.add_pull(pull, clock):
                self._fetch(pull, table, clock, life, effects)

    def _on_taken(self, event: Taken, effects: list[ServerEffect]) -> None:
        table = self.tables.get(event.table)
        if table is not None and self._life_of(event.sender, effects) is not None:
            table.readers.note_taken(event.sender.worker, event.clock)
            clock = self.clock_of(event.table)
            if table.readers.start_delivery(event.sender.worker, clock):
                self._deliver(table, event.sender.worker, clock, effects)

    def _release(self, name: str, table: TableCore, effects: list[ServerEffect]) -> None:
        clock = self._advance(name, table, effects)
        for pull in table.readers.satisfied_pulls(clock):
            table.readers.note_answered(pull, clock)
            self._fetch(pull, table, clock, self._living(pull.sender.worker), effects)
        for worker in table.readers.start_deliveries(clock):
            self._deliver(table, worker, clock, effects)

    def _deliver(self, table: TableCore, worker: int, clock: int, effects: list[ServerEffect]) -> None:
        life = self._living(worker)
        effects.append(Serve(worker, life.incarnation, table.delivered(worker, clock, life.dedup)))

    def _fetch(self, pull: Pull, table: TableCore, clock: int, life: Incarnation, effects: list[ServerEffect]) -> None:
        fetched = table.fetched(pull, clock, self._clocks.of(pull.sender.worker), life.dedup)
        effects.append(Serve(pull.sender.worker, pull.sender.incarnation, fetched))

    def _pass_time(self, event: ServerEvent, now: float) -> None:
        """Count the time until this event for the bounds that move."""
        for name, bound in self._adaptive.items():
            if isinstance(event, Woke | Resumed):
                bound.start_over(now)
            else:
                bound.pass_time(now, self.tables[name].readers.num_waiting, len(self._clocks))

    # -- tables ------------------------------------------------------------------------------------------------------

    def _on_declared(self, event: Declared, now: float, effects: list[ServerEffect]) -> None:
        known = self.tables.get(event.table)
        if known is not None:
            if known.consistency != event.consistency:
                raise ProtocolBug(
                    f"table '{event.table}' is declared with {event.consistency}, but exists with {known.consistency}"
                )
            return
        followers = 0 if self._follows else self.settings.num_servers - 1
        table = TableCore(
            event.table, event.consistency, ClockCommit(followers, clock=self._clocks.slowest), event.keyed
        )
        self.tables[event.table] = self._awake[event.table] = table
        if table.adaptive is not None:
            self._adaptive[event.table] = table.adaptive
        if self._follows and table.closes_clocks:
            self._ask_lead(event.table, table, now, effects)
        early = [follow for follow in self._early if follow.table == event.table]
        self._early = [follow for follow in self._early if follow.table != event.table]
        for follow in early:
            self._on_follow(follow, effects)

    # -- members -----------------------------------------------------------------------------------------------------

    def _on_join(self, event: Join, effects: list[ServerEffect]) -> None:
        sender = event.sender
        life = self.lives.current(sender.worker)
        if life and life.incarnation == sender.incarnation and life.joined_at is not None:
            life.lease_until = None
            for table in self.tables.values():
                table.readers.reconnected(sender.worker)
            effects.append(Reply(sender.worker, sender.incarnation, Joined(life.joined_at)))
            return
        stale = sender.generation != self.settings.generation or self.lives.has_ended(sender)
        if stale or (life and life.incarnation > sender.incarnation):
            refusal = WorkerRefused(sender, self.lives.objection(sender))
            effects.append(Reply(sender.worker, sender.incarnation, refusal))
            return
        if life and life.joined_at is not None:
            self._give_up(sender.worker, life, "died", "a new incarnation joins in its place", effects)
        self._admit(sender, effects)

    def _admit(self, sender: Sender, effects: list[ServerEffect]) -> None:
        """Start a life at the slowest clock, or where a quorum is ahead of it; an expected worker keeps its clock."""
        before = self._clocks.slowest
        clock = (
            self._clocks.of(sender.worker)
            if sender.worker in self._clocks
            else max([self._clocks.add(sender.worker), *(t.commit.clock for t in self.tables.values())])
        )
        self._clocks.advance(sender.worker, clock)
        self.lives.start_life(sender, clock)
        effects.append(MembershipChanged(sender.worker, sender.incarnation, "joined"))
        effects.append(Reply(sender.worker, sender.incarnation, Joined(clock)))
        if self._clocks.slowest > before:  # it is the only worker: its clock completes those of all other tables
            self._progress(before, effects)

    def _on_leave(self, event: Leave, effects: list[ServerEffect]) -> None:
        sender = event.sender
        life = self.lives.current(sender.worker)
        if life and life.incarnation == sender.incarnation and not self.lives.objection(sender):
            self._give_up(sender.worker, life, "left", "", effects)
        effects.append(Reply(sender.worker, sender.incarnation, Left()))

    def _on_disconnected(self, event: Disconnected, now: float) -> None:
        life = self.lives.current(event.worker)
        if life and life.incarnation == event.incarnation and life.joined_at is not None:
            life.lease_until = now + self.settings.lease_s

    def _on_resumed(self, now: float, effects: list[ServerEffect]) -> None:
        """Start the leases of all workers, and say again what other servers may wait for."""
        for worker in self.members:  # also of those that have not joined: on another machine time counts otherwise
            life = self._living(worker)
            life.lease_until = now + (self.settings.join_timeout_s if life.joined_at is None else self.settings.lease_s)
        for name, table in self.tables.items():
            if table.closes_clocks and self._follows:
                self._ask_lead(name, table, now, effects)
            for server, clock, decision in table.commit.decisions():
                effects.append(Tell(server, self._closed(name, clock, decision)))

    def _on_died(self, event: Died, effects: list[ServerEffect]) -> None:
        life = self.lives.current(event.worker)
        if life and life.incarnation == event.incarnation:
            self._give_up(event.worker, life, "died", event.reason, effects)
        else:
            self.lives.mark_dead(event.worker, event.incarnation)

    def _on_timeout(self, now: float, effects: list[ServerEffect]) -> None:
        for worker, life in self.lives.overdue(now):
            waited = self.settings.lease_s if life.joined_at is not None else self.settings.join_timeout_s
            did = "did not come back" if life.joined_at is not None else "did not join"
            self._give_up(worker, life, "died", f"it {did} within {waited:g} s", effects)
        for name, table in self.tables.items():
            if self._follows and table.closes_clocks and table.ask_lead_at <= now:
                self._ask_lead(name, table, now, effects)
        if self._has_more:
            self._progress(self._clocks.slowest, effects)

    def _give_up(self, worker: int, life: Incarnation, change: str, reason: str, effects: list[ServerEffect]) -> None:
        """End a life: forget its reads, drop its pushes for open clocks, and release the workers that wait for it.

        Only the lead drops pushes: a follower may not have applied a clock yet that the lead closed with this worker.
        """
        for name, table in self.tables.items():
            table.readers.forget(worker)
            if not self._follows:
                effects += [Discard(name, push_id) for push_id in table.commit.drop(worker, life.incarnation)]
        self.lives.end_life(worker, left=change == "left")
        before = self._clocks.slowest
        self._clocks.remove(worker)
        effects.append(MembershipChanged(worker, life.incarnation, change, reason))
        self._progress(before, effects)

    # -- lookups -----------------------------------------------------------------------------------------------------

    def _life_of(self, sender: Sender, effects: list[ServerEffect]) -> Incarnation | None:
        """Return the sender's life; when it may not act, refuse it and return None."""
        found = self.lives.acting(sender)
        if not isinstance(found, str):
            return found
        if not self.lives.has_left(sender):
            effects.append(Reply(sender.worker, sender.incarnation, WorkerRefused(sender, found)))
        return None

    def _living(self, worker: int) -> Incarnation:
        life = self.lives.current(worker)
        if life is None:
            raise ProtocolBug(f"worker {worker} is served values but takes no part; lives: {self.lives}")
        return life

    def _unknown(self, table: str) -> str:
        names = ", ".join(sorted(self.tables)[:20]) or "none"
        return f"there is no table '{table[:200]}' on server {self.settings.server}; tables: {names}"

    @staticmethod
    def _to(push_id: PushId, message: Held | Applied | PushRefused | WorkerRefused) -> Reply:
        return Reply(push_id.worker, push_id.incarnation, message)


def _leave_out_implied(step: WholeStep, worker: int, read: Collection[str], effects: list[ServerEffect]) -> None:
    """Remove the answers to a step that others imply: a known tick that what it closes is held, values the rest."""
    is_told = step.tick is not None and bool(read)
    in_values = {push.id.seq for push in step.pushes if push.table in read}
    left: list[ServerEffect] = []
    for effect in effects:
        if isinstance(effect, Reply) and effect.worker == worker:
            said = effect.message
            if isinstance(said, Held) and step.tick is not None:
                continue
            if isinstance(said, Ticked) and is_told:
                continue
            if isinstance(said, Applied) and said.id.seq in in_values:
                continue
        left.append(effect)
    effects[:] = left

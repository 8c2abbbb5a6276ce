"""A world that notes which rare things happened in it, so that a campaign can show that they did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paceline.core.effects import (
    Advanced,
    Apply,
    Discard,
    Forget,
    MembershipChanged,
    ReadDone,
    Reply,
    Send,
    Serve,
    Tell,
)
from paceline.core.events import Arrived, Died, Timeout, WantPush, WantRows
from paceline.core.messages import (
    Clock,
    Delivered,
    Fetched,
    Follow,
    Pull,
    Push,
    PushId,
    PushRefused,
    WorkerRefused,
)
from paceline.simulate.actor import Subscribed
from paceline.simulate.world import TABLE, World

MUST_HAPPEN = (
    "a copy of a push answered from the ledger",
    "a late copy of a settled push ignored",
    "a push refused because its clock is closed",
    "a held push refused at the close of its clock",
    "held pushes of a dead worker discarded",
    "a repeated push sent without its tensor",
    "a zombie refused",
    "a lease ended",
    "a restart joined as a new incarnation",
    "a new incarnation replaced a life that seemed alive",
    "a worker joined in the middle of the run",
    "a waiter released by a death",
    "the slowest clock jumped by more than one",
    "a waiter skipped by a jump released",
    "an overtaken pull ignored or a repeated one kept waiting",
    "a delivery crossed a push of its receiver",
    "a read served from a delivery",
    "a read served from the cache",
    "a read fetched",
    "a follower asked the lead again",
    "a late worker jumped to the clock it read",
    "a connection cut",
    "a part refused by one server withdrawn from the others",
    "a sound push applied beside one of its worker and clock that is withdrawn",
    "several pushes of a worker summed in one clock",
    "a push of a table that was declared late",
    "a question about a table that the lead had yet to hear of",
    "a server did nothing for longer than a lease",
    "a process stopped for longer than its lease, and its connections stayed",
    "a push of rows",
    "a push of rows that several servers share",
    "a push of rows refused by one server withdrawn from the others",
    "a read of rows fetched",
    "a read of rows served from a delivery",
    "a read of rows served from the cache",
    "rows delivered because they had changed",
    "rows forgotten because a delivery was lost",
    "an overtaken answer of rows asked for again",
    "a read of rows begun anew",
    "two reads of rows under way at once",
    "a change of rows that their reader had given up",
    "rows read by a restarted worker",
)


@dataclass(slots=True)
class WatchedWorld(World):
    """Counts marks while it runs; the core knows nothing of them."""

    marks: Counter[str] = field(default_factory=Counter[str])
    _copies: dict[tuple[str, PushId], int] = field(default_factory=dict[tuple[str, PushId], int])
    _advanced: dict[str, int] = field(default_factory=dict[str, int])
    _own: dict[str, int] = field(default_factory=dict[str, int])  # worker -> sequence number of its newest push
    _begun: Counter[tuple[str, str, int]] = field(default_factory=Counter[tuple[str, str, int]])  # reads of a clock

    def record(self, name: str, event: Any, effects: Any) -> None:
        """Look at one step of a core."""
        super(WatchedWorld, self).record(name, event, effects)
        if name.startswith("server"):
            self._watch_server(name, event, effects)
        else:
            self._watch_worker(name, event, effects)

    def cut(self, actor: Any, server: int) -> None:
        self.marks["a connection cut"] += 1
        super(WatchedWorld, self).cut(actor, server)

    def _watch_server(self, name: str, event: Any, effects: list[Any]) -> None:
        if isinstance(event, Push):
            self._watch_push(name, event, effects)
        if isinstance(event, Clock) and event.withdrawn:
            self.marks["a part refused by one server withdrawn from the others"] += 1
            of_rows = any(self.histories[table].keyed for table, _, _ in event.withdrawn)
            self.marks["a push of rows refused by one server withdrawn from the others"] += of_rows
        if isinstance(event, Follow) and name == "server 0" and event.table not in self._servers[0].core.tables:
            self.marks["a question about a table that the lead had yet to hear of"] += 1
        self._watch_sums(effects)
        if isinstance(event, Pull) and not effects:
            self.marks["an overtaken pull ignored or a repeated one kept waiting"] += 1
        jumped = False
        for effect in effects:
            match effect:
                case MembershipChanged():
                    self._watch_membership(effect)
                case Discard() if isinstance(event, Died | Timeout):
                    self.marks["held pushes of a dead worker discarded"] += 1
                case Reply(message=WorkerRefused(sender=sender)) if (sender.worker, sender.incarnation) in (
                    self.lives.disturbed
                ):
                    self.marks["a zombie refused"] += 1
                case Reply(message=PushRefused(reason=reason)) if "was completed without" in reason:
                    self.marks["a held push refused at the close of its clock"] += 1
                case Advanced():
                    jumped = effect.clock > self._advanced.get(name, 0) + 1
                    self.marks["the slowest clock jumped by more than one"] += jumped
                    self._advanced[name] = effect.clock
                case Serve(message=Fetched()):
                    self.marks["a waiter released by a death"] += isinstance(event, Died | Timeout)
                    self.marks["a waiter skipped by a jump released"] += jumped
                case Serve(message=Delivered(table=table)):
                    life = (effect.worker, effect.incarnation)
                    reader = self._servers[int(name.split()[1])].subscribed.get((table, life), Subscribed())
                    self.marks["rows delivered because they had changed"] += bool(reader.changed & reader.rows)
                    self.marks["a change of rows that their reader had given up"] += bool(reader.changed - reader.rows)
                case Tell(message=Follow()) if isinstance(event, Timeout):
                    self.marks["a follower asked the lead again"] += 1
                case _:
                    pass

    def _watch_sums(self, effects: list[Any]) -> None:
        applied = [push_id.worker for effect in effects if isinstance(effect, Apply) for push_id in effect.ids]
        self.marks["several pushes of a worker summed in one clock"] += len(set(applied)) < len(applied)
        withdrawn = {
            effect.message.id.worker
            for effect in effects
            if isinstance(effect, Reply) and "another server refused its part" in getattr(effect.message, "reason", "")
        }
        beside = bool(withdrawn & set(applied))
        self.marks["a sound push applied beside one of its worker and clock that is withdrawn"] += beside

    def _stall(self, server: int) -> None:
        super(WatchedWorld, self)._stall(server)
        long = self._servers[server].busy_until - self.now > self.scenario.lease_s
        self.marks["a server did nothing for longer than a lease"] += long

    def _stop(self, worker: int) -> None:
        super(WatchedWorld, self)._stop(worker)
        actor = self.actors.get(worker)
        if actor is not None and actor.paused_until - self.now > self.scenario.lease_s:
            self.marks["a process stopped for longer than its lease, and its connections stayed"] += 1

    def _watch_push(self, name: str, push: Push, effects: list[Any]) -> None:
        copies = self._copies[name, push.id] = self._copies.get((name, push.id), 0) + 1
        if copies > 1 and not effects:
            self.marks["a late copy of a settled push ignored"] += 1
        for effect in effects:
            if isinstance(effect, Reply):
                refused = isinstance(effect.message, PushRefused) and "is closed" in effect.message.reason
                self.marks["a push refused because its clock is closed"] += refused and copies == 1
                again = copies > 1 and not isinstance(effect.message, WorkerRefused)
                self.marks["a copy of a push answered from the ledger"] += again

    def _watch_membership(self, effect: MembershipChanged) -> None:
        joined = effect.change == "joined"
        self.marks["a restart joined as a new incarnation"] += joined and effect.incarnation > 0
        self.marks["a worker joined in the middle of the run"] += joined and effect.worker >= self.scenario.num_workers
        self.marks["a lease ended"] += "did not come back" in effect.reason
        self.marks["a new incarnation replaced a life that seemed alive"] += "in its place" in effect.reason

    def _watch_worker(self, name: str, event: Any, effects: list[Any]) -> None:
        match event:
            case Arrived(message=Delivered(settled=settled, includes=includes)):
                newest = self._own.get(name, -1)
                self.marks["a delivery crossed a push of its receiver"] += newest >= settled and newest not in includes
            case Arrived(message=Fetched(table=table)) if self.histories[table].keyed:
                again = any(isinstance(effect, Send) and isinstance(effect.message, Pull) for effect in effects)
                self.marks["an overtaken answer of rows asked for again"] += again
            case WantPush(table=table) if self.histories[table].keyed:
                servers = [effect.server for effect in effects if isinstance(effect, Send)]
                self.marks["a push of rows"] += 1
                self.marks["a push of rows that several servers share"] += len(servers) > 1
            case WantRows(table=table):
                actor = self.actors[int(name.split()[1].split(".")[0])]
                self._begun[name, table, actor.asked_clock] += 1
                num_begun = self._begun[name, table, actor.asked_clock]
                self.marks["two reads of rows under way at once"] += num_begun == 2
                self.marks["a read of rows begun anew"] += num_begun > 2
            case _:
                pass
        for effect in effects:
            match effect:
                case Send(message=Push(id=push_id, table=table), bare=bare):
                    late = table != TABLE and not self.histories[table].keyed
                    self.marks["a push of a table that was declared late"] += late
                    self._own[name] = push_id.seq
                    self.marks["a repeated push sent without its tensor"] += bare
                case Forget():
                    self.marks["rows forgotten because a delivery was lost"] += 1
                case ReadDone(table=table, source=source) if self.histories[table].keyed:
                    how = {"fetch": "fetched", "delivery": "served from a delivery", "cache": "served from the cache"}
                    self.marks[f"a read of rows {how[source]}"] += 1
                    self.marks["rows read by a restarted worker"] += not name.endswith(".0")
                case ReadDone(source="delivery"):
                    self.marks["a read served from a delivery"] += 1
                case ReadDone(source="cache"):
                    self.marks["a read served from the cache"] += 1
                case ReadDone(clock=clock):
                    self.marks["a read fetched"] += 1
                    actor = self.actors[int(name.split()[1].split(".")[0])]
                    late = self.scenario.consistency.backups and clock > actor.asked_clock
                    self.marks["a late worker jumped to the clock it read"] += bool(late)
                case _:
                    pass

"""One server and its workers, step by step in any order, against a model too simple to be wrong.

The model knows no messages, ledgers or retries: only which workers take part, which clock each has told the
server, and which pushes have reached it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.core.consistency import Consistency, asynchronous, bsp, essp, ssp
from paceline.core.effects import Apply, Fail, Install, ReadDone, Reply, Send, Serve
from paceline.core.events import (
    Arrived,
    Connected,
    Declared,
    Died,
    Opened,
    Timeout,
    WantClock,
    WantJoin,
    WantPush,
    WantRead,
)
from paceline.core.messages import Clock, Join, Push, PushId, Sender, WholeStep
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.core.worker import WorkerCore

DELIVERED_BSP = Consistency(0, "on_clock", "on_clock")
POINTS = (bsp(), ssp(0), ssp(2), essp(1), asynchronous(), Consistency(2, "on_clock"), DELIVERED_BSP)
RANKS = st.integers(0, 2)


@dataclass(slots=True)
class Model:
    """What a server must have applied, in order."""

    on_clock: bool
    clocks: dict[int, int] = field(default_factory=dict[int, int])  # member -> its clock
    lives: dict[int, int] = field(default_factory=dict[int, int])  # member -> its incarnation
    reached: list[Push] = field(default_factory=list[Push])  # once each, in order of arrival
    applied: list[PushId] = field(default_factory=list[PushId])
    closed: int = 0

    def is_live(self, sender: Sender) -> bool:
        return self.lives.get(sender.worker) == sender.incarnation

    def take_in(self, push: Push) -> None:
        known = any(push.id == other.id for other in self.reached)
        if known or not self.is_live(Sender(1, push.id.worker, push.id.incarnation)):
            return
        self.reached.append(push)
        if not self.on_clock:
            self.applied.append(push.id)

    def forget(self, worker: int) -> None:
        self.clocks.pop(worker, None)
        self.lives.pop(worker, None)
        self.close()

    def close(self) -> None:
        while self.closed < min(self.clocks.values(), default=self.closed):
            if self.on_clock:
                now = [p.id for p in self.reached if p.clock == self.closed and p.id.worker in self.lives]
                self.applied += sorted(i for i in now if self.lives[i.worker] == i.incarnation)
            self.closed += 1


@dataclass(slots=True)
class Peer:
    """One worker core, what is on its way to and from it, and the values it holds."""

    core: WorkerCore
    incarnation: int
    outgoing: list[Any] = field(default_factory=list[Any])
    incoming: list[tuple[Any, tuple[PushId, ...]]] = field(default_factory=list[tuple[Any, tuple[PushId, ...]]])
    values: tuple[PushId, ...] = ()
    joined: bool = False
    failed: bool = False
    reading_at: int | None = None
    made: list[Push] = field(default_factory=list[Push])


class Cluster(RuleBasedStateMachine):
    """Three workers and a server."""

    @initialize(point=st.sampled_from(POINTS))
    def begin(self, point: Consistency) -> None:
        self.point, self.now = point, 0.0
        self.model = Model(point.visible == "on_clock")
        self.server = ServerCore(ServerSettings(0, 1, workers=(0, 1, 2), join_timeout_s=1e9), started=0.0)
        self.server.handle(Declared("w", point), 0.0)
        self.applied: list[PushId] = []
        self.peers: dict[int, Peer] = {}
        for rank in range(3):
            self.model.clocks[rank] = 0
            self.start(rank, 0)

    def start(self, rank: int, incarnation: int) -> None:
        core = WorkerCore(WorkerSettings(Sender(1, rank, incarnation), 1, retry_s=1.0, max_attempts=1000))
        self.peers[rank] = Peer(core, incarnation)
        self.wish(rank, Opened("w", self.point, (0,)))
        self.wish(rank, WantJoin())
        while not self.peers[rank].joined:
            self.to_server(rank)
            self.to_worker(rank)

    # -- what users do -----------------------------------------------------------------------------------------------

    @rule(rank=RANKS, ends_clock=st.booleans(), may_wait=st.booleans())
    def push(self, rank: int, ends_clock: bool, may_wait: bool = True) -> None:
        peer = self.peers[rank]
        if peer.core.num_unsettled("w") < 5:
            peer.made.append(peer.core.next_push("w"))
            self.wish(rank, WantPush("w", ends_clock=ends_clock, may_wait=may_wait))

    @rule(rank=RANKS)
    def step(self, rank: int) -> None:
        if self.peers[rank].reading_at is None:
            self.push(rank, ends_clock=True)
            self.clock(rank)
            self.read(rank, refresh=True)

    @rule(rank=RANKS)
    def clock(self, rank: int) -> None:
        if self.peers[rank].reading_at is None:
            self.wish(rank, WantClock())

    @rule(rank=RANKS, refresh=st.booleans(), more=st.booleans())
    def read(self, rank: int, refresh: bool, more: bool = False) -> None:
        peer = self.peers[rank]
        if peer.reading_at is None:
            peer.reading_at = peer.core.clock
            if more:
                self.wish(rank, WantRead("w", more=True))
            self.wish(rank, WantRead("w", refresh=refresh))

    # -- what the network and fate do --------------------------------------------------------------------------------

    @rule(rank=RANKS, copy=st.booleans())
    def to_server(self, rank: int, copy: bool = False) -> None:
        peer = self.peers[rank]
        if peer.outgoing:
            message = peer.outgoing[0] if copy else peer.outgoing.pop(0)
            self.tell_model(message)
            self.tell_server(message)

    @rule(rank=RANKS)
    def to_worker(self, rank: int) -> None:
        peer = self.peers[rank]
        if peer.incoming:
            message, values = peer.incoming.pop(0)
            self.wish(rank, Arrived(0, message), values)

    @rule(rank=RANKS)
    def lose(self, rank: int) -> None:
        peer = self.peers[rank]
        peer.outgoing, peer.incoming = [], []
        self.wish(rank, Connected(0))

    @rule(rank=RANKS)
    def reorder(self, rank: int) -> None:
        peer = self.peers[rank]
        peer.outgoing, peer.incoming = peer.outgoing[1:] + peer.outgoing[:1], peer.incoming[1:] + peer.incoming[:1]

    @rule(seconds=st.floats(0.5, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for rank in self.peers:
            self.wish(rank, Timeout())

    @rule(rank=RANKS, told=st.booleans())
    def restart(self, rank: int, told: bool) -> None:
        incarnation = self.peers[rank].incarnation
        if told:
            self.model.forget(rank)
            self.tell_server(Died(rank, incarnation, "killed"))
        self.start(rank, incarnation + 1)

    @precondition(lambda self: all(not peer.outgoing for peer in self.peers.values()))
    @rule()
    def all_are_heard(self) -> None:
        """With nothing on its way, no reader that may be answered is left waiting."""
        for rank, peer in self.peers.items():
            while peer.incoming or peer.outgoing:
                self.to_worker(rank)
                self.to_server(rank)
        for peer in self.peers.values():
            if peer.reading_at is not None and not any(p.outgoing for p in self.peers.values()):
                asked = peer.core._retransmit.message((0, "pull", "w"))
                assert asked is None or asked.needs > self.model.closed or peer.failed  # type: ignore[union-attr]

    # -- carrying it out ---------------------------------------------------------------------------------------------

    def wish(self, rank: int, event: Any, values: tuple[PushId, ...] = ()) -> None:
        peer = self.peers[rank]
        for effect in peer.core.handle(event, self.now):
            match effect:
                case Send(message=message):
                    peer.outgoing.append(message)
                case Install(settled=settled, includes=includes):
                    assert len(values) >= len(peer.values), "an older copy was installed over a newer one"
                    peer.values = values
                    self.check_own(peer, set(range(settled)) | set(includes))
                case ReadDone(clock=clock):
                    self.check_read(peer, clock)
                case Fail(reason=reason):
                    assert not self.model.is_live(peer.core.settings.sender), reason
                    peer.failed = True
                case _:
                    peer.joined = peer.joined or type(effect).__name__ == "JoinDone"

    def tell_model(self, message: Any) -> None:
        if isinstance(message, Push):
            self.model.take_in(message)
        elif isinstance(message, WholeStep):
            for part in (*message.pushes, message.tick):
                self.tell_model(part)
        elif isinstance(message, Clock) and self.model.is_live(message.sender):
            worker = message.sender.worker
            self.model.clocks[worker] = max(self.model.clocks[worker], message.clock)
            self.model.close()
        elif isinstance(message, Join) and message.sender.incarnation > self.model.lives.get(message.sender.worker, -1):
            worker = message.sender.worker
            if worker in self.model.lives:
                self.model.forget(worker)
            self.model.lives[worker] = message.sender.incarnation
            self.model.clocks.setdefault(worker, self.model.closed)

    def tell_server(self, event: Any) -> None:
        for effect in self.server.handle(event, self.now):
            match effect:
                case Apply(ids=ids):
                    self.applied += ids
                case Reply() | Serve():
                    peer = self.peers.get(effect.worker)
                    if peer and peer.incarnation == effect.incarnation:
                        peer.incoming.append((effect.message, tuple(self.applied)))
                case _:
                    pass

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check_read(self, peer: Peer, clock: int) -> None:
        assert peer.reading_at is not None
        needs = 0 if self.point.bound is None else max(0, peer.reading_at - self.point.bound)
        assert clock >= needs
        of_clock = {push.id: push.clock for push in self.model.reached}
        for push in self.model.reached:
            lives = self.model.is_live(Sender(1, push.id.worker, push.id.incarnation))
            assert push.clock >= needs or push.id in peer.values or not lives, f"{push} is missing at {needs}"
        if self.point.bound == 0 and self.point.visible == "on_clock":
            assert all(of_clock[push_id] < peer.reading_at for push_id in peer.values)
        peer.reading_at = None

    def check_own(self, peer: Peer, told: set[int]) -> None:
        sender = peer.core.settings.sender
        held = {i.seq for i in peer.values if (i.worker, i.incarnation) == (sender.worker, sender.incarnation)}
        assert held == {push.id.seq for push in peer.made if push.id.seq in told}

    @invariant()
    def the_server_has_applied_what_the_model_has(self) -> None:
        if hasattr(self, "model"):
            assert self.applied == self.model.applied
            assert self.server.clock_of("w") == self.model.closed


Cluster.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestCluster = Cluster.TestCase

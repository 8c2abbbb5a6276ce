"""One server that dies at any step with a replica that lags, and its workers, against the model of `test_machine`."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tests.core.test_machine import POINTS, RANKS, Cluster, Model, Peer

from paceline.core.consistency import Consistency
from paceline.core.effects import Apply, Reply, Serve
from paceline.core.events import Arrived, Connected, Declared, Died, Opened, WantJoin
from paceline.core.messages import Join, Push, PushId, Repeated, Replicated, Sender
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.core.worker import WorkerCore
from paceline.server.replica_lag import ReplicaLag, may_lag


class LaggingCluster(Cluster):
    """The replica has the first `num_received` events of the server, and is as far behind as it may be, or less."""

    @initialize(point=st.sampled_from(POINTS), clocks=st.integers(1, 3))
    def begin(self, point: Consistency, clocks: int = 1) -> None:
        self.point, self.now, self.clocks = point, 0.0, clocks
        self.log: list[Any] = []
        self.acknowledged: set[PushId] = set()
        self.seen: dict[int, set[PushId]] = {}
        self.peers: dict[int, Peer] = {}
        self.serve_anew([])
        for rank in range(3):
            self.start(rank, 0)

    def serve_anew(self, events: list[Any]) -> None:
        """Be the server that was told these events, and has a replica that has all of them."""
        self.log, self.applied = [], list[PushId]()
        self.model = Model(self.point.visible == "on_clock", dict.fromkeys(range(3), 0))
        self.server = ServerCore(ServerSettings(0, 1, workers=(0, 1, 2), join_timeout_s=1e9), started=0.0)
        self.server.handle(Declared("w", self.point), 0.0)
        self.lag = ReplicaLag(self.clocks, lambda: self.server.tables)
        for event in events:
            self.handle(event)
        self.num_received = len(self.log)

    def start(self, rank: int, incarnation: int) -> None:
        worker = WorkerSettings(Sender(1, rank, incarnation), 1, retry_s=1.0, max_attempts=1000, keeps_pushes=True)
        self.peers[rank] = Peer(WorkerCore(worker), incarnation)
        self.seen[rank] = set()
        self.wish(rank, Opened("w", self.point, (0,)))
        self.wish(rank, WantJoin())
        while not self.peers[rank].joined:
            self.to_server(rank)
            self.to_worker(rank)

    # -- what the replica receives, and the end of the server --------------------------------------------------------

    @rule(num=st.integers(1, 5))
    def receive(self, num: int) -> None:
        self.note_received(min(self.num_received + num, len(self.log)))

    def note_received(self, num: int) -> None:
        self.num_received = num
        for (worker, incarnation), seqs in self.lag.take_received(num).items():
            peer = self.peers.get(worker)
            if peer is not None and peer.incarnation == incarnation:
                peer.incoming.append((Replicated(tuple(seqs)), tuple(self.applied)))

    @precondition(lambda self: self.num_received < len(self.log))
    @rule(order=st.permutations(range(3)))
    def die(self, order: list[int]) -> None:
        """The server dies; the replica serves once each worker has said again what that may lack."""
        self.serve_anew(self.log[: self.num_received])
        for rank in order:
            peer = self.peers[rank]
            if not self.model.is_live(peer.core.settings.sender):
                continue  # it was given up, and its process has not noticed
            peer.outgoing, peer.incoming = [], []
            self.wish(rank, Connected(0))
            told, peer.outgoing = peer.outgoing, []
            assert isinstance(told[-1], Repeated)
            for message in told[:-1]:
                if isinstance(message, Join | Push):
                    effects = self.handle(message)
                    assert not any(isinstance(effect, Serve) for effect in effects), "it serves before all have come"
                    self.answer(effects)
                else:
                    peer.outgoing.append(message)
        known = {*self.applied, *(push_id for _, push_id in self.server.held_pushes())}
        assert self.acknowledged <= known, "pushes that were acknowledged are lost"
        self.note_received(len(self.log))

    # -- what the server is told -------------------------------------------------------------------------------------

    @rule(rank=RANKS, copy=st.booleans())
    def to_server(self, rank: int, copy: bool = False) -> None:
        peer = self.peers[rank]
        if peer.outgoing:
            self.tell_server(peer.outgoing[0] if copy else peer.outgoing.pop(0))

    def tell_server(self, event: Any) -> None:
        if not isinstance(event, Repeated):
            self.answer(self.handle(event))

    def handle(self, event: Any) -> list[Any]:
        if isinstance(event, Died):
            self.model.forget(event.worker)
        else:
            self.tell_model(event)
        self.log.append(event)
        self.lag.note_told(event, len(self.log))
        effects = self.server.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, Apply):
                self.applied += effect.ids
        return effects

    def answer(self, effects: list[Any]) -> None:
        """Let answers leave, once the replica has what they rest on."""
        for effect in effects:
            if isinstance(effect, Reply | Serve):
                needed = self.lag.num_needed if may_lag(effect.message) else len(self.log)
                self.note_received(max(self.num_received, needed))
                peer = self.peers.get(effect.worker)
                if peer and peer.incarnation == effect.incarnation:
                    peer.incoming.append((effect.message, tuple(self.applied)))

    # -- what must hold ----------------------------------------------------------------------------------------------

    def wish(self, rank: int, event: Any, values: tuple[PushId, ...] = ()) -> None:
        peer = self.peers[rank]
        unsettled = set(peer.core._tables["w"].unsettled) if "w" in peer.core._tables else set[int]()
        refused = isinstance(event, Arrived) and type(event.message).__name__ == "PushRefused"
        super().wish(rank, event, values)
        sender = peer.core.settings.sender
        for seq in unsettled - set(peer.core._tables["w"].unsettled) if not refused else ():
            self.acknowledged.add(PushId(sender.generation, sender.worker, sender.incarnation, seq))

    def check_own(self, peer: Peer, told: set[int]) -> None:
        super().check_own(peer, told)
        rank = peer.core.settings.sender.worker
        assert self.seen[rank] <= set(peer.values), "values lack what was read before"
        self.seen[rank] = set(peer.values)

    def check_read(self, peer: Peer, clock: int) -> None:
        needs = 0 if self.point.bound is None else max(0, (peer.reading_at or 0) - self.point.bound)
        for other in self.peers.values():
            for push in other.made if self.model.is_live(other.core.settings.sender) else ():
                assert push.clock >= needs or push.id in peer.values, f"{push} is missing at {needs}"
        super().check_read(peer, clock)


LaggingCluster.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestLaggingCluster = LaggingCluster.TestCase


def walk(seed: int) -> int:
    """Take 60 steps by chance; return how often the server has died while workers kept what its replica lacked."""
    chance, cluster, num_deaths = random.Random(seed), LaggingCluster(), 0
    cluster.begin(chance.choice(POINTS), chance.randint(1, 3))
    flags = {"push": ("ends_clock", "may_wait"), "read": ("refresh",)}
    for _ in range(60):
        rank, name = chance.randrange(3), chance.choice(STEPS)
        if name == "receive":
            cluster.receive(chance.randint(1, 5))
        elif name == "die":
            kept = any(peer.core._unreplicated.get(0) for peer in cluster.peers.values())
            if cluster.num_received < len(cluster.log) and chance.random() < 0.5:
                num_deaths += kept
                cluster.die(chance.sample(range(3), 3))
        else:
            getattr(cluster, name)(rank, **{flag: chance.random() < 0.5 for flag in flags.get(name, ())})
        cluster.the_server_has_applied_what_the_model_has()
    return num_deaths


STEPS = ("push", "step", "clock", "read", "to_server", "to_server", "to_worker", "to_worker", "receive", "die")


def test_nothing_is_lost_in_many_lives_of_servers() -> None:
    assert sum(map(walk, range(300))) > 30

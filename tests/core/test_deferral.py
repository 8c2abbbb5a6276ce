"""Updates that are sent later than they were made, over the real cores, in any order that a network allows."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field

import pytest
from tests.core.cores import sender

from paceline.core.consistency import Consistency, Deferral, essp, ssp
from paceline.core.effects import Apply, Install, ReadDone, Reply, Send, Serve, WorkerEffect
from paceline.core.events import Arrived, Declared, Opened, WantClock, WantJoin, WantPush, WantRows
from paceline.core.messages import PushId
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.core.worker import WorkerCore

Update = tuple[int, int, int]  # by which worker, at which clock, and for which server
NUM_STEPS = 400


class BoundBroken(AssertionError):
    """A read lacks an update that it was promised."""


@dataclass
class Maker:
    """A worker that makes an update for each server in each clock, and sends it when it likes, or has to."""

    core: WorkerCore
    waits: list[Update] = field(default_factory=list)
    seen: dict[int, set[Update]] = field(default_factory=lambda: defaultdict(set))  # by server, of the read under way
    reads_at: int = -1


@dataclass
class World:
    """Workers, servers, and a channel each way between any two of them, which keeps the order."""

    deferral: Deferral
    draws: random.Random
    num_servers: int = 2
    makers: list[Maker] = field(default_factory=list)
    servers: list[ServerCore] = field(default_factory=list)
    content: dict[int, set[Update]] = field(default_factory=lambda: defaultdict(set))
    carried: dict[PushId, dict[int, set[Update]]] = field(default_factory=dict)
    channels: dict[tuple[str, int, int], deque[object]] = field(default_factory=lambda: defaultdict(deque))
    num_reads: int = 0
    num_late: int = 0

    def start(self, num_workers: int) -> None:
        ranks = tuple(range(num_workers))
        for server in range(self.num_servers):
            core = ServerCore(ServerSettings(server, self.num_servers, workers=ranks), started=0.0)
            core.handle(Declared("t", self.deferral.consistency, keyed=True), 0.0)
            self.servers.append(core)
        for rank in ranks:
            core = WorkerCore(WorkerSettings(sender(rank), self.num_servers))
            self.makers.append(Maker(core))
            self.tell(rank, Opened("t", self.deferral.consistency, tuple(range(self.num_servers)), keyed=True))
            self.tell(rank, WantJoin())
        while any(self.channels.values()):
            self.deliver()

    def tell(self, rank: int, event: object, brought: set[Update] | None = None) -> None:
        """Have a worker take in an event, and do what it says."""
        for effect in self.makers[rank].core.handle(event, 0.0):  # type: ignore[arg-type]
            self.perform(rank, effect, brought or set())

    def perform(self, rank: int, effect: WorkerEffect, brought: set[Update]) -> None:
        match effect:
            case Send():
                self.channels["up", rank, effect.server].append(effect.message)
            case Install() if effect.request >= 0:
                self.makers[rank].seen[effect.server] = brought
            case ReadDone():
                self.check(rank)
            case _:
                pass

    def check(self, rank: int) -> None:
        """A read at c contains every update made below c - s."""
        maker, bound = self.makers[rank], self.deferral.consistency.bound
        assert bound is not None
        seen = set[Update]().union(*maker.seen.values())
        for other in range(len(self.makers)):
            for clock in range(maker.reads_at - bound):
                lacking = {(other, clock, server) for server in range(self.num_servers)} - seen
                if lacking:
                    raise BoundBroken(f"worker {rank} reads at {maker.reads_at} without {sorted(lacking)}")
        maker.reads_at = -1
        self.num_reads += 1

    def deliver(self) -> None:
        """Let one message of one channel arrive."""
        way, rank, server = self.draws.choice([place for place, waiting in self.channels.items() if waiting])
        message = self.channels[way, rank, server].popleft()
        if way == "down":
            assert isinstance(message, tuple)
            self.tell(rank, Arrived(server, message[0]), message[1])
            return
        for effect in self.servers[server].handle(message, 0.0):  # type: ignore[arg-type]
            match effect:
                case Apply():
                    for push_id in effect.ids:
                        self.content[server] |= self.carried[push_id][server]
                case Reply() | Serve():
                    self.channels["down", effect.worker, server].append((effect.message, set(self.content[server])))
                case _:
                    pass

    def send(self, rank: int, updates: list[Update]) -> None:
        """Make one push of these updates."""
        maker = self.makers[rank]
        if not updates:
            return
        maker.waits = [update for update in maker.waits if update not in updates]
        self.num_late += sum(clock < maker.core.clock for _, clock, _ in updates)
        by_server = {server: {each for each in updates if each[2] == server} for _, _, server in updates}
        settings = maker.core.settings.sender
        push_id = PushId(settings.generation, rank, settings.incarnation, maker.core.next_seq)
        self.carried[push_id] = by_server
        self.tell(rank, WantPush("t", tuple(sorted(by_server))))

    def step(self) -> None:
        """Let something happen."""
        choice = self.draws.random()
        if choice < 0.6 and any(self.channels.values()):
            self.deliver()
            return
        rank = self.draws.randrange(len(self.makers))
        maker = self.makers[rank]
        if maker.reads_at >= 0:
            return  # it waits for its read
        clock = maker.core.clock
        if choice < 0.75:
            self.send(rank, [update for update in maker.waits if self.draws.random() < 0.4])
        elif choice < 0.9:
            maker.waits += [(rank, clock, server) for server in range(self.num_servers)]
            self.send(rank, [update for update in maker.waits if update[1] <= self.deferral.due(clock)])
            self.tell(rank, WantClock())
        else:
            maker.reads_at, maker.seen = clock, defaultdict(set)
            self.tell(rank, WantRows("t", self.deferral.needs(clock), tuple(range(self.num_servers))))


def run(deferral: Deferral, seed: int, num_workers: int = 3) -> World:
    world = World(deferral, random.Random(seed))
    world.start(num_workers)
    for _ in range(NUM_STEPS):
        world.step()
    return world


def breaks(deferral: Deferral) -> bool:
    """Say whether some order of events shows that the bound does not hold."""
    for seed in range(40):
        try:
            run(deferral, seed)
        except BoundBroken:
            return True
    return False


CASES = [(policy(bound), hold) for policy in (ssp, essp) for bound in (1, 2, 4) for hold in range(bound + 1)]


@pytest.mark.parametrize(("consistency", "hold"), CASES, ids=str)
def test_a_read_contains_every_update_below_its_bound_however_late_they_were_sent(
    consistency: Consistency, hold: int
) -> None:
    worlds = [run(Deferral(consistency, hold), seed) for seed in range(12)]
    assert sum(world.num_reads for world in worlds) > 50
    assert bool(sum(world.num_late for world in worlds)) == (hold > 0)


@pytest.mark.parametrize("hold", [1, 2])
def test_without_the_tighter_bound_of_reads_the_promise_would_be_broken(
    monkeypatch: pytest.MonkeyPatch, hold: int
) -> None:
    monkeypatch.setattr(Deferral, "needs", lambda self, clock: self.consistency.needs(clock))
    assert breaks(Deferral(ssp(2), hold))


def test_sent_a_clock_later_than_due_the_promise_would_be_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deferral, "due", lambda self, clock: clock - self.hold - 1)
    assert breaks(Deferral(ssp(1), 1))


def test_values_are_said_to_contain_what_was_certainly_sent() -> None:
    deferral = Deferral(ssp(3), 2)
    assert [deferral.contained(clock) for clock in (0, 1, 2, 3, 9)] == [0, 0, 0, 1, 7]
    assert all(deferral.contained(deferral.needs(clock)) >= clock - 3 for clock in range(20))

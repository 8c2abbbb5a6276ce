"""Several servers make a clipped update with one norm: the lead decides, all measure, and none updates before."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import hypot

from hypothesis import given
from hypothesis import strategies as st
from tests.core.cores import make_server, of, pull, push, push_id, said, sender, tick

from paceline.core.consistency import backup, bsp
from paceline.core.effects import Apply, Discard, Measure, ServerEffect, Tell
from paceline.core.events import ClippedPush, Died, Measured, Resumed, Timeout
from paceline.core.messages import Closed, Fetched, Follow, Join, PushRefused
from paceline.core.server import ServerCore, ServerEvent
from paceline.core.state import StateCodec

BOTH = ((0, 0), (1, 0))
ASKED = Closed(1, "w", 0, BOTH, clips=True)
TOLD = Closed(1, "w", 0, BOTH, clips=True, norm=5.0)
IDS = (push_id(0, 0), push_id(1, 0))
_CODEC = StateCodec(ServerCore)


def decided(consistency: object = None) -> tuple[ServerCore, ServerCore, list[ServerEffect]]:
    """Return two servers that hold clipped pushes of two workers, and what the lead does as both have finished."""
    lead, follower = (
        make_server(consistency or bsp(), server=server, num_servers=2)  # type: ignore[arg-type]
        for server in range(2)
    )
    lead.handle(Follow(1, 1, "w", 0), 0.0)
    effects: list[ServerEffect] = []
    for worker in (0, 1):
        for core in (lead, follower):
            core.handle(ClippedPush(push(worker, 0, 0)), 0.0)
        effects = lead.handle(tick(worker, 1), 0.0)
    return lead, follower, effects


def test_an_update_is_made_with_the_norm_of_all_parts() -> None:
    lead, follower, effects = decided()
    assert of(effects, Measure) == [Measure("w", IDS, 0)]
    assert of(effects, Apply) == []
    assert of(effects, Tell) == [Tell(1, ASKED)]
    assert lead.handle(pull(0, 0, 1, 1), 0.0) == []  # the clock is decided, but not complete
    assert lead.handle(Measured("w", 0, 3.0), 0.0) == []
    assert follower.handle(ASKED, 0.0) == [Measure("w", IDS, 0)]
    assert follower.handle(Measured("w", 0, 4.0), 0.0) == [Tell(0, Follow(1, 1, "w", 0, 4.0))]
    effects = lead.handle(Follow(1, 1, "w", 0, 4.0), 0.0)
    assert of(effects, Apply) == [Apply("w", IDS, 5.0)]
    assert of(effects, Tell) == [Tell(1, TOLD)]
    assert [answer.clock for answer in said(effects, Fetched)] == [1]
    effects = follower.handle(TOLD, 0.0)
    assert of(effects, Apply) == [Apply("w", IDS, 5.0)]
    assert of(effects, Tell) == [Tell(0, Follow(1, 1, "w", 1))]


def test_an_update_that_is_not_clipped_waits_for_no_norm() -> None:
    lead, follower, _ = decided()
    lead.handle(Measured("w", 0, 3.0), 0.0)
    lead.handle(Follow(1, 1, "w", 0, 4.0), 0.0)
    follower.handle(TOLD, 0.0)  # without having been asked: it was restarted, say
    assert (lead.clock_of("w"), follower.clock_of("w")) == (1, 1)
    for worker in (0, 1):
        lead.handle(push(worker, 1, 1), 0.0)
        effects = lead.handle(tick(worker, 2), 0.0)
    assert of(effects, Apply) == [Apply("w", (push_id(0, 1), push_id(1, 1)))]


def test_questions_and_answers_that_are_lost_are_repeated() -> None:
    lead, follower, _ = decided()
    lead.handle(Measured("w", 0, 3.0), 0.0)
    assert of(lead.handle(Follow(1, 1, "w", 0), 0.0), Tell) == [Tell(1, ASKED)]
    follower.handle(ASKED, 0.0)
    follower.handle(Measured("w", 0, 4.0), 0.0)
    assert follower.handle(ASKED, 0.0) == [Tell(0, Follow(1, 1, "w", 0, 4.0))]  # measured once
    assert follower.handle(Timeout(), 2.0) == [Tell(0, Follow(1, 1, "w", 0, 4.0))]
    lead.handle(Follow(1, 1, "w", 0, 4.0), 0.0)
    assert of(lead.handle(Follow(1, 1, "w", 0, 4.0), 0.0), Tell) == [Tell(1, TOLD)]
    assert of(lead.handle(Follow(1, 1, "w", 0, 4.0), 0.0), Apply) == []


def test_a_worker_that_dies_after_the_decision_stays_in_the_update() -> None:
    lead, _, _ = decided()
    effects = lead.handle(Died(1, 0, "killed"), 0.0)
    assert of(effects, Discard) == []
    lead.handle(Measured("w", 0, 3.0), 0.0)
    assert of(lead.handle(Follow(1, 1, "w", 0, 4.0), 0.0), Apply) == [Apply("w", IDS, 5.0)]


def test_a_worker_that_comes_after_the_decision_is_too_late() -> None:
    lead = make_server(backup(1), workers=(0, 1, 2), num_servers=2)
    lead.handle(Follow(1, 1, "w", 0), 0.0)
    for worker in (0, 1):
        lead.handle(ClippedPush(push(worker, 0, 0)), 0.0)
        effects = lead.handle(tick(worker, 1), 0.0)
    assert of(effects, Measure) == [Measure("w", IDS, 0)]
    lead.handle(ClippedPush(push(2, 0, 0)), 0.0)
    assert of(lead.handle(tick(2, 1), 0.0), Measure) == []
    lead.handle(Measured("w", 0, 3.0), 0.0)
    effects = lead.handle(Follow(1, 1, "w", 0, 4.0), 0.0)
    assert of(effects, Apply) == [Apply("w", IDS, 5.0)]
    assert [refused.id for refused in said(effects, PushRefused)] == [push_id(2, 0)]


def test_a_norm_of_a_clock_that_is_over_changes_nothing() -> None:
    lead, _, _ = decided()
    assert of(lead.handle(Follow(1, 1, "w", 7, 4.0), 0.0), Apply) == []
    assert lead.handle(Measured("w", 7, 3.0), 0.0) == []
    assert of(lead.handle(Follow(1, 1, "w", 0, 4.0), 0.0), Apply) == []  # its own is not known yet
    assert of(lead.handle(Measured("w", 0, 3.0), 0.0), Apply) == [Apply("w", IDS, 5.0)]


@dataclass
class Servers:
    """Servers whose messages are lost, doubled and delayed, and which are replaced by others with their state."""

    cores: list[ServerCore]
    now: float = 0.0
    sent: list[Tell] = field(default_factory=list[Tell])
    unmeasured: list[tuple[int, Measure]] = field(default_factory=list[tuple[int, Measure]])
    applied: list[list[Apply]] = field(default_factory=list[list[Apply]])

    def handle(self, server: int, event: ServerEvent) -> None:
        for effect in self.cores[server].handle(event, self.now):
            match effect:
                case Tell():
                    self.sent.append(effect)
                case Measure():
                    self.unmeasured.append((server, effect))
                case Apply():
                    self.applied[server].append(effect)
                case _:
                    pass

    def measure(self, number: int) -> None:
        server, wanted = self.unmeasured.pop(number)
        self.handle(server, Measured(wanted.table, wanted.clock, norm_of(server, wanted.clock)))

    def deliver(self, number: int, *, again: bool) -> None:
        told = self.sent[number] if again else self.sent.pop(number)
        self.handle(told.server, told.message)

    def replace(self, server: int) -> None:
        self.cores[server] = _CODEC.load(_CODEC.dump(self.cores[server]))
        self.sent = [told for told in self.sent if told.server != server]
        self.handle(server, Resumed())
        for worker in (0, 1):
            self.handle(server, Join(sender(worker)))

    def settle(self) -> None:
        """Lose nothing any more."""
        for _ in range(12):
            while self.unmeasured or self.sent:
                if self.unmeasured:
                    self.measure(0)
                else:
                    self.deliver(0, again=False)
            self.now += 1.0
            for server in range(len(self.cores)):
                self.handle(server, Timeout())


def norm_of(server: int, clock: int) -> float:
    return 10.0 * clock + server


@given(data=st.data(), num_servers=st.integers(2, 3))
def test_all_servers_make_the_same_updates_with_the_same_norm(data: st.DataObject, num_servers: int) -> None:
    cores = [
        make_server(bsp(), workers=(0, 1), server=server, num_servers=num_servers) for server in range(num_servers)
    ]
    servers = Servers(cores, applied=[[] for _ in cores])
    clocks = [0, 0]
    clipped = data.draw(st.lists(st.booleans(), min_size=4, max_size=4), label="clipped")
    for _ in range(data.draw(st.integers(5, 60), label="steps")):
        step = data.draw(st.sampled_from(["push", "push", "measure", "deliver", "double", "lose", "replace", "wait"]))
        ready = [worker for worker in (0, 1) if clocks[worker] <= min(clocks) and clocks[worker] < len(clipped)]
        if step == "push" and ready:
            worker = data.draw(st.sampled_from(ready))
            give(servers, worker, clocks[worker], clips=clipped[clocks[worker]])
            clocks[worker] += 1
        elif step == "measure" and servers.unmeasured:
            servers.measure(data.draw(st.integers(0, len(servers.unmeasured) - 1)))
        elif step in ("deliver", "double") and servers.sent:
            servers.deliver(data.draw(st.integers(0, len(servers.sent) - 1)), again=step == "double")
        elif step == "lose" and servers.sent:
            servers.sent.pop(data.draw(st.integers(0, len(servers.sent) - 1)))
        elif step == "replace":
            servers.replace(data.draw(st.integers(0, num_servers - 1)))
        else:
            servers.now += 0.5
            for server in range(num_servers):
                servers.handle(server, Timeout())
    servers.settle()
    wanted = [
        Apply("w", (push_id(0, clock), push_id(1, clock)), total(num_servers, clock) if clipped[clock] else None)
        for clock in range(min(clocks))
    ]
    assert servers.applied == [wanted] * num_servers


def give(servers: Servers, worker: int, clock: int, *, clips: bool) -> None:
    """Push to all servers, then finish the clock: a worker does so once all have the push."""
    made = push(worker, clock, clock)
    for server in range(len(servers.cores)):
        servers.handle(server, ClippedPush(made) if clips else made)
    for server in range(len(servers.cores)):
        servers.handle(server, tick(worker, clock + 1))


def total(num_servers: int, clock: int) -> float:
    return hypot(*(norm_of(server, clock) for server in range(num_servers)))


def test_a_life_that_is_over_clips_nothing() -> None:
    lead = make_server(bsp(), num_servers=2)
    lead.handle(Died(1, 0, "killed"), 0.0)
    lead.handle(ClippedPush(push(1, 0, 0)), 0.0)
    lead.handle(push(0, 0, 0), 0.0)
    assert of(lead.handle(tick(0, 1), 0.0), Apply) == [Apply("w", (push_id(0, 0),))]
    assert lead.lives.objection(sender(1))


def test_a_push_that_is_too_late_leaves_nothing_to_clip() -> None:
    lead = make_server(backup(1), num_servers=2)
    lead.handle(push(0, 0, 0), 0.0)
    lead.handle(tick(0, 1), 0.0)
    assert said(lead.handle(ClippedPush(push(1, 0, 0)), 0.0), PushRefused)
    assert not lead.tables["w"].commit._clipped

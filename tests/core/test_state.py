"""A core that is restored from its state goes on as the one that was written down, after any event of any history."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.cores import make_server, of, push, push_id, said, sender, tick
from tests.simulate.swarm import draw

from paceline.core.consistency import bsp
from paceline.core.effects import Apply, Hold, MembershipChanged, Tell
from paceline.core.events import Resumed, Timeout
from paceline.core.messages import Follow, Held, Join, Joined
from paceline.core.server import ServerCore
from paceline.core.state import StateCodec
from paceline.errors import ProtocolBug
from paceline.simulate.world import World

CORES = StateCodec(ServerCore)


def written(core: ServerCore) -> bytes:
    return msgspec.msgpack.encode(CORES.dump(core))


def restored(content: bytes) -> ServerCore:
    return CORES.load(msgspec.msgpack.decode(content))


class FollowedWorld(World):
    """Beside each server another one replays its events, and a third is restored before every few of them."""

    def _take_in(self, server: int, entry: Any, event: Any) -> None:
        core, handle = entry.core, entry.core.handle
        replaying = self.replaying.setdefault(server, restored(written(core)))

        def handle_alike(event: Any, now: float) -> Any:
            again = restored(written(core)) if self.num_events % 5 == self.scenario.seed % 5 else None
            effects = handle(event, now)
            for other in filter(None, (replaying, again)):
                assert other.handle(event, now) == effects
                assert other.next_deadline() == core.next_deadline()
            return effects

        entry.core = SimpleNamespace(handle=handle_alike, clock_of=core.clock_of, next_deadline=core.next_deadline)
        super()._take_in(server, entry, event)
        entry.core = core

    @property
    def replaying(self) -> dict[int, ServerCore]:
        return self.__dict__.setdefault("_replaying", {})


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_happens_a_restored_core_and_one_that_replays_do_the_same(seed: int) -> None:
    world = FollowedWorld(draw(seed, num_clocks=(2, 5)))
    world.run()
    for server, replaying in world.replaying.items():
        assert written(replaying) == written(world._servers[server].core)


def test_a_resumed_server_gives_every_worker_a_lease_and_keeps_what_it_has_answered() -> None:
    core = restored(written(make_server(bsp())))
    assert said(core.handle(push(0, 0, 0), 1.0), Held)
    core = restored(written(core))
    assert core.handle(Resumed(), 2.0) == []
    assert core.held_pushes() == [("w", push_id(0, 0))]
    assert core.next_deadline() == 7.0
    assert said(core.handle(Join(sender(0)), 3.0), Joined)
    assert of(core.handle(push(0, 0, 0), 3.0), Hold) == []  # a copy
    core.handle(Join(sender(1)), 3.0)
    assert core.next_deadline() is None
    core.handle(tick(0, 1), 3.0)
    assert of(core.handle(tick(1, 1), 3.0), Apply) == [Apply("w", (push_id(0, 0),))]


def test_a_resumed_server_gives_up_workers_that_do_not_come_back() -> None:
    core = make_server(bsp())
    core.handle(Resumed(), 2.0)
    core.handle(Join(sender(0)), 3.0)
    effects = core.handle(Timeout(), 7.0)
    assert [effect.worker for effect in of(effects, MembershipChanged)] == [1]


@pytest.mark.parametrize("now", [1e-3, 1e6])
def test_a_server_that_is_resumed_on_another_machine_waits_by_the_time_there(now: float) -> None:
    core = make_server(bsp(), joined=False)
    core.handle(Join(sender(0)), 500.0)
    core.handle(Resumed(), now)
    assert core.next_deadline() == now + core.settings.lease_s
    core.handle(Join(sender(0)), now)
    assert core.next_deadline() == now + core.settings.join_timeout_s


def test_resumed_servers_ask_and_tell_again_what_may_be_lost() -> None:
    lead = make_server(bsp(), num_servers=2, workers=(0,))
    follower = make_server(bsp(), num_servers=2, workers=(0,), server=1)
    for clock in range(2):
        for core in (lead, follower):
            core.handle(push(0, clock, clock), 0.0)
    (told,) = of([*lead.handle(Follow(1, 1, "w", 0), 0.0), *lead.handle(tick(0, 2), 0.0)], Tell)
    asked = of(follower.handle(told.message, 0.0), Tell)
    assert asked == [Tell(0, Follow(1, 1, "w", 1))]  # the lead dies before it hears that
    (again,) = of(restored(written(lead)).handle(Resumed(), 1.0), Tell)
    assert again == told
    assert of(follower.handle(again.message, 1.0), Tell) == asked
    assert of(restored(written(follower)).handle(Resumed(), 1.0), Tell) == asked


def test_an_object_in_two_places_is_one_object_again() -> None:
    twice = [shared := Holder(0), shared, Holder(0)]
    first, second, other = StateCodec(Holder).load(StateCodec(Holder).dump(Holder(twice))).held
    assert first is second
    assert other is not first


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ProtocolBug, match="has no place"):
        StateCodec(Holder).dump(Holder(object()))
    with pytest.raises(ProtocolBug, match="unknown kind 'Unheard'"):
        StateCodec(Holder).load(["Unheard"])
    with pytest.raises(ProtocolBug, match="expected, got a int"):
        StateCodec(Holder).load(3)


@dataclass
class Holder:
    held: Any


@dataclass
class Containers:
    counts: Counter[str]
    names: dict[int, tuple[str, ...]]


def test_containers_come_back_with_what_they_had() -> None:
    codec, state = StateCodec(Containers), Containers(Counter({"w": 3, "rows": 1}), {7: ("a", "b")})
    found = codec.load(msgspec.msgpack.decode(msgspec.msgpack.encode(codec.dump(state))))
    assert found == state
    assert found.counts["w"] == 3

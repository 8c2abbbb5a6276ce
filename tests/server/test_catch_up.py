"""A replica that lagged serves once each worker has said again what it keeps, or has gone."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from tests.nodes.cluster import table

from paceline.core.effects import Serve
from paceline.core.events import Died
from paceline.core.messages import Clock, Fetched, Join, Pull, Push, PushId, Repeated, Sender
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings
from paceline.observe.trace import Trace
from paceline.server.catch_up import CatchUp
from paceline.server.connections import Incoming, Stop
from paceline.server.node import ServerNode
from paceline.server.recovery import Recovery
from paceline.transport import MemoryTransport
from paceline.transport.base import Frame
from paceline.wire.messages import Hello, PullFrame, PushFrame, encode

NUM_WORKERS = 2


class Caller:
    """A connection, of which only who called is asked."""

    def __init__(self, worker: int) -> None:
        self.identity = encode(Hello("worker", worker, 0, 1))
        self.peer_identity = self

    def permit(self, role: str, rank: int) -> bool:
        return True


def said(worker: int, message: object, body: bytes = b"") -> Incoming:
    return Incoming(cast("Any", Caller(worker)), Frame(encode(message), memoryview(bytearray(body))))


def sender(worker: int) -> Sender:
    return Sender(1, worker, 0)


def push(worker: int, seq: int) -> PushFrame:
    return PushFrame(Push(PushId(1, worker, 0, seq), "w", 0, 0), 1.0, (), ())


def take_part(core: ServerCore, num_workers: int = NUM_WORKERS) -> ServerCore:
    """Have workers join, and finish three clocks."""
    for worker in range(num_workers):
        core.handle(Join(sender(worker)), 0.0)
        core.handle(Clock(sender(worker), 3), 0.0)
    return core


def promoted(num_workers: int = NUM_WORKERS) -> ServerCore:
    """A core in which so many of three workers have joined."""
    return take_part(ServerCore(ServerSettings(0, 1, workers=(0, 1, 2)), started=0.0), num_workers)


def caught_up(
    *items: object, patience_s: float = 60.0, num_workers: int = NUM_WORKERS
) -> tuple[CatchUp, list[object], list[object]]:
    """Return the state after these items, what was handled of them at once, and what was not asked for any more."""
    left, handled = [*items, Stop()], list[object]()
    catch_up = CatchUp("server 0", 1, promoted(num_workers), 2, [])
    catch_up.run(lambda _: left.pop(0), handled.append, patience_s)
    return catch_up, handled, left[:-1]


def test_pushes_are_handled_until_their_worker_has_repeated_all_and_the_rest_comes_later() -> None:
    first = [
        said(0, Join(sender(0))),
        said(0, push(0, 1)),
        said(0, Clock(sender(0), 4)),
        said(0, PullFrame(Pull(sender(0), 1, "w", 4, 2), -1)),
        said(0, Repeated(sender(0), 3)),
    ]
    second = [
        said(0, push(0, 2)),
        said(0, Clock(sender(0), 5)),
        said(1, push(1, 1)),
        said(1, Clock(sender(1), 4)),
        said(1, Repeated(sender(1), 3)),
    ]
    catch_up, handled, left = caught_up(*first, *second, "not asked for any more")
    assert handled == [first[0], first[1], first[4], second[2], second[4]]
    assert catch_up.completing == [first[2], second[3]], "what a worker says since it has repeated all is no repetition"
    assert catch_up.postponed == [first[3], second[0], second[1]]
    assert catch_up.losses() == []
    assert left == ["not asked for any more"]


def test_a_worker_that_has_died_is_not_waited_for_and_what_may_be_lost_is_told() -> None:
    death, later = Died(1, 0, "it was killed"), Died(0, 0, "it was killed")
    catch_up, _, _ = caught_up(said(0, Repeated(sender(0), 5)), later, death)
    assert catch_up.completing == [death], "its clocks are completed once all others have repeated theirs"
    assert catch_up.postponed == [later]
    assert catch_up.losses() == [
        "worker 1 (incarnation 0) did not come back to server 0, whose replica serves: what it had pushed there from "
        "clock 3 on, of 2 clocks and the open one at most, is lost as far as the replica had not received it; others "
        "have read values with its clocks 3 to 4"
    ]


@pytest.mark.parametrize(("reached", "last"), [((5, 4), 4), ((4, 5), 4), ((3, -1), None)])
def test_what_others_have_read_of_a_worker_that_is_lost_is_told(reached: tuple[int, int], last: int | None) -> None:
    said_again = [said(worker, Repeated(sender(worker), clock)) for worker, clock in enumerate(reached)]
    catch_up, _, _ = caught_up(*said_again, Died(2, 0, "it was killed"), num_workers=3)
    [loss] = catch_up.losses()
    told = "had not received it" if last is None else f"; others have read values with its clocks 3 to {last}"
    assert loss.endswith(told)


def test_a_worker_that_begins_joins_at_the_clock_that_the_others_have_repeated() -> None:
    begins = said(2, Join(sender(2)))
    catch_up, handled, _ = caught_up(begins, *(said(worker, Repeated(sender(worker), 5)) for worker in range(2)))
    assert begins not in handled
    assert catch_up.postponed == [begins]


def test_a_death_of_which_the_replica_has_heard_before_counts() -> None:
    deaths: list[object] = [Died(worker, 0, "it was killed") for worker in range(NUM_WORKERS)]
    catch_up = CatchUp("server 0", 1, promoted(), 2, deaths)
    catch_up.run(lambda _: pytest.fail("nothing is waited for"), lambda _: None, 60.0)
    assert len(catch_up.losses()) == NUM_WORKERS


def test_workers_of_which_nothing_is_known_are_waited_for_no_longer_than_their_lease() -> None:
    catch_up, _, left = caught_up(said(0, Repeated(sender(0), 3)), patience_s=0.0)
    assert len(left) == 1
    assert len(catch_up.losses()) == NUM_WORKERS


def test_a_server_that_is_told_to_stop_does_first_what_was_asked_before() -> None:
    saving = object()
    catch_up, _, left = caught_up(saving, Stop(), said(0, Repeated(sender(0), 3)))
    assert catch_up.postponed == [saving, Stop()]
    assert len(left) == 1


@pytest.mark.parametrize("last", [Clock(sender(1), 5), Died(1, 0, "it was killed")], ids=["tick", "death"])
def test_a_read_of_a_worker_that_comes_back_first_has_what_it_has_read_before_and_its_own_push(
    last: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of clock 5 are on worker 0, which ignores older ones, whatever is in them."""
    served: list[Fetched] = []

    def serve(_: ServerNode, effect: Serve) -> None:
        assert isinstance(effect.message, Fetched)
        served.append(effect.message)

    monkeypatch.setattr(ServerNode, "_serve", serve)
    transport = MemoryTransport()
    node = ServerNode(ServerSettings(0, 1, workers=(0, 1)), transport.listen("promoted"), transport, tuple, Trace(None))
    take_part(node._core)
    node._declare(table("w", NUM_WORKERS, "asynchronous"))
    node._core.handle(Clock(sender(0), 5), 0.0)
    for item in (
        said(0, push(0, 1), torch.ones(NUM_WORKERS).numpy().tobytes()),
        said(0, PullFrame(Pull(sender(0), 7, "w", clock=5, needs=0), -1)),
        said(0, Repeated(sender(0), 5)),
        last if isinstance(last, Died) else said(1, last),
        said(1, Repeated(sender(1), 5)),
    ):
        node._acceptor.put(item)
    recovery = Recovery(lag=2)
    node._catch_up(recovery)
    assert not served, "before all have repeated what they keep"
    assert all(map(node._handle_item, recovery.postponed))
    node._close()
    assert [(each.clock, each.includes) for each in served] == [(5, (1,))]
    lost = 2 if isinstance(last, Died) else 0  # pushes of the worker that has died, at most, which others have read
    assert [each.version for each in served] == [1 + lost]

"""A replica that lagged serves once each worker has said again what it keeps, or has gone."""

from __future__ import annotations

from typing import Any, cast

from paceline.core.events import Died
from paceline.core.messages import Clock, Join, Push, PushId, Repeated, Sender
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings
from paceline.server.catch_up import CatchUp
from paceline.server.connections import Incoming, Stop
from paceline.transport.base import Frame
from paceline.wire.messages import Hello, PushFrame, encode

NUM_WORKERS = 2


class Caller:
    """A connection, of which only who called is asked."""

    def __init__(self, worker: int) -> None:
        self.identity = encode(Hello("worker", worker, 0, 1))
        self.peer_identity = self

    def permit(self, role: str, rank: int) -> bool:
        return True


def said(worker: int, message: object) -> Incoming:
    return Incoming(cast("Any", Caller(worker)), Frame(encode(message), memoryview(b"")))


def sender(worker: int) -> Sender:
    return Sender(1, worker, 0)


def push(worker: int, seq: int) -> PushFrame:
    return PushFrame(Push(PushId(1, worker, 0, seq), "w", 0, 0), 1.0, (), ())


def promoted() -> ServerCore:
    """A core in which workers have joined, and have finished three clocks; worker 2 has not joined."""
    core = ServerCore(ServerSettings(0, 1, workers=(0, 1, 2)), started=0.0)
    for worker in range(NUM_WORKERS):
        core.handle(Join(sender(worker)), 0.0)
        core.handle(Clock(sender(worker), 3), 0.0)
    return core


def caught_up(*items: object, patience_s: float = 60.0) -> tuple[CatchUp, list[object], bool]:
    """Return the state after these items, what was handled of them at once, and whether it has come to its end."""
    left, handled = list(items), list[object]()
    catch_up = CatchUp("server 0", 1, promoted(), 2, [])
    is_done = catch_up.run(lambda _: left.pop(0) if left else Stop(), handled.append, patience_s)
    return catch_up, handled, is_done


def test_pushes_are_handled_until_their_worker_has_repeated_all_and_the_rest_comes_later() -> None:
    first = [
        said(0, Join(sender(0))),
        said(0, push(0, 1)),
        said(0, Clock(sender(0), 4)),
        said(0, Repeated(sender(0), 3)),
    ]
    second = [said(0, push(0, 2)), said(1, push(1, 1)), said(1, Repeated(sender(1), 3))]
    catch_up, handled, is_done = caught_up(*first, *second, "not asked for any more")
    assert is_done
    assert handled == [first[0], first[1], first[3], second[1], second[2]]
    assert catch_up.postponed == [first[2], second[0]]
    assert catch_up.losses() == []


def test_a_worker_that_has_died_is_not_waited_for_and_what_may_be_lost_is_told() -> None:
    death = Died(1, 0, "it was killed")
    catch_up, _, is_done = caught_up(death, said(0, Repeated(sender(0), 5)))
    assert is_done
    assert catch_up.postponed == [death], "its clocks are completed once all others have repeated theirs"
    assert catch_up.losses() == [
        "worker 1 (incarnation 0) did not come back to server 0, whose replica serves: what it had pushed there from "
        "clock 3 on, of 2 clocks and the open one at most, is lost as far as the replica had not received it; others "
        "have read values with its clocks 3 to 4"
    ]


def test_a_death_of_which_the_replica_has_heard_before_counts() -> None:
    deaths: list[object] = [Died(worker, 0, "it was killed") for worker in range(NUM_WORKERS)]
    catch_up = CatchUp("server 0", 1, promoted(), 2, deaths)
    assert catch_up.run(lambda _: Stop(), lambda _: None, 60.0)
    assert len(catch_up.losses()) == NUM_WORKERS


def test_workers_of_which_nothing_is_known_are_waited_for_no_longer_than_their_lease() -> None:
    catch_up, _, is_done = caught_up(said(0, Repeated(sender(0), 3)), patience_s=0.0)
    assert is_done
    assert len(catch_up.losses()) == NUM_WORKERS


def test_the_end_of_the_job_ends_it() -> None:
    assert not caught_up(said(0, Repeated(sender(0), 3)))[2]

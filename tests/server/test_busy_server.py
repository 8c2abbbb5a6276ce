"""A server that always has something to do keeps its deadlines all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.data.service.feeders import until
from tests.nodes.client import client, member, serve_table
from tests.nodes.cluster import cluster

from paceline.core.messages import Clock, Join, Joined, Sender, Ticked
from paceline.core.server import ServerCore
from paceline.core.tables import MAX_AT_ONCE
from paceline.server.connections import Acceptor
from paceline.server.node import ServerNode
from paceline.server.tables import ServerCall, ServerState
from paceline.wire.messages import Hello

FAR = 3 * MAX_AT_ONCE
PATIENCE_S = 30.0
LEASE_S = 1000.0  # ends when a test says so


@dataclass
class ServerClock:
    """What the server takes for the time; a test puts it forward."""

    ahead_s: float = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def server_clock(monkeypatch: pytest.MonkeyPatch) -> ServerClock:
    made = ServerClock()
    monkeypatch.setattr("paceline.server.node.time", made)
    return made


def test_what_is_due_is_done_although_there_is_always_something_to_take_in(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 0) as worker:
        serve_table(worker, consistency="bsp")
        [server] = servers.servers
        until_s, has_ended, clocks = time.monotonic() + PATIENCE_S, threading.Event(), [0]

        def keep_busy(state: ServerState) -> None:
            clocks[0] = state.core.clock_of("w")
            if clocks[0] < FAR and time.monotonic() < until_s:
                server.do(keep_busy)
            else:
                has_ended.set()

        server.do(keep_busy)
        worker.say(Clock(Sender(1, 0, 0), FAR))
        worker.hear(Ticked)
        assert has_ended.wait(2 * PATIENCE_S)
    assert clocks == [FAR]


def test_l6_a_worker_whose_return_waits_in_the_queue_when_its_lease_ends_is_not_given_up(
    tmp_path: Path, server_clock: ServerClock
) -> None:
    with cluster("memory", tmp_path, num_servers=1, lease_s=LEASE_S) as servers:
        [server] = servers.servers
        with member(servers, 0):
            pass
        _until(server, lambda core: core.lives.next_deadline() is not None)  # its lease runs
        is_back = threading.Event()
        server.do(lambda _: is_back.wait(PATIENCE_S))  # a long update, say
        with client(servers, Hello("worker", 0, 0, 1, 1)) as again:
            again.say(Join(Sender(1, 0, 0)))
            until(lambda: any(each.has_frame() for each in server._acceptor.connections()))
            server_clock.ahead_s += 2 * LEASE_S
            is_back.set()
            again.hear(Joined)
            again.say(Clock(Sender(1, 0, 0), 1))
            again.hear(Ticked)


@pytest.mark.parametrize("meanwhile", [None, ServerCall(lambda _: None)], ids=["nothing came", "something came"])
def test_l6_time_in_which_the_server_has_not_run_is_not_held_against_workers(
    meanwhile: ServerCall | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_clock: ServerClock
) -> None:
    with cluster("memory", tmp_path, num_servers=1, lease_s=LEASE_S) as servers:
        [server] = servers.servers
        with member(servers, 0):
            pass
        _until(server, lambda core: core.lives.next_deadline() is not None)  # its lease runs
        wait, slept = Acceptor.get, threading.Event()

        def oversleep(acceptor: Acceptor, timeout_s: float | None) -> object | None:
            if timeout_s is None or slept.is_set():
                return wait(acceptor, timeout_s)
            server_clock.ahead_s += 2 * LEASE_S  # as if it had been stopped
            slept.set()
            return meanwhile

        monkeypatch.setattr(Acceptor, "get", oversleep)
        server.do(lambda _: None)  # so that it waits anew
        assert slept.wait(PATIENCE_S)
        with client(servers, Hello("worker", 0, 0, 1, 1)) as again:
            again.say(Join(Sender(1, 0, 0)))
            again.hear(Joined)


def _until(server: ServerNode, holds: Callable[[ServerCore], bool]) -> None:
    """Wait until the server's core is as it shall be."""
    done = threading.Event()

    def look(state: ServerState) -> None:
        done.set() if holds(state.core) else server.do(look)

    server.do(look)
    assert done.wait(PATIENCE_S)

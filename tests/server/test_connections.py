"""Peers of a server that read nothing: what is sent to them waits, and the thread that serves does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.nodes.client import TIMEOUT_S
from tests.transport.carriers import make_carrier

from paceline.core.messages import Follow, Ticked
from paceline.server.connections import Connections
from paceline.transport.base import Connection
from paceline.wire.messages import Hello, decode
from paceline.wire.requests import RequestDone

NUM = 40
BODY = memoryview(bytes(64 << 10))  # more than sockets hold, all of them together


class Endpoints:
    """A server's connections, and a listener in the place of all others."""

    def __init__(self, kind: str, directory: Path) -> None:
        carrier = make_carrier(kind, directory)
        self.transport, self.listener = carrier.transport, carrier.transport.listen(carrier.address)
        addresses = ("", self.listener.address)
        self.peers = Connections(0, 1, self.transport, lambda: addresses, lambda connection: connection.close())
        self.ends: list[Connection] = []

    def member(self, rank: int) -> Connection:
        """Connect as a worker; return its end."""
        here = self.transport.connect(self.listener.address, b"", timeout_s=TIMEOUT_S)
        self.peers.register(Hello("worker", rank, 0, 1), self.accept())
        self.ends.append(here)
        return here

    def accept(self) -> Connection:
        self.ends.append(self.listener.accept(timeout_s=TIMEOUT_S))
        return self.ends[-1]

    def close(self) -> None:
        self.peers.close()
        for end in (*self.ends, self.listener):
            end.close()


@pytest.fixture(params=["memory", "tcp", "shm"])
def endpoints(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Endpoints]:
    with closing(Endpoints(request.param, tmp_path)) as made:
        yield made


def messages(end: Connection, num: int) -> list[object]:
    return [decode(end.receive(timeout_s=TIMEOUT_S).header) for _ in range(num)]


def test_a_worker_that_does_not_read_delays_no_other(endpoints: Endpoints) -> None:
    slow, ready = endpoints.member(0), endpoints.member(1)
    for number in range(NUM):
        endpoints.peers.send_worker(0, 0, RequestDone(number), BODY)
    endpoints.peers.send_worker(1, 0, Ticked(1))
    assert messages(ready, 1) == [Ticked(1)]
    assert messages(slow, NUM) == [RequestDone(number) for number in range(NUM)]


def test_mapped_memory_that_waits_is_not_copied(tmp_path: Path) -> None:
    with closing(Endpoints("shm", tmp_path)) as endpoints:
        slow = endpoints.member(0)
        shared = endpoints.transport.allocate(1 << 20)
        assert slow.has_room(shared)
        for number in range(NUM):
            endpoints.peers.send_worker(0, 0, RequestDone(number), BODY)
        endpoints.peers.send_worker(0, 0, RequestDone(NUM), shared)
        messages(slow, NUM)
        body = slow.receive(timeout_s=TIMEOUT_S).body
        shared[:5] = b"later"
        assert bytes(body[:5]) == b"later"


def test_a_server_that_does_not_read_delays_no_worker(endpoints: Endpoints) -> None:
    said = [Follow(1, 0, "w" * 10_000, clock) for clock in range(200)]
    for message in said:
        endpoints.peers.send_server(1, message)
    assert messages(endpoints.accept(), len(said)) == said


def test_a_server_that_came_back_is_reached_again(endpoints: Endpoints) -> None:
    endpoints.peers.send_server(1, Follow(1, 0, "w", 0))
    endpoints.accept().close()
    for clock in range(1, 100):  # the first may be lost: the end of the connection is not noticed before
        endpoints.peers.send_server(1, Follow(1, 0, "w", clock))
    assert isinstance(messages(endpoints.accept(), 1)[0], Follow)

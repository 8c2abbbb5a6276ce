"""Many connections at once, and receivers that do not keep up: nothing is lost, and nothing piles up."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
from tests.transport.carriers import Carrier, Pair

from paceline.errors import DeadlineExceeded, PeerError
from paceline.transport import Connection

NUM_CONNECTIONS = 64
NUM_ROUNDS = 3
LARGE_BYTES = 300_000
MEBIBYTE = os.urandom(1 << 20)
MAX_PILE_BYTES = 100 << 20  # more than the buffers of any carrier


@pytest.fixture
def connections(carrier: Carrier) -> Iterator[list[tuple[Connection, Connection]]]:
    """Yield both ends of many connections to one listener."""
    with ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        listener = stack.enter_context(closing(carrier.transport.listen(carrier.address)))

        def connect(number: int) -> Connection:
            return carrier.transport.connect(listener.address, bytes([number]), timeout_s=30)

        clients = [stack.enter_context(closing(client)) for client in pool.map(connect, range(NUM_CONNECTIONS))]
        accepted = [stack.enter_context(closing(listener.accept(timeout_s=30))) for _ in clients]
        servers = {end.identity: end for end in accepted}
        yield [(client, servers[client.identity]) for client in clients]


def fill(end: Connection) -> int:
    """Send until the carrier takes no more, or far too much; returns how many frames it took whole."""
    for number in range(2 * MAX_PILE_BYTES // len(MEBIBYTE)):
        try:
            end.send(number.to_bytes(2), memoryview(MEBIBYTE), timeout_s=0.1)
        except DeadlineExceeded:
            return number
    raise AssertionError("the carrier takes any number of frames that are not read")


def bodies_of(connection: Connection) -> list[bytes]:
    """Small and large bodies, which no other connection sends."""
    mark = connection.identity
    return [mark * size for size in (1, LARGE_BYTES, 64) for _ in range(NUM_ROUNDS)]


def send_all(end: Connection) -> None:
    for number, body in enumerate(bodies_of(end)):
        end.send(bytes([number]), memoryview(body), timeout_s=30)


def echo_all(end: Connection) -> None:
    for _ in bodies_of(end):
        frame = end.receive(timeout_s=30)
        end.send(frame.header, frame.body, timeout_s=30)


def check_echoes(end: Connection) -> None:
    memory = memoryview(bytearray(LARGE_BYTES))
    for number, body in enumerate(bodies_of(end)):
        frame = end.receive(timeout_s=30, place=lambda _, size_bytes: memory[:size_bytes])
        assert frame.header == bytes([number])
        assert frame.body == body


def test_many_connections_send_and_receive_at_once(connections: list[tuple[Connection, Connection]]) -> None:
    assert len({client.identity for client, _ in connections}) == NUM_CONNECTIONS
    with ThreadPoolExecutor(3 * NUM_CONNECTIONS) as pool:
        work = [
            pool.submit(act, end)
            for client, server in connections
            for act, end in ((send_all, client), (echo_all, server), (check_echoes, client))
        ]
        for done in work:
            done.result(timeout=30)


def test_sender_is_bounded_by_a_receiver_that_does_not_read(pair: Pair) -> None:
    num_taken = fill(pair.client)
    assert num_taken * len(MEBIBYTE) < MAX_PILE_BYTES
    for number in range(num_taken):
        frame = pair.server.receive(timeout_s=30)
        assert frame.header == number.to_bytes(2)
        assert frame.body == MEBIBYTE
    with pytest.raises(PeerError):
        pair.server.receive(timeout_s=0.1)


def test_receiver_that_does_not_read_delays_no_other(connections: list[tuple[Connection, Connection]]) -> None:
    (stuck, _), *others = connections
    fill(stuck)
    for lively, server in others:
        lively.send(b"push", memoryview(bytes(10_000)), timeout_s=30)
        assert server.receive(timeout_s=30).body == bytes(10_000)

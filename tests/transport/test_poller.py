"""One thread waits for several connections: for frames, parts of frames, ends, and for what others want of it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.transport.carriers import Pair, connect_pair, make_carrier

from paceline.errors import ConnectionLost, DeadlineExceeded
from paceline.transport.base import EMPTY, Connection
from paceline.transport.poller import Poller, receive_all

PATIENCE_S = 30.0
POLLABLE = ["memory", "tcp", "shm", "faulty-tcp"]


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.close()
    poller.close()  # may be repeated
    poller.wake()  # and has no effect afterwards


@contextmanager
def pairs(kind: str, directory: Path) -> Iterator[tuple[Pair, Pair]]:
    carrier = make_carrier(kind, directory)
    first = connect_pair(carrier.transport, carrier.address)
    client = first.transport.connect(first.listener.address, b"worker 4", timeout_s=30)
    second = Pair(first.transport, first.listener, client, first.listener.accept(timeout_s=30))
    try:
        yield first, second
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("kind", POLLABLE)
def test_what_has_something_to_receive_is_found(kind: str, poller: Poller, tmp_path: Path) -> None:
    with pairs(kind, tmp_path) as (first, second):
        both = (first.server, second.server)
        assert poller.wait(both, 0.0) == []
        second.client.send(b"push", memoryview(b"gradient"), timeout_s=30)
        assert poller.wait(both, PATIENCE_S) == [second.server]
        assert second.server.receive(timeout_s=0).header == b"push"
        assert poller.wait(both, 0.0) == []
        first.client.send(b"pull", timeout_s=30)
        second.client.send(b"pull", timeout_s=30)
        found: set[Connection] = set()
        while len(found) < 2:
            found.update(poller.wait(both, PATIENCE_S))


@pytest.mark.parametrize("kind", POLLABLE)
def test_frames_that_were_read_ahead_are_found(kind: str, poller: Poller, tmp_path: Path) -> None:
    with pairs(kind, tmp_path) as (first, _):
        assert first.client.try_send([(b"1", EMPTY), (b"2", EMPTY)], timeout_s=30)
        assert poller.wait((first.server,), PATIENCE_S) == [first.server]
        assert first.server.receive(timeout_s=30).header == b"1"
        assert poller.wait((first.server,), PATIENCE_S) == [first.server]
        assert receive_all(first.server, timeout_s=0)[0].header == b"2"
        assert poller.wait((first.server,), 0.0) == []


@pytest.mark.parametrize("kind", POLLABLE)
def test_the_end_of_a_connection_is_found(kind: str, poller: Poller, tmp_path: Path) -> None:
    with pairs(kind, tmp_path) as (first, second):
        assert poller.wait((first.server, second.server), 0.0) == []
        first.client.close()
        assert poller.wait((first.server, second.server), PATIENCE_S) == [first.server]
        with pytest.raises(ConnectionLost):
            first.server.receive(timeout_s=0)
        first.server.close()
        assert first.server.fileno() is None
        assert poller.wait((second.server,), 0.0) == []


@pytest.mark.parametrize("kind", POLLABLE)
def test_a_connection_that_is_closed_here_ends_the_wait(kind: str, poller: Poller, tmp_path: Path) -> None:
    with pairs(kind, tmp_path) as (first, _):
        closing = threading.Timer(0.05, first.server.close)
        closing.start()
        assert poller.wait((first.server,), PATIENCE_S) == [first.server]
        closing.join(PATIENCE_S)


def test_another_thread_ends_the_wait_that_is_under_way_or_the_next_one(poller: Poller) -> None:
    poller.wake()
    assert poller.wait((), PATIENCE_S) == []
    waking = threading.Timer(0.05, poller.wake)
    waking.start()
    assert poller.wait((), PATIENCE_S) == []
    waking.join(PATIENCE_S)


def test_what_is_encrypted_cannot_be_waited_for_together(pair: Pair, poller: Poller) -> None:
    if pair.server.fileno() is None:  # TLS
        pair.client.send(b"push", timeout_s=30)
        assert poller.wait((pair.server,), 0.0) == []


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_timeout_of_zero_takes_part_of_a_body_and_leaves_the_rest(kind: str, poller: Poller, tmp_path: Path) -> None:
    with pairs(kind, tmp_path) as (first, _):
        body = memoryview(bytes(16 << 20))
        sending = threading.Thread(target=lambda: first.client.send(b"large", body, timeout_s=PATIENCE_S))
        sending.start()
        num_parts = 0
        while True:
            assert poller.wait((first.server,), PATIENCE_S) == [first.server]
            try:
                frame = first.server.receive(timeout_s=0)
                break
            except DeadlineExceeded:
                num_parts += 1
        assert num_parts
        assert frame.body == body
        sending.join(PATIENCE_S)


def test_any_number_of_notices_of_freed_memory_does_not_hold_the_reader(poller: Poller, tmp_path: Path) -> None:
    with pairs("shm", tmp_path) as (first, _):
        memories = [first.transport.allocate(100) for _ in range(5)]
        for memory in memories:
            first.client.send(b"push", memory, timeout_s=30)
            first.server.receive(timeout_s=30)
        del memory, memories
        first.client.send(b"pull", timeout_s=30)  # behind the notices, which take a call each
        num_calls = 0
        while True:
            assert poller.wait((first.server,), PATIENCE_S) == [first.server]
            num_calls += 1
            try:
                assert first.server.receive(timeout_s=0).header == b"pull"
                break
            except DeadlineExceeded:
                pass
        assert num_calls == 6

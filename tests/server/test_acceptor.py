"""A server's thread reads its connections itself, and no peer holds it up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.transport.carriers import make_carrier

from paceline.errors import ConnectionLost
from paceline.server.connections import LARGE_COUNTS, MOST_AHEAD, Acceptor, Incoming
from paceline.transport.base import EMPTY, Connection, Transport
from paceline.transport.deadline import Deadline
from paceline.transport.frames import Kind, Prefix, encode_prefix
from paceline.transport.stream import StreamConnection
from paceline.wire.connection import SMALL_IN_A_ROW

PATIENCE_S = 30.0
LARGE = 1 << 20


@contextmanager
def acceptor(kind: str, directory: Path) -> Iterator[tuple[Acceptor, Transport]]:
    carrier = make_carrier(kind, directory)
    made = Acceptor(carrier.transport.listen(carrier.address))
    made.open()
    try:
        yield made, carrier.transport
    finally:
        made.close()


@contextmanager
def client(made: Acceptor, transport: Transport, name: bytes) -> Iterator[Connection]:
    connection = transport.connect(made.listener.address, name, timeout_s=PATIENCE_S)
    try:
        yield connection
    finally:
        connection.close()


def heard(made: Acceptor) -> tuple[bytes, bytes]:
    """The sender of the next frame, and its header."""
    item = made.get(PATIENCE_S)
    assert isinstance(item, Incoming)
    assert item.frame is not None, item.problem
    return item.connection.identity, item.frame.header


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline-read-")]


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm"])
def test_small_frames_need_no_thread(kind: str, tmp_path: Path) -> None:
    with acceptor(kind, tmp_path) as (made, transport), client(made, transport, b"worker 3") as worker:
        for header in (b"push", b"clock"):
            worker.send(header, memoryview(b"gradient"), timeout_s=PATIENCE_S)
            assert heard(made) == (b"worker 3", header)
        assert not reader_threads()
        worker.close()
        end = made.get(PATIENCE_S)
        assert isinstance(end, Incoming)
        assert end.frame is None
        assert made.get(0.0) is None


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_large_body_is_received_by_a_thread(kind: str, tmp_path: Path) -> None:
    with acceptor(kind, tmp_path) as (made, transport), client(made, transport, b"worker 3") as worker:
        body = memoryview(bytes(LARGE))
        for header in (b"push", b"push again"):
            sending = threading.Thread(target=lambda h=header: worker.send(h, body, timeout_s=PATIENCE_S))
            sending.start()
            assert heard(made) == (b"worker 3", header)
            sending.join(PATIENCE_S)
        assert len(reader_threads()) == 1


def enter_large_bodies(made: Acceptor, worker: Connection) -> threading.Thread:
    """Have a large body received; return the thread that reads from then on."""
    sending = threading.Thread(target=lambda: worker.send(b"push", memoryview(bytes(LARGE)), timeout_s=PATIENCE_S))
    sending.start()
    heard(made)
    sending.join(PATIENCE_S)
    [reader] = [thread for thread in threading.enumerate() if thread.name.startswith("paceline-read-")]
    return reader


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm"])
def test_the_thread_ends_once_bodies_are_small_again(kind: str, tmp_path: Path) -> None:
    with acceptor(kind, tmp_path) as (made, transport), client(made, transport, b"worker 3") as worker:
        for _ in range(2):
            reader = enter_large_bodies(made, worker)
            # The thread may have ended before all of these are sent: they are heard in order even so.
            headers = [b"%d" % number for number in range(SMALL_IN_A_ROW + 5)]
            for header in headers:
                worker.send(header, timeout_s=PATIENCE_S)
            assert [heard(made)[1] for _ in headers] == headers
            for _ in range(2 * SMALL_IN_A_ROW):  # frames that come many at a time are not counted
                worker.send(b"clock", timeout_s=PATIENCE_S)
                assert heard(made)[1] == b"clock"
            reader.join(PATIENCE_S)
            assert not reader.is_alive()
        assert made.get(0.0) is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_connection_that_is_dropped_as_its_thread_ends_is_said_to_have_ended_once(when: str, tmp_path: Path) -> None:
    with acceptor("tcp", tmp_path) as (made, transport), client(made, transport, b"worker 3") as worker:
        reader = enter_large_bodies(made, worker)
        for _ in range(SMALL_IN_A_ROW):  # one by one: each is received by itself
            worker.send(b"clock", timeout_s=PATIENCE_S)
            heard(made)
        reader.join(PATIENCE_S)
        if when == "after":
            assert made.get(0.0) is None
        [connection] = made.connections()
        made.drop(connection)
        end = made.get(PATIENCE_S)
        assert isinstance(end, Incoming)
        assert end.frame is None
        assert made.get(0.0) is None


def test_the_thread_reads_no_further_ahead_than_frames_are_taken(tmp_path: Path) -> None:
    with acceptor("tcp", tmp_path) as (made, transport), client(made, transport, b"worker 3") as worker:
        most, headers, body = MOST_AHEAD // LARGE_COUNTS, [b"%d" % number for number in range(60)], bytes(LARGE)

        def send_all() -> None:
            for header in headers:
                worker.send(header, memoryview(body), timeout_s=PATIENCE_S)

        sending = threading.Thread(target=send_all)
        sending.start()
        while made.num_waiting() < most:
            sending.join(0.01)
        for _ in range(100):
            sending.join(0.001)
            assert made.num_waiting() <= most + 1  # the first may have been read by this thread
        assert [heard(made)[1] for _ in headers] == headers
        sending.join(PATIENCE_S)
        assert not sending.is_alive()


def test_the_thread_ends_though_what_it_has_read_is_not_taken(tmp_path: Path) -> None:
    with acceptor("tcp", tmp_path) as (made, transport), client(made, transport, b"worker 3") as worker:
        reader = enter_large_bodies(made, worker)
        for _ in range(MOST_AHEAD + 1):
            worker.send(b"clock", timeout_s=PATIENCE_S)
    reader.join(PATIENCE_S)
    assert not reader.is_alive()


@pytest.mark.parametrize("body_bytes", [0, 100, LARGE])
def test_a_part_of_a_frame_delays_no_other_peer(body_bytes: int, tmp_path: Path) -> None:
    with (
        acceptor("tcp", tmp_path) as (made, transport),
        client(made, transport, b"slow") as slow,
        client(made, transport, b"worker 3") as worker,
    ):
        assert isinstance(slow, StreamConnection)
        frame = encode_prefix(Prefix(Kind.INLINE, 4, body_bytes)) + b"push" + bytes(body_bytes)
        middle = len(frame) - max(2, body_bytes - 50)
        slow._channel.write([frame[:middle]], Deadline.after(PATIENCE_S))
        for _ in range(3):
            worker.send(b"pull", timeout_s=PATIENCE_S)
            assert heard(made) == (b"worker 3", b"pull")
        rest = threading.Thread(target=slow._channel.write, args=([frame[middle:]], Deadline.after(PATIENCE_S)))
        rest.start()
        assert heard(made) == (b"slow", b"push")
        rest.join(PATIENCE_S)


def test_one_that_never_stops_sending_delays_no_other_peer(tmp_path: Path) -> None:
    with (
        acceptor("memory", tmp_path) as (made, transport),
        client(made, transport, b"busy") as busy,
        client(made, transport, b"worker 3") as worker,
    ):
        busy.try_send([(b"push", EMPTY)] * 1000, timeout_s=PATIENCE_S)
        assert heard(made)[0] == b"busy"
        worker.send(b"pull", timeout_s=PATIENCE_S)
        assert b"worker 3" in [heard(made)[0] for _ in range(200)]


def test_items_that_bring_new_ones_do_not_keep_a_peer_waiting(tmp_path: Path) -> None:
    with acceptor("memory", tmp_path) as (made, transport), client(made, transport, b"worker 3") as worker:
        worker.send(b"first", timeout_s=PATIENCE_S)
        heard(made)
        worker.send(b"push", timeout_s=PATIENCE_S)
        made.put("again")
        items: list[object] = []
        while not isinstance(item := made.get(PATIENCE_S), Incoming):
            made.put(item)
            items.append(item)
            assert len(items) < 1000


def test_a_connection_that_is_dropped_is_said_to_have_ended_once(tmp_path: Path) -> None:
    with acceptor("tcp", tmp_path) as (made, transport), client(made, transport, b"worker 3") as worker:
        worker.send(b"push", timeout_s=PATIENCE_S)
        item = made.get(PATIENCE_S)
        assert isinstance(item, Incoming)
        for _ in range(2):
            made.drop(item.connection)
        end = made.get(PATIENCE_S)
        assert isinstance(end, Incoming)
        assert end.frame is None
        assert made.get(0.0) is None
        assert made.connections() == []


def test_frames_that_have_arrived_come_before_the_death_of_their_sender(tmp_path: Path) -> None:
    with acceptor("shm", tmp_path) as (made, transport), client(made, transport, b"worker 3") as worker:
        worker.send(b"first", timeout_s=PATIENCE_S)
        heard(made)
        worker.send(b"push", timeout_s=PATIENCE_S)
        made.put("it has died")
        assert made.num_waiting() == 2
        assert heard(made) == (b"worker 3", b"push")
        assert made.get(PATIENCE_S) == "it has died"
        assert made.get(0.0) is None


def test_a_connection_that_comes_too_late_is_ended(tmp_path: Path) -> None:
    with acceptor("memory", tmp_path) as (made, transport):
        listener = transport.listen("memory://beside")
        worker = transport.connect(listener.address, b"worker 3", timeout_s=PATIENCE_S)
        made.close()
        made._admit(listener.accept(timeout_s=PATIENCE_S))  # by a thread that was slower than `close` waits for it
        with pytest.raises(ConnectionLost):
            worker.receive(timeout_s=PATIENCE_S)
        listener.close()

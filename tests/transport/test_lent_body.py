"""Bodies that are sent from memory which changes: what arrives is what was there when they were lent."""

from __future__ import annotations

import threading

import pytest
from tests.transport.carriers import Carrier, connect_pair

from paceline.errors import ConnectionLost, DeadlineExceeded
from paceline.transport.base import Connection
from paceline.transport.buffers import LentMemory, SendsLent

SIZE = 48 << 20  # more than kernels keep on the way
PATIENCE_S = 60.0


def begin(connection: Connection) -> memoryview:
    """Receive the beginning of a body; return its memory."""
    placed: list[memoryview] = []

    def place(header: bytes, size_bytes: int) -> memoryview:
        placed.append(memoryview(bytearray(size_bytes)))
        return placed[0]

    while not placed:
        with pytest.raises(DeadlineExceeded):
            connection.receive(timeout_s=0.0, place=place)
    return placed[0]


@pytest.mark.parametrize("carrier", ["tcp", "tls"], indirect=True)
def test_a_body_that_is_taken_back_in_the_middle_arrives_as_it_was(carrier: Carrier) -> None:
    pair = connect_pair(carrier.transport, carrier.address)
    values = bytearray(b"ab" * (SIZE // 2))
    memory = LentMemory(memoryview(values))
    assert isinstance(pair.client, SendsLent)
    arguments = {"header": b"values", "body": memory.lend(1), "timeout_s": PATIENCE_S}
    sending = threading.Thread(target=pair.client.send_lent, kwargs=arguments)
    sending.start()
    received = begin(pair.server)
    memory.take_back()
    values[:] = bytes(SIZE)
    memory.take_back()
    frame = pair.server.receive(timeout_s=PATIENCE_S)
    sending.join(PATIENCE_S)
    assert frame.header == b"values"
    assert bytes(received) == (b"ab" * (SIZE // 2))[1:]
    pair.close()


@pytest.mark.parametrize("carrier", ["tcp", "tls"], indirect=True)
def test_a_lent_body_that_is_not_taken_ends_the_connection_in_time(carrier: Carrier) -> None:
    pair = connect_pair(carrier.transport, carrier.address)
    memory = LentMemory(memoryview(bytearray(SIZE)))
    assert isinstance(pair.client, SendsLent)
    with pytest.raises(DeadlineExceeded, match=r"waited 0.3 s for .* to take a frame; sent "):
        pair.client.send_lent(b"values", memory.lend(), timeout_s=0.3)
    with pytest.raises(ConnectionLost, match="only in part"):
        pair.client.send_lent(b"values", memory.lend(), timeout_s=PATIENCE_S)
    pair.close()


def test_what_waits_for_lent_bodies_is_called_once_when_all_have_left() -> None:
    memory, called = LentMemory(memoryview(bytearray(8))), list[str]()
    memory.when_left(lambda: called.append("then"))
    first, second = memory.lend(), memory.lend(4)
    first.note_left()
    assert called == []
    second.note_left()
    memory.lend().note_left()
    assert called == ["then"]
    memory.when_left(lambda: called.append("never"))
    late = memory.lend()
    memory.take_back()
    late.note_left()
    memory.lend().note_left()
    assert called == ["then"]

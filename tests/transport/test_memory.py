"""What is peculiar to memory: allocated bodies are handed over as they are."""

from contextlib import closing

import pytest
from tests.transport.carriers import connect_pair

from paceline.errors import PeerError
from paceline.transport import MemoryTransport


def test_allocated_body_is_the_senders_memory() -> None:
    with closing(connect_pair(MemoryTransport(), "memory://server-0")) as pair:
        memory = pair.transport.allocate(100)
        pair.client.send(b"push", memory[10:20], timeout_s=30)
        body = pair.server.receive(timeout_s=30).body
        memory[10:20] = b"0123456789"
        assert bytes(body) == b"0123456789"


def test_allocated_body_is_not_placed() -> None:
    with closing(connect_pair(MemoryTransport(), "memory://server-0")) as pair:
        memory = pair.transport.allocate(100)
        pair.client.send(b"push", memory, timeout_s=30)
        body = pair.server.receive(timeout_s=30, place=lambda *_: memoryview(bytearray(100))).body
        memory[:4] = b"late"
        assert bytes(body[:4]) == b"late"


def test_memory_allocated_by_another_transport_is_copied() -> None:
    with closing(connect_pair(MemoryTransport(), "memory://server-0")) as pair:
        memory = MemoryTransport().allocate(100)
        pair.client.send(b"push", memory, timeout_s=30)
        memory[:4] = b"late"
        assert bytes(pair.server.receive(timeout_s=30).body) == bytes(100)


def test_instances_do_not_meet() -> None:
    with (
        closing(MemoryTransport().listen("memory://server-0")) as listener,
        pytest.raises(PeerError, match="no listener"),
    ):
        MemoryTransport().connect(listener.address, b"", timeout_s=1)

"""The memory carrier that maps: receivers have a view of their own, as they have between processes."""

from __future__ import annotations

import gc
import os
from contextlib import closing

import pytest
from tests.transport.carriers import Pair, connect_pair

from paceline.transport.memory import MemoryTransport
from paceline.transport.segments import PeerMemory

PATIENCE_S = 30.0


def connected() -> Pair:
    return connect_pair(MemoryTransport(maps=True), "memory://server-0")


def test_what_a_receiver_writes_stays_its_own_and_shows_as_written() -> None:
    with closing(connected()) as pair:
        values = pair.transport.allocate(8192)
        values[:5] = b"first"
        pair.server.send(b"values", values, timeout_s=PATIENCE_S)
        seen = pair.client.receive(timeout_s=PATIENCE_S).body
        mapping = seen.obj
        assert isinstance(mapping, PeerMemory)
        assert not mapping.was_written()
        values[:5] = b"later"
        assert bytes(seen[:5]) == b"later"
        seen[:1] = b"X"
        assert (bytes(seen[:5]), bytes(values[:5])) == (b"Xater", b"later")
        assert mapping.was_written()
        mapping.reread()
        assert bytes(seen[:5]) == b"later"


def test_a_region_is_mapped_once_and_for_as_long_as_it_lives() -> None:
    with closing(connected()) as pair:
        for number in range(3):
            memory = pair.transport.allocate(4096)
            memory[0] = number
            for part in (memory, memory[:100]):
                pair.client.send(b"push", part, timeout_s=PATIENCE_S)
            first, second = (pair.server.receive(timeout_s=PATIENCE_S).body for _ in range(2))
            assert first.obj is second.obj
            assert (first[0], second.nbytes) == (number, 100)
            del memory, part, first, second
            gc.collect()
        assert len(pair.server._mappings._mapped) <= 2  # the last, and the one before it until another body comes


def test_a_region_that_cannot_be_mapped_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, size_bytes: int) -> PeerMemory:
        raise OSError(12, os.strerror(12))

    monkeypatch.setattr(PeerMemory, "of", refuse)
    with closing(connected()) as pair:
        memory = pair.transport.allocate(4096)
        memory[:5] = b"alive"
        pair.client.send(b"push", memory, timeout_s=PATIENCE_S)
        body = pair.server.receive(timeout_s=PATIENCE_S).body
        memory[:5] = b"later"
        assert bytes(body[:5]) == b"alive"

"""Memory of a peer, mapped here: what this process writes is noticed wherever it is, and can be forgotten."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.transport import segments
from paceline.transport.segments import PeerMemory, create_memory

NUM_PAGES = 5
SIZE_BYTES = NUM_PAGES * mmap.PAGESIZE - 100


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = create_memory(SIZE_BYTES)
    yield made
    os.close(made)


@pytest.fixture
def memory(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerMemory]:
    monkeypatch.setattr(segments, "_STRETCH_PAGES", 2)  # so that a few pages are several stretches
    with closing(PeerMemory(descriptor, SIZE_BYTES, access=mmap.ACCESS_COPY)) as mapped:
        yield mapped


def test_what_is_only_read_was_not_written(memory: PeerMemory, descriptor: int) -> None:
    assert not memory.was_written()
    assert memory[:] == bytes(SIZE_BYTES)
    os.pwrite(descriptor, b"peer", 0)

    assert memory[:4] == b"peer"
    assert not memory.was_written()


@pytest.mark.parametrize("offset", [0, *(page * mmap.PAGESIZE + 1 for page in range(1, NUM_PAGES)), SIZE_BYTES - 1])
def test_a_write_to_any_page_is_noticed_and_forgotten(memory: PeerMemory, descriptor: int, offset: int) -> None:
    memory[offset] = 1
    os.pwrite(descriptor, b"\2", offset)

    assert memory.was_written_anywhere()
    assert memory[offset] == 1
    memory.reread()
    assert not memory.was_written_anywhere()
    assert memory[offset] == 2
    assert not memory.was_written_anywhere()


@pytest.mark.parametrize("page", range(NUM_PAGES))
def test_every_page_has_its_turn_and_named_ones_every_time(memory: PeerMemory, page: int) -> None:
    memory[page * mmap.PAGESIZE] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + page * mmap.PAGESIZE

    assert [memory.was_written() for _ in range(6)] == [turn % 3 == page // 2 for turn in range(6)]
    assert all(memory.was_written([address]) for _ in range(3))


def test_where_the_system_does_not_tell_it_may_have_been_written(
    memory: PeerMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(segments, "_PAGEMAP", str(tmp_path / "none"))
    assert memory.was_written()

    (tmp_path / "empty").touch()
    monkeypatch.setattr(segments, "_PAGEMAP", str(tmp_path / "empty"))
    assert memory.was_written()

"""The journal of a server: what was written down whole is found again, whatever the process was doing when it ended."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from inspect import get_annotations
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.consistency import ssp
from paceline.core.events import Declared, Died, Timeout, Unapplied
from paceline.core.messages import Clock, Push, PushId, Sender
from paceline.core.server import ServerEvent
from paceline.server import journal as journals
from paceline.server import recovery
from paceline.server.journal import (
    COLD,
    COLD_BYTES,
    FORMAT,
    JOURNAL,
    JOURNAL_BYTES,
    SNAPSHOT_AFTER_BYTES,
    SNAPSHOTS,
    START_BYTES,
    Asked,
    Journal,
    JournalFull,
    OtherFormat,
    Written,
    counts,
)
from paceline.update import lasting

EVENTS = (
    Push(PushId(1, 0, 0, 5), "w", 3, 4),
    Clock(Sender(1, 2, 0), 7, (("w", 3, 5),)),
    Declared("w", ssp(3), keyed=True),
    Unapplied("w", (PushId(1, 0, 0, 5), PushId(1, 1, 0, 5)), "no"),
    Died(1, 0, "killed"),
    Timeout(),
    Asked(1, 0, b"\x00request"),
)


@dataclass
class Room:
    """Memory that outlives a journal; `room` bounds it."""

    regions: dict[str, memoryview] = field(default_factory=dict[str, memoryview])
    room: int = 1 << 20

    def region(self, name: str, size_bytes: int) -> memoryview:
        if name not in self.regions:
            if sum(map(len, self.regions.values())) + size_bytes > self.room:
                raise OSError(28, "No space left on device")
            self.regions[name] = memoryview(bytearray(size_bytes))
        return self.regions[name]

    def has(self, name: str) -> bool:
        return name in self.regions

    def drop(self, name: str) -> None:
        self.regions.pop(name, None)

    def copy(self) -> Room:
        """Return the memory as a process finds it that comes after one that ends now."""
        return Room({name: memoryview(bytearray(region)) for name, region in self.regions.items()}, self.room)


def begun(size_bytes: int = 1 << 12) -> tuple[Room, Journal]:
    memory = Room()
    journal = Journal(memory, size_bytes)
    assert journal.is_new
    journal.write_snapshot(b"at the start")
    return memory, journal


def found(memory: Room) -> tuple[bytes, list[object], list[float]]:
    state, entries = Journal(memory).read()
    return state, [entry.written for entry in entries], [entry.now for entry in entries]


def test_what_was_written_down_is_found_in_order() -> None:
    memory, journal = begun()
    for number, event in enumerate(EVENTS):
        journal.append(event, float(number))
    assert found(memory) == (b"at the start", list(EVENTS), [float(number) for number in range(len(EVENTS))])


def test_entries_after_a_snapshot_count_and_those_before_do_not() -> None:
    memory, journal = begun()
    for event in EVENTS:
        journal.append(event, 0.0)
    journal.write_snapshot(b"later, and longer than the one before")
    assert found(memory) == (b"later, and longer than the one before", [], [])
    journal.append(Timeout(), 1.0)
    assert found(memory) == (b"later, and longer than the one before", [Timeout()], [1.0])
    journal.write_snapshot(b"x" * 1000)
    assert found(memory) == (b"x" * 1000, [], [])


@given(st.lists(st.sampled_from([*EVENTS, b"a", b"b" * 300]), max_size=40), st.integers(0, 10))
def test_every_successor_finds_what_the_one_before_wrote(told: list[object], lives: int) -> None:
    memory, journal = begun(1 << 16)
    state, since = b"at the start", list[object]()
    for number, one in enumerate(told):
        if isinstance(one, bytes):
            journal.write_snapshot(one)
            state, since = one, []
        else:
            journal.append(one, 0.0)
            since.append(one)
        if lives and number % lives == 0:
            memory = memory.copy()
            journal = Journal(memory)
            assert [entry.written for entry in journal.read()[1]] == since
    assert found(memory)[:2] == (state, since)


@pytest.mark.parametrize("torn", [1, 9, 30])
def test_an_entry_that_is_torn_and_all_behind_it_do_not_count(torn: int) -> None:
    memory, journal = begun()
    journal.append(EVENTS[0], 0.0)
    before = len(bytes(memory.regions[JOURNAL]).rstrip(b"\0"))
    journal.append(EVENTS[1], 0.0)
    memory.regions[JOURNAL][before + torn] ^= 0xFF
    assert found(memory)[1] == [EVENTS[0]]


def test_a_snapshot_that_is_torn_leaves_the_one_before_and_all_entries_since() -> None:
    memory, journal = begun()
    journal.append(EVENTS[0], 0.0)
    after = memory.copy()
    Journal(after).read()
    journal.write_snapshot(b"torn")
    torn = memory.regions[SNAPSHOTS[1]]
    torn[torn.tobytes().index(b"torn")] ^= 0xFF
    assert found(memory)[:2] == found(after)[:2] == (b"at the start", [EVENTS[0]])


def test_a_snapshot_is_due_before_room_is_short_and_what_has_none_is_refused() -> None:
    _, journal = begun()
    while not journal.wants_snapshot:
        journal.append(EVENTS[0], 0.0)
    with pytest.raises(JournalFull, match="have no room"):
        journal.append(Died(1, 0, "x" * 4096), 0.0)


@pytest.mark.parametrize(("state_bytes", "least"), [(0, SNAPSHOT_AFTER_BYTES), (1 << 14, 1 << 17)])
def test_a_snapshot_is_due_before_a_successor_would_have_much_to_replay(state_bytes: int, least: int) -> None:
    journal = Journal(Room(room=1 << 24), JOURNAL_BYTES)
    journal.write_snapshot(bytes(state_bytes))
    size_bytes = 0
    while not journal.wants_snapshot:
        journal.append(Died(1, 0, "x" * 1000), 0.0)
        size_bytes += 1000
    assert 0.9 * least < size_bytes <= least < JOURNAL_BYTES // 2


def test_without_memory_for_a_snapshot_the_older_one_stays() -> None:
    memory, journal = begun()
    journal.append(EVENTS[0], 0.0)
    with pytest.raises(OSError, match="No space"):
        journal.write_snapshot(bytes(1 << 20))
    assert found(memory)[:2] == (b"at the start", [EVENTS[0]])


def test_the_process_that_starts_successors_can_read_how_far_a_server_came_and_why_it_keeps_nothing() -> None:
    memory, journal = begun()
    journal.append(EVENTS[0], 0.0)
    assert counts(bytes(memory.regions[JOURNAL][:START_BYTES])) == (2, 0)
    journal.note_resumed()
    journal.append(EVENTS[1], 0.0)
    assert counts(bytes(memory.regions[JOURNAL][:START_BYTES])) == (3, 2)
    journal.close("a rule keeps a state of its own")
    assert set(memory.regions) == {COLD}
    assert bytes(memory.regions[COLD]).rstrip(b"\0") == b"a rule keeps a state of its own"
    assert len(memory.regions[COLD]) == COLD_BYTES


def test_what_is_kept_no_more_is_not_taken_up_where_the_keeper_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(110, "no answer")

    memory, journal = begun()
    journal.append(EVENTS[0], 0.0)
    monkeypatch.setattr(Room, "drop", refuse)
    journal.close("there is no memory")
    assert counts(bytes(memory.regions[JOURNAL][:START_BYTES])) == (0, 0)


def test_every_event_of_a_server_can_be_written_down() -> None:
    assert set(get_args(ServerEvent)) <= set(journals._CODEC.kinds)


def shape_of(classes: Iterable[type]) -> list[str]:
    """The classes of what is written, their fields and what these hold."""
    return sorted(f"{kind.__name__} {fields_of(kind)}" for kind in classes)


def fields_of(kind: type) -> list[tuple[str, str]]:
    """The fields of a struct or dataclass, and what they hold as it is written."""
    if not issubclass(kind, msgspec.Struct):
        return [(each.name, str(each.type)) for each in fields(kind)]
    hints = {name: hint for base in reversed(kind.__mro__) for name, hint in get_annotations(base).items()}
    return [(name, str(hints[name])) for name in kind.__struct_fields__]


def test_what_a_server_leaves_behind_has_a_format_of_its_own() -> None:
    """When this fails, no server can be followed by one of this version: count `FORMAT` up, and note both here."""
    codecs = (recovery._CORE, recovery._REQUESTS, recovery._WORK, recovery._CALLS, recovery._DECLARATIONS)
    tables = [lasting._SHARD_NUMBERS, lasting._ROW_NUMBERS, shape_of([lasting.ShardSettings])]
    shape = repr([shape_of(get_args(Written)), [shape_of(codec._names) for codec in codecs], tables])
    assert (FORMAT, hashlib.sha256(shape.encode()).hexdigest()[:16]) == (7, "0ca2607b7ead560d")


def test_a_journal_of_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Room()
    monkeypatch.setattr("paceline.server.journal.FORMAT", 0)
    Journal(memory, 1 << 12).write_snapshot(b"state")
    monkeypatch.undo()
    with pytest.raises(OtherFormat, match=f"it has format 0, expected {FORMAT}"):
        Journal(memory).read()

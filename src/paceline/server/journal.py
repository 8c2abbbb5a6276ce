"""The journal of a server: each change of its state is written down before it takes effect (write-ahead).

A process that goes on in the server's place restores the newest snapshot and replays the entries after it. Both lie in
memory that outlives the process. An entry counts once its length and checksum are written, which is done last.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from paceline.core import events, messages
from paceline.core.server import ServerEvent
from paceline.core.work_queue import Life
from paceline.errors import PacelineError, ProtocolBug
from paceline.wire.messages import MessageCodec

# Of all that a server leaves to its successor: entries, snapshots, and the memory of tables. A program of another
# format cannot go on with it. A test says when it has changed.
FORMAT: Final = 7
JOURNAL: Final = "journal"
SNAPSHOTS: Final = "snapshot-0", "snapshot-1"
COLD: Final = "cold"  # why no process can go on in this one's place; absent or empty while one can
COLD_BYTES: Final = 1024
LISTENER: Final = "listener"  # the socket on which workers connect: they wait there while another process comes up
START_BYTES: Final = 16  # of the journal, which `counts` reads
JOURNAL_BYTES: Final = 1 << 22
# At the start, for others to read: how many entries were ever written, and how many when a successor began to serve.
_COUNTS: Final = struct.Struct("<QQ")
_FORMAT: Final = struct.Struct("<Q")  # after these
_ENTRIES: Final = _COUNTS.size + _FORMAT.size  # where the first entry begins
_COUNT: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<II")  # of an entry: its length, and checksum, behind this
_STAMP: Final = struct.Struct("<Qd")  # its number and time, before what it says
_SNAPSHOT: Final = struct.Struct("<QII")  # number of the first entry after it, never 0; length; checksum
_SLACK: Final = 2  # how much larger than needed memory for snapshots is made
# A successor replays some 30,000 entries a second, while all workers wait. So a snapshot is due after so many bytes,
# some 400 entries; where the state itself is large, after so many times its size, as a snapshot costs more then.
SNAPSHOT_AFTER_BYTES: Final = 1 << 15
_SNAPSHOT_AFTER_STATES: Final = 8


class OtherFormat(PacelineError):
    """A journal was left by a program that writes another one."""


class JournalFull(PacelineError):
    """An entry is too large for the memory of a journal."""


class Asked(msgspec.Struct, frozen=True):
    """A request of a worker that changes what is kept beside the core; `request` is its message as on the wire."""

    worker: int
    incarnation: int
    request: bytes

    @property
    def life(self) -> Life:
        """The worker that made it."""
        return self.worker, self.incarnation


class Began(msgspec.Struct, frozen=True):
    """What changes a table otherwise than by a push, which another process could not finish: a snapshot follows it."""

    table: str
    what: str


Written = ServerEvent | Asked | Began


class Regions(Protocol):
    """Memory that outlives this process, by name."""

    def region(self, name: str, size_bytes: int) -> memoryview:
        """Return the memory of this name, as it was left; else new memory of this size, zeroed."""
        ...

    def has(self, name: str) -> bool:
        """Return whether there is memory of this name."""
        ...

    def drop(self, name: str) -> None:
        """Forget the memory of this name."""
        ...


# The position is the kind byte. One process writes, another of the same program reads.
_CODEC: Final = MessageCodec[Written](
    messages.Push,
    messages.Pull,
    messages.WholeStep,
    messages.Clock,
    messages.Taken,
    messages.Join,
    messages.Leave,
    messages.Follow,
    messages.Closed,
    events.Declared,
    events.Changed,
    events.InvalidPush,
    events.Unapplied,
    events.Disconnected,
    events.Died,
    events.Timeout,
    events.Woke,
    events.Resumed,
    Asked,
    Began,
    events.NotFinite,
    events.ClippedPush,
    events.Measured,
)


def encode_written(written: Written) -> bytes:
    """Return what is written down as bytes, for a process of the same program."""
    return _CODEC.encode(written)


def decode_written(content: bytes) -> Written:
    """Return what `encode_written` was given; raises PeerError for other bytes."""
    return _CODEC.decode(content)


class Entry(msgspec.Struct, frozen=True):
    """What was written down, and when it happened (monotonic seconds of this machine)."""

    written: Written
    now: float


@dataclass(slots=True)
class Journal:
    """Entries since the newest snapshot, and the two newest snapshots. Used by one thread.

    Where entries begin anew after a snapshot, the older ones lie behind them until they are overwritten: numbers tell
    them apart. A snapshot overwrites the one before the last, so that one is always whole.

    Args:
        memory: outlives this process.
        size_bytes: of the entries; a snapshot is due when they fill half of it, at the latest.
    """

    memory: Regions
    size_bytes: int = JOURNAL_BYTES
    _entries: memoryview = field(init=False)
    _end: int = _ENTRIES  # where the next entry goes
    _number: int = 0  # of the next entry
    _snapshot_after: int = SNAPSHOT_AFTER_BYTES

    def __post_init__(self) -> None:
        """Find the memory of the entries."""
        self._entries = self.memory.region(JOURNAL, self.size_bytes)
        self.size_bytes = self._entries.nbytes
        self._note_state(0)
        (self._number,) = _COUNT.unpack_from(self._entries, 0)
        if self.is_new:
            _FORMAT.pack_into(self._entries, _COUNTS.size, FORMAT)

    @property
    def is_new(self) -> bool:
        """Whether no other process has written here before."""
        return self._newest() is None

    @property
    def wants_snapshot(self) -> bool:
        """Whether the next entries may not find room without a snapshot, or a successor would replay for long."""
        return self._end > self._snapshot_after

    def append(self, written: Written, now: float) -> None:
        """Write down what is about to have an effect; raises JournalFull if there is no room."""
        content = _STAMP.pack(self._number, now) + _CODEC.encode(written)
        start = self._end + _HEAD.size
        stop = start + len(content)
        if stop > self.size_bytes:
            raise JournalFull(f"{len(content)} bytes have no room behind {start} of {self.size_bytes}")
        self._entries[start:stop] = content
        _HEAD.pack_into(self._entries, self._end, len(content), zlib.crc32(content))  # last: it counts from now on
        self._end, self._number = stop, self._number + 1
        _COUNT.pack_into(self._entries, 0, self._number)

    def write_snapshot(self, state: bytes) -> None:
        """Keep a state that has all entries so far in it; later ones are written from the start. Raises OSError."""
        name = SNAPSHOTS[self._newest() == SNAPSHOTS[0]]
        needed = _SNAPSHOT.size + len(state)
        if self.memory.has(name) and self.memory.region(name, needed).nbytes < needed:
            self.memory.drop(name)
        memory = self.memory.region(name, needed * _SLACK)
        _SNAPSHOT.pack_into(memory, 0, 0, 0, 0)  # not whole, until all of it is written
        memory[_SNAPSHOT.size : needed] = state
        _SNAPSHOT.pack_into(memory, 0, 0, len(state), zlib.crc32(state))
        self._number += 1  # else two snapshots without an entry between them would look alike
        _COUNT.pack_into(memory, 0, self._number)
        self._end = _ENTRIES
        self._note_state(len(state))

    def note_resumed(self) -> None:
        """Note that this process has done what the one before it had begun."""
        _COUNT.pack_into(self._entries, _COUNT.size, self._number)

    def close(self, reason: str) -> None:
        """Keep no more, and say why to the process that would start a successor."""
        # Here and now, as what follows needs an answer of that process: no successor takes up a state that is old.
        _COUNTS.pack_into(self._entries, 0, 0, 0)
        told = reason.encode(errors="replace")[:COLD_BYTES]
        with suppress(OSError):
            for name in (JOURNAL, *SNAPSHOTS, LISTENER):
                if self.memory.has(name):
                    self.memory.drop(name)
            self.memory.region(COLD, COLD_BYTES)[: len(told)] = told

    def read(self) -> tuple[bytes, list[Entry]]:
        """Return the newest snapshot and the entries after it; what is appended from now on follows these."""
        name = self._newest()
        if name is None:
            raise ProtocolBug("a journal without a snapshot cannot be read")
        (found,) = _FORMAT.unpack_from(self._entries, _COUNTS.size)
        if found != FORMAT:
            raise OtherFormat(f"it was left by another version of paceline: it has format {found}, expected {FORMAT}")
        memory = self.memory.region(name, 0)
        number, size_bytes, _ = _SNAPSHOT.unpack_from(memory, 0)
        entries = list(self._read_entries(number))
        return bytes(memory[_SNAPSHOT.size : _SNAPSHOT.size + size_bytes]), entries

    def _note_state(self, size_bytes: int) -> None:
        """Note how large a snapshot is: the next one is due after that."""
        wanted = max(SNAPSHOT_AFTER_BYTES, _SNAPSHOT_AFTER_STATES * size_bytes)
        self._snapshot_after = min(wanted, self.size_bytes // 2)

    def _read_entries(self, first: int) -> Generator[Entry]:
        """Yield the whole entries from this number on, and stand behind the last."""
        self._end, self._number = _ENTRIES, first
        position = _ENTRIES
        while position + _HEAD.size <= self.size_bytes:
            num_bytes, checksum = _HEAD.unpack_from(self._entries, position)
            start = position + _HEAD.size
            position = start + num_bytes
            content = bytes(self._entries[start:position])
            is_whole = len(content) == num_bytes > _STAMP.size
            if not is_whole or zlib.crc32(content) != checksum:
                return
            number, now = _STAMP.unpack_from(content)
            if number > self._number:
                return
            if number == self._number:
                yield Entry(_CODEC.decode(content[_STAMP.size :]), now)
                self._end, self._number = position, number + 1

    def _newest(self) -> str | None:
        """Return the name of the newest whole snapshot, or None."""
        found = {name: self._number_of(name) for name in SNAPSHOTS if self.memory.has(name)}
        best = max(found, key=lambda name: found[name], default=None)
        return best if best is not None and found[best] else None

    def _number_of(self, name: str) -> int:
        """Return the number of a snapshot; 0 if it is not whole."""
        memory = self.memory.region(name, 0)
        number, size_bytes, checksum = _SNAPSHOT.unpack_from(memory, 0)
        stop = _SNAPSHOT.size + size_bytes
        is_whole = stop <= memory.nbytes and zlib.crc32(memory[_SNAPSHOT.size : stop]) == checksum
        return number if is_whole else 0


def counts(start: bytes) -> tuple[int, int]:
    """Return how many entries a journal with this start has had, and how many when a successor began to serve.

    >>> counts(b"")
    (0, 0)
    """
    return _COUNTS.unpack_from(start, 0) if len(start) >= _COUNTS.size else (0, 0)

"""The log of a row table: what changed on one server, in order, for readers that follow it.

1. One thread appends, between two updates. An entry is what one update has changed: the new values of rows, and the ids
   of rows that are gone. Entries are numbered from 1, without gaps.
2. All rows at one moment, and then the entries after it in order, are the rows at every later moment, bit for bit.
3. The log has a bounded size: the oldest entries go first. A reader that has not had them is told, and begins anew.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import msgspec

from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

LEAST_LOG_BYTES: Final = 1 << 26
MOST_ANSWER_BYTES: Final = 1 << 22  # of one answer, unless one entry has more
UNREAD_S: Final = 600.0  # after which a log that is not read ends


class CursorExpired(UsageError):
    """The log does not have all entries any more that a reader lacks, or is another one."""


class LogEntry(msgspec.Struct, frozen=True):
    """What one update of a server has changed.

    Args:
        clock: every clock below was complete before.
        ids: (n,) int64, distinct: rows that are new or have changed.
        values: (n, width), theirs.
        removed: (m,) int64, distinct: rows that are gone, which read as the first values again.
    """

    clock: int
    ids: Tensor
    values: Tensor
    removed: Tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return self.ids.nbytes + self.values.nbytes + self.removed.nbytes


class LogRead(msgspec.Struct, frozen=True):
    """Entries in order, and where the log is behind them.

    Args:
        entries: those after the cursor.
        sequence: number of the last of them.
        clock: every clock below was complete at that place.
        is_all: there were no more at `read_s`.
        read_s: when they were read, of the monotonic clock.
    """

    entries: tuple[LogEntry, ...]
    sequence: int
    clock: int
    is_all: bool
    read_s: float


@final
class ChangeLog:
    """The changes of one row table on one server since the log began. One thread appends, any number read.

    Args:
        limit_bytes: of all entries; the newest one is kept whatever it has.
        clock: every clock below is complete.

    Example:
        >>> import torch
        >>> log = ChangeLog(LEAST_LOG_BYTES, clock=0)
        >>> log.append(torch.tensor([7]), torch.ones(1, 2), torch.tensor([], dtype=torch.int64))
        >>> found = log.read(0, wait_s=0.0)
        >>> found.sequence, found.entries[0].values
        (1, tensor([[1., 1.]]))
    """

    def __init__(self, limit_bytes: int, clock: int) -> None:
        self.name: Final = secrets.token_hex(8)  # tells it from the log of another life of this server
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._entries: deque[LogEntry] = deque()
        self._size_bytes = 0
        self._last = 0  # number of the newest entry
        self._clock = clock
        self._problem = ""  # why it has ended
        self._read_s = time.monotonic()

    @property
    def sequence(self) -> int:
        """The number of the newest entry."""
        return self._last

    @property
    def clock(self) -> int:
        """Every clock below is complete."""
        return self._clock

    @property
    def is_unread(self) -> bool:
        """Whether no reader has asked for a long time."""
        return time.monotonic() - self._read_s > UNREAD_S

    def note_read(self) -> None:
        """Note that a reader needs the log, though it does not read it yet."""
        self._read_s = time.monotonic()

    def append(self, ids: Tensor, values: Tensor, removed: Tensor) -> None:
        """Note what an update has changed; the tensors belong to the log from now on."""
        with self._changed:
            entry = LogEntry(self._clock, ids, values, removed)
            self._entries.append(entry)
            self._last += 1
            self._size_bytes += entry.size_bytes
            while self._size_bytes > self._limit_bytes and len(self._entries) > 1:
                self._size_bytes -= self._entries.popleft().size_bytes
            self._changed.notify_all()

    def note_clock(self, clock: int) -> None:
        """Note that every clock below is complete."""
        if clock > self._clock:
            with self._changed:
                self._clock = clock

    def read(self, since: int, wait_s: float, is_over: Callable[[], bool] = lambda: False) -> LogRead:
        """Return the entries after number `since`, as many as one answer may have; waits for one if there is none.

        Raises:
            CursorExpired: some of them are gone, or the log has ended.
        """
        with self._changed:
            self._read_s = time.monotonic()
            self._changed.wait_for(lambda: self._last > since or bool(self._problem) or is_over(), wait_s)
            self._read_s = time.monotonic()
            first = self._last - len(self._entries)  # number of the entry before the oldest
            if self._problem or not first <= since <= self._last:
                why = (
                    self._problem
                    or f"it has {len(self._entries)} changes before {self._last}, and {since} is not there"
                )
                raise CursorExpired(f"the log of changes does not go on from there: {why}")
            return self._read(since - first)

    def end(self, problem: str) -> None:
        """End the log: readers are told why, and begin anew."""
        with self._changed:
            self._problem = problem
            self._entries.clear()
            self._changed.notify_all()

    def wake(self) -> None:
        """Have those that wait look again at whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def _read(self, skip: int) -> LogRead:
        """Return what fits into one answer of the entries behind the first few."""
        found, size_bytes = list[LogEntry](), 0
        for index in range(skip, len(self._entries)):
            entry = self._entries[index]
            size_bytes += entry.size_bytes
            if found and size_bytes > MOST_ANSWER_BYTES:
                break
            found.append(entry)
        at = skip + len(found)
        is_all = at == len(self._entries)
        clock = self._clock if is_all else self._entries[at].clock
        return LogRead(tuple(found), self._last - len(self._entries) + at, clock, is_all, time.monotonic())

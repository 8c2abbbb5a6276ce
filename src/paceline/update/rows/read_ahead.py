"""Reading ahead in the files of a table: the pieces that its recorded order says are next, on a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final, final

import msgspec
import torch

from paceline.errors import DeadlineExceeded
from paceline.update.rows.access_order import AccessOrder
from paceline.update.rows.column import Stretch, Windows

if TYPE_CHECKING:
    from torch import Tensor

_MAX_PIECES: Final = 8  # that are read ahead at once
_SPARE: Final = 4  # one part in so many of the room is for what is read ahead, or about to be used again
_DEADLINE_S: Final = 120.0  # for what the disk is reading when its result is no longer wanted


class SpillReads(msgspec.Struct, frozen=True):
    """What a table in files has mapped for its pieces, in bytes of whole windows.

    Args:
        ahead_bytes: asked for ahead, and mapped before their piece began.
        late_bytes: asked for ahead, and not mapped yet when their piece began. This depends on how busy the machine is;
            the sum of both does not.
        waited_bytes: not asked for ahead, so that their piece waited for them.

    Example:
        >>> SpillReads(ahead_bytes=4096) + SpillReads(waited_bytes=8192)
        SpillReads(ahead_bytes=4096, late_bytes=0, waited_bytes=8192)
    """

    ahead_bytes: int = 0
    late_bytes: int = 0
    waited_bytes: int = 0

    def __add__(self, other: SpillReads) -> SpillReads:
        """Return the bytes of both together."""
        return SpillReads(
            self.ahead_bytes + other.ahead_bytes,
            self.late_bytes + other.late_bytes,
            self.waited_bytes + other.waited_bytes,
        )


class _Ahead(msgspec.Struct, frozen=True):
    """A piece that is being read ahead: its windows by column, their bytes, and how many of these were not mapped."""

    key: bytes
    units: Mapping[str, Tensor]
    size_bytes: int
    new_bytes: int
    reading: Future[None]


@final
class PieceReadAhead:
    """Maps the windows of the pieces that come next, where their order repeats. For one thread at a time.

    What is mapped counts from when its reading is asked for, so that no thread has to agree with another on how much
    there is. Order decides only what is read ahead: rows are read and written where they lie, whatever comes next.

    Args:
        table: its name, for messages.
        windows: of all columns, by name.
        block_rows: rows that are asked for together, no more than a window of any column has.
    """

    def __init__(self, table: str, windows: Mapping[str, Windows], block_rows: int) -> None:
        self._table = table
        self._windows = windows
        self._block_rows = block_rows
        self._order = AccessOrder(0)
        self._queue: deque[_Ahead] = deque()  # in the order of the pieces
        self._thread: ThreadPoolExecutor | None = None
        self._is_possible = True
        self._room_bytes = 0  # invariant: of this, no more than half is in the queue
        self._current: Mapping[str, Tensor] = {}  # windows of the last piece
        self.reads = SpillReads()

    def share(self, room_bytes: int, record_bytes: int) -> None:
        """Set how much may be mapped, and how large the recorded order may be; without one, nothing is read ahead."""
        if room_bytes < self._room_bytes:
            self.stop()
        self._room_bytes = room_bytes
        self._order.limit(record_bytes)

    def make_room(self, num_bytes: int) -> None:
        """Release windows if need be, so that so many bytes can be mapped, at most half of the room.

        What is read ahead stays, and with it, if there is room, what the last piece has used: the next one may use it.
        """
        if self._mapped_bytes + num_bytes <= self._room_bytes - self._room_bytes // _SPARE:
            return
        kept = [each.units for each in self._queue]
        kept_bytes = sum(each.size_bytes for each in self._queue) + self._bytes_of(self._current)
        if kept and kept_bytes + num_bytes <= self._room_bytes:
            kept.append(self._current)
        self._release_but(kept)

    def begin(self, slots: Tensor, new_bytes: int) -> None:
        """Note a piece that begins, and have the next ones read.

        Args:
            slots: of its rows, visited; -1 is no row.
            new_bytes: what it was the first to map.
        """
        blocks = (slots[slots >= 0] // self._block_rows).unique()
        key = blocks.numpy().tobytes()
        self.reads += SpillReads(waited_bytes=new_bytes)
        if not key or key == self._order.last or not self._is_possible:
            return
        self._order.note(key)
        self._current = self._units(blocks)
        if self._queue and self._queue[0].key == key:
            self._take(self._queue.popleft())
        elif self._queue:
            self.stop()
            self._release_but([self._current])
        self._extend(key)

    def stop(self) -> None:
        """Give up what is not read yet, and wait for what is being read; raises DeadlineExceeded if that takes long."""
        _wait([each.reading for each in self._queue if not each.reading.cancel()], self._table)
        self._queue.clear()

    def close(self) -> None:
        """Stop, and end the thread."""
        try:
            self.stop()
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=not self._queue)
                self._thread = None

    def _take(self, ahead: _Ahead) -> None:
        """Count a piece that begins and was to be read ahead; wait for it if it is being read just now."""
        if ahead.reading.cancel():  # not begun with: the piece reads what it needs itself
            self.reads += SpillReads(late_bytes=ahead.new_bytes)
            return
        is_done = ahead.reading.done()
        _wait([ahead.reading], self._table)
        self.reads += SpillReads(ahead.new_bytes * is_done, ahead.new_bytes * (not is_done))
        if ahead.reading.exception() is not None:  # what is wrong shows where rows are needed, as without reading ahead
            self._is_possible = False
            self.stop()

    def _extend(self, key: bytes) -> None:
        """Ask for the next pieces, as far as half of the room goes: the other half is for pieces out of order."""
        keys = {key, *(each.key for each in self._queue)}
        while self._is_possible and len(self._queue) < _MAX_PIECES:
            following = self._order.ahead(len(self._queue))
            if following is None or following in keys:
                return
            units = self._units(torch.frombuffer(bytearray(following), dtype=torch.int64))
            size_bytes = self._bytes_of(units)
            if size_bytes + sum(each.size_bytes for each in self._queue) > self._room_bytes // 2:
                return
            if self._mapped_bytes + self._new_bytes(units) > self._room_bytes:
                self._release_but([self._current, *(each.units for each in self._queue)])
            new_bytes = self._new_bytes(units)
            if self._mapped_bytes + new_bytes > self._room_bytes:
                return
            keys.add(following)
            stretches = [part for name, each in units.items() for part in self._windows[name].visit_ahead(each)]
            self._queue.append(_Ahead(following, units, size_bytes, new_bytes, self._submit(stretches)))

    def _submit(self, stretches: list[Stretch]) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "paceline-read-ahead")
        return self._thread.submit(_read, stretches)

    def _units(self, blocks: Tensor) -> dict[str, Tensor]:
        return {name: windows.of_blocks(blocks, self._block_rows) for name, windows in self._windows.items()}

    @property
    def _mapped_bytes(self) -> int:
        return sum(windows.mapped_bytes for windows in self._windows.values())

    def _bytes_of(self, units: Mapping[str, Tensor]) -> int:
        return sum(self._windows[name].bytes_of(each) for name, each in units.items())

    def _new_bytes(self, units: Mapping[str, Tensor]) -> int:
        return sum(self._windows[name].new_bytes_of(each) for name, each in units.items())

    def _release_but(self, kept: list[Mapping[str, Tensor]]) -> None:
        for name, windows in self._windows.items():
            windows.release_but([units[name] for units in kept])


def _wait(readings: list[Future[None]], table: str) -> None:
    if wait(readings, _DEADLINE_S).not_done:
        raise DeadlineExceeded(
            f"Row table '{table}': rows that are read ahead did not come from the disk within {_DEADLINE_S:.0f} s. "
            "Look at the disk with the folder that the table spills to."
        )


def _read(stretches: list[Stretch]) -> None:
    for stretch in stretches:
        stretch.read()

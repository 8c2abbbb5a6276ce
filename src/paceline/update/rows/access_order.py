"""The order in which the pieces of a table are used, recorded until it repeats, and what comes next in it."""

from __future__ import annotations

from typing import Final, final

_ENTRY_BYTES: Final = 128  # that a piece takes beside its own bytes: objects, their places in lists, and a number


@final
class AccessOrder:
    """Which pieces a table uses, one after the other, and which come next where their order repeats.

    Training uses the same pieces in the same order in every iteration. The first one is recorded; from the second on,
    the order is known. A piece that comes out of order begins another record. Iterations have no marks: the order
    repeats with the shortest period that all of the record agrees with, found as the border of a text is.

    Args:
        max_bytes: what a record may take; one that would be larger begins anew.

    Example:
        >>> order = AccessOrder(1000)
        >>> for piece in (b"a", b"b", b"c", b"a"):
        ...     order.note(piece)
        >>> [order.ahead(0), order.ahead(1), order.ahead(2)]
        [b'b', b'c', b'a']
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._borders: list[int] = []  # of each beginning of the record: how much of it its own end repeats
        self._size_bytes = 0
        self._place: int | None = None  # in a record that is one whole period: which piece is next
        self.last: bytes | None = None

    def limit(self, max_bytes: int) -> None:
        """Set what a record may take; one that is larger is forgotten."""
        self._max_bytes = max_bytes
        if self._size_bytes > max_bytes:
            self._forget()

    def note(self, piece: bytes) -> None:
        """Note that a piece is used; the same one several times in a row counts once."""
        if piece == self.last:
            return
        self.last = piece
        if self._place is not None:
            if piece == self._pieces[self._place]:
                self._place = (self._place + 1) % len(self._pieces)
                return
            self._forget()
        self._record(piece)

    def ahead(self, steps: int) -> bytes | None:
        """Return what is used so many pieces after the next one, None as long as that is not known."""
        if self._place is not None:
            return self._pieces[(self._place + steps) % len(self._pieces)]
        border = self._borders[-1] if self._borders else 0
        return self._pieces[(border + steps) % (len(self._pieces) - border)] if border else None

    def _record(self, piece: bytes) -> None:
        self._size_bytes += len(piece) + _ENTRY_BYTES
        if self._size_bytes > self._max_bytes:
            self._forget()
            return
        border = self._borders[-1] if self._borders else 0
        self._pieces.append(piece)
        while border and self._pieces[border] != piece:
            border = self._borders[border - 1]
        self._borders.append(border + 1 if len(self._pieces) > 1 and self._pieces[border] == piece else 0)
        period = len(self._pieces) - self._borders[-1]
        if self._borders[-1] >= period:  # seen twice from end to end: one of both is enough
            del self._pieces[period:]
            self._borders, self._place = [], 0

    def _forget(self) -> None:
        self._pieces, self._borders, self._size_bytes, self._place = [], [], 0, None

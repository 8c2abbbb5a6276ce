"""The order in which the pieces of a table are used, as recorded, and what comes next where it repeats."""

from __future__ import annotations

from typing import Final, final

_ENTRY_BYTES: Final = 288  # that a piece takes beside its own bytes: objects, and places in lists and dicts
_MOST_PLACES: Final = 64  # of a piece in the record that count, the latest


@final
class AccessOrder:
    """Which pieces a table uses, one after the other, and which come next where their order repeats.

    Training uses the same pieces in the same order in every iteration. The first one is recorded; from the second on,
    what comes next is what came then. Iterations have no marks: of all earlier places where the last piece was used,
    the one counts up to which most pieces were those of now. So a piece may occur several times in an iteration, one
    that comes out of order costs little, and another order is soon known as well.

    Args:
        max_bytes: what a record may take. One that would be larger is cut to its last period, or begins anew.

    Example:
        >>> order = AccessOrder(2000)
        >>> for piece in (b"a", b"b", b"c", b"a"):
        ...     order.note(piece)
        >>> [order.ahead(0), order.ahead(1), order.ahead(2)]
        [b'b', b'c', b'a']
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._places: dict[bytes, list[int]] = {}  # of each piece in the record
        self._agreed: dict[int, int] = {}  # by how far back: how many pieces up to the last one were the same there
        self.size_bytes = 0  # of the record, about

    @property
    def last(self) -> bytes | None:
        """The piece that was used last, if it is known."""
        return self._pieces[-1] if self._pieces else None

    def limit(self, max_bytes: int) -> None:
        """Set what a record may take."""
        self._max_bytes = max_bytes
        self._fit()

    def note(self, piece: bytes) -> None:
        """Note that a piece is used; the same one several times in a row counts once."""
        if piece == self.last:
            return
        self._append(piece)
        self._fit()

    def ahead(self, steps: int) -> bytes | None:
        """Return what is used so many pieces after the next one, None as long as that is not known."""
        period = self._period()
        return self._pieces[len(self._pieces) - period + steps % period] if period else None

    def _append(self, piece: bytes) -> None:
        now = len(self._pieces)
        places = self._places.setdefault(piece, [])
        self._agreed = {now - place: self._agreed.get(now - place, 0) + 1 for place in places}
        self._pieces.append(piece)
        places.append(now)
        del places[:-_MOST_PLACES]
        self.size_bytes += len(piece) + _ENTRY_BYTES

    def _period(self) -> int:
        """Return how far back lies what goes on as now, 0 if nothing does.

        A whole period that has repeated counts more than a longer agreement that lies further back than it is long:
        else a piece that once came in between would be expected again and again.
        """
        return max(self._agreed, key=lambda back: (self._agreed[back] >= back, self._agreed[back], -back), default=0)

    def _fit(self) -> None:
        if self.size_bytes <= self._max_bytes:
            return
        period = self._period()
        kept = self._pieces[-period:] if period and self._agreed[period] >= period else []
        self._pieces, self._places, self._agreed, self.size_bytes = [], {}, {}, 0
        if sum(len(piece) + _ENTRY_BYTES for piece in kept) <= self._max_bytes // 2:  # room to notice a change
            for piece in kept:
                self._append(piece)
            self._agreed = {period: period} if kept else {}

"""One order for the pieces of one push over several connections.

Connections of a host share its line alike. Without an order, small parts of a push would take the time in which the
large ones are due, and a step ends with its last part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

_AHEAD: Final = 1 / 32  # of a part: so far it may be ahead of another, so that both leave at the same time


@final
class SendOrder:
    """Has the parts of a push leave in proportion to their sizes, each in pieces and by a queue of its own.

    A part counts from its first piece on. Thread-safe.

    Example:
        >>> order = SendOrder()
        >>> large, small = (order.piece(server, 0.0, 0.5) for server in (0, 1))
        >>> next_small = order.piece(1, 0.5, 1.0)
        >>> large.may_leave(lambda: None), small.may_leave(lambda: None)
        (True, True)
        >>> small.note_left()
        >>> next_small.may_leave(lambda: print("now"))
        False
        >>> large.note_left()
        now
        >>> next_small.may_leave(lambda: None)
        True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[int, float] = {}  # by part: how much of it has left, from 0 to 1
        self._waiting: dict[int, tuple[float, Callable[[], None]]] = {}  # by part: where its next piece starts

    def piece(self, part: int, start: float, stop: float) -> OrderedPiece:
        """Return the next piece of a part, from one fraction of it to another, the last one to 1."""
        with self._lock:
            self._left.setdefault(part, 0.0)
        return OrderedPiece(self, part, start, stop)

    def may_leave(self, part: int, start: float, wake: Callable[[], None]) -> bool:
        """See `OrderedPiece.may_leave`."""
        with self._lock:
            if start > min(self._left.values()) + _AHEAD:
                self._waiting[part] = start, wake
                return False
            self._waiting.pop(part, None)
            return True

    def note_left(self, part: int, stop: float) -> None:
        """See `OrderedPiece.note_left`."""
        with self._lock:
            self._left[part] = stop
            least = min(self._left.values()) + _AHEAD
            due = [wake for start, wake in self._waiting.values() if start <= least]
        for wake in due:
            wake()


@dataclass(frozen=True, slots=True)
class OrderedPiece:
    """A piece of a part; see `SendOrder.piece`."""

    order: SendOrder
    part: int
    start: float
    stop: float

    def may_leave(self, wake: Callable[[], None]) -> bool:
        """Return whether it is this piece's turn; if not, `wake` is called when it is, without a lock, maybe twice."""
        return self.order.may_leave(self.part, self.start, wake)

    def note_left(self) -> None:
        """Note that the piece has left, or will not, as its connection has ended: others wait for it no longer."""
        self.order.note_left(self.part, self.stop)

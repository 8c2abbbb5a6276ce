"""Detection of connections that are made again and again but never carry an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

NUM_FRUITLESS: Final = 3
# On a path that passes small packets and drops large ones, the kernel gives a connection up after 10 to 25 s.
SOON_S: Final = 30.0
SMALL_BYTES: Final = 500  # frames of this size pass on every path


@dataclass(slots=True)
class Progress:
    """The results of the last connections to one server.

    A connection is fruitless if it breaks within 30 s without an answer, apart from that to the join. A connection that
    lives longer shows that the path works: its worker may only have waited for other workers.

    Args:
        patience_s: how long to continue with fruitless connections.
    """

    patience_s: float
    now: Callable[[], float] = time.monotonic
    _made_s: float = 0.0
    _has_answered: bool = False
    _largest_bytes: int = 0  # of the frames sent since the last answer
    _num_fruitless: int = 0  # in a row
    _fruitless_since_s: float = 0.0

    def note_connected(self) -> None:
        """Note that the connection is made, its handshake done."""
        self._made_s, self._has_answered, self._largest_bytes = self.now(), False, 0

    def note_sent(self, size_bytes: int) -> None:
        """Note a frame on its way over the connection."""
        if size_bytes > self._largest_bytes:
            self._largest_bytes = size_bytes

    def note_answered(self) -> None:
        """Note an answer over the connection."""
        self._has_answered, self._largest_bytes, self._num_fruitless = True, 0, 0

    def note_broken(self) -> None:
        """Note that the connection has broken."""
        if self._has_answered or self.now() - self._made_s > SOON_S:
            self._num_fruitless = 0
            return
        if not self._num_fruitless:
            self._fruitless_since_s = self._made_s
        self._num_fruitless += 1

    def objection(self) -> str:
        """Return why not to reconnect, or an empty text."""
        is_over = self.now() - self._fruitless_since_s >= self.patience_s
        if self._num_fruitless < NUM_FRUITLESS or not is_over:
            return ""
        told = f"was accepted {self._num_fruitless} times, and broke each time before"
        if self._largest_bytes > SMALL_BYTES:
            return f"{told} a frame of {self._largest_bytes:,} bytes was answered"
        return f"{told} anything was answered"

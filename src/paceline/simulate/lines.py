"""Lines of machines: bytes leave and arrive at a rate, and the connections of a line share it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

MESSAGE_BYTES = 100.0  # of a message beside the tensors that travel with it
_NUM_PIECES = 16  # of a long message; connections take turns, so that each gets its share
_SHORT_BYTES = 65536.0  # a message that is not longer does not wait for those of other connections


class Schedule(Protocol):
    """Has an action be performed at a virtual time."""

    def __call__(self, due: float, action: Callable[..., None], /, *args: object) -> None:
        """Perform the action with these arguments at `due`."""
        ...


@dataclass(slots=True)
class _Message:
    left_bytes: float
    piece_bytes: float
    latency_s: float
    arrive: Callable[..., None]
    args: tuple[object, ...]


@dataclass(slots=True, eq=False)
class Line:
    """One end of the network, which sends and receives at once. Times are virtual seconds.

    Long messages on several connections share the rate evenly, as those of TCP do; one that arrives is received while
    it is sent. Messages of one connection arrive in order.

    Args:
        bytes_per_s: its rate in each direction; infinite for a line that costs nothing.

    Example:
        >>> worker, server, other = Line(1e6), Line(1e6), Line(1e6)
        >>> waiting, arrived = [], []
        >>> def at(due, action, *args): waiting.append((due, action, args))
        >>> worker.send(server, 1e6, 0.0, 0.1, at, lambda: arrived.append("first"))
        >>> worker.send(other, 1e6, 0.0, 0.1, at, lambda: arrived.append("second"))
        >>> while waiting:
        ...     waiting.sort(key=lambda each: each[0])
        ...     due, action, args = waiting.pop(0)
        ...     action(*args)
        >>> arrived, round(due, 2)  # a second of the line for each, which they share
        (['first', 'second'], 2.1)
    """

    bytes_per_s: float
    sent_s: float = 0.0  # in which it sent
    received_s: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    received_until: float = 0.0  # what has been sent to it so far
    _arrived_until: dict[Line, float] = field(default_factory=dict["Line", float])  # by target, of the last message
    _queues: dict[Line, deque[_Message]] = field(default_factory=dict["Line", deque[_Message]])
    _turns: deque[Line] = field(default_factory=deque["Line"])  # targets with messages, the next in turn first
    _is_sending: bool = False

    def send(
        self,
        target: Line,
        size_bytes: float,
        now: float,
        latency_s: float,
        at: Schedule,
        arrive: Callable[..., None],
        *args: object,
    ) -> None:
        """Send a message; `arrive` is performed with `args` when all of it has arrived.

        What a line sends to itself, between processes of one machine, takes no time.
        """
        if self is target:
            self._arrive(target, now, at, arrive, args)
            return
        self.sent_bytes += size_bytes
        target.received_bytes += size_bytes
        if self.bytes_per_s == target.bytes_per_s == inf:
            self._arrive(target, now + latency_s, at, arrive, args)
            return
        queue = self._queues.get(target)
        if not queue and size_bytes <= _SHORT_BYTES:
            sent_s = self._count(target, size_bytes)
            self._arrive(target, now + sent_s + latency_s, at, arrive, args)
            return
        piece = max(_SHORT_BYTES, size_bytes / _NUM_PIECES)
        message = _Message(size_bytes, piece, latency_s, arrive, args)
        if queue:
            queue.append(message)
            return
        self._queues[target] = deque([message])
        self._turns.append(target)
        if not self._is_sending:
            self._send_piece(now, at)

    def _send_piece(self, now: float, at: Schedule) -> None:
        """Send a piece of the message whose connection is in turn."""
        self._is_sending = bool(self._turns)
        if not self._turns:
            return
        target = self._turns.popleft()
        queue = self._queues[target]
        message = queue[0]
        size = min(message.piece_bytes, message.left_bytes)
        message.left_bytes -= size
        sent_s = self._count(target, size)
        # It is received while it is sent, once those that came before are received.
        begins = max(now, target.received_until)
        target.received_until = begins + size / target.bytes_per_s
        if not message.left_bytes:
            queue.popleft()
            due = max(now + sent_s, target.received_until) + message.latency_s
            self._arrive(target, due, at, message.arrive, message.args)
        if queue:
            self._turns.append(target)
        at(now + sent_s, self._send_piece, now + sent_s, at)

    def _count(self, target: Line, size_bytes: float) -> float:
        """Count bytes for both lines, and return the seconds in which they leave."""
        sent_s = size_bytes / self.bytes_per_s
        self.sent_s += sent_s
        target.received_s += size_bytes / target.bytes_per_s
        return sent_s

    def _arrive(
        self, target: Line, due: float, at: Schedule, arrive: Callable[..., None], args: tuple[object, ...]
    ) -> None:
        due = self._arrived_until[target] = max(due, self._arrived_until.get(target, 0.0))
        at(due, arrive, *args)

"""Frames to one peer, in order: those that its connection is slow to take go by a thread, and delay no other peer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import PeerError, UsageError
from paceline.transport.base import EMPTY, Connection

_TIMEOUT_S = 60.0  # for a small frame that waits
_LEAST_BYTES_PER_S = 1e6  # a peer that takes in large ones more slowly than this is given up
_MOST_WAITING_BYTES = 256 << 20  # for one peer; it has to ask again for what it asked for beyond that
_MOST_FRAMES = 1 << 14  # that wait for one peer: more than it can have asked for without having read a few
_MOST_OWED = 2  # frames of one thing that wait: the one that is being sent, and the one after it
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """What waits, and what it is owed of."""

    header: bytes
    body: memoryview
    owed: str


@dataclass(slots=True)
class SendQueue:
    """Sends frames over one connection. Only one thread may call `send` at a time.

    A frame that would have to wait for the other end, and all that come after it until it has left, go by a thread;
    it is made when it is first needed.

    Args:
        on_broken: called once the connection turns out to be over, on any thread; what has not left is lost.
        bounded: give up a peer that lets too many frames wait, and leave out bodies that would take too much memory.
        copies: of a body that waits a copy is kept, for callers that change it; else it must stay as it is.
    """

    connection: Connection
    on_broken: Callable[[], None]
    bounded: bool = False
    copies: bool = False
    # Invariant: what is being sent stays the first of its queue until it has left.
    _urgent: deque[_Frame] = field(default_factory=deque[_Frame])
    _waiting: deque[_Frame] = field(default_factory=deque[_Frame])
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _closed: bool = False

    def send(
        self,
        header: bytes,
        body: memoryview = EMPTY,
        *,
        urgent: bool = False,
        owed: str = "",
        copy: Callable[[], memoryview] | None = None,
    ) -> None:
        """Send one frame, or have the thread send it; does not wait for the other end.

        An urgent frame goes before all that wait and are not urgent. A repetition of a frame that still waits is left
        out. Where bodies are copied, `copy` returns one that peers may share; it is called only if one is needed.

        If the queue is bounded, a body is left out while too many bytes wait: the peer asks for it again. Frames that a
        peer never asks for are never left out; `owed` names what they are of. A peer with more frames waiting than it
        can have asked for, or can be owed, is given up.
        """
        with self._changed:
            if self._closed:
                return
            at_once = self._leaves_at_once(body)
            waits = not at_once and (not self.bounded or not len(body) or bool(owed) or self._has_room())
            if waits and not self._is_known(header):
                self._put(_Frame(header, self._kept(body, copy), owed), self._urgent if urgent else self._waiting)
            is_flooded = self.bounded and self._is_flooded(owed)
        if at_once:
            self._send(header, body)
        elif is_flooded:
            self._give_up()

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended: nothing is sent any more."""
        return self._closed

    def close(self) -> None:
        """End the connection, and the thread if there is one; what has not left is lost. May be repeated."""
        with self._changed:
            self._drop_all()
        self.connection.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)

    def _leaves_at_once(self, body: memoryview) -> bool:
        return not (self._urgent or self._waiting) and self.connection.has_room(body)

    def _is_known(self, header: bytes) -> bool:
        """Return whether a frame waits already."""
        return any(header == frame.header for frame in (*self._urgent, *self._waiting))

    def _is_flooded(self, owed: str) -> bool:
        num_owed = sum(frame.owed == owed for frame in self._waiting) if owed else 0
        return len(self._waiting) + len(self._urgent) > _MOST_FRAMES or num_owed > _MOST_OWED

    def _kept(self, body: memoryview, copy: Callable[[], memoryview] | None) -> memoryview:
        if not self.copies:
            return body
        return memoryview(bytes(body)) if copy is None else copy()

    def _put(self, frame: _Frame, queue: deque[_Frame]) -> None:
        """Have the thread send a frame."""
        queue.append(frame)
        if self._thread is None:
            name = f"paceline-post-{self.connection.peer}"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _has_room(self) -> bool:
        return sum(frame.body.nbytes for frame in self._waiting) < _MOST_WAITING_BYTES

    def _work(self) -> None:
        """Send what waits, until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._waiting or self._closed)
                if self._closed:
                    return
                queue = self._urgent or self._waiting
                frame = queue[0]
            self._send(frame.header, frame.body)
            del frame  # while it waits for the next one, this one's memory is others' to use
            with self._changed:
                if not self._closed:
                    queue.popleft()
                self._changed.notify_all()

    def _send(self, header: bytes, body: memoryview) -> None:
        try:
            self.connection.send(header, body, timeout_s=_patience_s(body))
        except (PeerError, UsageError):  # it is gone, or made us say more than a frame may have
            self._give_up()

    def _drop_all(self) -> None:
        self._closed = True
        self._urgent.clear()
        self._waiting.clear()
        self._changed.notify_all()

    def _give_up(self) -> None:
        with self._changed:
            self._drop_all()
        self.on_broken()


def _patience_s(body: memoryview) -> float:
    return _TIMEOUT_S + body.nbytes / _LEAST_BYTES_PER_S

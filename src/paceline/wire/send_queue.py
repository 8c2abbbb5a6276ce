"""The send queue of one peer: frames leave in order, and those that would block are sent by a thread.

So a slow peer does not delay the others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import PeerError, UsageError
from paceline.transport.base import EMPTY, Connection

_TIMEOUT_S = 60.0  # for a small frame
_LEAST_BYTES_PER_S = 1e6  # a peer that receives large frames more slowly than this is disconnected
_MOST_WAITING_BYTES = 256 << 20  # for one peer; it has to request again what exceeds this
_MOST_FRAMES = 1 << 14  # waiting for one peer: more than it can have requested without reading some
_MOST_OWED = 2  # waiting frames of one subject: the one that is being sent, and the one after it
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """A frame that waits; `owed` is its subject if the peer never requests it."""

    header: bytes
    body: memoryview
    owed: str


@dataclass(slots=True)
class SendQueue:
    """Sends frames over one connection. Only one thread may call `send` at a time.

    A frame that would block is left to a thread, as are all later ones until it has left. The thread starts when it is
    first needed.

    Args:
        connection: to the peer; the queue closes it.
        on_broken: called when the connection is found to be over, on any thread; frames still in the queue are lost.
        bounded: disconnect a peer with too many waiting frames, and drop frames whose bodies need too much memory.
        copies: keep a copy of a body that waits, for callers that change it; without, a body must not change.
    """

    connection: Connection
    on_broken: Callable[[], None]
    bounded: bool = False
    copies: bool = False
    # Invariant: the frame being sent stays the first of its queue until it has left.
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
        """Send one frame, or leave it to the thread; does not wait for the peer.

        An urgent frame passes all waiting ones that are not urgent. A repetition of a waiting frame is dropped. If the
        queue copies bodies, `copy` returns a copy that queues may share; it is called only if one is needed.

        A bounded queue drops a frame with a body while too many bytes wait: the peer requests it again. Frames that a
        peer never requests are not dropped; `owed` names their subject. A peer with more waiting frames than it can
        have requested, or more than 2 of one `owed` subject, is disconnected.
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
        """End the connection, and the thread if there is one; waiting frames are lost. May be repeated."""
        with self._changed:
            self._drop_all()
        self.connection.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)

    def _leaves_at_once(self, body: memoryview) -> bool:
        return not (self._urgent or self._waiting) and self.connection.has_room(body)

    def _is_known(self, header: bytes) -> bool:
        """Return whether a frame with this header waits already."""
        return any(header == frame.header for frame in (*self._urgent, *self._waiting))

    def _is_flooded(self, owed: str) -> bool:
        num_owed = sum(frame.owed == owed for frame in self._waiting) if owed else 0
        return len(self._waiting) + len(self._urgent) > _MOST_FRAMES or num_owed > _MOST_OWED

    def _kept(self, body: memoryview, copy: Callable[[], memoryview] | None) -> memoryview:
        if not self.copies:
            return body
        return memoryview(bytes(body)) if copy is None else copy()

    def _put(self, frame: _Frame, queue: deque[_Frame]) -> None:
        """Leave a frame to the thread."""
        queue.append(frame)
        if self._thread is None:
            name = f"paceline-post-{self.connection.peer}"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _has_room(self) -> bool:
        return sum(frame.body.nbytes for frame in self._waiting) < _MOST_WAITING_BYTES

    def _work(self) -> None:
        """Send the waiting frames until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._waiting or self._closed)
                if self._closed:
                    return
                queue = self._urgent or self._waiting
                frame = queue[0]
            self._send(frame.header, frame.body)
            del frame  # frees its memory while the thread waits for the next one
            with self._changed:
                if not self._closed:
                    queue.popleft()
                self._changed.notify_all()

    def _send(self, header: bytes, body: memoryview) -> None:
        try:
            self.connection.send(header, body, timeout_s=_patience_s(body))
        except (PeerError, UsageError):  # the peer is gone, or its request makes a frame over the limits
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

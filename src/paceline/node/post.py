"""Frames to one peer, in order: what its line is slow to take is sent by a thread, so that nobody else waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import PeerError, UsageError
from paceline.transport.base import EMPTY, Connection

_TIMEOUT_S = 60.0  # for a small frame that waits
_LEAST_BYTES_PER_S = 1e6  # a peer that takes in large ones more slowly than this is given up
_MOST_COPIED_BYTES = 256 << 20  # for one peer; what it asked for beyond that it has to ask for again
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
class Post:
    """Sends frames over one connection. Only one thread may call `send` at a time.

    A frame that would have to wait for the other end, and whatever comes after it until it has left, goes by a thread;
    it is made when it is first needed. Carriers that map memory send references only, which is done at once.

    Args:
        on_broken: called once the connection turns out to be over, on any thread; what has not left is lost.
        copies: of a body that waits a copy is kept, for callers that change it; else it must stay as it is.
    """

    connection: Connection
    maps_memory: bool
    on_broken: Callable[[], None]
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
        timeout_s: float = _TIMEOUT_S,
        urgent: bool = False,
        owed: str = "",
        copy: Callable[[], memoryview] | None = None,
    ) -> None:
        """Send one frame. Blocks only where the carrier maps memory, for `timeout_s` at most.

        Where bodies are copied and enough of them wait, one that can be asked for again is left out: whoever is slow to
        take in what it asks for, or takes in nothing, keeps nobody else waiting. Nobody asks for what is `owed`, which
        names what it is of: it is never left out. A peer that has more frames wait than it can have asked for, or been
        owed, is given up.
        An urgent one goes before all that waits and is not urgent. A repetition of what still waits is left out.
        Who has a copy of the body that several peers may share gives it; it is asked for only where one is needed.
        """
        with self._changed:
            at_once = self._leaves_at_once(body)
            waits = not at_once and (not self.copies or not len(body) or bool(owed) or self._has_room())
            if waits and not self._is_known(header):
                self._put(_Frame(header, self._kept(body, copy), owed), self._urgent if urgent else self._waiting)
            is_flooded = self.copies and self._is_flooded(owed)
        if at_once:
            self._send(header, body, timeout_s)
        elif is_flooded:
            self._give_up()

    def close(self) -> None:
        """End the connection, and the thread if there is one; what has not left is lost. May be repeated."""
        with self._changed:
            self._drop_all()
        self.connection.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)

    def _leaves_at_once(self, body: memoryview) -> bool:
        if self.maps_memory:
            return True
        return not (self._urgent or self._waiting) and self.connection.has_room(body.nbytes)

    def _is_known(self, header: bytes) -> bool:
        """Say whether a frame waits already, or none does any more."""
        return self._closed or any(header == frame.header for frame in (*self._urgent, *self._waiting))

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
        return self._closed or sum(frame.body.nbytes for frame in self._waiting) < _MOST_COPIED_BYTES

    def _work(self) -> None:
        """Send what waits, until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._waiting or self._closed)
                if self._closed:
                    return
                queue = self._urgent or self._waiting
                frame = queue[0]
            self._send(frame.header, frame.body, _patience_s(frame.body))
            del frame  # while it waits for the next one, this one's memory is others' to use
            with self._changed:
                if not self._closed:
                    queue.popleft()
                self._changed.notify_all()

    def _send(self, header: bytes, body: memoryview, timeout_s: float) -> None:
        try:
            self.connection.send(header, body, timeout_s=timeout_s)
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

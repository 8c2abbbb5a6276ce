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
_MOST_COPIED_BYTES = 256 << 20  # by one peer; who has more to send it waits
_JOIN_TIMEOUT_S = 5.0


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
    _urgent: deque[tuple[bytes, memoryview]] = field(default_factory=deque[tuple[bytes, memoryview]])
    _waiting: deque[tuple[bytes, memoryview]] = field(default_factory=deque[tuple[bytes, memoryview]])
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
        copy: Callable[[], memoryview] | None = None,
    ) -> None:
        """Send one frame. Blocks only where the carrier maps memory, for `timeout_s` at most, and for room for a copy.

        An urgent one goes before all that waits and is not urgent. A repetition of what still waits is left out.
        Who has a copy of the body that several peers may share gives it; it is asked for only where one is needed.
        """
        with self._changed:
            at_once = self._leaves_at_once(body)
            in_time = at_once or self._put(header, body, copy, self._urgent if urgent else self._waiting)
        if at_once:
            self._send(header, body, timeout_s)
        elif not in_time:
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

    def _put(
        self,
        header: bytes,
        body: memoryview,
        copy: Callable[[], memoryview] | None,
        queue: deque[tuple[bytes, memoryview]],
    ) -> bool:
        """Have the thread send a frame; False when there was no room for it all the time that the first one has."""
        patience_s = _patience_s(self._waiting[0][1]) if self._waiting else 0.0
        if self.copies and not self._changed.wait_for(self._has_room, patience_s):
            return False
        if self._closed or any(header == waiting for waiting, _ in queue):
            return True
        if self.copies:
            body = memoryview(bytes(body)) if copy is None else copy()
        queue.append((header, body))
        if self._thread is None:
            name = f"paceline-post-{self.connection.peer}"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()
        self._changed.notify_all()
        return True

    def _has_room(self) -> bool:
        return self._closed or sum(body.nbytes for _, body in self._waiting) < _MOST_COPIED_BYTES

    def _work(self) -> None:
        """Send what waits, until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._waiting or self._closed)
                if self._closed:
                    return
                queue = self._urgent or self._waiting
                header, body = queue[0]
            self._send(header, body, _patience_s(body))
            del body  # while it waits for the next one, this one's memory is others' to use
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

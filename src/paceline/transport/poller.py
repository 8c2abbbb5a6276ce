"""Waiting for the frames of one or several connections, and receiving what has arrived."""

import math
import os
import select
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final, final

from paceline.errors import PeerError
from paceline.transport.base import MAX_TOGETHER, AllocateBody, Connection, Frame

_NO_CONTEXT: Final = nullcontext()


@final
class Poller:
    """Waits until a connection has something to receive. One thread waits at a time; any other may wake it.

    >>> from paceline.transport.memory import MemoryTransport
    >>> transport = MemoryTransport()
    >>> listener = transport.listen("memory://server-0")
    >>> worker = transport.connect(listener.address, b"worker 3", timeout_s=1)
    >>> server = listener.accept(timeout_s=1)
    >>> worker.send(b"push", timeout_s=1)
    >>> poller = Poller()
    >>> poller.wait((server,), timeout_s=1) == [server]
    True
    >>> poller.close()
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: Sequence[Connection] | None = None
        self._by_descriptor: dict[int, Connection] = {}
        self._last: list[Connection] = []  # those that the last wait has returned: they may have read ahead
        self._lock = threading.Lock()
        self._event: int | None = None  # the descriptor of what `wake` sets; made on demand
        self._is_closed = False

    def wait(
        self, connections: Sequence[Connection], timeout_s: float, asleep: AbstractContextManager[None] = _NO_CONTEXT
    ) -> list[Connection]:
        """Wait until some of these connections have a frame, a part of one, or have ended; return those.

        Returns none after `timeout_s`, or once another thread has called `wake`. Connections without a descriptor are
        not waited for. A connection that another thread closes meanwhile may be returned or not. `asleep` is entered
        around what blocks, and an exception of a signal handler there leaves everything as it was.
        """
        if connections != self._watched:
            self._watch(connections)
        ready = [connection for connection in self._last if connection.has_frame()]
        with asleep:
            events = self._poll.poll(0 if ready else math.ceil(timeout_s * 1000))
        for descriptor, _ in events:
            connection = self._by_descriptor.get(descriptor)
            if connection is None:
                self._note_woken()
            elif connection not in ready:
                ready.append(connection)
        self._last = ready
        return ready

    def wake(self) -> None:
        """End the wait that is under way, or else the next one; from any thread."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._open_event(), 1)

    def close(self) -> None:
        """Free the descriptor. No thread may be waiting. May be repeated."""
        with self._lock:
            if self._event is not None:
                os.close(self._event)
            self._event, self._is_closed = None, True

    def _watch(self, connections: Sequence[Connection]) -> None:
        with self._lock:
            event = self._open_event()
        self._poll = select.poll()
        self._poll.register(event, select.POLLIN)
        found = ((connection.fileno(), connection) for connection in connections)
        self._by_descriptor = {descriptor: connection for descriptor, connection in found if descriptor is not None}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)
        self._watched = connections
        self._last = [connection for connection in self._last if connection in self._by_descriptor.values()]

    def _open_event(self) -> int:
        if self._event is None:
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._event

    def _note_woken(self) -> None:
        with self._lock, suppress(BlockingIOError):
            os.eventfd_read(self._open_event())


def receive_all(connection: Connection, *, timeout_s: float, place: AllocateBody | None = None) -> list[Frame]:
    """Wait for the next frame; return it and the ones that have arrived with it, at most 64, in order.

    Raises as `Connection.receive` does for the first frame. An error after it ends the connection, as the next call
    says.
    """
    frames = [connection.receive(timeout_s=timeout_s, place=place)]
    with suppress(PeerError):
        while len(frames) < MAX_TOGETHER and connection.has_frame():
            frames.append(connection.receive(timeout_s=0.0, place=place))
    return frames

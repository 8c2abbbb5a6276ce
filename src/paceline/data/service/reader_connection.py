"""A reader's connection to a data server: its state, and its send queue, emptied by a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from paceline.data.service.buffer_pool import BatchBuffers
from paceline.data.service.messages import MAX_UNANSWERED
from paceline.data.service.source_cache import CachedSource
from paceline.errors import PeerError, UsageError
from paceline.transport.base import EMPTY, Connection
from paceline.wire.messages import Hello, decode
from paceline.wire.permissions import check_caller

_TIMEOUT_S: Final = 60.0
_LEAST_BYTES_PER_S: Final = 1e6  # a worker that receives batches more slowly than this is disconnected
_MOST_WAITING: Final = 2  # one that is being sent, and the next one
_JOIN_TIMEOUT_S: Final = 5.0


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ServiceAnswer:
    """A frame; `on_sent` is called by the sending thread once the transport has taken it."""

    header: bytes
    body: memoryview = EMPTY
    on_sent: Callable[[], None] = _nothing


@dataclass(slots=True)
class ServiceSendQueue:
    """Sends answers over one connection, in order. Any thread may call it.

    Args:
        on_room: called by the sending thread whenever an answer has been sent.
    """

    connection: Connection
    on_room: Callable[[], None]
    num_sent: int = 0  # written by the sending thread alone
    # Invariant: the answer being sent stays the first until it is sent.
    _waiting: deque[ServiceAnswer] = field(default_factory=deque[ServiceAnswer])
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False
    _thread: threading.Thread = field(init=False)

    def open(self) -> None:
        """Start the sending thread.

        Raises:
            PeerError: the system refuses another thread; the worker may connect again later.
        """
        name = f"paceline-send-{self.connection.peer}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            raise PeerError("the system refuses a thread to answer it") from None

    @property
    def has_room(self) -> bool:
        """Return whether there is room for another batch of this worker."""
        return len(self._waiting) < _MOST_WAITING

    def put(self, answer: ServiceAnswer) -> None:
        """Append an answer; dropped once closed. Does not block."""
        with self._changed:
            if not self._closed:
                self._waiting.append(answer)
                self._changed.notify_all()

    def close(self) -> None:
        """End the connection and the thread; unsent answers are lost."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self.connection.close()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                answer = self._waiting[0]
            if not self._send(answer):
                self.connection.close()
                return
            with self._changed:
                if not self._closed:
                    self._waiting.popleft()
            self.num_sent += 1
            answer.on_sent()
            del answer  # do not hold its memory while waiting for the next one
            self.on_room()

    def _send(self, answer: ServiceAnswer) -> bool:
        """Send one answer; return False when the connection has ended or has to end."""
        timeout_s = _TIMEOUT_S + answer.body.nbytes / _LEAST_BYTES_PER_S
        try:
            self.connection.send(answer.header, answer.body, timeout_s=timeout_s)
        except (PeerError, UsageError):  # gone, too slow, or the answer exceeds the limits of a frame
            return False
        return True


@dataclass(slots=True, eq=False)
class ReaderConnection:
    """State of one worker's connection; it ends with the connection."""

    hello: Hello
    send_queue: ServiceSendQueue
    batch_buffers: BatchBuffers
    sources: dict[int, CachedSource] = field(default_factory=dict[int, CachedSource])  # by number
    num_asked: int = 0

    def count_request(self) -> None:
        """Count a request; raises PeerError when too many are unanswered."""
        self.num_asked += 1  # each gets exactly one answer
        if self.num_asked - self.send_queue.num_sent > MAX_UNANSWERED:
            raise PeerError(f"a worker has more than {MAX_UNANSWERED} unanswered requests")

    def close(self) -> None:
        """End the connection and its thread, and free its buffers."""
        self.send_queue.close()
        self.batch_buffers.clear()


def accept_reader(
    connection: Connection,
    generation: int,
    num_workers: int | None,
    on_room: Callable[[], None],
    batch_buffers: BatchBuffers,
) -> ReaderConnection:
    """Return the state of a new connection; raises PeerError unless it is from a worker of this job."""
    hello = check_caller(decode(connection.identity), connection)
    if hello.role != "worker":
        raise PeerError(f"a {hello.role} may not read from a data server")
    if hello.generation != generation:
        raise PeerError(f"worker {hello.rank} is of generation {hello.generation} of the job, expected {generation}")
    if hello.rank < 0 or (num_workers is not None and hello.rank >= num_workers):
        raise PeerError(f"worker {hello.rank} is not in this job, which has {num_workers} workers")
    reader = ReaderConnection(hello, ServiceSendQueue(connection, on_room), batch_buffers)
    reader.send_queue.open()
    return reader

"""The connections of one worker to all others of a group: messages, wake-ups, and waits that name their worker."""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from paceline.collective.failures import names
from paceline.errors import DeadlineExceeded, PeerError
from paceline.transport.base import EMPTY, Connection
from paceline.transport.deadline import Deadline

_TAG: Final = struct.Struct("<q")
_LOOK_S: Final = 0.25  # between two looks at whether the awaited workers live
_RECEIVE_S: Final = 3600.0
_SEND_S: Final = 60.0

Message = tuple[bytes, memoryview]


@final
class Peers:
    """Connections to all other workers of a group. Any thread may send, and wait for messages.

    One thread for each worker receives, so that senders never wait for what this worker does.

    Attributes:
        rank: of this worker in the group.
        missing: the workers that the last failed wait was for.
    """

    def __init__(self, rank: int, connections: Mapping[int, Connection]) -> None:
        self.rank: Final = rank
        self.size: Final = len(connections) + 1
        self.others: Final = sorted(connections)
        self.missing: tuple[int, ...] = ()
        self._connections = connections
        self.news: Final = threading.Condition()
        self._messages: dict[tuple[int, int], deque[Message]] = {}
        self._lost: dict[int, str] = {}
        self._ended = ""
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=self._receive, args=one, name=f"paceline-peer-{one[0]}", daemon=True)
            for one in connections.items()
        ]
        for thread in self._threads:
            thread.start()

    def send(self, to: int, tag: int, about: bytes = b"", body: memoryview = EMPTY) -> None:
        """Send a message; blocks until the connection has taken it.

        Raises:
            PeerError: the other worker is gone.
        """
        try:
            self._connections[to].send(_TAG.pack(tag) + about, body, timeout_s=_SEND_S)
        except PeerError as error:
            self.missing = (to,)
            raise PeerError(f"worker {self.rank}: {names([to])} is gone: {error}") from error

    def wake(self, rank: int) -> None:
        """Wake the waits of another worker; does nothing if it is gone, as its own waits have ended then."""
        try:
            self._connections[rank].send(b"", timeout_s=_SEND_S)
        except PeerError:
            return

    def take(self, sources: Sequence[int], tag: int, what: str, deadline: Deadline) -> tuple[int, Message]:
        """Return the next message with a tag from one of these workers, and which; blocks for it.

        Raises:
            PeerError: none of them can send it any more.
            DeadlineExceeded: none has sent it in time.
        """

        def missing() -> Sequence[int]:
            return () if any(self._messages.get((source, tag)) for source in sources) else sources

        with self.news:
            self.wait(missing, what, deadline, while_any=True)
            source = next(source for source in sources if self._messages.get((source, tag)))
            return source, self._messages[source, tag].popleft()

    def has_message(self, source: int, tag: int) -> bool:
        """Return whether `take` would not wait."""
        return bool(self._messages.get((source, tag)))

    def wait(
        self, missing: Callable[[], Sequence[int]], what: str, deadline: Deadline, *, while_any: bool = False
    ) -> None:
        """Wait until `missing` returns no worker any more. It is called with `news` held.

        Args:
            missing: returns the workers that have not done their part.
            what: what is waited for.
            deadline: of the wait.
            while_any: whether one of these workers is enough.

        Raises:
            PeerError: such a worker is gone, or this worker has ended the group.
            DeadlineExceeded: the deadline has passed.
        """
        where = f"worker {self.rank}, {what}"
        with self.news:
            while ranks := missing():
                self.missing = tuple(ranks)
                self.require_open()
                gone = {rank: self._lost[rank] for rank in ranks if rank in self._lost}
                if len(gone) >= (len(ranks) if while_any else 1):
                    self.missing = tuple(gone)
                    raise PeerError(f"{where}: {names(list(gone))} is gone: {next(iter(gone.values()))}")
                if not deadline.remaining_s():
                    raise DeadlineExceeded(f"{where}: {names(ranks)} did not come in time")
                self.news.wait(min(_LOOK_S, deadline.remaining_s()))

    def end(self, reason: str) -> None:
        """Close all connections; every wait fails with this reason. May be repeated.

        Does nothing in a forked process: the connections are those of its parent.
        """
        if os.getpid() != self._process:
            return
        with self.news:
            self._ended = self._ended or reason
            self.news.notify_all()
        for connection in self._connections.values():
            connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def require_open(self) -> None:
        """Raise PeerError if the group has been ended."""
        if self._ended:
            raise PeerError(f"worker {self.rank}: {self._ended}")

    def _receive(self, rank: int, connection: Connection) -> None:
        """Take what another worker sends, until its connection ends."""
        while True:
            try:
                frame = connection.receive(timeout_s=_RECEIVE_S)
            except DeadlineExceeded:
                continue
            except PeerError as error:
                with self.news:
                    self._lost[rank] = str(error)
                    self.news.notify_all()
                return
            with self.news:
                if len(frame.header) >= _TAG.size:
                    (tag,) = _TAG.unpack_from(frame.header)
                    message = frame.header[_TAG.size :], frame.body
                    self._messages.setdefault((rank, tag), deque()).append(message)
                self.news.notify_all()
            del frame

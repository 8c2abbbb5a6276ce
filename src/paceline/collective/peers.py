"""The connections of one worker to all others of a group: messages, wake-ups, and waits that name their worker."""

from __future__ import annotations

import os
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, final

import msgspec

from paceline.collective.failures import names
from paceline.errors import DeadlineExceeded, PeerError
from paceline.transport.base import EMPTY, Connection
from paceline.transport.deadline import Deadline
from paceline.wire.messages import MessageCodec

MOST_TAG: Final = 1 << 41  # of a message that a worker takes from another one; those of the group itself are below 0
SEGMENT_TAG: Final = -1
ROUND_TAG: Final = -2
_GAVE_UP_TAG: Final = -3
_TAG: Final = struct.Struct("<q")
_LOOK_S: Final = 0.25  # between two looks at whether the awaited workers live
_NEAR_RECEIVE_S: Final = 3600.0
_FAR_RECEIVE_S: Final = 0.5  # between two looks at whether a line has been cut
_SEND_S: Final = 60.0
_MOST_SEND_S: Final = 1e6
_TELL_S: Final = 1.0
_LAST_WORDS_S: Final = 10.0
_MOST_ABOUT_BYTES: Final = 4096
_MOST_TEXT: Final = 1000
_MOST_WAITING_BYTES: Final = 1 << 30  # of messages of one worker; with more, it waits until some are taken
_MESSAGE_BYTES: Final = 1024  # that a message takes beside its body, where it is the only one of its tag

HeaderAndBody = tuple[bytes, memoryview]


class _GaveUp(msgspec.Struct, frozen=True):
    """Why a worker ends a group, and the workers that it could not go on without."""

    culprits: tuple[int, ...]
    text: str


_REPORTS: Final = MessageCodec[_GaveUp](_GaveUp)


class RoundArrivals(Protocol):
    """Where pieces of rounds go that come over connections. Called on the threads that receive."""

    def place(self, rank: int, about: bytes, size_bytes: int) -> memoryview:
        """Return the memory for a piece of this size; raises PeerError for one that is not expected."""
        ...

    def note(self, rank: int, about: bytes) -> None:
        """Note that a piece is there: `place` has been called for it. Called with `Peers.news` held."""
        ...


@final
class Peers:
    """Connections to all other workers of a group. Any thread may send, and wait for messages.

    One thread for each worker receives, so that senders do not wait for what this worker does; only one that has sent
    a gigabyte of messages which this worker has not taken yet waits.

    Attributes:
        rank: of this worker in the group.
        missing: the workers that the last failed wait was for.

    Args:
        connections: to the others, by rank.
        far: those of them that are on other machines.
        arrivals: takes pieces of rounds.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, Connection],
        far: Collection[int] = (),
        arrivals: RoundArrivals | None = None,
    ) -> None:
        self.rank: Final = rank
        self.size: Final = len(connections) + 1
        self.others: Final = sorted(connections)
        self.missing: tuple[int, ...] = ()
        self._connections = connections
        self._far = frozenset(far)
        self._arrivals = arrivals
        self.news: Final = threading.Condition()
        self._messages: dict[tuple[int, int], deque[HeaderAndBody]] = {}
        self._num_waiting_bytes: Counter[int] = Counter()
        self._lost: dict[int, str] = {}
        self._reports: dict[int, _GaveUp] = {}
        self._ended = ""
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=self._receive, args=one, name=f"paceline-peer-{one[0]}", daemon=True)
            for one in connections.items()
        ]
        for thread in self._threads:
            thread.start()

    def send(self, to: int, tag: int, about: bytes = b"", body: memoryview = EMPTY, timeout_s: float = _SEND_S) -> None:
        """Send a message; blocks until the connection has taken it.

        Raises:
            PeerError: the other worker is gone.
            DeadlineExceeded: it does not take it in time.
        """
        try:
            self._connections[to].send(_TAG.pack(tag) + about, body, timeout_s=min(timeout_s, _MOST_SEND_S))
        except DeadlineExceeded as error:
            self.missing = (to,)
            raise DeadlineExceeded(
                f"worker {self.rank}: {names([to])} did not take a message in time: {error}"
            ) from error
        except PeerError as error:
            self.require_open()
            with self.news:  # its last words may be under way
                self.news.wait_for(lambda: to in self._lost, _LAST_WORDS_S)
                self._lost.setdefault(to, str(error))
                raise self._failure(f"worker {self.rank}", [to]) from error

    def wake(self, rank: int) -> None:
        """Wake the waits of another worker; does nothing if it is gone, as its own waits have ended then."""
        try:
            self._connections[rank].send(b"", timeout_s=_SEND_S)
        except PeerError:
            return

    def take(self, sources: Sequence[int], tag: int, what: str, deadline: Deadline) -> tuple[int, HeaderAndBody]:
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
            waiting = self._messages[source, tag]
            about, body = waiting.popleft()
            if not waiting:  # each message may have a tag of its own
                del self._messages[source, tag]
            self._num_waiting_bytes[source] -= _MESSAGE_BYTES + body.nbytes
            self.news.notify_all()
            return source, (about, body)

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
                gone = [rank for rank in ranks if rank in self._lost or rank in self._reports]
                if len(gone) >= (len(ranks) if while_any else 1):
                    raise self._failure(where, gone)
                if not deadline.remaining_s():
                    raise DeadlineExceeded(f"{where}: {names(ranks)} did not come in time")
                self.news.wait(min(_LOOK_S, deadline.remaining_s()))

    def end(self, reason: str, error: PeerError | None = None) -> None:
        """Close all connections; every wait fails with this reason. May be repeated.

        Does nothing in a forked process: the connections are those of its parent.

        Args:
            reason: for later calls of this worker.
            error: what the others are told, if this worker gives up: they name the workers that it has waited for.
        """
        if os.getpid() != self._process:
            return
        with self.news:
            is_first = not self._ended
            self._ended = self._ended or reason
            self.news.notify_all()
        if error is not None and is_first:
            self._tell(_GaveUp(self.missing, str(error)[:_MOST_TEXT]))
        for connection in self._connections.values():
            connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def require_open(self) -> None:
        """Raise PeerError if the group has been ended."""
        if self._ended:
            raise PeerError(f"worker {self.rank}: {self._ended}")

    def _failure(self, where: str, gone: Sequence[int]) -> PeerError:
        """Return the error for workers that are gone: one that gave up as others were gone says which."""
        teller = next((rank for rank in gone if rank in self._reports), None)
        if teller is None:
            self.missing = tuple(gone)
            return PeerError(f"{where}: {names(list(gone))} is gone: {self._lost[gone[0]]}")
        report = self._reports[teller]
        self.missing = tuple(rank for rank in report.culprits if rank != self.rank) or (teller,)
        return PeerError(f"{where}: {names([teller])} gave up: {report.text}")

    def _tell(self, report: _GaveUp) -> None:
        """Tell all others why this worker ends the group; wait only for those that live and have more to take first."""
        header, busy = _TAG.pack(_GAVE_UP_TAG) + _REPORTS.encode(report), list[Connection]()
        for rank, connection in self._connections.items():
            with suppress(PeerError):
                is_told = connection.try_send([(header, EMPTY)], timeout_s=_TELL_S)
                if not is_told and rank not in report.culprits:
                    busy.append(connection)
        deadline = Deadline.after(_LAST_WORDS_S)
        for connection in busy:
            with suppress(PeerError):
                connection.send(header, timeout_s=deadline.remaining_s())

    def _receive(self, rank: int, connection: Connection) -> None:
        """Take what another worker sends, until its connection ends."""
        limit_s = _FAR_RECEIVE_S if rank in self._far else _NEAR_RECEIVE_S
        while True:
            try:
                frame = connection.receive(timeout_s=limit_s, place=partial(self._admit, rank))
                if not frame.body.nbytes:
                    self._admit(rank, frame.header, 0)
                with self.news:
                    self._note(rank, frame.header, frame.body)
                    self.news.notify_all()
                    while self._num_waiting_bytes[rank] > _MOST_WAITING_BYTES and not self._ended:
                        self.news.wait(_LOOK_S)
            except DeadlineExceeded:
                continue
            except (PeerError, MemoryError) as error:
                connection.close()
                with self.news:
                    self._lost[rank] = str(error) or "there is no memory for what it sends"
                    self.news.notify_all()
                return
            del frame

    def _admit(self, rank: int, header: bytes, size_bytes: int) -> memoryview | None:
        """Return where to put a body that another worker sends, None for new memory; raises PeerError to refuse it."""
        if not header and not size_bytes:
            return None
        (tag,) = _TAG.unpack_from(header) if len(header) >= _TAG.size else (-_MOST_ABOUT_BYTES,)
        about = header[_TAG.size :]
        if tag == ROUND_TAG and self._arrivals is not None:
            return self._arrivals.place(rank, about, size_bytes)
        is_message = 0 <= tag <= MOST_TAG and not about
        is_report = tag == _GAVE_UP_TAG and not size_bytes and len(about) <= _MOST_ABOUT_BYTES
        if not (is_message or is_report):
            raise PeerError(f"it sent {size_bytes} bytes with a header of {len(header)} that means nothing here")
        return None

    def _note(self, rank: int, header: bytes, body: memoryview) -> None:
        """Keep what has come for those that wait for it."""
        if not header:
            return
        (tag,), about = _TAG.unpack_from(header), header[_TAG.size :]
        if tag == ROUND_TAG and self._arrivals is not None:
            self._arrivals.note(rank, about)
        elif tag == _GAVE_UP_TAG:
            told = _REPORTS.decode(about)
            culprits = tuple(sorted(set(told.culprits) & set(range(self.size))))
            self._reports[rank] = _GaveUp(culprits, told.text[:_MOST_TEXT])
        else:
            self._num_waiting_bytes[rank] += _MESSAGE_BYTES + body.nbytes
            self._messages.setdefault((rank, tag), deque()).append((about, body))

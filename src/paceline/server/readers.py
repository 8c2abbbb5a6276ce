"""Serves readers: processes that take published versions and rows as they change, and can change nothing.

Each has a thread of its own. Nothing that it does reaches the thread of the server, but what `feeds` says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn, final

from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.server.feeds import HasNoRows, RowFeeds, RowReading, RowsRequest
from paceline.server.versions import PublishedVersion, PublishedVersions, VersionGone
from paceline.transport.base import EMPTY, Connection
from paceline.update.rows.changes import CursorExpired
from paceline.wire.deltas import encode_delta
from paceline.wire.messages import Hello, check_caller
from paceline.wire.messages import decode as decode_hello
from paceline.wire.versions import (
    BytesFetched,
    DeltaFetched,
    EndLease,
    FetchBytes,
    FetchDelta,
    FindVersions,
    LeaseVersion,
    PublicationId,
    ReaderRefused,
    VersionLeased,
    VersionsFound,
    decode,
    encode,
    require_said_by_reader,
)

MAX_READERS: Final = 256  # connected at once
MAX_REQUESTS_PER_S: Final = 1000  # of one reader; more have to wait
_RECEIVE_S: Final = 10.0  # between two looks at whether the server closes, which wakes the thread anyway
_SEND_TIMEOUT_S: Final = 60.0
_CLOSING_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Published:
    """What readers of one server may read: the versions that were published, and the rows of its tables."""

    versions: PublishedVersions = field(default_factory=PublishedVersions)
    feeds: RowFeeds = field(default_factory=RowFeeds)


@final
class ReaderService:
    """The readers that are connected to one server.

    Args:
        published: what they may read, which goes on after `close`; by default what lasts until then.
    """

    def __init__(self, published: Published | None = None) -> None:
        self.published: Final = Published() if published is None else published
        self._owns_published = published is None
        self._lock = threading.Lock()
        self._serving: dict[Connection, threading.Thread] = {}
        self._closing = threading.Event()
        self._expelled: Collection[str] = frozenset()

    def take(self, connection: Connection) -> bool:
        """Serve a connection if it is a reader's, in a thread of its own; return whether it is."""
        if not is_reader(connection):
            return False
        thread = threading.Thread(target=self._serve, args=(connection,), name="paceline-reader", daemon=True)
        try:
            check_caller(decode_hello(connection.identity), connection)
            with self._lock:
                if self._closing.is_set() or connection.peer_identity.are_among(self._expelled):
                    raise PeerError("it may not read here, or not any more")
                if len(self._serving) >= MAX_READERS:
                    raise PeerError(f"there are {MAX_READERS} readers already")
                self._serving[connection] = thread
                thread.start()
        except (PeerError, RuntimeError) as error:  # or the system has no thread left
            with self._lock:
                self._serving.pop(connection, None)
            _send(connection, ReaderRefused(-1, str(error)))
            connection.close()
        return True

    def expel(self, names: Collection[str]) -> None:
        """End the readers whose certificate has one of these holders or serial numbers, and let no more of them in."""
        with self._lock:
            self._expelled = names
            found = [each for each in self._serving if each.peer_identity.are_among(names)]
        for connection in found:
            connection.close()

    def close(self) -> None:
        """End all connections, and join their threads."""
        self._closing.set()
        self.published.versions.wake()
        self.published.feeds.wake()
        with self._lock:
            serving = dict(self._serving)
        for connection in serving:
            connection.close()
        for thread in serving.values():
            thread.join(_CLOSING_TIMEOUT_S)
        if self._owns_published:
            self.published.versions.close()

    def _serve(self, connection: Connection) -> None:
        leased: dict[PublicationId, PublishedVersion] = {}
        rows = RowReading(self.published.feeds, self._closing)
        try:
            while not self._closing.is_set() and self._serve_for_a_second(connection, leased, rows):
                pass
        finally:
            rows.close()
            for version in leased.values():
                self.published.versions.release(version)
            with self._lock:
                self._serving.pop(connection, None)
            connection.close()

    def _serve_for_a_second(
        self, connection: Connection, leased: dict[PublicationId, PublishedVersion], rows: RowReading
    ) -> bool:
        """Answer as many requests as a reader may make in a second; return False when its connection has ended."""
        until = time.monotonic() + 1.0
        for _ in range(MAX_REQUESTS_PER_S):
            try:
                frame = connection.receive(timeout_s=_RECEIVE_S, place=_refuse_body)
            except DeadlineExceeded:
                return True
            except PeerError:
                return False
            try:
                message = decode(frame.header)
                require_said_by_reader(message)
                if isinstance(message, RowsRequest):
                    _answer_rows(connection, rows, message)
                else:
                    self._answer(connection, leased, message)
            except PeerError:
                return False
            if time.monotonic() >= until:
                return True
        self._closing.wait(until - time.monotonic())
        return True

    def _delta(
        self, leased: dict[PublicationId, PublishedVersion], wanted: FetchDelta
    ) -> tuple[int | None, memoryview]:
        new = _bytes_of(leased, wanted)
        return _delta_between(new, self.published.versions.find(wanted.base), wanted)

    def _answer(self, connection: Connection, leased: dict[PublicationId, PublishedVersion], message: object) -> None:
        """Answer one request; raises PeerError when the connection has ended."""
        number = -1
        try:
            match message:
                case FindVersions():
                    number = message.number
                    found = self.published.versions.wait_new(message, self._closing.is_set)
                    _say(connection, VersionsFound(number, found))
                case LeaseVersion():
                    number = message.number
                    version = leased.get(message.id)
                    if version is None:
                        version = leased[message.id] = self.published.versions.lease(message.id)
                    _say(connection, VersionLeased(number, version.head), memoryview(version.layout + version.digests))
                case FetchBytes():
                    number = message.number
                    _say(connection, BytesFetched(number), _bytes_of(leased, message))
                case FetchDelta():
                    number = message.number
                    num_words, body = self._delta(leased, message)
                    _say(connection, DeltaFetched(number, num_words), body)
                case EndLease():
                    version = leased.pop(message.id, None)
                    if version is not None:
                        self.published.versions.release(version)
                case _:
                    pass
        except UsageError as error:
            _say(connection, ReaderRefused(number, str(error), is_gone=isinstance(error, VersionGone)))


def _delta_between(new: memoryview, base: PublishedVersion | None, wanted: FetchDelta) -> tuple[int | None, memoryview]:
    """Return what a reader asks for: a delta, or the bytes themselves where that is no shorter, or cannot be had."""
    fits = base is not None and wanted.part < len(base.memories) and wanted.size_bytes % wanted.word_bytes == 0
    old = base.memories[wanted.part][wanted.start : wanted.start + wanted.size_bytes] if base and fits else EMPTY
    delta = encode_delta(old, new, wanted.word_bytes) if len(old) == len(new) else None
    return (None, new) if delta is None else delta


def _answer_rows(connection: Connection, rows: RowReading, request: RowsRequest) -> None:
    """Answer a request for rows; raises PeerError when the connection has ended."""
    try:
        answer, body = rows.answer(request)
    except UsageError as error:
        _say(
            connection, ReaderRefused(request.number, str(error), is_gone=isinstance(error, CursorExpired | HasNoRows))
        )
    else:
        _say(connection, answer, body)


def is_reader(connection: Connection) -> bool:
    """Return whether the process at the other end says that it is a reader."""
    try:
        hello = decode_hello(connection.identity)
    except PeerError:
        return False
    return isinstance(hello, Hello) and hello.role == "reader"


def _bytes_of(leased: dict[PublicationId, PublishedVersion], wanted: FetchBytes | FetchDelta) -> memoryview:
    """Return what a reader asks for, as a view; raises UsageError where there is no such thing."""
    version = leased.get(wanted.id)
    if version is None:
        raise VersionGone(f"version {wanted.id.number} of '{wanted.id.name}' is not leased")
    if wanted.part >= len(version.memories):
        raise UsageError(f"version {wanted.id.number} has {len(version.memories)} parts, and no part {wanted.part}")
    memory, stop = version.memories[wanted.part], wanted.start + wanted.size_bytes
    if stop > memory.nbytes:
        raise UsageError(f"part {wanted.part} of version {wanted.id.number} has {memory.nbytes} bytes, not {stop}")
    return memory[wanted.start : stop]


def _refuse_body(_header: bytes, size_bytes: int) -> NoReturn:
    raise PeerError(f"a reader sent {size_bytes} bytes beside a request")


def _say(connection: Connection, message: object, body: memoryview = EMPTY) -> None:
    connection.send(encode(message), body, timeout_s=_SEND_TIMEOUT_S)


def _send(connection: Connection, message: object) -> None:
    """Send a message to a connection that ends."""
    with suppress(PeerError):
        connection.send(encode(message), timeout_s=1.0)

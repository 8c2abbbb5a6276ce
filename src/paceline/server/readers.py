"""Serves readers: processes that take published versions and rows as they change, and can change nothing.

A relay serves its readers so, too. Each reader has a thread of its own. Nothing that it does reaches the thread of the
server, but what `feeds` says.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Final, NoReturn, final

import msgspec
from msgspec.structs import replace

from paceline.errors import ConnectionLost, DeadlineExceeded, PeerError, UsageError
from paceline.server.feeds import SILENT_S, HasNoRows, RowFeeds, RowReading, RowsRequest
from paceline.server.versions import PublishedVersion, PublishedVersions, VersionGone
from paceline.transport.base import EMPTY, Connection
from paceline.update.rows.changes import CursorExpired
from paceline.wire.deltas import encode_delta, encode_difference
from paceline.wire.messages import Hello, check_caller
from paceline.wire.messages import decode as decode_hello
from paceline.wire.versions import (
    BytesFetched,
    ChooseServer,
    DeltaFetched,
    EndLease,
    FetchBytes,
    FetchDelta,
    FindVersions,
    LeaseVersion,
    PublicationId,
    ReaderRefused,
    ServerChosen,
    VersionHead,
    VersionLeased,
    VersionsFound,
    decode,
    encode,
    require_said_by_reader,
)

MAX_READERS: Final = 256  # connected at once; with more, one gives way that asks for nothing, or of a crowd
MAX_REQUESTS_PER_S: Final = 1000  # of one reader; more have to wait
_RECEIVE_S: Final = 10.0  # between two looks at whether the server closes, which wakes the thread anyway
_SEND_TIMEOUT_S: Final = 60.0
_SHORT: Final = 0.02  # of the bytes themselves: a delta that nothing else is tried for
_CLOSING_TIMEOUT_S: Final = 5.0


class _NotComing(UsageError):
    """Bytes of a version that a relay fetches have not come to it."""


class Published(msgspec.Struct, frozen=True):
    """What readers of one server may read: the versions that were published, and the rows of its tables."""

    versions: PublishedVersions = msgspec.field(default_factory=PublishedVersions)
    feeds: RowFeeds = msgspec.field(default_factory=RowFeeds)


@final
class ReaderService:
    """The readers that are connected to one server, or to a relay, which has the parts of several.

    Args:
        published: what they may read, which goes on after `close`; by default what lasts until then.
        others: the same of the further servers, by rank.
    """

    def __init__(self, published: Published | None = None, others: Sequence[Published] = ()) -> None:
        self.published: Final = Published() if published is None else published
        self.parts: Final = (self.published, *others)
        self._owns_published = published is None
        self._lock = threading.Lock()
        self._serving: dict[Connection, threading.Thread] = {}
        self._readings: dict[Connection, _Reading] = {}  # of these, but for those that have given way
        self._closing = threading.Event()
        self._expelled: Collection[str] = frozenset()

    @property
    def is_unused(self) -> bool:
        """Whether no reader is connected, and nothing was published."""
        with self._lock:
            return not self._serving and all(part.versions.is_empty for part in self.parts)

    def take(self, connection: Connection) -> bool:
        """Serve a connection if it is a reader's, in a thread of its own; return whether it is."""
        if not is_reader(connection):
            return False
        reading = _Reading(connection, self.parts, self._closing)
        thread = threading.Thread(target=self._serve, args=(connection, reading), name="paceline-reader", daemon=True)
        try:
            check_caller(decode_hello(connection.identity), connection)
            with self._lock:
                if self._closing.is_set() or connection.peer_identity.are_among(self._expelled):
                    raise PeerError("it may not read here, or not any more")
                if len(self._readings) >= MAX_READERS:
                    self._make_room(connection)
                self._serving[connection], self._readings[connection] = thread, reading
                thread.start()
        except (PeerError, RuntimeError) as error:  # or the system has no thread left
            with self._lock:
                self._serving.pop(connection, None)
                self._readings.pop(connection, None)
            refuse_reader(connection, str(error))
        return True

    def _make_room(self, coming: Connection) -> None:
        """End the reader that has asked for nothing for the longest time; in the lock.

        It may have asked lately where its machine and certificate have more readers than those of the one that comes.

        Raises:
            PeerError: all have asked lately, and no other machine or certificate has more of them.
        """
        origins = Counter(map(_origin, self._readings))
        crowded, most = origins.most_common(1)[0]
        is_crowded = most > origins[_origin(coming)] + 1
        readings = [each for each in self._readings if not is_crowded or _origin(each) == crowded]
        silent = min(readings, key=lambda each: self._readings[each].asked_s)
        if not is_crowded and time.monotonic() - self._readings[silent].asked_s < SILENT_S:
            raise PeerError(f"there are {MAX_READERS} readers already")
        del self._readings[silent]
        silent.close()

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
        for part in self.parts:
            part.versions.wake()
            part.feeds.wake()
        with self._lock:
            serving = dict(self._serving)
        for connection in serving:
            connection.close()
        for thread in serving.values():
            thread.join(_CLOSING_TIMEOUT_S)
        if self._owns_published:
            self.published.versions.close()

    def _serve(self, connection: Connection, reading: _Reading) -> None:
        try:
            while not self._closing.is_set() and self._serve_for_a_second(reading):
                pass
        finally:
            reading.end()
            connection.close()
            with self._lock:  # last: `close` joins the threads that are known
                self._serving.pop(connection, None)
                self._readings.pop(connection, None)

    def _serve_for_a_second(self, reading: _Reading) -> bool:
        """Answer as many requests as a reader may make in a second; return False when its connection has ended."""
        until = time.monotonic() + 1.0
        for _ in range(MAX_REQUESTS_PER_S):
            try:
                reading.answer_next()
            except DeadlineExceeded:
                return True
            except PeerError:
                return False
            if time.monotonic() >= until:
                return True
        self._closing.wait(until - time.monotonic())
        return True


@final
class _Reading:
    """One reader, which reads the part of one server: what it has leased and was shown there. For one thread.

    `asked_s`: when its last request came (monotonic seconds), for any thread.
    """

    def __init__(self, connection: Connection, parts: Sequence[Published], closing: threading.Event) -> None:
        self._connection = connection
        self._parts = parts
        self._closing = closing
        self.asked_s = time.monotonic()
        self._begin(parts[0])

    def _begin(self, published: Published) -> None:
        self._versions = published.versions
        self._leased: dict[PublicationId, PublishedVersion] = {}
        self._held: PublishedVersion | None = None  # until it is leased, or another one is asked for
        self._rows = RowReading(published.feeds, self._closing)

    def answer_next(self) -> None:
        """Wait for a request, and answer it.

        Raises:
            DeadlineExceeded: there is none yet.
            PeerError: the connection has ended, or has to: the reader says what it may not.
        """
        frame = self._connection.receive(timeout_s=_RECEIVE_S, place=_refuse_body)
        self.asked_s = time.monotonic()
        message = decode(frame.header)
        require_said_by_reader(message)
        try:
            if isinstance(message, RowsRequest):
                _answer_rows(self._connection, self._rows, message)
            else:
                self._answer(message)
        except DeadlineExceeded as error:  # an answer that the reader did not take
            raise ConnectionLost(str(error)) from error

    def end(self) -> None:
        """Let go of what is leased and shown."""
        self._rows.close()
        self._end_hold()
        for version in self._leased.values():
            self._versions.release(version)

    def _end_lease(self, wanted: PublicationId | None) -> None:
        if wanted is None:
            self._end_hold()
        elif wanted in self._leased:
            self._versions.release(self._leased.pop(wanted))

    def _end_hold(self) -> None:
        if self._held is not None:
            self._versions.release(self._held)
            self._held = None

    def _answer(self, message: object) -> None:
        """Answer one request; raises PeerError when the connection has ended."""
        number = -1
        try:
            match message:
                case ChooseServer():
                    number = message.number
                    self._choose(message.server)
                    _say(self._connection, ServerChosen(number, len(self._parts)))
                case FindVersions():
                    number = message.number
                    self._versions.problem_of(message.name)  # raises for a name that is never here
                    self._end_hold()
                    found, self._held = self._versions.wait_new(message, self._closing.is_set)
                    problem = self._versions.problem_of(message.name)
                    _say(self._connection, VersionsFound(number, found, problem))
                case LeaseVersion():
                    number = message.number
                    version = self._leased.get(message.id)
                    if version is None:
                        version = self._leased[message.id] = self._versions.lease(message.id)
                    self._end_hold()
                    head, digests = _described(version, with_digests=message.with_digests)
                    _require_kept(version)
                    _say(self._connection, VersionLeased(number, head), memoryview(version.layout + digests))
                case FetchBytes():
                    number = message.number
                    _say(self._connection, BytesFetched(number), self._bytes_of(message))
                case FetchDelta():
                    number = message.number
                    new, base = self._bytes_of(message), self._versions.find(message.base)
                    answer, body = _delta_between(new, base, message)
                    _say(self._connection, answer, body)
                case EndLease():
                    self._end_lease(message.id)
                case _:
                    pass
        except UsageError as error:
            refused = ReaderRefused(number, str(error), is_gone=isinstance(error, VersionGone))
            _say(self._connection, refused)
            if isinstance(error, _NotComing):  # nor what else this reader has asked for: it goes on elsewhere, or anew
                raise ConnectionLost(str(error)) from error

    def _bytes_of(self, wanted: FetchBytes | FetchDelta) -> memoryview:
        """Return what a reader asks for, as a view; blocks while it is coming.

        Raises:
            UsageError: there is no such thing, or it does not come.
        """
        version = self._leased.get(wanted.id)
        if version is None:
            raise VersionGone(f"version {wanted.id.number} of '{wanted.id.name}' is not leased")
        memories = version.memories
        _require_kept(version)
        if wanted.part >= len(memories):
            raise UsageError(f"version {wanted.id.number} has {len(memories)} parts, and no part {wanted.part}")
        memory, stop = memories[wanted.part], wanted.start + wanted.size_bytes
        if stop > memory.nbytes:
            raise UsageError(f"part {wanted.part} of version {wanted.id.number} has {memory.nbytes} bytes, not {stop}")
        if not self._versions.wait_bytes(version, wanted.part, stop, self._closing.is_set):
            raise _NotComing(
                f"version {wanted.id.number} of '{wanted.id.name}' comes to this relay no further now: byte {stop} of "
                f"part {wanted.part} is not here"
            )
        return memory[wanted.start : stop]

    def _choose(self, server: int) -> None:
        """Read the part of another server from now on."""
        if server >= len(self._parts):
            raise UsageError(
                f"a version has parts of {len(self._parts)} servers here, and none of server {server}: connect anew, "
                "as the job may have begun anew with others"
            )
        self.end()
        self._begin(self._parts[server])


def _require_kept(version: PublishedVersion) -> None:
    """Raise VersionGone for a version that was let go."""
    if version.is_let_go:
        made = version.head.id
        raise VersionGone(
            f"version {made.number} of '{made.name}' is kept no longer: readers hold more than may be kept, and had "
            "asked for others since"
        )


def _described(version: PublishedVersion, *, with_digests: bool) -> tuple[VersionHead, bytes]:
    """Return what a reader is told of a version; blocks while the digests that it wants are computed."""
    return version.describe() if with_digests else (replace(version.head, digest=b""), b"")


def _delta_between(
    new: memoryview, base: PublishedVersion | None, wanted: FetchDelta
) -> tuple[DeltaFetched, memoryview]:
    """Return what a reader asks for: the shorter of a delta and, if it may be, a compressed difference.

    It is the bytes themselves where these are no longer, or the base is gone.
    """
    memories = () if base is None else base.memories
    fits = wanted.part < len(memories) and wanted.size_bytes % wanted.word_bytes == 0
    old = memories[wanted.part][wanted.start : wanted.start + wanted.size_bytes] if fits else EMPTY
    if len(old) != len(new):
        return DeltaFetched(wanted.number, None), new
    num_words, body = encode_delta(old, new, wanted.word_bytes) or (None, new)
    if wanted.compress and len(body) > _SHORT * len(new):
        difference = encode_difference(old, new, wanted.word_bytes)
        if difference is not None and len(difference) < len(body):
            return DeltaFetched(wanted.number, None, is_compressed=True), difference
    return DeltaFetched(wanted.number, num_words), body


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


def _origin(connection: Connection) -> tuple[str, str]:
    """Return from which machine a reader comes, and the serial number of its certificate."""
    return connection.peer.rpartition(":")[0], connection.peer_identity.serial


def is_reader(connection: Connection) -> bool:
    """Return whether the process at the other end says that it is a reader."""
    try:
        hello = decode_hello(connection.identity)
    except PeerError:
        return False
    return isinstance(hello, Hello) and hello.role in ("reader", "relay")


def _refuse_body(_header: bytes, size_bytes: int) -> NoReturn:
    raise PeerError(f"a reader sent {size_bytes} bytes beside a request")


def _say(connection: Connection, message: object, body: memoryview = EMPTY) -> None:
    connection.send(encode(message), body, timeout_s=_SEND_TIMEOUT_S)


def refuse_reader(connection: Connection, reason: str) -> None:
    """Say why a reader is not served, and end its connection."""
    with suppress(PeerError):
        connection.send(encode(ReaderRefused(-1, reason)), timeout_s=1.0)
    connection.close()

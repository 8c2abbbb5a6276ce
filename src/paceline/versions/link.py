"""A reader's connection to one server: requests one after the other, the checked bytes of versions, and rows."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar, final

import msgspec
from msgspec.structs import replace
from torch import Tensor

from paceline.errors import PeerError, Refused, UsageError
from paceline.transport.base import EMPTY, Connection
from paceline.transport.buffers import fresh_buffer
from paceline.transport.deadline import Deadline
from paceline.transport.segments import PeerMemory
from paceline.update.dtypes import torch_dtype
from paceline.update.rows.changes import LogEntry
from paceline.update.rows.spec import RowTableSpec
from paceline.versions.places import PublishingServers
from paceline.wire.deltas import WordBytes, apply_delta, apply_difference
from paceline.wire.messages import Hello, check_server, check_source
from paceline.wire.messages import encode as encode_hello
from paceline.wire.row_codec import changes_of
from paceline.wire.versions import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    MAX_WAIT_S,
    BytesFetched,
    ChangesFetched,
    ChooseServer,
    DeltaFetched,
    DescribeRows,
    EndLease,
    FetchBytes,
    FetchChanges,
    FetchDelta,
    FetchRows,
    FindVersions,
    FollowRows,
    LeaseVersion,
    PublicationId,
    ReaderRefused,
    RowChoice,
    RowsDescribed,
    RowsFetched,
    RowsShown,
    ServerChosen,
    VersionHead,
    VersionLeased,
    VersionsFound,
    chunk_digests,
    decode,
    digest_of,
    encode,
    num_chunks,
)

CONNECT_TIMEOUT_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 60.0
_GRACE_S: Final = 5.0
_PIECE_BYTES: Final = 4 * CHUNK_BYTES  # that one request asks for, where bytes are copied
_AHEAD_BYTES: Final = 3 * _PIECE_BYTES  # of requests under way, so that the line is never idle
_MAX_TRIES: Final = 3  # for bytes that do not have the digest that they should have
MAX_VERSION_BYTES: Final = 1 << 42
_ROWS: Final = msgspec.msgpack.Decoder(RowTableSpec)
_Answer = TypeVar("_Answer")


class Gone(Refused):
    """What is asked for is not there, however often it is asked for."""


class VersionNotThere(Gone):
    """There is no such version, or no longer: one that was not kept, or that a server did not make."""


class DamagedVersion(PeerError):
    """Bytes of a version do not have its digest, however often they are asked for."""


class LeasedPart(msgspec.Struct, frozen=True):
    """One server's part of a version, kept for this reader.

    `digests`: those of all chunks, in the order of parts; empty, as the digest in the head, where bytes are mapped.
    """

    head: VersionHead
    layout: memoryview
    digests: memoryview

    def digest_at(self, chunk: int) -> bytes:
        """Return the digest of a chunk, counted over all parts."""
        return bytes(self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES])


@dataclass(slots=True)
class PartMemory:
    """The bytes of a server's part of a version, as far as they are here; by part.

    Those that came over a network have their digests. With `is_mapped` they are memory of the server, which is sealed.
    """

    memories: dict[int, memoryview] = field(default_factory=dict[int, memoryview])
    have: dict[int, int] = field(default_factory=dict[int, int])  # by part: bytes from its beginning on
    is_mapped: bool = False
    received_bytes: int = 0  # over the network

    def was_written(self) -> bool:
        """Return whether this process has written to memory that it maps; True where that cannot be found out."""
        mapped = (memory.obj for memory in self.memories.values())
        return any(isinstance(each, PeerMemory) and each.was_written_anywhere() for each in mapped)

    def make_room(self, leased: LeasedPart) -> None:
        """Have memory for all bytes of a server's part, before they come."""
        for index, part in enumerate(leased.head.parts):
            if part.size_bytes and index not in self.memories:
                self.memories[index] = fresh_buffer(part.size_bytes)


class Base(msgspec.Struct, frozen=True):
    """A version that this reader has, from which another is told: one server's part of it.

    `word_bytes`: by table, of one element.
    """

    leased: LeasedPart
    memory: PartMemory
    word_bytes: Mapping[str, WordBytes]


@dataclass(slots=True)
class _Piece:
    """Some bytes of a part: what was asked for, if they are not those of the base."""

    start: int
    stop: int
    asked: int | None
    is_delta: bool = False


@final
class ReaderLink:
    """A connection to one server. One thread at a time."""

    def __init__(self, servers: PublishingServers, server: int, timeout_s: float, *, compress: bool = False) -> None:
        """Connect to a server by its rank; raises PeerError if it is not there, or does not let this reader in.

        `compress`: have it compress what has changed between versions.
        """
        transport: Final = servers.transport
        self.num_servers = len(servers.addresses)
        self.problem = ""  # why versions may be missing at the other end, as it said last
        self._server = server
        # Within one process, what is mapped is the server's own memory, which this reader could write to.
        self.maps = transport.maps_memory and transport.name != "memory"
        self._compress = compress
        # What a relay has, its readers get: in smaller pieces sooner.
        self._piece_bytes = CHUNK_BYTES if servers.role == "relay" else _PIECE_BYTES
        self._number = 0
        self.deadline = Deadline.after(timeout_s)  # for answers, of which each has a few seconds more
        hello = encode_hello(Hello(servers.role, servers.rank, 0, 0))
        self._connection: Connection = transport.connect(
            servers.address_of(server), hello, timeout_s=min(timeout_s, CONNECT_TIMEOUT_S)
        )
        if servers.share_address:
            check_source(self._connection)
            self.num_servers = self._choose(server)
        else:
            check_server(self._connection, server)

    def close(self) -> None:
        """End the connection, and with it all leases."""
        self._connection.close()

    def find(
        self, name: str, known: tuple[PublicationId, ...], wait_s: float, *, hold: bool = False
    ) -> tuple[PublicationId, ...]:
        """Return the versions here, the newest last; blocks until one is not known, for `wait_s` or 5 s at most.

        With `hold` the newest is kept, unless it is known, until `lease`, `end_hold` or the next call.
        """
        wait_s = max(0.0, min(wait_s, MAX_WAIT_S))
        number = self._ask(FindVersions(self._next(), name, known, wait_s, hold))
        found = self._answer(number, VersionsFound)[0]
        self.problem = found.problem
        return found.ids

    def lease(self, wanted: PublicationId) -> LeasedPart:
        """Have the server keep a version.

        Raises:
            VersionNotThere: it does not have it.
            Refused: it keeps too many already.
        """
        number = self._ask(LeaseVersion(self._next(), wanted, with_digests=not self.maps))
        leased, body = self._answer(number, VersionLeased)
        head = leased.head
        chunks = 0 if self.maps else sum(num_chunks(part.size_bytes) for part in head.parts)
        size_bytes = sum(part.size_bytes for part in head.parts)
        if len(body) != head.num_layout_bytes + chunks * DIGEST_BYTES or size_bytes > MAX_VERSION_BYTES:
            raise PeerError(f"server {self._server} describes a version of {size_bytes} bytes with {len(body)} bytes")
        layout, digests = body[: head.num_layout_bytes], body[head.num_layout_bytes :]
        digest = b"" if self.maps else digest_of(layout, digests)
        if head.id != wanted or digest != head.digest:
            raise DamagedVersion(f"server {self._server} describes a version that does not have its digest")
        return LeasedPart(head, layout, digests)

    def end_hold(self) -> None:
        """Say that what is held since `find` need not be kept. Does not block for an answer."""
        self._connection.send(encode(EndLease(None)), timeout_s=_ANSWER_TIMEOUT_S)

    def end_lease(self, version: PublicationId) -> None:
        """Say that a version need not be kept. Does not block for an answer."""
        self._connection.send(encode(EndLease(version)), timeout_s=_ANSWER_TIMEOUT_S)

    def fetch(
        self, leased: LeasedPart, into: PartMemory, base: Base | None = None, came: Callable[[], None] | None = None
    ) -> None:
        """Fetch the missing bytes of a version; blocks. After an error, what has arrived stays for another try.

        Over shared memory it is mapped and not copied. Otherwise only what has changed since the base is sent, and what
        of that does not have its digest then is sent whole. `came` is called whenever more of it is here.
        """
        if base is not None and base.leased.head.parts != leased.head.parts:
            base = None
        first_chunk = 0
        for index, part in enumerate(leased.head.parts):
            if into.have.get(index, 0) < part.size_bytes:
                if self.maps:
                    self._map(leased, index, into)
                else:
                    for _ in self._copy(leased, index, first_chunk, into, base):
                        if came is not None:
                            came()
            first_chunk += num_chunks(part.size_bytes)

    def describe_rows(self, table: str) -> RowTableSpec:
        """Return the declaration of a row table.

        Raises:
            Gone: the table has no rows.
            Refused: there is no such table yet.
        """
        body = self._answer(self._ask(DescribeRows(self._next(), table)), RowsDescribed)[1]
        try:
            spec = _ROWS.decode(body)
            spec.validate()
        except (msgspec.DecodeError, UnicodeDecodeError, UsageError) as error:
            raise PeerError(f"server {self._server} describes table '{table}' in a malformed way: {error}") from error
        return spec

    def show_rows(self, table: str) -> RowsShown:
        """Have the server show all rows of a table as they are now; raises Refused where it cannot now."""
        return self._answer(self._ask(FollowRows(self._next(), table)), RowsShown)[0]

    def fetch_rows(self, piece: int, spec: RowTableSpec, only: RowChoice | None = None) -> tuple[Tensor, Tensor]:
        """Return the ids, (n,), and values, (n, width), of a piece of the rows that were shown, which is had once."""
        fetched, body = self._answer(self._ask(FetchRows(self._next(), piece, only)), RowsFetched)
        ids, values, _ = changes_of(body, [(fetched.num_rows, 0)], spec.width, torch_dtype(spec.dtype))[0]
        return ids, values

    def ask_changes(self, table: str, log: str, since: int, wait_s: float, only: RowChoice | None = None) -> int:
        """Ask for the changes after entry `since` of a log; return the number of the request. Does not block."""
        return self._ask(FetchChanges(self._next(), table, log, since, wait_s, only))

    def changes(self, number: int, spec: RowTableSpec) -> tuple[ChangesFetched, list[LogEntry]]:
        """Return the answer to a request for changes, and these; blocks for it.

        Raises:
            Gone: the log does not have them any more.
        """
        fetched, body = self._answer(number, ChangesFetched)
        nums = [(each.num_rows, each.num_removed) for each in fetched.entries]
        found = changes_of(body, nums, spec.width, torch_dtype(spec.dtype))
        return fetched, [LogEntry(head.clock, *each) for head, each in zip(fetched.entries, found, strict=True)]

    def _map(self, leased: LeasedPart, index: int, into: PartMemory) -> None:
        size_bytes = leased.head.parts[index].size_bytes
        number = self._ask(FetchBytes(self._next(), leased.head.id, index, 0, size_bytes))
        body = self._answer(number, BytesFetched, size_bytes)[1]
        # Without shared memory there is nothing to map, and the bytes come through the socket.
        into.is_mapped = isinstance(body.obj, PeerMemory)
        into.memories[index], into.have[index] = body, size_bytes

    def _copy(
        self, leased: LeasedPart, index: int, first_chunk: int, into: PartMemory, base: Base | None
    ) -> Iterator[None]:
        """Fetch a part piece by piece, some requests ahead; each piece is checked before it counts, and is yielded."""
        size_bytes = leased.head.parts[index].size_bytes
        into.make_room(leased)
        memory = into.memories[index]
        wanted = iter(range(into.have.get(index, 0), size_bytes, self._piece_bytes))
        under_way: deque[_Piece] = deque()
        while True:
            for start in _some(wanted, _AHEAD_BYTES // self._piece_bytes - len(under_way)):
                under_way.append(self._ask_piece(leased, index, first_chunk, start, base))
            if not under_way:
                return
            piece = under_way.popleft()
            body = self._receive_piece(leased, index, piece, into, base)
            if body is None or _damaged(leased, first_chunk + piece.start // CHUNK_BYTES, body):
                for other in under_way:  # answers come in order
                    self._receive_piece(leased, index, other, into, base)
                under_way.clear()
                self._again(leased, index, first_chunk, memory[piece.start : piece.stop], piece.start)
                into.received_bytes += piece.stop - piece.start
                wanted = iter(range(piece.stop, size_bytes, self._piece_bytes))
            else:
                memory[piece.start : piece.stop] = body
            into.have[index] = piece.stop
            yield

    def _ask_piece(self, leased: LeasedPart, index: int, first_chunk: int, start: int, base: Base | None) -> _Piece:
        """Ask for a piece of a part, unless the base has the same."""
        part = leased.head.parts[index]
        stop, chunk = min(start + self._piece_bytes, part.size_bytes), first_chunk + start // CHUNK_BYTES
        if base is None:
            asked = self._ask(FetchBytes(self._next(), leased.head.id, index, start, stop - start))
            return _Piece(start, stop, asked)
        chunks = range(chunk, chunk + num_chunks(stop - start))
        if all(leased.digest_at(each) == base.leased.digest_at(each) for each in chunks):
            return _Piece(start, stop, None)
        head, word_bytes = base.leased.head, base.word_bytes.get(part.table, 1)
        wanted = FetchDelta(
            self._next(), leased.head.id, head.id, index, start, stop - start, word_bytes, self._compress
        )
        return _Piece(start, stop, self._ask(wanted), is_delta=True)

    def _receive_piece(
        self, leased: LeasedPart, index: int, piece: _Piece, into: PartMemory, base: Base | None
    ) -> memoryview | None:
        """Return the bytes of a piece, which are not checked yet; None where a delta did not fit."""
        size_bytes = piece.stop - piece.start
        old = EMPTY if base is None else base.memory.memories[index][piece.start : piece.stop]
        if piece.asked is None:
            return old
        if not piece.is_delta or base is None:
            body = self._answer(piece.asked, BytesFetched, size_bytes)[1]
            into.received_bytes += len(body)
            return body
        answer, body = self._answer(piece.asked, DeltaFetched)
        into.received_bytes += len(body)
        if answer.num_words is None and not answer.is_compressed:
            return body if len(body) == size_bytes else None
        made, word_bytes = memoryview(bytearray(old)), base.word_bytes.get(leased.head.parts[index].table, 1)
        try:
            if answer.num_words is None:
                apply_difference(body, word_bytes, made)
            else:
                apply_delta(body, answer.num_words, word_bytes, made)
        except PeerError:
            return None
        return made

    def _again(self, leased: LeasedPart, index: int, first_chunk: int, out: memoryview, start: int) -> None:
        """Fetch a piece anew that did not have its digests; raises DamagedVersion if it never has."""
        for _ in range(_MAX_TRIES - 1):
            number = self._ask(FetchBytes(self._next(), leased.head.id, index, start, out.nbytes))
            body = self._answer(number, BytesFetched, out.nbytes)[1]
            if not _damaged(leased, first_chunk + start // CHUNK_BYTES, body):
                out[:] = body
                return
        raise DamagedVersion(
            f"server {self._server} sends bytes {start} to {start + out.nbytes} of version {leased.head.id.number} of "
            f"'{leased.head.id.name}' without the digest that they should have, {_MAX_TRIES} times in a row"
        )

    def _choose(self, server: int) -> int:
        """Choose which server's part is read over this connection; return how many servers there are."""
        try:
            return self._answer(self._ask(ChooseServer(self._next(), server)), ServerChosen)[0].num_servers
        except PeerError:
            self.close()
            raise

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _ask(
        self,
        request: ChooseServer
        | FindVersions
        | LeaseVersion
        | FetchBytes
        | FetchDelta
        | DescribeRows
        | FollowRows
        | FetchRows
        | FetchChanges,
    ) -> int:
        self._connection.send(encode(request), timeout_s=_ANSWER_TIMEOUT_S)
        return request.number

    def _answer(self, number: int, kind: type[_Answer], size_bytes: int | None = None) -> tuple[_Answer, memoryview]:
        """Wait for the answer to a request, and return it with the bytes beside it."""
        frame = self._connection.receive(timeout_s=min(_ANSWER_TIMEOUT_S, self.deadline.remaining_s() + _GRACE_S))
        message = decode(frame.header)
        if isinstance(message, ReaderRefused):
            gone = Gone if issubclass(kind, ChangesFetched | RowsDescribed) else VersionNotThere
            raise (gone if message.is_gone else Refused)(f"server {self._server}: {message.reason}")
        if not isinstance(message, kind) or getattr(message, "number", number) != number:
            raise PeerError(f"server {self._server} answers with a {type(message).__name__} that was not asked for")
        if size_bytes is not None and len(frame.body) != size_bytes:
            raise PeerError(f"server {self._server} sent {len(frame.body)} bytes of a version, expected {size_bytes}")
        return message, frame.body


def described(leased: LeasedPart, memory: PartMemory) -> LeasedPart:
    """Return a server's part with its digests, which are computed where it was leased without."""
    if leased.head.digest:
        return leased
    memories = (memory.memories[index] for index, part in enumerate(leased.head.parts) if part.size_bytes)
    digests = b"".join(digest for each in memories for digest in chunk_digests(each))
    head = replace(leased.head, digest=digest_of(leased.layout, digests))
    return LeasedPart(head, leased.layout, memoryview(digests))


def is_intact(leased: LeasedPart, memory: PartMemory) -> bool:
    """Return whether all bytes of a server's part have their digests; of mapped ones, whether none was written here."""
    if memory.is_mapped:
        return not memory.was_written()
    chunk = 0
    for index, part in enumerate(leased.head.parts):
        if part.size_bytes and _damaged(leased, chunk, memory.memories[index]):
            return False
        chunk += num_chunks(part.size_bytes)
    return True


def _damaged(leased: LeasedPart, chunk: int, body: memoryview) -> bool:
    """Return whether bytes that begin with a chunk do not have the digests of their chunks."""
    return any(
        hashlib.sha256(body[start : start + CHUNK_BYTES]).digest() != leased.digest_at(chunk + start // CHUNK_BYTES)
        for start in range(0, body.nbytes, CHUNK_BYTES)
    )


def _some(numbers: Iterator[int], most: int) -> Iterator[int]:
    """Return the next few numbers."""
    for _ in range(most):
        number = next(numbers, None)
        if number is None:
            return
        yield number

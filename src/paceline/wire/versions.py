"""The messages between readers and servers: published versions, leases on them and their bytes; rows as they change.

A reader has a role and messages of its own: none of these can change a table, and no other is decoded from a reader. A
version is named by its `PublicationId`; it never changes, and each server holds one part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec

from paceline.errors import PeerError, UsageError
from paceline.update.table import MAX_NAME
from paceline.wire.deltas import WordBytes
from paceline.wire.messages import MessageCodec

CHUNK_BYTES: Final = 1 << 20  # that one digest covers
DIGEST_BYTES: Final = 32
MAX_FETCH_BYTES: Final = 1 << 34  # of one answer; over tcp a reader asks for less at a time
MAX_DELTA_BYTES: Final = 1 << 24  # of the bytes that one delta is of
MAX_WAIT_S: Final = 5.0  # for one answer; a reader that wants to wait longer asks again
MAX_KEPT: Final = 64  # versions of one name, those aside that are kept for readers alone
MAX_LEASED: Final = 8  # versions of one name that are kept for readers alone
MAX_KNOWN: Final = 2 * (MAX_KEPT + MAX_LEASED)  # that a reader names: each is compared with all that are there
MAX_NAMES: Final = 64  # published on one server
MAX_PARTS: Final = 1024  # tables in one version
MAX_PUBLISHED_NAME: Final = 100
MAX_SERVERS: Final = 4096  # that hold one version
MAX_CHANGES_WAIT_S: Final = 0.5  # for one answer
MAX_CHOSEN_IDS: Final = 4096  # of one reader of changes
MAX_ROW_PARTS: Final = 1 << 20

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PUBLISHED_NAME)]
Series = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
TableName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
LogName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class PublicationId(msgspec.Struct, frozen=True):
    """One version of a name: `number` is the clock at which it was published, in the `series` of one publisher."""

    name: Name
    series: Series
    number: Size


class PublishedPart(msgspec.Struct, frozen=True):
    """The elements from `start` on of a table, as `size_bytes` bytes in the part of one server."""

    table: str
    start: Size
    size_bytes: Size


class VersionHead(msgspec.Struct, frozen=True):
    """What a server says of its part of a version.

    `digest` is the SHA-256 of the layout and of the digests of all chunks, in the order of `parts`; empty for a reader
    that does without.
    """

    id: PublicationId
    digest: bytes
    parts: tuple[PublishedPart, ...]
    num_layout_bytes: Size


class PublishedTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a version: its elements follow each other from `start` on in a table, or in the layout's `rest`.

    `table`: empty for those in the `rest`, where `start` counts bytes.
    """

    name: str
    table: str
    start: Size
    shape: tuple[Size, ...]
    dtype: str


class VersionLayout(msgspec.Struct, frozen=True, array_like=True):
    """Which tensors a version has, and the values of those that no table has, such as counts in buffers.

    `absent`: parameters of the model that no server holds, as they are frozen: readers take them from elsewhere.
    """

    tensors: tuple[PublishedTensor, ...]
    rest: bytes = b""
    absent: tuple[str, ...] = ()


_LAYOUT: Final = msgspec.msgpack.Decoder(VersionLayout)
encode_layout: Final = msgspec.msgpack.Encoder().encode


def decode_layout(encoded: memoryview) -> VersionLayout:
    """Read a layout; raises PeerError when it is none."""
    try:
        return _LAYOUT.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"a version has a malformed layout ({error}): is the publisher of another version?") from error


class FindVersions(msgspec.Struct, frozen=True):
    """From a reader: say which versions of this name there are, the newest last.

    Reply when there is one that is not in `known`, or after `wait_s` seconds, up to `MAX_WAIT_S`. With `hold`, keep the
    newest until I have leased one or ask again, if it is not in `known`: it may be dropped before I lease it otherwise.
    """

    number: int
    name: Name
    known: Annotated[tuple[PublicationId, ...], msgspec.Meta(max_length=MAX_KNOWN)]
    wait_s: float
    hold: bool = False


class LeaseVersion(msgspec.Struct, frozen=True):
    """From a reader: keep this version until I end the lease, or my connection ends; reply with its head.

    The body of the answer has the layout, then the digests of all chunks. A reader that maps the bytes does without
    digests: nothing happens to them on the way.
    """

    number: int
    id: PublicationId
    with_digests: bool = True


class FetchBytes(msgspec.Struct, frozen=True):
    """From a reader: send me these bytes of a part of a version that I have leased."""

    number: int
    id: PublicationId
    part: Size
    start: Size
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_FETCH_BYTES)]


class FetchDelta(msgspec.Struct, frozen=True):
    """From a reader: send me what these bytes of a part of a leased version have changed from those of `base`.

    The answer is all of them where `base` is not here any more, or that is shorter. Words have `word_bytes`. With
    `compress` it may be a compressed difference, where that is shorter.
    """

    number: int
    id: PublicationId
    base: PublicationId
    part: Size
    start: Size
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_DELTA_BYTES)]
    word_bytes: WordBytes
    compress: bool = False


class EndLease(msgspec.Struct, frozen=True):
    """From a reader: I no longer need this version; without an id, the one that is held for me. There is no answer."""

    id: PublicationId | None


class ChooseServer(msgspec.Struct, frozen=True):
    """From a reader: what I ask for from now on is of the part of this server; reply with how many servers there are.

    A reader of an address says this before anything else; a relay has the parts of all servers.
    """

    number: int
    server: Size


class ServerChosen(msgspec.Struct, frozen=True):
    """From a server or a relay: you read that part, and a version has so many."""

    number: int
    num_servers: Annotated[int, msgspec.Meta(ge=1, le=MAX_SERVERS)]


class VersionsFound(msgspec.Struct, frozen=True):
    """From a server: these versions of the name are here, the newest last.

    `problem`: why newer ones may be missing, from a relay that does not reach what it reads from; else empty.
    """

    number: int
    ids: tuple[PublicationId, ...]
    problem: str = ""


class VersionLeased(msgspec.Struct, frozen=True):
    """From a server: this version is kept for you; its layout, and the digests that you want, travel beside this."""

    number: int
    head: VersionHead


class BytesFetched(msgspec.Struct, frozen=True):
    """From a server: the bytes that you have asked for travel beside this."""

    number: int


class DeltaFetched(msgspec.Struct, frozen=True):
    """From a server: a delta of so many words travels beside this; without a number, the bytes themselves do.

    `is_compressed`: it is a compressed difference instead, without a number.
    """

    number: int
    num_words: Size | None
    is_compressed: bool = False


class ReaderRefused(msgspec.Struct, frozen=True):
    """From a server: your request has failed, for this reason. `is_gone`: what you ask for is not here any more."""

    number: int
    reason: str
    is_gone: bool = False


class DescribeRows(msgspec.Struct, frozen=True):
    """From a reader: reply with the declaration of this row table, as msgpack in the body."""

    number: int
    table: TableName


class RowsDescribed(msgspec.Struct, frozen=True):
    """From a server: the declaration of the table travels beside this."""

    number: int


class FollowRows(msgspec.Struct, frozen=True):
    """From a reader: show me the rows of this table as they are now, instead of those that I was shown before."""

    number: int
    table: TableName


class RowsShown(msgspec.Struct, frozen=True):
    """From a server: ask for the rows, in `num_pieces` pieces. They are those at an entry of the log of changes.

    Args:
        number: of the request.
        log: name of the log.
        sequence: number of the entry.
        clock: every clock below is complete there.
        num_pieces: of the rows.
    """

    number: int
    log: LogName
    sequence: Size
    clock: int
    num_pieces: Size


class RowChoice(msgspec.Struct, frozen=True):
    """The rows that a reader wants: those with these ids, or, without ids, one of `num_parts` equal parts of all rows.

    Args:
        ids: int64, 8 bytes each.
        part: those whose hash leaves it when divided by `num_parts`.
        num_parts: that there are.
    """

    ids: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_CHOSEN_IDS)] = b""
    part: Size = 0
    num_parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROW_PARTS)] = 1


class FetchRows(msgspec.Struct, frozen=True):
    """From a reader: send me this piece of the rows that I was shown, or what I want of it; each is sent once."""

    number: int
    piece: Size
    only: RowChoice | None = None


class RowsFetched(msgspec.Struct, frozen=True):
    """From a server: the ids of so many rows, and then their values, travel beside this."""

    number: int
    num_rows: Size


class FetchChanges(msgspec.Struct, frozen=True):
    """From a reader: send me the entries of a log after number `since`.

    Reply when there are some, or after `wait_s` seconds, up to `MAX_CHANGES_WAIT_S`. With `only`, leave out other rows,
    and reply when there are some of these.
    """

    number: int
    table: TableName
    log: LogName
    since: Size
    wait_s: float
    only: RowChoice | None = None


class ChangesHead(msgspec.Struct, frozen=True):
    """One entry of a log: every clock below `clock` was complete before; how many rows changed, and how many went."""

    clock: int
    num_rows: Size
    num_removed: Size


class ChangesFetched(msgspec.Struct, frozen=True):
    """From a server: entries of a log travel beside this: the ids, values and removed ids of each, one after the other.

    Args:
        number: of the request.
        entries: what each has.
        sequence: number of the last of them.
        clock: every clock below is complete behind them.
        is_all: there were no more when this was made.
        waited_s: seconds from the arrival of the request until then, or less.
    """

    number: int
    entries: tuple[ChangesHead, ...]
    sequence: Size
    clock: int
    is_all: bool
    waited_s: float


# The position is the kind byte: append, never reorder.
_CODEC: Final = MessageCodec[object](
    FindVersions,
    LeaseVersion,
    FetchBytes,
    EndLease,
    VersionsFound,
    VersionLeased,
    BytesFetched,
    ReaderRefused,
    DescribeRows,
    RowsDescribed,
    FollowRows,
    RowsShown,
    FetchRows,
    RowsFetched,
    FetchChanges,
    ChangesFetched,
    FetchDelta,
    DeltaFetched,
    ChooseServer,
    ServerChosen,
)
encode = _CODEC.encode
decode = _CODEC.decode
READER_SAYS: Final = (
    ChooseServer,
    FindVersions,
    LeaseVersion,
    FetchBytes,
    FetchDelta,
    EndLease,
    DescribeRows,
    FollowRows,
    FetchRows,
    FetchChanges,
)


def num_chunks(size_bytes: int) -> int:
    """Return how many chunks a part has.

    >>> num_chunks(0), num_chunks(1), num_chunks(CHUNK_BYTES), num_chunks(CHUNK_BYTES + 1)
    (0, 1, 1, 2)
    """
    return -(-size_bytes // CHUNK_BYTES)


def chunk_digests(memory: memoryview) -> Iterator[bytes]:
    """Return the digest of each chunk of a part, one after the other."""
    for start in range(0, memory.nbytes, CHUNK_BYTES):
        yield hashlib.sha256(memory[start : start + CHUNK_BYTES]).digest()


def digest_of(layout: bytes | memoryview, digests: bytes | memoryview) -> bytes:
    """Return the digest of a server's part of a version, from its layout and the digests of its chunks."""
    return hashlib.sha256(hashlib.sha256(layout).digest() + bytes(digests)).digest()


def whole_digest(digests: Sequence[bytes]) -> str:
    """Return the digest of a version in hexadecimal, from those of its parts by the rank of their server."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def check_published_name(name: object) -> str:
    """Return a valid name of what is published; raises UsageError."""
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= MAX_PUBLISHED_NAME:
        raise UsageError(
            f"{name!r:.120} cannot be the name of what is published: expected a text of 1 to "
            f"{MAX_PUBLISHED_NAME} characters that can be printed"
        )
    return name


def require_said_by_reader(message: object) -> None:
    """Raise PeerError unless this is what a reader may say."""
    if not isinstance(message, READER_SAYS):
        raise PeerError(f"a reader may not say {type(message).__name__}")

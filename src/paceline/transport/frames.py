"""The format of a frame on a stream: a prefix of 64 bytes, then the header, then the body unless it is shared.

The prefix is checked whole (magic, version, checksum, kind, lengths) before any memory is taken for what it announces.
"""

import struct
import zlib
from enum import IntEnum
from typing import Final, NamedTuple

from paceline.errors import PeerError
from paceline.transport.base import Limits

MAGIC: Final = b"PCLN"
# Raise this with any change of the wire format after a release, so that peers of two versions refuse each other.
WIRE_VERSION: Final = 2
PREFIX_BYTES: Final = 64

# First bytes, four at most, of other programs that a wrong address may lead to.
_OTHERS: Final = {
    b"HTTP": "a web server (HTTP)",
    b"SSH-": "an SSH server",
    b"220": "a mail or FTP server",
    b"\x15\x03": "one that speaks TLS (give all processes of the job TLS, or none)",
    b"\x16\x03": "one that speaks TLS (give all processes of the job TLS, or none)",
}

# magic, version, kind, header bytes, segment, body bytes, offset, segment bytes, spare; then the checksum of these.
_FIELDS: Final = struct.Struct("<4sHHIIQQQ20x")
_CHECKSUM: Final = struct.Struct("<I")
_PREFIX: Final = struct.Struct(_FIELDS.format + "I")


class Kind(IntEnum):
    """Where the body is; RETIRED announces that a segment will not be used again."""

    INLINE = 0
    SHARED = 1
    SHARED_FIRST = 2  # as SHARED; the segment's descriptor comes along
    RETIRED = 3


class Prefix(NamedTuple):
    """The first 64 bytes of a frame. `segment`, `offset` and `segment_bytes` are 0 unless the body is shared.

    A tuple, as these are made faster, and there is one for every frame.
    """

    kind: Kind
    header_bytes: int
    body_bytes: int
    segment: int = 0
    offset: int = 0
    segment_bytes: int = 0


def encode_prefix(prefix: Prefix) -> bytes:
    """Return the 64 bytes that stand for `prefix`."""
    fields = _FIELDS.pack(
        MAGIC,
        WIRE_VERSION,
        prefix.kind,
        prefix.header_bytes,
        prefix.segment,
        prefix.body_bytes,
        prefix.offset,
        prefix.segment_bytes,
    )
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def decode_prefix(raw: bytes | memoryview, limits: Limits, peer: str) -> Prefix:
    """Read and check 64 bytes from `peer`; raises PeerError saying which check failed."""
    magic, version, kind, header_bytes, segment, body_bytes, offset, segment_bytes, checksum = _PREFIX.unpack(raw)
    check_greeting(magic, version, peer)
    if zlib.crc32(raw[: _FIELDS.size]) != checksum:
        raise PeerError(f"{peer} sent a damaged frame: its checksum does not match; the connection is over")
    if kind not in _KINDS:
        raise PeerError(f"{peer} sent a frame of kind {kind}, expected one of {sorted(_KINDS)}")
    _check_length("header", header_bytes, limits.max_header_bytes, peer)
    _check_length("body", body_bytes, limits.max_body_bytes, peer)
    if offset + body_bytes > segment_bytes and kind in (Kind.SHARED, Kind.SHARED_FIRST):
        raise PeerError(
            f"{peer} sent a body of {body_bytes} bytes at {offset} of segment {segment}, which has {segment_bytes}"
        )
    return Prefix(_KINDS[kind], header_bytes, body_bytes, segment, offset, segment_bytes)


def check_greeting(magic: bytes, version: int, peer: str) -> None:
    """Raise PeerError unless `peer` speaks Paceline, and this version of it."""
    if magic != MAGIC:
        known = what_speaks(magic)
        if known:
            raise PeerError(f"{peer} is not a Paceline peer but {known}: check the address and the port")
        raise PeerError(f"{peer} is not a Paceline peer: expected {MAGIC!r}, got {magic!r}; check the address")
    if version != WIRE_VERSION:
        raise PeerError(
            f"{peer} speaks wire version {version}, expected {WIRE_VERSION}: install the same paceline on both sides"
        )


def what_speaks(first: bytes) -> str:
    """Return a description of the program that sends these first bytes, or an empty text if it is unknown.

    >>> what_speaks(b"HTTP/1.1 400 Bad Request"), what_speaks(b"PCLN")
    ('a web server (HTTP)', '')
    """
    return next((kind for start, kind in _OTHERS.items() if first.startswith(start)), "")


def _check_length(part: str, num_bytes: int, limit_bytes: int, peer: str) -> None:
    if num_bytes > limit_bytes:
        raise PeerError(f"{peer} announced a {part} of {num_bytes} bytes, at most {limit_bytes} are allowed")


_KINDS: Final = {int(kind): kind for kind in Kind}

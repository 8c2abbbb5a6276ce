"""The 64 bytes before every frame: what is said is read back, and nothing else is believed."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PeerError
from paceline.transport import Limits
from paceline.transport.frames import PREFIX_BYTES, WIRE_VERSION, Kind, Prefix, decode_prefix, encode_prefix

LIMITS = Limits(max_header_bytes=1000, max_body_bytes=1 << 40)


def sealed(fields: bytes) -> bytes:
    """Return a prefix of these first 60 bytes with the checksum that belongs to them."""
    return fields + struct.pack("<I", zlib.crc32(fields))


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    kind = draw(st.sampled_from(Kind))
    body_bytes = draw(st.integers(0, LIMITS.max_body_bytes))
    offset = draw(st.integers(0, 1 << 40))
    slack = draw(st.integers(0, 1 << 20))
    return Prefix(
        kind=kind,
        header_bytes=draw(st.integers(0, LIMITS.max_header_bytes)),
        body_bytes=body_bytes,
        segment=draw(st.integers(0, (1 << 32) - 1)),
        offset=offset,
        segment_bytes=offset + body_bytes + slack,
    )


@given(prefixes())
def test_what_is_encoded_is_decoded(prefix: Prefix) -> None:
    raw = encode_prefix(prefix)
    assert len(raw) == PREFIX_BYTES
    assert decode_prefix(raw, LIMITS, "peer") == prefix


@given(st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(PeerError):
        decode_prefix(raw, LIMITS, "peer")


@given(prefixes(), st.integers(0, PREFIX_BYTES * 8 - 1))
def test_any_flipped_bit_is_noticed(prefix: Prefix, bit: int) -> None:
    raw = bytearray(encode_prefix(prefix))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PeerError):
        decode_prefix(bytes(raw), LIMITS, "peer")


@given(st.binary(min_size=54, max_size=54))
def test_past_the_checksum_only_frames_within_the_limits_are_believed(fields: bytes) -> None:
    raw = sealed(b"PCLN" + struct.pack("<H", WIRE_VERSION) + fields)
    try:
        prefix = decode_prefix(raw, LIMITS, "peer")
    except PeerError:
        return
    assert prefix.header_bytes <= LIMITS.max_header_bytes
    assert prefix.body_bytes <= LIMITS.max_body_bytes
    if prefix.kind in (Kind.SHARED, Kind.SHARED_FIRST):
        assert prefix.offset + prefix.body_bytes <= prefix.segment_bytes


def test_each_refusal_says_why() -> None:
    good = encode_prefix(Prefix(Kind.INLINE, 10, 20))
    cases = {
        "not a Paceline peer.*HTTP": b"HTTP" + good[4:],
        f"wire version 513, expected {WIRE_VERSION}": sealed(good[:4] + b"\x01\x02" + good[6:60]),
        "checksum": good[:20] + b"\xff" + good[21:],
        "kind 9": sealed(good[:6] + b"\x09\x00" + good[8:60]),
        "header of 1001 bytes, at most 1000": encode_prefix(Prefix(Kind.INLINE, 1001, 0)),
        "body of .* at most": encode_prefix(Prefix(Kind.INLINE, 0, LIMITS.max_body_bytes + 1)),
        "of segment 3, which has 10": encode_prefix(Prefix(Kind.SHARED, 0, 5, 3, 6, 10)),
    }
    for message, raw in cases.items():
        with pytest.raises(PeerError, match=f"10.0.0.1:9.*{message}"):
            decode_prefix(raw, LIMITS, "10.0.0.1:9")

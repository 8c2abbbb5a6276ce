"""A delta gives back the very bytes, is as short as it is said to be, and a malformed one changes nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PeerError
from paceline.wire.deltas import apply_delta, encode_delta

WORDS = st.sampled_from([1, 2, 4, 8])


def changed(seed: int, num_words: int, word_bytes: int, share: float) -> tuple[bytes, bytes]:
    draw = np.random.default_rng(seed)
    base = draw.bytes(num_words * word_bytes)
    new = np.frombuffer(bytearray(base), dtype=f"<u{word_bytes}")
    at = draw.random(num_words) < share
    new[at] ^= draw.integers(1, 256, int(at.sum())).astype(new.dtype)
    return base, new.tobytes()


@given(st.integers(0, 1000), st.integers(1, 5000), WORDS, st.sampled_from([0.0, 0.0005, 0.01, 0.2, 0.45, 1.0]))
def test_a_delta_gives_back_the_bytes(seed: int, num_words: int, word_bytes: int, share: float) -> None:
    base, new = changed(seed, num_words, word_bytes, share)
    found = encode_delta(memoryview(base), memoryview(new), word_bytes)
    if found is None:
        return
    num, delta = found
    assert len(delta) < max(1, len(new))
    out = memoryview(bytearray(base))
    apply_delta(delta, num, word_bytes, out)
    assert bytes(out) == new


def test_one_element_of_a_hundred_takes_itself_and_little_more() -> None:
    base, new = changed(1, 1_000_000, 2, 0.01)
    found = encode_delta(memoryview(base), memoryview(new), 2)
    assert found is not None
    assert len(found[1]) <= 1.1 * found[0] * (2 + 1)


def test_where_all_changes_there_is_none() -> None:
    base, new = changed(1, 1000, 4, 1.0)
    assert encode_delta(memoryview(base), memoryview(new), 4) is None


@given(st.binary(max_size=40), st.one_of(st.integers(0, 12), st.just(1 << 62)), WORDS, st.integers(0, 60))
def test_what_is_no_delta_is_refused_and_changes_nothing(
    delta: bytes, num_words: int, word_bytes: int, size_bytes: int
) -> None:
    base = random.Random(size_bytes).randbytes(size_bytes)
    out = memoryview(bytearray(base))
    try:
        apply_delta(memoryview(delta), num_words, word_bytes, out)
    except PeerError:
        assert bytes(out) == base


@pytest.mark.parametrize(
    ("delta", "num_words"),
    [(b"\x05ab", 1), (b"\xffab", 1), (b"\x00\xffab", 1), (b"\x00", 1), (b"ab", 0), (b"\x03\x00abcd", 2)],
)
def test_deltas_that_lead_beyond_the_end_or_end_early_are_refused(delta: bytes, num_words: int) -> None:
    out = memoryview(bytearray(8))  # four words
    with pytest.raises(PeerError, match=r"changed words|changes word"):
        apply_delta(memoryview(delta), num_words, 2, out)
    assert bytes(out) == bytes(8)

"""Deltas and differences give back the very bytes, are as short as said, and malformed ones change nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PeerError
from paceline.wire.deltas import WordBytes, apply_delta, apply_difference, encode_delta, encode_difference

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


@given(st.integers(0, 1000), st.integers(1, 5000), WORDS, st.sampled_from([0.0, 0.01, 0.45, 1.0]), st.booleans())
def test_a_difference_gives_back_the_bytes(
    seed: int, num_words: int, word_bytes: WordBytes, share: float, is_little: bool
) -> None:
    base, new = changed(seed, num_words, word_bytes, share)
    if is_little:  # the first place of each word alone
        words = np.frombuffer(new, np.uint8).reshape(-1, word_bytes).copy()
        words[:, 1:] = np.frombuffer(base, np.uint8).reshape(-1, word_bytes)[:, 1:]
        new = words.tobytes()
    found = encode_difference(memoryview(base), memoryview(new), word_bytes)
    if found is None:
        return
    assert len(found) < len(new)
    out = memoryview(bytearray(base))
    apply_difference(found, word_bytes, out)
    assert bytes(out) == new


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.7), (torch.bfloat16, 0.45)])
def test_a_step_of_adam_leaves_much_that_is_not_sent(dtype: torch.dtype, most: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(500, 200)
    before = model.weight.detach().to(dtype, copy=True)
    model(torch.randn(32, 500)).square().mean().backward()
    torch.optim.Adam(model.parameters(), lr=1e-3).step()
    base, new = (memoryview(each.view(torch.uint8).numpy().tobytes()) for each in (before, model.weight.data.to(dtype)))
    assert encode_delta(base, new, dtype.itemsize) is None
    found = encode_difference(base, new, dtype.itemsize)
    assert found is not None
    assert len(found) < most * len(new)


def test_random_bytes_have_no_difference() -> None:
    base, new = changed(1, 1000, 4, 1.0)
    new = random.Random(1).randbytes(len(new))
    assert encode_difference(memoryview(base), memoryview(new), 4) is None


@given(st.data(), WORDS, st.integers(0, 60))
def test_what_is_no_difference_is_refused_and_changes_nothing(
    data: st.DataObject, word_bytes: WordBytes, size_bytes: int
) -> None:
    base = random.Random(size_bytes).randbytes(size_bytes)
    difference = bytearray(data.draw(st.binary(max_size=80)))
    found = encode_difference(memoryview(base), memoryview(bytes(size_bytes)), word_bytes) if size_bytes == 48 else None
    if found is not None and data.draw(st.booleans()):
        difference = bytearray(found)
        difference[data.draw(st.integers(0, len(found) - 1))] ^= 1
    out = memoryview(bytearray(base))
    try:
        apply_difference(memoryview(difference), word_bytes, out)
    except PeerError:
        assert bytes(out) == base


@pytest.mark.parametrize("damage", ["cut", "longer", "other length", "not deflate", "expands"])
def test_a_damaged_difference_is_refused(damage: str) -> None:
    base, new = bytes(400), bytes(range(1, 5)) * 100
    found = encode_difference(memoryview(base), memoryview(new), 4)
    assert found is not None
    broken = bytearray(found)
    if damage == "cut":
        del broken[-1]
    elif damage == "longer":
        broken += b"!"
    elif damage == "other length":
        broken[0], broken[4] = broken[0] + 1, broken[4] - 1
    elif damage == "not deflate":
        broken[16:20] = b"\xff" * 4
    size_bytes = 200 if damage == "expands" else 400
    out = memoryview(bytearray(size_bytes))
    with pytest.raises(PeerError, match="difference"):
        apply_difference(memoryview(broken), 4, out)
    assert bytes(out) == bytes(size_bytes)

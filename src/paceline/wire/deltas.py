"""What has changed between two versions of some bytes, exact to the bit.

A delta is the distances between changed words, less one, and then the words. A distance is a byte below 255, after a
byte of 255 for each 255 that it is longer. So where one word of a hundred changes, it takes 1.1 bytes and the word.

A compressed difference is short where most words change by little, as the values of a model do. It is the bytes of both
versions combined by XOR, those of one place in a word after those of another, each place compressed by itself. First
come the lengths of these, 4 bytes each; one that is as long as there are words is not compressed.
"""

from __future__ import annotations

import zlib
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import PeerError

WordBytes: TypeAlias = Literal[1, 2, 4, 8]
_LONG: Final = 255
_MOST_CHANGED: Final = 0.5  # of all words; where more change, the bytes themselves are as short
_LENGTH: Final = np.dtype("<u4")
_SAMPLED: Final = 64  # one byte of so many is looked at, to find out whether compressing pays
_MOST_BITS: Final = 7.2  # of information a byte, where it does
_RAW_DEFLATE: Final = -15
_MEMORY_LEVEL: Final = 9


def encode_delta(base: memoryview, new: memoryview, word_bytes: int) -> tuple[int, memoryview] | None:
    r"""Return how many words have changed, and the delta; None if that is no shorter than `new`.

    `base` and `new` have one size, a multiple of `word_bytes`.

    >>> num_words, delta = encode_delta(memoryview(b"abcdefgh"), memoryview(b"abXdefgh"), 2) or (0, b"")
    >>> num_words, bytes(delta)
    (1, b'\x01Xd')
    """
    words, were = _words(new, word_bytes), _words(base, word_bytes)
    at = np.flatnonzero(words != were)
    if len(at) > _MOST_CHANGED * len(words):
        return None
    if not len(at):
        return 0, memoryview(b"")
    gaps = np.diff(at, prepend=-1) - 1
    long, rest = np.divmod(gaps, _LONG)
    ends = np.cumsum(long + 1) - 1
    distances = np.full(int(ends[-1]) + 1, _LONG, dtype=np.uint8)
    distances[ends] = rest
    if len(distances) + len(at) * word_bytes >= len(new):
        return None
    return len(at), np.concatenate([distances, words[at].view(np.uint8)]).data


def apply_delta(delta: memoryview, num_words: int, word_bytes: int, out: memoryview) -> None:
    """Turn bytes into those that a delta was made of: `out` has the base, and gets the new ones.

    Raises:
        PeerError: the delta does not fit; `out` is as it was.
    """
    num_distances = len(delta) - num_words * word_bytes
    if num_distances < num_words or len(out) % word_bytes:
        raise PeerError(f"{num_words} changed words of {word_bytes} bytes came in {len(delta)} bytes")
    distances = np.frombuffer(delta[:num_distances], dtype=np.uint8)
    ends = np.flatnonzero(distances != _LONG)
    if len(ends) != num_words or (num_words and ends[-1] != num_distances - 1):
        raise PeerError(f"a delta names {len(ends)} changed words, expected {num_words}")
    if not num_words:
        return
    at = np.cumsum(distances, dtype=np.int64)[ends] + np.arange(num_words)
    words = _words(out, word_bytes)
    if at[-1] >= len(words):
        raise PeerError(f"a delta changes word {at[-1]} of {len(words)}")
    words[at] = _words(delta[num_distances:], word_bytes)


def encode_difference(base: memoryview, new: memoryview, word_bytes: int) -> memoryview | None:
    """Return the compressed difference; None if it is no shorter than `new`.

    `base` and `new` have one size, a multiple of `word_bytes`.
    """
    difference = _words(new, 1) ^ _words(base, 1)
    places = [_compressed(np.ascontiguousarray(place)) for place in difference.reshape(-1, word_bytes).T]
    lengths = np.array([len(place) for place in places], dtype=_LENGTH)
    found = b"".join([lengths.tobytes(), *places])
    return memoryview(found) if len(found) < len(new) else None


def apply_difference(difference: memoryview, word_bytes: int, out: memoryview) -> None:
    """Turn bytes into those that a compressed difference was made of: `out` has the base, and gets the new ones.

    Raises:
        PeerError: the difference does not fit; `out` is as it was.
    """
    num_words, start = len(out) // word_bytes, word_bytes * _LENGTH.itemsize
    lengths = np.frombuffer(difference[:start].tobytes().ljust(start, b"\0"), dtype=_LENGTH).tolist()
    if len(out) % word_bytes or start + sum(lengths) != len(difference):
        raise PeerError(f"a difference of {len(out)} bytes came in {len(difference)} bytes, expected {lengths} of them")
    changed = np.empty((num_words, word_bytes), dtype=np.uint8)
    for place, length in enumerate(lengths):
        changed[:, place] = np.frombuffer(_uncompressed(difference[start : start + length], num_words), dtype=np.uint8)
        start += length
    memory = _words(out, 1)
    np.bitwise_xor(memory, changed.reshape(-1), out=memory)


def _compressed(place: npt.NDArray[np.uint8]) -> bytes:
    """Return bytes compressed, or as they are where that is no shorter."""
    as_they_are = place.tobytes()
    if _bits_in(place[::_SAMPLED]) > _MOST_BITS:
        return as_they_are
    # Runs and frequent bytes alone: twice as fast as a search for what is repeated, and as short.
    compressor = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, _MEMORY_LEVEL, zlib.Z_RLE)
    found = compressor.compress(as_they_are) + compressor.flush()
    return found if len(found) < len(as_they_are) else as_they_are


def _uncompressed(place: memoryview, num_words: int) -> bytes | memoryview:
    """Return the bytes of one place in all words; raises PeerError where they are malformed."""
    if len(place) == num_words:
        return place
    decompressor = zlib.decompressobj(_RAW_DEFLATE)
    try:
        found = decompressor.decompress(place, num_words + 1)  # one more, so that it comes to its end
    except zlib.error as error:
        raise PeerError(f"a difference is malformed: {error}") from error
    if len(found) != num_words or not decompressor.eof or decompressor.unused_data:
        raise PeerError(f"{len(place)} bytes of a difference are of another number of words than {num_words}")
    return found


def _bits_in(sample: npt.NDArray[np.uint8]) -> float:
    """Return the information in bytes that do not depend on each other, in bits a byte."""
    shares = np.bincount(sample) / max(1, len(sample))
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def _words(memory: memoryview, word_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    return np.frombuffer(memory, dtype=f"<u{word_bytes}")

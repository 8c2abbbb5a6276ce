"""What has changed between two versions of some bytes: which words, and their new values; exact to the bit.

A delta is the distances between changed words, less one, and then the words. A distance is a byte below 255, after a
byte of 255 for each 255 that it is longer. So where one word of a hundred changes, it takes 1.1 bytes and the word.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import PeerError

WordBytes: TypeAlias = Literal[1, 2, 4, 8]
_LONG: Final = 255
_MOST_CHANGED: Final = 0.5  # of all words; where more change, the bytes themselves are as short


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


def _words(memory: memoryview, word_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    return np.frombuffer(memory, dtype=f"<u{word_bytes}")

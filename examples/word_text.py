"""Texts as numbers of words, and the pairs of words that stand close to each other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from library_text import WORD

WINDOW = 5
FREQUENT = 3e-4  # words with a larger share of the text are read less often: with chance sqrt(FREQUENT / share)
PIECE_WORDS = 500  # texts are dealt out to the workers in pieces


@dataclass(frozen=True, slots=True)
class Text:
    """A text as numbers of words, the most frequent word first.

    Attributes:
        pieces: each (words,) int64.
        vocabulary: the word of each number.
        counts: how often each word is there.
    """

    pieces: Sequence[np.ndarray]
    vocabulary: Sequence[str]
    counts: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[Sequence[str]], min_count: int) -> "Text":
        """Leave out words that are there less than `min_count` times, and cut the rest into pieces."""
        counted = [(word, n) for word, n in Counter(chain.from_iterable(texts)).most_common() if n >= min_count]
        number = {word: at for at, (word, _) in enumerate(counted)}
        numbers = (np.array([number[word] for word in text if word in number], np.int64) for text in texts)
        pieces = [text[at : at + PIECE_WORDS] for text in numbers for at in range(0, len(text), PIECE_WORDS)]
        return cls(pieces, list(number), np.array([count for _, count in counted]))


def close_pairs(words: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of words that stand close: each word with those at most its own, random number of places away."""
    reach = rng.integers(1, WINDOW + 1, len(words))
    centres, contexts = [], []
    for distance in range(1, min(WINDOW + 1, len(words))):
        left, right = words[:-distance], words[distance:]
        for centre, context, reaches in ((left, right, reach[:-distance]), (right, left, reach[distance:])):
            centres.append(centre[reaches >= distance])
            contexts.append(context[reaches >= distance])
    return np.concatenate(centres), np.concatenate(contexts)


def read_words(path: Path) -> list[list[str]]:
    """Return the words of a file in lower case."""
    try:
        return [WORD.findall(path.read_text(encoding="utf-8", errors="replace").lower())]
    except OSError as error:
        raise SystemExit(f"'{path}' cannot be read ({error}). Give a file with text, or none.") from None

"""Documents as bags of words, for `lda.py`: read from a folder, or made of the Python standard library's own text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from library_text import library_words

MAX_DOCUMENT_SHARE = 0.08  # a word that more of the standard library's documents have says nothing about their topic
MIN_DOCUMENTS = 20  # and one that fewer have says too little
DOCUMENT_WORDS = 300  # files of the standard library are cut into documents of so many words
TEST_EVERY = 5


@dataclass(frozen=True, slots=True)
class Documents:
    """Tokens of documents, one after the other.

    Attributes:
        words: (tokens,) int64, the number of each token's word.
        ends: (documents,) int64, where each document ends in `words`.
    """

    words: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, documents: Iterable[np.ndarray]) -> Documents:
        """Join the words of documents; those without words are left out."""
        kept = [document for document in documents if len(document)]
        words = np.concatenate(kept) if kept else np.empty(0, np.int64)
        return cls(words, np.cumsum([len(document) for document in kept], dtype=np.int64))

    def __len__(self) -> int:
        """Count the documents."""
        return len(self.ends)

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each document."""
        return np.diff(self.ends, prepend=0)

    def part(self, first: int, step: int) -> Documents:
        """Return every `step`-th document, beginning with number `first`."""
        return Documents.of(self.split()[first::step])

    def split(self) -> list[np.ndarray]:
        """Return the words of each document."""
        return np.split(self.words, self.ends[:-1])


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents to learn from, others to judge by, and the words that their numbers stand for."""

    train: Documents
    test: Documents
    vocabulary: Sequence[str]


def read_corpus(folder: Path | None) -> Corpus:
    """Return the corpus of a folder, or else that of the standard library."""
    return library_corpus() if folder is None else folder_corpus(folder)


def folder_corpus(folder: Path) -> Corpus:
    """Read `train.*` and `test.*`, `label word:count ...` a line, and `vocab.*`, whose n-th line begins with word n."""
    train, test, vocabulary = (_only_file(folder, name) for name in ("train", "test", "vocab"))
    words = ["", *(line.split()[0] for line in vocabulary.read_text().splitlines() if line.strip())]
    return Corpus(_read_bags(train, len(words)), _read_bags(test, len(words)), words)


def library_corpus() -> Corpus:
    """Cut the files of the standard library into documents, without the words that nearly all or hardly any have."""
    texts = [
        words[at : at + DOCUMENT_WORDS] for words in library_words() for at in range(0, len(words), DOCUMENT_WORDS)
    ]
    seen_in = Counter(chain.from_iterable(map(set, texts)))
    most = MAX_DOCUMENT_SHARE * len(texts)
    vocabulary = sorted(word for word, count in seen_in.items() if MIN_DOCUMENTS <= count <= most)
    number = {word: at for at, word in enumerate(vocabulary)}
    bags = [np.array([number[word] for word in text if word in number], np.int64) for text in texts]
    train = (bag for at, bag in enumerate(bags) if at % TEST_EVERY)
    return Corpus(Documents.of(train), Documents.of(bags[::TEST_EVERY]), vocabulary)


def _only_file(folder: Path, name: str) -> Path:
    found = sorted(folder.glob(f"{name}.*"))
    if len(found) != 1:
        raise SystemExit(
            f"'{folder}' has {len(found)} files '{name}.*', expected one. Give a folder with train.*, test.* "
            "(a line is a document: 'label word:count ...') and vocab.* (line n begins with word n), or no folder."
        )
    return found[0]


def _read_bags(path: Path, num_words: int) -> Documents:
    def bag(number: int, line: str) -> np.ndarray:
        try:
            pairs = np.array(line.replace(":", " ").split()[1:], dtype=np.int64).reshape(-1, 2)
        except ValueError as error:
            raise SystemExit(f"{path}, line {number}: expected 'label word:count ...' ({error}).") from None
        if len(pairs) and (pairs.min() < 0 or pairs[:, 0].max() >= num_words):
            raise SystemExit(
                f"{path}, line {number}: a word's number is not within 0 to {num_words - 1}, or a count is below 0."
            )
        return np.repeat(pairs[:, 0], pairs[:, 1])

    with path.open() as lines:
        return Documents.of(bag(number, line) for number, line in enumerate(lines, start=1))

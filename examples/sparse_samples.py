"""Sparse samples for the examples, from a file or from text that comes with Python, and how well they are told apart.

An id may be any 64-bit integer, and the ids are not listed in advance.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

WORD = re.compile(r"[a-z_]{3,}")
OF_ERRORS = re.compile(r"rais|error|exception")
MIN_WORDS = 5
HELD_OUT = 5  # one in so many samples is for testing, where there is no file for it


@dataclass(frozen=True, slots=True)
class Samples:
    """Labelled samples; sample i has the entries starts[i] to starts[i + 1].

    Args:
        labels: 0 or 1, (n,).
        starts: (n + 1,).
        ids: of the features that are not 0, (entries,).
        values: of these features, (entries,).
    """

    labels: Floats
    starts: Ids
    ids: Ids
    values: Floats

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def owners(self) -> Ids:
        """The sample of each entry."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def take(self, chosen: npt.NDArray[np.bool_]) -> "Samples":
        """Return some samples, in their order."""
        entries = chosen[self.owners]
        starts = np.cumsum([0, *np.diff(self.starts)[chosen]])
        return Samples(self.labels[chosen], starts, self.ids[entries], self.values[entries])

    def every(self, step: int, first: int) -> "Samples":
        """Return each `step`-th sample from `first` on."""
        return self.take(np.arange(len(self)) % step == first)


def gather(labelled: Iterable[tuple[float, dict[int, float]]]) -> Samples:
    """Return samples made of (label, {id: value})."""
    labels, features = zip(*labelled, strict=True)
    starts = np.cumsum([0, *map(len, features)])
    ids = np.array([id for each in features for id in each], np.int64)
    values = np.array([value for each in features for value in each.values()], np.float64)
    return Samples(np.array(labels, np.float64), starts, ids, values)


def read_samples(path: Path) -> Samples:
    """Read a file with a sample a line: `label id:value id:value ...`, or `label id id ...` with ids that start at 0.

    Ends with a clear word where there is no such file, or a line has another form.
    """
    if not path.is_file():
        raise SystemExit(f"There is no file {path}: give one in libsvm form, or none for data that come along.")
    with path.open() as lines:
        return gather(_parsed(path, number, line) for number, line in enumerate(lines, 1))


def _parsed(path: Path, number: int, line: str) -> tuple[float, dict[int, float]]:
    try:
        label, *entries = line.split()
        pairs = (entry.split(":") if ":" in entry else (int(entry) + 1, 1) for entry in entries)
        return float(float(label) > 0), {int(id): float(value) for id, value in pairs}
    except ValueError as error:
        raise SystemExit(f"{path}, line {number}: expected 'label id:value ...' or 'label id ...' ({error}).") from None


def word_id(word: str) -> int:
    """Return the id of a word, which every process computes by itself."""
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little", signed=True)


def paragraphs() -> tuple[Samples, dict[int, str]]:
    """Return the paragraphs of Python's own manual, 1 where one speaks of errors, and the words behind the ids.

    The features are the other words of a paragraph. The word "" is in all of them: its weight is the intercept.
    """
    from pydoc_data.topics import topics

    texts = sorted({text.lower() for topic in topics.values() for text in re.split(r"\n\s*\n", topic)})
    found = [(OF_ERRORS.search(text), set(WORD.findall(text))) for text in texts]
    kept = [(hit, sorted({""} | {word for word in words if not OF_ERRORS.search(word)})) for hit, words in found]
    kept = [(hit, words) for hit, words in kept if len(words) > MIN_WORDS]
    order = np.random.default_rng(0).permutation(len(kept))
    samples = gather((float(kept[i][0] is not None), {word_id(word): 1.0 for word in kept[i][1]}) for i in order)
    return samples, {word_id(word): word for _, words in kept for word in words}


def digits() -> Samples:
    """Return handwritten digits, 1 where one is odd; the ids are those of the pixels with ink, the values how much."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            "The digits come with scikit-learn, not installed here: pip install 'paceline[demo]'."
        ) from None

    images, numbers = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return gather(
        (float(numbers[i] % 2), {pixel: ink / 16 for pixel, ink in enumerate(images[i]) if ink}) for i in order
    )


def held_out(samples: Samples) -> tuple[Samples, Samples]:
    """Return samples to train on, and every fifth to test with."""
    is_test = np.arange(len(samples)) % HELD_OUT == 0
    return samples.take(~is_test), samples.take(is_test)

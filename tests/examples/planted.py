"""Data with a structure that is known, for the examples to find."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NUM_GROUPS, GROUP_WORDS = 4, 12


def names() -> list[str]:
    """Words by group: the first letter says to which a word belongs."""
    return [f"{'abcd'[group]}{'abcdefghijkl'[word]}" for group in range(NUM_GROUPS) for word in range(GROUP_WORDS)]


def document(rng: np.random.Generator, length: int, *, stray: float) -> np.ndarray:
    """The words of one group, but for a share of stray ones from anywhere."""
    words = rng.integers(GROUP_WORDS, size=length) + GROUP_WORDS * rng.integers(NUM_GROUPS)
    return np.where(rng.random(length) < stray, rng.integers(NUM_GROUPS * GROUP_WORDS, size=length), words)


def write_bags(folder: Path, num_documents: int) -> int:
    """Write documents as bags of words; return how many tokens there are to learn from."""
    rng = np.random.default_rng(0)
    num_tokens = 0
    for name, number in (("train", num_documents), ("test", num_documents // 4)):
        lines = []
        for _ in range(number):
            words, counts = np.unique(document(rng, int(rng.integers(5, 90)), stray=0.1) + 1, return_counts=True)
            lines.append(" ".join(["1", *(f"{word}:{count}" for word, count in zip(words, counts, strict=True))]))
            num_tokens += counts.sum() if name == "train" else 0
        (folder / f"{name}.feat").write_text("\n".join(lines))
    (folder / "vocab.txt").write_text("\n".join(names()))
    return int(num_tokens)


def write_text(path: Path, num_documents: int) -> None:
    """Write a text whose words stand next to those of their group."""
    rng = np.random.default_rng(0)
    words = names()
    path.write_text(
        "\n".join(" ".join(words[at] for at in document(rng, 40, stray=0.05)) for _ in range(num_documents))
    )

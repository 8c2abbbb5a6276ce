"""Sentences with labels from TSV files in the format of GLUE, or made up."""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SENTENCES = ("sentence", "content", "text")  # what the column of the sentences may be called
LABEL = "label"

# What made-up reviews are made of.
GOOD, BAD = ("fine", "warm", "witty", "bright", "moving"), ("dull", "cold", "flat", "grim", "clumsy")
SUBJECTS = ("the film", "a plot", "the cast", "this story", "its ending", "the dialogue")
NUM_MADE_UP = (1536, 128)  # to train, to judge by


@dataclass(frozen=True, slots=True)
class Example:
    """A sentence and the number of its class."""

    sentence: str
    label: int


def read_examples(path: Path) -> list[Example]:
    """Read a file whose first line names its columns, a label and a sentence among them."""
    if not path.is_file():
        raise SystemExit(
            f"There is no file {path}: expected a TSV file with columns {LABEL} and sentence, as GLUE has."
        )
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    header = rows[0] if rows else []
    columns = [name for name in SENTENCES if name in header]
    if LABEL not in header or not columns:
        raise SystemExit(f"{path} has the columns {header}: expected {LABEL}, and one of {', '.join(SENTENCES)}.")
    label, sentence = header.index(LABEL), header.index(columns[0])
    return [_example(path, line, row, label, sentence) for line, row in enumerate(rows[1:], start=2) if row]


def _example(path: Path, line: int, row: Sequence[str], label: int, sentence: int) -> Example:
    if len(row) <= max(label, sentence) or not row[label].isdecimal():
        raise SystemExit(f"{path}, line {line}: expected the number of a class and a sentence, got {row}.")
    return Example(row[sentence], int(row[label]))


def make_up(folder: Path, seed: int = 0) -> tuple[Path, Path, Path]:
    """Write reviews that a word decides, to train and to judge by, and the vocabulary that they need."""
    rng = random.Random(seed)
    names = ("train.tsv", "dev.tsv")
    for name, count in zip(names, NUM_MADE_UP, strict=True):
        lines = [f"{label}\t{_review(rng, label)}" for label in (rng.randrange(2) for _ in range(count))]
        (folder / name).write_text("\n".join([f"{LABEL}\tsentence", *lines]) + "\n", encoding="utf-8")
    words = sorted({word for phrase in (*SUBJECTS, *GOOD, *BAD, "is and so") for word in phrase.split()})
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words, ",", "."]) + "\n", encoding="utf-8")
    return folder / names[0], folder / names[1], vocabulary


def _review(rng: random.Random, label: int) -> str:
    return f"{rng.choice(SUBJECTS)} is {rng.choice((BAD, GOOD)[label])}, and so is {rng.choice(SUBJECTS)}."

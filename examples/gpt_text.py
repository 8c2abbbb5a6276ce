"""A text as numbers of characters, and windows of it to learn from."""

from dataclasses import dataclass
from pathlib import Path

import torch
from library_text import library_words
from torch import Tensor
from torch.utils.data import Dataset

HELD_OUT = 0.05  # the last share of the text, which is not trained on


@dataclass(frozen=True, slots=True)
class Text:
    """A text as numbers.

    Attributes:
        characters: all that occur; a character's number is its place here.
        training: (characters,) int64.
        held_out: (characters,) int64, what comes behind.
    """

    characters: str
    training: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, text: str) -> "Text":
        """Return a text in numbers, its end set aside."""
        characters = "".join(sorted(set(text)))
        number = {character: at for at, character in enumerate(characters)}
        numbers = torch.tensor([number[character] for character in text])
        end = round(len(numbers) * (1 - HELD_OUT))
        return cls(characters, numbers[:end], numbers[end:])


def read_text(path: Path | None) -> Text:
    """Read a file; without one, the words of Python's standard library."""
    if path is None:
        return Text.of(" ".join(word for words in library_words() for word in words))
    if not path.is_file():
        raise SystemExit(f"There is no text {path}: give --text a file, or leave it out.")
    return Text.of(path.read_text(encoding="utf-8"))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text at random places, the same for the same seed: `length` characters, and their successors."""

    def __init__(self, text: Tensor, length: int, num_windows: int, seed: int) -> None:
        if len(text) <= length:
            raise SystemExit(
                f"The text has {len(text)} characters, and a window takes {length + 1}: give a longer one."
            )
        self._text, self._length = text, length
        generator = torch.Generator().manual_seed(seed)
        self._starts = torch.randint(len(text) - length, (num_windows,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._text[self._starts[index] : self._starts[index] + self._length + 1]
        return window[:-1], window[1:]

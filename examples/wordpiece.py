"""WordPiece, the way BERT cuts a sentence: into words, and words into the longest pieces that a vocabulary has."""

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PADDING, UNKNOWN, BEGIN, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
CONTINUES = "##"  # stands before a piece that does not begin its word
MAX_LETTERS = 100  # a longer word is unknown as a whole


@dataclass(frozen=True, slots=True)
class WordPiece:
    """Cuts text in lower case, without accents.

    Attributes:
        numbers: the number of each piece.
    """

    numbers: Mapping[str, int]

    @classmethod
    def read(cls, path: Path) -> "WordPiece":
        """Read a vocabulary of one piece a line, such as BERT's own `vocab.txt`; its first line has number 0."""
        if not path.is_file():
            raise SystemExit(
                f"There is no vocabulary {path}: give --vocabulary a file with one piece a line, such as the vocab.txt "
                "that comes with a BERT."
            )
        pieces = path.read_text(encoding="utf-8").split("\n")
        numbers = {piece: number for number, piece in enumerate(pieces) if piece}
        missing = [piece for piece in (PADDING, UNKNOWN, BEGIN, END) if piece not in numbers]
        if missing:
            raise SystemExit(f"{path} is no vocabulary of WordPiece: it lacks {', '.join(missing)}.")
        return cls(numbers)

    @property
    def size(self) -> int:
        """How many rows an embedding of all pieces has."""
        return max(self.numbers.values()) + 1

    def pieces(self, text: str) -> list[str]:
        """Cut a text.

        >>> some = ("un", "##aff", "##able", "!", UNKNOWN)
        >>> WordPiece({piece: number for number, piece in enumerate(some)}).pieces("Unaffable! Ünaffordable")
        ['un', '##aff', '##able', '!', '[UNK]']
        """
        return [piece for word in words_of(text) for piece in self._cut(word)]

    def encode(self, text: str, length: int) -> list[int]:
        """Return exactly `length` numbers: the beginning, the pieces as far as they fit, the end, and padding."""
        kept = [BEGIN, *self.pieces(text)[: length - 2], END]
        return [self.numbers[piece] for piece in kept] + [self.numbers[PADDING]] * (length - len(kept))

    def _cut(self, word: str) -> list[str]:
        """Take the longest piece that fits, again and again; a word that does not come out even is unknown."""
        pieces: list[str] = []
        begin = 0
        while begin < len(word) <= MAX_LETTERS:
            prefix = CONTINUES if begin else ""
            ends = range(len(word), begin, -1)
            end = next((end for end in ends if prefix + word[begin:end] in self.numbers), None)
            if end is None:
                return [UNKNOWN]
            pieces.append(prefix + word[begin:end])
            begin = end
        return pieces or [UNKNOWN]


def words_of(text: str) -> list[str]:
    """Cut a text at spaces, and around every sign and ideograph; in lower case and without accents.

    >>> words_of("Don't stop:  ÉTÉ 好的")
    ['don', "'", 't', 'stop', ':', 'ete', '好', '的']
    """
    return "".join(_spaced(text)).split()


def _spaced(text: str) -> Iterator[str]:
    """Yield the letters of a text, with spaces around what stands by itself."""
    for letter in unicodedata.normalize("NFD", text.lower()):
        category = unicodedata.category(letter)
        if letter.isspace():
            yield " "
        elif category.startswith("C") or letter == "\ufffd":
            continue  # control characters
        elif _stands_alone(letter, category):
            yield f" {letter} "
        elif category != "Mn":  # an accent, which the normal form has taken off its letter
            yield letter


def _stands_alone(letter: str, category: str) -> bool:
    """Say whether this is a sign, as all of ASCII is but letters, digits and spaces, or an ideograph."""
    is_sign = category.startswith("P") or (letter.isascii() and letter.isprintable() and not letter.isalnum())
    return is_sign or unicodedata.name(letter, "").startswith("CJK UNIFIED IDEOGRAPH")

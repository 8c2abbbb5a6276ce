"""What a module takes: the shape of one sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.errors import UsageError

_IDS: Final = "ids"


@dataclass(frozen=True, slots=True)
class Sample:
    """The shape of one input without its batch, and whether it holds the ids of tokens instead of numbers."""

    shape: tuple[int, ...]
    is_ids: bool = False

    @staticmethod
    def parse(text: str) -> Sample:
        """Read `3,224,224`, or `128:ids` for the tokens of a text.

        Raises:
            UsageError: it is no shape.

        Example:
            >>> Sample.parse("128:ids")
            Sample(shape=(128,), is_ids=True)
        """
        sizes, colon, kind = text.partition(":")
        numbers = [size.strip() for size in sizes.split(",")]
        whole = all(size.isascii() and size.isdigit() and int(size) > 0 for size in numbers)
        if (colon and kind != _IDS) or not whole:
            raise UsageError(
                f"--input is '{text}', expected the sizes of one sample without the batch, such as 3,224,224, or "
                f"128:{_IDS} for tokens."
            )
        return Sample(tuple(int(size) for size in numbers), bool(colon))

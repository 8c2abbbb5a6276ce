"""Interface of an open source: samples by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.data.sources.batch_layout import Column


class Samples(Protocol):
    """What is behind a source, whatever that is. One thread at a time."""

    @property
    def num_samples(self) -> int:
        """How many there are."""
        ...

    def gather(self, indices: Sequence[int]) -> Column | None:
        """Return the columns of a batch where no record has to be decoded; None where each one has to be."""
        ...

    def record(self, index: int) -> object:
        """Return one record, which may be changed; raises whatever decoding it raises."""
        ...

    def name(self, index: int) -> str:
        """Say which record this is, for messages: "line 7 of poem.txt"."""
        ...

    def check(self) -> None:
        """Raise DataError when files have changed since they were opened, as far as that is cheap to see."""
        ...

    def describe(self) -> object:
        """Return plain data that tell these samples from others: names, sizes, shapes, types."""
        ...

    def close(self) -> None:
        """Let go of files. May be repeated."""
        ...

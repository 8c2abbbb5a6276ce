"""Lines of text files as samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.feeding.files import OpenFiles, find_files, reading
from paceline.feeding.sources import Lines

_CHUNK_BYTES: Final = 16 << 20
_LINE_FEED: Final = ord("\n")


class TextLines:
    """The lines of files, found once, read when they are wanted.

    Read, and not mapped: a mapped file that shrinks would end the process.
    """

    def __init__(self, source: Lines) -> None:
        self._encoding = source.encoding
        self._files = OpenFiles(find_files(source.paths))
        self._starts = [_line_starts(path) for path in self._files.paths]
        self._firsts = list(
            accumulate(map(len, self._starts), initial=0)
        )  # the first sample of each file, and then their number

    @property
    def num_samples(self) -> int:
        """How many there are."""
        return self._firsts[-1]

    def gather(self, indices: Sequence[int]) -> None:
        """Return None: each line is decoded."""

    def record(self, index: int) -> str | bytes:
        """Return one line."""
        number, line = self._place(index)
        starts = self._starts[number]
        start = int(starts[line])
        end = int(starts[line + 1]) if line + 1 < len(starts) else self._files.sizes[number]
        data = self._files.read(number, start, end - start).removesuffix(b"\n").removesuffix(b"\r")
        return data if self._encoding is None else data.decode(self._encoding)

    def name(self, index: int) -> str:
        """Say which record this is."""
        number, line = self._place(index)
        return f"line {line + 1} of {self._files.paths[number]}"

    def check(self) -> None:
        """Raise DataError when a file that is open has another size by now."""
        self._files.check()

    def describe(self) -> object:
        """Return names, sizes and numbers of lines."""
        return [self._files.describe(), self._firsts]

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _place(self, index: int) -> tuple[int, int]:
        number = bisect_right(self._firsts, index) - 1
        return number, index - self._firsts[number]


def _line_starts(path: str) -> NDArray[np.int64]:
    """Return where the lines of a file begin."""
    found = [np.zeros(1, dtype=np.int64)]
    position = 0
    with reading(path), open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == _LINE_FEED) + position + 1)
            position += len(chunk)
    starts = np.concatenate(found)
    return starts[: np.searchsorted(starts, position)]  # what follows the last line feed is no line if it is empty

"""Samples from the lines of text files."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import accumulate
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from paceline.data.sources.declared import Lines
from paceline.data.sources.input_files import OpenFiles, find_files, position_in, reading

_CHUNK_BYTES: Final = 16 << 20
_WITH_MARK, _WITHOUT_MARK = "utf-8-sig", "utf-8"  # in the latter a byte order mark is an ordinary character
_LINE_FEED: Final = ord("\n")


class TextLines:
    """The lines of files, found once and read on request.

    Files are read and not mapped, as a mapped file that shrinks would end the process.
    """

    def __init__(self, source: Lines) -> None:
        self._encoding = None if source.encoding is None else codecs.lookup(source.encoding).name
        self._files = OpenFiles(find_files(source.paths))
        scans = [_scan(path) for path in self._files.paths]
        self._starts = [starts for starts, _ in scans]
        self._checksums = [checksum for _, checksum in scans]
        self._firsts = list(
            accumulate(map(len, self._starts), initial=0)
        )  # the first sample of each file, and then their number

    @property
    def num_samples(self) -> int:
        """Number of lines."""
        return self._firsts[-1]

    def gather(self, indices: Sequence[int]) -> None:
        """Return None: lines are decoded one by one."""

    def record(self, index: int) -> str | bytes:
        """Return one line."""
        number, line = position_in(self._firsts, index)
        starts = self._starts[number]
        start = int(starts[line])
        end = int(starts[line + 1]) if line + 1 < len(starts) else self._files.size_bytes(number)
        data = self._files.read(number, start, end - start).removesuffix(b"\n").removesuffix(b"\r")
        if self._encoding is None:
            return data
        return data.decode(self._encoding if self._encoding != _WITH_MARK or line == 0 else _WITHOUT_MARK)

    def name(self, index: int) -> str:
        """Return the name of a record."""
        number, line = position_in(self._firsts, index)
        return f"line {line + 1} of {self._files.paths[number]}"

    def check(self) -> None:
        """Do nothing: each read checks its file."""

    def describe(self) -> object:
        """Return names, sizes, numbers of lines and checksums."""
        return [self._files.describe(), self._firsts, self._checksums]

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def _scan(path: str) -> tuple[NDArray[np.int64], int]:
    """Return the starts of the lines of a file, and its checksum."""
    found = [np.zeros(1, dtype=np.int64)]
    position, checksum = 0, 0
    with reading(path), open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == _LINE_FEED) + position + 1)
            position, checksum = position + len(chunk), crc32(chunk, checksum)
    starts = np.concatenate(found)
    return starts[: np.searchsorted(starts, position)], checksum  # what follows the last line feed may be no line

"""Samples of tar files, as WebDataset has them.

The library of that name reads tar files from the front to the back, shuffles in a window, and knows no sample by its
number. Here any sample may be wanted at any time, so the files are found once by `tarfile` and then read by position.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from tarfile import TarFile, TarInfo

from paceline.errors import DataError
from paceline.feeding.files import OpenFiles, find_files, reading
from paceline.feeding.sources import WebDataset


@dataclass(frozen=True, slots=True)
class _Sample:
    """Where a sample lies: the number of the tar file, and name, offset and size of each of its files."""

    number: int
    key: str
    files: tuple[tuple[str, int, int], ...]


class TarSamples:
    """The samples of tar files, found once, read when they are wanted."""

    def __init__(self, source: WebDataset) -> None:
        self._files = OpenFiles(find_files(source.paths))
        self._samples = [
            sample for number, path in enumerate(self._files.paths) for sample in _samples_of(number, path)
        ]

    @property
    def num_samples(self) -> int:
        """How many there are."""
        return len(self._samples)

    def gather(self, indices: Sequence[int]) -> None:
        """Return None: what is in the files is to be decoded."""

    def record(self, index: int) -> dict[str, str | bytes]:
        """Return the files of one sample by what comes after the first dot of their names."""
        sample = self._samples[index]
        read = self._files.read
        return {"__key__": sample.key, **{name: read(sample.number, *place) for name, *place in sample.files}}

    def name(self, index: int) -> str:
        """Say which record this is."""
        sample = self._samples[index]
        return f"sample {sample.key} of {self._files.paths[sample.number]}"

    def check(self) -> None:
        """Raise DataError when a tar file that is open has another size by now."""
        self._files.check()

    def describe(self) -> object:
        """Return names, sizes and the number of samples."""
        return [self._files.describe(), len(self._samples)]

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def _samples_of(number: int, path: str) -> Iterator[_Sample]:
    """Yield the samples of one tar file: consecutive files of one name up to the first dot."""
    with reading(path):
        try:
            with tarfile.open(path, "r:") as archive:
                yield from (
                    _Sample(number, key, _places(path, key, [(name, member) for _, name, member in members]))
                    for key, members in groupby(_members(archive), key=lambda member: member[0])
                )
                _check_end(path, archive)
        except tarfile.TarError as error:
            raise DataError(
                f"{path} cannot be read as a tar file: {error}. It must not be compressed, as samples are read from "
                "the middle of it; was it written to its end?"
            ) from error


def _check_end(path: str, archive: TarFile) -> None:
    """Raise DataError when reading ended before the tar file does: `tarfile` takes a damaged header for the end."""
    with open(path, "rb") as file:
        file.seek(archive.offset)
        if any(file.read(tarfile.BLOCKSIZE)):
            raise DataError(
                f"{path} is damaged at byte {archive.offset}: expected the header of a file or the end there."
            )


def _members(archive: TarFile) -> Iterator[tuple[str, str, TarInfo]]:
    """Yield the key of each file, the rest of its name, and where it is."""
    for member in archive:
        folder, slash, name = member.name.rpartition("/")
        stem, dot, extension = name.partition(".")
        if member.isreg() and stem and dot:
            yield folder + slash + stem, extension.lower(), member


def _places(path: str, key: str, members: list[tuple[str, TarInfo]]) -> tuple[tuple[str, int, int], ...]:
    names = [name for name, _ in members]
    if len(set(names)) < len(names) or "__key__" in names:
        raise DataError(f"{path} has a file twice in sample {key}: {', '.join(names)}. Name each once.")
    return tuple((name, member.offset_data, member.size) for name, member in members)

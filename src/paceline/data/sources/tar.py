"""Samples of tar files, as WebDataset has them.

The library of that name reads tar files from front to back, shuffles in a window, and has no index of samples. Here
samples are read in any order, so files are found once by `tarfile` and then read by position.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from tarfile import BLOCKSIZE, TarError, TarFile, TarInfo
from typing import Any, BinaryIO, Final, cast
from zlib import crc32

import msgspec

from paceline.data.sources.declared import WebDataset
from paceline.data.sources.input_files import OpenFiles, find_files, reading
from paceline.errors import DataError

_END_BYTES: Final = 2 * BLOCKSIZE  # zeros, with which an archive ends
_MOST_SPARSE_BYTES: Final = 2 << 30  # of a file with holes, which takes no room in the archive
_MOST_LINKS: Final = 40  # one to the next, as Linux has it
_VOLUME_LABEL: Final = b"V"
_SCAN_BYTES: Final = 1 << 20
_PACK_ANEW: Final = "which is not a file in the archive: pack it anew, with 'tar --dereference --hard-dereference'."


class _Content(msgspec.Struct, frozen=True):
    """The bytes of a file: its size, and its pieces, as (offset in the file, offset in the archive, size).

    Between and after the pieces are zeros: a sparse file has several pieces, any other file one.
    """

    size_bytes: int
    pieces: tuple[tuple[int, int, int], ...]


class _Sample(msgspec.Struct, frozen=True):
    """The location of a sample: the number of the tar file, and the name and content of each of its files."""

    number: int
    key: str
    files: tuple[tuple[str, _Content], ...]


class TarSamples:
    """The samples of tar files, found once and read on request."""

    def __init__(self, source: WebDataset) -> None:
        self._files = OpenFiles(find_files(source.paths))
        self._samples = [
            sample for number, path in enumerate(self._files.paths) for sample in _samples_of(number, path)
        ]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self._samples)

    def gather(self, indices: Sequence[int]) -> None:
        """Return None: records are read one by one."""

    def record(self, index: int) -> dict[str, str | bytes]:
        """Return the files of one sample, by the extension after the first dot of their names."""
        sample = self._samples[index]
        return {"__key__": sample.key, **{name: self._read(sample.number, content) for name, content in sample.files}}

    def name(self, index: int) -> str:
        """Return the name of a record."""
        sample = self._samples[index]
        return f"sample {sample.key} of {self._files.paths[sample.number]}"

    def check(self) -> None:
        """Do nothing: each read checks its file."""

    def describe(self) -> object:
        """Return names and sizes of files, the number of samples, and a checksum of their files."""
        checksum = 0
        for sample in self._samples:
            checksum = crc32(
                repr((sample.key, *((name, file.size_bytes) for name, file in sample.files))).encode(), checksum
            )
        return [self._files.describe(), len(self._samples), checksum]

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _read(self, number: int, content: _Content) -> bytes:
        if len(content.pieces) == 1 and content.pieces[0][2] == content.size_bytes:
            return self._files.read(number, *content.pieces[0][1:])
        data = bytearray(content.size_bytes)
        for start, offset, size_bytes in content.pieces:
            data[start : start + size_bytes] = self._files.read(number, offset, size_bytes)
        return bytes(data)


def _samples_of(number: int, path: str) -> Iterator[_Sample]:
    """Yield the samples of one tar file: consecutive files of one name up to the first dot."""
    with reading(path), open(path, "rb") as file:
        named = _Index(path, file).files()
        for key, members in groupby(named, key=lambda member: member[0]):
            yield _Sample(number, key, _alone(path, key, [(name, content) for _, name, content in members]))


def _alone(path: str, key: str, files: list[tuple[str, _Content]]) -> tuple[tuple[str, _Content], ...]:
    names = [name for name, _ in files]
    if len(set(names)) < len(names) or "__key__" in names:
        raise DataError(f"{path} has a file twice in sample {key}: {', '.join(names)}. Name each once.")
    return tuple(files)


@dataclass(slots=True)
class _Index:
    """The files in a tar file, which may be several archives one behind the other.

    A link stands for the file that it leads to. What is named like a file of a sample and cannot be read as one is
    refused, since the sample would lack it.
    """

    path: str
    file: BinaryIO
    _size_bytes: int = field(init=False)
    _contents: dict[str, _Content] = field(default_factory=dict[str, _Content])  # by name, the last one of each
    _targets: dict[str, str] = field(default_factory=dict[str, str])  # of symbolic links

    def __post_init__(self) -> None:
        """Read the size of the tar file."""
        self._size_bytes = os.fstat(self.file.fileno()).st_size

    def files(self) -> Iterator[tuple[str, str, _Content]]:
        """Yield the key of each file, the rest of its name, and its content, in the order of the archive."""
        found: list[tuple[str, _Content | None]] = []  # None for what a symbolic link leads to: it may come later
        position = 0
        while not position or position < self._size_bytes:
            self.file.seek(position)
            with self._blaming(position), TarFile(fileobj=self.file) as archive:
                while (member := archive.next()) is not None:
                    cast("Any", archive).members.clear()  # else it keeps all of them
                    if member.size < 0 or archive.offset <= member.offset:
                        raise self._refusal(member, f"has a size of {member.size} bytes: damaged.")
                    if self._is_file(member):
                        found.append((member.name, self._content(member, archive.offset)))
                position = self._end_of_archive(archive.offset)
        for name, content in found:
            folder, slash, file = name.rpartition("/")
            stem, dot, extension = file.partition(".")
            if stem and dot:
                yield folder + slash + stem, extension.lower(), content or self._followed(name)

    def _is_file(self, member: TarInfo) -> bool:
        """Return whether a member is a file or a link; raises DataError unless it is one of these or a folder."""
        if member.isdir() or member.type == _VOLUME_LABEL:
            return False
        if not (member.isreg() or member.islnk() or member.issym()):
            raise self._refusal(member, "is neither a file, a folder nor a link: leave it out of the archive.")
        return True

    def _content(self, member: TarInfo, end: int) -> _Content | None:
        """Return the content of a file, which ends before `end`, and record it for links to it."""
        name = posixpath.normpath(member.name)
        self._contents.pop(name, None)
        self._targets.pop(name, None)
        if member.issym():
            self._targets[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
            return None
        if member.islnk():  # to something before it, whatever has that name later
            return self._linked(name, member)
        content = self._contents[name] = self._stored(member, end)
        return content

    def _linked(self, name: str, member: TarInfo) -> _Content | None:
        target = posixpath.normpath(member.linkname)
        if target in self._targets:
            self._targets[name] = self._targets[target]
            return None
        if target not in self._contents:
            raise self._refusal(member, f"is a link to {member.linkname}, {_PACK_ANEW}")
        content = self._contents[name] = self._contents[target]
        return content

    def _followed(self, name: str) -> _Content:
        """Return the content of the file to which a symbolic link leads."""
        target = posixpath.normpath(name)
        for _ in range(_MOST_LINKS):
            if target in self._contents:
                return self._contents[target]
            if target not in self._targets:
                break
            target = self._targets[target]
        raise DataError(f"{name} in {self.path} is a link to {target}, {_PACK_ANEW}")

    def _stored(self, member: TarInfo, end: int) -> _Content:
        sparse = cast("list[tuple[int, int]] | None", member.sparse)
        spans = [(0, member.size)] if sparse is None else [(start, size) for start, size in sparse if size]
        pieces: list[tuple[int, int, int]] = []
        offset = member.offset_data
        for start, size_bytes in spans:
            if min(start, size_bytes) < 0 or start + size_bytes > member.size:
                raise self._refusal(member, f"has {size_bytes} bytes at {start}, and a size of {member.size}: damaged.")
            pieces.append((start, offset, size_bytes))
            offset += size_bytes
        if offset > self._size_bytes:
            raise DataError(
                f"{self.path} ends at byte {self._size_bytes}, in the middle of {member.name}, which is to have bytes "
                f"{member.offset_data} to {offset}: it was not written or copied to its end."
            )
        if offset > end:
            raise self._refusal(
                member, f"has pieces up to byte {offset}, where the next file begins at {end}: damaged."
            )
        if sparse is not None and member.size > _MOST_SPARSE_BYTES:
            raise self._refusal(
                member, f"has {member.size} bytes with its holes filled, expected at most {_MOST_SPARSE_BYTES}."
            )
        return _Content(member.size, tuple(pieces))

    def _end_of_archive(self, position: int) -> int:
        """Return the start of the next archive after the end of one, or the size of the file.

        Raises:
            DataError: the archive is damaged or cut off there, which `tarfile` takes for an end.
        """
        self.file.seek(position)
        found = self.file.read(_END_BYTES)
        if any(found):
            at = position + (0 if any(found[:BLOCKSIZE]) else BLOCKSIZE)
            raise DataError(f"{self.path} is damaged at byte {at}: expected the header of a file or the end there.")
        if len(found) < _END_BYTES:
            raise DataError(
                f"{self.path} ends at byte {self._size_bytes} without the {_END_BYTES} bytes of zeros that end an "
                f"archive, expected from byte {position} on: files behind that may be missing. Copy or write it anew; "
                "if it is known to be whole, append these zeros."
            )
        while found and not any(found):
            position += len(found)
            found = self.file.read(_SCAN_BYTES)
        return position + len(found) - len(found.lstrip(b"\0"))

    def _refusal(self, member: TarInfo, why: str) -> DataError:
        return DataError(f"{member.name} in {self.path}, at byte {member.offset}, {why}")

    @contextmanager
    def _blaming(self, start: int) -> Generator[None]:
        """Turn errors of `tarfile` into a DataError that names the position."""
        try:
            yield
        except (TarError, ValueError, IndexError, OverflowError, RecursionError) as error:
            where = f" from byte {start} on, behind the end of another archive" if start else ""
            raise DataError(
                f"{self.path} cannot be read as a tar file{where}: {error}, before byte {self.file.tell()}. It must "
                "not be compressed, as samples are read from the middle of it; was it written to its end?"
            ) from error

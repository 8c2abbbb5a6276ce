"""Lists of files, sharded as whole files."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import overload

from paceline.data.partition import DataCut, Sharding
from paceline.data.sources.input_files import WholePaths
from paceline.errors import DataError, UsageError

_MOST_LISTED = 5  # files that a message names


@dataclass(frozen=True, slots=True)
class Files(Sequence[Path]):
    """Files sorted by name, with their sizes when they were listed.

    Args:
        paths: of the files, as they were named.
        sizes_bytes: the size of each file.
    """

    paths: tuple[Path, ...]
    sizes_bytes: tuple[int, ...]

    def __repr__(self) -> str:
        first = f", {str(self.paths[0])[-100:]!r} first" if self.paths else ""
        return f"Files({len(self.paths)} files, {self.size_bytes:,} bytes{first})"

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Path: ...

    @overload
    def __getitem__(self, index: slice) -> Files: ...

    def __getitem__(self, index: int | slice) -> Path | Files:
        if isinstance(index, slice):
            return Files(self.paths[index], self.sizes_bytes[index])
        return self.paths[index]

    def __iter__(self) -> Iterator[Path]:
        return iter(self.paths)

    @property
    def size_bytes(self) -> int:
        """Bytes of all together."""
        return sum(self.sizes_bytes)

    def pick(self, indices: Iterable[int]) -> Files:
        """Return the files at these indices, in this order."""
        chosen = list(indices)
        return Files(tuple(self.paths[k] for k in chosen), tuple(self.sizes_bytes[k] for k in chosen))


def files(*patterns: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Files:
    """Return the files that patterns match, sorted by name, each once; `paceline.shard` shards them as whole files.

    A file that has several names, by links or another spelling, is listed under the first.

    Every file is checked at once, so that a missing one is reported before training starts.

    Args:
        patterns: paths, as text or `Path`, with `*`, `?`, `[...]` and `**` for any folders in between; or lists of
            these. A file whose name is exactly the pattern is that file.

    Raises:
        UsageError: no pattern is given.
        DataError: a pattern matches no file, or a file is missing, is a folder or cannot be read.

    Example:
        >>> import tempfile, pathlib, paceline
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("b.csv", "a.csv", "c.txt"):
        ...         _ = (pathlib.Path(folder) / name).write_text("1,2")
        ...     [path.name for path in paceline.files(f"{folder}/*.csv")]
        ['a.csv', 'b.csv']
    """
    asked = [os.fspath(pattern) for pattern in _flat(patterns)]
    if not asked:
        raise UsageError("files is given no patterns: name files, or patterns such as 'data/*.csv'.")
    names = _each_once(name for pattern in asked for name in _matches(pattern))
    faults = {name: fault for name in names if (fault := _fault(name)) is not None}
    if faults:
        listed = "; ".join(f"{name}: {fault}" for name, fault in list(faults.items())[:_MOST_LISTED])
        more = f" and {len(faults) - _MOST_LISTED} more" if len(faults) > _MOST_LISTED else ""
        raise DataError(f"{len(faults)} of {len(names)} files cannot be read: {listed}{more}.")
    return Files(tuple(map(Path, names)), tuple(os.path.getsize(name) for name in names))


def shard_files(source: Files, sharding: Sharding, cut: DataCut) -> Files:
    """Return this worker's files: about as many bytes as other workers have, unless a partition is given."""
    sharding.note_size(len(source), "files")
    if cut.partition is None:
        homes = balance(source, sharding.size)
        return source.pick(k for k in cut.order(len(source), sharding.seed) if homes[k] == sharding.rank)
    key = cut.key or Path.as_posix
    own = cut.own(len(source), sharding, lambda index: key(source.paths[index]))
    return source[own] if isinstance(own, slice) else source.pick(own)


def balance(source: Files, size: int) -> list[int]:
    """Return the rank of each file's worker, so that all get about as many bytes: largest first, to the least loaded.

    >>> balance(Files(tuple(map(Path, "abcd")), (5, 9, 3, 4)), 2)
    [1, 0, 0, 1]
    """
    homes = [0] * len(source)
    loads = [(0, 0, rank) for rank in range(size)]  # bytes, files, worker
    heapify(loads)
    for index in sorted(range(len(source)), key=lambda index: (-source.sizes_bytes[index], index)):
        num_bytes, num_files, rank = loads[0]
        homes[index] = rank
        heapreplace(loads, (num_bytes + source.sizes_bytes[index], num_files + 1, rank))
    return homes


def _flat(patterns: Iterable[object]) -> Iterator[str | os.PathLike[str]]:
    for pattern in patterns:
        if isinstance(pattern, str | os.PathLike):
            yield pattern
        elif isinstance(pattern, Iterable) and not isinstance(pattern, bytes) and not hasattr(pattern, "dtype"):
            yield from _flat(pattern)
        else:
            raise UsageError(f"files is given a {type(pattern).__name__}, expected paths or patterns as text or Path.")


def _matches(pattern: str) -> list[str]:
    if os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    found = [name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name)]
    if not found:
        raise DataError(f"no file matches {pattern!r}, looked for from {os.getcwd()}.")
    return found


def _each_once(names: Iterable[str]) -> list[str]:
    """Return names in order, for each file the first of its names."""
    whole = WholePaths()
    files = {whole.of(name): name for name in sorted(set(names), reverse=True)}
    return sorted(files.values())


def _fault(name: str) -> str | None:
    """Return why a file cannot be read; None if it can."""
    try:
        mode = os.stat(name).st_mode
        if not S_ISREG(mode):
            return f"a folder: name what is in it, {name}/*" if S_ISDIR(mode) else "not a regular file"
        with open(name, "rb"):
            return None
    except (OSError, ValueError) as error:  # no name of a file
        return getattr(error, "strerror", None) or str(error)

"""Growing memory for one column of rows, in main memory or mapped from a file, and what a file maps at most."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, final

import msgspec
import numpy as np
import torch

from paceline.errors import ProtocolBug, UsageError

if TYPE_CHECKING:
    from torch import Tensor

_PAGE_BYTES: Final = mmap.PAGESIZE
_GROWTH: Final = 1.5


@final
class RowColumn:
    """A growing array of rows of `width` numbers; new rows are zero. For one thread at a time.

    A row takes `row_bytes`. There is room for up to half as many rows again. In memory that room costs nothing until
    it is written; on disk it is allocated at once, so that a full disk is an error here and not a crash later.

    Args:
        width: numbers per row.
        dtype: of all numbers.
        descriptor: of an open, empty file without a name (see `unnamed_file`), so that it does not outlive the process;
            the column takes ownership. Without one the column lies in main memory.
        outlives: the file is memory that may outlive this process; the column has the rows that are in it, and is in
            main memory like one without a file.

    Example:
        >>> column = RowColumn(4, torch.float32)
        >>> column.grow(1000)
        >>> column.tensor[999].tolist()
        [0.0, 0.0, 0.0, 0.0]
        >>> column.close()
    """

    def __init__(
        self, width: int, dtype: torch.dtype, descriptor: int | None = None, *, outlives: bool = False
    ) -> None:
        self.row_bytes: Final = width * dtype.itemsize
        self._width = width
        self._dtype = dtype
        self._outlives = outlives
        self._descriptor = descriptor
        self._release = weakref.finalize(self, _close_all, descriptor)
        self._allocate(_PAGE_BYTES)
        self._map = _mapping(descriptor)
        self._tensor: Tensor | None = self._view()

    @property
    def tensor(self) -> Tensor:
        """All rows that there is room for, (rows, width). Keep no view of it: `grow` fails while one exists."""
        if self._tensor is None:
            raise ProtocolBug("a column is used after it was closed")
        return self._tensor

    @property
    def is_spilled(self) -> bool:
        """Whether the rows lie in a file."""
        return self._descriptor is not None and not self._outlives

    @property
    def size_bytes(self) -> int:
        """The bytes of all rows that there is room for, in memory or on disk, once they are written."""
        return len(self._map)

    def grow(self, num_rows: int) -> None:
        """Make room for at least `num_rows` rows in all; never shrinks.

        Raises UsageError when memory or disk is full, and ProtocolBug while a view of the column exists. The column
        does not change then.
        """
        if num_rows <= self.tensor.shape[0]:
            return
        wanted_bytes = max(num_rows * self.row_bytes, int(len(self._map) * _GROWTH))
        size_bytes = -(-wanted_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._allocate(size_bytes)
        self._tensor = None
        try:
            self._map.resize(size_bytes)
        except BufferError as error:
            raise ProtocolBug(f"a column cannot grow to {num_rows} rows: a view of it is kept somewhere") from error
        except OSError as error:
            raise _no_room("memory", size_bytes, error) from error
        finally:
            self._tensor = self._view()

    def trim(self) -> None:
        """Release the memory of a column in a file; later reads get rows from the file.

        The system keeps pages cached while the memory is not needed elsewhere. Without a file nothing happens.
        """
        if self.is_spilled:
            self._map.madvise(mmap.MADV_DONTNEED)

    def release(self, start_byte: int, stop_byte: int) -> None:
        """Release the memory of whole pages of a column in a file, as `trim` does of all."""
        self._map.madvise(mmap.MADV_DONTNEED, start_byte, stop_byte - start_byte)

    def stretch(self, start_byte: int, stop_byte: int) -> Stretch:
        """Return whole pages of a column in a file, to be read by another thread; valid until `grow` or `close`."""
        if self._descriptor is None:
            raise ProtocolBug("a column in memory has no file to read from")
        return Stretch(self.tensor.data_ptr() + start_byte, self._descriptor, start_byte, stop_byte - start_byte)

    def close(self) -> None:
        """Release everything. Views that still exist stay valid, and keep the memory until they are dropped."""
        self._tensor = None
        self._map = _mapping(None)  # closes the one before, or leaves that to its last view
        self._release()

    def _allocate(self, size_bytes: int) -> None:
        # A page of a file that has no place on the disk would kill the process at the first write to it.
        if self._descriptor is None or self._outlives:
            return
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError as error:
            raise _no_room("disk space", size_bytes, error) from error

    def _view(self) -> Tensor:
        # By numpy, since its array holds the mapping: then a mapping that is in use refuses to move.
        num_rows = len(self._map) // self.row_bytes
        whole = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))
        return whole[: num_rows * self.row_bytes].view(self._dtype).view(num_rows, self._width)


_POPULATE_READ: Final = 22  # of Linux 5.14; Python's mmap does not name it
_LIBRARY: Final = ctypes.CDLL(None, use_errno=True)


class Stretch(msgspec.Struct, frozen=True):
    """Neighbouring pages of a column in a file: where they are mapped, and where they lie in the file."""

    address: int
    descriptor: int
    start_byte: int
    num_bytes: int

    def read(self) -> None:
        """Read and map these pages, without changing any; blocks until they are there. May run on any thread.

        Raises OSError when the file cannot be read, or the system is older than Linux 5.14.
        """
        os.posix_fadvise(self.descriptor, self.start_byte, self.num_bytes, os.POSIX_FADV_WILLNEED)  # all at once
        _advise(self.address, self.num_bytes, _POPULATE_READ)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    """Advise the system on memory; raises OSError. Other threads of Python run meanwhile."""
    if _LIBRARY.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def unnamed_file(directory: str) -> int:
    """Return the descriptor of a new file in `directory` that is deleted when the process ends, in any way.

    Raises UsageError when it cannot be created.
    """
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise UsageError(
            f"Rows cannot spill to '{directory}' ({error.strerror}); name a directory on a disk with room that can be "
            "written to."
        ) from error


def _mapping(descriptor: int | None) -> mmap.mmap:
    if descriptor is None:
        return mmap.mmap(-1, _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(descriptor, max(_PAGE_BYTES, os.fstat(descriptor).st_size), flags=mmap.MAP_SHARED)


def _close_all(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _no_room(what: str, size_bytes: int, error: OSError) -> UsageError:
    return UsageError(
        f"A row table needs {size_bytes} bytes of {what} for one of its columns, which are not available "
        f"({error.strerror}). Give it more, use more servers, or remove rows: expire_after, max_rows."
    )


# An access to a cached page also maps the pages around it: this many bytes, at addresses that are multiples of it. No
# access maps more, as long as the system reads no further ahead than requested: it may map at once what it reads at
# once.
WINDOW_BYTES: Final = 64 * 1024


@final
class Windows:
    """The parts of one column that may be mapped: those that were visited since the last trim.

    Args:
        column: in a file, and still empty; `trim` releases what is mapped of it.

    Raises:
        UsageError: the system does not support advice on how the file is read.
    """

    def __init__(self, column: RowColumn) -> None:
        _read_page_by_page(column)
        self._column = column
        self._unit_bytes = unit_bytes(column.row_bytes)
        self._visited = self._none()

    @property
    def mapped_bytes(self) -> int:
        """The most bytes that may be mapped now."""
        return int(self._visited.count_nonzero()) * self._unit_bytes

    @property
    def row_bytes(self) -> int:
        """What one row maps at most."""
        return most_mapped_bytes(self._column.row_bytes)

    @property
    def most_bytes(self) -> int:
        """What all of the column would map."""
        return len(self._visited) * self._unit_bytes

    def visit(self, slots: Tensor) -> None:
        """Count the windows of these rows as mapped."""
        first, last = self._ends(slots)
        self._visited.index_fill_(0, first, True)
        if WINDOW_BYTES % self._column.row_bytes:
            self._visited.index_fill_(0, last, True)

    def visit_span(self, start: int, stop: int) -> None:
        """Count the windows of neighbouring rows, at least one, as mapped."""
        row_bytes, shift = self._column.row_bytes, self._shift()
        first, last = start * row_bytes + shift, stop * row_bytes + shift - 1
        self._visited[first // self._unit_bytes : last // self._unit_bytes + 1] = True

    def costs(self, slots: Tensor) -> Tensor:
        """Return what each of these rows, (n,), maps at most beside the ones before it; -1 is a row yet to be made."""
        first, last = self._ends(slots)
        is_elsewhere = slots < 0
        is_elsewhere[1:] |= (first[1:] != first[:-1]) | (last[1:] != last[:-1]) | is_elsewhere[:-1]
        is_elsewhere[:1] = True
        return is_elsewhere * self.row_bytes

    def of_blocks(self, blocks: Tensor, num_rows: int) -> Tensor:
        """Return which windows have rows of these blocks of `num_rows` rows each, (n,); a block is at most a window."""
        first, _ = self._ends(blocks * num_rows)
        _, last = self._ends(blocks * num_rows + (num_rows - 1))
        return torch.cat((first, last.clamp_(max=len(self._visited) - 1))).unique()

    def bytes_of(self, units: Tensor) -> int:
        """Return what these windows take, mapped or not."""
        return len(units) * self._unit_bytes

    def new_bytes_of(self, units: Tensor) -> int:
        """Return what those of these windows take that are not mapped."""
        return (len(units) - int(self._visited[units].count_nonzero())) * self._unit_bytes

    def visit_ahead(self, units: Tensor) -> list[Stretch]:
        """Count windows as mapped, and return what is to be read so that they are."""
        wanted = self._none().index_fill_(0, units, True) & ~self._visited
        self._visited |= wanted
        return [self._column.stretch(*ends) for ends in self._byte_ranges(wanted)]

    def release_but(self, kept: list[Tensor]) -> None:
        """Release all that is mapped except these windows."""
        if not kept:
            self.trim()
            return
        stays = self._none()
        for units in kept:
            stays.index_fill_(0, units, True)
        for ends in self._byte_ranges(self._visited & ~stays):
            self._column.release(*ends)
        self._visited &= stays

    def trim(self) -> None:
        """Release all mapped memory."""
        self._column.trim()
        self._visited.zero_()

    def grow(self, num_rows: int) -> None:
        """Make room for `num_rows` rows, which may move the column; raises as `RowColumn.grow` does."""
        if num_rows > len(self._column.tensor):
            self.trim()
            self._column.grow(num_rows)
            self._visited = self._none()

    def _ends(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows of the first and of the last byte of rows."""
        first = slots * self._column.row_bytes + self._shift()
        return first // self._unit_bytes, (first + (self._column.row_bytes - 1)) // self._unit_bytes

    def _byte_ranges(self, chosen: Tensor) -> Iterable[tuple[int, int]]:
        """Return the first byte and the end, in the column, of each run of windows; none is empty."""
        shift, size_bytes = self._shift(), self._column.size_bytes
        for first, stop in _runs(chosen):
            start_byte = max(0, first * self._unit_bytes - shift)
            stop_byte = min(size_bytes, stop * self._unit_bytes - shift)
            if start_byte < stop_byte:
                yield start_byte, stop_byte

    def _shift(self) -> int:
        return self._column.tensor.data_ptr() % WINDOW_BYTES

    def _none(self) -> Tensor:
        return torch.zeros(self._column.size_bytes // self._unit_bytes + 2, dtype=torch.bool)


def unit_bytes(row_bytes: int) -> int:
    """Return in which units a column with such rows is counted: whole windows, no smaller than a row."""
    return -(-row_bytes // WINDOW_BYTES) * WINDOW_BYTES


def most_mapped_bytes(row_bytes: int) -> int:
    """Return how much one row of a column maps at most.

    >>> [most_mapped_bytes(row_bytes) // WINDOW_BYTES for row_bytes in (8, 24, 100_000)]
    [1, 2, 4]
    """
    return unit_bytes(row_bytes) * (1 if WINDOW_BYTES % row_bytes == 0 else 2)


def _read_page_by_page(column: RowColumn) -> None:
    """Tell the system not to read ahead in a column, however long it grows."""
    try:
        _advise(column.tensor.data_ptr(), column.size_bytes, mmap.MADV_RANDOM)
    except OSError as error:
        raise UsageError(f"The system does not read rows page by page: {error.strerror}.") from error


def _runs(chosen: Tensor) -> Iterable[tuple[int, int]]:
    """Return where runs of True begin and end, of a tensor of bool."""
    padded = torch.nn.functional.pad(chosen.to(torch.int8), (1, 1))
    edges = padded.diff().nonzero().view(-1).tolist()
    return zip(edges[::2], edges[1::2], strict=True)

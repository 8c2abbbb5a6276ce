"""Memory for rows that grows without a copy: anonymous, or in a file on a disk where main memory does not suffice."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Final, final

import numpy as np
import torch

from paceline.errors import ProtocolBug, UsageError

if TYPE_CHECKING:
    from torch import Tensor

_PAGE_BYTES: Final = mmap.PAGESIZE
_PAGE_ENTRY_BYTES: Final = 8  # of /proc/self/pagemap; the sign bit says that the page is in memory
_GROWTH: Final = 1.5


@final
class RowColumn:
    """Rows of `width` numbers, of which there can be more and more; new ones are zero. For one thread at a time.

    A row takes `row_bytes`. Room is kept for up to half as many rows again; in memory that room costs nothing until
    it is written, on disk it is taken at once, so that a full disk is an error here and not a crash later.

    Args:
        width: numbers a row.
        dtype: of all of them.
        descriptor: of an open, empty file that has no name any more (see `unnamed_file`), so that nothing of it
            outlives the process; it belongs to the column from now on. Without one the column lies in main memory.

    Example:
        >>> column = RowColumn(4, torch.float32)
        >>> column.grow(1000)
        >>> column.tensor[999].tolist()
        [0.0, 0.0, 0.0, 0.0]
        >>> column.close()
    """

    def __init__(self, width: int, dtype: torch.dtype, descriptor: int | None = None) -> None:
        self.row_bytes: Final = width * dtype.itemsize
        self._width = width
        self._dtype = dtype
        self._descriptor = descriptor
        self._release = weakref.finalize(self, _close_all, descriptor)
        self._allocate(_PAGE_BYTES)
        self._map = _mapping(descriptor)
        self._tensor: Tensor | None = self._view()

    @property
    def tensor(self) -> Tensor:
        """Return all rows there is room for, (rows, width). Keep no view: while there is one, `grow` is refused."""
        if self._tensor is None:
            raise ProtocolBug("a column is used after it was closed")
        return self._tensor

    @property
    def is_spilled(self) -> bool:
        """Return whether the rows lie in a file."""
        return self._descriptor is not None

    @property
    def size_bytes(self) -> int:
        """Return what the rows there is room for take, in memory or on disk, once they are written."""
        return len(self._map)

    def grow(self, num_rows: int) -> None:
        """Make room for at least so many rows in all; never less than there is.

        Raises UsageError when neither memory nor disk has it, and ProtocolBug while somebody keeps a view; the column
        stays as it was then.
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

    def resident_bytes(self) -> int:
        """Return how much of it lies in main memory as part of this process; takes about 10 ms a GB."""
        first = self.tensor.data_ptr() // _PAGE_BYTES * _PAGE_ENTRY_BYTES
        length = self.size_bytes // _PAGE_BYTES * _PAGE_ENTRY_BYTES
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            entries = np.frombuffer(os.pread(pages.fileno(), length, first), dtype=np.int64)
        return int((entries < 0).sum()) * _PAGE_BYTES

    def trim(self) -> None:
        """Give the memory of rows in a file back; they stay in the file, and whoever reads one gets it from there.

        The system keeps pages cached as long as nobody else needs the memory. Without a file nothing happens.
        """
        if self.is_spilled:
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give everything back. Views that are still kept stay valid, and keep the memory until they go."""
        self._tensor = None
        self._map = _mapping(None)  # closes the one before, or leaves that to its last view
        self._release()

    def _allocate(self, size_bytes: int) -> None:
        # A page of a file that has no place on the disk would kill the process at the first write to it.
        if self._descriptor is None:
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


def unnamed_file(directory: str) -> int:
    """Return the descriptor of a new file in `directory` that goes with the process, however that ends.

    Raises UsageError when there can be none.
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
    return mmap.mmap(descriptor, _PAGE_BYTES, flags=mmap.MAP_SHARED)


def _close_all(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _no_room(what: str, size_bytes: int, error: OSError) -> UsageError:
    return UsageError(
        f"A row table needs {size_bytes} bytes of {what} for one of its columns, and they are not to be had "
        f"({error.strerror}). Give it more, use more servers, or let rows go: expire_after, max_rows."
    )

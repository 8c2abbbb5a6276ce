"""Accounting of the memory that a column in a file maps at most; asking the kernel would take too long."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING, Final, final

import torch

from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rows.column import RowColumn

# Who reads a page that the system has cached gets those around it as well: so many bytes, at addresses that are
# multiples of them. No access brings more, as long as the system reads no further ahead than asked: what it reads at
# once it may map at once.
WINDOW_BYTES: Final = 64 * 1024


@final
class Windows:
    """The parts of one column that may be mapped: those that were visited since the last trim.

    Args:
        column: in a file, and still empty; what has been mapped of it is given back by `trim`.

    Raises:
        UsageError: the system does not take advice on how the file is read.
    """

    def __init__(self, column: RowColumn) -> None:
        _read_page_by_page(column)
        self._column = column
        self._unit_bytes = unit_bytes(column.row_bytes)
        self._visited = self._none()

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are mapped at most."""
        return int(self._visited.count_nonzero()) * self._unit_bytes

    def visit(self, slots: Tensor) -> None:
        """Count the windows of some rows."""
        first = slots * self._column.row_bytes + self._shift()
        self._visited.index_fill_(0, first // self._unit_bytes, True)
        if WINDOW_BYTES % self._column.row_bytes:
            self._visited.index_fill_(0, (first + self._column.row_bytes - 1) // self._unit_bytes, True)

    def visit_span(self, start: int, stop: int) -> None:
        """Count the windows of neighbouring rows, at least one."""
        row_bytes, shift = self._column.row_bytes, self._shift()
        first, last = start * row_bytes + shift, stop * row_bytes + shift - 1
        self._visited[first // self._unit_bytes : last // self._unit_bytes + 1] = True

    def trim(self) -> None:
        """Give all of it back."""
        self._column.trim()
        self._visited.zero_()

    def grow(self, num_rows: int) -> None:
        """Make room for so many rows in the column, which may move all of it; raises what that raises."""
        if num_rows > len(self._column.tensor):
            self.trim()
            self._column.grow(num_rows)
            self._visited = self._none()

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
    library = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(column.tensor.data_ptr())
    if library.madvise(address, ctypes.c_size_t(column.size_bytes), mmap.MADV_RANDOM):
        raise UsageError(f"The system does not read rows page by page: {os.strerror(ctypes.get_errno())}.")

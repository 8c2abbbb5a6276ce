"""Memory for rows: it grows without losing a number, and refuses what would go wrong later."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import ProtocolBug, UsageError
from paceline.update.rows.column import RowColumn, unnamed_file


def resident_bytes(column: RowColumn) -> int:
    """How many bytes of a column are in the main memory of this process."""
    page_bytes, entry_bytes = mmap.PAGESIZE, 8  # of /proc/self/pagemap; the sign bit marks pages in memory
    first = column.tensor.data_ptr() // page_bytes * entry_bytes
    length = column.size_bytes // page_bytes * entry_bytes
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        entries = np.frombuffer(os.pread(pages.fileno(), length, first), dtype=np.int64)
    return int((entries < 0).sum()) * page_bytes


@pytest.fixture(params=["memory", "file"])
def descriptor(request: pytest.FixtureRequest, tmp_path: Path) -> int | None:
    return unnamed_file(str(tmp_path)) if request.param == "file" else None


@pytest.fixture
def column(descriptor: int | None) -> Iterator[RowColumn]:
    column = RowColumn(3, torch.float32, descriptor)
    yield column
    column.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("width", [1, 3, 1500])
def test_growing_keeps_what_is_there(dtype: torch.dtype, width: int, descriptor: int | None) -> None:
    column = RowColumn(width, dtype, descriptor)
    num_rows = 0
    for wanted in (1, 10, 1000, 1001, 2500):
        column.grow(wanted)
        assert column.tensor.shape[0] >= wanted
        assert column.tensor.shape[1] == width
        expected = torch.arange(num_rows)[:, None].expand(-1, width).to(dtype)
        assert torch.equal(column.tensor[:num_rows], expected)
        assert not column.tensor[num_rows:].any()
        num_rows = wanted
        column.tensor[:num_rows] = torch.arange(num_rows)[:, None].to(dtype)
    assert column.row_bytes == width * dtype.itemsize
    column.close()


def test_it_does_not_shrink_and_grows_ahead(column: RowColumn) -> None:
    column.grow(10_000)
    room = column.tensor.shape[0]
    column.grow(5)
    assert column.tensor.shape[0] == room
    column.grow(room + 1)
    assert column.tensor.shape[0] > 1.4 * room


def test_growing_under_a_view_is_refused(column: RowColumn) -> None:
    column.tensor[:] = 1
    view = column.tensor[5]
    room = column.tensor.shape[0]
    with pytest.raises(ProtocolBug, match="a view of it is kept"):
        column.grow(100_000)
    assert column.tensor.shape[0] == room
    assert view.tolist() == [1, 1, 1]
    del view
    column.grow(100_000)
    assert column.tensor[5].tolist() == [1, 1, 1]


def test_only_written_memory_is_resident() -> None:
    column = RowColumn(1024, torch.float32)
    column.grow(16_000)
    column.tensor[:1600] = 1
    assert column.size_bytes >= 16_000 * 4096
    assert 0 <= resident_bytes(column) - 1600 * 4096 <= 2 << 20  # the system may give memory in large pages
    column.trim()
    assert column.tensor[1599].sum() == 1024
    column.close()


def test_trimming_gives_the_memory_of_a_file_back(tmp_path: Path) -> None:
    column = RowColumn(1024, torch.float32, unnamed_file(str(tmp_path)))
    assert column.is_spilled
    column.grow(1000)
    column.tensor[:] = 2
    assert resident_bytes(column) == column.size_bytes
    column.trim()
    assert resident_bytes(column) == 0
    assert column.tensor[999].sum() == 2048
    assert 0 < resident_bytes(column) < column.size_bytes
    column.close()


def test_memory_that_is_not_there_is_an_error_and_changes_nothing() -> None:
    column = RowColumn(1, torch.int64)
    column.tensor[:] = 7
    with pytest.raises(UsageError, match="bytes of memory for one of its columns"):
        column.grow(1 << 50)
    assert column.tensor[100].item() == 7
    column.grow(10_000)
    column.close()


def test_a_full_disk_is_an_error_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    column = RowColumn(1, torch.int64, unnamed_file(str(tmp_path)))
    column.tensor[:] = 7

    def full(_descriptor: int, _start: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(UsageError, match=r"bytes of disk space .*No space left on device"):
            column.grow(10_000)
    assert column.tensor[100].item() == 7
    column.grow(10_000)
    assert column.tensor[100].item() == 7
    column.close()


def test_a_file_has_no_name_and_is_closed_with_its_column(tmp_path: Path) -> None:
    descriptors = [unnamed_file(str(tmp_path)) for _ in range(2)]
    closed, forgotten = (RowColumn(1, torch.int64, descriptor) for descriptor in descriptors)
    assert list(tmp_path.iterdir()) == []
    closed.close()
    closed.close()
    del forgotten
    gc.collect()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    with pytest.raises(ProtocolBug, match="after it was closed"):
        closed.grow(1)


def test_a_view_outlives_its_column() -> None:
    column = RowColumn(2, torch.float32)
    view = column.tensor[:1]
    view[:] = 3
    column.close()
    assert view.tolist() == [[3, 3]]


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Rows cannot spill to '.*nowhere' .No such file"):
        unnamed_file(str(tmp_path / "nowhere"))

"""Pieces of files: few files are open at a time, and one that ends too soon is noticed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.leaks import open_descriptors

from paceline.errors import DataError
from paceline.feeding.files import OpenFiles


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(100)]
    for path in paths:
        path.write_text(path.name)
    before = len(open_descriptors())
    with closing(OpenFiles([*map(str, paths)])) as files:
        assert [files.read(number, 0, 4) for number in range(100)] == [path.name.encode()[:4] for path in paths]
        assert before < len(open_descriptors()) <= before + 64
    assert len(open_descriptors()) == before


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0123456789")
    with closing(OpenFiles([str(path)])) as files:
        assert files.read(0, 8, 2) == b"89"
        path.write_text("0123")
        with pytest.raises(DataError, match="has 4 bytes, and had 10"):
            files.read(0, 2, 3)
        assert files.read(0, 0, 4) == b"0123"
    with closing(OpenFiles([str(path)])) as files, pytest.raises(DataError, match="ends at 4, expected 5"):
        files.read(0, 2, 3)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a")
    files = OpenFiles([str(path)])
    path.unlink()
    with pytest.raises(DataError, match=r"a.txt cannot be read: No such file"):
        files.read(0, 0, 1)

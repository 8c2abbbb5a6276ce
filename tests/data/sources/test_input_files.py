"""Pieces of files: few files are open at a time, and one that ends too soon is noticed."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from tests.leaks import open_descriptors

from paceline.data.sources.input_files import FixedFiles, OpenFiles, find_files
from paceline.errors import DataError


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
    with closing(OpenFiles([str(path)])) as files, pytest.raises(DataError, match="ends at 4, expected 5"):
        files.read(0, 2, 3)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a")
    files = OpenFiles([str(path)])
    path.unlink()
    with pytest.raises(DataError, match=r"a.txt cannot be read: No such file"):
        files.read(0, 0, 1)


def written_at(path: Path, text: str, time_ns: int) -> None:
    path.write_text(text)
    os.utime(path, ns=(time_ns, time_ns))


def test_a_file_that_is_rewritten_at_the_same_size(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    written_at(path, "one\ntwo\n", 1)
    fixed = FixedFiles([str(path)])
    with closing(OpenFiles([str(path)])) as unread, closing(OpenFiles([str(path)])) as files:
        assert files.read(0, 4, 3) == b"two"
        fixed.check()
        written_at(path, "o\nthree\n", 2)
        for look in (lambda: files.read(0, 4, 3), lambda: unread.read(0, 4, 3), fixed.check):
            with pytest.raises(
                DataError, match=r"a.txt was written to or replaced .*, although it has 8 bytes as before"
            ):
                look()


def test_a_file_that_is_replaced_is_read_on_as_it_was_while_it_is_open(tmp_path: Path) -> None:
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    written_at(path, "one\ntwo\n", 1)
    written_at(other, "o\nthree\n", 1)
    with closing(OpenFiles([str(path)])) as files:
        assert files.read(0, 4, 3) == b"two"
        other.replace(path)
        assert files.read(0, 4, 3) == b"two"
        files.close()
        with pytest.raises(DataError, match="was written to or replaced"):
            files.read(0, 4, 3)


def test_one_file_under_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    Path("d/a.txt").write_text("a")
    Path("link.txt").symlink_to("d/a.txt")
    Path("e").symlink_to("d")
    for other in ("./d/a.txt", "d/../d/a.txt", str(tmp_path / "d/a.txt"), "link.txt", "e/a.txt", "e/*.txt"):
        with pytest.raises(DataError, match=r"d/a.txt and .* are one file, /.*/d/a.txt: name each file once"):
            find_files(["d/a.txt", other])
    twice = "d/a.txt"
    with pytest.raises(DataError, match=r"d/a.txt is 2 times among the files of d/a.txt, d/a.txt"):
        find_files([twice, twice])
    Path("d/b.txt").write_text("a")
    assert find_files(["link.txt", "d/b.txt"]) == ["link.txt", "d/b.txt"]

"""Samples of tar files, as WebDataset has them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from tests.feeding.made import read

from paceline import sources
from paceline.errors import DataError
from paceline.feeding.recipe import Recipe
from paceline.feeding.records import Records, open_recipe


def write(path: Path, *names: str, mode: str = "w") -> None:
    """A tar file whose files hold their own names."""
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name in names:
            member = tarfile.TarInfo(name)
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            else:
                member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))


def opened(*paths: Path) -> Records:
    return open_recipe(Recipe(sources.webdataset([*paths])), None)


def test_files_of_one_name_are_a_sample(tmp_path: Path) -> None:
    long = "a" * 150  # a name that takes headers of its own
    write(tmp_path / "b.tar", "d.e/", "d.e/1.JPG", "d.e/1.seg.png", "d.e/2.jpg", "d.e/2.seg.png", ".hidden", "README")
    write(tmp_path / "a.tar", f"{long}.jpg", f"{long}.seg.png")
    records = opened(tmp_path / "*.tar")
    assert records.num_samples == 3
    assert read(records, 2, 0, 1).content == {
        "__key__": ["d.e/2", long, "d.e/1"],
        "jpg": [b"d.e/2.jpg", f"{long}.jpg".encode(), b"d.e/1.JPG"],
        "seg.png": [b"d.e/2.seg.png", f"{long}.seg.png".encode(), b"d.e/1.seg.png"],
    }
    records.close()


def test_an_empty_tar_file_has_no_samples(tmp_path: Path) -> None:
    write(tmp_path / "a.tar")
    assert opened(tmp_path / "a.tar").num_samples == 0


def test_a_file_twice_in_a_sample(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", "1.jpg", "1.JPG")
    with pytest.raises(DataError, match=r"a.tar has a file twice in sample 1: jpg, jpg"):
        opened(tmp_path / "a.tar")


def test_compressed_or_no_tar_at_all(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", "1.jpg", mode="w:gz")
    with pytest.raises(DataError, match="It must not be compressed"):
        opened(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read as a tar file"):
        opened(tmp_path / "a.tar")


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, *(f"{number}.jpg" for number in range(5)))
    whole = path.read_bytes()
    path.write_bytes(whole[:2048] + b"\xff" * 512 + whole[2560:])
    with pytest.raises(DataError, match="damaged at byte 2048"):
        opened(path)
    path.write_bytes(whole[:2200])
    with pytest.raises(DataError, match="damaged at byte 2048"):
        opened(path)
    path.write_bytes(whole[:1540])
    with pytest.raises(DataError, match=r"cannot be read as a tar file|damaged"):
        opened(path)
    path.write_bytes(whole[:2048])  # nothing but the marks of the end is missing
    assert opened(path).num_samples == 2

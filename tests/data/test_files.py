"""Files are found at once or named, and dealt out whole, to all workers about alike."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.test_sharding import Recorder

import paceline
from paceline.data.files import Files, balance, files
from paceline.data.partition import DataCut
from paceline.data.sharding import shard_source
from paceline.errors import DataError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four files, of 1 to 4 bytes."""
    (tmp_path / "deep" / "down").mkdir(parents=True)
    for size, name in enumerate(("b.csv", "a.csv", "c.txt", "deep/down/d.csv"), 1):
        (tmp_path / name).write_bytes(b"x" * size)
    return tmp_path


def test_files_are_sorted_and_each_is_there_once(folder: Path) -> None:
    found = files(f"{folder}/*.csv", [folder / "c.txt", folder / "a.csv"], f"{folder}/**/d.csv")
    assert [path.name for path in found] == ["a.csv", "b.csv", "c.txt", "d.csv"]
    assert (found.sizes_bytes, found.size_bytes) == ((2, 1, 3, 4), 10)
    assert (len(found), found[-1].name, list(found[1:3])) == (4, "d.csv", list(found)[1:3])
    assert found[1:3].sizes_bytes == (1, 3)
    assert paceline.files(folder / "c.txt") == found[2:3]


def test_a_file_under_several_names_is_there_once(folder: Path) -> None:
    (folder / "z.csv").symlink_to("a.csv")
    (folder / "flat").symlink_to("deep/down")
    others = folder / "deep/../a.csv", folder / "z.csv", folder / "flat/d.csv"
    found = files(others, f"{folder}/*.csv", folder / "deep/down/d.csv")
    assert [path.relative_to(folder).as_posix() for path in found] == ["a.csv", "b.csv", "deep/down/d.csv"]


def test_a_file_with_the_name_of_a_pattern_is_that_file(folder: Path) -> None:
    (folder / "[ab].csv").write_text("")
    assert [path.name for path in files(folder / "[ab].csv")] == ["[ab].csv"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.png", r"no file matches '.*\*\.png', looked for from"),
        ("none.csv", r"1 of 1 files cannot be read: .*none\.csv: No such file"),
        ("deep", r"deep: a folder: name what is in it, .*deep/\*"),
        ("pipe", r"pipe: not a regular file"),
        ("dangling", r"dangling: No such file"),
    ],
)
def test_what_cannot_be_read_is_named_at_once(folder: Path, pattern: str, message: str) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to(folder / "nowhere")
    with pytest.raises(DataError, match=message):
        files(folder / pattern)


def test_of_many_that_cannot_be_read_some_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"8 of 8 files cannot be read: .*0: No such .*4: No such .* and 3 more\.$"):
        files([tmp_path / str(number) for number in range(8)])


def test_nothing_and_what_is_no_path_are_refused() -> None:
    with pytest.raises(UsageError, match="given no patterns"):
        files([])
    with pytest.raises(UsageError, match="given a int, expected paths"):
        files("a", [7])  # pyright: ignore[reportArgumentType]


# -- which worker gets which -----------------------------------------------------------------------------------------


def named(sizes: list[int]) -> Files:
    return Files(tuple(Path(f"data/{number:03}") for number in range(len(sizes))), tuple(sizes))


def parts_of(source: Files, size: int, cut: DataCut) -> list[Files]:
    return [shard_source(source, Recorder(rank, size).sharding, cut) for rank in range(size)]


@given(
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=30),
    size=st.integers(1, 6),
    partition=st.sampled_from([None, "strided", "contiguous", "hashed"]),
    shuffled=st.booleans(),
)
def test_each_file_is_one_workers(sizes: list[int], size: int, partition: None, shuffled: bool) -> None:
    source = named(sizes)
    parts = parts_of(source, size, DataCut(partition, shuffled))
    pairs = [(path, num) for part in parts for path, num in zip(part.paths, part.sizes_bytes, strict=True)]
    assert sorted(pairs) == list(zip(source.paths, source.sizes_bytes, strict=True))
    if partition is None:
        loads = [part.size_bytes for part in parts]
        assert max(loads) - min(loads) <= max(sizes), "a file more than needed is with the worker that has most"
        assert max(map(len, parts)) or not sizes
        if not shuffled:
            assert all(list(part) == sorted(part) for part in parts)


def test_the_largest_goes_first_and_to_the_worker_with_least() -> None:
    assert balance(named([5, 9, 3, 4]), 2) == [1, 0, 0, 1]
    assert balance(named([2, 2, 2, 2]), 2) == [0, 1, 0, 1], "in the order of their names"
    assert balance(named([0, 0, 0]), 3) == [0, 1, 2], "files of nothing are shared out too"


def test_a_shuffle_changes_the_order_of_files_and_not_whose_they_are() -> None:
    source = named([7] * 20)
    plain, shuffled = (parts_of(source, 2, DataCut(shuffled=shuffled)) for shuffled in (False, True))
    assert [sorted(part) for part in shuffled] == [list(part) for part in plain]
    assert list(chain(*shuffled)) != list(chain(*plain))


def test_files_are_hashed_by_their_names_or_by_what_one_says() -> None:
    few, many = (parts_of(named([1] * num), 3, DataCut("hashed")) for num in (10, 20))
    assert [[path for path in part if path.name < "010"] for part in many] == [list(part) for part in few]
    by_ending = parts_of(named([1] * 20), 3, DataCut("hashed", key=lambda path: path.name[-1]))
    assert all(len(part) == 2 * len({path.name[-1] for path in part}) for part in by_ending)


def test_one_line_is_said_where_there_are_fewer_files_than_workers() -> None:
    recorder = Recorder(0, 3)
    assert len(shard_source(named([1, 2]), recorder.sharding)) == 1
    assert recorder.told == ["1 of 3 workers get nothing: there are 2 files."]

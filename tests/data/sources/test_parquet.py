"""Rows of Parquet files."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.sources.made import read, same

from paceline import sources
from paceline.data.sources.declared import BatchRecipe
from paceline.data.sources.parquet import TableRows
from paceline.data.sources.records import Records, open_recipe, open_source
from paceline.errors import DataError, RecordError, UsageError


@pytest.fixture
def arrow() -> Any:
    return pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'paceline[data]'")


def write(path: Path, arrow: Any, columns: dict[str, Any], rows_per_group: int = 3) -> None:
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table(columns), path, row_group_size=rows_per_group)


def opened(path: Path, *columns: str, skip: bool = False) -> Records:
    source = sources.parquet(path, columns=columns or None)
    return open_recipe(BatchRecipe(source, on_error="skip" if skip else "raise"), None)


def test_rows_of_any_kind(tmp_path: Path, arrow: Any) -> None:
    columns = {
        "int": arrow.array([1, 2, 3, 4], arrow.int32()),
        "half": arrow.array([1.5, 2.5, 3.5, 4.5], arrow.float16()),
        "bool": [True, False, True, False],
        "text": ["a", "ä", "", "d"],
        "word": arrow.array(["u", "v", "u", "v"]).dictionary_encode(),
        "raw": [b"1", b"2", b"3", b"4"],
        "list": [[1, 2], [3, 4], [5, 6], [7, 8]],
        "fixed": arrow.array([[1.0], [2.0], [3.0], [4.0]], arrow.list_(arrow.float32(), 1)),
    }
    write(tmp_path / "a.parquet", arrow, columns)
    records = opened(tmp_path / "a.parquet")
    assert records.num_samples == 4
    expected = {
        "int": torch.tensor([4, 2], dtype=torch.int32),
        "half": torch.tensor([4.5, 2.5], dtype=torch.float16),
        "bool": torch.tensor([False, False]),
        "text": ["d", "ä"],
        "word": ["v", "v"],
        "raw": [b"4", b"2"],
        "list": torch.tensor([[7, 8], [3, 4]]),
        "fixed": torch.tensor([[4.0], [2.0]]),
    }
    assert same(read(records, 3, 1).content, expected)
    chosen = read(opened(tmp_path / "a.parquet", "raw", "int"), 0).content
    assert same(chosen, {"raw": [b"1"], "int": torch.tensor([1], dtype=torch.int32)})
    records.close()


def test_rows_of_many_groups_and_files_though_few_are_kept(
    tmp_path: Path, arrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.sources.parquet._MOST_DECODED_BYTES", 50)
    for name, numbers in (("b", range(10, 20)), ("a", range(10))):
        write(tmp_path / f"{name}.parquet", arrow, {"x": list(numbers)})
    records = opened(tmp_path / "*.parquet")
    order = [7 * step % 20 for step in range(20)]
    assert read(records, *order).content["x"].tolist() == order
    assert len({records.fingerprint(), opened(tmp_path / "a.parquet").fingerprint()}) == 2


@pytest.mark.parametrize(
    ("kept_bytes", "rows", "num_decoded"),
    [
        (1000, (0, 3, 6, 9, 0, 3, 6, 9), 4),
        (50, (0, 3, 0, 6, 0), 3),  # of two that fit, the one used last stays
        (50, (0, 3, 6, 0), 4),
        (0, (0, 1, 2, 3, 4), 2),  # one is kept however large it is
    ],
)
def test_the_groups_used_last_are_kept(
    tmp_path: Path,
    arrow: Any,
    monkeypatch: pytest.MonkeyPatch,
    kept_bytes: int,
    rows: tuple[int, ...],
    num_decoded: int,
) -> None:
    import pyarrow.parquet as parquet

    decoded: list[int] = []
    read_row_group = parquet.ParquetFile.read_row_group

    def counted(file: Any, number: int, **options: Any) -> Any:
        decoded.append(number)
        return read_row_group(file, number, **options)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    monkeypatch.setattr("paceline.data.sources.parquet._MOST_DECODED_BYTES", kept_bytes)
    write(tmp_path / "a.parquet", arrow, {"x": list(range(12))})
    records = opened(tmp_path / "a.parquet")
    assert [read(records, row).content["x"].item() for row in rows] == [*rows]
    assert len(decoded) == num_decoded


def test_a_missing_value_is_a_fault_of_its_row(tmp_path: Path, arrow: Any) -> None:
    columns = {
        "x": arrow.array([1, None, 3, 4, 5], arrow.int16()),
        "y": ["a", "b", None, "d", "e"],
        "z": [[1], [2], [3], [None], None],
    }
    write(tmp_path / "a.parquet", arrow, columns)
    batch = read(opened(tmp_path / "a.parquet", skip=True), 0, 1, 2, 3, 4)
    assert (batch.content["x"].tolist(), batch.content["x"].dtype, batch.num_skipped) == ([1], torch.int16, 4)
    for row, why in (
        (1, r"row 1 of row group 0 of .*column x has no value"),
        (2, "column y has no value"),
        (4, "column z has no value"),
        (3, r"row 0 of row group 1 .*the list in column z has a value missing"),
    ):
        with pytest.raises(RecordError, match=why):
            read(opened(tmp_path / "a.parquet"), row)


def damage(path: Path, arrow: Any, **options: Any) -> None:
    """Three row groups, of which the second one's page is damaged."""
    import pyarrow.parquet as parquet

    texts = [f"{number:02}" * 50 for number in range(9)]
    parquet.write_table(arrow.table({"x": texts}), path, row_group_size=3, use_dictionary=False, **options)
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    whole, at = path.read_bytes(), column.data_page_offset + column.total_compressed_size - 40
    path.write_bytes(whole[:at] + bytes(byte ^ 0x5A for byte in whole[at : at + 30]) + whole[at + 30 :])


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"compression": "none", "write_page_checksum": True}])
def test_a_damaged_page_is_a_fault_of_its_rows(
    tmp_path: Path, arrow: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    import pyarrow.parquet as parquet

    damage(tmp_path / "a.parquet", arrow, **options)
    with pytest.raises(
        RecordError, match=r"row 1 of row group 1 of .*a.parquet .* the whole row group cannot be decoded"
    ):
        read(opened(tmp_path / "a.parquet"), 4)
    records, num_read = opened(tmp_path / "a.parquet", skip=True), [0]
    read_row_group = parquet.ParquetFile.read_row_group

    def counted(file: Any, number: int, **options: Any) -> Any:
        num_read[0] += 1
        return read_row_group(file, number, **options)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    batch = read(records, *range(9))
    assert [text[:2] for text in batch.content["x"]] == ["00", "01", "02", "06", "07", "08"]
    assert (batch.num_skipped, num_read) == (3, [3])


def test_what_is_kept_is_counted_as_it_is_held(tmp_path: Path, arrow: Any) -> None:
    number = range(20_000)
    columns = {
        "text": [str(i) for i in number],
        "flag": [i % 2 == 0 for i in number],
        "list": [[i, i] for i in number],
        "gap": arrow.array([None if i % 2 else i for i in number], arrow.int64()),
    }
    write(tmp_path / "a.parquet", arrow, columns, 20_000)
    first = open_source(sources.parquet(tmp_path / "a.parquet"), None)
    first.record(0)  # what a first read imports does not count
    first.close()
    del first
    before = arrow.total_allocated_bytes()
    records = open_source(sources.parquet(tmp_path / "a.parquet"), None)
    tracemalloc.start()
    try:
        records.record(1000)
        held = tracemalloc.get_traced_memory()[0] + arrow.total_allocated_bytes() - before
    finally:
        tracemalloc.stop()
    assert isinstance(records, TableRows)
    [group] = records._kept.values()
    assert 0.8 < group.size_bytes / held < 1.25
    records.close()


def test_files_that_do_not_fit(tmp_path: Path, arrow: Any) -> None:
    write(tmp_path / "a.parquet", arrow, {"x": [1], "when": arrow.array([0], arrow.timestamp("s"))})
    write(tmp_path / "b.parquet", arrow, {"x": [1.5]})
    write(tmp_path / "c.parquet", arrow, {"y": [1]})
    write(tmp_path / "a2.parquet", arrow, {"x": [1]})
    write(tmp_path / "b2.parquet", arrow, {"z": [1], "x": [2]})
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    for name, columns, why in (
        ("[ab]", ["x"], "column x of .*b.parquet is double, and int64"),
        ("[ac]", ["x"], "c.parquet has 0 columns x, expected one: it has y"),
        ("[ab]2", [], "b2.parquet has the columns z, which the files before it do not have: name the columns"),
        ("a", [], "column when of .* is timestamp.*name the other columns"),
        ("d", ["x"], "cannot be read as a Parquet file|cannot be read"),
    ):
        with pytest.raises(DataError, match=why):
            opened(tmp_path / f"{name}.parquet", *columns)


def test_a_file_that_changes(tmp_path: Path, arrow: Any) -> None:
    write(tmp_path / "a.parquet", arrow, {"x": [1, 2]})
    write(tmp_path / "b.parquet", arrow, {"x": [3]})
    records = opened(tmp_path / "[ab].parquet")
    write(tmp_path / "a.parquet", arrow, {"x": list(range(100))})
    assert read(records, 2).content["x"].tolist() == [3], "only what is read is looked at"
    with pytest.raises(DataError, match=r"a\.parquet has .* when it was opened"):
        read(records, 0)


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[data\]'"):
        opened(tmp_path / "a.parquet")

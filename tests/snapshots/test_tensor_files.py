"""Files of safetensors from anywhere: what their headers say is checked before torch hears of it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import torch

from paceline.errors import CheckpointError
from paceline.snapshots.tensor_files import TensorFile

INVERSE_OF_7 = 0x6DB6DB6DB6DB6DB7  # 7 times it is 1 in 64 bits


def file_of(path: Path, header: object, data: bytes = bytes(8)) -> Path:
    """Write a file with this header, which is encoded unless it is bytes."""
    text = header if isinstance(header, bytes) else msgspec.json.encode(header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: object, start: object = 0, stop: object = 8, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_what_lies_in_the_file_is_read(tmp_path: Path) -> None:
    file = TensorFile(file_of(tmp_path / "a", {"w": entry([2]), "none": entry([0, 3], 8), "__metadata__": 3}))
    assert file.names == ["w", "none"]
    assert torch.equal(file.tensor("w"), torch.zeros(2))
    assert file.tensor("none").shape == (0, 3)


ENTRIES = (
    entry([3]),
    entry([1 << 70]),
    entry([7, INVERSE_OF_7], 0, 4),
    entry([1 << 62, 4], 0, 0),
    entry([-1, -1], 0, 4),
    entry([-1, 0], 0, 0),
    entry([2.0]),
    entry("2"),
    entry(None),
    entry([2], -8, 0),
    entry([2], 1, 9),
    entry([2], 8, 0),
    entry([2], 1 << 70, (1 << 70) + 8),
    entry([2], 0.0, 8.0),
    entry([2], "a", "b"),
    entry([2], dtype="F128"),
    entry([2], dtype=["F32"]),
    {"dtype": "F32", "shape": [2]},
    {"dtype": "F32", "shape": [2], "data_offsets": [0]},
    [],
    "w",
    None,
)


@pytest.mark.parametrize("told", ENTRIES, ids=range(len(ENTRIES)))
def test_an_entry_that_does_not_fit_is_refused(tmp_path: Path, told: object) -> None:
    file = TensorFile(file_of(tmp_path / "a", {"w": told}))
    with pytest.raises(CheckpointError, match="no tensor 'w' that can be read"):
        file.tensor("w")


HEADERS = (b"", b"{", b"[]", b"\xff", b'{"w":' * 100_000, b"null")


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorFile(file_of(tmp_path / "a", header))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = file_of(tmp_path / "a", {"w": entry([2])}).read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cannot be read|not a safetensors file|no tensor 'w'"):
            TensorFile(tmp_path / "cut").tensor("w")


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorFile(tmp_path / "pipe")

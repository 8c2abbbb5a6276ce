"""Export of row tables: all columns in one file, in the safetensors format, which many programs read.

The file has a tensor "ids" and one for each column; its metadata name the table. Each tensor has a checksum, so that a
damaged file is refused before any of it is used.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import ProtocolBug, UsageError
from paceline.update.dtypes import SAFETENSORS_NAMES, dtype_name
from paceline.update.rows.layout import IDS, RowLayout, RowPiece, layouts, use_columns

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rows.rules import RowRule
    from paceline.update.rows.spec import RowTableSpec

FORMAT: Final = "paceline rows 1"
_CHUNK_ROWS: Final = 1 << 16
_CHUNK_BYTES: Final = 1 << 26  # servers take pieces of that size, and of fewer rows than these whatever their width
_LEAST_ROWS: Final = 64


class _Tensor(Protocol):
    """A tensor of an open file, which is read in parts."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, rows: slice) -> Tensor: ...


class _File(Protocol):
    """An open safetensors file."""

    def metadata(self) -> dict[str, str] | None: ...
    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Tensor: ...


def save_rows(path: Path, spec: RowTableSpec, rule: RowRule, pieces: Iterable[RowPiece], num_rows: int) -> None:
    """Write all pieces to one file, which appears once complete; only one piece is in memory at a time.

    Args:
        path: of the file; an existing file is replaced, and nothing else: a device would be gone for all programs.
        spec: of the table.
        rule: of the table.
        pieces: with all columns of the table, from one server or several.
        num_rows: of all pieces together.

    Raises:
        UsageError: the file cannot be written, or what is there is no file.
        ProtocolBug: the pieces have another number of rows, or other columns.
    """
    if _is_other_than_a_file(path):
        raise UsageError(
            f"Rows of '{spec.name}' cannot be written to {path}: that is there, and is not a file to replace."
        )
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("wb") as file:
            _write(file, spec, layouts(spec, rule), pieces, num_rows)
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise UsageError(f"Rows of '{spec.name}' cannot be written to {path}: {error.strerror}.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _is_other_than_a_file(path: Path) -> bool:
    try:
        return path.exists() and not path.is_file()
    except OSError:  # no such path can be: to write there says why
        return False


def load_rows(path: Path, spec: RowTableSpec, rule: RowRule) -> Iterator[RowPiece]:
    """Validate a file, and return its rows piece by piece.

    Columns of uses may be missing, and are left out if this table does not keep them.

    Raises:
        UsageError: it is not a file of rows, is damaged, or is of a table with other rows or another rule.
    """
    wanted, optional = layouts(spec, rule), use_columns(spec.life)
    try:
        with safe_open(path, framework="pt") as file:
            names = _checked(path, file, spec, wanted, optional)
            num_rows: int = file.get_slice(IDS).get_shape()[0]
            row_bytes = sum(layout.row_bytes for layout in wanted.values())
            step = min(_CHUNK_ROWS, max(_LEAST_ROWS, _CHUNK_BYTES // row_bytes))
            for start in range(0, num_rows, step):
                columns = {name: file.get_slice(name)[start : start + step] for name in names}
                yield RowPiece(columns.pop(IDS), columns)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not a whole file of rows: {error}. Take the one that was saved.") from error


def _write(
    file: BinaryIO, spec: RowTableSpec, columns: Mapping[str, RowLayout], pieces: Iterable[RowPiece], num_rows: int
) -> None:
    checks = dict.fromkeys(columns, 0)
    header = _header(spec, columns, num_rows, checks)
    starts, end = dict[str, int](), len(header)
    for name, layout in columns.items():
        starts[name], end = end, end + num_rows * layout.row_bytes
    num_written = 0
    for piece in pieces:
        piece.require(columns, optional=())
        for name, layout in columns.items():
            data = _bytes(piece.ids if name == IDS else piece.columns[name])
            checks[name] = zlib.crc32(data, checks[name])
            file.seek(starts[name] + num_written * layout.row_bytes)
            file.write(data)
        num_written += len(piece.ids)
        if num_written > num_rows:
            break
    if num_written != num_rows:
        raise ProtocolBug(f"row table '{spec.name}': {num_written} rows came to be saved, expected {num_rows}")
    file.truncate(end)
    file.seek(0)
    file.write(_header(spec, columns, num_rows, checks))


def _header(spec: RowTableSpec, columns: Mapping[str, RowLayout], num_rows: int, checks: Mapping[str, int]) -> bytes:
    """Return the header of a safetensors file; its length does not depend on the checksums."""
    metadata = {
        "format": FORMAT,
        "table": spec.name,
        "width": str(spec.width),
        "dtype": spec.dtype,
        "rule": spec.rule.name,
        **{f"crc32.{name}": f"{check:08x}" for name, check in checks.items()},
    }
    entries: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, layout in columns.items():
        start, end = end, end + num_rows * layout.row_bytes
        shape = [num_rows] if name == IDS else [num_rows, layout.width]
        dtype = SAFETENSORS_NAMES[dtype_name(layout.dtype)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _checked(
    path: Path, file: _File, spec: RowTableSpec, wanted: Mapping[str, RowLayout], optional: tuple[str, ...]
) -> list[str]:
    """Return the names of the tensors to load; raises UsageError for an invalid file."""
    metadata = file.metadata() or {}
    ours = {"format": FORMAT, "table": spec.name, "width": str(spec.width), "dtype": spec.dtype, "rule": spec.rule.name}
    for key, expected in ours.items():
        if metadata.get(key) != expected:
            raise UsageError(
                f"{path} has {key} '{metadata.get(key, '')}', but this is the row table '{spec.name}' and needs "
                f"'{expected}'. Load the file that was saved from it."
            )
    there = set(file.keys())
    num_rows = file.get_slice(IDS).get_shape()[0] if IDS in there else 0
    for name, layout in wanted.items():
        if name not in there and name in optional:
            continue
        shape = [num_rows] if name == IDS else [num_rows, layout.width]
        got = file.get_slice(name) if name in there else None
        if got is None or got.get_shape() != shape or got.get_dtype() != SAFETENSORS_NAMES[dtype_name(layout.dtype)]:
            raise UsageError(f"{path} has no {name} of shape {shape}: it was saved from a table with other columns.")
        if _checksum(got, num_rows) != metadata.get(f"crc32.{name}"):
            raise UsageError(f"{path} is damaged: the checksum of {name} is wrong. Take another copy of it.")
    return [name for name in wanted if name in there]


def _checksum(tensor: _Tensor, num_rows: int) -> str:
    check = 0
    for start in range(0, num_rows, _CHUNK_ROWS):
        check = zlib.crc32(_bytes(tensor[start : start + _CHUNK_ROWS]), check)
    return f"{check:08x}"


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data

"""Samples of numpy arrays and tensors, memory-mapped and gathered straight into a batch."""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from lzma import LZMAError
from typing import IO, Any, Final
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor

from paceline.data.sources.batch import DTYPES, MAX_DIMENSIONS, Column, TensorColumn, tensor_over
from paceline.data.sources.declared import ArrayFile, Arrays, Tensors
from paceline.data.sources.input_files import FixedFiles, reading
from paceline.errors import DataError

_LOCAL_HEADER_BYTES: Final = 30
# Errors of zipfile and numpy for files without a readable array of numbers; RuntimeError for encrypted ones.
_NO_ARRAY: Final = (
    *(ValueError, EOFError, BadZipFile, RuntimeError, OverflowError, MemoryError),
    *(struct.error, zlib.error, LZMAError),
)
_HEADERS: Final[dict[tuple[int, int], Callable[[IO[bytes]], tuple[tuple[int, ...], bool, np.dtype[Any]]]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Columns:
    """Tensors whose first dimension counts the samples.

    Args:
        titles: a description of each column, for messages.
        tensors: the columns; they are only read.
        names: keys of the dict that a record is; without them a record is a tuple, or the tensor of a single column.
        files: the files of the columns.

    Raises:
        DataError: a column is a scalar, or has another number of samples than the others.
    """

    def __init__(
        self, titles: Sequence[str], tensors: Sequence[Tensor], names: Sequence[str] | None, files: FixedFiles
    ) -> None:
        _check_columns(titles, tensors)
        self._titles = titles
        self._tensors = list(tensors)
        self._names = names
        self._files = files
        self._num_samples = len(tensors[0])

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self._num_samples

    def gather(self, indices: Sequence[int]) -> Column:
        """Return the columns of a batch."""
        places = torch.tensor(indices)
        parts: list[Column] = [
            TensorColumn(tensor.dtype, (len(indices), *tensor.shape[1:]), partial(_select, tensor, places))
            for tensor in self._tensors
        ]
        if self._names is not None:
            return dict(zip(self._names, parts, strict=True))
        return parts if len(parts) > 1 else parts[0]

    def record(self, index: int) -> object:
        """Return copies of one sample of each column."""
        values = [tensor[index].clone() for tensor in self._tensors]
        if self._names is not None:
            return dict(zip(self._names, values, strict=True))
        return tuple(values) if len(values) > 1 else values[0]

    def name(self, index: int) -> str:
        """Return the name of a record."""
        return f"sample {index} of {', '.join(self._titles)}"

    def check(self) -> None:
        """Raise DataError if a file has changed."""
        self._files.check()

    def describe(self) -> object:
        """Return names, sizes, shapes and types."""
        shapes = [(title, tuple(t.shape), str(t.dtype)) for title, t in zip(self._titles, self._tensors, strict=True)]
        return [self._files.describe(), shapes]

    def close(self) -> None:
        """Release the mapped files."""
        self._tensors.clear()


def _select(tensor: Tensor, places: Tensor, out: Tensor) -> None:
    torch.index_select(tensor, 0, places, out=out)


def _check_columns(titles: Sequence[str], tensors: Sequence[Tensor]) -> None:
    for title, tensor in zip(titles, tensors, strict=True):
        if not 0 < tensor.dim() < MAX_DIMENSIONS or tensor.dtype not in DTYPES.values():
            raise DataError(
                f"{title} has shape {tuple(tensor.shape)} and {tensor.dtype}, expected numbers of which the first "
                "dimension counts the samples."
            )
    if len({len(tensor) for tensor in tensors}) > 1:
        sizes = ", ".join(f"{title} {len(tensor)}" for title, tensor in zip(titles, tensors, strict=True))
        raise DataError(f"arrays have different numbers of samples, expected the same in all: {sizes}.")


# -- arrays of numpy -------------------------------------------------------------------------------------------------


def open_arrays(source: Arrays) -> Columns:
    """Map arrays; raises DataError if one is missing, damaged, or not an array of numbers."""
    paths = list(dict.fromkeys(file.path for file in source.arrays))
    files = FixedFiles(paths)
    arrays = [_array(file) for file in source.arrays]
    titles = [_title(file) for file in source.arrays]
    tensors = [_from_numpy(array, title) for array, title in zip(arrays, titles, strict=True)]
    return Columns(titles, tensors, source.names, files)


def _title(file: ArrayFile) -> str:
    return file.path if file.member is None else f"{file.member} of {file.path}"


def _array(file: ArrayFile) -> np.ndarray[Any, Any]:
    try:
        with reading(file.path), open(file.path, "rb") as raw:
            if file.member is None:
                return _whole_file(file.path, raw)
            with ZipFile(raw) as archive:
                return _member(archive, file.member, raw)
    except _NO_ARRAY as error:
        kind = "a .npy file" if file.member is None else "an .npz file"
        raise DataError(
            f"{_title(file)} cannot be read as {kind} of numbers: {error}. Arrays of objects are not taken, as reading "
            "them runs what is in the file; was the file written to its end, by numpy.save or numpy.savez?"
        ) from error


def _whole_file(path: str, raw: IO[bytes]) -> np.ndarray[Any, Any]:
    header = _header(raw)
    if header is None:
        return np.lib.format.open_memmap(path, mode="r")
    return _mapped(raw, os.fstat(raw.fileno()).st_size, *header)


def _header(raw: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]] | None:
    """Read the header of an array; None for versions that only numpy reads."""
    version = np.lib.format.read_magic(raw)
    return _HEADERS[version](raw) if version in _HEADERS else None


def _member(archive: ZipFile, name: str, raw: IO[bytes]) -> np.ndarray[Any, Any]:
    """Return an array of an .npz file: mapped if it is stored uncompressed, else read."""
    known = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if name not in known:
        raise ValueError(f"it has no array {name}, only {', '.join(sorted(known)) or 'none'}")
    if known[name].compress_type == ZIP_STORED:
        start = _start(known[name], raw)
        raw.seek(start)
        header = _header(raw)
        if header is not None:
            return _mapped(raw, start + known[name].file_size, *header)
    with archive.open(known[name]) as member:
        header = _header(member)
        if header is not None:  # before memory is allocated
            _require_size(known[name].file_size - member.tell(), header[0], header[2])
    with archive.open(known[name]) as member:
        return np.lib.format.read_array(member)


def _start(info: ZipInfo, raw: IO[bytes]) -> int:
    """Return the start of a member's content, after its local header, which may be longer than the central one."""
    raw.seek(info.header_offset)
    header = raw.read(_LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, _LOCAL_HEADER_BYTES - 4)
    return info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes


def _mapped(
    raw: IO[bytes], end: int, shape: tuple[int, ...], is_fortran: bool, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    offset = raw.tell()
    _require_size(end - offset, shape, dtype)
    return np.memmap(raw, dtype=dtype, mode="r", offset=offset, shape=shape, order="F" if is_fortran else "C")


def _require_size(size_bytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise ValueError unless an array of this size can have this shape and type."""
    if dtype.hasobject:
        raise ValueError("it is an array of objects")
    if min(shape, default=0) < 0 or size_bytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"it has {size_bytes} bytes, which are not an array of shape {shape} and {dtype}")


def _from_numpy(array: np.ndarray[Any, Any], title: str) -> Tensor:
    if array.dtype.name not in DTYPES or not array.dtype.isnative:
        raise DataError(f"{title} is an array of {array.dtype}, expected numbers that torch has, in native byte order.")
    return tensor_over(array)


# -- safetensors -----------------------------------------------------------------------------------------------------


def open_tensors(source: Tensors) -> Columns:
    """Map tensors; raises DataError if the file is missing or damaged, or lacks one."""
    from safetensors import SafetensorError, safe_open

    files = FixedFiles([source.path])
    try:
        with reading(source.path), safe_open(source.path, framework="pt") as opened:
            known = set(opened.keys())
            missing = [name for name in source.names if name not in known]
            if missing:
                raise DataError(
                    f"{source.path} has no tensor {', '.join(missing)}, only {', '.join(sorted(known)) or 'none'}."
                )
            tensors = [opened.get_tensor(name) for name in source.names]
    except SafetensorError as error:
        raise DataError(f"{source.path} is not a complete safetensors file: {error}. Write it again.") from error
    return Columns([f"{name} of {source.path}" for name in source.names], tensors, None, files)

"""Encodings of the numbers of rows: unchanged, as shorter floats, or as bytes with a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from paceline.update.filters.check import CODECS
from paceline.update.rows.spec import FilterSpec

_SCALE_BYTES = 4  # a float32 at the start of each row
_STEPS = 127  # int8 goes from -127 to 127, so that 0 is in the middle


class RowEncoding(Protocol):
    """Turns rows into bytes and back. NaN and infinity stay what they are, or become NaN for their whole row."""

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Return how many bytes a row of `width` numbers takes on the way."""
        ...

    def encode(self, rows: Tensor) -> Tensor:
        """Return `rows` [n, width] as uint8 [n, row_bytes]; it may share their memory."""
        ...

    def decode(self, data: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the rows [n, width] of uint8 `data` [n, row_bytes]; they may share its memory."""
        ...


@final
class Plain:
    """Numbers travel as they are."""

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Return how many bytes a row of `width` numbers takes on the way."""
        return width * dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        """Return the bytes of `rows`, in their memory if it is contiguous."""
        return _bytes_of(rows)

    def decode(self, data: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the rows, in the memory of `data` if it is aligned."""
        is_aligned = not (data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize)
        if is_aligned and _is_packed(data):
            return data.view(dtype)
        return _numbers(data, dtype).view(len(data), width)


@final
class Cast:
    """Numbers travel as shorter floats; finite ones saturate at the ends of the range and never become infinite."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._most = torch.finfo(dtype).max

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Return how many bytes a row of `width` numbers takes on the way."""
        return width * self._dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        """Return the bytes of `rows`, rounded to nearest."""
        short = rows.to(self._dtype)
        overflowed = short.isinf() & rows.isfinite()
        if overflowed.any():
            short = torch.where(overflowed, rows.sign().to(self._dtype) * self._most, short)
        return _bytes_of(short)

    def decode(self, data: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the rows as `dtype`, where that can hold them; it saturates like `encode`."""
        short = _numbers(data, self._dtype).view(len(data), width)
        wide = short.to(dtype)
        overflowed = wide.isinf() & short.isfinite()
        return torch.where(overflowed, short.sign().to(dtype) * torch.finfo(dtype).max, wide)


@final
class Int8:
    """Numbers travel as whole multiples, -127 to 127, of a float32 that each row has for itself."""

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Return how many bytes a row of `width` numbers takes on the way."""
        return _SCALE_BYTES + width

    def encode(self, rows: Tensor) -> Tensor:
        """Return scale and multiples of each row; a row with NaN or infinity gets NaN as its scale."""
        exact = rows if rows.dtype == torch.float64 else rows.float()
        scale = (exact.abs().amax(dim=1, keepdim=True) / _STEPS).clamp_(max=torch.finfo(torch.float32).max).float()
        scale.masked_fill_(~exact.isfinite().all(dim=1, keepdim=True), torch.nan)
        steps = (exact / scale).round_().clamp_(-_STEPS, _STEPS).nan_to_num_(0.0)
        return torch.cat((_bytes_of(scale), steps.to(torch.int8).view(torch.uint8)), dim=1)

    def decode(self, data: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the rows as `dtype`, computed in float32, or float64 where that is what they are."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        scale = _numbers(data[:, :_SCALE_BYTES], torch.float32).view(len(data), 1).to(exact)
        most = torch.finfo(dtype).max
        rows = data[:, _SCALE_BYTES:].contiguous().view(torch.int8).to(exact).mul_(scale)
        return rows.clamp_(-most, most).to(dtype)


def codec_of(filters: Sequence[FilterSpec], direction: Literal["push", "pull"]) -> RowEncoding:
    """Return the encoding of numbers in one direction, by valid filters."""
    name = next((spec.name for spec in filters if spec.name in CODECS and spec.numbers[direction]), "")
    match name:
        case "bfloat16":
            return Cast(torch.bfloat16)
        case "float16":
            return Cast(torch.float16)
        case "int8":
            return Int8()
        case _:
            return Plain()


def _bytes_of(rows: Tensor) -> Tensor:
    if _is_packed(rows):
        return rows.view(torch.uint8)
    return rows.reshape(-1).view(torch.uint8).view(len(rows), rows.shape[1] * rows.element_size())


def _is_packed(rows: Tensor) -> bool:
    """Return whether rows lie one after the other by their strides, those of a single row or number included."""
    return rows.stride() == (rows.shape[1], 1)


def _numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers, (n,); a copy if they are not aligned."""
    flat = data.view(-1) if data.is_contiguous() else data.reshape(-1)
    if flat.storage_offset() % dtype.itemsize or flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)

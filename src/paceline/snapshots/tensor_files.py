"""Files of safetensors: their headers, and how they are read by mapping them."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import msgspec
import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.job.folders import open_file
from paceline.update.dtypes import SAFETENSORS_NAMES, torch_dtype

_MAX_HEADER_BYTES: Final = 100_000_000  # as safetensors itself allows
_DTYPES: Final = {theirs: torch_dtype(name) for name, theirs in SAFETENSORS_NAMES.items()}


def dtype_of(name: str) -> torch.dtype:
    """Return a dtype by its name in torch; raises CheckpointError for one that no file has."""
    if name not in SAFETENSORS_NAMES:
        raise CheckpointError(f"a tensor of dtype '{name[:40]}' cannot be in a snapshot")
    return torch_dtype(name)


def header_of(tensors: Sequence[tuple[str, str, Sequence[int]]], about: Mapping[str, str]) -> bytes:
    """Return the header of a file whose tensors, of (name, dtype, shape), lie one after the other behind it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + torch.Size(shape).numel() * dtype_of(dtype).itemsize
        entries[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@final
class TensorFile:
    """A file of safetensors, mapped: what is read of it takes no memory of its own.

    Raises:
        CheckpointError: it cannot be read, or is none.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                self._start = 8 + int.from_bytes(file.read(8), "little")
                if not 8 <= self._start <= min(size, _MAX_HEADER_BYTES):
                    raise CheckpointError(f"{path} is not a safetensors file: its header does not fit")
                header = msgspec.json.decode(file.read(self._start - 8), type=dict[str, Any])
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        about = header.pop("__metadata__", {})
        self.about: Final[dict[str, str]] = about if isinstance(about, dict) else {}
        self._entries = header

    @property
    def names(self) -> list[str]:
        """The names of its tensors."""
        return list(self._entries)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, whose pages are read as they are used; raises CheckpointError if it is not there."""
        try:
            entry = self._entries[name]
            dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], torch.Size(entry["shape"]), entry["data_offsets"]
            if (
                stop - start != math.prod(shape) * dtype.itemsize
                or not 0 <= start <= stop <= len(self._map) - self._start
            ):
                raise ValueError("it lies outside of the file")
            if start == stop:
                return torch.empty(shape, dtype=dtype)
            return (
                torch.frombuffer(self._map, dtype=torch.uint8, count=stop - start, offset=self._start + start)
                .view(dtype)
                .view(shape)
            )
        except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"{self.path} has no tensor '{name}' that can be read: {error}") from error

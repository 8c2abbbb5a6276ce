"""The tensors of a version, from the bytes that each server holds of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from paceline.errors import PeerError
from paceline.update.dtypes import dtype_name
from paceline.update.table import counts_in_torch
from paceline.versions.link import LeasedPart, PartMemory
from paceline.wire.deltas import WordBytes
from paceline.wire.versions import PublishedTensor, VersionLayout, decode_layout, whole_digest

_DTYPES: Final = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


def shared_layout(parts: Sequence[LeasedPart]) -> VersionLayout:
    """Return the layout of a version; raises PeerError if the servers have several, or it is malformed."""
    if len({bytes(part.layout) for part in parts}) != 1:
        raise PeerError(f"servers have several layouts of version {parts[0].head.id.number}")
    return decode_layout(parts[0].layout)


def digest_of_version(parts: Sequence[LeasedPart]) -> str:
    """Return the digest of a version from those of its parts, by rank of the server."""
    return whole_digest([part.head.digest for part in parts])


def word_bytes_of(layout: VersionLayout) -> dict[str, WordBytes]:
    """Return the bytes of an element by table."""
    found = {each.table: _DTYPES[each.dtype].itemsize for each in layout.tensors if each.dtype in _DTYPES}
    return {table: size for table, size in found.items() if size in (1, 2, 4, 8)}


def tensors_of(layout: VersionLayout, parts: Sequence[LeasedPart], memories: Sequence[PartMemory]) -> dict[str, Tensor]:
    """Return the tensors of a version by name: views of the servers' memory, or of what came from there.

    A tensor whose elements lie on two servers is copied. Raises PeerError for a layout that does not fit the bytes.
    """
    runs: dict[str, list[tuple[int, memoryview]]] = {}
    for part, memory in zip(parts, memories, strict=True):
        for index, published in enumerate(part.head.parts):
            if published.size_bytes:
                runs.setdefault(published.table, []).append((published.start, memory.memories[index]))
    return {tensor.name: _tensor(tensor, runs, layout) for tensor in layout.tensors}


def _tensor(of: PublishedTensor, runs: dict[str, list[tuple[int, memoryview]]], layout: VersionLayout) -> Tensor:
    dtype = _DTYPES.get(of.dtype)
    if dtype is None:
        raise PeerError(f"'{of.name[:200]}' of a version has the dtype '{of.dtype[:50]}', which is not known here")
    numel = math.prod(of.shape)
    if not counts_in_torch(of.shape):
        raise PeerError(f"'{of.name[:200]}' of a version has the shape {of.shape[:8]}, which torch cannot have")
    if not numel:
        return torch.empty(of.shape, dtype=dtype)
    if not of.table:
        size_bytes = numel * dtype.itemsize
        if of.start + size_bytes > len(layout.rest):
            raise PeerError(f"'{of.name[:200]}' of a version lies beyond the {len(layout.rest)} bytes that came")
        own = bytearray(layout.rest[of.start : of.start + size_bytes])
        return torch.frombuffer(own, dtype=dtype).view(of.shape)
    pieces = list(_pieces(of, dtype, numel, runs.get(of.table, [])))
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return flat.view(of.shape)


def _pieces(of: PublishedTensor, dtype: torch.dtype, numel: int, held: list[tuple[int, memoryview]]) -> list[Tensor]:
    """Return the elements of a tensor in order, as views of the ranges that servers hold."""
    pieces, at, stop = list[Tensor](), of.start, of.start + numel
    for start, memory in sorted(held, key=lambda each: each[0]):
        end = start + memory.nbytes // dtype.itemsize
        if start <= at < min(end, stop):
            count = min(end, stop) - at
            offset = (at - start) * dtype.itemsize
            pieces.append(torch.frombuffer(memory, dtype=dtype, count=count, offset=offset))
            at += count
    if at != stop:
        raise PeerError(f"elements {at} to {stop} of '{of.name[:200]}' are on no server: its layout is another")
    return pieces

"""A batch: the request for it, its content, and its layout in memory, in which it travels from a data server.

In memory each tensor lies as it is, at a multiple of 64 bytes. A list of texts is the ends of the texts as int64,
followed by the texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from paceline.errors import PeerError, UsageError
from paceline.update.dtypes import dtype_name


class BatchRequest(msgspec.Struct, frozen=True):
    """A request for the samples with these indices, in this order, as transformed in this epoch."""

    epoch: int
    indices: tuple[int, ...]


class Batch(msgspec.Struct, frozen=True):
    """One batch of samples.

    Args:
        content: tensors, lists of str and lists of bytes, in lists and dicts as torch's `default_collate` makes them;
            None if all records were skipped.
        num_samples: number of samples; fewer than requested if records were skipped.
        num_skipped: number of records that could not be decoded.
    """

    content: Any
    num_samples: int
    num_skipped: int


def require_served(num_samples: int, size_bytes: int, max_bytes: int) -> None:
    """Raise UsageError for a batch larger than `max_bytes`."""
    if size_bytes > max_bytes:
        raise UsageError(
            f"a batch of {num_samples} samples has {size_bytes} bytes, at most {max_bytes} are served: choose a "
            "smaller batch size"
        )


class SkippedRecords(msgspec.Struct, frozen=True):
    """Number of records skipped so far, and the reasons for the first ones."""

    num_skipped: int
    reasons: tuple[str, ...]


class _Claimed:
    """An array that claims to be writable, for torch; its views keep it alive."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def tensor_over(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor over the memory of an array; one over a read-only array must not be written to.

    Torch warns of read-only memory, although it is not written to here.

    >>> array = np.arange(3)
    >>> array.flags.writeable = False
    >>> tensor_over(array)
    tensor([0, 1, 2])
    """
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Claimed(array)))


MAX_DIMENSIONS: Final = 32
MAX_DEPTH: Final = 32  # of lists and dicts in each other
_ALIGNMENT: Final = 64
_MAX_BYTES: Final = 1 << 48
_END_BYTES: Final = 8
DTYPES: Final = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}

TextKind: TypeAlias = Literal["str", "bytes"]


class TensorPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tensor"):
    """A tensor: contiguous elements from byte `offset` on."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    """A list of texts: their ends from byte `offset` on, then `size_bytes` of texts."""

    kind: TextKind
    num: int
    size_bytes: int
    offset: int


class ListPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="list"):
    """A list of parts."""

    items: tuple[Part, ...]


class DictPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="dict"):
    """Parts by name."""

    names: tuple[str, ...]
    items: tuple[Part, ...]


Part: TypeAlias = TensorPart | TextPart | ListPart | DictPart


class BatchLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layout of a batch in `size_bytes` of memory; travels as plain data."""

    content: Part | None
    num_samples: int
    num_skipped: int
    size_bytes: int


# -- writing ---------------------------------------------------------------------------------------------------------


class TensorColumn(msgspec.Struct, frozen=True):
    """One value of each sample, as a tensor; `write` writes it into a tensor of this shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    write: Callable[[Tensor], object]


class TextColumn(msgspec.Struct, frozen=True):
    """One text of each sample, encoded."""

    kind: TextKind
    texts: list[bytes]


Column: TypeAlias = "TensorColumn | TextColumn | list[Column] | dict[str, Column]"


class PreparedBatch:
    """A batch that is about to be written.

    Attributes:
        layout: its layout in memory.
    """

    def __init__(self, content: Column | None, num_samples: int, num_skipped: int) -> None:
        self._writes: list[tuple[TensorColumn | TextColumn, int]] = []
        self._end = 0
        part = None if content is None else self._place(content)
        self.layout = BatchLayout(part, num_samples, num_skipped, self._end)

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the batch takes."""
        return self.layout.size_bytes

    def fill(self, memory: memoryview) -> None:
        """Write the batch into the first `size_bytes` of this memory: flat, writable bytes.

        Raises:
            UsageError: the memory is too small.
        """
        if memory.nbytes < self.size_bytes:
            raise UsageError(f"a batch of {self.size_bytes} bytes does not fit into memory of {memory.nbytes} bytes.")
        if not self.size_bytes:
            return
        raw = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        for column, offset in self._writes:
            if isinstance(column, TensorColumn):
                if math.prod(column.shape):
                    column.write(_at(raw, offset, column.dtype, column.shape))
            else:
                _write_texts(raw, offset, column.texts)

    def _place(self, column: Column) -> Part:
        if isinstance(column, list):
            return ListPart(tuple(map(self._place, column)))
        if isinstance(column, dict):
            return DictPart(tuple(column), tuple(map(self._place, column.values())))
        offset = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self._writes.append((column, offset))
        if isinstance(column, TextColumn):
            part = TextPart(column.kind, len(column.texts), sum(map(len, column.texts)), offset)
        else:
            part = TensorPart(dtype_name(column.dtype), column.shape, offset)
        self._end = offset + _extent(part)
        return part


def _write_texts(raw: Tensor, offset: int, texts: list[bytes]) -> None:
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    data = b"".join((ends.tobytes(), *texts))
    raw.numpy()[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)


# -- reading ---------------------------------------------------------------------------------------------------------


def unpack(layout: BatchLayout, memory: memoryview) -> Batch:
    """Return the batch in this memory; its tensors are views of the memory, and keep it alive.

    The tensors of writable memory may be written to; writing to others ends the process.

    Raises:
        PeerError: the layout is not valid, or does not fit the memory.
    """
    _check(layout, memory.nbytes)
    if layout.content is None:
        return Batch(None, layout.num_samples, layout.num_skipped)
    raw = tensor_over(np.frombuffer(memory, dtype=np.uint8)) if memory.nbytes else torch.empty(0)
    return Batch(_read(layout.content, raw), layout.num_samples, layout.num_skipped)


def _read(part: Part, raw: Tensor) -> Any:  # noqa: ANN401 - whatever the records are
    match part:
        case ListPart():
            return [_read(item, raw) for item in part.items]
        case DictPart():
            return {name: _read(item, raw) for name, item in zip(part.names, part.items, strict=True)}
        case TensorPart():
            tensor = _at(raw, part.offset, DTYPES[part.dtype], part.shape)
            if part.dtype == "bool" and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
                raise PeerError("a batch has a bool that is neither 0 nor 1; is the peer of another version?")
            return tensor
        case TextPart():
            return _texts(part, raw)


def _texts(part: TextPart, raw: Tensor) -> list[str] | list[bytes]:
    first = part.offset + part.num * _END_BYTES
    ends = _at(raw, part.offset, torch.int64, (part.num,)).tolist()
    data = raw[first : first + part.size_bytes].numpy().tobytes() if part.size_bytes else b""
    starts = [0, *ends[:-1]]
    if any(start > end for start, end in zip(starts, ends, strict=True)) or ends[-1] != part.size_bytes:
        raise PeerError("the texts of a batch do not lie one after the other; is the peer of another version?")
    texts = [data[start:end] for start, end in zip(starts, ends, strict=True)]
    if part.kind == "bytes":
        return texts
    try:
        return [decode_text(text) for text in texts]
    except UnicodeDecodeError as error:
        raise PeerError(f"a text in a batch is not valid UTF-8: {error}") from error


def encode_text(text: str) -> bytes:
    """Return a text as bytes; any str is supported."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """Return the text that `encode_text` made these bytes of."""
    return data.decode("utf-8", "surrogatepass")


def _at(raw: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor at an offset of flat memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return raw[offset : offset + num_bytes].view(dtype).view(shape)


def _extent(part: TensorPart | TextPart) -> int:
    """Return the number of bytes of a part."""
    if isinstance(part, TextPart):
        return part.num * _END_BYTES + part.size_bytes
    return math.prod(part.shape) * DTYPES[part.dtype].itemsize


# -- validation ------------------------------------------------------------------------------------------------------


def _check(layout: BatchLayout, size_bytes: int) -> None:
    for problem in _problems(layout, size_bytes):
        raise PeerError(f"a batch cannot be read: {problem}. Is the peer of another version?")


def _problems(layout: BatchLayout, size_bytes: int) -> Iterator[str]:
    if layout.num_samples < 0 or layout.num_skipped < 0:
        yield f"it has {layout.num_samples} samples and skipped {layout.num_skipped}"
    if (layout.content is None) != (layout.num_samples == 0):
        yield f"it has {layout.num_samples} samples and {'no' if layout.content is None else 'some'} content"
    if not 0 <= layout.size_bytes <= size_bytes:
        yield f"it takes {layout.size_bytes} bytes, and came in {size_bytes}"
    if layout.content is None:
        return
    leaves: list[TensorPart | TextPart] = []
    yield from _shape_problems(layout.content, layout.num_samples, 0, leaves)
    end = 0
    for leaf in sorted((leaf for leaf in leaves if _extent(leaf)), key=lambda leaf: leaf.offset):
        if leaf.offset < end or leaf.offset % _ALIGNMENT:
            yield f"a part lies at {leaf.offset}, inside another one or unaligned"
        end = leaf.offset + _extent(leaf)
    if end > layout.size_bytes:
        yield f"its parts reach to {end}, and it takes {layout.size_bytes} bytes"


def _shape_problems(part: Part, num_samples: int, depth: int, leaves: list[TensorPart | TextPart]) -> Iterator[str]:
    """Yield the problems of a part by itself, and append its leaves."""
    if depth > MAX_DEPTH:
        yield f"its parts lie more than {MAX_DEPTH} deep in each other"
        return
    if isinstance(part, ListPart | DictPart):
        if isinstance(part, DictPart) and not len(part.names) == len(set(part.names)) == len(part.items):
            yield f"it has {len(part.names)} names for {len(part.items)} parts"
        yield from chain.from_iterable(_shape_problems(item, num_samples, depth + 1, leaves) for item in part.items)
        return
    if isinstance(part, TextPart):
        if part.num != num_samples or part.size_bytes < 0:
            yield f"it has {part.num} texts of {part.size_bytes} bytes for {num_samples} samples"
    elif part.dtype not in DTYPES:
        yield f"it has tensors of {part.dtype!r}"
    elif not _is_shape(part.shape, num_samples):
        yield f"it has a tensor of shape {part.shape} for {num_samples} samples"
    leaves.append(part)


def _is_shape(shape: tuple[int, ...], num_samples: int) -> bool:
    is_some = 0 < len(shape) <= MAX_DIMENSIONS and shape[0] == num_samples and min(shape) >= 0
    return is_some and math.prod(max(size, 1) for size in shape) < _MAX_BYTES

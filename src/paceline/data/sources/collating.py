"""Collation of records: the kind of each record, and the columns of records of one kind.

It does what torch's `default_collate` does for plain records: tensors and arrays are stacked, numbers become a tensor,
texts a list, and tuples, lists and dicts are collated item by item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from paceline.data.sources.batch import (
    DTYPES,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    Column,
    TensorColumn,
    TextColumn,
    encode_text,
    tensor_over,
)
from paceline.update.dtypes import dtype_name

_NUMBERS: Final = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}
_NUMBER_BYTES: Final = 8
_KNOWN: Final = "tensors, numpy arrays, numbers, bool, str, bytes, and tuples, lists and dicts of these"

# The structure that all records of a batch share: ("tensor", dtype, shape), ("int",), ("list", kinds...), ...
Kind: TypeAlias = tuple[Any, ...]
Leaf: TypeAlias = Tensor | np.generic | bool | int | float | bytes


class UnfitRecord(ValueError):
    """A record has a part that batches do not support."""


class FlatRecord(msgspec.Struct, frozen=True):
    """A record as its kind and the flat list of its values."""

    record: object
    kind: Kind
    leaves: list[Leaf]

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return sum(map(_num_bytes, self.leaves))


def flatten(record: object) -> FlatRecord:
    """Return a record as kind and values; raises UnfitRecord for parts that batches do not support."""
    leaves: list[Leaf] = []
    return FlatRecord(record, _take(record, leaves, 0), leaves)


def collate(records: Sequence[FlatRecord]) -> Column:
    """Return the columns of records of one kind."""
    leaves = zip(*(record.leaves for record in records), strict=True)
    return _ordered_as(records[0].record, _column(records[0].kind, leaves, len(records)))


def describe(kind: Kind) -> str:
    """Return a description of a kind for messages: "[tensor of float32 (64,), int]" for example."""
    match kind:
        case ("tensor", dtype, shape):
            return f"tensor of {dtype_name(dtype)} {shape}"
        case ("scalar", dtype):
            return dtype_name(dtype)
        case ("list", *items):
            return f"[{', '.join(map(describe, items))}]"
        case ("dict", names, *items):
            return f"{{{', '.join(f'{name}: {describe(item)}' for name, item in zip(names, items, strict=True))}}}"
        case _:
            return str(kind[0])


def _take(value: object, leaves: list[Leaf], depth: int) -> Kind:
    """Append the values in `value` to `leaves`, and return its kind."""
    if depth > MAX_DEPTH:
        raise UnfitRecord(f"it has more than {MAX_DEPTH} lists and dicts in each other")
    match value:
        case np.generic() if value.dtype.name in DTYPES:
            leaves.append(value)
            return ("scalar", DTYPES[value.dtype.name])
        case Tensor() | np.ndarray():
            tensor = _plain_tensor(value)
            leaves.append(tensor)
            return ("tensor", tensor.dtype, tuple(tensor.shape))
        case str():
            leaves.append(encode_text(value))
            return ("str",)
        case bytes():
            leaves.append(value)
            return ("bytes",)
        case bool() | int() | float():
            return _take_number(value, leaves)
        case list() | tuple():
            return ("list", *(_take(item, leaves, depth + 1) for item in value))
        case dict():
            return _take_dict(value, leaves, depth)
        case _:
            raise UnfitRecord(f"it has a {type(value).__name__} in it, expected {_KNOWN}")


def _take_number(value: float, leaves: list[Leaf]) -> Kind:
    leaves.append(value)
    if isinstance(value, bool):
        return ("bool",)
    if isinstance(value, float):
        return ("float",)
    if not -(1 << 63) <= value < 1 << 63:
        raise UnfitRecord(f"it has the number {value} in it, which no int64 can hold")
    return ("int",)


def _take_dict(value: dict[Any, Any], leaves: list[Leaf], depth: int) -> Kind:
    for name in value:
        if not isinstance(name, str):
            raise UnfitRecord(f"it has a dict with the key {name!r}, expected only str as keys")
        if not (name.isascii() or _is_text(name)):  # names of files need not be any
            raise UnfitRecord(f"it has a dict with the key {name!r}, which is not valid text")
    # By name: dicts that were filled in another order are of the same kind.
    names = tuple(sorted(value))
    return ("dict", names, *(_take(value[name], leaves, depth + 1) for name in names))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain_tensor(value: Tensor | np.ndarray[Any, Any]) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else _from_numpy(value)
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        raise UnfitRecord(
            f"it has a tensor of layout {tensor.layout} on {tensor.device}, expected a dense one in main memory"
        )
    if tensor.dtype not in DTYPES.values() or tensor.dim() >= MAX_DIMENSIONS:
        raise UnfitRecord(
            f"it has a tensor of {tensor.dtype} with {tensor.dim()} dimensions, which batches do not have"
        )
    return tensor


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.name not in DTYPES:
        raise UnfitRecord(f"it has an array of {array.dtype} in it, expected numbers that torch has")
    # Torch supports native byte order and no axis that runs backwards.
    return tensor_over(np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C"))


# -- columns ---------------------------------------------------------------------------------------------------------


def _column(kind: Kind, leaves: Iterator[tuple[Any, ...]], num: int) -> Column:
    """Return the columns of one part of the records, from the next leaves."""
    match kind:
        case ("list", *items):
            return [_column(item, leaves, num) for item in items]
        case ("dict", names, *items):
            return {name: _column(item, leaves, num) for name, item in zip(names, items, strict=True)}
        case ("str",) | ("bytes",):
            return TextColumn(kind[0], list(next(leaves)))
        case ("tensor", dtype, shape):
            return TensorColumn(dtype, (num, *shape), partial(_stack, next(leaves)))
        case ("scalar", dtype):
            return TensorColumn(dtype, (num,), partial(_write_scalars, next(leaves)))
        case _:
            return TensorColumn(_NUMBERS[kind[0]], (num,), partial(_write_numbers, next(leaves)))


def _num_bytes(leaf: Leaf) -> int:
    if isinstance(leaf, bytes):
        return len(leaf)
    return leaf.nbytes if isinstance(leaf, Tensor | np.generic) else _NUMBER_BYTES


def _ordered_as(record: Any, column: Column) -> Column:  # noqa: ANN401 - whatever a record is
    """Return the columns with dict keys in the order of this record."""
    if isinstance(column, dict):
        return {name: _ordered_as(record[name], column[name]) for name in record}
    if isinstance(column, list):
        return [_ordered_as(value, item) for value, item in zip(record, column, strict=True)]
    return column


def _stack(tensors: tuple[Tensor, ...], out: Tensor) -> None:
    torch.stack(tensors, out=out)


def _write_scalars(scalars: tuple[np.generic, ...], out: Tensor) -> None:
    out.copy_(torch.from_numpy(np.array(scalars, dtype=scalars[0].dtype.newbyteorder("="))))


def _write_numbers(numbers: tuple[float, ...], out: Tensor) -> None:
    out.copy_(torch.tensor(numbers, dtype=out.dtype))

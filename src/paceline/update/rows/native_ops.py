"""The operations on rows by `native.c`, a stateless library that is called without the interpreter's lock."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from ctypes import CDLL, c_int64, c_uint32, c_uint64, c_void_p
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor

from paceline.errors import ProtocolBug
from paceline.update.rows.index import NO_SEED, Seed, fresh_seed, num_entries
from paceline.update.rows.torch_ops import TorchOps

# Two suffixes: with one, Python would take it for a module written in C.
LIBRARY: Final = Path(__file__).with_name("native.c.so")

_POINTER: Final = c_void_p
_INDEX: Final = (_POINTER, c_int64, _POINTER, c_int64, c_uint64, c_uint64)  # entries, mask, ids, how many, seed
_VECTOR: Final = (_POINTER, c_int64)  # elements, how many
_MOVE: Final = (_POINTER, c_int64, c_int64, *_VECTOR, _POINTER, c_int64, c_int64)
_SUM: Final = (_POINTER, c_int64, *_VECTOR, *_VECTOR, c_int64)
_FUNCTIONS: Final = {
    "paceline_find": (None, (*_INDEX, *_VECTOR, _POINTER)),
    "paceline_insert": (c_int64, (*_INDEX, *_VECTOR, c_int64, *_VECTOR, _POINTER, _POINTER)),
    "paceline_erase": (c_int64, (*_INDEX, *_VECTOR)),
    "paceline_rebuild": (None, (*_INDEX, _POINTER, c_int64)),
    "paceline_gather": (c_int64, _MOVE),
    "paceline_scatter": (c_int64, _MOVE),
    "paceline_sum_float32": (c_int64, _SUM),
    "paceline_sum_float64": (c_int64, _SUM),
    "paceline_split": (None, (*_VECTOR, c_int64, _POINTER, _POINTER)),
    "paceline_source": (c_uint32, ()),
}


def load_library(path: Path = LIBRARY, functions: Mapping[str, tuple[Any, Sequence[Any]]] = _FUNCTIONS) -> CDLL | str:
    """Return a library that was built with the package, or the reason why it cannot be used.

    A library that was built from another source than the file beside it is refused: its functions may differ.
    `functions`: result and arguments of each that it must have.
    """
    if not path.exists():
        return f"{path} is not there; install a C compiler, and then this package once more"
    try:
        library = CDLL(str(path))
        for name, (result, arguments) in functions.items():
            function = getattr(library, name)  # which the library then keeps, unlike library[name]
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return f"{error}; install this package once more, on this machine"
    source = path.with_suffix("")
    if source.exists() and library.paceline_source() != zlib.crc32(source.read_bytes()):
        return f"{path} was built from another {source.name}; install this package once more"
    return library


@final
class NativeOps:
    """`RowOps` by the library; torch computes the sums of other dtypes than float32 and float64."""

    name: ClassVar[str] = "native"

    def __init__(self, library: CDLL) -> None:
        self._library = library
        self._torch = TorchOps()
        self._sums = {
            torch.float32: library.paceline_sum_float32,
            torch.float64: library.paceline_sum_float64,
        }

    def find(self, entries: Tensor, ids: Tensor, keys: Tensor, seed: Seed = NO_SEED) -> Tensor:
        """See `RowOps.find`."""
        slots = torch.empty_like(keys)
        self._library.paceline_find(*_index(entries, ids, seed), *_vector(keys), slots.data_ptr())
        return slots

    def insert(
        self, entries: Tensor, ids: Tensor, keys: Tensor, next_slot: int, free: Tensor, seed: Seed = NO_SEED
    ) -> tuple[Tensor, Tensor]:
        """See `RowOps.insert`."""
        slots, added = torch.empty_like(keys), torch.empty_like(keys)
        num_added: int = self._library.paceline_insert(
            *_index(entries, ids, seed), *_vector(keys), next_slot, *_vector(free), slots.data_ptr(), added.data_ptr()
        )
        if num_added < 0:
            raise ProtocolBug(f"id {int(keys[-1 - num_added])} gets a slot, but there are no more than {ids.numel()}")
        return slots, added[:num_added]

    def erase(self, entries: Tensor, ids: Tensor, slots: Tensor, seed: Seed = NO_SEED) -> None:
        """See `RowOps.erase`."""
        wrong: int = self._library.paceline_erase(*_index(entries, ids, seed), *_vector(slots))
        _refuse("erased", slots, wrong)

    def rebuild(self, entries: Tensor, ids: Tensor, live: Tensor | None, num_slots: int, seed: Seed = NO_SEED) -> None:
        """See `RowOps.rebuild`."""
        pointer, num_known = (None, num_slots) if live is None else _vector(live, torch.bool)
        num_live = num_slots if live is None else int(live[:num_slots].sum())
        if not 0 <= num_slots <= min(num_known, ids.numel()) or num_live >= entries.numel():
            raise ProtocolBug(
                f"an index of {entries.numel()} entries is made of {num_live} of {num_slots} slots, with {ids.numel()} "
                f"ids and {num_known} marks"
            )
        self._library.paceline_rebuild(*_index(entries, ids, seed), pointer, num_slots)

    def gather(self, column: Tensor, slots: Tensor, out: Tensor) -> None:
        """See `RowOps.gather`."""
        wrong: int = self._library.paceline_gather(*_move(column, slots, out))
        _refuse("read", slots, wrong)

    def scatter(self, column: Tensor, slots: Tensor, rows: Tensor) -> None:
        """See `RowOps.scatter`."""
        wrong: int = self._library.paceline_scatter(*_move(column, slots, rows))
        _refuse("written", slots, wrong)

    def unique(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowOps.unique`."""
        # Inserted into an empty index, the distinct keys are its ids, and `inverse` is the slots.
        pointer, num = _vector(keys)
        size = num_entries(num)
        entries = torch.zeros(size, dtype=torch.int64)
        distinct, inverse, added = torch.empty_like(keys), torch.empty_like(keys), torch.empty_like(keys)
        num_distinct: int = self._library.paceline_insert(
            *(entries.data_ptr(), size - 1, distinct.data_ptr(), num, *fresh_seed()),
            *(pointer, num, 0, None, 0, inverse.data_ptr(), added.data_ptr()),
        )
        return distinct[:num_distinct], inverse

    def sum_rows(self, rows: Tensor, inverse: Tensor, num: int) -> Tensor:
        """See `RowOps.sum_rows`."""
        if rows.dtype not in self._sums:
            return self._torch.sum_rows(rows, inverse, num)
        sums = rows.new_zeros((num, rows.shape[1]))
        stride = _row_stride(rows)
        if inverse.numel() != rows.shape[0]:
            raise ProtocolBug(f"{rows.shape[0]} rows are summed by {inverse.numel()} positions")
        wrong: int = self._sums[rows.dtype](
            rows.data_ptr(), stride, *_vector(inverse), sums.data_ptr(), num, rows.shape[1]
        )
        _refuse("summed", inverse, wrong)
        return sums

    def split(self, keys: Tensor, num_servers: int) -> tuple[Tensor, list[int]]:
        """See `RowOps.split`."""
        if not 0 < num_servers < 1 << 32:
            raise ProtocolBug(f"ids are split among {num_servers} servers")
        order, ends = torch.empty_like(keys), torch.zeros(num_servers, dtype=torch.int64)
        self._library.paceline_split(*_vector(keys), num_servers, order.data_ptr(), ends.data_ptr())
        reached: list[int] = ends.tolist()
        return order, [stop - start for start, stop in pairwise((0, *reached))]


def _index(entries: Tensor, ids: Tensor, seed: Seed) -> tuple[int, ...]:
    pointer, number = _vector(entries)
    if number < 1 or number & (number - 1):
        raise ProtocolBug(f"an index has {number} entries, expected a power of two")
    return pointer, number - 1, *_vector(ids), *seed


def _vector(tensor: Tensor, dtype: torch.dtype = torch.int64) -> tuple[int, int]:
    """Return address and number of elements; the caller keeps the tensor while the library reads it."""
    if tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu or tensor.dim() != 1:
        raise ProtocolBug(
            f"row operations got {tensor.dtype} {tuple(tensor.shape)} by {tensor.stride()} on {tensor.device}, "
            f"expected one contiguous dimension of {dtype} on cpu"
        )
    return tensor.data_ptr(), tensor.numel()


def _row_stride(rows: Tensor) -> int:
    """Return the distance between the starts of rows, in elements."""
    if rows.dim() != 2 or not rows.is_cpu or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise ProtocolBug(f"rows of {tuple(rows.shape)} by {rows.stride()} on {rows.device} are not contiguous on cpu")
    return rows.stride(0)


def _move(column: Tensor, slots: Tensor, rows: Tensor) -> tuple[int, ...]:
    """Return the arguments of gather and scatter."""
    if column.dtype != rows.dtype or rows.shape != (slots.numel(), column.shape[1]):
        raise ProtocolBug(
            f"{slots.numel()} rows of {column.dtype} {tuple(column.shape)} do not fit {rows.dtype} {tuple(rows.shape)}"
        )
    size = rows.element_size()
    return (
        *(column.data_ptr(), _row_stride(column) * size, column.shape[0]),
        *_vector(slots),
        *(rows.data_ptr(), _row_stride(rows) * size, rows.shape[1] * size),
    )


def _refuse(what: str, slots: Tensor, wrong: int) -> None:
    if wrong >= 0:
        raise ProtocolBug(f"row {int(slots[wrong])} is {what}, but there is no such row (position {wrong})")

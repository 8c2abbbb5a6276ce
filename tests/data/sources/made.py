"""Records and batches for tests: drawn, compared, and taken through memory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.data.sources.batch import DTYPES, Batch, BatchLayout, BatchRequest, PreparedBatch, unpack
from paceline.data.sources.collating import collate, flatten
from paceline.data.sources.records import Records

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
SEEDS = st.integers(0, 1 << 20)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits at all, not contiguous where that is possible; truth values are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    size = 2 * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(*shape, 2)[..., 0] if size else torch.empty(shape, dtype=dtype)


def _leaves(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Values of one kind."""
    return {
        "tensor": SEEDS.map(lambda seed: tensor_of(dtype, shape, seed)),
        "array": SEEDS.map(lambda seed: np.random.default_rng(seed).random(shape)[..., None][..., 0]),
        "scalar": st.integers(-100, 100).map(np.int16),
        "int": st.integers(-(1 << 63), (1 << 63) - 1),
        "bool": st.booleans(),
        "float": st.floats(),
        "str": st.text(st.characters(exclude_categories=()), max_size=5),
        "bytes": st.binary(max_size=5),
    }[kind]


@st.composite
def kinds(draw: st.DrawFn) -> st.SearchStrategy[Any]:
    """A strategy whose values are all records of one kind."""
    leaf = st.builds(
        _leaves,
        st.sampled_from(("tensor", "array", "scalar", "int", "bool", "float", "str", "bytes")),
        st.sampled_from(list(DTYPES.values())),
        SHAPES,
    )
    return draw(
        st.recursive(
            leaf,
            lambda parts: (
                st.lists(parts, max_size=3).map(lambda items: st.tuples(*items))
                | st.lists(parts, max_size=3).map(lambda items: st.tuples(*items).map(list))
                | st.dictionaries(st.text(max_size=3), parts, max_size=3).map(st.fixed_dictionaries)
            ),
            max_leaves=6,
        )
    )


@st.composite
def alike(draw: st.DrawFn) -> list[Any]:
    """Records that fit into one batch."""
    return draw(st.lists(draw(kinds()), min_size=1, max_size=4))


def prepared_of(records: list[Any], num_skipped: int = 0) -> PreparedBatch:
    """These records, about to be written."""
    return PreparedBatch(collate([flatten(record) for record in records]), len(records), num_skipped)


def through_memory(prepared: PreparedBatch, *, readonly: bool = False) -> Batch:
    """What another process reads: the layout as it travels, and memory that held something else before."""
    memory = memoryview(bytearray(b"\xa5" * (prepared.size_bytes + 7)))
    prepared.fill(memory)
    layout = msgspec.msgpack.decode(msgspec.msgpack.encode(prepared.layout), type=BatchLayout)
    return unpack(layout, memory.toreadonly() if readonly else memory)


def read(records: Records, *indices: int, epoch: int = 0) -> Batch:
    """The batch of these samples."""
    return through_memory(records.prepare(BatchRequest(epoch, indices)))


def same(one: object, other: object) -> bool:
    """Say whether two contents are equal to the bit; torch gives texts in tuples here and there."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and _bits(one) == _bits(other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

"""What is written into memory is what is read from it, and no layout, however wrong, ends the process that reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.sources.made import alike, prepared_of, same, tensor_of, through_memory
from torch.utils.data import default_collate

from paceline.data.sources.batch import (
    BatchLayout,
    DictPart,
    ListPart,
    Part,
    PreparedBatch,
    TensorPart,
    TextPart,
    unpack,
)
from paceline.errors import PeerError, UsageError

NUMBERS = st.sampled_from((-(1 << 62), -1, 0, 1, 2, 3, 8, 16, 64, 128, 1 << 20, 1 << 47, 1 << 62, 1 << 63))


@given(alike(), st.booleans(), st.integers(0, 3))
@settings(deadline=None, max_examples=150)
def test_a_batch_comes_out_as_torch_would_make_it(records: list[Any], readonly: bool, num_skipped: int) -> None:
    batch = through_memory(prepared_of(records, num_skipped), readonly=readonly)
    assert same(batch.content, default_collate(records))
    assert (batch.num_samples, batch.num_skipped) == (len(records), num_skipped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.uint16, torch.complex128])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (2, 0, 3)])
def test_tensors_of_any_kind(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = [tensor_of(dtype, shape, seed) for seed in range(3)]
    assert same(through_memory(prepared_of(tensors)).content, torch.stack(tensors))


def test_everything_lies_at_a_multiple_of_64_bytes() -> None:
    layout = prepared_of([(1, "a", torch.ones(3, dtype=torch.uint8), b"bc")] * 3).layout
    assert isinstance(layout.content, ListPart)
    assert [part.offset for part in layout.content.items if isinstance(part, TensorPart | TextPart)] == [
        0,
        64,
        128,
        192,
    ]
    assert layout.size_bytes == 192 + 3 * 8 + 6


def test_tensors_are_views_of_the_memory() -> None:
    prepared = prepared_of([1.0, 2.0])
    memory = memoryview(bytearray(prepared.size_bytes))
    prepared.fill(memory)
    content = unpack(prepared.layout, memory).content
    content[0] = 0.0
    assert memory[:8] == bytes(8)
    del memory
    assert content.tolist() == [0.0, 2.0]  # it keeps the memory alive


def test_nothing_but_skipped_records() -> None:
    batch = through_memory(PreparedBatch(None, 0, 5))
    assert (batch.content, batch.num_samples, batch.num_skipped) == (None, 0, 5)


def test_memory_that_is_too_small() -> None:
    with pytest.raises(UsageError, match="16 bytes does not fit into memory of 15"):
        prepared_of([1, 2]).fill(memoryview(bytearray(15)))


# -- layouts that lie ------------------------------------------------------------------------------------------------

RECORDS = [{"x": torch.ones(2), "y": "ab", "z": True}] * 2
HONEST = prepared_of(RECORDS).layout


def changed(change: Callable[[TensorPart, TextPart, TensorPart], tuple[Part, ...]], **fields: Any) -> BatchLayout:
    assert isinstance(HONEST.content, DictPart)
    names = fields.pop("names", HONEST.content.names)
    content = DictPart(names, change(*HONEST.content.items))  # pyright: ignore[reportArgumentType]
    return BatchLayout(
        **{"content": content, "num_samples": 2, "num_skipped": 0, "size_bytes": HONEST.size_bytes, **fields}
    )


def tensor(part: TensorPart, **fields: Any) -> TensorPart:
    return TensorPart(**{"dtype": part.dtype, "shape": part.shape, "offset": part.offset, **fields})


def text(part: TextPart, **fields: Any) -> TextPart:
    found = {"kind": part.kind, "num": part.num, "size_bytes": part.size_bytes, "offset": part.offset}
    return TextPart(**{**found, **fields})


def deep() -> Part:
    part: Part = TensorPart("int64", (2,), 0)
    for _ in range(40):
        part = ListPart((part,))
    return part


LIES: dict[str, tuple[BatchLayout, str]] = {
    "negative offset": (changed(lambda x, y, z: (tensor(x, offset=-64), y, z)), "lies at -64"),
    "overlapping": (changed(lambda x, y, z: (x, y, tensor(z, offset=y.offset))), "lies at 64"),
    "inside another": (changed(lambda x, y, z: (tensor(x, shape=(2, 10)), y, z)), "lies at 64"),
    "beyond the end": (changed(lambda x, y, z: (x, y, tensor(z, offset=1 << 20))), "reach to 1048578"),
    "not aligned": (changed(lambda x, y, z: (x, y, tensor(z, offset=z.offset - 1))), "lies at 127"),
    "huge": (changed(lambda x, y, z: (tensor(x, shape=(2, 1 << 62)), y, z)), "of shape"),
    "huge and empty": (changed(lambda x, y, z: (tensor(x, shape=(2, 0, 1 << 62, 1 << 62)), y, z)), "of shape"),
    "negative size": (changed(lambda x, y, z: (tensor(x, shape=(2, -1)), y, z)), "of shape"),
    "other number of samples": (changed(lambda x, y, z: (tensor(x, shape=(1, 4)), y, z)), "of shape"),
    "no first dimension": (changed(lambda x, y, z: (tensor(x, shape=()), y, z)), "of shape"),
    "many dimensions": (changed(lambda x, y, z: (tensor(x, shape=(2, *[1] * 70)), y, z)), "of shape"),
    "unknown type": (changed(lambda x, y, z: (tensor(x, dtype="qint8"), y, z)), "tensors of 'qint8'"),
    "type of another kind": (changed(lambda x, y, z: (tensor(x, dtype="Tensor"), y, z)), "tensors of 'Tensor'"),
    "fewer texts": (changed(lambda x, y, z: (x, text(y, num=1, size_bytes=2), z)), "1 texts of 2 bytes for 2 samples"),
    "many texts": (changed(lambda x, y, z: (x, text(y, num=1 << 61), z)), "texts of"),
    "negative texts": (changed(lambda x, y, z: (x, text(y, size_bytes=-1), z)), "texts of -1 bytes"),
    "huge texts": (changed(lambda x, y, z: (x, text(y, size_bytes=1 << 60), z)), "lies at 128"),
    "longer texts": (changed(lambda x, y, z: (x, text(y, size_bytes=5), z)), "do not lie"),
    "a part too few": (changed(lambda x, y, z: (x, y)), "3 names for 2 parts"),
    "a name twice": (changed(lambda x, y, z: (x, y, z), names=("x", "y", "x")), "3 names for 3 parts"),
    "no content": (changed(lambda x, y, z: (x, y, z), content=None), "2 samples and no content"),
    "content of nothing": (changed(lambda x, y, z: (x, y, z), num_samples=0), "0 samples and some content"),
    "negative samples": (BatchLayout(None, -1, 0, 0), "-1 samples"),
    "negative skipped": (BatchLayout(None, 0, -1, 0), "skipped -1"),
    "smaller than its parts": (changed(lambda x, y, z: (x, y, z), size_bytes=129), "it takes 129 bytes"),
    "larger than its memory": (changed(lambda x, y, z: (x, y, z), size_bytes=131), "takes 131 bytes, and came in 130"),
    "negative memory": (changed(lambda x, y, z: (x, y, z), size_bytes=-1), "takes -1 bytes"),
    "deep": (BatchLayout(deep(), 2, 0, 16), "deep in each other"),
}


def memory_of(prepared: PreparedBatch) -> memoryview:
    memory = memoryview(bytearray(prepared.size_bytes))
    prepared.fill(memory)
    return memory


@pytest.mark.parametrize("lie", LIES)
def test_a_layout_that_lies_is_refused(lie: str) -> None:
    layout, why = LIES[lie]
    with pytest.raises(PeerError, match=why):
        unpack(layout, memory_of(prepared_of(RECORDS)))


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (64, 0xFF, "one after the other"),
        (71, 0x80, "one after the other"),
        (80, 0xFF, "not valid UTF-8"),
        (128, 2, "bool"),
    ],
)
def test_content_that_lies_is_refused(at: int, value: int, why: str) -> None:
    prepared = prepared_of(RECORDS)
    memory = memory_of(prepared)
    memory[at] = value
    with pytest.raises(PeerError, match=why):
        unpack(prepared.layout, memory)


def parts() -> st.SearchStrategy[Part]:
    shapes = st.lists(NUMBERS, max_size=4).map(tuple)
    tensors = st.builds(TensorPart, st.sampled_from(("float32", "bool", "uint8", "object", "")), shapes, NUMBERS)
    texts = st.builds(TextPart, st.sampled_from(("str", "bytes")), NUMBERS, NUMBERS, NUMBERS)
    return st.recursive(
        tensors | texts,
        lambda inner: (
            st.lists(inner, max_size=3).map(lambda items: ListPart(tuple(items)))
            | st.builds(DictPart, st.lists(st.text(max_size=1), max_size=3).map(tuple), st.lists(inner).map(tuple))
        ),
        max_leaves=5,
    )


@given(st.builds(BatchLayout, parts() | st.none(), NUMBERS, NUMBERS, NUMBERS), st.binary(max_size=300))
@settings(deadline=None, max_examples=300)
def test_any_layout_over_any_memory_is_read_or_refused(layout: BatchLayout, data: bytes) -> None:
    try:
        batch = unpack(layout, memoryview(data))
    except PeerError:
        return
    assert batch.num_samples == layout.num_samples


@given(st.integers(0, 200), st.integers(0, 255), alike())
@settings(deadline=None, max_examples=100)
def test_any_byte_of_a_batch_may_be_wrong(at: int, value: int, records: list[Any]) -> None:
    prepared = prepared_of(records)
    memory = memory_of(prepared)
    if at < len(memory):
        memory[at] = value
    try:
        unpack(prepared.layout, memory)
    except PeerError:
        return

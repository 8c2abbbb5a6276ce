"""Records side by side: which are alike, and what cannot go into a batch."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch
from tests.data.sources.made import prepared_of, same, through_memory

from paceline.data.sources.collating import UnfitRecord, describe, flatten

DEEP: object = []
for _ in range(40):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (None, "NoneType"),
        ({"a": {1, 2}}, "set"),
        ((1, object()), "object"),
        (1j, "complex"),
        (1 << 63, "no int64"),
        ({1: 2}, "key 1"),
        (np.array(["a"]), "array of <U1"),
        (np.array([None]), "array of object"),
        (torch.zeros(2, device="meta"), "on meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros([1] * 40), "40 dimensions"),
        (DEEP, "in each other"),
    ],
)
def test_what_cannot_go_into_a_batch(record: object, why: str) -> None:
    with pytest.raises(UnfitRecord, match=why):
        flatten(record)


def test_what_is_said_of_a_record() -> None:
    record = {"b": [1, 2.0, True, np.int8(3)], "a": (np.zeros((2, 3), np.float32), np.str_("x"), b"y")}
    assert describe(flatten(record).kind) == "{a: [tensor of float32 (2, 3), str, bytes], b: [int, float, bool, int8]}"


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), ("a", b"a"), (torch.ones(2), torch.ones(3)), ([1], [1, 2]), ({"a": 1}, {})]
)
def test_records_that_are_not_alike(one: object, other: object) -> None:
    assert flatten(one).kind != flatten(other).kind


def test_dicts_are_alike_in_whatever_order_they_were_filled() -> None:
    content = through_memory(prepared_of([{"b": 1, "a": 2}, {"a": 3, "b": 4}])).content
    assert same(content, {"b": torch.tensor([1, 4]), "a": torch.tensor([2, 3])})


def test_arrays_as_they_come() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)[::-1, ::2]
    array.flags.writeable = False
    assert same(through_memory(prepared_of([array])).content, torch.tensor([[[3, 5], [0, 2]]], dtype=torch.int32))


def test_an_array_that_runs_backwards() -> None:
    assert same(through_memory(prepared_of([np.arange(3)[::-1]])).content, torch.tensor([[2, 1, 0]]))


def test_a_named_tuple_is_a_tuple_and_a_gradient_is_left_behind() -> None:
    point = namedtuple("point", "x y")
    content = through_memory(prepared_of([point(torch.ones(1, requires_grad=True), 2)])).content
    assert same(content, [torch.ones(1, 1), torch.tensor([2])])
    assert not content[0].requires_grad

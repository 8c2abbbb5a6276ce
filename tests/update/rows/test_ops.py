"""What every kind of row operations promises, and that both give the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.update.rows.trials import AVAILABLE, BOTH, EXTREMES, hashed, keys, placed_at, same_bits, with_hash
from torch import Tensor

from paceline.errors import ProtocolBug, UsageError
from paceline.update.rows import ops as ops_module
from paceline.update.rows.index import NO_SEED, Seed
from paceline.update.rows.native_ops import NativeOps
from paceline.update.rows.ops import RowOps, row_ops
from paceline.update.rows.torch_ops import hash_of

NONE = keys()
SOME_IDS = st.sampled_from(EXTREMES) | st.integers(*EXTREMES[:2]) | st.integers(0, 9)
SOME_KEYS = st.lists(SOME_IDS, max_size=99)


@pytest.fixture(params=BOTH)
def ops(request: pytest.FixtureRequest) -> RowOps:
    return row_ops(request.param)


def empty_index(num_entries: int, num_ids: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_entries, dtype=torch.int64), torch.full((num_ids,), 77)


def on_all(call: Callable[[RowOps], Tensor | tuple[Tensor, ...]]) -> None:
    """Whatever is called gives the same bits by all operations that are there."""
    results = [call(row_ops(name)) for name in AVAILABLE]
    tuples = [result if isinstance(result, tuple) else (result,) for result in results]
    for others in zip(*tuples, strict=True):
        assert all(same_bits(others[0], other) for other in others)


def test_the_hash_is_the_one_that_is_written_down() -> None:
    numbers = [*EXTREMES, 12345, -987654321]
    assert [number % (1 << 64) for number in hash_of(keys(*numbers)).tolist()] == [hashed(n) for n in numbers]
    assert [with_hash(hashed(number)) for number in numbers] == numbers


def test_new_ids_take_slots_in_the_order_they_appear(ops: RowOps) -> None:
    entries, ids = empty_index(16, 8)
    slots, added = ops.insert(entries, ids, keys(5, -5, 5, *EXTREMES[:2], -5), 0, NONE)
    assert slots.tolist() == [0, 1, 0, 2, 3, 1]
    assert added.tolist() == [0, 1, 3, 4]
    assert ids.tolist() == [5, -5, *EXTREMES[:2], 77, 77, 77, 77]
    assert ops.find(entries, ids, keys(EXTREMES[1], 6, -5)).tolist() == [3, -1, 1]


def test_free_slots_go_first_from_their_end(ops: RowOps) -> None:
    entries, ids = empty_index(16, 8)
    ops.insert(entries, ids, keys(1, 2, 3, 4), 0, NONE)
    ops.erase(entries, ids, keys(0, 2))
    free = keys(2, 0)
    slots, added = ops.insert(entries, ids, keys(2, 10, 11, 10, 12), 4, free)
    assert slots.tolist() == [1, 0, 2, 0, 4]
    assert added.tolist() == [1, 2, 4]
    assert free.tolist() == [2, 0]
    assert ops.find(entries, ids, keys(1, 2, 3, 4, 10, 11, 12)).tolist() == [-1, 1, -1, 3, 0, 2, 4]


@pytest.mark.parametrize("home", [0, 9, 15])
def test_ids_of_one_place_are_told_apart_and_found_after_one_goes(ops: RowOps, home: int) -> None:
    colliding = keys(*(placed_at(upper << 32 | home) for upper in (7, 7 + (1 << 31), 8, 9)))
    beside = keys(*(placed_at(5 << 32 | (home + distance) % 16) for distance in (1, 2)))
    same_upper = keys(*(placed_at(7 << 32 | lower << 4 | home) for lower in (1, 2)))
    all_ids = torch.cat((colliding, beside, same_upper))
    for gone in range(8):
        entries, ids = empty_index(16, 8)
        assert ops.insert(entries, ids, all_ids, 0, NONE)[0].tolist() == list(range(8))
        ops.erase(entries, ids, keys(gone))
        assert ops.find(entries, ids, all_ids).tolist() == [-1 if slot == gone else slot for slot in range(8)]
        ops.erase(entries, ids, keys(*(slot for slot in range(8) if slot != gone)))
        assert not entries.any()


def test_rebuilding_finds_what_is_live(ops: RowOps) -> None:
    _, ids = empty_index(1, 8)
    ids[:] = torch.arange(8) * 1000
    for live in (None, torch.arange(6) % 3 > 0):
        entries, _ = empty_index(16, 0)
        ops.rebuild(entries, ids, live, 6)
        expected = [slot if live is None or live[slot] else -1 for slot in range(6)] + [-1, -1]
        assert ops.find(entries, ids, ids).tolist() == expected


def test_erasing_what_is_not_there_is_refused(ops: RowOps) -> None:
    entries, ids = empty_index(16, 8)
    ops.insert(entries, ids, keys(1, 2), 0, NONE)
    for wrong in (keys(5), keys(1, 1)):
        with pytest.raises(ProtocolBug):
            ops.erase(entries, ids, wrong)


def test_nothing_is_a_legal_amount(ops: RowOps) -> None:
    entries, ids = empty_index(4, 4)
    assert ops.find(entries, ids, NONE).tolist() == []
    assert [part.tolist() for part in ops.insert(entries, ids, NONE, 0, NONE)] == [[], []]
    ops.erase(entries, ids, NONE)
    ops.rebuild(entries, ids, None, 0)
    ops.gather(torch.ones(4, 3), NONE, torch.empty(0, 3))
    ops.scatter(torch.ones(4, 3), NONE, torch.empty(0, 3))
    assert [part.tolist() for part in ops.unique(NONE)] == [[], []]
    assert ops.sum_rows(torch.empty(0, 3), NONE, 0).shape == (0, 3)
    order, counts = ops.split(NONE, 3)
    assert (order.tolist(), counts) == ([], [0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_rows_move_and_absent_ones_stay(ops: RowOps, dtype: torch.dtype) -> None:
    column = torch.arange(5 * 3).view(5, 3).to(dtype)
    out = torch.zeros(4, 3, dtype=dtype)
    ops.gather(column, keys(4, -1, 0, 4), out)
    assert out.tolist() == [[12, 13, 14], [0, 0, 0], [0, 1, 2], [12, 13, 14]]
    ops.scatter(column, keys(3, 0), out[:2])
    assert column.tolist() == [[0, 0, 0], [3, 4, 5], [6, 7, 8], [12, 13, 14], [12, 13, 14]]


def test_rows_may_be_parts_of_wider_rows(ops: RowOps) -> None:
    column, out = torch.arange(24.0).view(4, 6), torch.zeros(2, 5)
    ops.gather(column[:, 2:4], keys(3, 1), out[:, 1:3])
    assert out.tolist() == [[0, 20, 21, 0, 0], [0, 8, 9, 0, 0]]
    ops.scatter(column[:, :2], keys(2), out[:1, 1:3])
    assert column[2].tolist() == [20, 21, 14, 15, 16, 17]
    assert ops.sum_rows(out[:, 1:3], keys(0, 0), 1).tolist() == [[28, 30]]


@pytest.mark.parametrize("slot", [4, -2, 1 << 40])
def test_rows_outside_of_a_column_are_refused(ops: RowOps, slot: int) -> None:
    with pytest.raises((ProtocolBug, IndexError, RuntimeError)):
        ops.gather(torch.ones(4, 2), keys(slot), torch.empty(1, 2))
    with pytest.raises((ProtocolBug, IndexError, RuntimeError)):
        ops.scatter(torch.ones(4, 2), keys(slot), torch.empty(1, 2))
    with pytest.raises((ProtocolBug, IndexError, RuntimeError)):
        ops.sum_rows(torch.ones(1, 2), keys(slot), 4)


def test_sums_are_added_in_the_order_given(ops: RowOps) -> None:
    rows = torch.tensor([[1e8], [1.0], [-1e8], [3.0], [1.0]])
    assert ops.sum_rows(rows, keys(1, 1, 1, 0, 1), 3).tolist() == [[3.0], [1.0], [0.0]]


@settings(max_examples=100)
@given(SOME_KEYS)
def test_distinct_keys_come_as_they_first_appear(numbers: list[int]) -> None:
    for name in AVAILABLE:
        distinct, inverse = row_ops(name).unique(keys(*numbers))
        assert distinct.tolist() == list(dict.fromkeys(numbers))
        assert distinct[inverse].tolist() == numbers


@settings(max_examples=100)
@given(SOME_KEYS, st.integers(1, 7))
def test_keys_are_split_by_owner_in_their_order(numbers: list[int], num_servers: int) -> None:
    owners = [(hashed(number) >> 32) * num_servers >> 32 for number in numbers]
    expected = sorted(range(len(numbers)), key=lambda position: owners[position])
    for name in AVAILABLE:
        order, counts = row_ops(name).split(keys(*numbers), num_servers)
        assert order.tolist() == expected
        assert counts == [owners.count(server) for server in range(num_servers)]


@pytest.mark.parametrize("stride", [1, 2, 64, 1 << 20, 1 << 33, -1])
def test_owners_are_balanced_whatever_the_pattern_of_ids(ops: RowOps, stride: int) -> None:
    num_keys, num_servers = 70_000, 7
    _, counts = ops.split(torch.arange(num_keys) * stride, num_servers)
    fair = num_keys / num_servers
    assert all(abs(count - fair) < 5 * fair**0.5 for count in counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("width", [1, 3, 16, 65])
def test_sums_are_the_same_to_the_last_bit(dtype: torch.dtype, width: int) -> None:
    random = torch.Generator().manual_seed(width)
    rows = (torch.randn(5000, width, generator=random) * 100).exp2().nan_to_num(posinf=torch.inf).to(dtype)
    rows[::7] *= -1
    rows[:9] = 0
    for num_sums in (1, 50, 5000):
        inverse = torch.randint(0, num_sums, (5000,), generator=random)
        on_all(lambda ops, inverse=inverse, num=num_sums: ops.sum_rows(rows, inverse, num))


def test_large_calls_give_the_same_to_the_last_bit() -> None:
    random = torch.Generator().manual_seed(0)
    many = torch.randint(-(1 << 63), (1 << 63) - 1, (40_000,), generator=random)
    many = many[(torch.rand(60_000, generator=random) ** 4 * 40_000).long()]

    def grown(ops: RowOps) -> tuple[Tensor, ...]:
        entries, ids = empty_index(1 << 16, 50_000)
        first = ops.insert(entries, ids, many[:30_000], 0, NONE)
        ops.erase(entries, ids, first[0].unique()[::3].contiguous())
        free = first[0].unique()[::3].contiguous()
        second = ops.insert(entries, ids, many, first[1].numel(), free)
        out = torch.full((60_000, 2), -1)
        ops.gather(ids[:, None].repeat(1, 2), ops.find(entries, ids, many.flip(0)), out)
        return *first, *second, out, *ops.unique(many), ops.split(many, 5)[0]

    on_all(grown)


def test_each_search_for_distinct_keys_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    if "native" not in AVAILABLE:
        pytest.skip("torch sorts keys")
    ops, seeds = row_ops("native"), list[Seed]()
    assert isinstance(ops, NativeOps)
    insert = ops._library.paceline_insert

    def watched(*given: Any) -> int:
        seeds.append(given[4:6])
        return insert(*given)

    monkeypatch.setattr(ops._library, "paceline_insert", watched)
    for _ in range(3):
        ops.unique(keys(1, 2, 1))
    assert len({NO_SEED, *seeds}) == 4


def test_tensors_of_another_kind_are_refused() -> None:
    if "native" not in AVAILABLE:
        pytest.skip("torch checks its own tensors")
    ops = row_ops("native")
    entries, ids = empty_index(4, 4)
    for wrong in (keys(1, 2).int(), keys(1, 2, 3)[::2], keys(1)[:, None]):
        with pytest.raises(ProtocolBug, match="expected one contiguous dimension"):
            ops.find(entries, ids, wrong)
    with pytest.raises(ProtocolBug, match="do not fit"):
        ops.gather(torch.ones(4, 2), keys(1), torch.ones(1, 3))
    with pytest.raises(ProtocolBug, match="do not fit"):
        ops.scatter(torch.ones(4, 2), keys(1), torch.ones(1, 2).double())
    with pytest.raises(ProtocolBug, match="not contiguous"):
        ops.gather(torch.ones(2, 4).t(), keys(1), torch.ones(1, 2))
    with pytest.raises(ProtocolBug, match="1 rows are summed by 2"):
        ops.sum_rows(torch.ones(1, 2), keys(0, 0), 1)


def test_operations_are_had_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_ops("torch").name == "torch"
    with pytest.raises(UsageError, match="'fast'; expected 'native', 'torch'"):
        row_ops("fast")
    monkeypatch.setattr(ops_module, "load_library", lambda: "it was not built")
    assert row_ops().name == "torch"
    with pytest.raises(UsageError, match="it was not built"):
        row_ops("native")

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.update.filters import Int8, KeyCache
from paceline.update.filters.key_cache import DIGEST_BYTES, KeyLists, digest, key_lists_of


def test_a_digest_is_of_the_whole_list() -> None:
    # The two are equally long and begin with the same 2048 bytes.
    first = torch.arange(1000)
    second = first.clone()
    second[-1] = -1
    assert torch.equal(first[:256], second[:256])
    assert digest("t", 0, first) != digest("t", 0, second)
    assert digest("t", 0, first) == digest("t", 0, first.clone())
    assert len(digest("t", 0, first)) == DIGEST_BYTES


def test_a_digest_is_of_one_order_one_table_and_one_server() -> None:
    ids = torch.tensor([1, 2, 3])
    others = [
        digest("t", 0, ids.flip(0)),
        digest("t", 0, ids[:2]),
        digest("t", 0, ids[:0]),
        digest("t", 1, ids),
        digest("u", 0, ids),
        digest("", 0, ids),
        digest("t:1", 0, ids),
        digest("t", 0, ids),
    ]
    assert len(set(others)) == len(others)


def test_a_digest_is_of_the_numbers_and_not_of_where_they_lie() -> None:
    ids = torch.arange(20)
    assert digest("t", 0, ids[::2]) == digest("t", 0, ids[::2].clone())


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([1], dtype=torch.int32)])
def test_only_a_list_of_ids_has_a_digest(ids: torch.Tensor) -> None:
    with pytest.raises(UsageError, match=r"expected torch.int64 \[n\]"):
        digest("t", 0, ids)


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 12),
    st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 8)), max_size=40),
)
def test_lists_stay_within_bounds_and_the_least_used_goes(
    max_lists: int, max_ids: int, calls: list[tuple[bool, int, int]]
) -> None:
    lists = KeyLists(max_lists, max_ids)
    model: list[tuple[bytes, int]] = []  # least recently used first
    for put, name, size in calls:
        key = bytes([name])
        held = dict(model)
        if put:
            lists.put(key, torch.zeros(size, dtype=torch.int64))
            model = [(k, n) for k, n in model if k != key]
            model += [(key, size)] if size <= max_ids else []
            while len(model) > max_lists or sum(n for _, n in model) > max_ids:
                model.pop(0)
        else:
            found = lists.get(key)
            assert (None if found is None else len(found)) == held.get(key)
            model.sort(key=lambda entry: entry[0] == key)
        assert len(lists) == len(model) <= max_lists
        assert lists.num_ids == sum(n for _, n in model) <= max_ids


def test_both_ends_take_the_bounds_from_the_table() -> None:
    assert key_lists_of((Int8(),)) is None
    lists = key_lists_of((Int8(), KeyCache(max_lists=1, max_ids=3)))
    assert lists is not None
    lists.put(b"a", torch.arange(3))
    lists.put(b"b", torch.arange(2))
    lists.put(b"c", torch.arange(4))
    assert [lists.get(key) is not None for key in (b"a", b"b", b"c")] == [False, True, False]
    lists.clear()
    assert (len(lists), lists.num_ids) == (0, 0)

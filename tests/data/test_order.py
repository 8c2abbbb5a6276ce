"""The global sequence of batches: its bits are fixed, and batches are made only when they are asked for."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import Batches, EpochOrder


def all_at_once(order: EpochOrder, seed: int, epoch: int) -> list[list[int]]:
    """The same batches, made in the plainest way."""
    indices = list(range(order.num_samples))
    if order.shuffled:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        indices = torch.randperm(order.num_samples, generator=generator).tolist()
    batches = [indices[at : at + order.batch_size] for at in range(0, len(indices), order.batch_size)]
    return [batch for batch in batches if len(batch) == order.batch_size or not order.drop_last]


orders = st.builds(EpochOrder, st.integers(0, 60), st.integers(1, 9), st.booleans(), st.booleans())
ends = st.none() | st.integers(-70, 70)


@given(orders, st.integers(0, 5), st.integers(0, 5), ends, ends, st.none() | st.integers(1, 7))
def test_batches_are_those_of_a_list_of_them(
    order: EpochOrder, seed: int, epoch: int, start: int | None, stop: int | None, step: int | None
) -> None:
    batches, expected = order.batches(seed, epoch), all_at_once(order, seed, epoch)
    assert (list(batches), len(batches)) == (expected, order.num_batches)
    assert list(batches[start:stop:step]) == expected[start:stop:step]
    assert list(batches[start:stop][::step]) == expected[start:stop][::step]


def test_a_shuffle_has_the_bits_that_it_always_had() -> None:
    batches = EpochOrder(num_samples=10, batch_size=4, drop_last=False, shuffled=True).batches(seed=3, epoch=2)
    assert list(batches) == [[4, 6, 9, 0], [8, 5, 1, 2], [3, 7]]


def test_there_is_no_batch_behind_the_last() -> None:
    batches = EpochOrder(num_samples=10, batch_size=4, drop_last=True, shuffled=False).batches(0, 0)
    assert (batches[-1], len(batches)) == ([4, 5, 6, 7], 2)
    with pytest.raises(IndexError):
        batches[2]


def test_millions_of_samples_take_eight_bytes_each_or_none() -> None:
    order = EpochOrder(num_samples=10_000_000, batch_size=100, drop_last=False, shuffled=False)
    batches = order.batches(0, 0)
    assert isinstance(batches[5::7], Batches)
    assert sys.getsizeof(batches) < 200
    assert (len(batches), batches[-1][-1]) == (100_000, 9_999_999)

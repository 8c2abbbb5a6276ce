"""First values: a function of seed, id and column alone, the same wherever and however they are asked for."""

import math

import pytest
import torch
from torch import Tensor

from paceline.update.rows.initializers import first_rows
from paceline.update.rows.spec import First

EXTREME = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**53 + 1, -7])
RANDOM = [First("uniform", 0.5, seed=3), First("normal", 0.5, seed=3)]
MASK = 2**64 - 1


def mixed(number: int) -> int:
    """The finalizer of splitmix64, in Python's own integers."""
    number &= MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def expected(first: First, row: int, column: int) -> float:
    odd = 0x9E3779B97F4A7C15
    bits = mixed(mixed((row & MASK) ^ mixed(first.seed + odd)) + (column + 1) * odd)
    if first.kind == "uniform":
        return ((bits >> 11) * 2.0**-52 - 1) * first.scale
    more = mixed(bits + odd)
    steps = (bits.bit_count() - 32) * 2**32 + (more >> 32) + (more & 0xFFFFFFFF) + 1 - 2**32
    return steps * (2.0**-32 / math.sqrt(16 + 1 / 6)) * first.scale


def drawn(first: First, ids: Tensor, width: int = 4) -> Tensor:
    return first_rows(first, ids, width, torch.float64)


@pytest.mark.parametrize("seed", [0, 3, -1, 2**63, 2**70 + 5])
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_every_number_is_the_one_that_its_integers_give(kind: str, seed: int) -> None:
    first = First(kind, 0.7, seed)
    rows = drawn(first, EXTREME)
    assert rows.tolist() == [[expected(first, row, column) for column in range(4)] for row in EXTREME.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("first", [*RANDOM, First(), First("constant", 0.1)], ids=repr)
def test_other_dtypes_get_the_same_numbers_rounded(first: First, dtype: torch.dtype) -> None:
    rows = first_rows(first, EXTREME, 5, dtype)
    assert rows.dtype == dtype
    assert rows.shape == (len(EXTREME), 5)
    assert torch.equal(rows, drawn(first, EXTREME, 5).to(dtype))


@pytest.mark.parametrize("first", RANDOM, ids=lambda first: first.kind)
def test_neither_order_nor_other_ids_nor_width_matters(first: First) -> None:
    ids = torch.cat([EXTREME, torch.arange(5000) * 977, EXTREME])
    rows = drawn(first, ids, 16)  # more than one block
    shuffle = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn(first, ids[shuffle], 16), rows[shuffle])
    assert torch.equal(torch.cat([drawn(first, part, 16) for part in ids.split(7)]), rows)
    assert torch.equal(drawn(first, ids, 3), rows[:, :3])
    assert torch.equal(rows[: len(EXTREME)], rows[-len(EXTREME) :])
    assert torch.equal(ids[: len(EXTREME)], EXTREME)  # what was given is as it was


@pytest.mark.parametrize("first", RANDOM, ids=lambda first: first.kind)
def test_no_ids_have_no_rows(first: First) -> None:
    assert drawn(first, torch.empty(0, dtype=torch.int64)).shape == (0, 4)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("ids", [torch.arange(20_000), torch.arange(20_000) << 40, -torch.arange(20_000)], ids=len)
def test_moments_are_those_of_the_distribution(kind: str, ids: Tensor) -> None:
    rows = drawn(First(kind, 2.0, seed=11), ids, 16)
    deviation = 2.0 if kind == "normal" else 2.0 / math.sqrt(3)
    kurtosis = 3 - 0.03 if kind == "normal" else 1.8
    numbers = rows.flatten() / deviation
    noise = len(numbers) ** -0.5
    assert abs(numbers.mean()) < 5 * noise
    assert abs(numbers.var() - 1) < 5 * noise * math.sqrt(kurtosis - 1)
    assert abs((numbers**3).mean()) < 5 * noise * 4
    assert abs((numbers**4).mean() - kurtosis) < 5 * noise * 10
    neighbours = torch.corrcoef(rows.T) - torch.eye(16)
    assert neighbours.abs().max() < 6 * len(rows) ** -0.5
    assert abs((numbers[:-16] * numbers[16:]).mean()) < 5 * noise


def test_normal_numbers_fall_where_they_should() -> None:
    numbers = drawn(First("normal", 1.0), torch.arange(50_000), 8).flatten()
    for point in (-2.5, -1.0, -0.3, 0.0, 0.5, 1.5, 3.0):
        share = 0.5 * (1 + math.erf(point / math.sqrt(2)))
        assert abs((numbers < point).double().mean() - share) < 0.003


def test_uniform_numbers_stay_in_their_range() -> None:
    numbers = drawn(First("uniform", 0.25), torch.arange(50_000), 8)
    assert -0.25 <= numbers.min() < -0.2499
    assert 0.2499 < numbers.max() < 0.25


def test_seeds_make_different_rows() -> None:
    rows = torch.stack([drawn(First("normal", 1.0, seed), torch.arange(1000)).flatten() for seed in range(4)])
    assert (torch.corrcoef(rows) - torch.eye(4)).abs().max() < 0.1

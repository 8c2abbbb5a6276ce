"""Factors of gradients: which gradients they stand for, and how they travel beside the rest of a push."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.core.partition import Range, partition
from paceline.update.factors import Factors, matrix_parts, pack, packed_elements, unpack
from paceline.update.rules import RuleSpec
from paceline.update.table import Segment, TableSpec

SPEC = TableSpec(
    "w",
    (
        Segment("bias", (5,)),
        Segment("first", (40, 30)),
        Segment("norm", (2, 3, 4)),
        Segment("second", (30, 50)),
        Segment("none", (0, 7)),
        Segment("last", (3,)),
    ),
    "float32",
    RuleSpec("add", ({},)),
    "bsp",
    "sum",
    "reject",
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def factors_of(num_rows: int, num_columns: int, num: int, dtype: torch.dtype = torch.float32) -> Factors:
    return Factors(random(num, num_rows, dtype=dtype), random(num, num_columns, seed=1, dtype=dtype))


SHAPES = ((3, 2, 1), (64, 64, 8), (100, 97, 7), (128, 1001, 32), (1, 4096, 3), (300, 1, 2), (50, 60, 0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_positive", [False, True])
def test_factors_explain_their_product_however_it_is_summed(
    shape: tuple[int, int, int], dtype: torch.dtype, is_positive: bool
) -> None:
    made = factors_of(*shape, dtype)
    factors = Factors(made.outputs.abs(), made.inputs.abs()) if is_positive else made
    half = len(factors.inputs) // 2
    halves = [Factors(factors.outputs[part], factors.inputs[part]) for part in (slice(half), slice(half, None))]
    assert factors.explain(factors.product())
    assert factors.explain(halves[1].product() + halves[0].product())
    assert factors.explain(factors.product().t().contiguous().t())
    assert factors.explain((factors.product() * 1e-30) * 1e30)


@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_factors_do_not_explain_what_they_lack(shape: tuple[int, int, int]) -> None:
    factors = factors_of(*shape)
    gradient, weight = factors.product(), random(*shape[:2], seed=2)
    one_row = torch.zeros_like(gradient)
    one_row[0] = weight[0]
    for other in (gradient + 1e-4 * weight, 0.999 * gradient, gradient + 1e-2 * one_row, torch.zeros_like(gradient)):
        assert not factors.explain(other)
    one_row[0, 0] = torch.nan
    assert not factors.explain(gradient + one_row)
    assert not factors.explain(gradient + torch.inf)


def test_the_look_at_a_gradient_leaves_random_numbers_as_they_are() -> None:
    before, factors = torch.get_rng_state(), factors_of(4, 4, 2)
    factors.explain(factors.product())
    assert torch.equal(torch.get_rng_state(), before)


def parts_of_servers(num_servers: int) -> tuple[Range, ...]:
    return partition([segment.numel for segment in SPEC.segments], num_servers)


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
@pytest.mark.parametrize("indices", [(1,), (3,), (1, 3)], ids=str)
def test_what_is_packed_for_all_servers_is_the_gradient(num_servers: int, indices: tuple[int, ...]) -> None:
    factors = {index: factors_of(*SPEC.segments[index].shape, num=index + 1) for index in indices}
    whole = random(SPEC.numel, seed=3)
    for index, each in factors.items():
        start = SPEC.offsets[index]
        whole[start : start + each.product().numel()] = each.product().view(-1)
    for span in parts_of_servers(num_servers):
        parts, gradient = matrix_parts(SPEC, span), whole[span.start : span.stop]
        here = {index: each for index, each in factors.items() if index in parts}
        num_samples = {index: each.num_samples for index, each in here.items()}
        body, found = pack(gradient, parts, here), torch.full_like(gradient, torch.nan)
        assert body.numel() == packed_elements(span.length, parts, num_samples)
        unpack(body, parts, num_samples, found)
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-6)
        outside = torch.ones(span.length, dtype=torch.bool)
        for index in here:
            outside[parts[index].offset : parts[index].offset + parts[index].numel] = False
        assert torch.equal(found[outside], gradient[outside])


def test_only_matrices_with_elements_have_factors() -> None:
    (whole,) = parts_of_servers(1)
    assert list(matrix_parts(SPEC, whole)) == [1, 3]
    assert list(matrix_parts(SPEC, Range(0, 0, 5))) == []


def test_a_sliver_of_a_row_is_smaller_than_its_factors() -> None:
    (part,) = matrix_parts(SPEC, Range(0, 0, 25)).values()
    assert (part.num_rows, part.is_smaller(1)) == (1, False)
    (part,) = matrix_parts(SPEC, Range(0, 20, 5 + 40 * 30)).values()
    assert (part.skipped, part.num_rows) == (15, 40)
    assert part.is_smaller(16)
    assert not part.is_smaller(17)  # 17 * (40 + 30) = 1190 of 1185 elements

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.update.filters import Cast, FilterSpec, Int8
from paceline.update.filters.encoding import codec_of

CODECS: list[tuple[FilterSpec, ...]] = [(), (Cast("bfloat16"),), (Cast("float16"),), (Int8(),)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def there_and_back(rows: Tensor, filters: tuple[FilterSpec, ...]) -> Tensor:
    codec = codec_of(filters, "push")
    encoded = codec.encode(rows)
    assert (encoded.dtype, encoded.shape) == (torch.uint8, (len(rows), codec.row_bytes(rows.shape[1], rows.dtype)))
    decoded = codec.decode(encoded, rows.shape[1], rows.dtype)
    assert (decoded.dtype, decoded.shape) == (rows.dtype, rows.shape)
    return decoded


@pytest.mark.parametrize("filters", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_rounded_off_makes_up_the_difference_exactly(
    filters: tuple[FilterSpec, ...], dtype: torch.dtype
) -> None:
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        rows = (torch.randn(31, 5, generator=random) * 10.0 ** torch.randint(-3, 4, (31, 1), generator=random)).to(
            dtype
        )
        decoded = there_and_back(rows, filters)
        assert torch.equal(decoded + (rows - decoded), rows)


@settings(deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=6, max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_a_byte_is_off_by_half_a_step_at_most(numbers: list[float], dtype: torch.dtype) -> None:
    rows = torch.tensor(numbers, dtype=dtype).view(2, 3)
    step = rows.abs().amax(dim=1, keepdim=True).double() / 127
    error = (there_and_back(rows, (Int8(),)).double() - rows.double()).abs()
    # The scale itself is a float32, and has only few digits next to the smallest of these.
    assert (error <= step * (0.5 + 1e-4) + 1e-43).all()


@pytest.mark.parametrize("filters", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_finite_stays_finite(filters: tuple[FilterSpec, ...], dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    rows = torch.tensor([[most, -most], [torch.finfo(dtype).tiny, 0.0], [0.0, -0.0]], dtype=dtype)
    decoded = there_and_back(rows, filters)
    assert decoded.isfinite().all()
    assert torch.equal(decoded[0].sign(), rows[0].sign())
    assert not decoded[2].any()


def test_float16_saturates() -> None:
    rows = torch.tensor([[1e6, -1e6, 65504.0, 1.0]])
    assert there_and_back(rows, (Cast("float16"),)).tolist() == [[65504.0, -65504.0, 65504.0, 1.0]]


@pytest.mark.parametrize("filters", CODECS, ids=str)
@pytest.mark.parametrize("wild", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_harms_no_other_row(filters: tuple[FilterSpec, ...], wild: float) -> None:
    rows = torch.tensor([[1.0, 2.0], [wild, 1.0], [0.5, 0.25]])
    decoded = there_and_back(rows, filters)
    assert decoded.isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("filters", CODECS, ids=str)
def test_no_rows_are_no_bytes(filters: tuple[FilterSpec, ...]) -> None:
    assert len(there_and_back(torch.empty(0, 3), filters)) == 0


@pytest.mark.parametrize("filters", CODECS, ids=str)
@pytest.mark.parametrize("start", [0, 1, 4])
def test_bytes_may_lie_anywhere(filters: tuple[FilterSpec, ...], start: int) -> None:
    rows = torch.arange(12, dtype=torch.float64).view(4, 3)
    codec = codec_of(filters, "pull")
    encoded = codec.encode(rows)
    frame = torch.zeros(start + encoded.numel(), dtype=torch.uint8)
    frame[start:] = encoded.flatten()
    moved = frame[start:].view(encoded.shape)
    assert torch.equal(codec.decode(moved, 3, rows.dtype), codec.decode(encoded, 3, rows.dtype))


def test_each_direction_has_its_own() -> None:
    filters = (Int8(on="push"), Cast("bfloat16", on="pull"))
    assert codec_of(filters, "push").row_bytes(16, torch.float32) == 20
    assert codec_of(filters, "pull").row_bytes(16, torch.float32) == 32
    assert codec_of(filters[:1], "pull").row_bytes(16, torch.float32) == 64

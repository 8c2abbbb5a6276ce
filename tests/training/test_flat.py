"""Tensors laid end to end, whatever their memory looks like."""

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.training.flat import FlatParameters, segments_of


def test_values_travel_in_the_order_of_the_tensors() -> None:
    wide = torch.arange(6.0).view(2, 3).T.clone(memory_format=torch.preserve_format)
    assert not wide.is_contiguous()
    tensors = {
        "wide": nn.Parameter(wide),
        "without": nn.Parameter(torch.ones(2)),
        "scalar": nn.Parameter(torch.ones(())),
    }
    flat = FlatParameters.over(tensors)
    out = torch.full((9,), torch.nan)
    flat.pack_values(out)
    assert out.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 1.0, 1.0, 1.0]
    flat.unpack(torch.arange(9.0))
    assert tensors["wide"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert tensors["scalar"].item() == 8.0


@pytest.mark.parametrize("tensors", [{}, {"a": torch.zeros(2, dtype=torch.int64)}])
def test_what_has_no_floating_point_type_is_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UsageError, match="expected one of float32, float64, bfloat16, float16 for all"):
        FlatParameters.over(tensors)


def test_parameters_are_called_what_the_model_calls_them_or_else_the_optimizer() -> None:
    model = nn.Linear(2, 1)
    stranger = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [stranger]}], lr=0.1)
    assert list(segments_of(optimizer, model)[0]) == ["weight", "bias", "group1.0"]
    assert list(segments_of(optimizer, None)[0]) == ["group0.0", "group0.1", "group1.0"]
    named = torch.optim.SGD(model.named_parameters(prefix="layer"), lr=0.1)
    assert list(segments_of(named, None)[0]) == ["layer.weight", "layer.bias"]
    assert [segment.group for segment in segments_of(optimizer, model)[1]] == [0, 0, 1]


def test_two_parameters_of_one_name_are_refused() -> None:
    groups = [{"params": list(nn.Linear(2, 1).named_parameters())} for _ in range(2)]
    with pytest.raises(UsageError, match="two parameters of the name 'weight'"):
        segments_of(torch.optim.SGD(groups, lr=0.1), None)


def test_complex_parameters_are_refused_with_a_way_to_train_them() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    named, _ = segments_of(torch.optim.SGD([parameter], lr=0.1), None)
    with pytest.raises(UsageError, match=r"complex64 \('group0.0'\).*view_as_real.*is parameter 0 of group 0 of the"):
        FlatParameters.over(named)

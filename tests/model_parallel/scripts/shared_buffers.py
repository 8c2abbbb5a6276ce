"""Two stages of a model whose layers share a buffer: they may read it, and not change it."""

import copy

import pytest
import torch
from models import EXACT, batch
from torch import Tensor, nn

import paceline
from paceline.errors import UsageError

paceline.init()
torch.manual_seed(3)  # the same model on both
rank = paceline.rank()
inputs, classes = batch(12, 4)
entropy = nn.functional.cross_entropy


class Scaled(nn.Linear):
    """A layer with a buffer that it only reads."""

    def __init__(self, scale: Tensor, *size: int) -> None:
        super().__init__(*size, dtype=scale.dtype)
        self.register_buffer("scale", scale)

    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given) * self.scale


scale = torch.tensor(0.5, dtype=torch.float64)
whole = nn.Sequential(Scaled(scale, 4, 6), nn.Tanh(), Scaled(scale, 6, 5))
part = paceline.parallelize(copy.deepcopy(whole), loss=entropy, placement=[2])
assert part.forward_backward(inputs, classes) == pytest.approx(entropy(whole(inputs), classes).item())
torch.testing.assert_close(part(inputs), whole(inputs), **EXACT)
print("equal where it is read")

norm = nn.BatchNorm1d(4, affine=False)
twice = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 5)).double()
part = paceline.parallelize(twice, loss=entropy, placement=[2])
both = "'1.running_mean' of stage 0", "'3.running_mean' of stage 1"
told = f"{both[rank]} and {both[1 - rank]} are one buffer, which training changes"
with pytest.raises(UsageError, match=told):
    part.forward_backward(inputs, classes)
print("equal refusals where it is changed")

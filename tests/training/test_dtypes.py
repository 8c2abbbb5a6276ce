"""Models in each dtype of tables, and in several at once, learn what one process learns with them."""

from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import seeded, sgd
from torch import Tensor, nn

import paceline
from paceline.api.session import Session

STRATEGIES = ["bsp", "all-reduce", "local-sgd:1"]


class Normalised(nn.Module):
    """A layer in bfloat16, and one in float32 that norms what comes of it, as models have that are trained in half."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 4).bfloat16()
        self.norm = nn.LayerNorm(4)

    def forward(self, batch: Tensor) -> Tensor:
        return self.norm(self.layer(batch.bfloat16()).float())


def learned(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> list[Tensor]:
    """Take steps with the same batches on every worker, whose mean they are."""
    for batch in torch.randn(12, 9, generator=torch.Generator().manual_seed(7)).to(dtype).split(4):
        optimizer.zero_grad()
        model(batch).square().sum(1).mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def require_same(found: list[Tensor], expected: list[Tensor], strategy: object, coarsest: torch.dtype) -> None:
    """To the bit, but that local SGD adds the changes of values, which rounds them once more each step."""
    rounding = 8 * torch.finfo(coarsest).eps if strategy == "local-sgd:1" else 0.0
    for one, plain in zip(found, expected, strict=True):
        assert one.dtype == plain.dtype
        torch.testing.assert_close(one, plain, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_model_in_one_dtype(tmp_path: Path, dtype: torch.dtype, strategy: str) -> None:
    def made() -> nn.Module:
        return seeded(lambda: nn.Linear(9, 4)).to(dtype)

    def work(worker: Session) -> list[Tensor]:
        model = made()
        return learned(model, paceline.distributed(sgd(model), model=model, strategy=strategy), dtype)

    alone = made()
    expected = learned(alone, sgd(alone), dtype)
    for found in run_job(tmp_path, work, workers=2):
        require_same(found, expected, strategy, dtype)


@pytest.mark.parametrize("strategy", [*STRATEGIES, {"norm.*": "bsp", "*": "bsp"}])
def test_a_model_of_several_dtypes_has_a_table_for_each(tmp_path: Path, strategy: str | dict[str, str]) -> None:
    def work(worker: Session) -> tuple[list[Tensor], str]:
        model = seeded(Normalised)
        optimizer = paceline.distributed(sgd(model), model=model, strategy=strategy)
        return learned(model, optimizer, torch.float32), repr(optimizer)

    alone = seeded(Normalised)
    expected = learned(alone, sgd(alone), torch.float32)
    for found, shown in run_job(tmp_path, work, workers=2):
        assert ".bfloat16: " in shown
        assert ".float32: " in shown
        require_same(found, expected, strategy, torch.bfloat16)
